"""Clauses 29, 33, 34, 36, 39, 40, 42 and 43: how a run ends, and what is left of it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from budgetguard_core.budget import Budget
from budgetguard_core.decision import Admit, ModelCall, Stop
from budgetguard_core.events import Event, RunEnded
from budgetguard_core.guard import Guard
from budgetguard_core.kit import OpenModelCall, OpenToolCall, Run
from budgetguard_core.outcome import Outcome
from budgetguard_core.sqlite_checkpoints import MemoryStore
from budgetguard_core.stop import StopReason
from budgetguard_core.testing.checks import (
    act,
    check_completed,
    check_equal,
    check_stopped,
    outcome_of,
    search_tool,
    shape_of,
    sticky,
)
from budgetguard_core.testing.conformance import check_history, check_request
from budgetguard_core.testing.driver import Driver, run_in_loop
from budgetguard_core.testing.failures import expect
from budgetguard_core.testing.message import Message
from budgetguard_core.testing.scenario import Mode, Scenario, Scratch
from budgetguard_core.testing.script import (
    MODEL,
    Agent,
    ProviderError,
    Reply,
    Script,
    Tool,
    calls,
    changing,
    says,
)
from budgetguard_core.usage import TokenUsage

# A conversation of this clause is more; what measures coverage keeps a little of each thread.
_NOISE = 16
_OF_A_RUN = (Admit, Guard, Outcome, Run, OpenModelCall, OpenToolCall, asyncio.Task)
_WARM_UP = 2
_RUNS = 6


def _check_failed(events: list[Event], guard: Guard, store: MemoryStore) -> None:
    ended = [event for event in events if isinstance(event, RunEnded)]
    check_equal("run_ended events", [event.status for event in ended], ["failed"])
    outcome = guard.outcome
    expect(outcome is not None, "guard.outcome is not set")
    check_equal("guard.outcome.status", outcome and outcome.status, "failed")
    check_equal("calls in flight", guard.open_calls(), ())
    expect(store.load(guard.run_id), "no checkpoint was saved")


def failed(driver: Driver, mode: Mode) -> None:
    """Clause 29."""
    events: list[Event] = []
    store = MemoryStore()
    guard = Guard(Budget(max_iterations=9), sinks=[events.append])
    script = Script([calls("search"), Reply(error=ProviderError("no such model"))])
    ran, _ = act(driver, mode, script, guard=guard, tools=[search_tool()], store=store)
    expect(ran.raised is not None, "the error did not leave the run")
    _check_failed(events, guard, store)
    outcome = ran.outcome
    expect(outcome is not None, "what the run raised has no outcome")
    check_equal("status", outcome and outcome.status, "failed")
    check_equal("model calls counted", outcome and outcome.usage.model_calls, 2)
    expect(outcome and outcome.usage.total_tokens >= 120, "its spend is not in the outcome")
    if mode == "sync":
        return

    events.clear()
    guard = Guard(Budget(max_iterations=9), sinks=[events.append])

    async def leave() -> None:
        reached = asyncio.Event()

        def replies(number: int) -> Reply:
            if number == 0:
                return calls("search")
            reached.set()
            return Reply(hang=True)

        facts: dict[str, Any] = {"guard": guard, "tools": [search_tool()], "store": store}
        scenario = Scenario(script=Script(replies), mode=mode, **facts)
        task = asyncio.create_task(driver.run_async(scenario))
        await reached.wait()
        task.cancel()
        (left,) = await asyncio.gather(task, return_exceptions=True)
        cancelled = isinstance(left, asyncio.CancelledError)
        expect(cancelled, f"the caller's cancellation was swallowed: {left}")

    _, leaked = run_in_loop(leave(), patience=driver.patience)
    expect(not leaked, f"tasks left behind: {leaked}")
    _check_failed(events, guard, store)
    check_equal("model calls of a cancelled run", guard.usage.model_calls, 2)
    if mode == "async":
        return
    events.clear()
    guard = Guard(Budget(max_iterations=9), sinks=[events.append])
    facts: dict[str, Any] = {"guard": guard, "tools": [search_tool()], "store": store}
    # Where the loop is the user's own, leaving is an end like any other.
    act(driver, mode, sticky("search"), break_after=1, **facts)
    ended = [event for event in events if isinstance(event, RunEnded)]
    check_equal("run_ended events of a stream that was left", len(ended), 1)
    expect(guard.outcome is not None, "a stream that was left has no outcome")
    check_equal("calls in flight", guard.open_calls(), ())


def cut_short(driver: Driver, mode: Mode) -> None:
    """Clause 33."""
    text = "All that is known about it. " * 100
    script = Script([says(text, TokenUsage(100, 1000))])
    budget = Budget(max_total_tokens=600, max_output_tokens_per_call=900)
    ran, _ = act(driver, mode, script, guard=budget)
    expect(script.calls, "the call was refused instead of bounded")
    bound = script.bounds[0]
    expect(bound is not None and bound <= 600, f"the request's bound is {bound}, under 600 tokens")
    check_stopped(ran, StopReason.MAX_TOTAL_TOKENS)
    check_equal("model calls", script.calls, 1)
    said = script.given[0].text
    expect(said[:200], "the bound left nothing of the answer")
    kept = [message for message in ran.history if said[:200].strip() in message.text]
    expect(kept, "the text that was paid for is lost")

    # Whole answers are no stops, however near to the bound.
    script = Script([says("Short.", TokenUsage(100, 20))])
    ran, _ = act(driver, mode, script, guard=budget)
    check_completed(ran)


def nothing_kept(driver: Driver, mode: Mode) -> None:
    """Clause 34: what a run leaves behind, measured from one run to the next.

    What the framework itself keeps (an agent's conversation, a thread) is measured without a guard.
    """

    def left(budget: Budget | None) -> tuple[float, int]:
        """Count what is left of a run: objects, and those of ours among them."""
        script = Script(lambda number: says("Done.") if number % 4 == 3 else calls("search"))
        facts: dict[str, Any] = {"tools": [Tool("search", "found")], "shared": Scratch()}

        def run() -> None:
            scenario = Scenario(script=script, mode=mode, guard=budget, **facts)
            ran = driver.run(scenario)
            expect(ran.raised is None, f"the run raised {ran.raised!r}")
            for log in (script.sent, script.requests, script.given, facts["shared"].used):
                log.clear()

        def settle() -> tuple[int, int]:
            gc.collect()
            # What the suite itself writes down of the last run grows with its conversation.
            every = [one for one in gc.get_objects() if type(one) is not Message]
            return len(every), sum(isinstance(one, _OF_A_RUN) for one in every)

        for _ in range(_WARM_UP):
            run()
        # A full collection would look through all that is imported.
        gc.freeze()
        try:
            run()
            before, ours_before = settle()
            for _ in range(_RUNS):
                run()
            after, ours = settle()
        finally:
            gc.unfreeze()
        return (after - before) / _RUNS, ours - ours_before

    threads = threading.active_count()
    bare, _ = left(None)
    guarded, ours = left(Budget(max_iterations=9))
    check_equal("guards, tickets, outcomes and tasks that are kept", ours, 0)
    expect(guarded < bare + _NOISE, f"{guarded} objects are kept of a run, {bare} without a guard")
    expect(threading.active_count() <= threads + 1, f"{threading.enumerate()} are left")


def same_history(driver: Driver, mode: Mode) -> None:
    """Clause 36."""
    batches = [calls("search", "read"), calls("search", "read")]
    hung = [calls("search"), Reply(hang=True)]
    down = [calls("search"), Reply(error=ProviderError("down"))]
    endings: list[tuple[str, Budget, list[Reply]]] = [
        ("completed", Budget(max_iterations=9), [calls("search"), says("Here it is.")]),
        ("max_iterations", Budget(max_iterations=1), batches),
        ("max_tool_calls", Budget(max_tool_calls=1), batches),
        ("max_total_tokens", Budget(max_total_tokens=100), batches),
        ("failed", Budget(max_iterations=9), down),
    ]
    if mode != "sync":
        endings.append(("max_seconds", Budget(max_seconds=0.2), hung))
    for name, budget, replies in endings:
        _check_turns(driver, mode, name, budget, replies)


def _check_turns(
    driver: Driver, mode: Mode, name: str, budget: Budget, replies: Sequence[Reply]
) -> None:
    over = False

    def answer(number: int) -> Reply:
        return says("And this.") if over else replies[min(number, len(replies) - 1)]

    script = Script(answer)
    facts: dict[str, Any] = {
        "tools": [search_tool(), Tool("read", "text")],
        "store": MemoryStore(),
        "shared": Scratch(),
        "stored": True,
    }
    ran, _ = act(driver, mode, script, guard=budget, user_input="What is new?", **facts)
    if name == "failed":
        expect(ran.raised is not None, "the error did not leave the run")
    else:
        check_equal("stop reason", str(outcome_of(ran).stop_reason), name)
        check_history(ran.history)
        expect(ran.returned is not None, f"the driver does not say what was returned ({name})")
        check_equal(f"stored history ({name})", shape_of(ran.history), shape_of(ran.returned or ()))
    made = script.calls
    over = True
    ran, _ = act(
        driver,
        mode,
        script,
        guard=Budget(max_iterations=9),
        after=ran,
        user_input="And now?",
        **facts,
    )
    expect(ran.raised is None, f"the turn after a run that was {name} raised {ran.raised!r}")
    check_equal(f"model calls of the next turn ({name})", script.calls - made, 1)
    request = script.requests[-1]
    check_request(request)
    for text in ("What is new?", "And now?"):
        expect(any(text in one.text for one in request), f"{text!r} was not sent ({name})")
    check_equal(f"the answer of the next turn ({name})", ran.history[-1].text, "And this.")


def typed_end(driver: Driver, mode: Mode) -> None:
    """Clause 39."""
    tools = [search_tool()]
    ran, _ = act(
        driver, mode, sticky("search"), guard=Budget(max_iterations=2), tools=tools, structured=True
    )
    check_stopped(ran, StopReason.MAX_ITERATIONS)
    expect(not isinstance(ran.typed, str), f"in the place of a typed answer stands {ran.typed!r}")


def own_limit(driver: Driver, mode: Mode) -> None:
    """Clause 40."""
    guard = Guard(Budget(max_total_tokens=10**6))
    script = sticky("search")
    ran, _ = act(driver, mode, script, guard=guard, tools=[search_tool()], own_limit=2)
    check_stopped(ran, StopReason.FRAMEWORK_LIMIT)
    check_equal("model calls", (script.calls, guard.usage.model_calls), (2, 2))


def no_further_step(driver: Driver, mode: Mode) -> None:
    """Clause 42."""

    def run(guard: Guard, spend: Callable[[], object], form: str) -> None:
        made: list[int] = []

        def body(number: int, value: str) -> str:
            spend()
            made.append(script.calls + worker.script.calls)
            return changing(number, value)

        worker = Agent(name="worker", script=sticky("work"), tools=[Tool("work", body)])
        replies = {"graph": says("Done."), "handoff": Reply(handoff="worker")}
        script = Script([replies.get(form, calls("work" if form == "itself" else "ask_worker"))])
        tools = {"itself": [Tool("work", body)], "tool": [Tool("ask_worker", agent=worker)]}
        ran, scenario = act(
            driver,
            mode,
            script,
            guard=guard,
            tools=tools.get(form, []),
            handoffs=[worker] if form == "handoff" else (),
            graph=worker if form == "graph" else None,
        )
        expect(guard.trip is not None, "the tool's body did not trip the guard")
        check_equal(f"status ({form})", outcome_of(ran).status, "terminated")
        check_history(ran.history)
        check_equal(f"model calls ({form})", [script.calls + worker.script.calls], made)
        check_equal(f"tool bodies ({form})", scenario.started.count("work"), 1)

    for form in ("itself", *sorted(driver.subagents)):
        guard = Guard(Budget(max_model_calls=9))
        run(guard, guard.abort, form)
        # Code of the user's that spends the rest, with a client that the framework does not see.
        guard = Guard(Budget(max_model_calls=9))
        run(guard, partial(_spend, guard), form)


def _spend(guard: Guard) -> None:
    while not isinstance(call := guard.admit_model_call(ModelCall(model=MODEL)), Stop):
        guard.settle_model_call(cast("Admit", call), TokenUsage(10, 10))


def as_unguarded(driver: Driver, mode: Mode) -> None:
    """Clause 43."""

    def run(guard: Budget | None) -> list[Any]:
        script = Script([calls("search", "read"), says("Here."), calls("search"), says("There.")])
        facts: dict[str, Any] = {
            "tools": [Tool("search", "found"), Tool("read", "text")],
            "shared": Scratch(),
        }
        first, _ = act(driver, mode, script, guard=guard, user_input="What is new?", **facts)
        second, _ = act(
            driver, mode, script, guard=guard, after=first, user_input="And now?", **facts
        )
        for ran in (first, second):
            expect(ran.raised is None, f"the run raised {ran.raised!r}")
        return [shape_of(one) for one in (first.history, second.history, *script.requests)]

    check_equal("what is kept and sent", run(Budget(max_iterations=9)), run(None))
