"""Event logs as runs to look at: who spent what, and how near each cap came."""

from __future__ import annotations

import datetime as dt
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from budgetguard_cli.lines import Line, Problem
from budgetguard_cli.money import in_dollars
from budgetguard_cli.recordings import NO_START, read_event
from budgetguard_core import Budget, BudgetGuardError, Event, Guard, PriceBook, Trip, Usage
from budgetguard_core.events import (
    CallDelayed,
    HousekeepingBegan,
    HousekeepingEnded,
    IncidentRecorded,
    LimitNearlyReached,
    ModelCallAdmitted,
    ModelCallRefused,
    ModelCallSettled,
    ModelCallWithdrawn,
    RunEnded,
    RunPaused,
    RunRestored,
    RunResumed,
    RunStarted,
    ToolCallSettled,
    ToolCallsRequested,
    ToolCallTurnedAway,
    TripObserved,
    Tripped,
)
from budgetguard_core.replay import Replay

_MOST_POINTS = 240
_UNNAMED = "unnamed model"
_POINTS = (ModelCallSettled, ToolCallsRequested, Tripped, RunEnded)
# What a forged or damaged record can raise on its way through the engine.
_DAMAGE = (BudgetGuardError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

SPENT_ON_ANSWERS = "(answers)"
"""What model calls cost whose reply asked for no tool."""


@dataclass
class Spent:
    """What went into one model or one tool."""

    calls: int = 0
    failed: int = 0
    refused: int = 0
    tokens: int = 0
    cost_usd: Decimal = Decimal(0)
    """Of a tool: of the model calls that asked for it, shared among all that they asked for."""


@dataclass
class Node:
    """One run of a tree, without the runs inside it."""

    run_id: str
    parent_run_id: str | None
    budget: Budget
    mode: str
    tenant: tuple[str, ...]
    models: dict[str, Spent] = field(default_factory=lambda: dict[str, Spent]())
    tools: dict[str, Spent] = field(default_factory=lambda: dict[str, Spent]())
    refusals: Counter[str] = field(default_factory=lambda: Counter[str]())
    warned: list[str] = field(default_factory=lambda: list[str]())
    trip: Trip | None = None
    observed: Trip | None = None
    status: str | None = None
    """How it ended; None while it goes on, or where its process was killed."""
    stop_reason: str | None = None
    error: str | None = None
    finalized: bool = False
    """The model gave a last answer, from the reserve."""
    housekeeping: str | None = None
    """What it is, where it is no agent's run: `last answer`, or `housekeeping` of another kind."""
    delayed: int = 0
    """Calls that a rate limit let wait."""
    next_step: str | None = None
    may_have_taken_effect: tuple[str, ...] = ()
    usage: Usage | None = None
    children: list[Node] = field(default_factory=lambda: list["Node"]())
    # The cost of the last answer, until it is known what it asked for.
    last_cost: Decimal = Decimal(0)

    @property
    def profile(self) -> str | None:
        """The name of its profile."""
        return None if self.budget.profile is None else self.budget.profile.name

    def settle_answer(self) -> None:
        """Charge the last answer to no tool: it asked for none."""
        if self.last_cost:
            self.tools.setdefault(SPENT_ON_ANSWERS, Spent()).cost_usd += self.last_cost
            self.last_cost = Decimal(0)


@dataclass(frozen=True, slots=True)
class Point:
    """How much of each cap was used at one time."""

    seconds: float
    shares: dict[str, float]


class Timeline:
    """One tree of runs, told event by event. The counting is the engine's own.

    Attributes:
        line: Where in its file it begins.
        root: The run at the root.
        nodes: Every run of the tree, by id.
        points: How much of each cap of the root was used when, 240 points at most.
        started_ns: When it began, in nanoseconds since the epoch.
        last_ns: When something happened last.
        damaged: Something in the log did not fit, and the figures end there.
    """

    def __init__(self, line: int, event: RunStarted | RunRestored, prices: PriceBook) -> None:
        self.line = line
        self.nodes: dict[str, Node] = {}
        self.points: list[Point] = []
        self.started_ns = self.last_ns = event.wall_ns
        self.damaged: str | None = None
        self._models: dict[int, str] = {}
        self._tools: dict[int, str] = {}
        self._turned_away: Counter[str] = Counter()
        self._begun_ns = event.at_ns
        self._replay = Replay(price_book=prices)
        self._skip = self._seen = 0
        self.root = self._add(event)
        self.take(event)

    @property
    def guard(self) -> Guard | None:
        """The guard of the root as far as it was told."""
        return self._replay.root

    @property
    def usage(self) -> Usage:
        """What the root has used so far."""
        if self.root.usage is not None:
            return self.root.usage
        guard = self._replay.root
        return Usage() if guard is None else guard.usage

    @property
    def spent(self) -> Spent:
        """What its model calls cost that are told here: of all legs and runs of the tree."""
        found = Spent()
        for node in self.nodes.values():
            for spent in node.models.values():
                found.tokens += spent.tokens
                found.cost_usd += spent.cost_usd
        return found

    def models(self) -> list[str]:
        """Return the names of the models that the tree called."""
        return sorted({name for node in self.nodes.values() for name in node.models})

    @property
    def seconds(self) -> float:
        """How long it took from the first event to the last, pauses included."""
        return (self.last_ns - self.started_ns) / 1_000_000_000

    def take(self, event: Event) -> None:
        """Tell the next event."""
        self.last_ns = max(self.last_ns, event.wall_ns)
        node = self.nodes.get(event.run_id)
        if isinstance(event, RunStarted | RunRestored) and (
            node is None or isinstance(event, RunRestored)
        ):
            node = self._add(event)
        if node is not None:
            self._attribute(node, event)
        if self.damaged is None:
            try:
                self._replay.apply(event)
            except _DAMAGE as error:
                self.damaged = str(error)
        if isinstance(event, _POINTS):
            self._point(event)

    def shares(self) -> dict[str, float]:
        """Return how much of each cap of the root is used, as a share of it."""
        guard = self._replay.root
        if guard is None:
            return {}
        used = self.usage
        return {
            name: float(used_of(used, name)) / float(cap)
            for name, cap in guard.budget.caps().items()
        }

    def near_misses(self) -> dict[str, float]:
        """Return the caps that a run came near and that did not stop it."""
        if self.root.trip is not None or self.root.status not in ("completed", None):
            return {}
        at = self.root.budget.warn_at
        return {name: share for name, share in self.shares().items() if share >= at}

    def _point(self, event: Event) -> None:
        self._seen += 1
        if self._seen % (self._skip + 1) and not isinstance(event, RunEnded | Tripped):
            return
        seconds = (event.at_ns - self._begun_ns) / 1_000_000_000
        self.points.append(Point(max(seconds, 0.0), self.shares()))
        if len(self.points) > _MOST_POINTS:
            self.points = self.points[::2]
            self._skip = self._skip * 2 + 1

    def _add(self, event: RunStarted | RunRestored) -> Node:
        if isinstance(event, RunStarted):
            parent, budget, mode = event.parent_run_id, event.budget, event.mode
            tenant = event.tenant
        else:
            snapshot: dict[str, Any] = event.snapshot
            kept: dict[str, Any] = snapshot.get("budget") or {}
            parent, budget = snapshot.get("parent_run_id"), kept
            mode, tenant = str(snapshot.get("mode")), tuple(snapshot.get("tenant") or ())
        try:
            caps = Budget.from_json(budget)
        except BudgetGuardError as error:
            caps, self.damaged = Budget(), str(error)
        known = self.nodes.get(event.run_id)
        if known is not None:
            # It goes on: what it has spent before stays.
            known.status, known.budget, known.usage = None, caps, None
            return known
        node = Node(event.run_id, parent, caps, mode, tenant)
        self.nodes[event.run_id] = node
        if parent is not None and parent in self.nodes:
            self.nodes[parent].children.append(node)
        return node

    def _attribute(self, node: Node, event: Event) -> None:
        if isinstance(event, ModelCallAdmitted):
            node.settle_answer()
            name = event.call.model or _UNNAMED
            self._models[event.call_id] = name
            node.models.setdefault(name, Spent()).calls += 1
        elif isinstance(event, ModelCallRefused):
            node.refusals[event.reason] += 1
        elif isinstance(event, ModelCallWithdrawn):
            name = self._models.pop(event.call_id, "")
            if name:
                node.models[name].calls -= 1
        elif isinstance(event, ModelCallSettled):
            name = self._models.pop(event.call_id, "")
            spent = node.models.setdefault(name or _UNNAMED, Spent())
            spent.failed += event.error is not None
            spent.tokens += 0 if event.usage is None else event.usage.total_tokens
            cost = Decimal(0) if event.cost_usd is None else Decimal(event.cost_usd)
            spent.cost_usd += cost
            node.last_cost += cost
        elif isinstance(event, ToolCallTurnedAway):
            self._turned_away[event.name] += 1
            node.refusals[event.reason] += 1
        elif isinstance(event, ToolCallsRequested):
            self._tools_asked(node, event)
        elif isinstance(event, ToolCallSettled):
            name = self._tools.pop(event.call_id, "")
            if name and event.error is not None:
                node.tools[name].failed += 1
        elif isinstance(event, LimitNearlyReached):
            node.warned.append(event.dimension)
        elif isinstance(event, Tripped):
            node.trip = event.trip
        elif isinstance(event, TripObserved):
            node.observed = event.trip
        elif isinstance(event, IncidentRecorded):
            node.next_step = event.next_step
            node.may_have_taken_effect = event.may_have_taken_effect
        elif isinstance(event, CallDelayed):
            node.delayed += 1
        elif isinstance(event, HousekeepingBegan):
            node.housekeeping = "housekeeping" if event.answers_for is None else "last answer"
        elif isinstance(event, HousekeepingEnded):
            # It has no outcome of its own.
            node.settle_answer()
        elif isinstance(event, RunPaused):
            node.status = "paused"
        elif isinstance(event, RunResumed):
            node.status = None
        elif isinstance(event, RunEnded):
            node.settle_answer()
            node.status, node.error, node.usage = event.status, event.error, event.usage
            node.stop_reason, node.finalized = event.stop_reason, event.finalized

    def _tools_asked(self, node: Node, event: ToolCallsRequested) -> None:
        part = node.last_cost / max(len(event.calls), 1)
        node.last_cost = Decimal(0)
        away, self._turned_away = self._turned_away, Counter()
        for call in event.calls:
            spent = node.tools.setdefault(call.name, Spent())
            spent.cost_usd += part
            if call.call_id is not None:
                self._tools[call.call_id] = call.name
                spent.calls += 1
                continue
            spent.refused += 1
            if away[call.name]:
                away[call.name] -= 1
            else:
                node.refusals[str(call.reason or call.decision)] += 1


class Timelines:
    """Every tree of runs in the lines of files, also while they are written.

    A run that goes on in another process has a file for each leg: it is one run.
    """

    def __init__(self, prices: PriceBook) -> None:
        self._prices = prices
        self._of: dict[str, Timeline] = {}
        self.roots: list[Timeline] = []

    def take(self, line: Line) -> Problem | None:
        """Tell the next line; a line that says nothing is a problem."""
        event = read_event(line)
        if event is None or isinstance(event, Problem):
            return event
        return self._tell(line.number, event)

    def read(self, lines: Iterable[Line | Problem]) -> Iterator[Problem]:
        """Tell the lines of a file; gives those that say nothing."""
        for line in lines:
            problem = line if isinstance(line, Problem) else self.take(line)
            if problem is not None:
                yield problem

    def _tell(self, number: int, event: Event) -> Problem | None:
        found = self._of.get(event.run_id)
        if isinstance(event, RunStarted | RunRestored):
            above = event.parent_run_id if isinstance(event, RunStarted) else event.run_id
            within = None if above is None else self._of.get(above)
            begins = isinstance(event, RunStarted) and (within is None or above == event.run_id)
            if within is None or begins:
                found = Timeline(number, event, self._prices)
                self.roots.append(found)
                self._of[event.run_id] = found
                return None
            found = self._of[event.run_id] = within
        if found is None:
            return Problem(number, NO_START)
        found.take(event)
        return None


def used_of(usage: Usage, dimension: str) -> int | float | Decimal:
    """Return what is used of a dimension, in the unit of its cap."""
    value: int | float | Decimal = getattr(usage, dimension.removeprefix("max_"))
    return value


def short_number(value: int | float | Decimal) -> str:
    """Write a figure for people."""
    if isinstance(value, Decimal):
        return in_dollars(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def at_minute(wall_ns: int) -> str:
    """Write a time of a log, in UTC."""
    return dt.datetime.fromtimestamp(wall_ns // 1_000_000_000, dt.UTC).strftime("%Y-%m-%d %H:%M")


def log_folder() -> str | None:
    """Return the folder that `BUDGETGUARD_LOG` names."""
    return os.environ.get("BUDGETGUARD_LOG") or None
