"""The 25 clauses of the contract, each checked once."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any, cast

from budgetguard_core.budget import Budget
from budgetguard_core.clock import SystemClock
from budgetguard_core.decision import NOT_AVAILABLE, NOT_EXECUTED, OUTCOME_UNKNOWN
from budgetguard_core.events import (
    Event,
    IncidentRecorded,
    ModelCallAdmitted,
    NudgeTaken,
    TripObserved,
)
from budgetguard_core.guard import Guard
from budgetguard_core.outcome import BudgetExceeded, Outcome
from budgetguard_core.pricing import Price, PriceBook
from budgetguard_core.snapshot import Snapshot
from budgetguard_core.stop import StopReason, tool_called
from budgetguard_core.stores import MemoryStore
from budgetguard_core.testing.clock import ManualClock
from budgetguard_core.testing.conformance import (
    Clause,
    Driver,
    Message,
    Mode,
    Ran,
    Scenario,
    check_history,
    expect,
)
from budgetguard_core.testing.script import (
    MODEL,
    Agent,
    Call,
    ProviderError,
    Reply,
    Script,
    Tool,
    calls,
    changing,
    says,
)
from budgetguard_core.usage import TokenUsage

_DEADLINE = 0.3
_GRACE = 5.0
_DIME = PriceBook({MODEL: Price(input=1000, output=0)})
_UNSPEAKABLE = re.compile(
    r"budget|quota|\bcaps?\b|max_|iteration|tokens? left|remaining|stop_reason|deadline|\$\d",
    re.IGNORECASE,
)


def _sticky(*names: str) -> Script:
    """Make a model that asks for the same tools for ever."""
    return Script([calls(*names)])


def _search() -> Tool:
    return Tool("search", changing)


def _run(driver: Driver, mode: Mode, script: Script, **facts: Any) -> tuple[Ran, Scenario]:
    scenario = Scenario(script=script, mode=mode, **facts)
    return driver.run(scenario), scenario


def _outcome(ran: Ran) -> Outcome:
    expect(ran.raised is None, f"the run raised {ran.raised!r}")
    expect(ran.outcome is not None, "the run has no outcome")
    return cast("Outcome", ran.outcome)


def _stopped(ran: Ran, reason: StopReason) -> Outcome:
    outcome = _outcome(ran)
    expect(
        (outcome.status, outcome.stop_reason) == ("terminated", reason),
        f"ended {outcome.status} ({outcome.stop_reason}: {outcome.detail}), expected {reason}",
    )
    check_history(ran.history)
    expect(not ran.leaked, f"tasks left behind: {ran.leaked}")
    return outcome


def _completed(ran: Ran) -> Outcome:
    outcome = _outcome(ran)
    expect(
        outcome.status == "completed",
        f"ended {outcome.status} ({outcome.stop_reason}: {outcome.detail}), expected completed",
    )
    check_history(ran.history)
    expect(not any(m.synthetic for m in ran.history), "a completed run has a synthetic message")
    return outcome


def _equal(what: str, got: object, expected: object) -> None:
    expect(got == expected, f"{what}: {got!r}, expected {expected!r}")


def _shape(history: Sequence[Message]) -> list[tuple[str, str, list[str]]]:
    """Reduce a history to what does not depend on ids."""
    return [(m.role, m.text, [name for _, name in m.tool_calls]) for m in history]


def _results(history: Sequence[Message]) -> list[str]:
    """List the results of tool calls in the order in which the model asked."""
    texts = {m.tool_call_id: m.text for m in history if m.role == "tool"}
    return [texts[id_] for message in history for id_, _ in message.tool_calls]


def _timed(driver: Driver, mode: Mode, script: Script, **facts: Any) -> tuple[Ran, float]:
    clock = SystemClock()
    began = clock.monotonic_ns()
    ran, _ = _run(driver, mode, script, **facts)
    return ran, (clock.monotonic_ns() - began) / 1e9


def _in_threads(*actions: Callable[[], object]) -> None:
    """Run actions at the same time, and raise what the first failing one raised."""
    with ThreadPoolExecutor(len(actions)) as pool:
        for future in [pool.submit(action) for action in actions]:
            future.result()


def _within_the_caps(driver: Driver, mode: Mode) -> None:
    def run(guard: Guard | None) -> tuple[Ran, Scenario]:
        script = Script([calls("search", "read"), calls("search"), says("The answer is 42.")])
        search = Tool("search", lambda number, _: f"result {number}")
        return _run(driver, mode, script, guard=guard, tools=[search, Tool("read")])

    bare, bare_scenario = run(None)
    guard = Guard(Budget(max_iterations=50, max_tool_calls=50, max_total_tokens=10**6))
    ran, scenario = run(guard)
    expect(bare.raised is None, f"the run without a guard raised {bare.raised!r}")
    _completed(ran)
    _equal("history", _shape(ran.history), _shape(bare.history))
    _equal("model calls", scenario.script.calls, bare_scenario.script.calls)
    _equal("tool bodies", sorted(scenario.started), sorted(bare_scenario.started))
    _equal("final", _outcome(ran).final, "The answer is 42.")
    if mode == "streamed":
        _equal("chunks", len(ran.chunks), len(bare.chunks))


def _iterations(driver: Driver, mode: Mode) -> None:
    ran, scenario = _run(
        driver, mode, _sticky("search"), guard=Budget(max_iterations=3), tools=[_search()]
    )
    outcome = _stopped(ran, StopReason.MAX_ITERATIONS)
    _equal("model calls", scenario.script.calls, 3)
    _equal("tool bodies", len(scenario.started), 3)
    _equal("iterations", outcome.usage.iterations, 3)
    _equal("tokens", outcome.usage.total_tokens, 360)


def _tool_calls(driver: Driver, mode: Mode) -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    script = Script([calls("a", "b"), calls("c", "d", "e", "f")])
    ran, scenario = _run(
        driver,
        mode,
        script,
        guard=Budget(max_tool_calls=3),
        tools=[Tool(name, f"{name} is done") for name in names],
    )
    outcome = _stopped(ran, StopReason.MAX_TOOL_CALLS)
    _equal("tool bodies", sorted(scenario.started), ["a", "b", "c"])
    _equal("model calls", script.calls, 2)
    _equal("counted", outcome.usage.tool_calls, 3)
    results = _results(ran.history)
    expect("c is done" in results[2], f"the last call that fits has no result: {results}")
    for text in results[3:]:
        expect(NOT_EXECUTED in text, f"a call that never started has the result {text!r}")


def _quota(driver: Driver, mode: Mode) -> None:
    script = Script([calls("search"), calls("search", "read"), says("Without more searches.")])
    ran, scenario = _run(
        driver,
        mode,
        script,
        guard=Budget(tool_quotas={"sea*": 1}),
        tools=[_search(), Tool("read", "text")],
    )
    _completed(ran)
    _equal("tool bodies", sorted(scenario.started), ["read", "search"])
    _equal("model calls", script.calls, 3)
    refused = [text for text in _results(ran.history) if NOT_AVAILABLE in text]
    _equal("refused results", len(refused), 1)
    expect(NOT_AVAILABLE[:40] in script.sent[2], "the model does not see that it was refused")


def _tokens_and_dollars(driver: Driver, mode: Mode) -> None:
    cap = 300
    ran, scenario = _run(
        driver, mode, _sticky("search"), guard=Budget(max_total_tokens=cap), tools=[_search()]
    )
    outcome = _stopped(ran, StopReason.MAX_TOTAL_TOKENS)
    used = outcome.usage.total_tokens
    expect(1 <= scenario.script.calls <= 3, f"{scenario.script.calls} calls of 120 under {cap}")
    expect(used - 120 < cap, f"a call started after {used - 120} of {cap} tokens were used")

    usage = TokenUsage(30, 10)
    ran, _ = _run(
        driver,
        mode,
        Script([calls("search", usage=usage)]),
        guard=Budget(max_total_tokens=400, max_output_tokens_per_call=10),
        tools=[_search()],
        user_input="Please look this up carefully. " * 8,
    )
    outcome = _stopped(ran, StopReason.MAX_TOTAL_TOKENS)
    expect(
        outcome.usage.total_tokens <= 400,
        f"{outcome.usage.total_tokens} tokens with a projection under 400",
    )

    ran, scenario = _run(
        driver,
        mode,
        Script([calls("search", usage=TokenUsage(100, 0))]),
        guard=Guard(Budget(max_cost_usd=Decimal("0.30")), price_book=_DIME),
        tools=[_search()],
    )
    outcome = _stopped(ran, StopReason.MAX_COST_USD)
    expect(1 <= scenario.script.calls <= 3, f"{scenario.script.calls} calls of $0.10 under $0.30")
    expect(outcome.usage.cost_usd <= Decimal("0.30"), f"${outcome.usage.cost_usd} under $0.30")


def _deadline(driver: Driver, mode: Mode) -> None:
    if mode == "sync":
        # Nothing can interrupt a call that blocks its thread: the late one is the last one.
        clock = ManualClock()
        script = Script(
            [Reply(tool_calls=(Call("search"),), seconds=10.0), calls("search")], clock=clock
        )
        guard = Guard(Budget(max_seconds=5), clock=clock)
        ran, scenario = _run(driver, mode, script, guard=guard, tools=[_search()])
        _stopped(ran, StopReason.MAX_SECONDS)
        _equal("model calls", script.calls, 1)
        _equal("tool bodies after the deadline", scenario.started, [])
        return

    def run(script: Script) -> Ran:
        ran, took = _timed(
            driver,
            mode,
            script,
            guard=Budget(max_seconds=_DEADLINE),
            tools=[Tool("search", hang=True)],
        )
        _stopped(ran, StopReason.MAX_SECONDS)
        expect(took < _DEADLINE + _GRACE, f"it took {took:.1f} s")
        return ran

    run(Script([Reply(hang=True)]))
    ran = run(_sticky("search"))
    expect(
        OUTCOME_UNKNOWN in _results(ran.history)[0],
        f"the interrupted call has the result {_results(ran.history)[0]!r}",
    )


def _abort(driver: Driver, mode: Mode) -> None:
    guard = Guard(Budget(max_iterations=50))

    def aborting(number: int) -> Reply:
        if number == 1:
            _in_threads(guard.abort)
        return calls("search")

    script = Script(aborting)
    ran, scenario = _run(driver, mode, script, guard=guard, tools=[_search()])
    _stopped(ran, StopReason.ABORTED)
    expect(script.calls == 2, f"{script.calls} model calls, aborted during the second")
    expect(len(scenario.started) == 1, f"{scenario.started} started after the abort")
    if mode == "sync":
        return
    for script, tools in (
        (Script([Reply(hang=True)]), []),
        (_sticky("search"), [Tool("search", hang=True)]),
    ):
        guard = Guard(Budget(max_iterations=50))
        timer = threading.Timer(_DEADLINE, guard.abort)
        timer.start()
        ran, took = _timed(driver, mode, script, guard=guard, tools=tools)
        timer.join()
        _stopped(ran, StopReason.ABORTED)
        expect(took < _DEADLINE + _GRACE, f"it took {took:.1f} s")


def _nudges(events: Sequence[Event]) -> list[str]:
    given = [e.nudge for e in events if isinstance(e, ModelCallAdmitted) and e.nudge is not None]
    return given + [e.message for e in events if isinstance(e, NudgeTaken)]


def _check_nudge(events: Sequence[Event], script: Script) -> None:
    nudges = _nudges(events)
    _equal("nudges", len(nudges), 1)
    # Serialised prompts may escape quotation marks; the sentence up to one is enough.
    words = re.split(r"[\"'\\]", nudges[0])[0]
    expect(
        any(words in sent for sent in script.sent),
        f"the model was not told {nudges[0]!r}",
    )


def _repetition(driver: Driver, mode: Mode) -> None:
    events: list[Event] = []
    script = Script([calls(Call("search", "same"))])
    ran, scenario = _run(
        driver,
        mode,
        script,
        guard=Guard(Budget(max_iterations=30), sinks=[events.append]),
        tools=[Tool("search", "nothing found")],
    )
    _stopped(ran, StopReason.NO_PROGRESS)
    expect(len(scenario.started) <= 6, f"{len(scenario.started)} identical calls were made")
    _check_nudge(events, script)

    events.clear()
    script = Script([*[calls(Call("search", "same"))] * 8, says("Found.")])
    ran, scenario = _run(
        driver,
        mode,
        script,
        guard=Guard(Budget(max_iterations=30), sinks=[events.append]),
        tools=[_search()],
    )
    _completed(ran)
    _equal("nudges for changing results", _nudges(events), [])
    _equal("tool bodies", len(scenario.started), 8)


def _oscillation(driver: Driver, mode: Mode) -> None:
    events: list[Event] = []
    script = Script(lambda number: calls(("analyze", "verify")[number % 2]))
    ran, scenario = _run(
        driver,
        mode,
        script,
        guard=Guard(Budget(max_iterations=40), sinks=[events.append]),
        tools=[Tool("analyze", "please verify"), Tool("verify", "please analyze")],
    )
    _stopped(ran, StopReason.OSCILLATION)
    expect(len(scenario.started) <= 8, f"{len(scenario.started)} calls went round in a circle")
    _check_nudge(events, script)


class _Recorder(MemoryStore):
    """A sink and a store that write down in which order they were used."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.last: Snapshot | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, IncidentRecorded):
            self.order.append("incident")

    def flush(self) -> None:
        self.order.append("flushed")

    def save(self, snapshot: Snapshot) -> None:
        super().save(snapshot)
        self.order.append("saved")
        self.last = snapshot


def _ending(driver: Driver, mode: Mode) -> None:
    recorder = _Recorder()
    guard = Guard(Budget(max_iterations=2), sinks=[recorder])
    ran, _ = _run(driver, mode, _sticky("search"), guard=guard, tools=[_search()], store=recorder)
    outcome = _stopped(ran, StopReason.MAX_ITERATIONS)
    last = ran.history[-1]
    _equal("the last message's role", last.role, "assistant")
    marker = dict(last.synthetic or {})
    expected = {"synthetic": True, "stop_reason": "max_iterations", "run_id": guard.run_id}
    _equal("its marker", {name: marker.get(name) for name in expected}, expected)
    expect(not re.search(r"max_iterations|\b2 of\b", last.text), f"it tells: {last.text!r}")
    expect(outcome.final, "the outcome has no final text")
    expect(outcome.messages, "the outcome has no messages")
    expect(guard.outcome is not None, "guard.outcome is not set")
    _equal("violations", [v.reason for v in outcome.violations], [StopReason.MAX_ITERATIONS])
    expect("saved" in recorder.order, "no checkpoint was saved")
    expect("incident" in recorder.order, "no incident was recorded")
    incident = recorder.order.index("incident")
    expect("saved" in recorder.order[:incident], f"order of the ending: {recorder.order}")
    expect("saved" not in recorder.order[incident:], f"order of the ending: {recorder.order}")
    expect("flushed" in recorder.order[incident:], f"order of the ending: {recorder.order}")
    trip = recorder.last and recorder.last.trip
    expect(trip is not None, "the checkpoint does not know of the trip")

    ran, _ = _run(
        driver,
        mode,
        _sticky("search"),
        guard=Budget(max_iterations=2),
        tools=[_search()],
        on_trip="raise",
    )
    expect(isinstance(ran.raised, BudgetExceeded), f"on_trip='raise' gave {ran.raised!r}")
    error = ran.raised
    outcome_ = error.outcome if isinstance(error, BudgetExceeded) else None
    expect(outcome_ is not None and outcome_.messages, "BudgetExceeded has no outcome")


def _closed(driver: Driver, mode: Mode) -> None:
    for budget, reason in (
        (Budget(max_tool_calls=1), StopReason.MAX_TOOL_CALLS),
        (Budget(max_total_tokens=1), StopReason.MAX_TOTAL_TOKENS),
        (Budget(max_iterations=1), StopReason.MAX_ITERATIONS),
        (Budget(stop_when=(tool_called("read"),)), StopReason.STOP_CONDITION),
    ):
        tools = [_search(), Tool("read", "text"), Tool("write", error=ValueError("read-only"))]
        script = Script([calls("search", "read"), calls("search", "read", "search")])
        ran, _ = _run(driver, mode, script, guard=budget, tools=tools)
        _stopped(ran, reason)
        expect(ran.history[-1].synthetic is not None, "the last message is not synthetic")

    guard = Guard(Budget(max_iterations=5))
    guard.abort()
    script = _sticky("search")
    ran, _ = _run(driver, mode, script, guard=guard, tools=[_search()])
    _stopped(ran, StopReason.ABORTED)
    _equal("model calls of an aborted run", script.calls, 0)


def _kept(driver: Driver, mode: Mode) -> None:
    script = Script([says("A very long answer.", TokenUsage(100, 900))])
    ran, _ = _run(driver, mode, script, guard=Budget(max_total_tokens=500))
    outcome = _completed(ran)
    _equal("final", outcome.final, "A very long answer.")
    _equal("tokens", outcome.usage.total_tokens, 1000)

    script = Script([calls("read", "search", "write")])
    tools = [Tool("read", "what was read"), Tool("search", "found"), Tool("write")]
    ran, _ = _run(driver, mode, script, guard=Budget(max_tool_calls=2), tools=tools)
    _stopped(ran, StopReason.MAX_TOOL_CALLS)
    expect("what was read" in _results(ran.history)[0], "a completed sibling's result is lost")
    if mode == "sync":
        return
    script = Script([calls("read", "search")])
    tools = [Tool("read", "what was read"), Tool("search", hang=True)]
    ran, _ = _run(driver, mode, script, guard=Budget(max_seconds=_DEADLINE), tools=tools)
    _stopped(ran, StopReason.MAX_SECONDS)
    results = _results(ran.history)
    expect("what was read" in results[0], f"a completed sibling's result is lost: {results}")
    expect(OUTCOME_UNKNOWN in results[1], f"the interrupted call's result: {results}")


def _resumed(driver: Driver, mode: Mode) -> None:
    script = Script([calls("first"), calls("second"), calls("third"), says("All three.")])
    tools = [Tool(name, f"{name} is done") for name in ("first", "second", "third")]
    facts: dict[str, Any] = {"tools": tools, "store": MemoryStore(), "shared": {}}
    ran, before = _run(driver, mode, script, guard=Budget(max_iterations=2), **facts)
    _stopped(ran, StopReason.MAX_ITERATIONS)
    ran, after = _run(
        driver, mode, script, guard=Budget(max_iterations=2), after=ran, user_input=None, **facts
    )
    outcome = _completed(ran)
    _equal("final", outcome.final, "All three.")
    _equal("tool bodies", before.started + after.started, ["first", "second", "third"])
    _equal("iterations under the fresh budget", outcome.usage.iterations, 2)
    for name in ("first", "second"):
        expect(f"{name} is done" in script.sent[-1], f"the model forgot what {name} brought")


def _another_turn(driver: Driver, mode: Mode) -> None:
    script = Script([calls("search"), calls("search"), says("Here you are.")])
    facts: dict[str, Any] = {"tools": [_search()], "store": MemoryStore(), "shared": {}}
    ran, _ = _run(
        driver, mode, script, guard=Budget(max_iterations=2), user_input="What is new?", **facts
    )
    _stopped(ran, StopReason.MAX_ITERATIONS)
    ran, _ = _run(
        driver,
        mode,
        script,
        guard=Budget(max_iterations=2),
        user_input="And without searching?",
        after=ran,
        **facts,
    )
    outcome = _outcome(ran)
    _equal("status", outcome.status, "completed")
    check_history(ran.history)
    _equal("final", outcome.final, "Here you are.")
    for text in ("What is new?", "And without searching?"):
        expect(text in script.sent[-1], f"{text!r} was not sent to the model")


def _warnings(driver: Driver, mode: Mode) -> None:
    def run(action: Callable[[Guard], object]) -> tuple[Ran, Script, list[str]]:
        given: list[str] = []

        def warned(guard: Guard, event: Any) -> None:
            given.append(event.dimension)
            action(guard)

        script = _sticky("search")
        budget = Budget(max_iterations=10, max_tool_calls=100)
        guard = Guard(budget, on_warning=warned)
        ran, _ = _run(driver, mode, script, guard=guard, tools=[_search()])
        return ran, script, given

    ran, script, given = run(lambda _: None)
    outcome = _stopped(ran, StopReason.MAX_ITERATIONS)
    _equal("warnings", given, ["max_iterations"])
    _equal("outcome.warnings", outcome.warnings, ("max_iterations",))
    _equal("model calls", script.calls, 10)

    ran, script, _ = run(lambda guard: guard.extend(max_iterations=12))
    _stopped(ran, StopReason.MAX_ITERATIONS)
    _equal("model calls when it extends", script.calls, 12)

    ran, script, _ = run(lambda guard: guard.abort("a person said no"))
    _stopped(ran, StopReason.ABORTED)
    expect(script.calls <= 8, f"{script.calls} model calls, ended by the handler at 8")


def _observe(driver: Driver, mode: Mode) -> None:
    events: list[Event] = []

    def run(guard_mode: str) -> tuple[Ran, Script]:
        guard = Guard(Budget(max_iterations=2), mode=guard_mode, sinks=[events.append])
        script = Script([*[calls("search")] * 4, says("Done.")])
        ran, _ = _run(driver, mode, script, guard=guard, tools=[_search()])
        return ran, script

    ran, script = run("observe")
    outcome = _completed(ran)
    _equal("model calls", script.calls, 5)
    _equal("observed", [v.reason for v in outcome.observed], [StopReason.MAX_ITERATIONS])
    kinds = [type(event) for event in events]
    admitted = kinds[: kinds.index(TripObserved)].count(ModelCallAdmitted)
    _equal("model calls when it would have tripped", admitted, 2)
    ran, script = run("enforce")
    _stopped(ran, StopReason.MAX_ITERATIONS)
    _equal("model calls in ENFORCE", script.calls, 2)


def _retries(driver: Driver, mode: Mode) -> None:
    failure = Reply(error=ProviderError("overloaded"))
    script = Script([failure, calls("search"), failure, says("At last.")])
    ran, _ = _run(
        driver, mode, script, guard=Guard(Budget(max_iterations=2)), tools=[_search()], retries=2
    )
    outcome = _completed(ran)
    _equal("model calls", (script.calls, outcome.usage.model_calls), (4, 4))
    _equal("iterations", outcome.usage.iterations, 2)
    _equal("failed calls", outcome.usage.failed_calls, 2)

    script = Script([failure])
    ran, _ = _run(
        driver, mode, script, guard=Guard(Budget(max_model_calls=2)), tools=[_search()], retries=5
    )
    _stopped(ran, StopReason.MAX_MODEL_CALLS)
    _equal("model calls", script.calls, 2)


def _subagents(driver: Driver, mode: Mode) -> None:
    def agent(number: int = 0) -> Agent:
        return Agent(name=f"agent{number}", script=_sticky("search"), tools=[_search()])

    for form in sorted(driver.subagents):
        guard = Guard(Budget(max_model_calls=7))
        workers = [agent(n) for n in range(3)] if form == "tool" else [agent()]
        scripts = {
            "tool": Script([calls(*(f"ask_{worker.name}" for worker in workers)), says("Done.")]),
            "handoff": Script([Reply(handoff="agent0")]),
            "graph": Script([says("Done.")]),
        }
        script = scripts[form]
        tools = [Tool(f"ask_{w.name}", agent=w) for w in workers] if form == "tool" else []
        ran, _ = _run(
            driver,
            mode,
            script,
            guard=guard,
            tools=tools,
            handoffs=workers if form == "handoff" else (),
            graph=workers[0] if form == "graph" else None,
        )
        outcome = _stopped(ran, StopReason.MAX_MODEL_CALLS)
        made = script.calls + sum(worker.script.calls for worker in workers)
        _equal(f"model calls in all ({form})", made, 7)
        _equal(f"model calls counted ({form})", outcome.usage.model_calls, 7)
        _equal(f"tokens counted ({form})", outcome.usage.total_tokens, 7 * 120)


def _child_trip(driver: Driver, mode: Mode) -> None:
    def run(guard: Guard, budget: Budget) -> tuple[Ran, Script, Script]:
        worker = Agent(name="worker", script=_sticky("search"), tools=[_search()], budget=budget)
        script = Script([calls("ask_worker"), says("I know enough.")])
        ran, _ = _run(driver, mode, script, guard=guard, tools=[Tool("ask_worker", agent=worker)])
        return ran, script, worker.script

    ran, script, below = run(Guard(Budget(max_iterations=20)), Budget(max_iterations=2))
    outcome = _completed(ran)
    _equal("model calls of the child", below.calls, 2)
    _equal("final", outcome.final, "I know enough.")
    _equal("model calls counted", outcome.usage.model_calls, 4)
    result = _results(ran.history)[0]
    expect("stopped before it finished" in result, f"the parent got {result!r} from the child")

    ran, script, below = run(Guard(Budget(max_model_calls=4)), Budget(max_iterations=10))
    _stopped(ran, StopReason.MAX_MODEL_CALLS)
    _equal("model calls of parent and child", (script.calls, below.calls), (1, 3))


def _concurrent(driver: Driver, mode: Mode) -> None:
    guard = Guard(Budget(max_model_calls=9))
    scripts = [_sticky("search") for _ in range(3)]
    ran: list[Ran] = []
    _in_threads(
        *(
            lambda script=script: ran.append(
                _run(driver, mode, script, guard=guard, tools=[_search()])[0]
            )
            for script in scripts
        )
    )
    for one in ran:
        _stopped(one, StopReason.MAX_MODEL_CALLS)
    _equal("model calls of all runs", sum(script.calls for script in scripts), 9)
    _equal("counted", guard.usage.model_calls, 9)

    script = _sticky("search")
    tools = [_search()]
    shared: dict[str, Any] = {}
    guards = [Guard(Budget(max_iterations=n)) for n in (2, 3)]

    def one_run(guard: Guard) -> None:
        ran, _ = _run(driver, mode, script, guard=guard, tools=tools, shared=shared)
        _stopped(ran, StopReason.MAX_ITERATIONS)

    for guard in guards:
        one_run(guard)
    _equal("iterations of two guards on one agent", [g.usage.iterations for g in guards], [2, 3])
    guards = [Guard(Budget(max_iterations=n)) for n in (2, 3)]
    _in_threads(*(lambda guard=guard: one_run(guard) for guard in guards))
    _equal("iterations at the same time", [g.usage.iterations for g in guards], [2, 3])
    _equal("model calls", script.calls, 10)


def _two_layers(driver: Driver, mode: Mode) -> None:
    guard = Guard(Budget(max_iterations=3))
    script = _sticky("search")
    ran, scenario = _run(driver, mode, script, guard=guard, tools=[_search()], twice=True)
    outcome = _stopped(ran, StopReason.MAX_ITERATIONS)
    _equal("model calls", (script.calls, outcome.usage.model_calls), (3, 3))
    _equal("tokens", outcome.usage.total_tokens, 360)
    _equal("tool bodies", (len(scenario.started), outcome.usage.tool_calls), (3, 3))


def _streamed(driver: Driver, mode: Mode) -> None:
    guard = Guard(Budget(max_iterations=2))
    ran, _ = _run(driver, mode, _sticky("search"), guard=guard, tools=[_search()])
    outcome = _stopped(ran, StopReason.MAX_ITERATIONS)
    _equal("tokens", outcome.usage.total_tokens, 240)
    expect(ran.chunks, "the stream gave nothing")
    text = str(outcome.final)
    expect(text[:30] in str(ran.chunks[-3:]), "the synthetic message did not end the stream")

    guard = Guard(Budget(max_iterations=2))
    script = _sticky("search")
    ran, _ = _run(driver, mode, script, guard=guard, tools=[_search()], break_after=1)
    expect(ran.raised is None, f"leaving early raised {ran.raised!r}")
    expect(not ran.leaked, f"an early break leaves tasks behind: {ran.leaked}")
    expect(script.calls <= 1, f"{script.calls} model calls after an early break")
    _equal("calls in flight after an early break", guard.open_calls(), ())
    _equal("model calls counted", guard.usage.model_calls, script.calls)

    # Without usage the tokens are estimated, never zero.
    guard = Guard(Budget(max_iterations=2))
    script = Script([calls("search", usage=None)])
    ran, _ = _run(driver, mode, script, guard=guard, tools=[_search()])
    outcome = _stopped(ran, StopReason.MAX_ITERATIONS)
    expect(outcome.usage.total_tokens > 0, "missing usage counts as zero")
    _equal("estimated calls", outcome.usage.estimated_calls, 2)


def _full(what: str) -> OSError:
    return OSError(28, "No space left on device", what)


class _Broken(MemoryStore):
    """A sink and a store on a full disk."""

    def emit(self, event: Event) -> None:
        raise _full(event.event)

    def flush(self) -> None:
        raise _full("flush")

    def save(self, snapshot: Snapshot) -> None:
        raise _full(snapshot.run_id)


def _failures(driver: Driver, mode: Mode) -> None:
    broken = _Broken()
    guard = Guard(Budget(max_iterations=2), sinks=[broken])
    ran, scenario = _run(
        driver, mode, _sticky("search"), guard=guard, tools=[_search()], store=broken
    )
    outcome = _stopped(ran, StopReason.MAX_ITERATIONS)
    _equal("model calls", scenario.script.calls, 2)
    expect(any("sink" in e for e in outcome.errors), f"the sink is not in {outcome.errors}")
    expect(any("checkpoint" in e for e in outcome.errors), f"no checkpoint in {outcome.errors}")

    guard = Guard(Budget(max_iterations=5))
    script = Script([calls("search"), Reply(error=ProviderError("no such model"))])
    ran, _ = _run(driver, mode, script, guard=guard, tools=[_search()])
    expect(
        ran.raised is not None or (ran.outcome is not None and ran.outcome.status == "completed"),
        "a model that fails is hidden",
    )
    _equal("failed calls", guard.usage.failed_calls, 1)
    _equal("calls in flight after a failure", guard.open_calls(), ())

    guard = Guard(Budget(max_iterations=2))
    script = Script([calls("broken")])
    tools = [Tool("broken", error=ValueError("the tool is broken"))]
    ran, _ = _run(driver, mode, script, guard=guard, tools=tools)
    stopped = ran.outcome is not None and ran.outcome.stop_reason is StopReason.MAX_ITERATIONS
    expect(ran.raised is not None or stopped, "a tool that fails is hidden")
    expect(ran.raised is not None or guard.usage.tool_calls == 2, "a failed call is not counted")
    check_history(ran.history)
    _equal("tool calls in flight after a failure", guard.open_calls(), ())


def _not_a_word(driver: Driver, mode: Mode) -> None:
    shared: dict[str, Any] = {}
    budget = Budget(
        max_iterations=9,
        max_tool_calls=7,
        max_total_tokens=10**6,
        max_seconds=600,
        tool_quotas={"read": 1},
        max_output_tokens_per_call=4096,
    )
    script = Script(lambda n: calls("read", "look") if n < 4 else calls("search"))
    facts: dict[str, Any] = {
        "tools": [Tool("read", "text"), Tool("look", "nothing"), _search()],
        "shared": shared,
        "store": MemoryStore(),
    }
    ran, _ = _run(driver, mode, script, guard=budget, **facts)
    _outcome(ran)
    ran, _ = _run(
        driver,
        mode,
        script,
        guard=Budget(max_iterations=2),
        after=ran,
        user_input="Go on.",
        **facts,
    )
    expect(script.calls >= 6, f"only {script.calls} prompts to look at")
    for number, sent in enumerate(script.sent):
        found = _UNSPEAKABLE.search(sent)
        expect(
            found is None,
            f"prompt {number} mentions {found}: {sent!r}",
        )


def _not_undone(driver: Driver, mode: Mode) -> None:
    for facts in ({"structured": True}, {"swallowing": True}):
        script = _sticky("search")
        guard = Guard(Budget(max_iterations=3))
        ran, scenario = _run(driver, mode, script, guard=guard, tools=[_search()], **facts)
        _stopped(ran, StopReason.MAX_ITERATIONS)
        _equal(f"model calls ({facts})", script.calls, 3)
        _equal(f"tool bodies ({facts})", len(scenario.started), 3)
        expect(ran.history[-1].synthetic is not None, "the last message is not synthetic")

        script = Script([calls("search", "search", "search")])
        ran, scenario = _run(
            driver, mode, script, guard=Budget(max_tool_calls=2), tools=[_search()], **facts
        )
        _stopped(ran, StopReason.MAX_TOOL_CALLS)
        _equal(f"model calls ({facts})", script.calls, 1)
        _equal(f"tool bodies ({facts})", len(scenario.started), 2)


CLAUSES: tuple[Clause, ...] = (
    Clause(1, "within the caps nothing changes", _within_the_caps),
    Clause(2, "exactly `max_iterations` calls reach the model", _iterations),
    Clause(3, "exactly `max_tool_calls` bodies start, also in a batch", _tool_calls),
    Clause(4, "a quota refuses its tool and the run goes on", _quota),
    Clause(5, "tokens and dollars stop before the next call", _tokens_and_dollars),
    Clause(6, "the deadline ends a hung call", _deadline),
    Clause(7, "abort from another thread", _abort),
    Clause(8, "repetition: nudge, then stop", _repetition),
    Clause(9, "oscillation: nudge, then stop", _oscillation),
    Clause(10, "the ending, in its order", _ending),
    Clause(11, "every tool call has a result", _closed),
    Clause(12, "nothing paid is lost", _kept),
    Clause(13, "resume under a fresh budget", _resumed),
    Clause(14, "another turn after a trip", _another_turn),
    Clause(15, "one warning per cap at 80 %; its handler extends or ends", _warnings),
    Clause(16, "OBSERVE refuses nothing", _observe),
    Clause(17, "retries are charged but are no iterations", _retries),
    Clause(18, "sub-agents spend the same budget", _subagents),
    Clause(19, "a child's trip ends the child, an ancestor's both", _child_trip),
    Clause(20, "concurrent runs are exact and do not mix", _concurrent),
    Clause(21, "one call seen by two layers counts once", _two_layers),
    Clause(
        22, "streams: counted once, ended normally, left without leaks", _streamed, ("streamed",)
    ),
    Clause(23, "failures change no ending and are reported", _failures),
    Clause(24, "the model reads nothing of the budget", _not_a_word),
    Clause(25, "nothing undoes a trip", _not_undone),
)
"""The clauses of the contract, in its order."""
