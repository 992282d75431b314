"""A cap that asks a person before it stops a run: more budget, or the end."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, cast

from budgetguard_core import counters
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.stop import LimitQuestion, Violation
from budgetguard_core.stop_state import Mode

# One question at a time in a process: a person reads them one after the other.
_ASKING = threading.RLock()
PAUSES: set[type[Exception]] = set()
"""Exceptions by which a framework pauses a run for a person; added by its adapter."""


def ask_person(
    state: Any, request: counters.Request | tuple[bool, int, int, int], next_step: str
) -> None:
    """Ask about each cap that would stop a step, until none would or the answer is the end.

    Outside the tree's lock, and blocking. `max_seconds` is not asked about: what is in flight has
    been cut by then. Nor is a stop of anything but caps, which comes whatever the answer is.
    """
    while (found := _of_caps(state, request)) is not None:
        owner, violations = found
        budget = owner.budget
        with _standing_still(state), _ASKING:
            handler = owner.state.on_limit
            if owner.budget is not budget or handler is None:
                continue  # somebody has answered meanwhile
            question = LimitQuestion(owner.run_id, violations, next_step)
            try:
                answer = _answered(handler(question))
            except Exception as error:
                if isinstance(error, (*PAUSES,)):
                    raise  # the framework asks, and the step is tried again with the answer
                state.tree.report("on_trip", error)
                answer = None
            if not take_answer(owner, answer):
                return


def take_answer(guard: Any, answer: Any) -> bool:
    """Take a person's answer: raise the caps, and return whether it is not the end."""
    try:
        if answer:
            guard.extend(**_caps(answer))
            return True
    except Exception as error:
        guard.tree.report("on_trip", error)
    guard.state.on_limit = None
    return False


def take_answers(run: Any, answers: Mapping[str, Any]) -> None:
    """Give a run and those around it the answers to what they have asked, by their ids."""
    for guard in run.guard.ancestry:
        if guard.run_id in answers:
            take_answer(guard, answers[guard.run_id])


def _of_caps(state: Any, request: Any) -> tuple[Any, tuple[Violation, ...]] | None:
    """Return the nearest guard whose caps would stop a step; None where nobody is to be asked."""
    with state.tree.lock:
        if state.stops.trip is not None or state.stops.aborted is not None:
            return None
        found = [
            (link, over, needed)
            for link, over, needed in counters.violations(state.chain, state.tree.now(), request)
            if link.owner.mode is Mode.ENFORCE
        ]
        for link, over, _ in found:
            if link.owner.state.on_limit is None or link.answers or counters.TIME in over:
                return None
        if not found:
            return None
        link, over, needed = found[0]
        return link.owner, tuple(link.describe(one, needed[one]) for one in over)


@contextmanager
def _standing_still(state: Any) -> Generator[None]:
    """Stop the time of the run and of those above it."""
    ancestry = state.guard.ancestry
    for guard in ancestry:
        guard.pause()
    try:
        yield
    finally:
        for guard in ancestry:
            guard.go_on()


def _caps(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, Mapping):
        raise ConfigurationError(
            f"the answer must be caps to raise or None, got {type(answer).__name__}. "
            'Return {"max_iterations": 40}.'
        )
    return dict(cast("Mapping[str, Any]", answer))


def _answered(answer: Any) -> Any:
    """Await an answer on a loop of its own, because this code may stand on one that runs."""
    if not inspect.isawaitable(answer):
        return answer

    async def awaited() -> Any:
        return await answer

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, asyncio.run, awaited()).result()
