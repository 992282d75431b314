"""The state of a process's store: whether it answers, which ledger it is, how its clock goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

from budgetguard_core.clock import Clock
from budgetguard_core.ledger.errors import LedgerChanged, LedgerUnreachable, OtherWindows
from budgetguard_core.ledger.in_thread import InThread
from budgetguard_core.ledger.step import SEPARATOR, Answer, Identity, Step
from budgetguard_core.ledger.url import Store
from budgetguard_core.ledger.windows import Account, Window

_R = TypeVar("_R")

_ATTEMPTS = 3


class Connection:
    """One store, opened when it is first needed.

    A file is used by one thread at a time. A server is asked by all, and for the main thread by
    another one, which no signal's handler interrupts between a request and its reply.

    Args:
        open_store: Opens it.
        clock: Of this process.
        known: The id of the ledger that is expected; any is accepted at first if left out.
        timeout: Seconds after a failure in which the next step fails at once instead of waiting
            for the time-out again.
        is_server: Whether it is a server, not a file.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        clock: Clock,
        known: str = "",
        timeout: float = 1.0,
        *,
        is_server: bool = False,
    ) -> None:
        self.opener = open_store
        self.is_server = is_server
        self._clock = clock
        self._known = known
        self._sequence = 0
        self._seen = 0.0
        """The store's clock, when it last was the ledger that is known."""
        self._timeout = timeout
        self._pause_ns = int(timeout * 1e9)
        self._failed_ns: int | None = None
        self._failure = LedgerUnreachable("")
        self._store: Store | None = None
        self._skew = 0.0
        self.trips = 0
        self._begin()

    def _begin(self) -> None:
        self._opening = threading.Lock()
        self._turn = threading.Lock()
        self._in_thread = InThread()

    def _trip(self, call: Callable[[], _R]) -> _R:
        """Make a trip, unless one has failed just now."""
        with nullcontext() if self.is_server else self._turn:
            failed = self._failed_ns
            if failed is not None and self._clock.monotonic_ns() - failed < self._pause_ns:
                raise self._failure.again()
            try:
                result = self._in_thread(call) if self.is_server else call()
            except LedgerUnreachable as error:
                self._failed_ns, self._failure = self._clock.monotonic_ns(), error.again()
                raise
            self._failed_ns = None
            return result

    def store(self) -> Store:
        """Return the store, opened.

        Raises:
            LedgerChanged: It is not the ledger that was expected.
        """
        store = self._store
        if store is None:
            with self._opening:
                store = self._store
                if store is None:
                    try:
                        self._store = store = self._open()
                    except LedgerUnreachable as error:
                        error.was_sent = False
                        raise
        return store

    def _open(self) -> Store:
        opened = self._trip(self.opener)
        try:
            self._meet(self._trip(opened.identity))
        except BaseException:
            opened.close()
            raise
        return opened

    def _meet(self, met: Identity) -> None:
        """Go on with the ledger that was met, if it is the one that is known, or was adopted.

        Raises:
            LedgerChanged: It is another, or an earlier state of the one that is known.
        """
        known, found = self._known, ""
        if known and met.id == known and met.sequence < self._sequence:
            found = f"at change {self._sequence}, got {met.sequence}: it was rolled back"
        elif known and met.id != known and (not met.adopted or met.adopted < self._seen):
            got = met.id or "an empty store"
            found = f"{known}, got {got}: it was wiped, or is another"
        if found:
            raise LedgerChanged(
                f"the ledger must be {found}. Restore it, or accept it as it is with "
                "`budgetguard ledger adopt`."
            )
        if met.id != known:
            self._known, self._sequence = met.id, met.sequence

    def ask(self, call: Callable[[Store], _R]) -> _R:
        """Make one trip that is no step."""
        store = self.store()
        return self._trip(lambda: call(store))

    def send(self, step: Step) -> Answer:
        """Make one step.

        Raises:
            OtherWindows: The step names other windows than its hold was made in.
        """
        try:
            answer = self._send(step)
        except LedgerUnreachable as error:
            error.windows = step.windows
            raise
        if answer.status == "windows":
            raise OtherWindows(
                "a hold must be reported in the windows that it was made in, got others. "
                "Settle a reservation with the object that `reserve` returned."
            )
        return answer

    def _send(self, step: Step) -> Answer:
        store = self.store()
        while True:
            self.trips += 1
            known = step._replace(ledger=self._known, sequence=self._sequence)
            answer = self._trip(partial(store.step, known))
            if answer.status != "foreign":
                # Of several threads one may set it back: then less is asked of the store.
                self._sequence = max(self._sequence, answer.sequence)
                self._seen = answer.now
                return answer
            met, adopted, sequence = answer.detail.split(SEPARATOR)
            self._meet(Identity(met, float(adopted), int(sequence)))

    def now(self) -> float:
        """Return what this process takes for the store's time."""
        return self._clock.wall_ns() / 1e9 + self._skew

    def take(
        self, account: Account, make: Callable[[Sequence[Window]], Step]
    ) -> tuple[Answer, Sequence[Window]]:
        """Make a reservation in the windows of now.

        Ours is a guess, the store's clock decides: one more trip at an edge, none otherwise.
        """
        for _ in range(_ATTEMPTS):
            windows = account.windows(self.now())
            answer = self.send(make(windows))
            if answer.status != "clock":
                return answer, windows
            self._skew = answer.now - self._clock.wall_ns() / 1e9
        raise LedgerUnreachable(
            f"the store's clock must stand still for a moment, got {_ATTEMPTS} times outside of "
            "its windows. Check the clocks."
        )

    def before_fork(self) -> bool:
        """Close a file, and hold it closed until `after_fork`, which is due where this is True.

        SQLite keeps what it has locked in the memory of the process. A child would believe that it
        holds the locks of an open file, and the system knows of none: another process that closes
        the file then takes itself for the last, and what the child commits is lost with the log.
        """
        store = self._store
        # A step under way may wait for the file as long as that, and then takes its time.
        if self.is_server or store is None or not self._turn.acquire(timeout=2 * self._timeout):
            return False
        store.close()
        return True

    def after_fork(self) -> None:
        """Go on in the parent process."""
        self._turn.release()

    def forked(self) -> None:
        """Leave the connection to the parent process."""
        self._begin()
        if self._store is not None:
            self._store.forked()

    def close(self) -> None:
        """Close the connection; the next step opens it again."""
        with self._opening, self._turn:
            if self._store is not None:
                self._store.close()
                self._store = None
            self._in_thread.close()
