"""The beginning of an agent's, swarm's or graph's run: at the top, or as a part of its parent."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

from budgetguard_core import (
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    Outcome,
    Snapshot,
    Trip,
    kit,
)
from budgetguard_core.kit import Envelope, Frame, Run
from budgetguard_strands._messages import DIALECT
from budgetguard_strands.questions import answers_to, ask

KEY = "budgetguard"
"""The key of the counters in an agent's state, and of the budget in an invocation's."""
_V = TypeVar("_V")


class ByIdentity(Generic[_V]):
    """A dictionary whose keys are told apart by identity and not kept alive.

    Users' agents and nodes may be equal to one another, or have no hash, as dataclasses have none.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Any], _V]] = {}

    def get(self, key: Any) -> _V | None:
        """Return what is known of an object, or None."""
        found = self._values.get(id(key))
        return None if found is None or found[0]() is not key else found[1]

    def set(self, key: Any, value: _V) -> None:
        """Note something of an object, until it is gone."""
        values, number = self._values, id(key)
        values[number] = (weakref.ref(key, lambda _: values.pop(number, None)), value)

    def pop(self, key: Any) -> None:
        """Forget an object."""
        self._values.pop(id(key), None)


OUTCOMES: ByIdentity[Outcome] = ByIdentity()
"""The outcome of the last run, by its agent, swarm or graph, and by the metrics of its results."""
TRIPS: ByIdentity[Trip] = ByIdentity()
"""The stop of the last run of each."""
NODES: ByIdentity[Any] = ByIdentity()
"""The `OrchestratorRun` that a node's executor is a part of, while the node is at work."""
OPENERS: ByIdentity[Opener] = ByIdentity()
"""The budget of each agent, swarm and graph that is bounded: an agent has one."""


class OpenedRun(NamedTuple):
    """A run that has begun."""

    session: kit.Session
    inside: bool
    """It is a part of another one."""
    shared: bool
    """Its guard was given, and nothing of it is reset."""
    node: Any
    """The run of the swarm or graph that it is a node of; None elsewhere."""


def note(target: Any, outcome: Outcome) -> None:
    """Note the outcome of a target's run."""
    OUTCOMES.set(target, outcome)
    metrics = getattr(target, "event_loop_metrics", None)
    if metrics is not None:
        OUTCOMES.set(metrics, outcome)


def note_end(target: Any, at: Any, outcome: Outcome) -> None:
    """Note how the run of a target ended.

    Raises:
        BudgetExceeded: The caller asked for it, or the stop is that of the run around.
    """
    note(target, outcome)
    run, trip = at.run, at.run.trip
    if trip is None:
        return
    TRIPS.set(target, trip)
    propagates = at.inside and run.is_of_parent_run(trip)
    if at.node is None and (propagates or (run.is_to_raise and not at.inside)):
        raise BudgetExceeded(trip, outcome)


class Opener:
    """One provider's budget, and its runs."""

    def __init__(self, envelope: Envelope | None = None, resume: Any = None) -> None:
        # What is a part of a run of this provider has no caps of its own. Without an envelope all
        # is a part of whatever run is around.
        self._part = Envelope(budget=Budget(), on_trip=envelope.on_trip if envelope else "return")
        self.envelope = envelope or self._part
        self._resume = resume
        self._own: weakref.WeakSet[Run] = weakref.WeakSet()

    def take(self, target: Any) -> bool:
        """Take an agent, swarm or graph; return whether it had no budget before.

        Raises:
            ConfigurationError: It has another one already.
        """
        known = OPENERS.get(target)
        if known is None or known is JOINING:
            OPENERS.set(target, self)
            return known is None
        guard = self.envelope.budget
        if known is not self and not (isinstance(guard, Guard) and guard is known.envelope.budget):
            raise ConfigurationError(
                f"{type(target).__name__} must have one provider, got a second one. Put a budget "
                "around both with a swarm, a graph, or guard.activate()."
            )
        return False

    async def open(
        self,
        target: Any,
        invocation_state: Any,
        kept: Any,
        *,
        user_spoke: bool,
        waits: bool = False,
        given: Any = None,
    ) -> OpenedRun:
        """Open a run; the budget of the invocation takes the place of the provider's own.

        Args:
            target: The agent, swarm or graph.
            invocation_state: The state that the caller gave.
            kept: What an agent's state holds of an earlier run of its session.
            user_spoke: It begins with new words of the user's.
            waits: It goes on in the object that waited for a person.
            given: The input of the run, where that is known.
        """
        for known in (TRIPS, OUTCOMES):
            known.pop(target)
        node = NODES.get(target)
        enclosing: Any = kit.FRAME.get() if node is None else node.run.frame()
        with kit.entered(enclosing):
            frame = kit.current()
            inside = frame is not None and frame.run is not None
            envelope = self.envelope
            if inside and self._is_in(frame):
                envelope, kept = self._part, kept if waits else None
            elif not inside:
                envelope = self._given(invocation_state)
            if envelope is self._part and frame is not None and frame.guard.mode != envelope.mode:
                # Its detection of loops only observes where the run around it does.
                envelope = replace(envelope, mode=frame.guard.mode)
            resume = None if inside else self._resume
            if resume is not None:
                self._resume = None  # of the first run alone
            manager = getattr(target, "session_manager", target)
            # The adapter writes there by itself: a run has several attempts.
            location: Any = SimpleNamespace(get=lambda: kept or None)
            opening = kit.open_run(
                envelope,
                location,
                resume=resume,
                user_spoke=user_spoke,
                config=invocation_state,
                given=given,
                thread=getattr(manager, "session_id", None),
                asks=ask,
            )
            run, resumed = await kit.run_awaited(opening)
        kit.take_answers(run, answers_to(target))
        self._own.add(run)
        session = kit.Session(run, DIALECT, resumed=resumed)
        return OpenedRun(session, inside, isinstance(envelope.budget, Guard), node)

    def _given(self, invocation_state: Mapping[str, Any] | None) -> Envelope:
        given = (invocation_state or {}).get(KEY)
        own = self.envelope
        if given is None or given is own.budget or isinstance(given, Envelope):
            return given if isinstance(given, Envelope) else own
        if isinstance(given, Budget):
            return replace(own, budget=given)
        options = {"on_trip": own.on_trip, "store": own.store, "on_outcome": own.on_outcome}
        return kit.envelope_of(given, **options)  # type: ignore[arg-type]

    def _is_in(self, frame: Frame | None) -> bool:
        """Return whether a run of this provider is around."""
        while frame is not None:
            if frame.is_live and frame.run in self._own:
                return True
            frame = frame.parent
        return False


JOINING = Opener()
"""The budget of an agent without one: it spends that of the run around it, and of nothing else."""


def entry(status: str, snapshot: Snapshot) -> dict[str, Any]:
    """Return what is kept of a run, as the kit reads it."""
    # As text, because the state copies what it keeps each time that it is asked.
    return {"status": status, "snapshot": snapshot.to_json()}


def is_of_a_stop(error: Any) -> bool:
    """Return whether an exception, or what it was raised from, says only that a run was stopped."""
    while isinstance(error, BaseException):
        if kit.is_stop(error):
            return True
        error = error.__cause__
    return False
