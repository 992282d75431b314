"""Money taken ahead of need, spent in memory: what a guard asks under its lock.

One lease per process and set of keys, shared by its runs. `take` and `settle` are integer
arithmetic under a lock. `obtain` makes the trip to the store, and is called outside of any lock.

Why the ceiling holds: a holder has `spent + open <= granted` as it knows, which is never more than
granted in the store, because it raises its figure after the reply and lowers it before the
request. What is charged to a window is the sum over its holds, and only a grant within the ceiling
raises it. Time is in none of these steps; it only tells when a holder has to stop admitting.
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Callable, Sequence

from budgetguard_core.charges import Amounts
from budgetguard_core.clock import Clock
from budgetguard_core.ledger.account import Account
from budgetguard_core.ledger.amounts import ZERO, Amount
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import LedgerChanged, LedgerUnreachable
from budgetguard_core.ledger.lease_options import LeaseOptions
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.part import Obtained, Part
from budgetguard_core.ledger.recent_spend import RecentSpend
from budgetguard_core.ledger.refusal import (
    ABORTED,
    Refusal,
    refusal_of,
    refused_key,
)
from budgetguard_core.ledger.step import Answer, Step
from budgetguard_core.ledger.windows import Window

_ATTEMPTS = 3
_NS = 10**9


class Lease:
    """One process's lease on one set of keys.

    Args:
        connection: To the store.
        account: The keys.
        clock: Monotonic time.
        outbox: For what could not be sent.
        options: How large.
        allow: When the store cannot be reached: admit, and have it charged later.
        wake: Called when the lease runs low.
        tell: Called after a trip, outside of every lock: a listener may ask for another call.
    """

    def __init__(
        self,
        connection: Connection,
        account: Account,
        clock: Clock,
        outbox: Outbox,
        options: LeaseOptions,
        *,
        allow: bool = False,
        wake: Callable[[], object],
        tell: Callable[[], object],
    ) -> None:
        self.account = account
        self._connection = connection
        self._now = clock.monotonic_ns
        self._outbox = outbox
        self._options = options
        self._allow = allow
        self._wake = wake
        self._tell = tell
        self._restart()

    def _restart(self) -> None:
        now = self._now()
        self._lock = threading.Lock()
        self._io = threading.Lock()
        self._part = Part()
        self._draining: list[Part] = []
        self._blocked = False
        self._blocks = 0
        # More is asked for as soon as less than this is left; never below 0.
        self._low_usd = self._low_tokens = 0
        self._runs_low = False
        self._recent = RecentSpend(self._options, now)
        self._since_calls = 0
        self._since_usd = 0
        self._since_tokens = 0
        self._renewed_ns = now
        self._used_ns = now
        self._tight_until_ns = 0

    # In memory

    def take(self, usd: int, tokens: int) -> Part | None:
        """Set an amount aside. None: dry, expired, killed, or its window has ended."""
        now = self._now()
        with self._lock:
            # As `Part.take` and `Part.settle` do, without a call: part of every guarded step.
            part = self._part
            left, tokens_left = part.left - usd, part.tokens_left - tokens
            if now >= part.until or self._blocked:
                return None
            if left < self._low_usd or tokens_left < self._low_tokens:
                if left < 0 or tokens_left < 0:
                    return None
                self._low_usd = self._low_tokens = 0  # once for each grant
                self._runs_low = True
                self._wake()
            part.left, part.tokens_left = left, tokens_left
        return part

    def settle(self, part: Part, reserved: Amounts, spent: Amounts) -> None:
        """Replace what was set aside by what was measured, in the part that it came from."""
        usd, tokens = spent
        usd_set_aside, tokens_set_aside = reserved
        with self._lock:
            part.spent_usd += usd
            part.spent_tokens += tokens
            part.left += usd_set_aside - usd
            part.tokens_left += tokens_set_aside - tokens
            if usd or tokens:  # else given back unused
                self._since_calls += 1
                self._since_usd += usd
                self._since_tokens += tokens

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and everything was reported."""
        with self._lock:
            return not self._draining and not self._part.windows

    def idle_seconds(self) -> float:
        """Return how long nothing has been asked for."""
        with self._lock:
            under_way = any(part.opened() != ZERO for part in (*self._draining, self._part))
            return 0.0 if under_way else (self._now() - self._used_ns) / _NS

    def block(self, blocked: bool) -> None:
        """Admit nothing from memory, because a kill switch is set; or do so again."""
        with self._lock:
            self._blocked = blocked
            self._blocks += blocked

    # Trips

    def obtain(self, usd: int, tokens: int, run: str = "") -> Obtained:
        """Set an amount aside, with a trip to the store.

        Bounded by the store's time-out. A refused call waits once for what other processes give
        back, but not inside an event loop, which it would block.
        """
        try:
            return self._obtain_or_wait(Amount(usd, tokens), run)
        finally:
            self._tell()

    def _obtain_or_wait(self, need: Amount, run: str) -> Obtained:
        obtained = self._obtain(need, run)
        if isinstance(obtained, _Recalled):
            if not _inside_event_loop():
                threading.Event().wait(self._options.recall)
                again = self._obtain(need, run)
                obtained = again.refusal if isinstance(again, _Recalled) else again
            else:
                obtained = obtained.refusal
        return obtained

    def _obtain(self, need: Amount, run: str) -> Obtained | _Recalled:
        with self._io:
            # Another thread's trip may have brought it.
            part = self.take(*need)
            if part is not None:
                return part
            try:
                for attempt in range(_ATTEMPTS):
                    self._drain()
                    answer, windows, part = self._ask(need, run, whole=attempt > 0)
                    if part is not None:
                        return part
                    if answer.status in ("refused", "killed"):
                        refusal = refusal_of(answer, windows)
                        if answer.status == "refused":
                            return self._recall(refusal, *refused_key(answer, windows))
                        return refusal
            except LedgerUnreachable as error:
                return self._without_store(need, error)
        return Refusal(ABORTED, "the lease was settled by somebody else, again and again")

    def _recall(self, refusal: Refusal, key: str, others: bool) -> Refusal | _Recalled:
        if not others:
            return refusal
        mark = f"{self._connection.now():.3f} {uuid.uuid4().hex}"
        try:
            self._connection.ask(lambda store: store.write(f"w:{key}", mark))
        except LedgerUnreachable:
            return refusal
        return _Recalled(refusal)

    def _without_store(self, need: Amount, error: LedgerUnreachable) -> Obtained:
        if isinstance(error, LedgerChanged):
            return Refusal(ABORTED, str(error))
        if not self._allow:
            return Refusal(ABORTED, f"{error} (on_ledger_error is refuse)")
        with self._lock:
            want = self._recent.target(need)
        amount = Amount(max(need.usd, want.usd), max(need.tokens, want.tokens))
        part = Part()
        windows = self.account.windows(self._connection.now())
        record = Step(part.id, part.message(), windows, spent=amount, owner=self._connection.holder)
        try:
            self._outbox.record(record)
        except LedgerUnreachable as full:
            return Refusal(ABORTED, f"{error} {full}")
        now = self._now()
        with self._lock:
            part.record()
            self._draining.append(self._part)
            self._part = part
            part.grant(amount, windows, now + int(self._options.ttl * _NS))
            part.take(*need, now)
        return part

    def _ask(
        self, need: Amount, run: str = "", *, whole: bool = False
    ) -> tuple[Answer, Sequence[Window], Part | None]:
        """Make one trip, and set `need` aside from what it brings.

        Args:
            need: For a call that waits; nothing to renew and to top up.
            run: Of the call.
            whole: Ask for all of `need`. Else what is there is counted on, which other threads
                may spend during the trip.
        """
        now = self._now()
        with self._lock:
            self._used_ns = now
            self._measure(now)
            self._roll(now)
            part = self._part
            known, spent, windows = part.granted, part.spent, part.windows
            # What was spent beyond the grant is charged already, kept or not.
            keep = Amount(max(known.usd, spent.usd), max(known.tokens, spent.tokens))
            usd = part.left + keep.usd - known.usd
            tokens = part.tokens_left + keep.tokens - known.tokens
            lack = Amount(
                max(0, need.usd - usd) if need.usd else 0,
                max(0, need.tokens - tokens) if need.tokens else 0,
            )
            if whole:
                lack = Amount(max(lack.usd, need.usd), max(lack.tokens, need.tokens))
            target = ZERO if now < self._tight_until_ns else self._recent.target(need)
            want = Amount(max(lack.usd, target.usd - usd), max(lack.tokens, target.tokens - tokens))
            op = part.message()
            self._runs_low = False
            blocks = self._blocks
        flags = self.account.flags
        if run:
            flags = tuple(sorted((*flags, f"r:{run}")))

        def make(windows: Sequence[Window]) -> Step:
            return Step(
                part.id,
                op,
                windows,
                spent=spent,
                keep=keep,
                need=lack,
                want=want,
                ttl=self._options.ttl,
                share=self._options.share,
                flags=flags,
                owner=self._connection.holder,
            )

        if windows:  # a hold keeps the windows that it was made in
            answer = self._connection.send(make(windows))
        else:
            try:
                answer, windows = self._connection.take(self.account, make)
            except LedgerUnreachable as error:
                if error.was_sent:  # from now on it is made in these
                    with self._lock:
                        part.assume(error.windows)
                raise
        taken: Part | None = None
        with self._lock:
            if answer.status == "ok":
                # From before the request, so never later than the store's own edge.
                ttl = min(self._options.ttl * 0.8, min(w.end for w in windows) - answer.now)
                part.grant(answer.granted, windows, now + int(ttl * _NS))
                self._renewed_ns = now
                if (lack != ZERO or want != ZERO) and blocks == self._blocks:
                    self._blocked = False  # the store has just looked: it was revived
                if need != ZERO and not self._blocked and part.take(*need, now):
                    taken = part
                low = Amount(target.usd // 4, target.tokens // 4)
                # Where little is left for everyone, only a call that lacks something asks again.
                plenty = part.left > low.usd and part.tokens_left > low.tokens
                self._low_usd, self._low_tokens = low if plenty else ZERO
            elif answer.status in ("clock", "closed"):
                part.expire()  # its window ended, or somebody reconciled it
        return answer, windows, taken

    def _measure(self, now: int) -> None:
        # Here, once for many calls: a settlement is part of every guarded step.
        if self._recent.add(now, self._since_calls, self._since_usd, self._since_tokens):
            self._since_calls = self._since_usd = self._since_tokens = 0

    def _roll(self, now: int) -> None:
        """At the edge of a window: calls under way settle where they were admitted."""
        part = self._part
        if part.windows and now >= part.until:
            self._draining.append(part)
            self._part = Part()

    # Of the heartbeat

    def tend(self) -> None:
        """Report, renew, top up and close what has ended.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        with self._io:
            self._tend()

    def _tend(self) -> None:
        self._drain()
        now = self._now()
        with self._lock:
            part = self._part
            over = part.local or now >= part.until
            asks = self._runs_low or now - self._renewed_ns > self._options.ttl / 3 * _NS
        if not part.windows:
            return
        if over:
            self._end_part()
            self._drain()
        elif asks:
            self._ask(ZERO)

    def recall(self) -> None:
        """Give the idle part back, because somebody else was refused.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        with self._io:
            now = self._now()
            with self._lock:
                self._tight_until_ns = now + int(self._options.tight * _NS)
                part = self._part
                if not part.windows or part.local or now >= part.until:
                    return
                part.give_back()
                step = self._report(part, close=False)
                self._low_usd = self._low_tokens = 0
            self._connection.send(step)

    def close(self) -> None:
        """Give everything back that is not open, and report the rest.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        with self._io:
            self._end_part()
            self._drain(final=True)

    def abandon(self) -> None:
        """Have everything that was not reported sent by the outbox: the process ends."""
        with self._lock:
            parts = [part for part in (*self._draining, self._part) if part.windows]
            self._part, self._draining = Part(), []
            for part in parts:
                # What is under way may be billed: it is charged in full.
                opened = part.opened()
                spent = Amount(part.spent.usd + opened.usd, part.spent.tokens + opened.tokens)
                self._outbox.add(
                    Step(part.id, part.message(), part.windows, spent=spent, close=True)
                )

    def forked(self) -> None:
        """Begin anew in a child process, which never spends its parent's lease."""
        self._restart()

    def _end_part(self) -> None:
        with self._lock:
            part = self._part
            if part.windows:
                self._draining.append(part)
                self._part = Part()
                part.give_back()

    def _drain(self, *, final: bool = False) -> None:
        """Close what has ended; what is under way there settles where it was admitted.

        In the end what is under way stays charged, on the list of what is to be reconciled.
        """
        for part in list(self._draining):
            with self._lock:
                over = part.opened() == ZERO
                due = final or self._now() - self._renewed_ns > self._options.ttl / 3 * _NS
                if part.windows and not over and (part.local or not due):
                    continue
                step = self._report(part, close=over)
            if part.local:
                self._outbox.add(step)
            elif part.windows:
                self._connection.send(step)
            if over or not part.windows:
                with self._lock:
                    self._draining.remove(part)

    def _report(self, part: Part, *, close: bool) -> Step:
        return Step(
            part.id,
            part.message(),
            part.windows,
            spent=part.spent,
            keep=ZERO if close else part.granted,
            close=close,
            ttl=self._options.ttl,
            owner=self._connection.holder,
        )


class _Recalled:
    """A refusal that may be lifted when others give their idle parts back."""

    __slots__ = ("refusal",)

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal


def _inside_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
