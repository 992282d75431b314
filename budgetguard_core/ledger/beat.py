"""What a process asks of its store and tells it, twice a second while it has something there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from budgetguard_core.ledger.alive import AliveRuns
from budgetguard_core.ledger.attached import AttachedRuns, LedgerRun, call_listener
from budgetguard_core.ledger.ceiling_warnings import CeilingWarnings
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.kill_switch import kill_of
from budgetguard_core.ledger.outbox import Outbox

_LOG = logging.getLogger("budgetguard")
_RECALL_SECONDS = 5.0


class Beat:
    """Kill switches and recalls, unsent reports, leases, warnings, and who is alive.

    Args:
        connection: To the store.
        outbox: What is to be sent.
        attached: The runs of this process.
        warnings: Told after what was sent.
        alive: Where the runs are announced.
    """

    def __init__(
        self,
        connection: Connection,
        outbox: Outbox,
        attached: AttachedRuns,
        warnings: CeilingWarnings,
        alive: AliveRuns,
    ) -> None:
        self._connection = connection
        self._outbox = outbox
        self._attached = attached
        self._warnings = warnings
        self._alive = alive
        self.begin()

    def begin(self) -> None:
        """Begin anew in a child process."""
        self._marks: Mapping[str, str | None] = {}
        """The recall mark of each key as it was seen last."""
        self._orphans_sent = False

    def tick(self) -> bool:
        """Do what is due, of which nothing fails; tell whether there is more to come."""
        try:
            self.do()
        except LedgerUnreachable as error:
            _LOG.info("ledger: %s", error)
            self._save()
        except Exception as error:
            # A thread that died would be missed by everyone.
            _LOG.warning("ledger: the heartbeat failed: %s", type(error).__name__)
        return bool(self._attached.all() or self._attached.meters() or len(self._outbox))

    def do(self) -> None:
        """Do what is due.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        self._attached.remove_forgotten()
        runs = self._attached.all()
        self._poll(runs)
        self._outbox.deliver(self._connection.send)
        for lease in self._attached.leases():
            lease.tend()
        self._outbox.deliver(self._connection.send)
        self._warnings.tell()
        self._attached.leave_idle()
        self._alive.announce(runs)
        if not self._orphans_sent:  # last: what cannot be sent holds nothing up
            self._outbox.deliver_orphans(self._connection.send)
            self._orphans_sent = True
            self._warnings.tell()

    def finish(self) -> None:
        """Give everything back and send what waits; what cannot be sent is written down."""
        self._attached.leave_runs()
        for lease in self._attached.leases():
            try:
                lease.close()
            except LedgerUnreachable:
                lease.abandon()
        self._attached.leave_settled()
        try:
            self._outbox.deliver(self._connection.send)
            self._warnings.tell()
            self._alive.announce([])
        except LedgerUnreachable as error:
            _LOG.info("ledger: %s", error)
        self._save()

    def _save(self) -> None:
        try:
            self._outbox.save()
        except LedgerUnreachable as full:
            _LOG.warning("ledger: %s", full)

    def _poll(self, runs: Iterable[LedgerRun]) -> None:
        """Look at the kill switches, and at what other processes ask back."""
        keys = sorted({name for meter in self._attached.meters() for name in meter.account.names})
        flags = ["all", *(f"t:{key}" for key in keys), *sorted({f"r:{run.run}" for run in runs})]
        names = [f"f:{flag}" for flag in flags] + [f"w:{key}" for key in keys]
        found = self._connection.ask(lambda store: store.read(names))
        killed = {flag: text for flag, text in zip(flags, found, strict=False) if text is not None}
        recalled = self._recalled(dict(zip(keys, found[len(flags) :], strict=True)))
        for lease in self._attached.leases():
            lease.block(any(flag in killed for flag in lease.account.flags))
            if recalled.intersection(lease.account.names):
                lease.recall()
        for run in runs:
            for flag in (*run.account.flags, f"r:{run.run}"):
                if flag in killed:
                    call_listener(run.on_kill, kill_of(flag, killed[flag]).detail)
                    break

    def _recalled(self, marks: Mapping[str, str | None]) -> set[str]:
        """Return the keys whose recall mark is new."""
        known, self._marks = self._marks, marks
        since = self._connection.now() - _RECALL_SECONDS
        return {
            key
            for key, mark in marks.items()
            if mark is not None
            and mark != known.get(key)
            # Of a mark that was there before this process looked first, the time tells.
            and (key in known or float(mark.partition(" ")[0]) > since)
        }
