"""A graph with a scripted model: stopped, closed on its thread, and resumed."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from budgetguard_core import Budget
from budgetguard_core.testing.scripted import Answers
from budgetguard_langgraph import bounded, outcome, resume, scripted

PAGES = ["page 1 of 4", "page 2 of 4", "page 3 of 4", "page 4 of 4"]
READS = [{"read_page": {"number": number}} for number in range(1, len(PAGES) + 1)]


@tool
def read_page(number: int) -> str:
    """Read one page of the report."""
    print(f"  reading page {number}")
    return PAGES[number - 1]


def build() -> Any:
    # In place of `ChatOpenAI(model="gpt-4o")`.
    model = scripted.scripted_model(Answers([*READS, "The report has four pages."]))
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([read_page]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition, ["tools", END])
    graph.add_edge("tools", "agent")
    return graph.compile(checkpointer=InMemorySaver())


def main() -> None:
    graph = build()
    thread = {"configurable": {"thread_id": "report"}}

    print("Under a budget that is too small:")
    question = {"messages": [("user", "How many pages has the report?")]}
    result = bounded(graph, Budget(max_iterations=2, max_cost_usd=0.10)).invoke(question, thread)
    print(f"  {result['stop_reason']}: {result['messages'][-1].content}")

    print("Resumed under a fresh one:")
    result = resume(graph, thread, Budget(max_iterations=10, max_cost_usd=0.10))
    ended = outcome(result)
    if ended is not None:
        print(f"  {ended.status}: {ended.final}")
        print(f"  {ended.usage.model_calls} model calls, {ended.usage.cost_usd} US dollars")


if __name__ == "__main__":
    main()
