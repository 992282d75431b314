"""How the run of an agent, swarm or graph begins: at the top, or as a part of one around it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

from budgetguard_core import Budget, BudgetExceeded, Guard, Outcome, Snapshot, Trip, kit
from budgetguard_core.kit import Envelope, Frame, Run
from budgetguard_strands.questions import answers_to, ask

KEY = "budgetguard"
"""Where the counters are in an agent's state, and the budget in an invocation's."""
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


LAST: ByIdentity[Outcome] = ByIdentity()
"""The outcome of the last run, by its agent, swarm or graph, and by the metrics of its results."""


class Opened(NamedTuple):
    """A run that has begun."""

    run: Run
    resumed: bool
    """It goes on from one that paused."""
    inside: bool
    """It is a part of another one."""
    shared: bool
    """Its guard was given, and nothing of it is reset."""
    of_node: bool
    """It is that of a swarm's or graph's node."""


class Opener:
    """One provider's budget, its runs and their endings.

    Attributes:
        outcomes: The outcome of the last run of each agent, swarm and graph.
        trips: The stop of the last run of each.
        nodes: The run that a node's executor is a part of, while the node is at work.
        corrections: The correction for the next node of a run of a swarm or graph.
    """

    def __init__(self, envelope: Envelope | None = None, resume: Any = None) -> None:
        # What is a part of a run of this provider has no caps of its own. Without an envelope all
        # is a part of whatever run is around.
        self._part = Envelope(budget=Budget(), on_trip=envelope.on_trip if envelope else "return")
        self.envelope = envelope or self._part
        self._resume = resume
        self._own: weakref.WeakSet[Run] = weakref.WeakSet()
        self.outcomes: ByIdentity[Outcome] = ByIdentity()
        self.nodes: ByIdentity[Run] = ByIdentity()
        self.trips: ByIdentity[Trip] = ByIdentity()
        self.corrections: weakref.WeakKeyDictionary[Run, str] = weakref.WeakKeyDictionary()

    async def open(
        self,
        target: Any,
        invocation_state: Any,
        kept: Any,
        *,
        user_spoke: bool,
        waits: bool = False,
        given: Any = None,
        beside: Any = None,
    ) -> Opened:
        """Open a run; the budget of the invocation takes the place of the provider's own.

        Args:
            target: The agent, swarm or graph.
            invocation_state: The state that the caller gave.
            kept: What an agent's state holds of an earlier run of its session.
            user_spoke: It begins with new words of the user's.
            waits: It goes on in the object that waited for a person.
            given: The input of the run, where that is known.
            beside: The run of another provider on the same target. The two are no part of each
                other; only within a third run, what both count is one call of it.
        """
        for known in (self.outcomes, self.trips, LAST):
            known.pop(target)
        node = self.nodes.get(target)
        around: Any = kit.FRAME.get() if node is None else node.frame()
        if beside is not None:
            around = beside.frame if beside.inside else beside.frame.above
        with kit.entered(around):
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
            opening = kit.opened(
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
        shared = isinstance(envelope.budget, Guard)
        return Opened(run, resumed, inside, shared, node is not None)

    def note(self, target: Any, outcome: Outcome) -> None:
        """Note the outcome of a target's run."""
        self.outcomes.set(target, outcome)
        LAST.set(target, outcome)
        metrics = getattr(target, "event_loop_metrics", None)
        if metrics is not None:
            LAST.set(metrics, outcome)

    def ended(self, target: Any, at: Any, outcome: Outcome) -> None:
        """Note how the run of a target ended.

        Raises:
            BudgetExceeded: The caller asked for it, or the stop is that of the run around.
        """
        self.note(target, outcome)
        run, trip = at.run, at.run.trip
        if trip is None:
            return
        self.trips.set(target, trip)
        goes_through = at.inside and run.is_of_the_run_around(trip)
        if not at.of_node and (goes_through or (run.is_to_raise and not at.inside)):
            raise BudgetExceeded(trip, outcome)

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
            frame = frame.above
        return False


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
