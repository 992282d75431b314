"""Clauses 29, 33, 34, 36, 39, 40, 42 and 43: how a run ends, and what is left of it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
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
from budgetguard_core.testing.driver import run_in_loop
from budgetguard_core.testing.message import Message, check_history, check_request, expect
from budgetguard_core.testing.scenario import Scratch
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
from budgetguard_core.testing.trial import (
    Trial,
    check_equal,
    search_tool,
    shape_of,
    sticky,
    watched,
)
from budgetguard_core.usage import TokenUsage

# A conversation of this clause is more; what measures coverage keeps a little of each thread.
_NOISE = 16
_OF_A_RUN = (Admit, Guard, Outcome, Run, OpenModelCall, OpenToolCall, asyncio.Task)
_WARM_UP = 2
_RUNS = 6


def _check_failed(events: list[Event], guard: Guard, store: MemoryStore) -> None:
    ended = [event.status for event in events if isinstance(event, RunEnded)]
    check_equal("run_ended events", ended, ["failed"])
    outcome = guard.outcome
    check_equal("guard.outcome.status", outcome and outcome.status, "failed")
    check_equal("calls in flight", guard.open_calls(), ())
    expect(store.load(guard.run_id), "no checkpoint was saved")


def failed(at: Trial) -> None:
    """Clause 29."""
    store = MemoryStore()
    guard, events = watched(max_iterations=9)
    model = [calls("search"), Reply(error=ProviderError("no such model"))]
    ran = at.run(model, guard, store=store).ran
    expect(ran.raised is not None, "the error did not leave the run")
    _check_failed(events, guard, store)
    outcome = ran.outcome
    expect(outcome is not None, "what the run raised has no outcome")
    check_equal("status", outcome and outcome.status, "failed")
    check_equal("model calls counted", outcome and outcome.usage.model_calls, 2)
    expect(outcome and outcome.usage.total_tokens >= 120, "its spend is not in the outcome")
    if at.is_sync:
        return

    guard, events = watched(max_iterations=9)

    async def leave() -> None:
        reached = asyncio.Event()

        def replies(number: int) -> Reply:
            if number == 0:
                return calls("search")
            reached.set()
            return Reply(hang=True)

        scenario = at.scenario(Script(replies), guard, store=store)
        task = asyncio.create_task(at.driver.run_async(scenario))
        await reached.wait()
        task.cancel()
        (left,) = await asyncio.gather(task, return_exceptions=True)
        cancelled = isinstance(left, asyncio.CancelledError)
        expect(cancelled, f"the caller's cancellation was swallowed: {left}")

    _, leaked = run_in_loop(leave(), patience=at.driver.patience)
    expect(not leaked, f"tasks left behind: {leaked}")
    _check_failed(events, guard, store)
    check_equal("model calls of a cancelled run", guard.usage.model_calls, 2)
    if at.mode == "async":
        return
    # Where the loop is the user's own, leaving is an end like any other.
    guard, events = watched(max_iterations=9)
    at.run(sticky("search"), guard, store=store, break_after=1)
    ended = [event for event in events if isinstance(event, RunEnded)]
    check_equal("run_ended events of a stream that was left", len(ended), 1)
    expect(guard.outcome is not None, "a stream that was left has no outcome")
    check_equal("calls in flight", guard.open_calls(), ())


def cut_short(at: Trial) -> None:
    """Clause 33."""
    budget = Budget(max_total_tokens=600, max_output_tokens_per_call=900)
    long = says("All that is known about it. " * 100, TokenUsage(100, 1000))
    done = at.run([long], budget, tools=())
    script = done.script
    expect(script.calls, "the call was refused instead of bounded")
    bound = script.bounds[0]
    expect(bound is not None and bound <= 600, f"the request's bound is {bound}, under 600 tokens")
    done.stopped(StopReason.MAX_TOTAL_TOKENS, calls=1)
    written = script.given[0].text[:200]
    expect(written, "the bound left nothing of the answer")
    kept = [message for message in done.history if written.strip() in message.text]
    expect(kept, "the text that was paid for is lost")

    # Whole answers are no stops, however near to the bound.
    at.run([says("Short.", TokenUsage(100, 20))], budget, tools=()).completed()


def nothing_kept(at: Trial) -> None:
    """Clause 34: what a run leaves behind, measured from one run to the next.

    What the framework itself keeps (an agent's conversation, a thread) is measured without a guard.
    """

    def left(budget: Budget | None) -> tuple[float, int]:
        """Count what is left of a run: objects, and those of ours among them."""
        script = Script(lambda number: says("Done.") if number % 4 == 3 else calls("search"))
        search, shared = Tool("search", "found"), Scratch()

        def run() -> None:
            ran = at.driver.run(at.scenario(script, budget, search, shared=shared))
            expect(ran.raised is None, f"the run raised {ran.raised!r}")
            for log in (script.sent, script.requests, script.given, shared.used):
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


def same_history(at: Trial) -> None:
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
    if not at.is_sync:
        endings.append(("max_seconds", Budget(max_seconds=0.2), hung))
    for name, budget, replies in endings:
        _check_turns(at, name, budget, replies)


def _check_turns(at: Trial, name: str, budget: Budget, replies: list[Reply]) -> None:
    over = False

    def answer(number: int) -> Reply:
        return says("And this.") if over else replies[min(number, len(replies) - 1)]

    script = Script(answer)
    tools = [search_tool(), Tool("read", "text")]
    facts: dict[str, Any] = {"store": MemoryStore(), "shared": Scratch(), "stored": True}
    done = at.run(script, budget, *tools, user_input="What is new?", **facts)
    if name == "failed":
        expect(done.ran.raised is not None, "the error did not leave the run")
    else:
        outcome, returned = done.outcome, done.ran.returned
        check_equal("stop reason", str(outcome.stop_reason), name)
        check_history(done.history)
        expect(returned is not None, f"the driver does not say what was returned ({name})")
        check_equal(f"stored history ({name})", shape_of(done.history), shape_of(returned or ()))
    made = script.calls
    over = True
    facts |= {"after": done, "user_input": "And now?"}
    done = at.run(script, Budget(max_iterations=9), *tools, **facts)
    raised = done.ran.raised
    expect(raised is None, f"the turn after a run that was {name} raised {raised!r}")
    check_equal(f"model calls of the next turn ({name})", script.calls - made, 1)
    request = script.requests[-1]
    check_request(request)
    for text in ("What is new?", "And now?"):
        expect(any(text in one.text for one in request), f"{text!r} was not sent ({name})")
    check_equal(f"the answer of the next turn ({name})", done.history[-1].text, "And this.")


def typed_end(at: Trial) -> None:
    """Clause 39."""
    done = at.run(sticky("search"), Budget(max_iterations=2), structured=True)
    done.stopped(StopReason.MAX_ITERATIONS)
    typed = done.ran.typed
    expect(not isinstance(typed, str), f"in the place of a typed answer stands {typed!r}")


def own_limit(at: Trial) -> None:
    """Clause 40."""
    guard = Guard(Budget(max_total_tokens=10**6))
    done = at.run(sticky("search"), guard, own_limit=2)
    done.stopped(StopReason.FRAMEWORK_LIMIT, calls=2)
    check_equal("model calls", guard.usage.model_calls, 2)


def no_further_step(at: Trial) -> None:
    """Clause 42."""

    def run(guard: Guard, spend: Callable[[], object], form: str) -> None:
        made: list[int] = []

        def body(number: int, value: str) -> str:
            spend()
            made.append(script.calls + worker.script.calls)
            return changing(number, value)

        work = Tool("work", body)
        worker = Agent(name="worker", script=sticky("work"), tools=[Tool("work", body)])
        forms: dict[str, tuple[Reply, dict[str, Any]]] = {
            "itself": (calls("work"), {"tools": [work]}),
            "tool": (calls("ask_worker"), {"tools": [Tool("ask_worker", agent=worker)]}),
            "graph": (says("Done."), {"tools": [], "graph": worker}),
            "handoff": (Reply(handoff="worker"), {"tools": [], "handoffs": [worker]}),
        }
        reply, facts = forms[form]
        script = Script([reply])
        done = at.run(script, guard, **facts)
        expect(guard.trip is not None, "the tool's body did not trip the guard")
        check_equal(f"status ({form})", done.outcome.status, "terminated")
        check_history(done.history)
        check_equal(f"model calls ({form})", [script.calls + worker.script.calls], made)
        check_equal(f"tool bodies ({form})", done.started.count("work"), 1)

    for form in ("itself", *sorted(at.driver.subagents)):
        guard = Guard(Budget(max_model_calls=9))
        run(guard, guard.abort, form)
        # Code of the user's that spends the rest, with a client that the framework does not see.
        guard = Guard(Budget(max_model_calls=9))
        run(guard, partial(_spend, guard), form)


def _spend(guard: Guard) -> None:
    while not isinstance(call := guard.admit_model_call(ModelCall(model=MODEL)), Stop):
        guard.settle_model_call(cast("Admit", call), TokenUsage(10, 10))


def as_unguarded(at: Trial) -> None:
    """Clause 43."""

    def run(guard: Budget | None) -> list[Any]:
        script = Script([calls("search", "read"), says("Here."), calls("search"), says("There.")])
        tools, shared = [Tool("search", "found"), Tool("read", "text")], Scratch()
        first = at.run(script, guard, *tools, user_input="What is new?", shared=shared)
        facts: dict[str, Any] = {"after": first, "user_input": "And now?", "shared": shared}
        second = at.run(script, guard, *tools, **facts)
        for done in (first, second):
            expect(done.ran.raised is None, f"the run raised {done.ran.raised!r}")
        return [shape_of(one) for one in (first.history, second.history, *script.requests)]

    check_equal("what is kept and sent", run(Budget(max_iterations=9)), run(None))
