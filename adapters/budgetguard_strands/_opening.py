"""How the run of an agent, swarm or graph begins: at the top, or as a part of one around it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from budgetguard_core import Budget, Guard, Outcome, Trip
from budgetguard_core.kit import (
    Envelope,
    Frame,
    Run,
    current,
    entered,
    envelope_of,
    opened,
    part,
    run_blocking,
)
from budgetguard_strands._identity import ByIdentity

KEY = "budgetguard"
"""Where the counters are in an agent's state, and the budget in an invocation's."""


class Opened(NamedTuple):
    """A run that has begun."""

    run: Run
    inside: bool
    """It is a part of another one."""
    shared: bool
    """Its guard was given, and nothing of it is reset."""
    of_node: bool
    """It is that of a swarm's or graph's node."""


class Opener:
    """One provider's budget, its runs and what they came to.

    Attributes:
        outcomes: The outcome of the last run of each agent, swarm and graph.
        trips: The stop of the last run of each.
        nodes: The run that a node's executor is a part of, while the node is at work.
        corrections: What the next node of a run of a swarm or graph is to be told.
    """

    def __init__(self, envelope: Envelope | None = None) -> None:
        # What is a part of a run of this provider has no caps of its own. Without an envelope all
        # is a part of whatever run is around.
        self._part = Envelope(budget=Budget(), on_trip=envelope.on_trip if envelope else "return")
        self.envelope = envelope or self._part
        self._own: WeakSet[Run] = WeakSet()
        self.outcomes: ByIdentity[Outcome] = ByIdentity()
        self.nodes: ByIdentity[Run] = ByIdentity()
        self.trips: ByIdentity[Trip] = ByIdentity()
        self.corrections: WeakKeyDictionary[Run, str] = WeakKeyDictionary()

    def open(
        self,
        target: Any,
        invocation_state: Any,
        kept: Any,
        *,
        user_spoke: bool,
        waits: bool = False,
        given: Any = None,
        layer_above: Run | None = None,
    ) -> Opened:
        """Open a run; the budget of the invocation takes the place of the provider's own.

        Args:
            target: The agent, swarm or graph.
            invocation_state: What the caller gave.
            kept: What an agent's state holds of an earlier run of its session.
            user_spoke: It begins with new words of the user's.
            waits: It goes on in the object that waited for a person.
            given: What the run is given as its input, where that is known.
            layer_above: The run of another provider on the same target, inside of the same run:
                what both count is one call.
        """
        self.outcomes.pop(target)
        self.trips.pop(target)
        node = self.nodes.get(target)
        around = layer_above or node
        with nullcontext() if around is None else entered(around.frame()):
            frame = current()
            inside = frame is not None and frame.run is not None
            envelope = self.envelope
            if inside and self._is_in(frame):
                envelope, kept = self._part, kept if waits else None
            elif not inside:
                envelope = self._given(invocation_state)
            if envelope is self._part and frame is not None and frame.guard.mode != envelope.mode:
                # Its detection of loops only looks on where the run around it does.
                envelope = replace(envelope, mode=frame.guard.mode)
            run, _ = run_blocking(
                opened(
                    envelope,
                    _Entry(kept),
                    user_spoke=user_spoke,
                    config=invocation_state,
                    given=given,
                )
            )
        self._own.add(run)
        return Opened(run, inside, isinstance(envelope.budget, Guard), node is not None)

    def _given(self, invocation_state: Mapping[str, Any] | None) -> Envelope:
        given = (invocation_state or {}).get(KEY)
        own = self.envelope
        if given is None or given is own.budget or isinstance(given, Envelope):
            return given if isinstance(given, Envelope) else own
        if isinstance(given, Budget):
            return replace(own, budget=given)
        options = {"on_trip": own.on_trip, "store": own.store, "on_outcome": own.on_outcome}
        return envelope_of(given, **options)  # type: ignore[arg-type]

    def _is_in(self, frame: Frame | None) -> bool:
        """Tell whether a run of this provider is around."""
        while frame is not None:
            if frame.is_live and frame.run in self._own:
                return True
            frame = frame.above
        return False


class _Entry:
    """What the state of an agent, swarm or graph holds of its last run; it is written elsewhere."""

    keeps: frozenset[str] = frozenset()

    def __init__(self, kept: Any) -> None:
        self._kept = kept

    def get(self) -> dict[str, Any] | None:
        """Return the entry, or None; a tool could have written anything into the state."""
        kept = self._kept
        if not kept or kept == {"unfinished": None}:
            return None
        return {"status": part(kept, "unfinished"), "snapshot": part(kept, "snapshot")}

    def put(self, entry: dict[str, Any] | None) -> None:
        """Keep nothing."""
