"""One thread per process: settlements, kill switches, and who is alive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.runs import AliveRuns, Runs

BEAT_SECONDS = 0.5
"""Between two looks at the store. A kill is seen within it and one trip."""
_DELIVERY_SECONDS = 0.3
"""Of one beat: what is left is sent behind the next look at the kill switches."""
_LOG = logging.getLogger("budgetguard")


class Beat:
    """The exchange of a process with its store, twice a second while it has runs.

    Args:
        connection: To the store.
        outbox: What is to be sent.
        runs: The runs of this process.
        alive: Where the runs are announced.
    """

    def __init__(
        self, connection: Connection, outbox: Outbox, runs: Runs, alive: AliveRuns
    ) -> None:
        self._connection = connection
        self._outbox = outbox
        self._runs = runs
        self._alive = alive
        self.begin()

    def begin(self) -> None:
        """Begin anew in a child process."""
        self._orphans_sent = False

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
        return bool(self._runs.all() or len(self._outbox))

    def do(self, seconds: float = _DELIVERY_SECONDS) -> bool:
        """Do what is due; return whether more is to be sent than there was time for.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        runs = self._runs.all()
        if runs:  # those that are set, and so none where thousands of tenants live in peace
            flags = self._connection.ask(lambda store: store.scan("f:"))
            self._runs.tell_killed({name[2:]: text for name, text in flags.items()})
        if not self._outbox.deliver(self._connection.send, seconds):
            return True
        self._alive.announce(runs)
        if not self._orphans_sent:  # last: what cannot be sent holds nothing up
            self._outbox.deliver_orphans(self._connection.send)
            self._orphans_sent = True
        return False

    def finish(self, seconds: float) -> None:
        """Send what waits for so long; what cannot be sent is written down."""
        self._runs.leave()
        try:
            self._outbox.deliver(self._connection.send, seconds)
            self._alive.announce([])
        except LedgerUnreachable as error:
            _LOG.info("ledger: %s", error)
        self._save()

    def _save(self) -> None:
        try:
            self._outbox.save()
        except LedgerUnreachable as full:
            _LOG.warning("ledger: %s", full)


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
        """Request a `tick` soon, if the thread runs."""
        if self._thread is not None:
            self._event.set()

    def wake(self) -> None:
        """Request a `tick` soon; starts the thread where there is none."""
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
