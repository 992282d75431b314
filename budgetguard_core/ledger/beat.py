"""What a process asks of its store and tells it, twice a second while it has something there."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from budgetguard_core.ledger.alive import AliveRuns
from budgetguard_core.ledger.attached import AttachedRuns, LedgerRun, call_listener
from budgetguard_core.ledger.ceiling_warnings import CeilingWarnings
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.kill_switch import kill_of
from budgetguard_core.ledger.outbox import Outbox

_LOG = logging.getLogger("budgetguard")


class Beat:
    """Kill switches, unsent reports, warnings, and who is alive.

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
        return bool(self._attached.all() or len(self._outbox))

    def do(self) -> None:
        """Do what is due.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        self._attached.remove_forgotten()
        runs = self._attached.all()
        self._poll(runs)
        self._outbox.deliver(self._connection.send)
        self._warnings.tell()
        self._alive.announce(runs)
        if not self._orphans_sent:  # last: what cannot be sent holds nothing up
            self._outbox.deliver_orphans(self._connection.send)
            self._orphans_sent = True
            self._warnings.tell()

    def finish(self) -> None:
        """Send what waits; what cannot be sent is written down."""
        self._attached.leave_runs()
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
        """Look at the kill switches of the runs."""
        flags = sorted({flag for run in runs for flag in (*run.account.flags, f"r:{run.run}")})
        if not flags:
            return
        found = self._connection.ask(lambda store: store.read([f"f:{flag}" for flag in flags]))
        killed = {flag: text for flag, text in zip(flags, found, strict=True) if text is not None}
        if not killed:
            return
        for run in runs:
            for flag in (*run.account.flags, f"r:{run.run}"):
                if flag in killed:
                    call_listener(run.on_kill, kill_of(flag, killed[flag]).detail)
                    break
