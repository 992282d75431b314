"""The time of a run: when it begins, when it stands still, and whose time housekeeping is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from budgetguard_core import events
from budgetguard_core.counters import INFINITY, ITERATIONS, MODEL_CALLS, TIME, TOOL_CALLS, Link
from budgetguard_core.decision import Admit
from budgetguard_core.run_state import RunState
from budgetguard_core.stop_state import Mode

_HOUSEKEEPING: Final = frozenset({ITERATIONS, TIME})
_LAST_ANSWER: Final = frozenset({ITERATIONS, MODEL_CALLS, TOOL_CALLS, TIME})


class RunClock:
    """The time of one run."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.is_housekeeping = False

    def time_left(self, *, whole: bool = False) -> float | None:
        """Seconds until the earliest deadline that is enforced; None without one."""
        remaining, tree = INFINITY, self._state.tree
        with tree.lock:
            now = tree.now()
            for link in self._state.chain:
                cap = (link.counters.whole_caps if whole else link.limits)[TIME]
                if link.owner.mode is Mode.ENFORCE and cap != INFINITY:
                    link.counters.tick(now)
                    remaining = min(remaining, cap - link.counters.used[TIME])
        return None if remaining == INFINITY else max(remaining / 1_000_000_000, 0.0)

    def start(self) -> None:
        """Start the time, where it has not begun."""
        state = self._state
        with state.tree.step() as now:
            if state.counters.started_ns is None:
                state.counters.started_ns = now
                state.tree.keep_time(state.chain, now)
                state.record(events.TimeStarted, now)

    def pause(self, tickets: Iterable[Admit]) -> None:
        """Stop the time while nothing is in flight but these calls."""
        tickets = list(tickets)
        with self._state.tree.step() as now:
            self._state.counters.pauses += 1
            self._wait(events.RunPaused, tickets, now, wait=True)
            self.stand_by(tickets)

    def go_on(self, tickets: Iterable[Admit]) -> None:
        """Count the time again; nothing without a pause."""
        with self._state.tree.step() as now:
            if self._state.counters.pauses:
                self._state.counters.pauses -= 1
                self._wait(events.RunResumed, tickets, now, wait=False)

    def stand_by(self, tickets: Iterable[Admit] | None = None) -> None:
        """Give the places of open calls to others; of all of this run where none are given.

        Nobody may be left who would settle them: tasks that were cancelled, for example.
        """
        tree = self._state.tree
        with tree.lock:  # one may be settled just now
            for ticket in self._state.guard.open_calls() if tickets is None else tickets:
                if tree.open.get(ticket.call_id) is ticket:
                    for hold in ticket.holds:
                        hold.stand_by()

    def begin_housekeeping(
        self, waiting: Iterable[Admit] = (), *, answers_for: str | None = None
    ) -> None:
        """Make the calls of this run, a sub-agent's, housekeeping of everyone above it.

        `Guard.housekeeping` does it for a block of code.
        """
        state = self._state
        with state.tree.step() as now:
            self.is_housekeeping = True
            parents = state.guard.ancestry[1:]
            stopped = next((one for one in parents if one.run_id == answers_for), None)
            state.chain = tuple(self._exempted(link, stopped) for link in state.chain)
            state.set_plugs(state.own_plugs)
            for link in state.chain:
                link.counters.housekeeping += TIME in link.exempt
            facts = {"answers_for": answers_for}
            self._wait(events.HousekeepingBegan, waiting, now, wait=True, **facts)

    def _exempted(self, link: Link, stopped: Any) -> Link:
        """Return a link as housekeeping meets it; other housekeeping around it goes on to bind."""
        owner = link.owner
        if owner is self._state.guard or owner.clock.is_housekeeping:
            return link
        if stopped is not None and stopped in owner.ancestry:
            return Link(owner, link.counters, _LAST_ANSWER, answers=True)
        return Link(owner, link.counters, _HOUSEKEEPING, answers=link.answers)

    def end_housekeeping(self, waiting: Iterable[Admit] = ()) -> None:
        """Count the time of the runs above again: the housekeeping is over."""
        with self._state.tree.step() as now:
            for link in self._state.chain:
                remaining = link.counters.housekeeping - (TIME in link.exempt)
                link.counters.housekeeping = max(remaining, 0)
            self._wait(events.HousekeepingEnded, waiting, now, wait=False)

    def keeps_house_for(self, guard: object) -> bool:
        """Return whether this is housekeeping of a run, whose deadline does not bind it then."""
        return any(link.owner is guard and TIME in link.exempt for link in self._state.chain)

    def _wait(
        self,
        kind: type[events.EventBase],
        tickets: Iterable[Admit],
        now: int,
        *,
        wait: bool,
        **facts: Any,
    ) -> None:
        """Note calls that wait, or wait no longer, keep the time and record it."""
        state = self._state
        tree, ids = state.tree, tuple(one.call_id for one in tickets)
        tree.waiting = tree.waiting.union(ids) & tree.open.keys() if wait else tree.waiting - {*ids}
        tree.keep_time(state.chain, now)
        state.record(kind, now, waiting=ids, **facts)
