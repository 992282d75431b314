"""Approval by a person: the run waits in its thread, and goes on under the same counters.

A refund needs a word of a person. The time until the answer is not run time, the answer is given to
another object (as in another process), and a cap that was nearly used up still holds afterwards.
"""

from __future__ import annotations

import logging
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from budgetguard_core import Budget
from budgetguard_core.testing.scripted import Answers
from budgetguard_langgraph import bounded, outcome, scripted

ACCOUNT = {"refunded": 0}


@tool
def refund(order: str, euros: int) -> str:
    """Refund an order, after a person has approved it."""
    answer = interrupt({"question": f"Refund {euros} euros for order {order}?"})
    if answer != "yes":
        return "A person declined this refund."
    ACCOUNT["refunded"] += euros
    return f"{euros} euros were refunded."


def build(saver: InMemorySaver) -> Any:
    """Build the agent anew, as a process does that takes up the answer."""
    asks = [{"refund": {"order": f"A-{number}", "euros": 20 * number}} for number in (1, 2, 3)]
    model = scripted.scripted_model(Answers([*asks, "Everything is refunded."]))
    agent = create_agent(model, tools=[refund], checkpointer=saver)
    return bounded(agent, Budget(max_tool_calls=2, max_seconds=60))


def main() -> None:
    logging.getLogger("budgetguard").setLevel(logging.ERROR)
    saver = InMemorySaver()  # a PostgresSaver outlives the process
    agent = build(saver)
    thread = {"configurable": {"thread_id": "complaint-7"}}
    result = agent.invoke({"messages": [("user", "Refund my three orders.")]}, thread)
    for answer in ("yes", "yes"):
        (question,) = result["__interrupt__"]
        print(f"{outcome(result).status}: {question.value['question']} -> {answer}")
        result = agent.invoke(Command(resume=answer), thread)
    print(f"{result['stop_reason']}: {outcome(result).usage.tool_calls} tool calls")
    print(f"{ACCOUNT['refunded']} euros were refunded")


if __name__ == "__main__":
    main()
