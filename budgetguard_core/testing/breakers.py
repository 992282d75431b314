"""Clauses 47 to 54: the breakers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
from budgetguard_core.budget import Budget
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
from budgetguard_core.stop_state import ModeName
from budgetguard_core.testing.checks import (
    act,
    check_completed,
    check_equal,
    check_stopped,
    nudges_of,
    results_of,
    search_tool,
    sticky,
)
from budgetguard_core.testing.driver import Driver
from budgetguard_core.testing.failures import expect
from budgetguard_core.testing.message import Message
from budgetguard_core.testing.scenario import Mode, Ran, Scenario
from budgetguard_core.testing.script import Call, Reply, Script, Tool, calls, changing, says

_TURN = 0.1
"""Seconds that a call waits for its token."""
_LIFE = 0.8
"""Seconds of the runs that end while a call waits; enough for what comes before it."""
_LONG = 30.0
"""Seconds that a call would wait for its place; it never takes so long."""
_REQUEST = f"Before you go on, call {REPORT_PROGRESS}"


def _guard(events: list[Event], mode: ModeName = "enforce", **fields: Any) -> Guard:
    """Make a guard with a breaker; loops are not looked for, because they would be seen first."""
    return Guard(Budget(loop_detection=None, **fields), mode=mode, sinks=[events.append])


def _refusals(history: Sequence[Message], *, kind: str) -> list[dict[str, Any]]:
    """Read the structured results of the calls that were turned away."""
    found: list[dict[str, Any]] = []
    for text in results_of(history):
        if f'"error": "{kind}"' in text:
            found.append(json.loads(text[text.index("{") : text.rindex("}") + 1]))
    return found


def velocity(driver: Driver, mode: Mode) -> None:
    """Clause 47."""
    # At the ceiling the run ends: exactly so many bodies, also within a batch.
    limits = VelocityLimits(max_tool_calls_per_minute=3, throttle_at=0.99)
    script = Script([calls(*["search"] * 5)])
    guard = _guard([], velocity=limits)
    ran, scenario = act(driver, mode, script, guard=guard, tools=[search_tool()])
    outcome = check_stopped(ran, StopReason.VELOCITY)
    check_equal("tool bodies under a ceiling of 3", len(scenario.started), 3)
    check_equal("tool calls counted", outcome.usage.tool_calls, 3)
    check_equal("model calls", script.calls, 1)
    for text in results_of(ran.history)[3:]:
        expect(NOT_EXECUTED in text, f"a call that never started has the result {text!r}")

    guard = _guard([], velocity=VelocityLimits(max_tokens_per_minute=300, throttle_at=0.99))
    ran, scenario = act(driver, mode, sticky("search"), guard=guard, tools=[search_tool()])
    check_stopped(ran, StopReason.VELOCITY)
    made = scenario.script.calls
    expect(1 <= made <= 3, f"{made} model calls of 120 tokens under 300 a minute")


def _reporting(subgoal: Callable[[int], str], left: Callable[[int], int], end: int) -> Script:
    """Make a model that works, and reports whenever it is asked to."""
    script: Script
    reports: list[int] = []

    def reply(number: int) -> Reply:
        # Some frameworks keep what was asked in the history.
        before = script.sent[number - 1].count(_REQUEST) if number else 0
        if script.sent[number].count(_REQUEST) > before:
            reports.append(number)
            place = len(reports) - 1
            report = {
                "claims_so_far": [f"claim {place}"],
                "next_subgoal": subgoal(place),
                "estimated_remaining_steps": left(place),
            }
            return Reply(
                tool_calls=(Call(REPORT_PROGRESS, json.dumps(report), fields=report),),
            )
        return says("Done.") if number >= end else calls("search")

    script = Script(reply)
    return script


def _report(driver: Driver, mode: Mode, script: Script) -> tuple[Ran, Scenario, list[Event]]:
    events: list[Event] = []
    guard = _guard(events, progress=ProgressReports(every_iterations=2), max_tool_calls=40)
    tools = [search_tool(), Tool(REPORT_PROGRESS, reports=True)]
    ran, scenario = act(driver, mode, script, guard=guard, tools=tools)
    return ran, scenario, events


def reports_of(driver: Driver, mode: Mode) -> list[str]:
    """Return what is sent to a model that is asked for reports and corrected (clause 24)."""
    script = _reporting(lambda _: "find the file", lambda _: 5, end=60)
    _report(driver, mode, script)
    return script.sent


def progress(driver: Driver, mode: Mode) -> None:
    """Clause 48."""
    script = _reporting(lambda _: "find the file", lambda _: 5, end=60)
    ran, scenario, events = _report(driver, mode, script)
    outcome = check_stopped(ran, StopReason.STALLED)
    reports = [event for event in events if isinstance(event, ProgressReported)]
    check_equal("reports that reached the run", len(reports), 4)
    corrections = [text for text in nudges_of(events) if "same next subgoal" in text]
    check_equal("corrections", len(corrections), 1)
    expect(
        any(corrections[0].split(".")[0] in sent for sent in script.sent),
        "the model was not told that it does not move",
    )
    check_equal("tool calls counted", outcome.usage.tool_calls, len(scenario.started))

    script = _reporting(lambda n: f"step {n}", lambda n: 30 - n, end=12)
    ran, scenario, events = _report(driver, mode, script)
    outcome = check_completed(ran)
    reports = [event for event in events if isinstance(event, ProgressReported)]
    expect(len(reports) >= 3, f"only {len(reports)} reports reached the run")
    expect(all(_REQUEST in text for text in nudges_of(events)), f"nudges: {nudges_of(events)}")
    check_equal("tool calls counted", outcome.usage.tool_calls, len(scenario.started))


def rate_limit(driver: Driver, mode: Mode) -> None:
    """Clause 49."""
    events: list[Event] = []
    guard = _guard(events, rate_limits={"sea*": RateLimit(rate=0.01)})
    script = Script([calls("search"), calls("search", "read"), says("Without more searches.")])
    tools = [search_tool(), Tool("read", "text")]
    ran, scenario = act(driver, mode, script, guard=guard, tools=tools)
    outcome = check_completed(ran)
    check_equal("tool bodies", sorted(scenario.started), ["read", "search"])
    check_equal("tool calls counted", outcome.usage.tool_calls, 2)
    refused = _refusals(ran.history, kind="rate_limited")
    check_equal("tools refused", [one["tool"] for one in refused], ["search"])
    after = refused[0]["retry_after_seconds"]
    expect(after is not None and 1 <= after <= 100, f"retry_after_seconds is {after}")
    expect("rate_limited" in script.sent[2], "the model does not see that it was refused")
    turned = [event.name for event in events if isinstance(event, ToolCallTurnedAway)]
    check_equal("calls turned away", turned, ["search"])


def bulkhead(driver: Driver, mode: Mode) -> None:
    """Clause 50."""
    guard = _guard([], bulkheads={"search": BulkheadConfig(max_concurrent_calls=1)})
    running = guard.child().admit_tool_call(ToolCall(name="search"))

    def read(_: int, value: str) -> str:
        guard.withdraw(cast("Admit", running))
        return f"text {value}"

    script = Script([calls("search", "read"), calls("search"), says("Done.")])
    tools = [search_tool(), Tool("read", read)]
    ran, scenario = act(driver, mode, script, guard=guard, tools=tools)
    check_completed(ran)
    check_equal("tool bodies", scenario.started, ["read", "search"])
    check_equal("tool calls counted", guard.usage.tool_calls, 2)
    refused = _refusals(ran.history, kind="busy")
    check_equal("tools refused", [one["tool"] for one in refused], ["search"])
    expect("busy" in script.sent[1], "the model does not see that it was refused")


def circuit_breaker(driver: Driver, mode: Mode) -> None:
    """Clause 51."""

    def run(script: Script) -> tuple[Any, Any, list[Event]]:
        events: list[Event] = []
        # As text, because some frameworks end the run where a tool raises.
        config = CircuitBreakerConfig(
            sliding_window_size=4,
            minimum_number_of_calls=2,
            stop_after_open_rounds=2,
            record_result=lambda result: "the server is down" in str(result),
        )
        guard = _guard(events, circuit_breaker=config)
        tools = [
            Tool("fetch", lambda number, _: f"{number}: the server is down"),
            Tool("read", changing),
        ]
        ran, scenario = act(driver, mode, script, guard=guard, tools=tools)
        return ran, scenario, events

    ran, scenario, events = run(sticky("fetch"))
    outcome = check_stopped(ran, StopReason.CIRCUIT_OPEN)
    check_equal("tool bodies", scenario.started, ["fetch", "fetch"])
    check_equal("tool calls counted", outcome.usage.tool_calls, 2)
    check_equal("model calls", scenario.script.calls, 4)
    changes = [e.to_state for e in events if isinstance(e, CircuitBreakerChanged)]
    check_equal("states", changes, ["open"])
    refused = _refusals(ran.history, kind="tool_unavailable")
    check_equal("tools refused", [one["tool"] for one in refused], ["fetch", "fetch"])
    expect("tool_unavailable" in scenario.script.sent[3], "the model does not see the refusal")

    script = Script(
        [calls("fetch"), calls("fetch"), *[calls("fetch", "read")] * 3, says("Without it.")]
    )
    ran, scenario, _ = run(script)
    outcome = check_completed(ran)
    check_equal("tool bodies beside another tool", scenario.started, ["fetch"] * 2 + ["read"] * 3)
    check_equal("iterations", outcome.usage.iterations, 6)


def _read_alone() -> ToolMix:
    return ToolMix(baseline=ToolMixBaseline(runs=40, tools={"search": 400, "read": 400}))


def tool_mix(driver: Driver, mode: Mode) -> None:
    """Clause 52."""
    events: list[Event] = []
    guard = _guard(events, tool_mix=_read_alone())
    script = Script([*[calls(*["read"] * 10)] * 6, says("Done.")])
    ran, scenario = act(driver, mode, script, guard=guard, tools=[Tool("read", changing)])
    check_completed(ran)
    check_equal("tool bodies", len(scenario.started), 60)
    told = [event.calls for event in events if isinstance(event, ToolMixUnusual)]
    check_equal("calls of the run when it was told", told, [20])
    expect("chi-squared" not in str(script.sent), "the model was told")


def observed(driver: Driver, mode: Mode) -> None:
    """Clause 53."""
    events: list[Event] = []
    guard = _guard(
        events,
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
    script = Script([*[calls("search", "search")] * 4, says("Done.")])
    ran, scenario = act(driver, mode, script, guard=guard, tools=[search_tool()])
    outcome = check_completed(ran)
    check_equal("model calls", script.calls, 5)
    check_equal("tool bodies", len(scenario.started), 8)
    check_equal("nudges", nudges_of(events), [])
    kinds = (CallDelayed, ToolCallTurnedAway)
    check_equal("delays and refusals", [e for e in events if isinstance(e, kinds)], [])
    check_equal("observed", [v.reason for v in outcome.observed], [StopReason.VELOCITY])


def waits(driver: Driver, mode: Mode) -> None:
    """Clause 54."""
    _wait_too_long(driver, mode)
    _wait_for_a_token(driver, mode)
    _wait_for_a_place(driver, mode)


def _wait_too_long(driver: Driver, mode: Mode) -> None:
    """Check that what would wait longer than its run may last is not made."""
    band = VelocityLimits(max_tokens_per_minute=200, throttle_at=0.5)
    guard = _guard([], velocity=band, max_seconds=_LIFE)
    ran, scenario = act(driver, mode, sticky("search"), guard=guard, tools=[search_tool()])
    outcome = check_stopped(ran, StopReason.MAX_SECONDS)
    check_equal("model calls that did not wait", scenario.script.calls, 1)
    check_equal("model calls counted", outcome.usage.model_calls, 1)

    band = VelocityLimits(max_tool_calls_per_minute=2, throttle_at=0.5)
    guard = _guard([], velocity=band, max_seconds=_LIFE)
    script = Script([calls("search", "search")])
    ran, scenario = act(driver, mode, script, guard=guard, tools=[search_tool()])
    outcome = check_stopped(ran, StopReason.MAX_SECONDS)
    check_equal("tool bodies that did not wait", len(scenario.started), 1)
    check_equal("tool calls counted", outcome.usage.tool_calls, 1)


def _wait_for_a_token(driver: Driver, mode: Mode) -> None:
    clock = SystemClock()
    started: list[int] = []

    def search(number: int, value: str) -> str:
        started.append(clock.monotonic_ns())
        return changing(number, value)

    events: list[Event] = []
    limit = RateLimit(rate=1 / _TURN, max_wait_duration=_LONG)
    guard = _guard(events, rate_limits={"search": limit})
    script = Script([calls("search", "search", "search"), says("Done.")])
    began = clock.monotonic_ns()
    ran, _ = act(driver, mode, script, guard=guard, tools=[Tool("search", search)])
    check_completed(ran)
    check_equal("tool bodies that may wait", len(started), 3)
    waits = [(began, int(2e9 * _TURN))]
    # On a slow machine all else may take as long: what was delayed is looked at by itself.
    waits += [(event.at_ns, event.delay_ns) for event in events if isinstance(event, CallDelayed)]
    for since, delay in waits:
        took = max(started) - since
        expect(took >= delay, f"the third call started after {took / 1e9:.3f} s of {delay / 1e9}")


def _wait_for_a_place(driver: Driver, mode: Mode) -> None:
    events: list[Event] = []
    ended: list[int] = []

    def search(number: int, value: str) -> str:
        ended.append(sum(isinstance(event, ToolCallSettled) for event in events))
        return changing(number, value)

    config = BulkheadConfig(max_concurrent_calls=1, max_wait_duration=_LONG)
    guard = _guard(events, bulkheads={"search": config})
    script = Script([calls("search", "search", "search"), says("Done.")])
    ran, _ = act(driver, mode, script, guard=guard, tools=[Tool("search", search)])
    check_completed(ran)
    check_equal("calls that had ended when each began", ended, [0, 1, 2])
    check_equal("calls in flight", guard.open_calls(), ())
