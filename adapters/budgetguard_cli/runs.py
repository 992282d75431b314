"""Event logs as runs: who spent what, how near each cap came, and what another budget would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

from pydantic import ValidationError

from budgetguard_cli.counted import Counted
from budgetguard_cli.logs import Line, Problem, complain, read_event, read_file, readable, reason
from budgetguard_cli.screen import figure
from budgetguard_core import Budget, BudgetGuardError, PriceBook, Trip, Usage, events
from budgetguard_core.kit import Event

SPENT_ON_ANSWERS = "(answers)"
"""The cost of model calls whose reply requested no tool."""
_MOST_POINTS = 240
_UNNAMED = "unnamed model"
Begins: TypeAlias = events.RunStarted | events.RunRestored
"""The event that a run begins with, in each of its logs."""
_POINTS = (events.ModelCallSettled, events.ToolCallsRequested, events.Tripped, events.RunEnded)
# What a forged or damaged record can raise on its way through the engine.
_DAMAGE = (BudgetGuardError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass
class Spent:
    """The spend on one model or one tool."""

    calls: int = 0
    failed: int = 0
    refused: int = 0
    tokens: int = 0
    cost_usd: Decimal = Decimal(0)
    """Of a tool: of the model calls that asked for it, shared among all that they asked for."""

    def add(self, other: Spent) -> None:
        """Add what another run spent on it."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Node:
    """One run of a tree, without the runs inside it."""

    run_id: str
    budget: Budget
    mode: str
    tenant: tuple[str, ...]
    models: dict[str, Spent] = field(default_factory=dict[str, Spent])
    tools: dict[str, Spent] = field(default_factory=dict[str, Spent])
    handoffs: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])
    warned: list[str] = field(default_factory=list[str])
    fallback: str | None = None
    trip: Trip | None = None
    observed: Trip | None = None
    status: str | None = None
    """The ending; None while it goes on, or where its process was killed."""
    stop_reason: str | None = None
    error: str | None = None
    finalized: bool = False
    """The model gave a last answer, from the reserve."""
    housekeeping: str | None = None
    """The kind, where it is no agent's run: `last answer`, or `housekeeping`."""
    delayed: int = 0
    """Calls that a rate limit let wait."""
    next_step: str | None = None
    may_have_taken_effect: tuple[str, ...] = ()
    usage: Usage | None = None
    earlier: list[str] = field(default_factory=list[str])
    """The endings of attempts that were resumed, such as `terminated, max_iterations`."""
    children: list[Node] = field(default_factory=list["Node"])
    last_cost: Decimal = Decimal(0)
    """The cost of the last answer, until it is known what it asked for."""

    @property
    def profile(self) -> str | None:
        """The name of its profile."""
        return None if self.budget.profile is None else self.budget.profile.name

    @property
    def ending(self) -> str:
        """The ending in a few words."""
        if self.status is None:
            return "not ended"
        why = self.stop_reason if self.status == "terminated" else self.error
        return self.status + (f", {why}" if why else "")

    def resume(self, caps: Budget) -> None:
        """Go on after an ending; what was spent before stays."""
        if self.status in ("terminated", "failed"):
            self.earlier.append(self.ending)
        self.status = self.stop_reason = self.error = self.usage = self.trip = None
        self.budget = caps

    def settle_answer(self) -> None:
        """Charge the last answer to no tool: it asked for none."""
        if self.last_cost:
            self.tools.setdefault(SPENT_ON_ANSWERS, Spent()).cost_usd += self.last_cost
            self.last_cost = Decimal(0)


class Cap(NamedTuple):
    """One cap of a run, and how much of it is used."""

    name: str
    used: int | float | Decimal
    cap: int | float | Decimal

    @property
    def share(self) -> float:
        """The part that is used."""
        return float(self.used) / float(self.cap)

    def __str__(self) -> str:
        return f"{figure(self.used)} of {figure(self.cap)}"


@dataclass(frozen=True, slots=True)
class Point:
    """The usage of each cap at one time."""

    seconds: float
    shares: dict[str, float]


class Run:
    """One tree of runs, told event by event. The counting is the engine's own.

    Attributes:
        file: The file that it begins in, and `line` the line there.
        root: The run at the root.
        nodes: Every run of the tree, by id.
        points: How much of each cap of the root was used when, 240 points at most.
        started_ns: When it began, in nanoseconds since the epoch.
        last_ns: When something happened last.
        damaged: Why the log does not fit together; the figures end there.
        recorded: The run as its own budget counted it.
        candidate: The run as another budget would have.
    """

    def __init__(
        self,
        file: str,
        line: int,
        event: Begins,
        prices: PriceBook,
        candidate: Budget | None = None,
        points: bool = False,
    ) -> None:
        self.file, self.line = file, line
        self._keeps_points = points
        self.nodes: dict[str, Node] = {}
        self.points: list[Point] = []
        self.started_ns = self.last_ns = event.wall_ns
        self.damaged: str | None = None
        self.recorded = Counted(prices)
        self.candidate = None if candidate is None else Counted(prices, candidate)
        self._seq: int | None = None
        self._models: dict[int, str] = {}
        self._tools: dict[int, str] = {}
        self._turned_away: Counter[str] = Counter()
        self._begun_ns = event.at_ns
        self._skip = self._seen = 0
        self.root = self._add(event)

    @property
    def usage(self) -> Usage:
        """The usage of the root so far."""
        return self.root.usage or self.recorded.usage

    @property
    def spent(self) -> Spent:
        """The cost of the model calls in this log: of all attempts and runs of the tree."""
        found = Spent()
        for node in self.nodes.values():
            for spent in node.models.values():
                found.add(spent)
        return found

    def models(self) -> list[str]:
        """Return the names of the models that the tree called."""
        return sorted({name for node in self.nodes.values() for name in node.models})

    @property
    def seconds(self) -> float:
        """The time from the first event to the last, pauses included."""
        return (self.last_ns - self.started_ns) / 1_000_000_000

    def take(self, event: Event) -> str | None:
        """Take the next event; returns why the log does not fit together, where this shows it."""
        if self.damaged is not None:
            return None
        self.last_ns = max(self.last_ns, event.wall_ns)
        resumes = isinstance(event, events.RunRestored) and event.run_id == self.root.run_id
        if self._seq not in (None, event.seq - 1) and not resumes:
            self.damaged = f"event {(self._seq or 0) + 1} of the run must be next, got {event.seq}"
            return self.damaged
        goes_on = self._seq is not None and resumes
        self._seq = event.seq
        try:
            is_root = event.run_id == self.root.run_id
            self.recorded.apply(event, is_root=is_root)
            if self.candidate is not None:
                self.candidate.apply(event, is_root=is_root)
            if isinstance(event, Begins) and event.run_id in self.nodes:
                if goes_on or not is_root:
                    self.nodes[event.run_id].resume(_facts(event)[0])
            elif isinstance(event, Begins):
                self._add(event)
            self._attribute(self.nodes[event.run_id], event)
        except _DAMAGE as error:
            self.damaged = reason(error) if isinstance(error, ValidationError) else str(error)
        if self._keeps_points and isinstance(event, _POINTS):
            self._point(event)
        return self.damaged

    def caps(self, now_ns: int | None = None) -> list[Cap]:
        """Return how much of each cap of the root is used; by now, its time goes on."""
        used = self.usage
        if now_ns is not None and self.root.status is None:
            silent = max(now_ns - self.last_ns, 0) / 1e9
            used = used.model_copy(update={"seconds": used.seconds + silent})
        caps = self.root.budget.caps()
        return [Cap(name, used_of(used, name), cap) for name, cap in caps.items()]

    def shares(self) -> dict[str, float]:
        """Return how much of each cap of the root is used, as a share of it."""
        return {one.name: one.share for one in self.caps()}

    def near_misses(self) -> dict[str, float]:
        """Return the caps that a run came near and that did not stop it."""
        if self.root.trip is not None or self.root.status not in ("completed", None):
            return {}
        at = self.root.budget.warn_at
        return {name: share for name, share in self.shares().items() if share >= at}

    def _point(self, event: Event) -> None:
        self._seen += 1
        if self._seen % (self._skip + 1) and not isinstance(
            event, events.RunEnded | events.Tripped
        ):
            return
        seconds = (event.at_ns - self._begun_ns) / 1_000_000_000
        self.points.append(Point(max(seconds, 0.0), self.shares()))
        if len(self.points) > _MOST_POINTS:
            self.points = self.points[::2]
            self._skip = self._skip * 2 + 1

    def _add(self, event: Begins) -> Node:
        budget, parent, mode, tenant = _facts(event)
        node = self.nodes[event.run_id] = Node(event.run_id, budget, mode, tenant)
        if parent is not None and parent in self.nodes:
            self.nodes[parent].children.append(node)
        return node

    def _attribute(self, node: Node, event: Event) -> None:
        match event:
            case events.ModelCallAdmitted():
                node.settle_answer()
                name = self._models[event.call_id] = event.call.model or _UNNAMED
                node.models.setdefault(name, Spent()).calls += 1
            case events.ModelCallRefused():
                node.refusals[event.reason] += 1
            case events.ModelCallWithdrawn():
                if name := self._models.pop(event.call_id, ""):
                    node.models[name].calls -= 1
            case events.ModelCallSettled():
                name = self._models.pop(event.call_id, _UNNAMED)
                spent = node.models.setdefault(name, Spent())
                spent.failed += event.error is not None
                spent.tokens += 0 if event.usage is None else event.usage.total_tokens
                cost = Decimal(0) if event.cost_usd is None else Decimal(event.cost_usd)
                spent.cost_usd += cost
                node.last_cost += cost
            case events.ToolCallTurnedAway():
                self._turned_away[event.name] += 1
                node.refusals[event.reason] += 1
            case events.ToolCallsRequested():
                self._requested(node, event)
            case events.ToolCallSettled():
                name = self._tools.pop(event.call_id, "")
                if name and event.error is not None:
                    node.tools[name].failed += 1
            case events.LimitNearlyReached():
                node.warned.append(event.dimension)
            case events.FallbackStarted():
                node.fallback = f"to {event.model}, at the share of {event.dimension}"
            case events.Tripped():
                node.trip = event.trip
            case events.TripObserved():
                node.observed = event.trip
            case events.IncidentRecorded():
                node.next_step = event.next_step
                node.may_have_taken_effect = event.may_have_taken_effect
            case events.CallDelayed():
                node.delayed += 1
            case events.BudgetExtended():
                node.budget = Budget.from_json(event.budget)
            case events.HousekeepingBegan():
                node.housekeeping = "housekeeping" if event.answers_for is None else "last answer"
            case events.HousekeepingEnded():
                # It has no outcome of its own.
                node.settle_answer()
            case events.RunPaused() | events.RunResumed():
                node.status = "paused" if isinstance(event, events.RunPaused) else None
            case events.RunEnded():
                node.settle_answer()
                node.status, node.error, node.usage = event.status, event.error, event.usage
                node.stop_reason, node.finalized = event.stop_reason, event.finalized
            case _:
                pass

    def _requested(self, node: Node, event: events.ToolCallsRequested) -> None:
        part = node.last_cost / max(len(event.calls), 1)
        node.last_cost = Decimal(0)
        away, self._turned_away = self._turned_away, Counter()
        for call in event.calls:
            spent = node.tools.setdefault(call.name, Spent())
            spent.cost_usd += part
            if call.kind == "handoff":
                node.handoffs[call.name] += 1
            if call.call_id is not None:
                self._tools[call.call_id] = call.name
                spent.calls += 1
                continue
            spent.refused += 1
            if away[call.name]:
                away[call.name] -= 1
            else:
                node.refusals[str(call.reason or call.decision)] += 1


class Runs:
    """Every tree of runs in the lines of files, also while they are written.

    A run that goes on in another process has a file for each attempt: it is one run. The options
    are those of `Run`.
    """

    def __init__(self, **options: Any) -> None:
        self._options: dict[str, Any] = {"prices": PriceBook(), **options}
        self._of: dict[str, Run] = {}
        self.roots: list[Run] = []

    def take(self, file: str, line: Line) -> Problem | None:
        """Take the next line; a line that cannot be used is a problem."""
        event = read_event(line)
        if event is None or isinstance(event, Problem):
            return event
        run = self._of.get(event.run_id)
        if isinstance(event, events.RunStarted):
            within = None if event.parent_run_id is None else self._of.get(event.parent_run_id)
            run = within
        if run is None:
            if not isinstance(event, Begins):
                return Problem(line.number, "the run of this event has no start in this file.")
            try:
                run = Run(file, line.number, event, **self._options)
            except _DAMAGE as error:
                return Problem(line.number, str(error))
            self.roots.append(run)
        self._of[event.run_id] = run
        damage = run.take(event)
        if damage is None:
            return None
        return Problem(line.number, f"{damage.rstrip('.')}; the figures of its run end here.")


def read_runs(
    names: Sequence[str], *, candidate: Budget | None = None, points: bool = False
) -> tuple[list[Run], int]:
    """Read the runs of files and folders; return them, and how many lines could not be used.

    Those are named. Ends the command with 2 where a file cannot be read.
    """
    runs, number = Runs(candidate=candidate, points=points), 0
    for file in readable(names):
        problems = read_file(file, runs.take)
        complain(file, problems)
        number += len(problems)
    return runs.roots, number


def used_of(usage: Usage, dimension: str) -> int | float | Decimal:
    """Return what is used of a dimension, in the unit of its cap."""
    value: int | float | Decimal = getattr(usage, dimension.removeprefix("max_"))
    return value


def _facts(event: Begins) -> tuple[Budget, str | None, str, tuple[str, ...]]:
    """Return budget, parent, mode and tenants of a run that begins or goes on."""
    if isinstance(event, events.RunStarted):
        return Budget.from_json(event.budget), event.parent_run_id, event.mode, event.tenant
    snapshot: dict[str, Any] = event.snapshot
    return (
        Budget.from_json(snapshot.get("budget") or {}),
        snapshot.get("parent_run_id"),
        str(snapshot.get("mode")),
        tuple(snapshot.get("tenant") or ()),
    )
