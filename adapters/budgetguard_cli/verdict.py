"""Recorded runs under a candidate budget: what it would have stopped, and what that saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from budgetguard_cli.lines import Line, Problem
from budgetguard_cli.recordings import NO_START, read_event, reason
from budgetguard_cli.trajectories import Trajectory
from budgetguard_core import Budget, BudgetGuardError, Event, ModelCall, PriceBook, Trip, Usage
from budgetguard_core.budget import BREAKERS
from budgetguard_core.events import (
    CallDelayed,
    CircuitBreakerChanged,
    ModelCallRefused,
    RunEnded,
    RunRestored,
    RunStarted,
    ToolCallsRequested,
    ToolCallTurnedAway,
    ToolMixUnusual,
)
from budgetguard_core.outcome import Status
from budgetguard_core.replay import Replay
from budgetguard_core.stop import StopReason

_OPEN_RUNS = 1024
_UNBOUNDED = Budget(loop_detection=None)
# What a forged or damaged record can raise on its way through the engine.
_DAMAGE = (BudgetGuardError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """What a run did, or did not have to do."""

    model_calls: int = 0
    tool_calls: int = 0
    tokens: int = 0
    """Prompt plus completion."""
    cost_usd: Decimal = Decimal(0)
    """US dollars of the calls whose cost was recorded or whose model has a known price."""
    estimated_calls: int = 0
    """Model calls without recorded usage: their tokens and dollars are estimates."""
    unpriced_calls: int = 0
    """Model calls of unknown price: they are not in `cost_usd`."""

    @classmethod
    def of(cls, usage: Usage) -> Self:
        """Take what is compared out of a guard's usage."""
        return cls(
            model_calls=usage.model_calls,
            tool_calls=usage.tool_calls,
            tokens=usage.total_tokens,
            cost_usd=usage.cost_usd,
            estimated_calls=usage.estimated_calls,
            unpriced_calls=usage.unpriced_calls,
        )

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in _FIELDS})

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in _FIELDS})

    def at_least(self, other: Amounts) -> Amounts:
        """Take the greater of each field."""
        return Amounts(
            **{f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in _FIELDS}
        )


_FIELDS = fields(Amounts)
_OF_BREAKERS = (CallDelayed, ToolCallTurnedAway, CircuitBreakerChanged, ToolMixUnusual)
REFUSED = "tool_call_refused"
"""The name under which calls are counted that a candidate with quotas would have refused."""
_NOTHING = Amounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One recorded run, and what the candidate budget would have made of it."""

    line: int
    """Where the run was found: a trajectory's line, or the line of a log that starts it."""
    run_id: str
    succeeded: bool | None
    """Whether the run ended well as recorded; None when the recording does not say."""
    runaway: bool
    """Whether the recording itself ended at a cap."""
    timed: bool
    """Whether the recording has times, so that `max_seconds` can be judged."""
    trip: Trip | None
    """Why the candidate would have stopped it."""
    recorded: Amounts
    """What this leg of the run did."""
    counted: Usage
    """What caps had counted at its end: of a run that had paused, in earlier legs too."""
    saved: Amounts
    unreported_calls: int
    """Model calls that never reported back; what they used is in no figure."""
    went_on: bool
    """Whether it is a later leg of its run, which another process had begun."""
    tools: dict[str, int]
    """Tool bodies that the run started as recorded, earlier legs included, by name (the first
    1,024 names)."""
    breakers: dict[str, int]
    """What the candidate's breakers would have done, by the names of the events."""
    budget: Budget
    """The budget that it ran under as recorded."""
    status: Status | None
    """How it ended as recorded; None when the recording does not say."""
    stop_reason: StopReason | None
    """The limit that stopped it as recorded."""


def verdicts(
    lines: Iterator[Line | Problem], budget: Budget | None, prices: PriceBook
) -> Iterator[Verdict | Problem]:
    """Judge every run of a file: trajectories, one a line, or BudgetGuard's own event log.

    The first line that can be read tells which of the two it is.

    Args:
        lines: The lines of the file.
        budget: The candidate; None to take the runs as they are.
        prices: Where prices come from.
    """
    for line in lines:
        if isinstance(line, Problem):
            yield line
            continue
        first = _first_object(line)
        if isinstance(first, Problem):
            yield first
            continue
        again = _put_back(line, lines)
        if "event" in first:
            yield from _Log(budget, prices).verdicts(again)
        else:
            yield from _trajectories(again, budget, prices)
        return


def whole_runs(found: Iterable[Verdict]) -> Iterator[Verdict]:
    """Give each run once: by its last leg, whose counters hold what the legs before it did.

    Only of a leg that did not come to an end another is looked for.
    """
    waiting: dict[str, Verdict] = {}
    for one in found:
        before = waiting.pop(one.run_id, None)
        if before is not None and not one.went_on:
            yield before  # another run of that name
        if one.timed and one.status in (None, "paused", "failed"):
            waiting[one.run_id] = one
        else:
            yield one
    yield from waiting.values()


def _put_back(line: Line, lines: Iterator[Line | Problem]) -> Iterator[Line | Problem]:
    yield line
    yield from lines


def _first_object(line: Line) -> dict[str, Any] | Problem:
    try:
        return _OBJECT.validate_json(line.data.strip())
    except ValidationError as error:
        return Problem(line.number, reason(error))


_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


class _Run:
    """One run, told to two guards: one that bounds nothing, and one under the candidate."""

    def __init__(self, line: int, budget: Budget | None, prices: PriceBook) -> None:
        self.line = line
        self.budget = Budget()
        self.members: list[str] = []
        self.seq: int | None = None
        self.damaged = False
        self.ended: RunEnded | None = None
        self._told: Counter[str] = Counter()
        self._candidate = None
        self._counts_refusals = False
        if budget is not None:
            self._counts_refusals = bool(budget.tool_quotas)
            told = self._counts_refusals or any(getattr(budget, name) for name in BREAKERS)
            sinks = [self._count] if told else []
            self._candidate = Replay(budget, price_book=prices, sinks=sinks)
        self._recorded = Replay(_UNBOUNDED, price_book=prices)
        self._before = _NOTHING
        self._went_on = False

    def _count(self, event: Event) -> None:
        if isinstance(event, _OF_BREAKERS):
            self._told[event.event] += 1
        if isinstance(event, ToolCallsRequested) and self._counts_refusals:
            self._told[REFUSED] += sum(call.decision == "refuse" for call in event.calls)

    def tell(self, event: Event) -> None:
        if self._candidate is not None:
            self._candidate.apply(event)
        if isinstance(event, ModelCallRefused):
            return  # no call was made
        if isinstance(event, ToolCallsRequested):
            started = tuple(call for call in event.calls if call.call_id is not None)
            event = event.model_copy(update={"calls": started})
        self._recorded.apply(event)
        if isinstance(event, RunRestored):
            # The leg before this one has been judged by itself.
            leg = self._recorded.end()
            self._before = Amounts.of(leg.usage)
            self._went_on = True
            self.budget = Budget.from_json(event.snapshot.get("budget") or {})
        elif isinstance(event, RunStarted) and event.run_id == self.members[0]:
            self.budget = Budget.from_json(event.budget)

    def verdict(self, *, succeeded: bool | None, runaway: bool, timed: bool) -> Verdict:
        recorded = self._recorded.end()
        candidate = None if self._candidate is None else self._candidate.end()
        ended, used = self.ended, recorded.usage
        stop = None if ended is None or ended.status != "terminated" else ended.stop_reason
        saved = _NOTHING
        if candidate is not None and candidate.trip is not None:
            # A candidate that allows more than the recorded budget goes on where the log ends.
            saved = (Amounts.of(recorded.usage) - Amounts.of(candidate.usage)).at_least(_NOTHING)
        return Verdict(
            line=self.line,
            run_id=recorded.run_id,
            succeeded=succeeded,
            runaway=runaway,
            timed=timed,
            trip=None if candidate is None else candidate.trip,
            recorded=Amounts.of(used) - self._before,
            counted=used.model_copy(
                update={"seconds": (used if ended is None else ended.usage).seconds}
            ),
            saved=saved,
            unreported_calls=sum(isinstance(t.call, ModelCall) for t in recorded.open_calls()),
            went_on=self._went_on,
            tools=recorded.tool_counts,
            breakers=dict(self._told),
            budget=self.budget,
            status=None if ended is None else ended.status,
            stop_reason=None if stop is None else StopReason(stop),
        )


def _trajectories(
    lines: Iterator[Line | Problem], budget: Budget | None, prices: PriceBook
) -> Iterator[Verdict | Problem]:
    # Without times everything is at once: there is no pace to judge.
    if budget is not None:
        budget = budget.model_copy(update={"velocity": None, "rate_limits": {}})
    for line in lines:
        if isinstance(line, Problem):
            yield line
            continue
        try:
            trajectory = Trajectory.model_validate_json(line.data.strip())
            run = _Run(line.number, budget, prices)
            run.members.append(trajectory.run_id)
            for event in trajectory.events(budget or _UNBOUNDED, prices):
                run.tell(event)
            yield run.verdict(succeeded=trajectory.success, runaway=trajectory.runaway, timed=False)
        except ValidationError as error:
            yield Problem(line.number, reason(error))
        except _DAMAGE as error:
            yield Problem(line.number, str(error))


class _Log:
    """Event logs: several runs in one file, one after the other or interleaved."""

    def __init__(self, budget: Budget | None, prices: PriceBook) -> None:
        self._budget = budget
        self._prices = prices
        # Every run by its own id, sub-agents by the same object; the least recent first.
        self._runs: dict[str, _Run] = {}
        self._roots: dict[str, _Run] = {}

    def verdicts(self, lines: Iterator[Line | Problem]) -> Iterator[Verdict | Problem]:
        for line in lines:
            if isinstance(line, Problem):
                yield line
                continue
            event = read_event(line)
            if isinstance(event, Problem):
                yield event
            elif event is not None:
                yield from self._take(line.number, event)
        while self._roots:
            yield from self._close(next(iter(self._roots)))

    def _take(self, line: int, event: Event) -> Iterator[Verdict | Problem]:
        run_id = event.run_id
        if isinstance(event, RunRestored | RunStarted):
            parent = event.parent_run_id if isinstance(event, RunStarted) else None
            if parent is not None and parent in self._runs:
                self._runs[run_id] = self._runs[parent]
                self._runs[parent].members.append(run_id)
            else:
                if run_id in self._runs:
                    yield from self._close(self._runs[run_id].members[0])
                if len(self._roots) >= _OPEN_RUNS:
                    yield from self._close(next(iter(self._roots)))
                run = self._runs[run_id] = _Run(line, self._budget, self._prices)
                run.members.append(run_id)
                event = _enforced(event)
        elif run_id not in self._runs:
            yield Problem(line, NO_START)
            return
        run = self._runs[run_id]
        root = run.members[0]
        self._roots[root] = self._roots.pop(root, run)
        if run.damaged:
            return
        if run.seq is not None and event.seq != run.seq + 1:
            run.damaged = True
            yield Problem(
                line,
                f"event {run.seq + 1} of the run must be next, got event {event.seq}; "
                "the run is left out.",
            )
            return
        run.seq = event.seq
        if isinstance(event, RunEnded) and run_id == root:
            run.ended = event
        try:
            run.tell(event)
        except _DAMAGE as error:
            run.damaged = True
            why = reason(error) if isinstance(error, ValidationError) else str(error)
            yield Problem(line, f"{why} The run is left out.")

    def _close(self, root: str) -> Iterator[Verdict]:
        run = self._roots.pop(root)
        for member in run.members:
            if self._runs.get(member) is run:
                del self._runs[member]
        if not run.damaged:
            yield self._verdict(run)

    def _verdict(self, run: _Run) -> Verdict:
        ended = run.ended
        return run.verdict(
            succeeded=None if ended is None else ended.status == "completed",
            runaway=ended is not None and ended.status == "terminated",
            timed=True,
        )


def _enforced(event: RunStarted | RunRestored) -> RunStarted | RunRestored:
    """Judge a run that was only observed as one that is bounded."""
    if isinstance(event, RunStarted):
        return event.model_copy(update={"mode": "enforce"})
    snapshot = {**event.snapshot, "mode": "enforce", "trip": None, "observed": None}
    return event.model_copy(update={"snapshot": snapshot})
