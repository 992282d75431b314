"""Where a run begins: anew, or where an earlier leg of it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from budgetguard_loop import _history as history
from budgetguard_loop._ambient import current_guard, guard_for
from budgetguard_loop._run import Run

Resume: TypeAlias = "str | Snapshot | Outcome"
"""The id of a run in the store, its snapshot, or its outcome."""


def begin(
    budget: Budget | Guard | None,
    *,
    messages: str | Iterable[Any],
    tools: Mapping[str, Callable[..., Any]],
    step: object = None,
    model: str | None = None,
    provider: str | None = None,
    retries: int = 0,
    store: CheckpointStore | None = None,
    resume: Resume | None = None,
) -> Run:
    """Make the run that its first command is asked of; blocking when it loads a checkpoint.

    Raises:
        CheckpointError: There is no such run in the store, or its snapshot cannot be used.
        ConfigurationError: The arguments do not fit together.
    """
    if type(retries) is not int or retries < 0:
        raise ConfigurationError(
            f"retries must be a whole number >= 0, got {retries!r}. Use 0 for one attempt."
        )
    given = history.opening(messages)
    earlier = _earlier(resume, store)
    if earlier is None:
        guard = guard_for(budget)
        run_messages = given
        interrupted: frozenset[str] = frozenset()
    else:
        guard = _guard_of(earlier, budget, resume)
        run_messages = history.from_plain(earlier.messages)
        interrupted = frozenset(
            call.id for call in earlier.open_calls if call.kind == "tool" and call.id is not None
        )
        if given:
            _close(run_messages, interrupted)
            run_messages += given
            guard.user_turn()
        elif run_messages and isinstance(run_messages[-1], history.SyntheticMessage):
            run_messages.pop()
        # A provider may give the id of a call that was interrupted long ago to another one.
        interrupted &= {call.id for call in history.open_batch(run_messages)[1]}
    # The same turn under the same caps: the attempt that the process died in was counted.
    again = (
        earlier is not None
        and budget is None
        and not given
        and any(call.kind == "model" for call in earlier.open_calls)
    )
    return Run(
        guard=guard,
        messages=run_messages,
        tools=tools,
        step=step,
        model=model,
        provider=provider,
        retries=retries,
        store=store,
        interrupted=interrupted,
        retry=again,
    )


def _close(messages: list[history.Message], interrupted: frozenset[str]) -> None:
    _, waiting = history.open_batch(messages)
    for call in waiting:
        text = OUTCOME_UNKNOWN if call.id in interrupted else NOT_EXECUTED
        messages.append(history.tool_message(call.id, text))


def _earlier(resume: Resume | None, store: CheckpointStore | None) -> Snapshot | None:
    if resume is None or isinstance(resume, Snapshot):
        return resume
    if isinstance(resume, Outcome):
        return Snapshot.of_outcome(resume)
    if store is None:
        raise ConfigurationError(
            f"resume={resume!r} names a run in a store, got store=None. Pass the store, or resume "
            "from an Outcome or a Snapshot."
        )
    snapshot = store.load(resume)
    if snapshot is None:
        raise CheckpointError(
            f"the store has no run {resume!r}. Check the id, or start the run anew."
        )
    return snapshot


def _guard_of(earlier: Snapshot, budget: Budget | Guard | None, resume: Resume | None) -> Guard:
    if isinstance(budget, Guard):
        return budget
    if budget is None and isinstance(resume, Outcome):
        raise ConfigurationError(
            "resuming from an outcome needs a budget, got None. Pass a fresh Budget."
        )
    above = current_guard()
    if above is not None:
        # A part of another run spends that run's budget, also after a resume.
        return above.child(budget or Budget.from_json(earlier.budget or {}), run_id=earlier.run_id)
    if budget is None and earlier.parent_run_id is not None:
        # Its own caps are not all that bounded it, and those above it are not in its snapshot.
        raise ConfigurationError(
            f"run {earlier.run_id!r}, a part of {earlier.parent_run_id!r}, needs a budget to go on "
            "alone, got None. Pass a fresh Budget, or a Guard."
        )
    return Guard.restore(earlier, budget)
