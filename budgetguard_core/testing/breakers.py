"""Clauses 47 to 54: the breakers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

from budgetguard_core.breakers import (
    REPORT_PROGRESS,
    BulkheadConfig,
    CircuitBreakerConfig,
    ProgressReports,
    RateLimit,
    ToolMix,
    ToolMixBaseline,
    VelocityLimits,
)
from budgetguard_core.clock import SystemClock
from budgetguard_core.decision import NOT_EXECUTED, Admit, ToolCall
from budgetguard_core.events import (
    CallDelayed,
    CircuitBreakerChanged,
    Event,
    ProgressReported,
    ToolCallSettled,
    ToolCallTurnedAway,
    ToolMixUnusual,
)
from budgetguard_core.guard import Guard
from budgetguard_core.stop import StopReason
from budgetguard_core.testing.message import expect
from budgetguard_core.testing.script import Call, Reply, Script, Tool, calls, changing, says
from budgetguard_core.testing.trial import (
    Done,
    Trial,
    check_equal,
    nudges_of,
    search_tool,
    sticky,
    watched,
)

_TURN = 0.1
"""Seconds that a call waits for its token."""
_LIFE = 0.8
"""Seconds of the runs that end while a call waits; enough for what comes before it."""
_LONG = 30.0
"""Seconds that a call would wait for its place; it never takes so long."""
_REQUEST = f"Before you go on, call {REPORT_PROGRESS}"


def _watched(**options: Any) -> tuple[Guard, list[Event]]:
    """Make a guard with a breaker; loops are not looked for, because they would be seen first."""
    return watched(loop_detection=None, **options)


def _check_refused(done: Done, kind: str, *tools: str) -> list[dict[str, Any]]:
    """Check which calls were turned away; return their structured results."""
    found: list[dict[str, Any]] = [
        json.loads(text[text.index("{") : text.rindex("}") + 1])
        for text in done.results
        if f'"error": "{kind}"' in text
    ]
    check_equal("tools refused", [one["tool"] for one in found], [*tools])
    seen = any(kind in sent for sent in done.script.sent)
    expect(seen, "the model does not see that it was refused")
    return found


def velocity(at: Trial) -> None:
    """Clause 47."""
    # At the ceiling the run ends: exactly so many bodies, also within a batch.
    guard, _ = _watched(velocity=VelocityLimits(max_tool_calls_per_minute=3, throttle_at=0.99))
    done = at.run([calls(*["search"] * 5)], guard)
    done.stopped(StopReason.VELOCITY, bodies=3, tool_calls=3, calls=1)
    for text in done.results[3:]:
        expect(NOT_EXECUTED in text, f"a call that never started has the result {text!r}")

    guard, _ = _watched(velocity=VelocityLimits(max_tokens_per_minute=300, throttle_at=0.99))
    done = at.run(sticky("search"), guard)
    done.stopped(StopReason.VELOCITY)
    made = done.script.calls
    expect(1 <= made <= 3, f"{made} model calls of 120 tokens under 300 a minute")


def _report(
    at: Trial, subgoal: Callable[[int], str], remaining: Callable[[int], int], end: int
) -> tuple[Done, list[Event]]:
    """Do a run whose model works, and reports whenever it is asked to."""
    reports: list[int] = []

    def reply(number: int) -> Reply:
        # Some frameworks keep what was asked in the history.
        before = script.sent[number - 1].count(_REQUEST) if number else 0
        if script.sent[number].count(_REQUEST) > before:
            step = len(reports)
            reports.append(number)
            report = {
                "claims_so_far": [f"claim {step}"],
                "next_subgoal": subgoal(step),
                "estimated_remaining_steps": remaining(step),
            }
            return calls(Call(REPORT_PROGRESS, json.dumps(report), fields=report))
        return says("Done.") if number >= end else calls("search")

    script = Script(reply)
    guard, events = _watched(progress=ProgressReports(every_iterations=2), max_tool_calls=40)
    done = at.run(script, guard, search_tool(), Tool(REPORT_PROGRESS, reports=True))
    return done, events


def _stall(at: Trial) -> tuple[Done, list[Event]]:
    return _report(at, lambda _: "find the file", lambda _: 5, end=60)


def reports_of(at: Trial) -> list[str]:
    """Return what is sent to a model that is asked for reports and corrected (clause 24)."""
    return _stall(at)[0].script.sent if at.has("reports") else []


def progress(at: Trial) -> None:
    """Clause 48."""
    done, events = _stall(at)
    done.stopped(StopReason.STALLED, tool_calls=len(done.started))
    reports = [event for event in events if isinstance(event, ProgressReported)]
    check_equal("reports that reached the run", len(reports), 4)
    corrections = [text for text in nudges_of(events) if "same next subgoal" in text]
    check_equal("corrections", len(corrections), 1)
    reported = any(corrections[0].split(".")[0] in sent for sent in done.script.sent)
    expect(reported, "the model was not told that it does not move")

    done, events = _report(at, lambda n: f"step {n}", lambda n: 30 - n, end=12)
    done.completed(tool_calls=len(done.started))
    reports = [event for event in events if isinstance(event, ProgressReported)]
    expect(len(reports) >= 3, f"only {len(reports)} reports reached the run")
    expect(all(_REQUEST in text for text in nudges_of(events)), f"nudges: {nudges_of(events)}")


def rate_limit(at: Trial) -> None:
    """Clause 49."""
    guard, events = _watched(rate_limits={"sea*": RateLimit(rate=0.01)})
    model = [calls("search"), calls("search", "read"), says("Without more searches.")]
    done = at.run(model, guard, search_tool(), Tool("read", "text"))
    done.completed(bodies=["read", "search"], tool_calls=2, calls=3)
    (refused,) = _check_refused(done, "rate_limited", "search")
    after = refused["retry_after_seconds"]
    expect(after is not None and 1 <= after <= 100, f"retry_after_seconds is {after}")
    turned = [event.name for event in events if isinstance(event, ToolCallTurnedAway)]
    check_equal("calls turned away", turned, ["search"])


def bulkhead(at: Trial) -> None:
    """Clause 50."""
    guard, _ = _watched(bulkheads={"search": BulkheadConfig(max_concurrent_calls=1)})
    running = guard.child().admit_tool_call(ToolCall(name="search"))

    def read(_: int, value: str) -> str:
        guard.withdraw(cast("Admit", running))
        return f"text {value}"

    model = [calls("search", "read"), calls("search"), says("Done.")]
    done = at.run(model, guard, search_tool(), Tool("read", read))
    done.completed(tool_calls=2)
    check_equal("tool bodies", done.started, ["read", "search"])
    _check_refused(done, "busy", "search")


def circuit_breaker(at: Trial) -> None:
    """Clause 51."""

    def run(script: Script) -> tuple[Done, list[Event]]:
        # As text, because some frameworks end the run where a tool raises.
        config = CircuitBreakerConfig(
            sliding_window_size=4,
            minimum_number_of_calls=2,
            stop_after_open_rounds=2,
            record_result=lambda result: "the server is down" in str(result),
        )
        guard, events = _watched(circuit_breaker=config)
        fetch = Tool("fetch", lambda number, _: f"{number}: the server is down")
        return at.run(script, guard, fetch, Tool("read", changing)), events

    done, events = run(sticky("fetch"))
    done.stopped(StopReason.CIRCUIT_OPEN, bodies=["fetch", "fetch"], tool_calls=2, calls=4)
    changes = [e.to_state for e in events if isinstance(e, CircuitBreakerChanged)]
    check_equal("states", changes, ["open"])
    _check_refused(done, "tool_unavailable", "fetch", "fetch")

    both = [calls("fetch", "read")] * 3
    done, _ = run(Script([calls("fetch"), calls("fetch"), *both, says("Without it.")]))
    done.completed(iterations=6)
    check_equal("tool bodies beside another tool", done.started, ["fetch"] * 2 + ["read"] * 3)


def _read_alone() -> ToolMix:
    return ToolMix(baseline=ToolMixBaseline(runs=40, tools={"search": 400, "read": 400}))


def tool_mix(at: Trial) -> None:
    """Clause 52."""
    guard, events = _watched(tool_mix=_read_alone())
    model = [*[calls(*["read"] * 10)] * 6, says("Done.")]
    done = at.run(model, guard, Tool("read", changing))
    done.completed(bodies=60)
    reported = [event.calls for event in events if isinstance(event, ToolMixUnusual)]
    check_equal("calls of the run when it was told", reported, [20])
    expect("chi-squared" not in str(done.script.sent), "the model was told")


def observed(at: Trial) -> None:
    """Clause 53."""
    guard, events = _watched(
        mode="observe",
        velocity=VelocityLimits(max_tool_calls_per_minute=4, throttle_at=0.5),
        rate_limits={"*": RateLimit(rate=0.01)},
        bulkheads={"*": BulkheadConfig(max_concurrent_calls=1)},
        circuit_breaker=CircuitBreakerConfig(
            minimum_number_of_calls=1,
            sliding_window_size=1,
            record_result=bool,
            stop_after_open_rounds=99,
        ),
        progress=ProgressReports(every_iterations=1),
        tool_mix=_read_alone(),
    )
    done = at.run([*[calls("search", "search")] * 4, says("Done.")], guard)
    outcome = done.completed(calls=5, bodies=8)
    check_equal("nudges", nudges_of(events), [])
    kinds = (CallDelayed, ToolCallTurnedAway)
    check_equal("delays and refusals", [e for e in events if isinstance(e, kinds)], [])
    check_equal("observed", [v.reason for v in outcome.observed], [StopReason.VELOCITY])


def waits(at: Trial) -> None:
    """Clause 54."""
    _wait_too_long(at)
    _wait_for_a_token(at)
    _wait_for_a_slot(at)


def _wait_too_long(at: Trial) -> None:
    """Check that what would wait longer than its run may last is not made."""
    band = VelocityLimits(max_tokens_per_minute=200, throttle_at=0.5)
    guard, _ = _watched(velocity=band, max_seconds=_LIFE)
    done = at.run(sticky("search"), guard)
    done.stopped(StopReason.MAX_SECONDS, calls=1, model_calls=1)
    band = VelocityLimits(max_tool_calls_per_minute=2, throttle_at=0.5)
    guard, _ = _watched(velocity=band, max_seconds=_LIFE)
    done = at.run([calls("search", "search")], guard)
    done.stopped(StopReason.MAX_SECONDS, bodies=1, tool_calls=1)


_THREE = [calls("search", "search", "search"), says("Done.")]


def _wait_for_a_token(at: Trial) -> None:
    clock = SystemClock()
    started: list[int] = []

    def search(number: int, value: str) -> str:
        started.append(clock.monotonic_ns())
        return changing(number, value)

    limit = RateLimit(rate=1 / _TURN, max_wait_duration=_LONG)
    guard, events = _watched(rate_limits={"search": limit})
    began = clock.monotonic_ns()
    at.run(_THREE, guard, Tool("search", search)).completed(bodies=3)
    waits = [(began, int(2e9 * _TURN))]
    # On a slow machine all else may take as long: what was delayed is looked at by itself.
    waits += [(event.at_ns, event.delay_ns) for event in events if isinstance(event, CallDelayed)]
    for since, delay in waits:
        took = max(started) - since
        expect(took >= delay, f"the third call started after {took / 1e9:.3f} s of {delay / 1e9}")


def _wait_for_a_slot(at: Trial) -> None:
    ended: list[int] = []

    def search(number: int, value: str) -> str:
        ended.append(sum(isinstance(event, ToolCallSettled) for event in events))
        return changing(number, value)

    config = BulkheadConfig(max_concurrent_calls=1, max_wait_duration=_LONG)
    guard, events = _watched(bulkheads={"search": config})
    at.run(_THREE, guard, Tool("search", search)).completed()
    check_equal("calls that had ended when each began", ended, [0, 1, 2])
    check_equal("calls in flight", guard.open_calls(), ())
