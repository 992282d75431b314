"""One ledger for all processes: ceilings per tenant, reservations, kill switches."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import platform
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, cast

from budgetguard_core.charges import Amounts
from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.account import Account
from budgetguard_core.ledger.amounts import (
    ZERO,
    Amount,
    check_ceiling,
    to_amount,
    to_ceiling,
    to_dollars,
)
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.exact import Exact
from budgetguard_core.ledger.heartbeat import Heartbeat
from budgetguard_core.ledger.lease import Lease, LeaseOptions, Part
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.refusal import Kill, Refusal, Warned, kill_of, plain
from budgetguard_core.ledger.sqlite_store import SqliteLedgerStore
from budgetguard_core.ledger.step import HoldRecord, Step, Store, WindowRecord, new_id
from budgetguard_core.ledger.url import default_path, parse_url
from budgetguard_core.ledger.windows import KINDS, Key, Tenant, as_keys, check_name, zone_of

_LOG = logging.getLogger("budgetguard")
_ANNOUNCE_SECONDS = 10.0
_SILENT_SECONDS = 30.0
_FORGOTTEN_SECONDS = 86_400.0
_IDLE_SECONDS = 5.0
_RECALL_SECONDS = 5.0
_RUNS_SHOWN = 1000
_CEILINGS_SECONDS = 1.0
_TENANTS_AT_HAND = 1000
_WARNINGS_KEPT = 1000


@dataclass(frozen=True, slots=True)
class WindowUsage:
    """What one key has used in one window."""

    key: str
    window: str
    """The label: `d:2026-11-22` or `m:2026-11`."""
    spent_usd: Decimal
    """Measured."""
    reserved_usd: Decimal
    """Set aside for calls under way, leased ahead, or left by a process that died."""
    ceiling_usd: Decimal | None
    spent_tokens: int
    reserved_tokens: int
    ceiling_tokens: int | None

    @property
    def remaining_usd(self) -> Decimal | None:
        """What may still be reserved; None without a ceiling."""
        if self.ceiling_usd is None:
            return None
        return max(Decimal(0), self.ceiling_usd - self.spent_usd - self.reserved_usd)

    @property
    def remaining_tokens(self) -> int | None:
        """What may still be reserved; None without a ceiling."""
        if self.ceiling_tokens is None:
            return None
        return max(0, self.ceiling_tokens - self.spent_tokens - self.reserved_tokens)


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one key has used today and this month."""

    daily: WindowUsage
    monthly: WindowUsage


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


class Reservation:
    """Money set aside for one call, until it is settled or released.

    A reservation that is never settled stays charged in full.
    """

    __slots__ = ("_exact", "_part", "amount", "id")

    def __init__(self, exact: Exact, part: Part, amount: Amount) -> None:
        self._exact = exact
        self._part = part
        self.amount = amount
        self.id = part.id

    def settle(self, usd: Decimal | float = 0, tokens: int = 0) -> None:
        """Charge what was measured instead of what was reserved; repeats change nothing.

        More than was reserved is charged too: the provider has billed it.

        Raises:
            ConfigurationError: A figure makes no sense.
            LedgerError: The store holds this reservation in other windows.
        """
        self._exact.settle_now(self._part, self.amount, to_amount(usd, tokens))

    def release(self) -> None:
        """Charge nothing: the call was not made."""
        self.settle()


class LedgerRun:
    """One run's place in the ledger: what its guard asks, and what it is told.

    `take` and `settle` work in memory, `obtain` makes a trip; see `Lease`.
    """

    __slots__ = (
        *("_ledger", "account", "is_open", "meter", "on_kill", "on_warning"),
        *("payer", "run", "settle", "started", "take"),
    )

    def __init__(
        self,
        ledger: Ledger,
        run: str,
        meter: Lease | Exact,
        started: float,
        on_kill: Callable[[str], object],
        on_warning: Callable[[Warned], object],
    ) -> None:
        self._ledger = ledger
        self.payer = (id(ledger), meter.account.names)
        """The same for all runs that are charged to the same keys."""
        self.is_open = True
        self.run = run
        self.meter = meter
        self.account = meter.account
        self.started = started
        self.on_kill = on_kill
        self.on_warning = on_warning
        # Bound once: these two are part of every step.
        self.take = meter.take
        self.settle = meter.settle

    def obtain(self, usd: int, tokens: int) -> Part | Refusal:
        """Set an amount aside, with a trip to the store; bounded, never under a lock."""
        return self.meter.obtain(usd, tokens, self.run)

    def caps_dollars(self) -> bool:
        """Tell whether a ceiling in dollars holds for the run; a trip at most once a second."""
        return any(ceiling.usd for ceiling in self._ledger.ceilings_of(self.account))

    def caps_tokens(self) -> bool:
        """Tell whether a ceiling in tokens holds for the run; a trip at most once a second."""
        return any(ceiling.tokens for ceiling in self._ledger.ceilings_of(self.account))

    def report(self, spent: Amounts) -> None:
        """Charge what nothing was set aside for: the run only looks on, and was not refused."""
        self._ledger.report(self.account, self.run, Amount(*spent))

    def open(self) -> None:
        """Say that the run goes on, after it was said to have ended."""
        self.is_open = True
        self._ledger.take_back(self)

    def close(self) -> None:
        """Say that the run has ended; what it set aside can still be settled."""
        self.is_open = False
        self._ledger.detach(self)

    def abandon(self) -> None:
        """Say that nobody keeps the run any more: from a finalizer, so no lock is taken."""
        self._ledger.forget(self)


class Ledger:
    """One ledger for all processes, in SQLite, Redis or PostgreSQL.

    Nothing is opened before it is needed. Safe under threads, asyncio tasks and forks.

    Args:
        url: `sqlite:///file`, `redis://...`, `rediss://...` or `postgresql://...`; None is a file
            in the home directory.
        daily_usd: The ceiling of a day for each tenant, in US dollars; None is none. What the
            ledger itself holds (`set_ceilings`) wins.
        monthly_usd: The same of a month.
        daily_tokens: The same in tokens, prompt and completion.
        monthly_tokens: The same of a month.
        time_zone: Where days and months begin, unless the tenant's `Key` says otherwise.
        lease: "auto" takes money ahead of need and spends it in memory; "exact" makes a round
            trip before each call.
        on_ledger_error: What becomes of a call when the store cannot be reached: "refuse" it, or
            "allow" it and have it charged as soon as the store answers.
        timeout: Seconds until a step gives up.
        ledger_id: The id that `budgetguard ledger show` tells; another ledger is refused.
        queue: The folder where unsent reports are kept; in the home directory if left out.
        clock: Where time comes from.
        options: How large leases are.

    Raises:
        ConfigurationError: An argument makes no sense, or the store's driver is missing.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        daily_usd: Decimal | float | None = None,
        monthly_usd: Decimal | float | None = None,
        daily_tokens: int | None = None,
        monthly_tokens: int | None = None,
        time_zone: str = "UTC",
        lease: Literal["auto", "exact"] = "auto",
        on_ledger_error: Literal["refuse", "allow"] = "refuse",
        timeout: float = 1.0,
        ledger_id: str | None = None,
        queue: str | os.PathLike[str] | None = None,
        clock: Clock | None = None,
        options: LeaseOptions | None = None,
    ) -> None:
        _check_choice("lease", lease, ("auto", "exact"))
        _check_choice("on_ledger_error", on_ledger_error, ("refuse", "allow"))
        if type(timeout) not in (int, float) or not 0 < timeout <= 60:
            raise ConfigurationError(
                f"timeout must be > 0 and <= 60 seconds, got {timeout!r}. Use 1.0."
            )
        zone_of(time_zone)
        address = parse_url(url, timeout=timeout, clock=clock)
        self.url = address.shown
        self._clock = clock or SystemClock()
        self._defaults = (
            check_ceiling(to_ceiling(daily_usd, daily_tokens), address.largest_ceiling),
            check_ceiling(to_ceiling(monthly_usd, monthly_tokens), address.largest_ceiling),
        )
        self._time_zone = time_zone
        self._exact = lease == "exact"
        self._allow = on_ledger_error == "allow"
        self._options = options or LeaseOptions()
        self._connection = Connection(address.open, self._clock, ledger_id or "", pause=timeout)
        folder = Path(queue) if queue is not None else default_path().parent / "ledger-queue"
        self._outbox = Outbox(folder / address.fingerprint)
        self._heartbeat = Heartbeat(self._tick)
        self._begin()
        _LEDGERS.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._holder = uuid.uuid4().hex
        self._meters: dict[tuple[Key, ...], Lease | Exact] = {}
        self._runs: dict[int, LedgerRun] = {}
        self._reserving: dict[str | Key | tuple[Key, ...], Exact] = {}
        self._marks: dict[str, str | None] = {}
        self._killed: dict[str, str] = {}
        self._announced_ns: int | None = None
        self._announced: frozenset[int] = frozenset()
        self._orphans_sent = False
        self._gone: deque[LedgerRun] = deque()
        self._untold: dict[tuple[str, str], Warned] = {}
        self._ceilings: dict[tuple[str, str], Amount] | None = None
        self._ceilings_ns = 0

    def __repr__(self) -> str:
        return f"Ledger({self.url!r})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a Ledger belongs to its process and cannot be pickled. Pass its URL.")

    @property
    def trips(self) -> int:
        """Steps that were sent to the store so far."""
        return self._connection.trips

    @property
    def id(self) -> str:
        """The ledger's own id, made at first use.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        return self._connection.ask(lambda store: store.identity())

    # Reservations

    def reserve(
        self,
        tenant: Tenant,
        run: str = "",
        *,
        usd: Decimal | float = 0,
        tokens: int = 0,
        reservation_id: str | None = None,
    ) -> Reservation:
        """Set money aside under every ceiling of the tenant, in one round trip.

        Args:
            tenant: A name, a `Key`, or several that are reserved together.
            run: The run that asks; a kill switch for it refuses.
            usd: The most that the call may cost, in US dollars.
            tokens: The most tokens that it may use. With neither, one unit of each is reserved.
            reservation_id: A name for this reservation: a retry with the same name is the same
                reservation, for a day.

        Returns:
            The reservation, to be settled or released.

        Raises:
            LedgerRefused: It does not fit, a kill switch is set, or the store cannot be reached
                and `on_ledger_error` is "refuse".
            ConfigurationError: An argument makes no sense.
        """
        amount = to_amount(usd, tokens)
        if amount == ZERO:  # one unit of each, or a used-up ceiling would admit it
            amount = Amount(1, 1)
        name = check_name(reservation_id, "reservation_id") if reservation_id else new_id()
        exact = self._exact_of(tenant)
        obtained = exact.reserve(amount, check_name(run, "run") if run else "", name)
        if isinstance(obtained, Refusal):
            raise obtained.error()
        return Reservation(exact, obtained, amount)

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
            on_warning: Called when a window of the tenant reaches 80 % of its ceiling, by what was
                set aside or by what a call cost; one process is told, once per window.

        Raises:
            ConfigurationError: The tenant or the run makes no sense.
        """
        check_name(run, "run")
        account = self._account(tenant)
        with self._lock:
            meter = self._meters.get(account.keys)
            if meter is None:
                meter = self._new_exact(account) if self._exact else self._new_lease(account)
                self._meters[account.keys] = meter
            started = self._connection.now()
            attached = LedgerRun(self, run, meter, started, on_kill, on_warning)
            self._runs[id(attached)] = attached
        self._heartbeat.wake()
        return attached

    def detach(self, attached: LedgerRun) -> None:
        """Take a run off the ledger: it has ended."""
        with self._lock:
            self._runs.pop(id(attached), None)

    def forget(self, attached: LedgerRun) -> None:
        """Take a run off the ledger at the next beat."""
        self._gone.append(attached)

    def take_back(self, attached: LedgerRun) -> None:
        """Put a run on the ledger again: it goes on."""
        with self._lock:
            if id(attached) in self._runs:
                return
            self._runs[id(attached)] = attached
            meter = attached.meter
            self._meters.setdefault(attached.account.keys, meter)
        self._heartbeat.wake()

    def report(self, account: Account, run: str, spent: Amount) -> None:
        """Charge what nothing was set aside for, as soon as the store answers."""
        windows = account.windows(self._connection.now())
        self._outbox.add(Step(new_id(), 1, windows, spent=spent, close=True, owner=run))
        self._heartbeat.wake()

    def _exact_of(self, tenant: Tenant) -> Exact:
        known = tenant if isinstance(tenant, str | Key) else as_keys(tenant, self._time_zone)
        exact = self._reserving.get(known)
        if exact is None:
            account = self._account(known)  # checked before it is kept
            if len(self._reserving) >= _TENANTS_AT_HAND:
                self._reserving.clear()
            exact = self._reserving[known] = self._new_exact(account)
        return exact

    def _account(self, tenant: Tenant) -> Account:
        return Account(as_keys(tenant, self._time_zone), *self._defaults)

    def _new_exact(self, account: Account) -> Exact:
        return Exact(
            self._connection,
            account,
            self._outbox,
            allow=self._allow,
            wake=self._heartbeat.wake,
            tell=self._tell,
        )

    def _new_lease(self, account: Account) -> Lease:
        return Lease(
            self._connection,
            account,
            self._holder,
            self._clock,
            self._outbox,
            self._options,
            allow=self._allow,
            wake=self._heartbeat.wake,
            tell=self._tell,
        )

    def _tell(self) -> None:
        """Tell the runs of this process which windows of theirs reached 80 %.

        Also of what was reported when no run was left to be told: the next one is.
        """
        due = self._connection.warned
        while due:
            with contextlib.suppress(IndexError):  # another thread was quicker
                one = due.popleft()
                with self._lock:
                    self._untold[one.key, one.window] = one
                    for name in list(self._untold)[:-_WARNINGS_KEPT]:
                        del self._untold[name]
                _LOG.warning("%s reached 80 %% of its ceiling (%s)", ascii(one.key), one.window)
        if not self._untold:
            return
        now = self._connection.now()
        told: list[tuple[Warned, list[LedgerRun]]] = []
        with self._lock:
            charged: dict[tuple[str, str], list[LedgerRun]] = {}
            for run in self._runs.values():
                for window in run.account.windows(now):
                    charged.setdefault(window[:2], []).append(run)
            for name in charged.keys() & self._untold.keys():
                told.append((self._untold.pop(name), charged[name]))
        for one, runs in told:
            shown = self._with_figures(one)
            for run in runs:
                _call(run.on_warning, shown)

    def _with_figures(self, warned: Warned) -> Warned:
        try:
            record = self._connection.ask(lambda store: store.window(warned.key, warned.window))
        except LedgerUnreachable:
            return warned
        charged, ceiling = record.charged, record.ceiling
        if ceiling.usd and charged.usd * 5 >= ceiling.usd * 4:
            return warned._replace(limit=to_dollars(ceiling.usd), used=to_dollars(charged.usd))
        return warned._replace(limit=ceiling.tokens, used=charged.tokens)

    def _runs_of(self, account: Account) -> list[LedgerRun]:
        with self._lock:
            return [run for run in self._runs.values() if run.account.keys == account.keys]

    # Ceilings and usage

    def set_ceilings(
        self,
        tenant: str | None,
        *,
        daily_usd: Decimal | float | None = None,
        monthly_usd: Decimal | float | None = None,
        daily_tokens: int | None = None,
        monthly_tokens: int | None = None,
    ) -> None:
        """Store a tenant's ceilings, all four of them; None is no ceiling. Seen by the next step.

        Args:
            tenant: The key; None for the default of all keys that have none of their own.
            daily_usd: US dollars of a day.
            monthly_usd: US dollars of a month.
            daily_tokens: Tokens of a day.
            monthly_tokens: Tokens of a month.

        Raises:
            ConfigurationError: A figure makes no sense, or is larger than the store can count.
            LedgerUnreachable: The store does not answer.
        """
        key = "" if tenant is None else check_name(tenant, "tenant")
        ceilings = (to_ceiling(daily_usd, daily_tokens), to_ceiling(monthly_usd, monthly_tokens))

        def put(store: Store) -> None:
            for ceiling in ceilings:
                check_ceiling(ceiling, store.largest_ceiling)
            for kind, ceiling in zip(KINDS, ceilings, strict=True):
                store.set_ceiling(key, kind, ceiling)

        self._connection.ask(put)
        self._ceilings = None

    def clear_ceilings(self, tenant: str | None) -> None:
        """Let a tenant have the default again; with None, take the stored default away."""
        key = "" if tenant is None else check_name(tenant, "tenant")

        def clear(store: Store) -> None:
            for kind in KINDS:
                store.set_ceiling(key, kind, None)

        self._connection.ask(clear)
        self._ceilings = None

    def ceilings(self) -> dict[str, dict[str, Amount]]:
        """Return the stored ceilings: by key ("" is the default) and by kind ("d", "m")."""
        found: dict[str, dict[str, Amount]] = {}
        for (key, kind), ceiling in self._connection.ask(lambda store: store.ceilings()).items():
            found.setdefault(key, {})[kind] = ceiling
        return found

    def ceilings_of(self, account: Account) -> list[Amount]:
        """Return the ceilings that hold for an account's keys, now.

        As the store said within the last second. A store that does not answer leaves it at what
        it said before; if it never did, an unknown ceiling is none that a call may pass.
        """
        now = self._clock.monotonic_ns()
        stored = self._ceilings
        if stored is None or now - self._ceilings_ns > _CEILINGS_SECONDS * 1e9:
            try:
                stored = self._connection.ask(lambda store: store.ceilings())
            except LedgerUnreachable:
                if stored is None:
                    return [Amount(1, 1)]
            self._ceilings, self._ceilings_ns = stored, now
        return [
            stored.get((one.key, one.label[0]), stored.get(("", one.label[0]), one.ceiling))
            for one in account.windows(self._connection.now())
        ]

    def usage(self, tenant: str | Key) -> TenantUsage:
        """Return what a tenant has used today and this month.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        account = self._account(tenant)

        def look(store: Store) -> TenantUsage:
            stored = store.ceilings()
            found: list[WindowUsage] = []
            for window in account.windows(store.now()):
                record = store.window(window.key, window.label)
                kind = window.label[0]
                ceiling = stored.get((window.key, kind), stored.get(("", kind), window.ceiling))
                found.append(usage_of(record._replace(ceiling=ceiling)))
            return TenantUsage(*found)

        return self._connection.ask(look)

    def windows(self) -> list[WindowUsage]:
        """Return every window that the ledger keeps, with the ceiling that was last applied."""
        return [usage_of(record) for record in self._connection.ask(lambda store: store.windows())]

    def holds(self) -> list[HoldRecord]:
        """Return the reservations and leases that the store keeps."""
        return self._connection.ask(lambda store: store.holds())

    def check(self) -> list[str]:
        """Compare each window with the sum of its holds; what differs, in words.

        Raises:
            ConfigurationError: Only a SQLite file needs this, and can do it.
        """
        store = self._connection.store()
        if not isinstance(store, SqliteLedgerStore):
            raise ConfigurationError(
                "check needs a ledger in SQLite, got a server, which checks its own files. "
                "Use sqlite:///file."
            )
        return store.check()

    def now(self) -> float:
        """Return the store's clock, in seconds since the epoch."""
        return self._connection.ask(lambda store: store.now())

    @property
    def connection(self) -> Connection:
        """What talks to the store; for reconciliation and reports."""
        return self._connection

    def adopt(self) -> str:
        """Accept the ledger as it is, in every process, after it was wiped or restored."""
        store = Connection(self._connection.opener, self._clock)
        try:
            return store.ask(lambda one: one.adopt())
        finally:
            store.close()

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

        Seen within half a second and a trip: by the next call, and by calls that hang where work
        is async. It survives restarts.

        Args:
            tenant: The key to stop.
            run: The run to stop.
            everything: Stop all.
            who: Who did it, for the record.
            why: Why, for the record.

        Raises:
            ConfigurationError: Not exactly one of the three is given.
            LedgerUnreachable: The store does not answer; nothing was stopped.
        """
        flag = _flag(tenant, run, everything)
        kill = Kill(flag, plain(who), self.now(), plain(why))
        self._connection.ask(lambda store: store.write(f"f:{flag}", kill.to_text()))
        self._heartbeat_soon()
        return kill

    def revive(
        self, *, tenant: str | None = None, run: str | None = None, everything: bool = False
    ) -> None:
        """Take a kill switch back. Runs that it stopped stay stopped; new ones may start."""
        flag = _flag(tenant, run, everything)
        self._connection.ask(lambda store: store.write(f"f:{flag}", None))
        self._heartbeat_soon()

    def kills(self) -> list[Kill]:
        """Return the kill switches that are set."""
        notes = self._connection.ask(lambda store: store.scan("f:"))
        return [kill_of(name[2:], text) for name, text in sorted(notes.items())]

    def runs(self) -> list[AliveRun]:
        """Return the runs that processes said they work on, also of processes that went silent."""
        notes = self._connection.ask(lambda store: store.scan("p:"))
        now = self.now()
        found: list[AliveRun] = []
        for text in notes.values():
            note = _note(text)
            if note is None:
                continue
            found += [
                AliveRun(
                    run,
                    tuple(tenant),
                    str(note["host"]),
                    int(note["pid"]),
                    float(started),
                    float(note["seen"]),
                    now - float(note["seen"]) > _SILENT_SECONDS,
                )
                for run, tenant, started in note["runs"]
            ]
        return sorted(found, key=lambda one: (one.started, one.run))

    # The heartbeat

    def _heartbeat_soon(self) -> None:
        if self._heartbeat.is_alive:
            self._heartbeat.wake()

    def _tick(self) -> bool:
        """Do what is due; tell whether there is more to come."""
        try:
            self._beat()
        except LedgerUnreachable as error:
            _LOG.info("ledger: %s", error)
            try:
                self._outbox.save()
            except LedgerUnreachable as full:
                _LOG.warning("ledger: %s", full)
        except Exception as error:
            # A thread that died would be missed by everyone.
            _LOG.warning("ledger: the heartbeat failed: %s", type(error).__name__)
        with self._lock:
            return bool(self._runs or self._meters or len(self._outbox))

    def beat(self) -> None:
        """Do at once what the heartbeat does every half second.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        self._beat()

    def _beat(self) -> None:
        while self._gone:
            self.detach(self._gone.popleft())
        with self._lock:
            runs = list(self._runs.values())
            meters = list(self._meters.values())
        self._poll(runs, meters)
        if not self._orphans_sent:
            self._outbox.deliver_orphans(self._connection.send)
            self._orphans_sent = True
        self._outbox.deliver(self._connection.send)
        for meter in meters:
            if isinstance(meter, Lease):
                meter.tend()
        self._outbox.deliver(self._connection.send)
        self._tell()
        self._leave_idle(meters)
        self._announce(runs)

    def _poll(self, runs: Iterable[LedgerRun], meters: Iterable[Lease | Exact]) -> None:
        keys = sorted({name for meter in meters for name in meter.account.names})
        flags = ["all", *(f"t:{key}" for key in keys), *sorted({f"r:{run.run}" for run in runs})]
        names = [f"f:{flag}" for flag in flags] + [f"w:{key}" for key in keys]
        found = self._connection.ask(lambda store: store.read(names))
        self._killed = {
            flag: text for flag, text in zip(flags, found, strict=False) if text is not None
        }
        marks = dict(zip(keys, found[len(flags) :], strict=True))
        known, self._marks = self._marks, marks
        since = self._connection.now() - _RECALL_SECONDS
        recalled = {
            key
            for key, mark in marks.items()
            if mark is not None
            and mark != known.get(key)
            # Of a mark that was there before this process looked first, the time tells.
            and (key in known or float(mark.partition(" ")[0]) > since)
        }
        for meter in meters:
            if isinstance(meter, Lease):
                meter.block(any(flag in self._killed for flag in meter.account.flags))
                if recalled.intersection(meter.account.names):
                    meter.recall()
        for run in runs:
            for flag in (*run.account.flags, f"r:{run.run}"):
                if flag in self._killed:
                    _call(run.on_kill, kill_of(flag, self._killed[flag]).detail)
                    break

    def _leave_idle(self, meters: Iterable[Lease | Exact]) -> None:
        """Give back what no run of this process has asked for in a while."""
        for meter in meters:
            idle = not self._runs_of(meter.account)
            if isinstance(meter, Lease):
                idle = idle and meter.idle_seconds() > _IDLE_SECONDS
                if idle:
                    meter.close()
                    idle = meter.is_idle
            if idle:
                with self._lock:
                    busy = any(run.meter is meter for run in self._runs.values())
                    if not busy:
                        self._meters.pop(meter.account.keys, None)

    def _announce(self, runs: list[LedgerRun]) -> None:
        now = self._clock.monotonic_ns()
        names = frozenset(map(id, runs))
        last = self._announced_ns
        due = last is None or now - last > _ANNOUNCE_SECONDS * 1e9
        if names == self._announced and not (due and runs):
            return
        text = None
        if runs:
            note = {
                "host": platform.node(),
                "pid": os.getpid(),
                "seen": self.now(),
                "runs": [[run.run, run.account.names, run.started] for run in runs[:_RUNS_SHOWN]],
            }
            text = json.dumps(note)
            if last is None:
                self._forget_the_dead()
        self._connection.ask(lambda store: store.write(f"p:{self._holder}", text))
        self._announced, self._announced_ns = names, now

    def _forget_the_dead(self) -> None:
        """Take away what processes said that have been silent for a day, and so never will."""
        now = self.now()

        def forget(store: Store) -> None:
            for name, text in store.scan("p:").items():
                note = _note(text)
                if note is None or now - float(note["seen"]) > _FORGOTTEN_SECONDS:
                    store.write(name, None)

        self._connection.ask(forget)

    # The end

    def close(self) -> None:
        """Give back what is not needed, send what waits, and end the thread.

        What cannot be sent stays on the disk for the next process. The ledger can be used again.
        """
        self._heartbeat.stop()
        with self._lock:
            meters, self._meters = list(self._meters.values()), {}
            self._runs.clear()
        for lease in meters:
            if isinstance(lease, Lease):
                try:
                    lease.close()
                except LedgerUnreachable:
                    lease.abandon()
        try:
            self._outbox.deliver(self._connection.send)
            self._tell()
            self._announce([])
        except LedgerUnreachable as error:
            _LOG.info("ledger: %s", error)
        try:
            self._outbox.save()
        except LedgerUnreachable as full:
            _LOG.warning("ledger: %s", full)
        self._outbox.close()
        self._connection.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forked(self) -> None:
        """Begin anew in a child process: connection, leases and thread stay with the parent."""
        for meter in self._meters.values():
            if isinstance(meter, Lease):
                meter.forked()
        self._connection.forked()
        self._outbox.forked()
        self._heartbeat.restart()
        meters = self._meters
        self._begin()
        # A guard that crossed the fork goes on asking the meter that it knows.
        self._meters.update(meters)


def as_ledger(given: Ledger | str) -> Ledger:
    """Return the process's ledger of a URL, or the one that is given.

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(given, Ledger):
        return given
    with _BY_URL_LOCK:
        found = _BY_URL.get(given)
        if found is None:
            found = _BY_URL[given] = Ledger(given)
        return found


def usage_of(record: WindowRecord) -> WindowUsage:
    """Return a store's record of a window in the units that people use."""
    return WindowUsage(
        record.key,
        record.label,
        to_dollars(record.spent.usd),
        to_dollars(record.charged.usd - record.spent.usd),
        to_dollars(record.ceiling.usd) if record.ceiling.usd else None,
        record.spent.tokens,
        record.charged.tokens - record.spent.tokens,
        record.ceiling.tokens or None,
    )


def _note(text: str) -> dict[str, Any] | None:
    """Read what a process said of its runs."""
    try:
        note = cast("dict[str, Any]", json.loads(text))
        return note if {"host", "pid", "seen", "runs"} <= note.keys() else None
    except (ValueError, AttributeError):
        return None


def _flag(tenant: str | None, run: str | None, everything: bool) -> str:
    given = (tenant is not None) + (run is not None) + bool(everything)
    if given != 1:
        raise ConfigurationError(
            f"exactly one of tenant, run and everything must be given, got {given}. "
            'Use kill(tenant="acme").'
        )
    if tenant is not None:
        return f"t:{check_name(tenant, 'tenant')}"
    return "all" if run is None else f"r:{check_name(run, 'run')}"


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(
            f"{name} must be one of {', '.join(choices)}, got {str(value)[:40]!r}. "
            f"Use {choices[0]!r}."
        )


def _call(listener: Callable[[Any], object], fact: object) -> None:
    try:
        listener(fact)
    except Exception as error:
        _LOG.warning("ledger: a listener failed: %s", type(error).__name__)


_LEDGERS: weakref.WeakSet[Ledger] = weakref.WeakSet()
_BY_URL: dict[str, Ledger] = {}
_BY_URL_LOCK = threading.Lock()


def _close_all() -> None:
    for ledger in list(_LEDGERS):
        ledger.close()


_FORKING = threading.local()
"""What this thread holds closed while it forks."""


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
if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked)
