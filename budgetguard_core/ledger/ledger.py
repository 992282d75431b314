"""One ledger for all processes: ceilings per tenant, reservations, kill switches."""

from __future__ import annotations

import os
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.account import Account
from budgetguard_core.ledger.alive import AliveRun, AliveRuns
from budgetguard_core.ledger.amounts import ZERO, Amount, check_ceiling, to_amount, to_ceiling
from budgetguard_core.ledger.attached import AttachedRuns, LedgerRun
from budgetguard_core.ledger.beat import Beat
from budgetguard_core.ledger.ceiling_warnings import CeilingWarnings
from budgetguard_core.ledger.ceilings import Ceilings
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.exact import Exact, Reservation
from budgetguard_core.ledger.heartbeat import Heartbeat
from budgetguard_core.ledger.kill_switch import Kill, flag_of, kill_of, plain
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.process import end_with_process
from budgetguard_core.ledger.refusal import Refusal, Warned
from budgetguard_core.ledger.sqlite_store import SqliteLedgerStore
from budgetguard_core.ledger.step import HoldRecord, new_id
from budgetguard_core.ledger.url import default_path, parse_url
from budgetguard_core.ledger.usage import TenantUsage, WindowUsage, usage_now, usage_of
from budgetguard_core.ledger.windows import Key, Tenant, as_keys, check_name, zone_of

_TENANTS_AT_HAND = 1000


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
        on_ledger_error: What becomes of a call when the store cannot be reached: "refuse" it, or
            "allow" it and have it charged as soon as the store answers. A store that was wiped
            refuses it.
        timeout: Seconds until a step gives up.
        ledger_id: The id that `budgetguard ledger show` tells; another ledger is refused.
        queue: The folder where unsent reports are kept; in the home directory if left out.
        clock: Where time comes from.

    Attributes:
        url: The store's, without a password.
        connection: What talks to the store; for reconciliation and reports.

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
        on_ledger_error: Literal["refuse", "allow"] = "refuse",
        timeout: float = 1.0,
        ledger_id: str | None = None,
        queue: str | os.PathLike[str] | None = None,
        clock: Clock | None = None,
    ) -> None:
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
        self._allow = on_ledger_error == "allow"
        self.connection = Connection(address.open, self._clock, ledger_id or "", pause=timeout)
        folder = Path(queue) if queue is not None else default_path().parent / "ledger-queue"
        self._outbox = Outbox(folder / address.fingerprint)
        self._heartbeat = Heartbeat(lambda: self._beat.tick())
        self._ceilings = Ceilings(self.connection, self._clock)
        self._attached = AttachedRuns(
            self.connection, self._outbox, self._ceilings, self._heartbeat.wake
        )
        self._warnings = CeilingWarnings(self.connection, self._attached)
        self._alive = AliveRuns(self.connection, self._clock)
        self._beat = Beat(
            self.connection, self._outbox, self._attached, self._warnings, self._alive
        )
        self._exact_of = lru_cache(_TENANTS_AT_HAND)(self._new_exact)
        end_with_process(self)

    def __repr__(self) -> str:
        return f"Ledger({self.url!r})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a Ledger belongs to its process and cannot be pickled. Pass its URL.")

    @property
    def trips(self) -> int:
        """Steps that were sent to the store so far."""
        return self.connection.trips

    @property
    def id(self) -> str:
        """The ledger's own id, made at first use.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        return self.connection.ask(lambda store: store.identity())

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
        name = new_id() if reservation_id is None else check_name(reservation_id, "reservation_id")
        known = tenant if isinstance(tenant, str | Key) else as_keys(tenant, self._time_zone)
        exact = self._exact_of(known)
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
        keys = as_keys(tenant, self._time_zone)
        exact = self._exact_of(keys)
        attached = LedgerRun(self._attached, run, exact, on_kill, on_warning)
        attached.open()
        return attached

    def _account(self, tenant: Tenant) -> Account:
        return Account(as_keys(tenant, self._time_zone), *self._defaults)

    def _new_exact(self, tenant: Tenant) -> Exact:
        return Exact(
            self.connection,
            self._account(tenant),
            self._outbox,
            allow=self._allow,
            wake=self._heartbeat.wake,
            tell=self._warnings.tell,
        )

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
        """Store a tenant's ceilings, all four of them; None is no ceiling.

        Seen by each process with its next trip to the store. What is reserved by then
        may still be spent, also where the new ceiling is below it.

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
        daily = to_ceiling(daily_usd, daily_tokens)
        self._ceilings.store(key, daily, to_ceiling(monthly_usd, monthly_tokens))

    def clear_ceilings(self, tenant: str | None) -> None:
        """Let a tenant have the default again; with None, take the stored default away.

        Raises:
            ConfigurationError: The key is no name.
            LedgerUnreachable: The store does not answer.
        """
        key = "" if tenant is None else check_name(tenant, "tenant")
        self._ceilings.store(key, None, None)

    def ceilings(self) -> dict[str, dict[str, Amount]]:
        """Return the stored ceilings: by key ("" is the default) and by kind ("d", "m").

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        return self._ceilings.by_key()

    def usage(self, tenant: str | Key) -> TenantUsage:
        """Return what a tenant has used today and this month.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        account = self._account(tenant)
        return self.connection.ask(lambda store: usage_now(store, account))

    def windows(self) -> list[WindowUsage]:
        """Return every window that the ledger keeps, with the ceiling that was last applied.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        return [usage_of(record) for record in self.connection.ask(lambda store: store.windows())]

    def holds(self) -> list[HoldRecord]:
        """Return the reservations that the store keeps: open ones, and those of a day.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        return self.connection.ask(lambda store: store.holds())

    def check(self) -> list[str]:
        """Compare each window with the sum of its holds; what differs, in words.

        Raises:
            ConfigurationError: Only a SQLite file needs this, and can do it.
            LedgerUnreachable: The file cannot be used.
        """
        store = self.connection.store()
        if not isinstance(store, SqliteLedgerStore):
            raise ConfigurationError(
                "check needs a ledger in SQLite, got a server, which checks its own files. "
                "Use sqlite:///file."
            )
        return store.check()

    def now(self) -> float:
        """Return the store's clock, in seconds since the epoch.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        return self.connection.ask(lambda store: store.now())

    def adopt(self) -> str:
        """Accept the ledger as it is, in every process, after it was wiped or restored.

        Returns:
            Its id.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        store = Connection(self.connection.opener, self._clock)
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
        flag = flag_of(tenant, run, everything)
        kill = Kill(flag, plain(who), self.now(), plain(why))
        self.connection.ask(lambda store: store.write(f"f:{flag}", kill.to_text()))
        self._heartbeat.hurry()
        return kill

    def revive(
        self, *, tenant: str | None = None, run: str | None = None, everything: bool = False
    ) -> None:
        """Take a kill switch back. Runs that it stopped stay stopped; new ones may start.

        Raises:
            ConfigurationError: Not exactly one of the three is given.
            LedgerUnreachable: The store does not answer; nothing was revived.
        """
        flag = flag_of(tenant, run, everything)
        self.connection.ask(lambda store: store.write(f"f:{flag}", None))
        self._heartbeat.hurry()

    def kills(self) -> list[Kill]:
        """Return the kill switches that are set.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        notes = self.connection.ask(lambda store: store.scan("f:"))
        return [kill_of(name[2:], text) for name, text in sorted(notes.items())]

    def runs(self) -> list[AliveRun]:
        """Return the runs that processes said they work on, also of processes that went silent.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        return self._alive.all()

    def beat(self) -> None:
        """Do at once what the heartbeat does every half second.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        self._beat.do()

    # The end

    def close(self) -> None:
        """Send what waits, and end the thread.

        What cannot be sent stays on the disk for the next process. The ledger can be used again.
        """
        self._heartbeat.stop()
        self._beat.finish()
        self._outbox.close()
        self.connection.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forked(self) -> None:
        """Begin anew in a child process: connection and thread stay with the parent."""
        self._attached.begin()
        self.connection.forked()
        self._outbox.forked()
        self._heartbeat.restart()
        self._warnings.begin()
        self._alive.begin()
        self._beat.begin()


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(
            f"{name} must be one of {', '.join(choices)}, got {str(value)[:40]!r}. "
            f"Use {choices[0]!r}."
        )
