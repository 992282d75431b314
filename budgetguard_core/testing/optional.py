"""Clauses 55 to 59, of what is off by default: last answer, wrap-up, fallback, conversations."""

from __future__ import annotations

from decimal import Decimal
from itertools import count
from typing import Any

from budgetguard_core.budget import Budget
from budgetguard_core.guard import Guard
from budgetguard_core.kit import ANSWER_NOW
from budgetguard_core.pricing import Price, PriceBook
from budgetguard_core.reserve import FinalizeReserve
from budgetguard_core.stop import LimitQuestion, StopReason
from budgetguard_core.stop_state import Mode
from budgetguard_core.testing.message import check_request, expect
from budgetguard_core.testing.scenario import Scratch
from budgetguard_core.testing.script import (
    FALLBACK,
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
from budgetguard_core.testing.trial import Done, Trial, check_equal, search_tool
from budgetguard_core.usage import TokenUsage

_BOTH = calls("search", "read")


def _tools() -> list[Tool]:
    return [search_tool(), Tool("read", changing)]


_KNOWN = "It is most likely 42; the second file is not read yet."
_ABOUT = "Looks into the files."
_TOKENS = 20_000


def _reserved(seconds: float = 30.0) -> Budget:
    reserve = FinalizeReserve(tokens=_TOKENS, seconds=seconds)
    return Budget(max_iterations=2, finalize_reserve=reserve)


def _check_neutral(done: Done, error: str | None) -> None:
    outcome = done.stopped(StopReason.MAX_ITERATIONS, calls=3, bodies=2)
    check_equal("finalized", outcome.finalized, False)
    last = done.history[-1]
    expect(last.synthetic is not None, "the last message is not synthetic")
    expect("finalized" not in (last.synthetic or {}), "a message without an answer says it has one")
    expect("stopped before it finished" in last.text, "the neutral text is missing")
    if error is not None:
        found = [one for one in outcome.errors if one.startswith("last answer")]
        expect(any(error in one for one in found), f"{error} is not in {outcome.errors}")


def last_answer(at: Trial) -> None:
    """Clause 55."""
    search, shared = Tool("search", changing, description=_ABOUT), Scratch()
    script = Script([calls("search"), calls("search"), says(_KNOWN, TokenUsage(150, 30))])
    done = at.run(script, _reserved(), search, shared=shared)
    counts = {"calls": 3, "bodies": 2, "iterations": 2, "model_calls": 3, "total_tokens": 420}
    outcome = done.stopped(StopReason.MAX_ITERATIONS, **counts)
    check_equal("final", outcome.final, _KNOWN)
    check_equal("finalized", outcome.finalized, True)
    last = done.history[-1]
    check_equal("the last message", last.text, _KNOWN)
    expect(last.synthetic, "the last message is not marked")
    check_equal("its marker", (last.synthetic or {}).get("finalized"), True)
    known = [message for message in done.history if ANSWER_NOW in message.text]
    expect(not known, "what the model was asked at last is in the history")

    check_request(script.requests[-1])
    expect(ANSWER_NOW in script.requests[-1][-1].text, "the model was not asked for an answer")
    if _ABOUT in script.sent[0]:
        expect(_ABOUT not in script.sent[-1], "the model was offered tools at last")
    bound = script.bounds[-1]
    if at.has("bounded_output"):
        expect(bound is not None and bound <= _TOKENS, f"the bound of the answer is {bound}")

    # The next turn goes on from the answer as from any other.
    facts: dict[str, Any] = {"after": done, "user_input": "And the second file?", "shared": shared}
    again = at.run(script, Budget(max_iterations=5), search, **facts)
    check_equal("status of the next turn", again.outcome.status, "completed")
    check_request(script.requests[-1])

    requested = [calls("search"), calls("search")]
    down = Reply(error=ProviderError("down"))
    _check_neutral(at.run([*requested, down], _reserved()), "down")
    _check_neutral(at.run(requested, _reserved()), None)
    if not at.is_sync:
        hung = at.run([*requested, Reply(hang=True)], _reserved(0.2))
        _check_neutral(hung, "TimeoutError")

    # None is given to runs that were aborted, have failed, or are in OBSERVE.
    guard = Guard(_reserved())

    def abort(number: int, value: str) -> str:
        guard.abort("a person has seen enough")
        return f"result {number} for {value}"

    done = at.run([calls("search")], guard, Tool("search", abort))
    expect(done.ran.outcome is not None, "an aborted run has no outcome")
    check_equal("model calls of an aborted run", done.script.calls, 1)
    done = at.run([calls("search"), down], _reserved())
    check_equal("model calls of a failed run", done.script.calls, 2)
    guard = Guard(_reserved(), mode=Mode.OBSERVE)
    at.run([*requested, calls("search"), says("Done.")], guard).completed(calls=4)
    expect(guard.observed_trip is not None, "OBSERVE saw no trip")


_WORDS = "Round it off, please"
_WRAPPED = Budget(max_iterations=5, wrap_up_at=0.6, wrap_up_message=_WORDS)


def wrap_up(at: Trial) -> None:
    """Clause 56."""

    def check_words(what: str, script: Script, *requests: int) -> None:
        known = [number for number, sent in enumerate(script.sent) if _WORDS in sent]
        check_equal(f"requests with the words{what}", known, [*requests])

    tools, shared = _tools(), Scratch()
    script = Script([_BOTH, _BOTH, _BOTH, calls("search"), says("Here."), says("There.")])
    done = at.run(script, _WRAPPED, *tools, shared=shared)
    done.completed()
    check_words("", script, 3)
    expect(not any(_WORDS in one.text for one in done.history), "the words are in the history")
    facts: dict[str, Any] = {"after": done, "user_input": "Go on.", "shared": shared}
    at.run(script, Budget(max_iterations=9), *tools, **facts).completed()
    check_words(", after the next run", script, 3)

    # A runaway does not heed them, and is stopped where it would have been.
    done = at.run([_BOTH], _WRAPPED, *tools)
    done.stopped(StopReason.MAX_ITERATIONS)
    check_words(", of a runaway", done.script, 3)

    guard = Guard(_WRAPPED, mode=Mode.OBSERVE)
    done = at.run([*[_BOTH] * 4, says("Here.")], guard, *tools)
    done.completed()
    check_words(", in OBSERVE", done.script)


# A scripted reply has 120 tokens, which are 12 cents of the model, and 1.2 of the cheaper one.
_BOOK = PriceBook({MODEL: Price(input=1000, output=1000), FALLBACK: Price(input=100, output=100)})
_FALLS = Budget(max_iterations=7, max_cost_usd=0.6, fallback_at=0.5, fallback_model=FALLBACK)


def fallback(at: Trial) -> None:
    """Clause 57."""

    def guarded(mode: Mode = Mode.ENFORCE) -> Guard:
        return Guard(_FALLS, price_book=_BOOK, mode=mode)

    tools, shared = _tools(), Scratch()
    script = Script([*[_BOTH] * 4, says("Here."), says("There.")])
    done = at.run(script, guarded(), *tools, shared=shared)
    done.completed(cost_usd=Decimal("0.384"))
    check_equal("models", script.models, [MODEL] * 3 + [FALLBACK] * 2)
    guard = Guard(Budget(max_iterations=9), price_book=_BOOK)
    facts: dict[str, Any] = {"after": done, "user_input": "Go on.", "shared": shared}
    at.run(script, guard, *tools, **facts).completed()
    check_equal("model of the next run", script.models[-1], MODEL)

    # A runaway is stopped where it would have been.
    done = at.run([_BOTH], guarded(), *tools)
    done.stopped(StopReason.MAX_ITERATIONS)
    check_equal("models of a runaway", done.script.models, [MODEL] * 3 + [FALLBACK] * 4)

    done = at.run([*[_BOTH] * 4, says("Here.")], guarded(Mode.OBSERVE), *tools)
    done.completed()
    check_equal("models, in OBSERVE", set(done.script.models), {MODEL})

    if "tool" in at.driver.subagents:
        inner = Script([says("Found."), says("Found.")])
        helper = Tool("helper", agent=Agent(name="helper", script=inner))
        model = [calls("helper"), calls("search"), calls("helper"), says("Here.")]
        at.run(model, guarded(), helper, search_tool()).completed()
        check_equal("models of the sub-agent", inner.models, [MODEL, FALLBACK])


_SHARED = Budget(max_model_calls=3, per="conversation")
_NUMBERS = count()


def conversation(at: Trial) -> None:
    """Clause 58."""
    name = f"clause-58-{at.driver.name}-{at.mode}-{next(_NUMBERS)}"
    search = search_tool()
    facts: dict[str, Any] = {"shared": Scratch(), "conversation": name}
    script = Script([calls("search"), says("Here."), calls("search"), says("There.")])
    done = at.run(script, _SHARED, search, **facts)
    done.completed()
    done = at.run(script, _SHARED, search, after=done, user_input="Go on.", **facts)
    done.stopped(StopReason.MAX_MODEL_CALLS, calls=3, model_calls=1)
    other = at.run([calls("search"), says("Here.")], _SHARED, conversation=f"{name}-another")
    other.completed(calls=2)


def limits(at: Trial) -> None:
    """Clause 59."""

    def run(
        replies: list[Reply], budget: Budget, answer: dict[str, int], *tools: Tool
    ) -> tuple[Done, list[tuple[str, Any, Any]]]:
        """Run with a person who raises a cap once."""
        answers: list[dict[str, int]] = [answer]
        requested: list[tuple[str, Any, Any]] = []

        def person(question: LimitQuestion) -> dict[str, int] | None:
            requested.append((question.reason.value, question.limit, question.used))
            return answers.pop() if answers else None

        return at.run(replies, budget, *tools, on_trip=person), requested

    # More budget once, then the end.
    done, requested = run([_BOTH], Budget(max_model_calls=2), {"max_model_calls": 3}, *_tools())
    done.stopped(StopReason.MAX_MODEL_CALLS, calls=3)
    check_equal("questions", requested, [("max_model_calls", 2, 2), ("max_model_calls", 3, 3)])

    # A batch of tool calls runs as a whole.
    budget = Budget(max_tool_calls=3, max_model_calls=9)
    model = [_BOTH, _BOTH, says("Here.")]
    done, requested = run(model, budget, {"max_tool_calls": 4}, *_tools())
    done.completed(bodies=["read", "read", "search", "search"])
    # Frameworks differ in how much of a batch is asked for at a time.
    check_equal("questions of a batch", [one[:2] for one in requested], [("max_tool_calls", 3)])

    # A sub-agent's step asks for the caps around it.
    if "tool" in at.driver.subagents:
        inner = Script([says("Found.")])
        helper = Tool("helper", agent=Agent(name="helper", script=inner))
        model = [calls("helper"), says("Here.")]
        done, requested = run(model, Budget(max_model_calls=1), {"max_model_calls": 4}, helper)
        done.completed()
        check_equal("model calls of the sub-agent", inner.calls, 1)
        check_equal("questions of the sub-agent", requested, [("max_model_calls", 1, 1)])
