"""The API as users annotate it: type-checked by mypy and pyright, never run.

A line that must be refused carries an ignore comment; a checker that stops refusing it reports the
comment as unused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from budgetguard_core import (
    Budget,
    Guard,
    JsonLinesSink,
    LoopDetection,
    MemoryStore,
    Mode,
    Outcome,
    Price,
    PriceBook,
    SqliteStore,
    StopReason,
    after_iterations,
    read_events,
    replay,
    tool_called,
)
from budgetguard_core.kit import (
    Admit,
    Event,
    ModelCall,
    Nudge,
    Refuse,
    Stop,
    TokenUsage,
    ToolCall,
)
from budgetguard_loop import (
    ModelReply,
    bounded,
    guarded,
    run_bounded,
    run_bounded_async,
    run_bounded_stream,
)


def when(guard: Guard) -> str | None:
    return "enough" if guard.usage.iterations > 3 else None


budget = Budget(
    max_iterations=25,
    max_seconds=1.5,
    max_cost_usd=Decimal("0.30"),
    tool_quotas={"search_web": 3},
    stop_when=(tool_called("submit") & after_iterations(2), when),
    loop_detection=LoopDetection(exempt=("wait",)),
)
gaps: tuple[str, ...] = budget.uncapped()
Budget(max_cost_usd=0.5, loop_detection=None, stop_when=[when])
Budget(max_iteration=25)  # type: ignore[call-arg]
Budget(max_iterations="25")  # type: ignore[arg-type]
Budget(25)  # type: ignore[call-arg]
Budget(on_unpriced="ignore")  # type: ignore[arg-type]
LoopDetection(stop_after=5, exempt=["wait"], ignore_results=("elapsed_ms",))
LoopDetection(stop=5)  # type: ignore[call-arg]
LoopDetection(stop_after="5")  # type: ignore[arg-type]


def listen(event: Event) -> None:
    print(event.seq, event.run_id)


guard = Guard(
    budget,
    mode=Mode.OBSERVE,
    sinks=[listen, JsonLinesSink("run.jsonl")],
    price_book=PriceBook({"house-model": Price(input=1, output=2)}),
)
Guard(budget, mode="observe")
Guard(budget, mode="watch")  # type: ignore[arg-type]
child: Guard = guard.child(Budget(max_tool_calls=3))
guard.extend(max_iterations=40, max_seconds=90, max_cost_usd=Decimal(2))
guard.extend(max_iteration=40)  # type: ignore[call-arg]
guard.extend(max_iterations="40")  # type: ignore[arg-type]
guard.extend(max_iterations=None)  # type: ignore[arg-type]
guard.extend(40)  # type: ignore[call-arg]
unknown_option = Guard(budget, max_iterations=3)  # type: ignore[arg-type]


def by_hand(calls: list[ToolCall]) -> Outcome | None:
    decision = guard.admit_model_call(ModelCall(model="gpt-4o", input_tokens=100))
    if isinstance(decision, Stop):
        reason: StopReason = decision.trip.reason
        print(reason)
        return guard.outcome
    if isinstance(decision, Nudge):
        print(decision.message)
    guard.settle_model_call(decision, TokenUsage(input_tokens=100, output_tokens=10))
    for answer in guard.admit_tool_calls(calls):
        if isinstance(answer, Admit):
            guard.settle_tool_call(answer, "result")
        elif isinstance(answer, Refuse):
            print(answer.message)
    return None


def model(messages: list[dict[str, Any]]) -> ModelReply:
    return ModelReply(message={"role": "assistant", "content": str(len(messages))})


async def async_model(messages: list[dict[str, Any]]) -> ModelReply:
    return model(messages)


async def streamed_model(messages: list[dict[str, Any]]) -> AsyncIterator[str | ModelReply]:
    yield "text"
    yield model(messages)


outcome: Outcome = run_bounded(model, budget, messages="hello", store=SqliteStore("runs.sqlite3"))
total: int = outcome.usage.total_tokens


async def runs() -> None:
    ended: Outcome = await run_bounded_async(async_model, guard, messages="hello")
    stream = run_bounded_stream(streamed_model, budget, messages="hello", store=MemoryStore())
    async for chunk in stream:
        print(chunk)
    print(ended.stop_reason, stream.outcome.status)


@guarded(budget)
def search(query: str) -> list[str]:
    return [query]


found: list[str] = search("x")
wrong: int = search("x")  # type: ignore[assignment]


def hand_written() -> Outcome:
    with bounded(budget) as run, run.model_call(model="gpt-4o") as call:
        call.settle(TokenUsage(10, 5))
    return run.outcome


def again(path: str) -> Guard:
    with Path(path).open("rb") as lines:
        return replay(read_events(lines), budget=budget)
