"""Event logs to look at: runs that end in every way, with sub-agents, tenants and profiles."""

from __future__ import annotations

from decimal import Decimal

from budgetguard_core import Budget, FinalizeReserve, Guard, JsonLinesSink
from budgetguard_core.kit import (
    Admit,
    Answer,
    Envelope,
    ModelCall,
    Stop,
    TokenUsage,
    ToolCall,
    end_run,
    last_answer,
)
from budgetguard_core.profiles import ProfileId
from budgetguard_core.run_log import RunLog
from budgetguard_core.testing import ManualClock

MODEL = "gpt-4o"
CALL = ModelCall(model=MODEL, input_tokens=100)
USED = TokenUsage(input_tokens=900, output_tokens=100)
COST_OF_A_CALL = "0.00325"


def budget(**caps):
    profile = ProfileId(name=caps.pop("profile", "research"), version="3")
    return Budget(loop_detection=None, profile=profile, **caps)


def work(guard, clock, turns, *, tool="search"):
    """Turns of a model call and a tool call, until they are done or the run is stopped."""
    for turn in range(turns):
        call = guard.admit_model_call(CALL)
        if isinstance(call, Stop):
            return
        clock.advance(2)
        guard.settle_model_call(call, USED)
        (asked,) = guard.admit_tool_calls([ToolCall(name=tool, id=f"c{turn}", arguments={})])
        if isinstance(asked, Admit):
            clock.advance(1)
            guard.settle_tool_call(asked, f"result {turn}")


def write(path, *, tenant=None, ledger=None):
    """A stopped run with a sub-agent, a completed one near a cap, a failed one, and one killed."""
    clock = ManualClock()
    paid = {} if tenant is None else {"tenant": tenant, "ledger": ledger}
    with JsonLinesSink(path) as sink:

        def guard(run_id, **caps):
            return Guard(budget(**caps), run_id=run_id, sinks=[sink], clock=clock, **paid)

        stopped = guard("stopped", max_iterations=5, max_cost_usd=1, tool_quotas={"search": 2})
        work(stopped, clock, 3)
        child = stopped.child(budget(max_iterations=9), run_id="helper")
        work(child, clock, 1, tool="read_page")
        end_run(child, trip=None)
        work(stopped, clock, 9)
        end_run(stopped, trip=stopped.trip, next_step="call the model")

        near = guard("near", max_iterations=10, profile="quick_qa")
        work(near, clock, 9)
        end_run(near, trip=None)

        failed = guard("failed", max_iterations=10)
        work(failed, clock, 1)
        end_run(failed, trip=None, error=TimeoutError("slow"))

        killed = guard("killed", max_iterations=10)
        work(killed, clock, 2)
    return path


def finalized(sink, *, turns=2, run_id="finalized"):
    """A run that is stopped, and that the model gives a last answer to."""
    reserve = FinalizeReserve(cost_usd=Decimal("0.02"))
    caps = Budget(
        max_iterations=turns,
        max_cost_usd=Decimal("0.10"),
        finalize_reserve=reserve,
        loop_detection=None,
    )
    run = Envelope(budget=caps, sinks=[sink]).open(run_id=run_id)
    for _ in range(turns):
        run.answered(run.model_call(CALL), USED)
    run.model_call(CALL)
    last_answer(run).ask(
        ModelCall(model=MODEL, input_tokens=9), lambda _: Answer(text="42.", usage=USED)
    )
    return run.end((), "42.")


def in_attempts(folder, *, attempts=3, ends=True):
    """A run that paused after each turn and went on in another process: a log for each attempt."""
    clock, guard = ManualClock(), None
    for attempt in range(attempts):
        log = RunLog(folder)
        if guard is None:
            guard = Guard(budget(max_iterations=10), run_id="asks", sinks=[log], clock=clock)
        else:
            guard = Guard.restore(guard.snapshot(), sinks=[log], clock=clock)
            guard.go_on()
        work(guard, clock, 1)
        if attempt < attempts - 1 or not ends:
            guard.pause()
            clock.advance(60)
        else:
            end_run(guard, trip=None)
