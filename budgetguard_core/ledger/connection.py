"""The state of a process's store: whether it answers, which ledger it is, how its clock goes."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from budgetguard_core.clock import Clock
from budgetguard_core.ledger.errors import LedgerChanged, LedgerUnreachable, OtherWindows
from budgetguard_core.ledger.sqlite import SqliteLedgerStore
from budgetguard_core.ledger.step import SEPARATOR, Answer, Identity, Step
from budgetguard_core.ledger.url import Store
from budgetguard_core.ledger.windows import Account, Window

_R = TypeVar("_R")

_ATTEMPTS = 3


class Connection:
    """One store, opened when it is first needed.

    Args:
        open_store: Opens it.
        clock: Of this process.
        known: The id of the ledger that is expected; any is accepted at first if left out.
        pause: Seconds after a failure in which the next step fails at once instead of waiting for
            the time-out again.
    """

    def __init__(
        self, open_store: Callable[[], Store], clock: Clock, known: str = "", pause: float = 1.0
    ) -> None:
        self.opener = open_store
        self._clock = clock
        self._known = known
        self._sequence = 0
        self._seen = 0.0
        """The store's clock, when it last was the ledger that is known."""
        self._pause_ns = int(pause * 1e9)
        self._failed_ns: int | None = None
        self._failure = LedgerUnreachable("")
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._skew = 0.0
        self.trips = 0
        self.holder = uuid.uuid4().hex
        """This process, in the lists that the store keeps."""

    def store(self) -> Store:
        """Return the store, opened.

        Raises:
            LedgerChanged: It is not the ledger that was expected.
        """
        store = self._store
        if store is None:
            with self._lock:
                store = self._store
                if store is None:
                    self._fail_fast()
                    try:
                        self._store = store = self._open()
                    except LedgerUnreachable as error:
                        error.was_sent = False
                        raise
        return store

    def _open(self) -> Store:
        opened = self._guarded(self.opener)
        try:
            self._meet(self._guarded(opened.identity))
        except BaseException:
            opened.close()
            raise
        return opened

    def _meet(self, met: Identity) -> None:
        """Go on with the ledger that was met, if it is the one that is known, or was adopted.

        Raises:
            LedgerChanged: It is another, or an earlier state of the one that is known.
        """
        known = self._known
        if known and met.id == known and met.sequence < self._sequence:
            raise LedgerChanged(
                f"the ledger must be at change {self._sequence}, got {met.sequence}: it was rolled "
                "back. Restore it, or accept it as it is with `budgetguard ledger adopt`."
            )
        if known and met.id != known and (not met.adopted or met.adopted < self._seen):
            raise LedgerChanged(
                f"the ledger must be {known}, got {met.id or 'an empty store'}: it was wiped, or "
                "is another. Restore it, or accept it as it is with `budgetguard ledger adopt`."
            )
        if met.id != known:
            self._known, self._sequence = met.id, met.sequence

    def _fail_fast(self) -> None:
        failed = self._failed_ns
        if failed is not None and self._clock.monotonic_ns() - failed < self._pause_ns:
            raise self._failure.again()

    def _guarded(self, call: Callable[..., _R], *arguments: object) -> _R:
        try:
            result = call(*arguments)
        except LedgerUnreachable as error:
            self._failed_ns, self._failure = self._clock.monotonic_ns(), error.again()
            raise
        self._failed_ns = None
        return result

    def ask(self, call: Callable[[Store], _R]) -> _R:
        """Make one trip that is no step."""
        store = self.store()
        self._fail_fast()
        return self._guarded(call, store)

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
        self._fail_fast()
        while True:
            self.trips += 1
            known = step._replace(ledger=self._known, sequence=self._sequence)
            answer = self._guarded(store.step, known)
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
        """Leave nothing open that must not cross a fork; return whether `after_fork` is due."""
        store = self._store
        return isinstance(store, SqliteLedgerStore) and store.before_fork()

    def after_fork(self) -> None:
        """Go on in the parent process."""
        if isinstance(self._store, SqliteLedgerStore):
            self._store.after_fork()

    def forked(self) -> None:
        """Leave the connection to the parent process."""
        self._lock = threading.Lock()
        self.holder = uuid.uuid4().hex
        if self._store is not None:
            self._store.forked()

    def close(self) -> None:
        """Close the connection; the next step opens it again."""
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None
