"""The clauses of the contract, each checked once; the later ones are in files of their own."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from budgetguard_core.budget import Budget
from budgetguard_core.decision import NOT_AVAILABLE, NOT_EXECUTED, OUTCOME_UNKNOWN
from budgetguard_core.events import (
    Event,
    IncidentRecorded,
    ModelCallAdmitted,
    TripObserved,
)
from budgetguard_core.guard import Guard
from budgetguard_core.outcome import BudgetExceeded
from budgetguard_core.pricing import Price, PriceBook
from budgetguard_core.snapshot import Snapshot
from budgetguard_core.sqlite_checkpoints import MemoryStore
from budgetguard_core.stop import StopReason, tool_called
from budgetguard_core.stop_state import ModeName
from budgetguard_core.testing.breakers import (
    bulkhead,
    circuit_breaker,
    observed,
    progress,
    rate_limit,
    reports_of,
    tool_mix,
    velocity,
    waits,
)
from budgetguard_core.testing.checks import (
    DEADLINE,
    GRACE,
    MOMENT,
    act,
    act_timed,
    check_completed,
    check_equal,
    check_nudge,
    check_stopped,
    in_threads,
    nudges_of,
    outcome_of,
    results_of,
    search_tool,
    shape_of,
    sticky,
)
from budgetguard_core.testing.clock import ManualClock
from budgetguard_core.testing.conformance import Clause, check_history
from budgetguard_core.testing.conversation import conversation
from budgetguard_core.testing.driver import Driver, Feature
from budgetguard_core.testing.endings import (
    as_unguarded,
    cut_short,
    failed,
    no_further_step,
    nothing_kept,
    own_limit,
    same_history,
    typed_end,
)
from budgetguard_core.testing.failures import expect
from budgetguard_core.testing.fallback import fallback
from budgetguard_core.testing.last_answers import last_answer
from budgetguard_core.testing.limits import limits
from budgetguard_core.testing.nesting import (
    activated,
    fan_out,
    imported,
    nested,
    not_an_answer,
    pools,
)
from budgetguard_core.testing.pauses import asked, paused, questions, unanswered
from budgetguard_core.testing.replies import dialogue, equal_ids, every_usage
from budgetguard_core.testing.scenario import Mode, Ran, Scenario, Scratch
from budgetguard_core.testing.script import (
    MODEL,
    Agent,
    Call,
    ProviderError,
    Reply,
    Script,
    Tool,
    calls,
    says,
)
from budgetguard_core.testing.wrap_up import wrap_up
from budgetguard_core.usage import TokenUsage

_DIME = PriceBook({MODEL: Price(input=1000, output=0)})
_UNSPEAKABLE = re.compile(
    # A report's `estimated_remaining_steps` are those of the work.
    r"budget|quota|\bcaps?\b|max_|iteration|tokens? left|remaining(?!_steps)|stop_reason|deadline"
    r"|\$\d",
    re.IGNORECASE,
)


def _within_the_caps(driver: Driver, mode: Mode) -> None:
    def run(guard: Guard | None) -> tuple[Ran, Scenario]:
        script = Script([calls("search", "read"), calls("search"), says("The answer is 42.")])
        search = Tool("search", lambda number, _: f"result {number}")
        return act(driver, mode, script, guard=guard, tools=[search, Tool("read")])

    bare, bare_scenario = run(None)
    guard = Guard(Budget(max_iterations=50, max_tool_calls=50, max_total_tokens=10**6))
    ran, scenario = run(guard)
    expect(bare.raised is None, f"the run without a guard raised {bare.raised!r}")
    check_completed(ran)
    check_equal("history", shape_of(ran.history), shape_of(bare.history))
    check_equal("model calls", scenario.script.calls, bare_scenario.script.calls)
    check_equal("tool bodies", sorted(scenario.started), sorted(bare_scenario.started))
    check_equal("final", outcome_of(ran).final, "The answer is 42.")
    if mode == "streamed":
        check_equal("chunks", len(ran.chunks), len(bare.chunks))


def _iterations(driver: Driver, mode: Mode) -> None:
    ran, scenario = act(
        driver, mode, sticky("search"), guard=Budget(max_iterations=3), tools=[search_tool()]
    )
    outcome = check_stopped(ran, StopReason.MAX_ITERATIONS)
    check_equal("model calls", scenario.script.calls, 3)
    check_equal("tool bodies", len(scenario.started), 3)
    check_equal("iterations", outcome.usage.iterations, 3)
    check_equal("tokens", outcome.usage.total_tokens, 360)


def _tool_calls(driver: Driver, mode: Mode) -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    script = Script([calls("a", "b"), calls("c", "d", "e", "f")])
    ran, scenario = act(
        driver,
        mode,
        script,
        guard=Budget(max_tool_calls=3),
        tools=[Tool(name, f"{name} is done") for name in names],
    )
    outcome = check_stopped(ran, StopReason.MAX_TOOL_CALLS)
    check_equal("tool bodies", sorted(scenario.started), ["a", "b", "c"])
    check_equal("model calls", script.calls, 2)
    check_equal("counted", outcome.usage.tool_calls, 3)
    results = results_of(ran.history)
    expect("c is done" in results[2], f"the last call that fits has no result: {results}")
    for text in results[3:]:
        expect(NOT_EXECUTED in text, f"a call that never started has the result {text!r}")


def _quota(driver: Driver, mode: Mode) -> None:
    script = Script([calls("search"), calls("search", "read"), says("Without more searches.")])
    ran, scenario = act(
        driver,
        mode,
        script,
        guard=Budget(tool_quotas={"sea*": 1}),
        tools=[search_tool(), Tool("read", "text")],
    )
    check_completed(ran)
    check_equal("tool bodies", sorted(scenario.started), ["read", "search"])
    check_equal("model calls", script.calls, 3)
    refused = [text for text in results_of(ran.history) if NOT_AVAILABLE in text]
    check_equal("refused results", len(refused), 1)
    expect(NOT_AVAILABLE[:40] in script.sent[2], "the model does not see that it was refused")


def _tokens_and_dollars(driver: Driver, mode: Mode) -> None:
    cap = 300
    ran, scenario = act(
        driver, mode, sticky("search"), guard=Budget(max_total_tokens=cap), tools=[search_tool()]
    )
    outcome = check_stopped(ran, StopReason.MAX_TOTAL_TOKENS)
    used = outcome.usage.total_tokens
    expect(1 <= scenario.script.calls <= 3, f"{scenario.script.calls} calls of 120 under {cap}")
    expect(used - 120 < cap, f"a call started after {used - 120} of {cap} tokens were used")

    usage = TokenUsage(30, 10)
    ran, _ = act(
        driver,
        mode,
        Script([calls("search", usage=usage)]),
        guard=Budget(max_total_tokens=400, max_output_tokens_per_call=10),
        tools=[search_tool()],
        user_input="Please look this up carefully. " * 8,
    )
    outcome = check_stopped(ran, StopReason.MAX_TOTAL_TOKENS)
    expect(
        outcome.usage.total_tokens <= 400,
        f"{outcome.usage.total_tokens} tokens with a projection under 400",
    )

    ran, scenario = act(
        driver,
        mode,
        Script([calls("search", usage=TokenUsage(100, 0))]),
        guard=Guard(Budget(max_cost_usd=Decimal("0.30")), price_book=_DIME),
        tools=[search_tool()],
    )
    outcome = check_stopped(ran, StopReason.MAX_COST_USD)
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
        ran, scenario = act(driver, mode, script, guard=guard, tools=[search_tool()])
        check_stopped(ran, StopReason.MAX_SECONDS)
        check_equal("model calls", script.calls, 1)
        check_equal("tool bodies after the deadline", scenario.started, [])
        return

    def run(script: Script) -> Ran:
        ran, took = act_timed(
            driver,
            mode,
            script,
            guard=Budget(max_seconds=DEADLINE),
            tools=[Tool("search", hang=True)],
        )
        check_stopped(ran, StopReason.MAX_SECONDS)
        expect(took < DEADLINE + GRACE, f"it took {took:.1f} s")
        return ran

    run(Script([Reply(hang=True)]))
    ran = run(sticky("search"))
    expect(
        OUTCOME_UNKNOWN in results_of(ran.history)[0],
        f"the interrupted call has the result {results_of(ran.history)[0]!r}",
    )


def _abort(driver: Driver, mode: Mode) -> None:
    guard = Guard(Budget(max_iterations=50))

    def aborting(number: int) -> Reply:
        if number == 1:
            in_threads(guard.abort)
        return calls("search")

    script = Script(aborting)
    ran, scenario = act(driver, mode, script, guard=guard, tools=[search_tool()])
    check_stopped(ran, StopReason.ABORTED)
    expect(script.calls == 2, f"{script.calls} model calls, aborted during the second")
    expect(len(scenario.started) == 1, f"{scenario.started} started after the abort")
    if mode == "sync":
        return
    for script, tools in (
        (Script([Reply(hang=True)]), []),
        (sticky("search"), [Tool("search", hang=True)]),
    ):
        guard = Guard(Budget(max_iterations=50))
        timer = threading.Timer(MOMENT, guard.abort)
        timer.start()
        ran, took = act_timed(driver, mode, script, guard=guard, tools=tools)
        timer.join()
        check_stopped(ran, StopReason.ABORTED)
        expect(took < MOMENT + GRACE, f"it took {took:.1f} s")


def _repetition(driver: Driver, mode: Mode) -> None:
    events: list[Event] = []
    script = Script([calls(Call("search", "same"))])
    ran, scenario = act(
        driver,
        mode,
        script,
        guard=Guard(Budget(max_iterations=30), sinks=[events.append]),
        tools=[Tool("search", "nothing found")],
    )
    check_stopped(ran, StopReason.NO_PROGRESS)
    expect(len(scenario.started) <= 6, f"{len(scenario.started)} identical calls were made")
    check_nudge(events, script)

    events.clear()
    script = Script([*[calls(Call("search", "same"))] * 8, says("Found.")])
    ran, scenario = act(
        driver,
        mode,
        script,
        guard=Guard(Budget(max_iterations=30), sinks=[events.append]),
        tools=[search_tool()],
    )
    check_completed(ran)
    check_equal("nudges for changing results", nudges_of(events), [])
    check_equal("tool bodies", len(scenario.started), 8)


def _oscillation(driver: Driver, mode: Mode) -> None:
    events: list[Event] = []
    script = Script(lambda number: calls(("analyze", "verify")[number % 2]))
    ran, scenario = act(
        driver,
        mode,
        script,
        guard=Guard(Budget(max_iterations=40), sinks=[events.append]),
        tools=[Tool("analyze", "please verify"), Tool("verify", "please analyze")],
    )
    check_stopped(ran, StopReason.OSCILLATION)
    expect(len(scenario.started) <= 8, f"{len(scenario.started)} calls went round in a circle")
    check_nudge(events, script)


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
    ran, _ = act(driver, mode, sticky("search"), guard=guard, tools=[search_tool()], store=recorder)
    outcome = check_stopped(ran, StopReason.MAX_ITERATIONS)
    last = ran.history[-1]
    check_equal("the last message's role", last.role, "assistant")
    marker = dict(last.synthetic or {})
    expected = {"synthetic": True, "stop_reason": "max_iterations", "run_id": guard.run_id}
    check_equal("its marker", {name: marker.get(name) for name in expected}, expected)
    expect(not re.search(r"max_iterations|\b2 of\b", last.text), f"it tells: {last.text!r}")
    expect(outcome.final, "the outcome has no final text")
    expect(outcome.messages, "the outcome has no messages")
    expect(guard.outcome is not None, "guard.outcome is not set")
    check_equal("violations", [v.reason for v in outcome.violations], [StopReason.MAX_ITERATIONS])
    expect("saved" in recorder.order, "no checkpoint was saved")
    expect("incident" in recorder.order, "no incident was recorded")
    incident = recorder.order.index("incident")
    expect("saved" in recorder.order[:incident], f"order of the ending: {recorder.order}")
    expect("saved" not in recorder.order[incident:], f"order of the ending: {recorder.order}")
    expect("flushed" in recorder.order[incident:], f"order of the ending: {recorder.order}")
    trip = recorder.last and recorder.last.trip
    expect(trip is not None, "the checkpoint does not know of the trip")

    ran, _ = act(
        driver,
        mode,
        sticky("search"),
        guard=Budget(max_iterations=2),
        tools=[search_tool()],
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
        tools = [search_tool(), Tool("read", "text"), Tool("write", error=ValueError("read-only"))]
        script = Script([calls("search", "read"), calls("search", "read", "search")])
        ran, _ = act(driver, mode, script, guard=budget, tools=tools)
        check_stopped(ran, reason)
        expect(ran.history[-1].synthetic is not None, "the last message is not synthetic")

    guard = Guard(Budget(max_iterations=5))
    guard.abort()
    script = sticky("search")
    ran, _ = act(driver, mode, script, guard=guard, tools=[search_tool()])
    check_stopped(ran, StopReason.ABORTED)
    check_equal("model calls of an aborted run", script.calls, 0)


def _kept(driver: Driver, mode: Mode) -> None:
    script = Script([says("A very long answer.", TokenUsage(100, 900))])
    ran, _ = act(driver, mode, script, guard=Budget(max_total_tokens=500))
    outcome = check_completed(ran)
    check_equal("final", outcome.final, "A very long answer.")
    check_equal("tokens", outcome.usage.total_tokens, 1000)

    script = Script([calls("read", "search", "write")])
    tools = [Tool("read", "what was read"), Tool("search", "found"), Tool("write")]
    ran, _ = act(driver, mode, script, guard=Budget(max_tool_calls=2), tools=tools)
    check_stopped(ran, StopReason.MAX_TOOL_CALLS)
    expect("what was read" in results_of(ran.history)[0], "a completed sibling's result is lost")
    if mode == "sync":
        return
    script = Script([calls("read", "search")])
    tools = [Tool("read", "what was read"), Tool("search", hang=True)]
    ran, _ = act(driver, mode, script, guard=Budget(max_seconds=DEADLINE), tools=tools)
    check_stopped(ran, StopReason.MAX_SECONDS)
    results = results_of(ran.history)
    expect("what was read" in results[0], f"a completed sibling's result is lost: {results}")
    expect(OUTCOME_UNKNOWN in results[1], f"the interrupted call's result: {results}")


def _resumed(driver: Driver, mode: Mode) -> None:
    script = Script([calls("first"), calls("second"), calls("third"), says("All three.")])
    tools = [Tool(name, f"{name} is done") for name in ("first", "second", "third")]
    facts: dict[str, Any] = {"tools": tools, "store": MemoryStore(), "shared": Scratch()}
    ran, before = act(driver, mode, script, guard=Budget(max_iterations=2), **facts)
    check_stopped(ran, StopReason.MAX_ITERATIONS)
    ran, after = act(
        driver, mode, script, guard=Budget(max_iterations=2), after=ran, user_input=None, **facts
    )
    outcome = check_completed(ran)
    check_equal("final", outcome.final, "All three.")
    check_equal("tool bodies", before.started + after.started, ["first", "second", "third"])
    check_equal("iterations under the fresh budget", outcome.usage.iterations, 2)
    for name in ("first", "second"):
        expect(f"{name} is done" in script.sent[-1], f"the model forgot what {name} brought")


def _another_turn(driver: Driver, mode: Mode) -> None:
    script = Script([calls("search"), calls("search"), says("Here you are.")])
    facts: dict[str, Any] = {"tools": [search_tool()], "store": MemoryStore(), "shared": Scratch()}
    ran, _ = act(
        driver, mode, script, guard=Budget(max_iterations=2), user_input="What is new?", **facts
    )
    check_stopped(ran, StopReason.MAX_ITERATIONS)
    ran, _ = act(
        driver,
        mode,
        script,
        guard=Budget(max_iterations=2),
        user_input="And without searching?",
        after=ran,
        **facts,
    )
    outcome = outcome_of(ran)
    check_equal("status", outcome.status, "completed")
    check_history(ran.history)
    check_equal("final", outcome.final, "Here you are.")
    for text in ("What is new?", "And without searching?"):
        expect(text in script.sent[-1], f"{text!r} was not sent to the model")


def _warnings(driver: Driver, mode: Mode) -> None:
    def run(action: Callable[[Guard], object]) -> tuple[Ran, Script, list[str]]:
        given: list[str] = []

        def warned(guard: Guard, event: Any) -> None:
            given.append(event.dimension)
            action(guard)

        script = sticky("search")
        budget = Budget(max_iterations=10, max_tool_calls=100)
        guard = Guard(budget, on_warning=warned)
        ran, _ = act(driver, mode, script, guard=guard, tools=[search_tool()])
        return ran, script, given

    ran, script, given = run(lambda _: None)
    outcome = check_stopped(ran, StopReason.MAX_ITERATIONS)
    check_equal("warnings", given, ["max_iterations"])
    check_equal("outcome.warnings", outcome.warnings, ("max_iterations",))
    check_equal("model calls", script.calls, 10)

    ran, script, _ = run(lambda guard: guard.extend(max_iterations=12))
    check_stopped(ran, StopReason.MAX_ITERATIONS)
    check_equal("model calls when it extends", script.calls, 12)

    ran, script, _ = run(lambda guard: guard.abort("a person said no"))
    check_stopped(ran, StopReason.ABORTED)
    expect(script.calls <= 8, f"{script.calls} model calls, ended by the handler at 8")


def _observe(driver: Driver, mode: Mode) -> None:
    events: list[Event] = []

    def run(guard_mode: ModeName) -> tuple[Ran, Script]:
        guard = Guard(Budget(max_iterations=2), mode=guard_mode, sinks=[events.append])
        script = Script([*[calls("search")] * 4, says("Done.")])
        ran, _ = act(driver, mode, script, guard=guard, tools=[search_tool()])
        return ran, script

    ran, script = run("observe")
    outcome = check_completed(ran)
    check_equal("model calls", script.calls, 5)
    check_equal("observed", [v.reason for v in outcome.observed], [StopReason.MAX_ITERATIONS])
    kinds = [type(event) for event in events]
    admitted = kinds[: kinds.index(TripObserved)].count(ModelCallAdmitted)
    check_equal("model calls when it would have tripped", admitted, 2)
    ran, script = run("enforce")
    check_stopped(ran, StopReason.MAX_ITERATIONS)
    check_equal("model calls in ENFORCE", script.calls, 2)


def _retries(driver: Driver, mode: Mode) -> None:
    failure = Reply(error=ProviderError("overloaded"))
    script = Script([failure, calls("search"), failure, says("At last.")])
    ran, _ = act(
        driver,
        mode,
        script,
        guard=Guard(Budget(max_iterations=2)),
        tools=[search_tool()],
        retries=2,
    )
    outcome = check_completed(ran)
    check_equal("model calls", (script.calls, outcome.usage.model_calls), (4, 4))
    check_equal("iterations", outcome.usage.iterations, 2)
    check_equal("failed calls", outcome.usage.failed_calls, 2)

    script = Script([failure])
    ran, _ = act(
        driver,
        mode,
        script,
        guard=Guard(Budget(max_model_calls=2)),
        tools=[search_tool()],
        retries=5,
    )
    check_stopped(ran, StopReason.MAX_MODEL_CALLS)
    check_equal("model calls", script.calls, 2)


def _subagents(driver: Driver, mode: Mode) -> None:
    def agent(number: int = 0) -> Agent:
        return Agent(name=f"agent{number}", script=sticky("search"), tools=[search_tool()])

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
        ran, _ = act(
            driver,
            mode,
            script,
            guard=guard,
            tools=tools,
            handoffs=workers if form == "handoff" else (),
            graph=workers[0] if form == "graph" else None,
        )
        outcome = check_stopped(ran, StopReason.MAX_MODEL_CALLS)
        made = script.calls + sum(worker.script.calls for worker in workers)
        check_equal(f"model calls in all ({form})", made, 7)
        check_equal(f"model calls counted ({form})", outcome.usage.model_calls, 7)
        check_equal(f"tokens counted ({form})", outcome.usage.total_tokens, 7 * 120)


def _child_trip(driver: Driver, mode: Mode) -> None:
    def run(guard: Guard, budget: Budget) -> tuple[Ran, Script, Script]:
        worker = Agent(name="worker", script=sticky("search"), tools=[search_tool()], budget=budget)
        script = Script([calls("ask_worker"), says("I know enough.")])
        ran, _ = act(driver, mode, script, guard=guard, tools=[Tool("ask_worker", agent=worker)])
        return ran, script, worker.script

    ran, script, below = run(Guard(Budget(max_iterations=20)), Budget(max_iterations=2))
    outcome = check_completed(ran)
    check_equal("model calls of the child", below.calls, 2)
    check_equal("final", outcome.final, "I know enough.")
    check_equal("model calls counted", outcome.usage.model_calls, 4)
    result = results_of(ran.history)[0]
    expect("stopped before it finished" in result, f"the parent got {result!r} from the child")

    ran, script, below = run(Guard(Budget(max_model_calls=4)), Budget(max_iterations=10))
    check_stopped(ran, StopReason.MAX_MODEL_CALLS)
    check_equal("model calls of parent and child", (script.calls, below.calls), (1, 3))


def _concurrent(driver: Driver, mode: Mode) -> None:
    guard = Guard(Budget(max_model_calls=9))
    scripts = [sticky("search") for _ in range(3)]
    ran: list[Ran] = []
    in_threads(
        *(
            lambda script=script: ran.append(
                act(driver, mode, script, guard=guard, tools=[search_tool()])[0]
            )
            for script in scripts
        )
    )
    for one in ran:
        check_stopped(one, StopReason.MAX_MODEL_CALLS)
    check_equal("model calls of all runs", sum(script.calls for script in scripts), 9)
    check_equal("counted", guard.usage.model_calls, 9)

    script = sticky("search")
    tools = [search_tool()]
    shared = Scratch()
    guards = [Guard(Budget(max_iterations=n)) for n in (2, 3)]

    def one_run(guard: Guard) -> None:
        ran, _ = act(driver, mode, script, guard=guard, tools=tools, shared=shared)
        check_stopped(ran, StopReason.MAX_ITERATIONS)

    for guard in guards:
        one_run(guard)
    check_equal(
        "iterations of two guards on one agent", [g.usage.iterations for g in guards], [2, 3]
    )
    guards = [Guard(Budget(max_iterations=n)) for n in (2, 3)]
    in_threads(*(lambda guard=guard: one_run(guard) for guard in guards))
    check_equal("iterations at the same time", [g.usage.iterations for g in guards], [2, 3])
    check_equal("model calls", script.calls, 10)


def _two_layers(driver: Driver, mode: Mode) -> None:
    guard = Guard(Budget(max_iterations=3))
    script = sticky("search")
    ran, scenario = act(driver, mode, script, guard=guard, tools=[search_tool()], twice=True)
    outcome = check_stopped(ran, StopReason.MAX_ITERATIONS)
    check_equal("model calls", (script.calls, outcome.usage.model_calls), (3, 3))
    check_equal("tokens", outcome.usage.total_tokens, 360)
    check_equal("tool bodies", (len(scenario.started), outcome.usage.tool_calls), (3, 3))


def _streamed(driver: Driver, mode: Mode) -> None:
    guard = Guard(Budget(max_iterations=2))
    ran, _ = act(driver, mode, sticky("search"), guard=guard, tools=[search_tool()])
    outcome = check_stopped(ran, StopReason.MAX_ITERATIONS)
    check_equal("tokens", outcome.usage.total_tokens, 240)
    expect(ran.chunks, "the stream gave nothing")
    text = str(outcome.final)
    expect(text[:30] in str(ran.chunks[-3:]), "the synthetic message did not end the stream")

    guard = Guard(Budget(max_iterations=2))
    script = sticky("search")
    ran, _ = act(driver, mode, script, guard=guard, tools=[search_tool()], break_after=1)
    expect(ran.raised is None, f"leaving early raised {ran.raised!r}")
    expect(not ran.leaked, f"an early break leaves tasks behind: {ran.leaked}")
    expect(script.calls <= 1, f"{script.calls} model calls after an early break")
    check_equal("calls in flight after an early break", guard.open_calls(), ())
    check_equal("model calls counted", guard.usage.model_calls, script.calls)

    # Without usage the tokens are estimated, never zero.
    guard = Guard(Budget(max_iterations=2))
    script = Script([calls("search", usage=None)])
    ran, _ = act(driver, mode, script, guard=guard, tools=[search_tool()])
    outcome = check_stopped(ran, StopReason.MAX_ITERATIONS)
    expect(outcome.usage.total_tokens > 0, "missing usage counts as zero")
    check_equal("estimated calls", outcome.usage.estimated_calls, 2)


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
    ran, scenario = act(
        driver, mode, sticky("search"), guard=guard, tools=[search_tool()], store=broken
    )
    outcome = check_stopped(ran, StopReason.MAX_ITERATIONS)
    check_equal("model calls", scenario.script.calls, 2)
    expect(any("sink" in e for e in outcome.errors), f"the sink is not in {outcome.errors}")
    expect(any("checkpoint" in e for e in outcome.errors), f"no checkpoint in {outcome.errors}")

    guard = Guard(Budget(max_iterations=5))
    script = Script([calls("search"), Reply(error=ProviderError("no such model"))])
    ran, _ = act(driver, mode, script, guard=guard, tools=[search_tool()])
    expect(
        ran.raised is not None or (ran.outcome is not None and ran.outcome.status == "completed"),
        "a model that fails is hidden",
    )
    check_equal("failed calls", guard.usage.failed_calls, 1)
    check_equal("calls in flight after a failure", guard.open_calls(), ())

    guard = Guard(Budget(max_iterations=2))
    script = Script([calls("broken")])
    tools = [Tool("broken", error=ValueError("the tool is broken"))]
    ran, _ = act(driver, mode, script, guard=guard, tools=tools)
    stopped = ran.outcome is not None and ran.outcome.stop_reason is StopReason.MAX_ITERATIONS
    expect(ran.raised is not None or stopped, "a tool that fails is hidden")
    expect(ran.raised is not None or guard.usage.tool_calls == 2, "a failed call is not counted")
    check_history(ran.history)
    check_equal("tool calls in flight after a failure", guard.open_calls(), ())


def _not_a_word(driver: Driver, mode: Mode) -> None:
    shared = Scratch()
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
        "tools": [Tool("read", "text"), Tool("look", "nothing"), search_tool()],
        "shared": shared,
        "store": MemoryStore(),
    }
    ran, _ = act(driver, mode, script, guard=budget, **facts)
    outcome_of(ran)
    ran, _ = act(
        driver,
        mode,
        script,
        guard=Budget(max_iterations=2),
        after=ran,
        user_input="Go on.",
        **facts,
    )
    # A quota that cannot refuse its tool stops the first run at its third call.
    least = 4 if driver.deviation(4, mode) else 6
    expect(script.calls >= least, f"only {script.calls} prompts to look at")
    sent_at_all = list(script.sent)
    if driver.has("reports"):
        sent_at_all += reports_of(driver, mode)
    for number, sent in enumerate(sent_at_all):
        found = _UNSPEAKABLE.search(sent)
        expect(
            found is None,
            f"prompt {number} mentions {found}: {sent!r}",
        )


def _not_undone(driver: Driver, mode: Mode) -> None:
    features: tuple[Feature, ...] = ("structured", "swallowing")
    for facts in ({feature: True} for feature in features if driver.has(feature)):
        script = sticky("search")
        guard = Guard(Budget(max_iterations=3))
        ran, scenario = act(driver, mode, script, guard=guard, tools=[search_tool()], **facts)
        check_stopped(ran, StopReason.MAX_ITERATIONS)
        check_equal(f"model calls ({facts})", script.calls, 3)
        check_equal(f"tool bodies ({facts})", len(scenario.started), 3)
        expect(ran.history[-1].synthetic is not None, "the last message is not synthetic")

        script = Script([calls("search", "search", "search")])
        ran, scenario = act(
            driver, mode, script, guard=Budget(max_tool_calls=2), tools=[search_tool()], **facts
        )
        check_stopped(ran, StopReason.MAX_TOOL_CALLS)
        check_equal(f"model calls ({facts})", script.calls, 1)
        check_equal(f"tool bodies ({facts})", len(scenario.started), 2)


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
    Clause(26, "a run inside another one spends its budget", nested),
    Clause(27, "`guard.activate()` bounds every run in its block", activated),
    Clause(28, "a run that waits for a person is paused", paused, needs=("approval",)),
    Clause(29, "a run that fails or is cancelled has an outcome", failed),
    Clause(30, "a stop is never read as an answer", not_an_answer),
    Clause(31, "equal ids of tool calls change nothing", equal_ids, needs=("equal_ids",)),
    Clause(32, "replies that repeat: nudge, then stop", dialogue, needs=("dialogue",)),
    Clause(33, "an answer cut by our bound is a stop", cut_short, needs=("bounded_output",)),
    Clause(34, "nothing is kept of runs that are over", nothing_kept),
    Clause(35, "usage is read in full, and estimated where there is none", every_usage),
    Clause(36, "the stored history is the returned one, and goes on", same_history),
    Clause(37, "calls answered without their body: nudge, then stop", unanswered),
    Clause(38, "an answer to a question is no user turn", questions, needs=("approval",)),
    Clause(39, "the end has the form that was asked for", typed_end, needs=("structured",)),
    Clause(40, "the framework's own limit is no completion", own_limit, needs=("own_limit",)),
    Clause(41, "threads and pools in a block spend its budget", pools),
    Clause(42, "a tripped run starts no further step", no_further_step),
    Clause(43, "a completed run is stored as an unguarded one", as_unguarded),
    Clause(44, "nobody is asked about a call that will be refused", asked, needs=("approval",)),
    Clause(45, "a fan-out of unknown answers stays within the cap", fan_out),
    Clause(46, "importing an adapter is enough for a block", imported, needs=("imported",)),
    Clause(47, "the pace: the run ends at its ceiling", velocity),
    Clause(48, "reports without progress: nudge, then stop", progress, needs=("reports",)),
    Clause(49, "a rate limit refuses and says when to try again", rate_limit),
    Clause(50, "a full bulkhead refuses, and the run goes on", bulkhead),
    Clause(51, "an open circuit breaker answers in the tool's place", circuit_breaker),
    Clause(52, "an unusual mix of tools is told once and stops nothing", tool_mix),
    Clause(53, "in OBSERVE breakers delay, refuse and ask nothing", observed),
    Clause(54, "a call waits for the pace, a token, a place", waits, needs=("waits",)),
    Clause(55, "a stopped run has a last answer from its reserve", last_answer, needs=("at_last",)),
    Clause(56, "one request to finish, from a share of a cap on", wrap_up),
    Clause(57, "a cheaper model, from a share of a cap on", fallback, needs=("fallback",)),
    Clause(58, "a conversation's counters go on over its runs", conversation),
    Clause(59, "a cap asks a person before it stops a run", limits),
)
"""The clauses of the contract, in its order; from 47 on those of what is off by default."""
