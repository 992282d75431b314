"""Where a run begins: anew, or where an earlier attempt at it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from budgetguard_core import Budget, Guard
from budgetguard_core.kit import (
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    Call,
    Envelope,
    Resume,
    Run,
    close_history,
    envelope_of,
    resumed,
)
from budgetguard_loop import _history as history


@dataclass(frozen=True, slots=True)
class Beginning:
    """A run, and the history that it begins with."""

    run: Run
    messages: list[history.Message]
    interrupted: frozenset[str] = frozenset()
    """Ids of the tool calls that were in flight when the process of an earlier attempt ended."""
    retry: bool = False
    """The first model call is another attempt at a turn that was counted already."""


def begin(
    budget: Budget | Guard | Envelope | None,
    options: Any,
    *,
    messages: str | Iterable[Any],
    resume: Resume | None = None,
) -> Beginning:
    """Open the run; blocking when it loads a checkpoint.

    Without a budget nothing but loops is bounded, or, with `resume`, what the recorded caps bound.

    Raises:
        CheckpointError: There is no such run in the store, or its snapshot cannot be used.
        ConfigurationError: The arguments do not fit together.
    """
    given = history.opening(messages)
    if resume is None:
        spoke = bool(given) and given[-1].get("role") == "user"
        envelope = envelope_of(budget, default=Budget(), **options)
        return Beginning(envelope.open(user_spoke=spoke, given=given), given)
    earlier = resumed(resume, budget, options)
    past = history.from_plain(earlier.messages)
    gone = earlier.interrupted

    def answer(call: Call, _: int) -> str:
        return OUTCOME_UNKNOWN if call.id in gone else NOT_EXECUTED

    if given:
        past = [*close_history(past, history.CHAT, answer)[0], *given]
        earlier.run.guard.user_turn()
    elif past and isinstance(past[-1], history.SyntheticMessage):
        past.pop()
    # A provider may give the id of a call that was interrupted long ago to another one.
    gone &= {call.id for call in history.open_calls(past)}
    return Beginning(earlier.run, past, gone, earlier.in_a_model_call and not given)
