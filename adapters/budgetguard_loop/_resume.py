"""Where a run begins: anew, or where an earlier leg of it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from budgetguard_core import (
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    Budget,
    CheckpointError,
    CheckpointStore,
    ConfigurationError,
    Guard,
    Outcome,
    Snapshot,
)
from budgetguard_core.kit import Envelope, Run, current, envelope_of, load_to_resume
from budgetguard_loop import _history as history

Resume: TypeAlias = str | Snapshot | Outcome
"""The id of a run in the store, its snapshot, or its outcome."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A run, and the history that it begins with."""

    run: Run
    messages: list[history.Message]
    interrupted: frozenset[str] = frozenset()
    """Ids of the tool calls that were in flight when the process of an earlier leg ended."""
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

    Args:
        budget: What the user gave; None bounds nothing but loops, and, with `resume`, goes on
            under the recorded caps.
        options: The options of the envelope.
        messages: What the conversation begins with, or what the user says now.
        resume: The earlier run.

    Raises:
        CheckpointError: There is no such run in the store, or its snapshot cannot be used.
        ConfigurationError: The arguments do not fit together.
    """
    given = history.opening(messages)
    if resume is None:
        spoke = bool(given) and given[-1].get("role") == "user"
        envelope = envelope_of(budget, default=Budget(), **options)
        return Beginning(envelope.open(user_spoke=spoke, given=given), given)
    store = budget.store if isinstance(budget, Envelope) else options.get("store")
    earlier, leg = _earlier(resume, store)
    run = _opened(earlier, budget, options, resume)
    run.go_on_as(leg, earlier.run_id)
    past = history.from_plain(earlier.messages)
    interrupted = frozenset(
        call.id for call in earlier.open_calls if call.kind == "tool" and call.id
    )
    if given:
        for call in history.open_calls(past):
            text = OUTCOME_UNKNOWN if call.id in interrupted else NOT_EXECUTED
            past.append(history.tool_message(call.id, text))
        past += given
        run.guard.user_turn()
    elif past and isinstance(past[-1], history.SyntheticMessage):
        past.pop()
    # A provider may give the id of a call that was interrupted long ago to another one.
    interrupted &= {call.id for call in history.open_calls(past)}
    # The same turn under the same caps: the attempt that the process died in was counted.
    again = budget is None and not given and any(c.kind == "model" for c in earlier.open_calls)
    return Beginning(run, past, interrupted, again)


def _earlier(resume: Resume, store: CheckpointStore | None) -> tuple[Snapshot, int | None]:
    if isinstance(resume, Snapshot):
        return resume, None
    if isinstance(resume, Outcome):
        return Snapshot.of_outcome(resume), None
    if store is None:
        raise ConfigurationError(
            f"resume={resume!r} names a run in a store, got store=None. Pass the store, or resume "
            "from an Outcome or a Snapshot."
        )
    snapshot, leg = load_to_resume(store, resume)
    if snapshot is None:
        raise CheckpointError(
            f"the store has no run {resume!r}. Check the id, or start the run anew."
        )
    return snapshot, leg


def _opened(
    earlier: Snapshot, budget: Budget | Guard | Envelope | None, options: Any, resume: Resume
) -> Run:
    if budget is not None or options.get("profile") is not None:
        return envelope_of(budget, **options).open(resume=earlier, fresh=True)
    if isinstance(resume, Outcome) or earlier.budget is None:
        raise ConfigurationError(
            "resuming from an outcome needs a budget, got None. Pass a fresh Budget."
        )
    if earlier.stop_conditions:
        raise CheckpointError(
            "a run with stop conditions needs them again, got none: conditions are code and not "
            "in a checkpoint. Pass a fresh budget that has them."
        )
    if current() is None and earlier.parent_run_id is not None:
        # Its own caps are not all that bounded it, and those above it are not in its snapshot.
        raise ConfigurationError(
            f"run {earlier.run_id!r}, a part of {earlier.parent_run_id!r}, needs a budget to go on "
            "alone, got None. Pass a fresh Budget, or a Guard."
        )
    settings: dict[str, Any] = {"mode": earlier.mode, **options}
    return envelope_of(Budget.from_json(earlier.budget), **settings).open(resume=earlier)
