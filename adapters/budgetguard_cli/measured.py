"""The recorded runs of one profile, and what is known of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from budgetguard_cli.verdict import Verdict
from budgetguard_core import Budget
from budgetguard_core.profiles.calibration import Figure
from budgetguard_core.stop import StopReason


@dataclass
class Measured:
    """The runs of one profile."""

    runs: int = 0
    stopped: Counter[str] = field(default_factory=lambda: Counter())
    failed: int = 0
    """Runs that an exception left, that somebody aborted, that wait, or that are labelled as not
    healthy."""
    unfinished: int = 0
    """Runs whose log breaks off: they go on, or their process was killed."""
    labelled: dict[str, list[Figure]] = field(default_factory=lambda: dict[str, list[Figure]]())
    unlabelled: dict[str, list[Figure]] = field(default_factory=lambda: dict[str, list[Figure]]())
    budget: Budget | None = None
    """The budget of the last run."""
    estimated: int = 0
    """Runs whose tokens are estimates in part."""

    def add(self, verdict: Verdict, *, labelled: bool) -> None:
        """Take in one run."""
        self.runs += 1
        if verdict.budget.caps():
            self.budget = verdict.budget
        if verdict.stop_reason is StopReason.ABORTED:
            self.failed += 1
            return
        if verdict.stop_reason is not None or verdict.runaway:
            # It only repeats the cap that ended it.
            self.stopped[str(verdict.stop_reason or "max_steps")] += 1
            return
        if verdict.timed and verdict.status is None:
            # What it needed in all is not known: it would only pull the figures down.
            self.unfinished += 1
            return
        known = verdict.status is None or labelled
        if verdict.succeeded is False or verdict.status in ("failed", "paused"):
            self.failed += 1
            return
        healthy = known and verdict.succeeded is True
        kept = self.labelled if healthy else self.unlabelled
        self.estimated += verdict.recorded.estimated_calls > 0
        for name, figure in _figures(verdict):
            kept.setdefault(name, []).append(figure)

    @property
    def are_labelled(self) -> bool:
        """Whether the figures are those of runs that are known to be healthy."""
        return bool(self.labelled)

    @property
    def figures(self) -> dict[str, list[Figure]]:
        """The figures to stand on: of runs known to be healthy, where there are any."""
        return self.labelled or self.unlabelled

    @property
    def usable(self) -> int:
        """How many runs the figures are of."""
        return len(self.figures.get("max_model_calls", ()))


def _figures(verdict: Verdict) -> Iterator[tuple[str, Figure]]:
    used = verdict.counted
    yield "max_iterations", used.iterations
    yield "max_model_calls", used.model_calls
    yield "max_tool_calls", used.tool_calls
    yield "max_total_tokens", used.total_tokens
    if verdict.timed:
        yield "max_seconds", used.seconds
    if not used.unpriced_calls:
        yield "max_cost_usd", used.cost_usd
