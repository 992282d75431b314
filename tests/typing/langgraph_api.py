"""The LangGraph adapter as its README writes it: type-checked by mypy and pyright, never run."""

# LangGraph's own annotations are open in places; nothing of ours is.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from budgetguard_core import Budget, BudgetExceeded, Guard, Outcome
from budgetguard_core.guard import WarningEvent
from budgetguard_core.kit import Envelope
from budgetguard_core.ledger import Ledger
from budgetguard_langgraph import (
    BudgetCallback,
    BudgetMiddleware,
    aresume,
    bounded,
    outcome,
    resume,
)


def ask(guard: Guard, warning: WarningEvent) -> None:
    guard.extend(max_cost_usd=2)


def act(state: MessagesState) -> MessagesState:
    return state


config: RunnableConfig = {"configurable": {"thread_id": "1", "tenant": "acme"}}
builder = StateGraph(MessagesState)
builder.add_node("act", act)
builder.add_edge(START, "act")
compiled = builder.compile(checkpointer=InMemorySaver())
# The same type: what it takes and returns is checked as before.
graph = bounded(compiled, Budget(max_iterations=25, max_cost_usd=0.50, max_seconds=120))
graph = bounded(compiled, Guard(Budget()))
graph = bounded(compiled, Budget(max_cost_usd=1), on_warning=ask, on_trip="raise", grace=1.0)
result = graph.invoke({"messages": []}, config)
reached: Outcome = outcome(result)
again: Any = resume(graph, config, Budget(max_iterations=25))

with Ledger("sqlite:///ledger.sqlite3", daily_tokens=500) as ledger:
    envelope = Envelope(
        budget=Budget(max_iterations=25),
        ledger=ledger,
        tenant=lambda config: config["configurable"]["tenant"],
    )
    graph = bounded(compiled, envelope)

callback = BudgetCallback(Guard(Budget(max_model_calls=10)))
linked: RunnableConfig = {**config, "callbacks": [callback]}
graph.invoke({"messages": []}, linked)
found: Outcome | None = callback.outcome


async def stream(model: BaseChatModel) -> Any:
    agent = bounded(create_agent(model, middleware=[BudgetMiddleware(Budget())]), Guard(Budget()))
    async for mode, _ in agent.astream(
        {"messages": []}, config, stream_mode=["messages", "values"]
    ):
        print(mode)
    try:
        await agent.ainvoke({"messages": []}, config)
    except BudgetExceeded as stop:
        print(stop.trip.reason, stop.outcome)
    return await aresume(agent, config, Budget(max_iterations=25))


bounded(compiled, Budget(), on_trip="never")  # type: ignore[call-overload]
bounded(builder, Budget())  # type: ignore[call-overload]
bounded(compiled)  # type: ignore[call-overload]
bounded(compiled, profile="research")
resume(compiled, "1", Budget())  # type: ignore[arg-type]
resume(builder, config, Budget())  # type: ignore[arg-type]
