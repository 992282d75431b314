"""The run that a client's call is a part of."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

from budgetguard_core import Guard, Mode, Outcome
from budgetguard_core.kit import FRAME, NOWHERE, Envelope, Run, current, in_force, joined
from budgetguard_http._conversations import Traffic

# Kept with the run itself: a table would keep the run, which they refer to, for ever.
_TRAFFIC: Final = "_budgetguard_http_traffic"


def is_own(run: Run) -> bool:
    """Return whether a run is one of clients alone: no other adapter makes its calls."""
    return run.is_loose or run.is_of_clients


def is_off(run: Run) -> bool:
    """Return whether no guard of a run enforces or observes."""
    return all(one.mode is Mode.OFF for guard in run.guards for one in guard.ancestry)


def traffic_of(run: Run) -> Traffic:
    """Return what is remembered of a run's calls; it lives as long as the run."""
    kept = vars(run)
    found: Traffic = kept.get(_TRAFFIC) or kept.setdefault(_TRAFFIC, Traffic(run, is_own(run)))
    return found


class EnvelopeRuns:
    """The runs of one transport, which has an envelope of its own.

    Outside of any other run its calls are one run, from the first to `end`. Within another it has
    a run for each, charged beside that.

    Attributes:
        outside: The run of the calls that are part of no other; None before the first.
        latest: The latest run within another one.
    """

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._lock = threading.Lock()
        self.outside: Run | None = None
        self.latest: Run | None = None
        self._enclosing_runs: weakref.WeakSet[Run] = weakref.WeakSet()

    def here(self) -> Run:
        """Return the run that a call from this code is a part of."""
        enclosing = joined()
        if enclosing is None:
            with self._lock:
                if self.outside is None or self.outside.ended:
                    self.outside = self._envelope.open(loose=True)
                return self.outside
        given = self._envelope.budget
        if isinstance(given, Guard) and any(given in one.ancestry for one in enclosing.guards):
            return enclosing
        with self._lock:
            self._enclosing_runs.add(enclosing)
        self.latest = enclosing.part(self, self)
        return self.latest

    def open(self, *, loose: bool = False) -> Run:
        """Open the run of the calls within another: beside that, and not within.

        Of a call that a layer above counts already, this envelope has seen nothing.
        """
        frame = current()
        token = FRAME.set(NOWHERE)
        try:
            alone = self._envelope.open(loose=loose)
        finally:
            FRAME.reset(token)
        return _Part(self._envelope, alone.guard, frame, in_force(frame), loose=loose)

    def to_end(self) -> list[Run]:
        """Return the runs that go on, to be ended: no call comes any more."""
        with self._lock:
            found = [enclosing.without_part(self) for enclosing in self._enclosing_runs]
            self._enclosing_runs.clear()
        return [run for run in (*found, self.outside) if run is not None and run.outcome is None]


class _Part(Run):
    """A run within another one, which ends it."""

    def end(self, *given: Any, **ends: Any) -> Outcome:
        """End it; its history is what its traffic tells, of which the run around knows nothing."""
        return super().end(*given, **(ends or traffic_of(self).ending()))


def end(run: Run) -> Outcome:
    """End a run that was one of clients alone."""
    return run.end(**traffic_of(run).ending())
