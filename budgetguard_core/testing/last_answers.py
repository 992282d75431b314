"""Clause 55: one last answer of a stopped run, from what its budget has kept back."""

from __future__ import annotations

from typing import Any

from budgetguard_core.budget import Budget
from budgetguard_core.guard import Guard
from budgetguard_core.kit import ANSWER_NOW
from budgetguard_core.reserve import FinalizeReserve
from budgetguard_core.stop import StopReason
from budgetguard_core.stop_state import Mode as GuardMode
from budgetguard_core.testing.checks import (
    act,
    check_completed,
    check_equal,
    check_stopped,
    outcome_of,
)
from budgetguard_core.testing.conformance import check_history, check_request
from budgetguard_core.testing.driver import Driver
from budgetguard_core.testing.failures import expect
from budgetguard_core.testing.scenario import Mode, Ran, Scratch
from budgetguard_core.testing.script import (
    ProviderError,
    Reply,
    Script,
    Tool,
    calls,
    changing,
    says,
)
from budgetguard_core.usage import TokenUsage

_KNOWN = "It is most likely 42; the second file is not read yet."
_ABOUT = "Looks into the files."
_TOKENS = 20_000


def _search() -> Tool:
    return Tool("search", changing, description=_ABOUT)


def _budget(seconds: float = 30.0) -> Budget:
    reserve = FinalizeReserve(tokens=_TOKENS, seconds=seconds)
    return Budget(max_iterations=2, finalize_reserve=reserve)


def _check_neutral(ran: Ran, script: Script, calls_made: int, error: str | None) -> None:
    outcome = check_stopped(ran, StopReason.MAX_ITERATIONS)
    check_equal("model calls", script.calls, calls_made)
    check_equal("finalized", outcome.finalized, False)
    synthetic = ran.history[-1].synthetic
    expect(synthetic is not None, "the last message is not synthetic")
    expect("finalized" not in (synthetic or {}), "a message without an answer says it has one")
    expect("stopped before it finished" in ran.history[-1].text, "the neutral text is missing")
    check_history(ran.history)
    if error is not None:
        found = [one for one in outcome.errors if one.startswith("last answer")]
        expect(any(error in one for one in found), f"{error} is not in {outcome.errors}")


def last_answer(driver: Driver, mode: Mode) -> None:
    """Clause 55."""
    shared = Scratch()
    script = Script([calls("search"), calls("search"), says(_KNOWN, TokenUsage(150, 30))])
    facts: dict[str, Any] = {"tools": [_search()]}
    ran, scenario = act(driver, mode, script, guard=_budget(), shared=shared, **facts)
    outcome = check_stopped(ran, StopReason.MAX_ITERATIONS)
    check_equal("model calls", script.calls, 3)
    check_equal("tool bodies", len(scenario.started), 2)
    check_equal("final", outcome.final, _KNOWN)
    check_equal("finalized", outcome.finalized, True)
    check_equal("iterations", outcome.usage.iterations, 2)
    check_equal("model calls counted", outcome.usage.model_calls, 3)
    check_equal("tokens", outcome.usage.total_tokens, 420)
    last = ran.history[-1]
    check_equal("the last message", last.text, _KNOWN)
    expect(last.synthetic, "the last message is not marked")
    check_equal("its marker", (last.synthetic or {}).get("finalized"), True)
    check_history(ran.history)
    told = [message for message in ran.history if ANSWER_NOW in message.text]
    expect(not told, "what the model was asked at last is in the history")

    check_request(script.requests[-1])
    expect(ANSWER_NOW in script.requests[-1][-1].text, "the model was not asked for an answer")
    if _ABOUT in script.sent[0]:
        expect(_ABOUT not in script.sent[-1], "the model was offered tools at last")
    bound = script.bounds[-1]
    if driver.has("bounded_output"):
        expect(bound is not None and bound <= _TOKENS, f"the bound of the answer is {bound}")

    # The next turn goes on from the answer as from any other.
    again, _ = act(
        driver,
        mode,
        script,
        guard=Budget(max_iterations=5),
        after=ran,
        user_input="Thank you. And the second file?",
        shared=shared,
        **facts,
    )
    check_equal("status of the next turn", outcome_of(again).status, "completed")
    check_request(script.requests[-1])

    down = Script([calls("search"), calls("search"), Reply(error=ProviderError("down"))])
    ran, _ = act(driver, mode, down, guard=_budget(), tools=[_search()])
    _check_neutral(ran, down, 3, "down")

    silent = Script([calls("search")])
    ran, scenario = act(driver, mode, silent, guard=_budget(), tools=[_search()])
    _check_neutral(ran, silent, 3, None)
    check_equal("tool bodies", len(scenario.started), 2)

    if mode != "sync":
        hung = Script([calls("search"), calls("search"), Reply(hang=True)])
        ran, _ = act(driver, mode, hung, guard=_budget(0.2), tools=[_search()])
        _check_neutral(ran, hung, 3, "TimeoutError")

    _not_given(driver, mode)


def _not_given(driver: Driver, mode: Mode) -> None:
    """Check the runs that have no last answer: aborted, completed, failed, in OBSERVE."""
    guard = Guard(_budget())

    def abort(number: int, value: str) -> str:
        guard.abort("a person has seen enough")
        return f"result {number} for {value}"

    script = Script([calls("search")])
    ran, _ = act(driver, mode, script, guard=guard, tools=[Tool("search", abort)])
    expect(ran.outcome is not None, "an aborted run has no outcome")
    check_equal("model calls of an aborted run", script.calls, 1)

    script = Script([calls("search"), Reply(error=ProviderError("no such model"))])
    act(driver, mode, script, guard=_budget(), tools=[_search()])
    check_equal("model calls of a failed run", script.calls, 2)

    script = Script([calls("search"), calls("search"), calls("search"), says("Done.")])
    guard = Guard(_budget(), mode=GuardMode.OBSERVE)
    ran, _ = act(driver, mode, script, guard=guard, tools=[_search()])
    check_completed(ran)
    check_equal("model calls in OBSERVE", script.calls, 4)
    expect(guard.observed_trip is not None, "OBSERVE saw no trip")
