"""How a guard is made: new, for a sub-agent, from a snapshot; and what it is a part of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

from budgetguard_core.breakers import BreakerRegistry
from budgetguard_core.budget import Budget
from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.controls import RunControls
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.events import Event, RunRestored
from budgetguard_core.frame import FRAME, Frame, around
from budgetguard_core.housekeeping import Housekeeping
from budgetguard_core.pricing import PriceBook, shared_prices
from budgetguard_core.run_log import followed
from budgetguard_core.sinks import Sink
from budgetguard_core.standing import Mode
from budgetguard_core.state import RunState, WarningEvent
from budgetguard_core.tenancy import tenant_place
from budgetguard_core.threads import THREADS
from budgetguard_core.tree import Tree, as_sink

if TYPE_CHECKING:
    from budgetguard_core.ledger import Ledger, Tenant
    from budgetguard_core.snapshot import Snapshot

_A = TypeVar("_A")
_LOG: Final = logging.getLogger("budgetguard")
_NOTHING_ADMITTED: Final = (
    "guard.activate(): no call was admitted in the block, so nothing in it was bounded. Import the "
    "adapter of your framework before the block, or give the run to the adapter itself; raw "
    "clients need budgetguard_http.install()."
)


class RunRelations(RunControls):
    """A run among others: those above it, those below it, and the leg that it goes on from."""

    __slots__ = ()

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        mode: Mode | str = Mode.ENFORCE,
        run_id: str | None = None,
        sinks: Iterable[Sink | Callable[[Event], object]] | None = (),
        on_warning: Callable[[Self, WarningEvent], object] | None = None,
        price_book: PriceBook | None = None,
        clock: Clock | None = None,
        log_arguments: bool = False,
        breakers: BreakerRegistry | None = None,
        ledger: Ledger | str | None = None,
        tenant: Tenant | None = None,
    ) -> None:
        if breakers is not None and not isinstance(breakers, BreakerRegistry):
            raise ConfigurationError(
                f"breakers must be a BreakerRegistry, got {type(breakers).__name__}. "
                "Leave it out for one of the run's own."
            )
        if price_book is not None and not isinstance(price_book, PriceBook):
            raise ConfigurationError(
                f"price_book must be a PriceBook, got {type(price_book).__name__}. "
                "Build one with PriceBook(overrides={...})."
            )
        tree = Tree(
            clock or SystemClock(),
            price_book or shared_prices(),
            [as_sink(sink) for sink in followed(sinks)],
            log_arguments,
            breakers,
        )
        self._set_up(tree, None, budget, mode, run_id, on_warning)
        self._charge_to(ledger, tenant)
        self._announce()

    def _charge_to(self, ledger: Ledger | str | None, tenant: Tenant | None) -> None:
        place = tenant_place(self, self._standing, ledger, tenant, self._warn_tenant)
        if place is not None:
            self._take_tenant(place)

    def child(
        self,
        budget: Budget | None = None,
        *,
        mode: Mode | str | None = None,
        run_id: str | None = None,
        on_warning: Callable[[Self, WarningEvent], object] | None = None,
        beside: Sequence[Self] = (),
        breakers: BreakerRegistry | None = None,
        ledger: Ledger | str | None = None,
        tenant: Tenant | None = None,
    ) -> Self:
        """Make the guard of a sub-agent: its own caps, and at most what is left of every ancestor.

        It charges this guard and all above it under one lock. Its trip ends the sub-agent alone;
        an ancestor's trip ends everything below. An advisory envelope takes `mode=Mode.OBSERVE`.

        Args:
            budget: Its own caps; without, it has none but those above.
            mode: ENFORCE, OBSERVE or OFF; this guard's if left out.
            run_id: Its name in logs and checkpoints; a random one if left out.
            on_warning: Called at the warning shares of its own caps.
            beside: Other guards of this tree that it charges too, each of their ancestors once.
            breakers: What its own circuit breakers and limits share with other runs; what this
                tree of guards shares if left out.
            ledger: As in `Guard`, for a tenant beside those above; each tenant is charged once.
            tenant: As in `Guard`.
        """
        child = type(self).__new__(type(self))
        child._set_up(
            self._tree, self, budget, mode or self.mode, run_id, on_warning, beside, breakers
        )
        for one in beside:
            one.cancellation.adopt(child.cancellation)
        child._charge_to(ledger, tenant)
        child._announce(beside)
        return child

    @contextmanager
    def activate(self) -> Generator[Self]:
        """Bound every run of every adapter in the block, beside what bounds them already.

        It holds in this thread or task, and in the tasks, threads and pools of threads that are
        used here; what other processes call is not counted. A block that ends by itself without a
        call admitted in it is warned of in the log: what ran there was not bounded, unless nothing
        ran.
        """
        before = self._calls()
        token = FRAME.set(Frame(self, above=around()))
        block = THREADS.opened()
        try:
            yield self
        finally:
            THREADS.closed(block)
            FRAME.reset(token)
        # In a run that was stopped before, nothing is admitted because it is bounded.
        if self._calls() == before and self.trip is None and self.mode is not Mode.OFF:
            _LOG.warning(_NOTHING_ADMITTED)

    def _calls(self) -> int:
        usage = self.usage
        return usage.model_calls + usage.tool_calls

    def housekeeping(self, *, seconds: float) -> Housekeeping[Self]:
        """Exempt work about the run, such as compaction, from its deadline: `with` or `async with`.

        What is called in the block costs the run tokens, dollars, model calls and tool calls. It is
        no iteration, and its time is not run time unless something else of the run is in flight.
        Its own end is no end of the run: when its time is over, it ends with `TimeoutError`.

        Args:
            seconds: How long the block may take, shorter than the run's own deadline.

        Raises:
            ConfigurationError: `seconds` is not a number > 0.
        """
        try:
            caps = Budget(max_seconds=seconds, loop_detection=None)
        except ConfigurationError:
            caps = None
        if caps is None or seconds is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise ConfigurationError(
                f"seconds must be a number of seconds > 0, got {seconds!r}. Use seconds=30."
            )
        return Housekeeping(lambda: self.child(caps), caps.max_seconds or seconds)

    def is_kin_of(self, other: RunState) -> bool:
        """Tell whether two guards are of one tree: admitted under one lock, in one log."""
        return self._tree is other._tree

    def attachment(self, kind: type[_A]) -> _A:
        """Return what an adapter keeps with this tree of guards, made on first use.

        Two layers of an adapter that see the same call find each other here.
        """
        with self._tree.lock:
            found = self._tree.attachments.get(kind)
            if found is None:
                found = self._tree.attachments[kind] = kind()
        return cast("_A", found)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the guard itself: a copy would be a second allowance of the same budget."""
        return self

    @classmethod
    def restore(
        cls,
        snapshot: Snapshot,
        budget: Budget | None = None,
        *,
        stop_when: Sequence[Callable[..., str | bool | None]] = (),
        sinks: Iterable[Sink | Callable[[Event], object]] | None = (),
        on_warning: Callable[[Self, WarningEvent], object] | None = None,
        price_book: PriceBook | None = None,
        clock: Clock | None = None,
        log_arguments: bool = False,
        within: Sequence[Self] = (),
        breakers: BreakerRegistry | None = None,
        ledger: Ledger | str | None = None,
        tenant: Tenant | None = None,
    ) -> Self:
        """Go on from a snapshot, in this process or another.

        Without a budget the guard is what it was: same caps, same counters, same trip. Under a
        fresh budget the caps count from zero, nothing is tripped, and what was used before is kept
        in `earlier_usage`. Calls that were in flight keep their reservation in either case. Where
        the snapshot is of a paused run, so is the guard, until `go_on`.

        Args:
            snapshot: What `snapshot` or a store returned, or `Snapshot.of_outcome`.
            budget: A fresh budget; the recorded one, with what was used of it, if left out.
            stop_when: The conditions of the recorded budget, which are code and not in a snapshot.
            sinks: As in `Guard`; so are the arguments below.
            on_warning: Called with the guard and its warning.
            price_book: Where prices come from.
            clock: Where time comes from.
            log_arguments: Put the arguments of tool calls into events.
            within: Guards of one tree that the run is a part of: then it has their log, clock and
                prices, and what it had used before is not charged to them again.
            breakers: As in `Guard`.
            ledger: As in `Guard`; what the run had used before is not charged again.
            tenant: As in `Guard`.

        Raises:
            CheckpointError: The snapshot's run had stop conditions, and neither they nor a budget
                were given; or a tenant paid for it that does not pay for it now; or it does not
                fit together.
            ConfigurationError: Both `budget` and `stop_when` were given; or neither a budget was,
                nor does the snapshot know its caps.
        """
        snapshot.check_resumable(budget, stop_when)
        if ledger is None:
            snapshot.check_paid(cls._paying(within))  # before anything is made
        try:
            caps = budget or snapshot.caps(stop_when)
            if within:
                guard = within[0].child(
                    caps,
                    mode=snapshot.mode,
                    run_id=snapshot.run_id,
                    on_warning=on_warning,
                    beside=within[1:],
                    breakers=breakers,
                    ledger=ledger,
                    tenant=tenant,
                )
            else:
                guard = cls(
                    caps,
                    mode=snapshot.mode,
                    run_id=snapshot.run_id,
                    # The same type; only the checkers see the class of `cls` here.
                    on_warning=cast("Any", on_warning),
                    sinks=None,
                    price_book=price_book,
                    clock=clock,
                    log_arguments=log_arguments,
                    breakers=breakers,
                    ledger=ledger,
                    tenant=tenant,
                )
            snapshot.check_paid(cls._paying((guard,)))
            with guard._tree.lock:
                guard._take_over(snapshot, fresh=budget is not None)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise snapshot.misfit(error) from None
        if not within:
            guard._tree.send_to([as_sink(sink) for sink in followed(sinks)])
        guard.emit(RunRestored, snapshot=guard.snapshot().model_dump(mode="json"))
        return guard

    def adopt(self, snapshot: Snapshot) -> bool:
        """Take over what an earlier leg of a run had counted, under this guard's own caps.

        For a guard that is made anew for each request while the run that it bounds waits for a
        person: what was used before the answer counts after it.

        Returns:
            False when this guard has counted something itself; then nothing was changed.

        Raises:
            CheckpointError: A tenant paid for the run that does not pay for this guard; or the
                snapshot does not fit together.
        """
        with self._tree.lock:
            if self._meter.model_calls or self._meter.tool_calls:
                return False
            if self.mode is not Mode.OFF:
                snapshot.check_paid(self._paying((self,)))
            try:
                self._take_over(snapshot, fresh=False)
            except (ArithmeticError, KeyError, TypeError, ValueError) as error:
                raise snapshot.misfit(error) from None
        self.emit(RunRestored, snapshot=self.snapshot().model_dump(mode="json"))
        return True

    @staticmethod
    def _paying(guards: Iterable[RunState]) -> set[str]:
        """Return the names of whoever pays for these guards."""
        return {name for guard in guards for place in guard._tenants for name in place.names}
