"""The runs of this process and of all processes, and the thread that looks after them."""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from budgetguard_core.clock import Clock
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.ceilings import Ceilings
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import LedgerRefused, LedgerUnreachable, Warned, in_units
from budgetguard_core.ledger.kill_switch import kill_of
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.reservation import Part, Reservations
from budgetguard_core.ledger.step import Step, new_id
from budgetguard_core.ledger.url import Store
from budgetguard_core.ledger.windows import RUN

_LOG = logging.getLogger("budgetguard")
BEAT_SECONDS = 0.5
"""Between two looks at the store. A kill is seen within it and one trip."""
_DELIVERY_SECONDS = 0.3
"""Of one beat: what is left is sent behind the next look at the kill switches."""
_ANNOUNCE_SECONDS = 10.0
_SILENT_SECONDS = 30.0
_FORGOTTEN_SECONDS = 86_400.0
_RUNS_SHOWN = 1000


class LedgerRun:
    """One run's place in the ledger: what its guard asks, and what it is told.

    `obtain` makes a trip; `settle` works in memory, and the trip is made by another thread.
    """

    def __init__(
        self,
        runs: Runs,
        run: str,
        reservations: Reservations,
        on_kill: Callable[[str], object],
        on_warning: Callable[[Warned], object],
    ) -> None:
        self._runs = runs
        self._reservations = reservations
        self.account = reservations.account
        self.payer = (id(runs), self.account.names)
        """The same for all runs that are charged to the same keys."""
        self.is_open = False
        self.run = run
        self.started = runs.connection.now()
        self.on_kill = on_kill
        self.on_warning = on_warning
        self.settle = reservations.settle

    def obtain(self, amount: Amount) -> Part | LedgerRefused:
        """Reserve an amount, with a trip to the store; bounded, never under a lock."""
        answer = self._reservations.reserve(amount, self.run)
        if isinstance(answer, LedgerRefused) and self._runs.deliver():
            # What was on its way to the store has made room.
            answer = self._reservations.reserve(amount, self.run)
        return answer

    def caps(self) -> Amount:
        """Return the ceilings that hold for the run, 0 for none; a trip at most once a second."""
        caps = Amount()
        for ceiling in self._runs.ceilings.of(self.account):
            caps = caps.larger(ceiling)
        return caps

    def report(self, spent: Amount) -> None:
        """Charge what nothing was reserved for: the run only observes, and was not refused."""
        self._runs.report(self, spent)

    def open(self) -> None:
        """Register a run that begins, or goes on after its end was reported."""
        self.is_open = True
        self._runs.add(self)

    def close(self) -> None:
        """End the run; what it reserved can still be settled."""
        self.is_open = False
        self._runs.remove(self)

    def abandon(self) -> None:
        """Mark the run as abandoned: from a finalizer, so no lock is taken."""
        self._runs.forget(self)


class Runs:
    """The runs of this process that go on, and what is asked and told about them twice a second.

    Args:
        connection: To the store.
        outbox: For what a run reports.
        ceilings: What may hold for a run.
        alive: Where the runs are announced.
        wake: Called when there is something to do for the heartbeat.
    """

    def __init__(
        self,
        connection: Connection,
        outbox: Outbox,
        ceilings: Ceilings,
        alive: AliveRuns,
        wake: Callable[[], object],
    ) -> None:
        self.connection = connection
        self.ceilings = ceilings
        self.alive = alive
        self._outbox = outbox
        self._wake = wake
        self._runs: dict[int, LedgerRun] = {}
        self.begin()

    def begin(self) -> None:
        """Begin anew in a child process. A guard that crossed the fork goes on asking."""
        for run in self._runs.values():
            run.is_open = False
        # Another thread of the parent may have held it.
        self._lock = threading.Lock()
        self._runs = {}
        self._gone: deque[LedgerRun] = deque()
        self._orphans_sent = False
        self.alive.begin()

    def add(self, run: LedgerRun) -> None:
        """Look after a run from now on."""
        with self._lock:
            self._runs[id(run)] = run
        self._wake()

    def remove(self, run: LedgerRun) -> None:
        """Look after a run no longer: it has ended."""
        with self._lock:
            self._runs.pop(id(run), None)

    def forget(self, run: LedgerRun) -> None:
        """Remove a run at the next beat."""
        self._gone.append(run)

    def report(self, run: LedgerRun, spent: Amount) -> None:
        """Charge a run what nothing was reserved for, as soon as the store answers."""
        windows = run.account.windows(self.connection.now())
        self._outbox.add(Step("settle", new_id(), windows, spent, owner=run.run))
        self._wake()

    def deliver(self) -> bool:
        """Send what waits for the ledger's thread; False where nothing did, or no store answers."""
        if not len(self._outbox):
            return False
        try:
            self._outbox.deliver(self.connection.send)
        except LedgerUnreachable:
            return False
        return True

    def all(self) -> list[LedgerRun]:
        """Return the runs that go on, without those that nobody keeps any more."""
        while self._gone:
            self.remove(self._gone.popleft())
        with self._lock:
            return list(self._runs.values())

    def leave(self) -> None:
        """Look after no run; one that goes on all the same says so by opening itself."""
        with self._lock:
            for run in self._runs.values():
                run.is_open = False
            self._runs.clear()

    def tell_killed(self, flags: Mapping[str, str]) -> None:
        """Notify the runs that a kill switch is set for, by its flag and text."""
        for run in self.all() if flags else ():
            for flag in (*run.account.flags, f"r:{run.run}"):
                if flag in flags:
                    _call(run.on_kill, kill_of(flag, flags[flag]).detail)
                    break

    def tick(self) -> bool:
        """Do what is due, of which nothing fails; return whether there is more to come at once."""
        try:
            return self.do()
        except LedgerUnreachable as error:
            _LOG.info("ledger: %s", error)
            self._save()
        except Exception as error:
            # A thread that died would be missed by everyone.
            _LOG.warning("ledger: the heartbeat failed: %s", type(error).__name__)
        return False

    def is_needed(self) -> bool:
        """Return whether there are runs to look after, or settlements to send."""
        return bool(self.all() or len(self._outbox))

    def do(self, seconds: float = _DELIVERY_SECONDS) -> bool:
        """Do what is due; return whether more is to be sent than there was time for."""
        runs = self.all()
        if runs:  # those that are set, and so none where thousands of tenants live in peace
            flags = self.connection.ask(lambda store: store.scan("f:"))
            self.tell_killed({name[2:]: text for name, text in flags.items()})
        if not self._outbox.deliver(self.connection.send, seconds):
            return True
        self.alive.announce(runs)
        if not self._orphans_sent:  # last: what cannot be sent holds nothing up
            self._outbox.deliver_orphans(self.connection.send)
            self._orphans_sent = True
        return False

    def finish(self, seconds: float) -> None:
        """Send what waits for so long; what cannot be sent is written down."""
        self.leave()
        try:
            self._outbox.deliver(self.connection.send, seconds)
            self.alive.announce([])
        except LedgerUnreachable as error:
            _LOG.info("ledger: %s", error)
        self._save()

    def _save(self) -> None:
        try:
            self._outbox.save()
        except LedgerUnreachable as full:
            _LOG.warning("ledger: %s", full)

    def warn(self, warned: Sequence[Warned]) -> None:
        """Notify the runs that are charged in a window which reached 80 % of a ceiling."""
        now = self.connection.now()
        for one in warned:
            if one.window[0] != RUN:  # that is for whoever made a ledger for one run
                _LOG.warning("%s reached 80 %% of its ceiling (%s)", ascii(one.key), one.window)
            runs = [
                run
                for run in self.all()
                if any(window[:2] == (one.key, one.window) for window in run.account.windows(now))
            ]
            if runs:
                shown = self._with_figures(one, runs[0])
                for run in runs:
                    _call(run.on_warning, shown)

    def _with_figures(self, warned: Warned, run: LedgerRun) -> Warned:
        try:
            record = self.connection.ask(lambda store: store.window(warned.key, warned.window))
            windows = run.account.windows(self.connection.now())
            ceilings = self.ceilings.of(run.account)
        except LedgerUnreachable:
            return warned
        for window, ceiling in zip(windows, ceilings, strict=True):
            if window[:2] == (warned.key, warned.window):
                for dimension, (limit, used) in enumerate(
                    zip(ceiling, record.charged, strict=True)
                ):
                    if limit and used * 5 >= limit * 4:
                        return warned._replace(
                            limit=in_units(limit, dimension), used=in_units(used, dimension)
                        )
        return warned


def _call(listener: Callable[[Any], object], fact: object) -> None:
    """Notify a run's listener; its failure changes nothing."""
    try:
        listener(fact)
    except Exception as error:
        _LOG.warning("ledger: a listener failed: %s", type(error).__name__)


@dataclass(frozen=True, slots=True)
class AliveRun:
    """A run that some process is working on."""

    run: str
    tenant: tuple[str, ...]
    host: str
    pid: int
    started: float
    """Seconds since the epoch."""
    seen: float
    """When its process was last heard of. Silent for 30 s, it is probably dead."""
    silent: bool


class AliveRuns:
    """One note of each process in the store, about the runs that it works on.

    Args:
        connection: To the store.
        clock: Monotonic time.
    """

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Begin anew in a child process, which has said nothing yet."""
        self._announced_ns: int | None = None
        self._announced: frozenset[tuple[object, ...]] = frozenset()

    def announce(self, runs: Sequence[LedgerRun]) -> None:
        """Report the runs of this process, where they changed or it is time to report again.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        now = self._clock.monotonic_ns()
        names = frozenset((run.run, run.account.names, run.started) for run in runs)
        last = self._announced_ns
        due = last is None or now - last > _ANNOUNCE_SECONDS * 1e9
        if names == self._announced and not (due and runs):
            return
        text = None
        if runs:
            note = {
                "host": platform.node(),
                "pid": os.getpid(),
                "seen": self._connection.ask(_now),
                "runs": [[run.run, run.account.names, run.started] for run in runs[:_RUNS_SHOWN]],
            }
            text = json.dumps(note)
            if last is None:
                self._connection.ask(_forget_the_dead)
        name = f"p:{self._connection.holder}"
        self._connection.ask(lambda store: store.write(name, text))
        self._announced, self._announced_ns = names, now

    def all(self) -> list[AliveRun]:
        """Return the runs of all processes, also of those that went silent."""
        notes = self._connection.ask(lambda store: store.scan("p:"))
        now = self._connection.ask(_now)
        found: list[AliveRun] = []
        for text in notes.values():
            note = _note(text)
            if note is None:
                continue
            seen = float(note["seen"])
            silent = now - seen > _SILENT_SECONDS
            where = (str(note["host"]), int(note["pid"]))
            found += [
                AliveRun(run, tuple(tenant), *where, float(started), seen, silent)
                for run, tenant, started in note["runs"]
            ]
        return sorted(found, key=lambda one: (one.started, one.run))


def _now(store: Store) -> float:
    return store.now()


def _forget_the_dead(store: Store) -> None:
    """Take away what processes said that have been silent for a day, and so never will."""
    now = store.now()
    for name, text in store.scan("p:").items():
        note = _note(text)
        if note is None or now - float(note["seen"]) > _FORGOTTEN_SECONDS:
            store.write(name, None)


def _note(text: str) -> dict[str, Any] | None:
    """Read what a process said of its runs."""
    try:
        note = cast("dict[str, Any]", json.loads(text))
        return note if {"host", "pid", "seen", "runs"} <= note.keys() else None
    except (ValueError, AttributeError):
        return None


class Heartbeat:
    """Calls `tick` while there is something to do; the thread ends with the last of it.

    Args:
        tick: Returns whether it is to be called again at once.
        is_needed: Returns whether there is something to do.
    """

    def __init__(self, tick: Callable[[], bool], is_needed: Callable[[], bool]) -> None:
        self._tick = tick
        self._is_needed = is_needed
        self.restart()

    def restart(self) -> None:
        """Forget the thread, which stayed in the parent process."""
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def hurry(self) -> None:
        """Request a call of `tick` soon, if the thread runs."""
        if self._thread is not None:
            self._event.set()

    def wake(self) -> None:
        """Request a call of `tick` soon; starts the thread where there is none."""
        self._event.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._stopped:
                    self._thread = threading.Thread(
                        target=self._run, name="budgetguard-ledger", daemon=True
                    )
                    self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the thread, and wait so long until the call of `tick` under way has returned."""
        with self._lock:
            self._stopped = True
            thread = self._thread
        self._event.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        with self._lock:
            self._stopped = False

    def _run(self) -> None:
        while True:
            self._event.wait(BEAT_SECONDS)
            self._event.clear()
            if not self._stopped and self._tick():
                self._event.set()
            with self._lock:
                if self._stopped or not (self._is_needed() or self._event.is_set()):
                    self._thread = None
                    return
