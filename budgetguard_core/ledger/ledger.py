"""One ledger for all processes: ceilings per tenant, reservations, kill switches."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from multiprocessing import parent_process, util
from pathlib import Path
from typing import Any, Literal, Unpack, cast

from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import (
    Amount,
    CeilingOptions,
    to_amount,
    to_ceilings,
    to_nano,
)
from budgetguard_core.ledger.ceilings import Ceilings, TenantUsage, WindowUsage, usage_of
from budgetguard_core.ledger.connection import Connection, default_path, parse_url
from budgetguard_core.ledger.errors import LedgerRefused, Warned
from budgetguard_core.ledger.kill_switch import Kill, flag_of, kill_of, plain
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.reconcile import differences
from budgetguard_core.ledger.runs import Heartbeat, LedgerRun, Reservation, Reservations
from budgetguard_core.ledger.sqlite import SqliteLedgerStore
from budgetguard_core.ledger.step import HoldRecord, Step, WindowRecord
from budgetguard_core.ledger.windows import (
    CALENDAR,
    Account,
    Key,
    Tenant,
    Window,
    as_keys,
    check_name,
    quoted,
    zone_of,
)

_TENANTS_AT_HAND = 1000
_ALLOWED_CALLS = 100
_BY_URL: dict[str, Ledger] = {}
_LEDGERS: weakref.WeakSet[Ledger] = weakref.WeakSet()
"""Those that are open in this process: closed at its end, and kept out of its forks."""
_FORKING = threading.local()
"""The ledgers that this thread holds closed while it forks."""


def as_ledger(given: Ledger | str) -> Ledger:
    """Return the process's ledger of a URL, one for each, or the one that is given."""
    if isinstance(given, Ledger):
        return given
    if isinstance(given, str) and given in _BY_URL:
        return _BY_URL[given]
    return _BY_URL.setdefault(given, Ledger(given))


class Ledger:
    """One ledger for all processes, in SQLite, Redis or PostgreSQL.

    Nothing is opened before it is needed. Safe under threads, asyncio tasks and forks.
    Whatever asks the store raises `LedgerUnreachable` where it does not answer in time, and what
    makes no sense a `ConfigurationError`.

    Args:
        url: `sqlite:///file`, `redis://...`, `rediss://...` or `postgresql://...`; None is a file
            in the home directory. With `?windows=run` it has one window that never ends.
        time_zone: Where days and months begin, unless the tenant's `Key` says otherwise.
        on_ledger_error: "refuse" a call when the store is absent, or "allow" it and charge it when
            the store answers. A store that was wiped, rolled back or only reads refuses it.
        allow_usd: With "allow", the most US dollars that a process may spend while the store is
            absent; it may make 100 calls.
        timeout: Seconds until a step gives up.
        ledger_id: The id that `budgetguard ledger show` tells; another ledger is refused.
        queue: The folder where unsent reports are kept; in the home directory if left out.
        clock: Where time comes from.
        ceilings: For tenants without ceilings of their own in the ledger: `daily_usd`,
            `daily_tokens`, `daily_model_calls`, `daily_tool_calls`, and the same `monthly_` and
            (with `?windows=run`) `run_`.

    Attributes:
        url: The store's, without a password.
        connection: The connection to the store; for reconciliation and reports.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        time_zone: str = "UTC",
        on_ledger_error: Literal["refuse", "allow"] = "refuse",
        allow_usd: Decimal | float = 1,
        timeout: float = 1.0,
        ledger_id: str | None = None,
        queue: str | os.PathLike[str] | None = None,
        clock: Clock | None = None,
        **ceilings: Unpack[CeilingOptions],
    ) -> None:
        if on_ledger_error not in ("refuse", "allow"):
            raise ConfigurationError(
                f"on_ledger_error must be one of refuse, allow, got {str(on_ledger_error)[:40]!r}. "
                "Use 'refuse'."
            )
        if type(timeout) not in (int, float) or not 0 < timeout <= 60:
            raise ConfigurationError(
                f"timeout must be > 0 and <= 60 seconds, got {timeout!r}. Use 1.0."
            )
        zone_of(time_zone)
        address = parse_url(url, timeout=timeout, clock=clock)
        self.url = address.shown
        self._clock = clock or SystemClock()
        self._kinds, self._largest = address.windows, address.largest_ceiling
        self._defaults = to_ceilings(ceilings, self._kinds, self._largest)
        self._time_zone = time_zone
        self._timeout = timeout
        self.connection = Connection(
            address.open, self._clock, ledger_id or "", timeout, is_server=address.is_server
        )
        folder = Path(queue) if queue is not None else default_path().parent / "ledger-queue"
        most = Amount(to_nano(allow_usd), 0, _ALLOWED_CALLS, _ALLOWED_CALLS)
        self._outbox = Outbox(folder / address.fingerprint, most)
        self._ceilings = Ceilings(self.connection, self._clock)
        self._heartbeat = Heartbeat(self.connection, self._outbox, self._ceilings)
        self._reservations = Reservations(
            self.connection, self._outbox, self._heartbeat, allows=on_ledger_error == "allow"
        )
        self._known_account = lru_cache(_TENANTS_AT_HAND)(self._new_account)
        _LEDGERS.add(self)

    def __repr__(self) -> str:
        return f"Ledger({self.url!r})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a Ledger belongs to its process and cannot be pickled. Pass its URL.")

    @property
    def id(self) -> str:
        """The ledger's own id, made at first use."""
        return self.connection.ask(lambda store: store.identity()).id

    # Reservations

    def reserve(
        self,
        tenant: Tenant,
        run: str = "",
        *,
        usd: Decimal | float = 0,
        tokens: int = 0,
        model_calls: int = 1,
        tool_calls: int = 0,
        reservation_id: str | None = None,
    ) -> Reservation:
        """Set an amount aside under every ceiling of the tenant, in one round trip.

        Args:
            tenant: A name, a `Key`, or several that are reserved together.
            run: The run that asks; a kill switch for it refuses.
            usd: The most that the call may cost. With neither dollars nor tokens, one unit of each
                is reserved.
            tokens: The most tokens that it may use.
            model_calls: How many model calls are made.
            tool_calls: How many tool calls are made.
            reservation_id: A name: a retry with the same name is the same reservation, on that day.

        Raises:
            LedgerRefused: It does not fit, a kill switch is set, or the store cannot be reached
                and `on_ledger_error` is "refuse".
            ConfigurationError: An argument makes no sense.
        """
        amount = to_amount(usd, tokens, model_calls, tool_calls)
        if model_calls and not usd and not tokens:  # or a used-up ceiling would admit it
            amount = amount._replace(usd=1, tokens=1)
        name = None if reservation_id is None else check_name(reservation_id, "reservation_id")
        owner = check_name(run, "run") if run else ""
        obtained = self._reservations.reserve(self._account(tenant), amount, owner, name)
        if isinstance(obtained, LedgerRefused):
            raise obtained
        return obtained

    def attach(
        self,
        run: str,
        tenant: Tenant,
        *,
        on_kill: Callable[[str], object],
        on_warning: Callable[[Warned], object],
    ) -> LedgerRun:
        """Give a run its place in the ledger, in memory; nothing is asked of the store yet.

        Args:
            run: The run's id.
            tenant: As in `reserve`.
            on_kill: Called with a sentence, from another thread, when a kill switch is set.
            on_warning: Called when a reservation brings a window of the tenant to 80 % of its
                ceiling; one process is told, once per window.
        """
        account, name = self._account(tenant), check_name(run, "run")
        made = LedgerRun(self._reservations, account, name, on_kill, on_warning)
        made.open()
        return made

    def require_ceiling(self, tenant: Tenant) -> None:
        """Refuse a run that no ceiling of its tenant would bound, with a `ConfigurationError`."""
        account = self._account(tenant)
        if not self._ceilings.bound(account):
            name = account.names[0]
            raise ConfigurationError(
                f"a ceiling must be set for {quoted(name)} in {self.url}, got none, so nothing "
                f"would bound the run. Set one with `budgetguard ledger set --tenant {name} "
                "--daily-usd 20`, or a default for all tenants with Ledger(url, daily_usd=20)."
            )

    def _account(self, tenant: Tenant) -> Account:
        known = tenant if isinstance(tenant, str | Key) else as_keys(tenant, self._time_zone)
        return self._known_account(known)

    def _new_account(self, tenant: Tenant) -> Account:
        return Account(as_keys(tenant, self._time_zone), self._defaults)

    # Ceilings and reports

    def set_ceilings(self, tenant: str | None, **ceilings: Unpack[CeilingOptions]) -> None:
        """Store the ceilings of a tenant; they hold for every process from the next step on.

        Args:
            tenant: The key; None for the default of all keys that have none of their own.
            ceilings: As of `Ledger`; what is left out has none.
        """
        self._ceilings.store(tenant, to_ceilings(ceilings, self._kinds, self._largest))

    def clear_ceilings(self, tenant: str | None) -> None:
        """Return a tenant to the default; with None, remove the stored default."""
        self._ceilings.store(tenant, dict.fromkeys(self._kinds))

    def ceilings(self) -> dict[str, dict[str, Amount]]:
        """Return the stored ceilings: by key ("" is the default) and by kind ("d", "m", "r")."""
        found: dict[str, dict[str, Amount]] = {}
        for (key, kind), ceiling in self._ceilings.all().items():
            found.setdefault(key, {})[kind] = ceiling
        return found

    def usage(self, tenant: str | Key) -> TenantUsage:
        """Return what a tenant has used today and this month.

        Raises:
            ConfigurationError: The ledger has no days and months.
        """
        if self._kinds != CALENDAR:
            raise ConfigurationError(
                "usage must be of a day and a month, got a ledger of a run. Use run_usage."
            )
        return TenantUsage(*self._usage(tenant))

    def run_usage(self, tenant: str | Key) -> WindowUsage:
        """Return what was used in a ledger for one run."""
        return self._usage(tenant)[0]

    def _usage(self, tenant: str | Key) -> list[WindowUsage]:
        stored, windows = self._ceilings.all(), self._account(tenant).windows(self.now())
        records = self.connection.ask(lambda store: store.windows(windows[0].key))
        found = {record.label: record for record in records}
        return [
            usage_of(found.get(one.label) or WindowRecord(*one[:2]), stored, one.ceiling)
            for one in windows
        ]

    def windows(self) -> list[WindowUsage]:
        """Return every window that the ledger keeps, with the ceiling that holds now."""
        stored = self._ceilings.all()
        records = self.connection.ask(lambda store: store.windows())
        return [usage_of(record, stored) for record in records]

    def holds(self) -> list[HoldRecord]:
        """Return the reservations that the store keeps: open ones, and those of a day."""
        return self.connection.ask(lambda store: store.holds())

    def expired_holds(self) -> list[HoldRecord]:
        """Return the reservations that are open for longer than a call takes."""
        now = self.now()
        return [hold for hold in self.holds() if not hold.closed and hold.expires <= now]

    def settle_hold(self, hold: HoldRecord, spent: Amount | None = None) -> Amount:
        """Settle a reservation in its holder's place, at full value if no amount is given.

        Returns the amount that is charged now: nothing that was reported is taken back, and what a
        holder that wakes up reports still counts.
        """
        windows = tuple(Window(key, label, 0.0, 0.0) for key, label in hold.windows)
        amount = hold.charge if spent is None else spent
        step = Step("settle", hold.id, windows, amount, owner=hold.owner)
        return self.connection.send(step).amount

    def check(self) -> list[str]:
        """Return in words where a window differs from the sum of its holds; in SQLite only."""
        if self.connection.is_server:
            raise ConfigurationError(
                "check needs a ledger in SQLite, got a server, which checks its own files. "
                "Use sqlite:///file."
            )
        store = cast("SqliteLedgerStore", self.connection.store())
        windows, holds = self.connection.ask(lambda _: store.records())
        return differences(windows, holds, self.now())

    def now(self) -> float:
        """Return the store's clock, in seconds since the epoch."""
        return self.connection.ask(lambda store: store.now())

    def adopt(self) -> str:
        """Accept the ledger as it is, in every process, and return its new id."""
        return self.connection.adopt()

    # Kill switch

    def kill(
        self,
        *,
        tenant: str | None = None,
        run: str | None = None,
        everything: bool = False,
        who: str = "",
        why: str = "",
    ) -> Kill:
        """Stop a run, a tenant or everything, in every process, until it is revived.

        `who` and `why` are for the record. Seen within half a second and a trip.

        Raises:
            ConfigurationError: Not exactly one of the three is given.
        """
        flag = flag_of(tenant, run, everything)
        kill = Kill(flag, plain(who), self.now(), plain(why))
        self.connection.ask(lambda store: store.write(f"f:{flag}", kill.to_text()))
        return kill

    def revive(
        self, *, tenant: str | None = None, run: str | None = None, everything: bool = False
    ) -> None:
        """Take a kill switch back. Runs that it stopped stay stopped; new ones may start."""
        flag = flag_of(tenant, run, everything)
        self.connection.ask(lambda store: store.write(f"f:{flag}", None))

    def kills(self) -> list[Kill]:
        """Return the kill switches that are set."""
        notes = self.connection.ask(lambda store: store.notes("f:"))
        return [kill_of(name[2:], text) for name, text in sorted(notes.items())]

    def send_heartbeat(self) -> None:
        """Do at once what the heartbeat does every half second."""
        while self._heartbeat.send_heartbeat():
            pass

    # The end

    def close(self) -> None:
        """Send what waits within a few time-outs, or leave it on the disk for the next process.

        The ledger can be used again.
        """
        self._heartbeat.finish(2 * self._timeout)
        self.connection.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forked(self) -> None:
        """Begin anew in a child process: connection and thread stay with the parent."""
        self.connection.forked()
        self._outbox.forked()
        self._heartbeat.restart()


def _end_with_worker(_: object = None) -> None:
    """Close at the end of a worker of `multiprocessing`, most of which leave without `atexit`."""
    if parent_process() is not None:
        util.Finalize(None, _close_all, exitpriority=0)


def _close_all() -> None:
    for ledger in list(_LEDGERS):
        ledger.close()


def _before_fork() -> None:
    connections = [ledger.connection for ledger in list(_LEDGERS)]
    _FORKING.held = [one for one in connections if one.before_fork()]


def _after_fork() -> None:
    for connection in _FORKING.held:
        connection.after_fork()
    _FORKING.held = []


def _forked() -> None:
    _FORKING.held = []
    for ledger in list(_LEDGERS):
        ledger.forked()


atexit.register(_close_all)
_end_with_worker()
# Before a forked worker begins, it forgets what its parent was to do at its end.
util.register_after_fork(_LEDGERS, _end_with_worker)
if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked)
