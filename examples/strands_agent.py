"""A Strands agent that is stopped and goes on under a fresh budget; and a runaway, streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from strands import Agent, tool
from strands.models import Model

from budgetguard_core import Budget
from budgetguard_strands import BudgetHookProvider

PAGES = ["page 1 of 4", "page 2 of 4", "page 3 of 4", "page 4 of 4"]


class Scripted(Model):
    """Stands in for a real model: asks for one page after the other, or never stops asking."""

    def __init__(self, *, pages: int) -> None:
        self.pages = pages
        self.config = {"model_id": "gpt-4o"}

    def update_config(self, **model_config: Any) -> None:
        self.config.update(model_config)

    def get_config(self) -> Any:
        return self.config

    def structured_output(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError

    async def stream(self, messages: Any, *_args: Any, **_kwargs: Any) -> AsyncIterator[Any]:
        results = [block for m in messages for block in m["content"] if "toolResult" in block]
        turn = len(results)
        yield {"messageStart": {"role": "assistant"}}
        if turn == self.pages:
            yield {"contentBlockDelta": {"delta": {"text": "The report has four pages."}}}
        else:
            use = {"name": "read_page", "toolUseId": f"call_{turn}"}
            arguments = json.dumps({"number": turn % len(PAGES) + 1})
            yield {"contentBlockStart": {"start": {"toolUse": use}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": arguments}}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if turn == self.pages else "tool_use"}}
        usage = {"inputTokens": 400 + 150 * turn, "outputTokens": 40}
        usage["totalTokens"] = sum(usage.values())
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}


@tool
def read_page(number: int) -> str:
    """Read one page of the report."""
    print(f"  reading page {number}")
    return PAGES[number - 1]


async def stream(agent: Agent) -> None:
    """Every way in is bounded alike; a stream also carries the warnings."""
    async for event in agent.stream_async("And once more, from the beginning."):
        if "budgetguard_warning" in event:
            warning = event["budgetguard_warning"]
            print(f"  warning: {warning['used']} of {warning['limit']} {warning['dimension']}")
        elif "result" in event:
            print(f"  {event['result'].stop_reason}")


def main() -> None:
    print("Under a budget that is too small:")
    provider = BudgetHookProvider(Budget(max_iterations=2, max_cost_usd=0.10))
    agent = Agent(
        model=Scripted(pages=len(PAGES)),
        tools=[read_page],
        hooks=[provider],
        callback_handler=None,
    )
    result = agent("How many pages has the report?")
    print(f"  {result.stop_reason}: {result}".rstrip())

    print("Going on under a fresh one:")
    result = agent(None, invocation_state={"budgetguard": Budget(max_iterations=10)})
    print(f"  {result.stop_reason}: {result}".rstrip())
    outcome = provider.outcome(agent)
    if outcome is not None:
        both = outcome.earlier_usage + outcome.usage
        print(f"  {both.model_calls} model calls in all, {both.cost_usd} US dollars")

    print("A model that never stops, streamed:")
    runaway = Agent(
        model=Scripted(pages=-1),
        tools=[read_page],
        hooks=[BudgetHookProvider(Budget(max_iterations=4))],
        callback_handler=None,
    )
    asyncio.run(stream(runaway))


if __name__ == "__main__":
    main()
