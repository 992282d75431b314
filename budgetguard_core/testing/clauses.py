"""The clauses of the contract, each checked once; the later ones are in files of their own."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from budgetguard_core.budget import Budget
from budgetguard_core.decision import NOT_AVAILABLE, NOT_EXECUTED, OUTCOME_UNKNOWN
from budgetguard_core.events import Event, IncidentRecorded, ModelCallAdmitted, TripObserved
from budgetguard_core.guard import Guard
from budgetguard_core.outcome import BudgetExceeded
from budgetguard_core.pricing import Price, PriceBook
from budgetguard_core.snapshot import Snapshot
from budgetguard_core.sqlite_checkpoints import MemoryStore
from budgetguard_core.stop import StopReason, tool_called
from budgetguard_core.stop_state import ModeName
from budgetguard_core.testing import breakers, endings, nesting, optional, pauses, replies
from budgetguard_core.testing.clock import ManualClock
from budgetguard_core.testing.conformance import Clause
from budgetguard_core.testing.driver import Feature
from budgetguard_core.testing.message import check_history, expect
from budgetguard_core.testing.scenario import MODES, Scratch
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
from budgetguard_core.testing.trial import (
    DEADLINE,
    GRACE,
    MOMENT,
    Done,
    Trial,
    check_equal,
    check_nudge,
    in_threads,
    nudges_of,
    search_tool,
    shape_of,
    sticky,
    watched,
)
from budgetguard_core.usage import TokenUsage

_DIME = PriceBook({MODEL: Price(input=1000, output=0)})
_UNSPEAKABLE = re.compile(
    # A report's `estimated_remaining_steps` are those of the work.
    r"budget|quota|\bcaps?\b|max_|iteration|tokens? left|remaining(?!_steps)|stop_reason|deadline"
    r"|\$\d",
    re.IGNORECASE,
)


def _within_the_caps(at: Trial) -> None:
    def run(guard: Guard | None) -> Done:
        search = Tool("search", lambda number, _: f"result {number}")
        model = [calls("search", "read"), calls("search"), says("The answer is 42.")]
        return at.run(model, guard, search, Tool("read"))

    bare = run(None)
    expect(bare.ran.raised is None, f"the run without a guard raised {bare.ran.raised!r}")
    guarded = run(Guard(Budget(max_iterations=50, max_tool_calls=50, max_total_tokens=10**6)))
    outcome = guarded.completed(calls=bare.script.calls, bodies=sorted(bare.started))
    check_equal("history", shape_of(guarded.history), shape_of(bare.history))
    check_equal("final", outcome.final, "The answer is 42.")
    if at.mode == "streamed":
        check_equal("chunks", len(guarded.ran.chunks), len(bare.ran.chunks))


def _iterations(at: Trial) -> None:
    done = at.run(sticky("search"), Budget(max_iterations=3))
    done.stopped(StopReason.MAX_ITERATIONS, calls=3, bodies=3, iterations=3, total_tokens=360)


def _tool_calls(at: Trial) -> None:
    tools = [Tool(name, f"{name} is done") for name in "abcdef"]
    model = [calls("a", "b"), calls("c", "d", "e", "f")]
    done = at.run(model, Budget(max_tool_calls=3), *tools)
    done.stopped(StopReason.MAX_TOOL_CALLS, calls=2, bodies=["a", "b", "c"], tool_calls=3)
    results = done.results
    expect("c is done" in results[2], f"the last call that fits has no result: {results}")
    for text in results[3:]:
        expect(NOT_EXECUTED in text, f"a call that never started has the result {text!r}")


def _quota(at: Trial) -> None:
    model = [calls("search"), calls("search", "read"), says("Without more searches.")]
    done = at.run(model, Budget(tool_quotas={"sea*": 1}), search_tool(), Tool("read", "text"))
    done.completed(calls=3, bodies=["read", "search"])
    check_equal("refused results", len([one for one in done.results if NOT_AVAILABLE in one]), 1)
    known = NOT_AVAILABLE[:40] in done.script.sent[2]
    expect(known, "the model does not see that it was refused")


def _tokens_and_dollars(at: Trial) -> None:
    cap = 300
    done = at.run(sticky("search"), Budget(max_total_tokens=cap))
    used = done.stopped(StopReason.MAX_TOTAL_TOKENS).usage.total_tokens
    made = done.script.calls
    expect(1 <= made <= 3, f"{made} calls of 120 under {cap}")
    expect(used - 120 < cap, f"a call started after {used - 120} of {cap} tokens were used")

    budget = Budget(max_total_tokens=400, max_output_tokens_per_call=10)
    requested = "Please look this up carefully. " * 8
    done = at.run([calls("search", usage=TokenUsage(30, 10))], budget, user_input=requested)
    used = done.stopped(StopReason.MAX_TOTAL_TOKENS).usage.total_tokens
    expect(used <= 400, f"{used} tokens with a projection under 400")

    guard = Guard(Budget(max_cost_usd=Decimal("0.30")), price_book=_DIME)
    done = at.run([calls("search", usage=TokenUsage(100, 0))], guard)
    cost = done.stopped(StopReason.MAX_COST_USD).usage.cost_usd
    made = done.script.calls
    expect(1 <= made <= 3, f"{made} calls of $0.10 under $0.30")
    expect(cost <= Decimal("0.30"), f"${cost} under $0.30")


def _deadline(at: Trial) -> None:
    if at.is_sync:
        # Nothing can interrupt a call that blocks its thread: the late one is the last one.
        clock = ManualClock()
        late = Reply(tool_calls=(Call("search"),), seconds=10.0)
        script = Script([late, calls("search")], clock=clock)
        done = at.run(script, Guard(Budget(max_seconds=5), clock=clock))
        done.stopped(StopReason.MAX_SECONDS, calls=1, bodies=0)
        return

    def cut(script: Script) -> Done:
        done = at.run(script, Budget(max_seconds=DEADLINE), Tool("search", hang=True))
        done.stopped(StopReason.MAX_SECONDS)
        expect(done.seconds < DEADLINE + GRACE, f"it took {done.seconds:.1f} s")
        return done

    cut(Script([Reply(hang=True)]))
    result = cut(sticky("search")).results[0]
    expect(OUTCOME_UNKNOWN in result, f"the interrupted call has the result {result!r}")


def _abort(at: Trial) -> None:
    guard = Guard(Budget(max_iterations=50))

    def aborting(number: int) -> Reply:
        if number == 1:
            in_threads(guard.abort)
        return calls("search")

    at.run(aborting, guard).stopped(StopReason.ABORTED, calls=2, bodies=1)
    if at.is_sync:
        return
    for script in (Script([Reply(hang=True)]), sticky("search")):
        guard = Guard(Budget(max_iterations=50))
        timer = threading.Timer(MOMENT, guard.abort)
        timer.start()
        done = at.run(script, guard, Tool("search", hang=True))
        timer.join()
        done.stopped(StopReason.ABORTED)
        expect(done.seconds < MOMENT + GRACE, f"it took {done.seconds:.1f} s")


def _repetition(at: Trial) -> None:
    same = calls(Call("search", "same"))
    guard, events = watched(max_iterations=30)
    done = at.run([same], guard, Tool("search", "nothing found"))
    done.stopped(StopReason.NO_PROGRESS)
    expect(len(done.started) <= 6, f"{len(done.started)} identical calls were made")
    check_nudge(events, done.script)

    guard, events = watched(max_iterations=30)
    at.run([*[same] * 8, says("Found.")], guard).completed(bodies=8)
    check_equal("nudges for changing results", nudges_of(events), [])


def _oscillation(at: Trial) -> None:
    guard, events = watched(max_iterations=40)
    tools = [Tool("analyze", "please verify"), Tool("verify", "please analyze")]
    done = at.run(lambda number: calls(("analyze", "verify")[number % 2]), guard, *tools)
    done.stopped(StopReason.OSCILLATION)
    expect(len(done.started) <= 8, f"{len(done.started)} calls went round in a circle")
    check_nudge(events, done.script)


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


def _ending(at: Trial) -> None:
    recorder = _Recorder()
    guard = Guard(Budget(max_iterations=2), sinks=[recorder])
    done = at.run(sticky("search"), guard, store=recorder)
    outcome = done.stopped(StopReason.MAX_ITERATIONS)
    last = done.history[-1]
    check_equal("the last message's role", last.role, "assistant")
    marker = dict(last.synthetic or {})
    expected = {"synthetic": True, "stop_reason": "max_iterations", "run_id": guard.run_id}
    check_equal("its marker", {name: marker.get(name) for name in expected}, expected)
    expect(not re.search(r"max_iterations|\b2 of\b", last.text), f"it tells: {last.text!r}")
    expect(outcome.final, "the outcome has no final text")
    expect(outcome.messages, "the outcome has no messages")
    expect(guard.outcome is not None, "guard.outcome is not set")
    check_equal("violations", [v.reason for v in outcome.violations], [StopReason.MAX_ITERATIONS])
    order = recorder.order
    expect("incident" in order, "no incident was recorded")
    before, after = order[: order.index("incident")], order[order.index("incident") :]
    in_order = "saved" in before and "saved" not in after and "flushed" in after
    expect(in_order, f"order of the ending: {order}")
    trip = recorder.last and recorder.last.trip
    expect(trip is not None, "the checkpoint does not know of the trip")

    error = at.run(sticky("search"), Budget(max_iterations=2), on_trip="raise").ran.raised
    expect(isinstance(error, BudgetExceeded), f"on_trip='raise' gave {error!r}")
    raised = error.outcome if isinstance(error, BudgetExceeded) else None
    expect(raised is not None and raised.messages, "BudgetExceeded has no outcome")


def _closed(at: Trial) -> None:
    for budget, reason in (
        (Budget(max_tool_calls=1), StopReason.MAX_TOOL_CALLS),
        (Budget(max_total_tokens=1), StopReason.MAX_TOTAL_TOKENS),
        (Budget(max_iterations=1), StopReason.MAX_ITERATIONS),
        (Budget(stop_when=(tool_called("read"),)), StopReason.STOP_CONDITION),
    ):
        tools = [search_tool(), Tool("read", "text"), Tool("write", error=ValueError("read-only"))]
        done = at.run([calls("search", "read"), calls("search", "read", "search")], budget, *tools)
        done.stopped(reason)
        expect(done.history[-1].synthetic is not None, "the last message is not synthetic")

    guard = Guard(Budget(max_iterations=5))
    guard.abort()
    at.run(sticky("search"), guard).stopped(StopReason.ABORTED, calls=0)


def _kept(at: Trial) -> None:
    long = says("A very long answer.", TokenUsage(100, 900))
    outcome = at.run([long], Budget(max_total_tokens=500)).completed(total_tokens=1000)
    check_equal("final", outcome.final, "A very long answer.")

    def results(budget: Budget, reason: StopReason, *tools: Tool) -> list[str]:
        read = Tool("read", "what was read")
        done = at.run([calls("read", *(tool.name for tool in tools))], budget, read, *tools)
        done.stopped(reason)
        kept = "what was read" in done.results[0]
        expect(kept, f"a completed sibling's result is lost: {done.results}")
        return done.results

    more = (Tool("search", "found"), Tool("write"))
    results(Budget(max_tool_calls=2), StopReason.MAX_TOOL_CALLS, *more)
    if at.is_sync:
        return
    hanging = Tool("search", hang=True)
    result = results(Budget(max_seconds=DEADLINE), StopReason.MAX_SECONDS, hanging)[1]
    expect(OUTCOME_UNKNOWN in result, f"the interrupted call's result: {result}")


def _resumed(at: Trial) -> None:
    script = Script([calls("first"), calls("second"), calls("third"), says("All three.")])
    tools = [Tool(name, f"{name} is done") for name in ("first", "second", "third")]
    facts: dict[str, Any] = {"store": MemoryStore(), "shared": Scratch()}
    budget = Budget(max_iterations=2)
    before = at.run(script, budget, *tools, **facts)
    before.stopped(StopReason.MAX_ITERATIONS)
    after = at.run(script, budget, *tools, after=before, user_input=None, **facts)
    outcome = after.completed(iterations=2)
    check_equal("final", outcome.final, "All three.")
    check_equal("tool bodies", before.started + after.started, ["first", "second", "third"])
    for name in ("first", "second"):
        expect(f"{name} is done" in script.sent[-1], f"the model forgot what {name} brought")


def _another_turn(at: Trial) -> None:
    script = Script([calls("search"), calls("search"), says("Here you are.")])
    search = search_tool()
    facts: dict[str, Any] = {"store": MemoryStore(), "shared": Scratch()}
    budget = Budget(max_iterations=2)
    questions = ("What is new?", "And without searching?")
    first = at.run(script, budget, search, user_input=questions[0], **facts)
    first.stopped(StopReason.MAX_ITERATIONS)
    second = at.run(script, budget, search, user_input=questions[1], after=first, **facts)
    check_equal("status", second.outcome.status, "completed")
    check_history(second.history)
    check_equal("final", second.outcome.final, "Here you are.")
    for text in questions:
        expect(text in script.sent[-1], f"{text!r} was not sent to the model")


def _warnings(at: Trial) -> None:
    def run(action: Callable[[Guard], object]) -> tuple[Done, list[str]]:
        given: list[str] = []

        def warned(guard: Guard, event: Any) -> None:
            given.append(event.dimension)
            action(guard)

        guard = Guard(Budget(max_iterations=10, max_tool_calls=100), on_warning=warned)
        return at.run(sticky("search"), guard), given

    done, given = run(lambda _: None)
    outcome = done.stopped(StopReason.MAX_ITERATIONS, calls=10)
    check_equal("warnings", given, ["max_iterations"])
    check_equal("outcome.warnings", outcome.warnings, ("max_iterations",))
    done, _ = run(lambda guard: guard.extend(max_iterations=12))
    done.stopped(StopReason.MAX_ITERATIONS, calls=12)
    done, _ = run(lambda guard: guard.abort("a person said no"))
    done.stopped(StopReason.ABORTED)
    made = done.script.calls
    expect(made <= 8, f"{made} model calls, ended by the handler at 8")


def _observe(at: Trial) -> None:
    def run(mode: ModeName) -> tuple[Done, list[Event]]:
        guard, events = watched(mode=mode, max_iterations=2)
        return at.run([*[calls("search")] * 4, says("Done.")], guard), events

    done, events = run("observe")
    outcome = done.completed(calls=5)
    check_equal("observed", [v.reason for v in outcome.observed], [StopReason.MAX_ITERATIONS])
    kinds = [type(event) for event in events]
    admitted = kinds[: kinds.index(TripObserved)].count(ModelCallAdmitted)
    check_equal("model calls when it would have tripped", admitted, 2)
    run("enforce")[0].stopped(StopReason.MAX_ITERATIONS, calls=2)


def _retries(at: Trial) -> None:
    failure = Reply(error=ProviderError("overloaded"))
    model = [failure, calls("search"), failure, says("At last.")]
    done = at.run(model, Guard(Budget(max_iterations=2)), retries=2)
    done.completed(calls=4, model_calls=4, iterations=2, failed_calls=2)
    done = at.run([failure], Guard(Budget(max_model_calls=2)), retries=5)
    done.stopped(StopReason.MAX_MODEL_CALLS, calls=2)


def _subagents(at: Trial) -> None:
    for form in sorted(at.driver.subagents):
        workers = [
            Agent(name=f"agent{number}", script=sticky("search"), tools=[search_tool()])
            for number in range(3 if form == "tool" else 1)
        ]
        asks = [Tool(f"ask_{one.name}", agent=one) for one in workers]
        forms: dict[str, tuple[list[Reply], dict[str, Any]]] = {
            "tool": ([calls(*(one.name for one in asks)), says("Done.")], {"tools": asks}),
            "handoff": ([Reply(handoff="agent0")], {"tools": [], "handoffs": workers}),
            "graph": ([says("Done.")], {"tools": [], "graph": workers[0]}),
        }
        model, facts = forms[form]
        done = at.run(model, Guard(Budget(max_model_calls=7)), **facts)
        done.stopped(StopReason.MAX_MODEL_CALLS, model_calls=7, total_tokens=7 * 120)
        made = done.script.calls + sum(worker.script.calls for worker in workers)
        check_equal(f"model calls in all ({form})", made, 7)


def _child_trip(at: Trial) -> None:
    def run(caps: Budget, own: Budget) -> tuple[Done, Script]:
        worker = Agent(name="worker", script=sticky("search"), tools=[search_tool()], budget=own)
        model = [calls("ask_worker"), says("I know enough.")]
        return at.run(model, Guard(caps), Tool("ask_worker", agent=worker)), worker.script

    done, below = run(Budget(max_iterations=20), Budget(max_iterations=2))
    outcome = done.completed(model_calls=4)
    check_equal("model calls of the child", below.calls, 2)
    check_equal("final", outcome.final, "I know enough.")
    result = done.results[0]
    expect("stopped before it finished" in result, f"the parent got {result!r} from the child")

    done, below = run(Budget(max_model_calls=4), Budget(max_iterations=10))
    done.stopped(StopReason.MAX_MODEL_CALLS, calls=1)
    check_equal("model calls of the child", below.calls, 3)


def _concurrent(at: Trial) -> None:
    guard = Guard(Budget(max_model_calls=9))
    ran: list[Done] = []
    in_threads(*[lambda: ran.append(at.run(sticky("search"), guard))] * 3)
    for one in ran:
        one.stopped(StopReason.MAX_MODEL_CALLS)
    check_equal("model calls of all runs", sum(one.script.calls for one in ran), 9)
    check_equal("counted", guard.usage.model_calls, 9)

    # Two guards on one agent: one after the other, and at the same time.
    script, search, shared = sticky("search"), search_tool(), Scratch()

    def one_run(guard: Guard) -> None:
        at.run(script, guard, search, shared=shared).stopped(StopReason.MAX_ITERATIONS)

    for together in (False, True):
        guards = [Guard(Budget(max_iterations=n)) for n in (2, 3)]
        if together:
            in_threads(*(lambda guard=guard: one_run(guard) for guard in guards))
        else:
            for guard in guards:
                one_run(guard)
        used = [guard.usage.iterations for guard in guards]
        check_equal(f"iterations of two guards (at the same time: {together})", used, [2, 3])
    check_equal("model calls", script.calls, 10)


def _two_layers(at: Trial) -> None:
    done = at.run(sticky("search"), Guard(Budget(max_iterations=3)), twice=True)
    counts = {"calls": 3, "model_calls": 3, "total_tokens": 360, "bodies": 3, "tool_calls": 3}
    done.stopped(StopReason.MAX_ITERATIONS, **counts)


def _streamed(at: Trial) -> None:
    done = at.run(sticky("search"), Guard(Budget(max_iterations=2)))
    outcome = done.stopped(StopReason.MAX_ITERATIONS, total_tokens=240)
    chunks = done.ran.chunks
    expect(chunks, "the stream gave nothing")
    ends = str(outcome.final)[:30] in str(chunks[-3:])
    expect(ends, "the synthetic message did not end the stream")

    guard = Guard(Budget(max_iterations=2))
    done = at.run(sticky("search"), guard, break_after=1)
    ran, made = done.ran, done.script.calls
    expect(ran.raised is None, f"leaving early raised {ran.raised!r}")
    expect(not ran.leaked, f"an early break leaves tasks behind: {ran.leaked}")
    expect(made <= 1, f"{made} model calls after an early break")
    check_equal("calls in flight after an early break", guard.open_calls(), ())
    check_equal("model calls counted", guard.usage.model_calls, made)

    # Without usage the tokens are estimated, never zero.
    done = at.run([calls("search", usage=None)], Guard(Budget(max_iterations=2)))
    outcome = done.stopped(StopReason.MAX_ITERATIONS, estimated_calls=2)
    expect(outcome.usage.total_tokens > 0, "missing usage counts as zero")


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


def _failures(at: Trial) -> None:
    broken = _Broken()
    guard = Guard(Budget(max_iterations=2), sinks=[broken])
    done = at.run(sticky("search"), guard, store=broken)
    errors = done.stopped(StopReason.MAX_ITERATIONS, calls=2).errors
    for what in ("sink", "checkpoint"):
        expect(any(what in error for error in errors), f"no {what} in {errors}")

    guard = Guard(Budget(max_iterations=5))
    ran = at.run([calls("search"), Reply(error=ProviderError("no such model"))], guard).ran
    shown = ran.raised is not None or (ran.outcome and ran.outcome.status == "completed")
    expect(shown, "a model that fails is hidden")
    check_equal("failed calls", guard.usage.failed_calls, 1)
    check_equal("calls in flight after a failure", guard.open_calls(), ())

    guard = Guard(Budget(max_iterations=2))
    ran = at.run([calls("broken")], guard, Tool("broken", error=ValueError("it is broken"))).ran
    stopped = ran.outcome is not None and ran.outcome.stop_reason is StopReason.MAX_ITERATIONS
    expect(ran.raised is not None or stopped, "a tool that fails is hidden")
    expect(ran.raised is not None or guard.usage.tool_calls == 2, "a failed call is not counted")
    check_history(ran.history)
    check_equal("tool calls in flight after a failure", guard.open_calls(), ())


def _not_a_word(at: Trial) -> None:
    budget = Budget(
        max_iterations=9,
        max_tool_calls=7,
        max_total_tokens=10**6,
        max_seconds=600,
        tool_quotas={"read": 1},
        max_output_tokens_per_call=4096,
    )
    script = Script(lambda n: calls("read", "look") if n < 4 else calls("search"))
    tools = [Tool("read", "text"), Tool("look", "nothing"), search_tool()]
    facts: dict[str, Any] = {"shared": Scratch(), "store": MemoryStore()}
    done = at.run(script, budget, *tools, **facts)
    expect(done.outcome, "the run has no outcome")
    at.run(script, Budget(max_iterations=2), *tools, after=done, user_input="Go on.", **facts)
    # A quota that cannot refuse its tool stops the first run at its third call.
    least = 4 if at.driver.deviation(4, at.mode) else 6
    expect(script.calls >= least, f"only {script.calls} prompts to look at")
    for number, sent in enumerate([*script.sent, *breakers.reports_of(at)]):
        found = _UNSPEAKABLE.search(sent)
        expect(found is None, f"prompt {number} mentions {found}: {sent!r}")


def _not_undone(at: Trial) -> None:
    features: tuple[Feature, ...] = ("structured", "swallowing")
    for facts in ({feature: True} for feature in features if at.has(feature)):
        done = at.run(sticky("search"), Guard(Budget(max_iterations=3)), **facts)
        done.stopped(StopReason.MAX_ITERATIONS, calls=3, bodies=3)
        expect(done.history[-1].synthetic is not None, "the last message is not synthetic")
        model = [calls("search", "search", "search")]
        done = at.run(model, Budget(max_tool_calls=2), **facts)
        done.stopped(StopReason.MAX_TOOL_CALLS, calls=1, bodies=2)


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
    Clause(22, "streams: counted once, ended normally, left without leaks", _streamed, MODES[2:]),
    Clause(23, "failures change no ending and are reported", _failures),
    Clause(24, "the model reads nothing of the budget", _not_a_word),
    Clause(25, "nothing undoes a trip", _not_undone),
    Clause(26, "a run inside another one spends its budget", nesting.nested),
    Clause(27, "`guard.activate()` bounds every run in its block", nesting.activated),
    Clause(28, "a run that waits for a person is paused", pauses.paused, needs="approval"),
    Clause(29, "a run that fails or is cancelled has an outcome", endings.failed),
    Clause(30, "a stop is never read as an answer", nesting.not_an_answer),
    Clause(31, "equal ids of tool calls change nothing", replies.equal_ids, needs="equal_ids"),
    Clause(32, "replies that repeat: nudge, then stop", replies.dialogue, needs="dialogue"),
    Clause(33, "an answer cut by our bound is a stop", endings.cut_short, needs="bounded_output"),
    Clause(34, "nothing is kept of runs that are over", endings.nothing_kept),
    Clause(35, "usage is read in full, and estimated where there is none", replies.every_usage),
    Clause(36, "the stored history is the returned one, and goes on", endings.same_history),
    Clause(37, "calls answered without their body: nudge, then stop", pauses.unanswered),
    Clause(38, "an answer to a question is no user turn", pauses.questions, needs="approval"),
    Clause(39, "the end has the form that was asked for", endings.typed_end, needs="structured"),
    Clause(40, "the framework's own limit is no completion", endings.own_limit, needs="own_limit"),
    Clause(41, "threads and pools in a block spend its budget", nesting.pools),
    Clause(42, "a tripped run starts no further step", endings.no_further_step),
    Clause(43, "a completed run is stored as an unguarded one", endings.as_unguarded),
    Clause(
        44, "nobody is asked about a call that will be refused", pauses.requested, needs="approval"
    ),
    Clause(45, "a fan-out of unknown answers stays within the cap", nesting.fan_out),
    Clause(46, "importing an adapter is enough for a block", nesting.imported, needs="imported"),
    Clause(47, "the pace: the run ends at its ceiling", breakers.velocity),
    Clause(48, "reports without progress: nudge, then stop", breakers.progress, needs="reports"),
    Clause(49, "a rate limit refuses and says when to try again", breakers.rate_limit),
    Clause(50, "a full bulkhead refuses, and the run goes on", breakers.bulkhead),
    Clause(51, "an open circuit breaker answers in the tool's place", breakers.circuit_breaker),
    Clause(52, "an unusual mix of tools is told once and stops nothing", breakers.tool_mix),
    Clause(53, "in OBSERVE breakers delay, refuse and ask nothing", breakers.observed),
    Clause(54, "a call waits for the pace, a token, a place", breakers.waits, needs="waits"),
    Clause(
        55,
        "a stopped run has a last answer from its reserve",
        optional.last_answer,
        needs="at_last",
    ),
    Clause(56, "one request to finish, from a share of a cap on", optional.wrap_up),
    Clause(57, "a cheaper model, from a share of a cap on", optional.fallback, needs="fallback"),
    Clause(58, "a conversation's counters go on over its runs", optional.conversation),
    Clause(59, "a cap asks a person before it stops a run", optional.limits),
)
"""The clauses of the contract, in its order; from 47 on those of what is off by default."""
