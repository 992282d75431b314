"""Puts a process of the script under the caps of its run. `site/sitecustomize.py` calls it."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

import budgetguard_http
from budgetguard_cli.run.folder import (
    ANSWERS,
    CALLS,
    OF_A_PROCESS,
    QUOTA,
    RUN,
    TURNS,
    RunFolder,
    trip_of,
)
from budgetguard_core import Budget, BudgetGuardError, Guard, StopReason
from budgetguard_core.counters import ITERATIONS, UNKNOWN_ANSWER, Link
from budgetguard_core.decision import COUNTED, projected_cost
from budgetguard_core.events import Event, ModelCallRefused, Tripped
from budgetguard_core.frame import Frame, bound_process, innermost
from budgetguard_core.kit import Admit, ModelCall, Violation, end_run
from budgetguard_core.ledger import LedgerRefused, Reservation
from budgetguard_core.ledger.in_thread import InThread
from budgetguard_core.plugs import Ask, Ended, Hold, Plug
from budgetguard_core.pricing import to_usd
from budgetguard_core.run_log import RunLog

_MOST_REFUSALS: Final = 100
"""Refusals of one loop after which nobody is left who would end by itself."""
_PATIENCE_S: Final = 5.0


def attach() -> None:
    """Bound every call of this process that the HTTP seam sees."""
    folder = RunFolder(os.environ[RUN])
    plug = RunLedger(folder)

    def bind() -> None:
        bound_process(Frame(plug.guard()))

    bind()
    os.register_at_fork(after_in_child=bind)
    budgetguard_http.install(watch_connections=True)
    atexit.register(_leave, folder)


def adapt(adapter: str) -> None:
    """Install a framework's adapter, which ends its runs normally; the seam bounds them anyway."""
    try:
        import_module(adapter)
    except (ImportError, BudgetGuardError) as error:
        RunFolder(os.environ[RUN]).note(f"{adapter} is not used: {error}")


def _leave(folder: RunFolder) -> None:
    for host, count in budgetguard_http.uncovered_hosts().items():
        folder.note(f"{count} connections to {host} went past BudgetGuard")
    frame = innermost()
    if frame is not None:
        end_run(frame.guard, trip=frame.guard.trip)


class Reserved(Hold):
    """The reservation of one call in the ledger of the run."""

    reservation: Reservation

    def __init__(self, plug: RunLedger) -> None:
        self._plug = plug

    def settle(self, ended: Ended, ticket: Admit | None) -> None:
        """Replace what was reserved by what was used; a tool call stays what it is."""
        del ticket
        held = self.reservation
        self._plug.decided((self,))
        if ended.withdrawn:
            self._plug.send(held.release)
        elif held.amount.model_calls:
            self._plug.send(partial(held.settle, to_usd(ended.cost or 0), ended.tokens))


class RunLedger(Plug):
    """The caps of the whole run, as a plug of a process's guard.

    The guard has the same caps, which it reaches last. What the ledger refuses stands against the
    guard only when all calls that it granted before are admitted: a stop would overtake them.
    """

    waits = True

    def __init__(self, folder: RunFolder) -> None:
        self.facts = folder.facts()
        self.ledger = folder.ledger()
        self._folder = folder
        self._budget = Budget.from_json(self.facts.budget)
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._granted: set[Hold] = set()
        """Asked for or reserved, and not yet admitted."""
        self._thread = InThread()
        self._sent: Callable[[], object] | None = None

    def guard(self) -> Guard:
        """Make the guard of this process, and of a child anew: the caps of the whole run."""
        self._begin()  # what a process has in flight is none of its copy's
        name = self._folder.enter(self.facts.run_id)
        guard = Guard(
            self._budget,
            run_id=name,
            sinks=(RunLog(self._folder.logs), _stop_sink(self._folder, name)),
            ledger=self.facts.ledger,
            tenant=self.facts.tenant,
        )
        guard.start()
        guard.state.counters.started_ns = self.facts.started_ns
        guard.state.set_plugs((self, *guard.state.own_plugs))
        return guard

    def send(self, settlement: Callable[[], None]) -> None:
        """Send a settlement; from an event loop in a thread, for which the next call waits."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            settlement()
        else:
            self._sent = self._thread.send(settlement)

    def before(self, owner: Any, ask: Ask) -> None:
        """Take in that calls are admitted in this step."""
        del owner
        self.decided(_holds_of(ask))

    def decided(self, holds: Iterable[Hold]) -> None:
        """Take in that calls are admitted now, or were not made."""
        if not self._granted.isdisjoint(holds):
            with self._changed:
                self._granted.difference_update(holds)
                self._changed.notify_all()

    def obtain(self, keys: Sequence[str], **amounts: Any) -> Reserved:
        """Reserve a call in the ledger; from now on until it is admitted, no stop overtakes it."""
        hold = Reserved(self)
        with self._changed:
            self._granted.add(hold)
        try:
            hold.reservation = self.ledger.reserve(keys, **amounts)
        except BaseException:
            self.decided((hold,))
            raise
        return hold

    def _let_in(self, ask: Ask) -> None:
        """Wait until the calls of others that were granted are admitted, or not made."""
        with self._changed:
            others = self._granted.difference(_holds_of(ask))
            self._changed.wait_for(lambda: self._granted.isdisjoint(others), _PATIENCE_S)

    def _refuse(self, owner: Any, ask: Ask, refused: LedgerRefused) -> tuple[Violation, ...]:
        """Return the cap that is reached; abort where it is none."""
        self._let_in(ask)
        if not refused.key:
            owner.abort(refused.detail)
            return ()
        is_turn = refused.key == TURNS
        reason = StopReason.MAX_ITERATIONS if is_turn else StopReason(refused.reason)
        limit, used = getattr(self._budget, reason), refused.used
        detail = f"{reason}={limit} reached: {used} used or reserved by all processes"
        return (Violation(reason=reason, limit=limit, used=used, detail=detail),)

    def reserve(self, owner: Any, ask: Ask) -> bool:
        """Reserve a model call, or the tool calls of a batch."""
        link = next(one for one in ask.asker.state.chain if one.owner is owner)
        if not link.answers:
            stop = None if owner.trip is not None else self._folder.stop()
            if stop is not None:
                self._let_in(ask)
                for one in stop.violations:
                    owner.abort(one.detail) if one.reason == "aborted" else owner.hold(one)
            if stop is not None or ask.asker.trip is not None:
                return True
        if self._sent is not None:
            self._sent()
        if isinstance(ask.call, ModelCall):
            try:
                self._reserve_model_call(owner, ask, ask.call, link)
            except LedgerRefused as refused:
                for one in self._refuse(owner, ask, refused):
                    owner.hold(one)
        else:
            self._reserve_tool_calls(owner, ask)
        return True

    def _reserve_model_call(self, owner: Any, ask: Ask, call: ModelCall, link: Link) -> None:
        keys = [ANSWERS if link.answers else CALLS]
        if not call.retry and ITERATIONS not in link.exempt:
            keys.append(TURNS)
        rates = owner.tree.price_book.rates_for(call.model or "", call.provider)

        def reserve(bound: int) -> Reserved:
            usd = to_usd(projected_cost(call, rates, bound))
            return self.obtain(keys, usd=usd, tokens=call.input_tokens + bound)

        bound = ask.tokens - call.input_tokens
        try:
            held = reserve(bound or max(link.counters.largest_output, UNKNOWN_ANSWER))
        except LedgerRefused as refused:
            of_answers = refused.reason in (StopReason.MAX_TOTAL_TOKENS, StopReason.MAX_COST_USD)
            if bound or not of_answers or self.ledger.run_usage(CALLS).reserved_tokens:
                raise
            held = reserve(0)  # nobody else could exceed the cap with it
        ask.holds += (held,)

    def _reserve_tool_calls(self, owner: Any, ask: Ask) -> None:
        counters = owner.state.counters
        for index, call in enumerate(ask.calls):
            if call.kind not in COUNTED:
                continue
            with owner.tree.lock:
                of_tool = counters.tool(call.name).quotas
            places = enumerate(counters.quotas)
            quotas = {QUOTA.format(position): one for position, one in places if one in of_tool}
            try:
                held = self.obtain([CALLS, *quotas], model_calls=0, tool_calls=1)
            except LedgerRefused as refused:
                if refused.key in quotas:  # by the calls of other processes
                    quotas[refused.key].used = quotas[refused.key].limit
                    continue
                found = self._refuse(owner, ask, refused)
                if call.kind == "function":
                    ask.stop_from(index, owner, found)
                    return
                for one in found:  # nobody asks before it runs: the next model call is stopped
                    owner.hold(one)
            else:
                ask.hold_for(index, held)


def _holds_of(ask: Ask) -> Iterable[Hold]:
    return (*ask.holds, *(one for holds in ask.call_holds.values() for one in holds))


def _stop_sink(folder: RunFolder, name: str) -> Callable[[Event], None]:
    """Return a sink of the guard of this name: it tells the other processes of its stop."""
    refusals = Counter[str]()

    def take(event: Event) -> None:
        if isinstance(event, Tripped):
            if event.trip.run_id == name and event.trip.reason not in OF_A_PROCESS:
                folder.end(event.trip)
        elif isinstance(event, ModelCallRefused):
            folder.ask_on()
            refusals[event.run_id] += event.reason in OF_A_PROCESS
            if refusals[event.run_id] > _MOST_REFUSALS:
                detail = f"the script goes on after a stop: {event.reason}"
                folder.end(trip_of(StopReason.ABORTED, detail))

    return take
