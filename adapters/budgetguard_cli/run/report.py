"""The report of `budgetguard run`: limits, use, and the cost of each model."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from budgetguard_cli.run.supervisor import Findings
from budgetguard_cli.runs import used_of
from budgetguard_cli.screen import figure as short_number
from budgetguard_cli.screen import printable, table
from budgetguard_core import Budget, Outcome, Trip


class RunReport:
    """The figures of one run.

    Args:
        budget: Its caps.
        outcome: How it ended.
        findings: What the supervisor learned beside.
        exit_code: The script's own.
    """

    def __init__(
        self, budget: Budget, outcome: Outcome, findings: Findings, exit_code: int
    ) -> None:
        self._budget = budget
        self._outcome = outcome
        self._findings = findings
        self._exit_code = exit_code
        own = None
        if outcome.stop_reason is not None and outcome.violations:
            own = Trip(
                reason=outcome.stop_reason, violations=outcome.violations, run_id=outcome.run_id
            )
        self.stops = [one for one in (own, *findings.stops.values()) if one is not None]

    @property
    def saw_a_call(self) -> bool:
        """True if any call of a model was seen."""
        return self._outcome.usage.model_calls > 0 or bool(self.stops)

    def as_json(self) -> str:
        """Return everything as one JSON object; amounts are strings, so that no digit is lost."""
        profile = self._outcome.profile
        report: dict[str, Any] = {
            "run_id": self._outcome.run_id,
            "exit_code": self._exit_code,
            "profile": None if profile is None else profile.model_dump(),
            "limits": self._budget.caps(),
            "used": self._outcome.usage.model_dump(),
            "stops": [
                {"reason": str(one.reason), "detail": one.detail, "run_id": one.run_id}
                for one in self.stops
            ],
            "models": {
                name: {
                    "calls": use.calls,
                    "failed": use.failed,
                    "input_tokens": use.input_tokens,
                    "output_tokens": use.output_tokens,
                    "cost_usd": use.cost_usd,
                    "unpriced": use.unpriced,
                }
                for name, use in self._findings.models.items()
            },
            "notes": self._findings.notes,
        }
        return json.dumps(report, default=str)

    def print(self, console: Console) -> None:
        """Write it for people."""
        console.print(self._headline())
        console.print(self._limits())
        if self._findings.models:
            console.print(self._models())
        for note in self._findings.notes:
            console.print(Text(f"note: {printable(note)}"))

    def _headline(self) -> Text:
        shown = self.stops[:_MOST_STOPS]
        lines = [f"stopped: {one.reason} ({printable(one.detail)})" for one in shown]
        if len(self.stops) > _MOST_STOPS:
            lines.append(f"and {len(self.stops) - _MOST_STOPS} more")
        if not lines:
            lines = ["no limit was reached" if self.saw_a_call else _NOTHING_SEEN]
        said = f"The script ended with {self._exit_code}."
        return Text("\n".join(f"budgetguard: {line}" for line in (*lines, said)))

    def _limits(self) -> Table:
        found = table("limit", "used", "cap", title=f"run {self._outcome.run_id[:12]}")
        caps = self._budget.caps()
        for name, value in (
            *((name, used_of(self._outcome.usage, name)) for name in _SHOWN),
            *((name, None) for name in caps if name not in _SHOWN),
        ):
            cap = caps.get(name)
            found.add_row(
                name,
                "" if value is None else short_number(value),
                "none" if cap is None else short_number(cap),
            )
        for pattern, quota in self._budget.tool_quotas.items():
            found.add_row(f"tool_quotas {printable(pattern)}", "", short_number(quota))
        return found

    def _models(self) -> Table:
        found = table("model", "calls", "failed", "input", "output", "cost")
        for name, use in sorted(self._findings.models.items()):
            cost = short_number(Decimal(use.cost_usd))
            found.add_row(
                printable(name),
                short_number(use.calls),
                short_number(use.failed),
                short_number(use.input_tokens),
                short_number(use.output_tokens),
                f"{cost} and {use.unpriced} without a price" if use.unpriced else cost,
            )
        return found


_NOTHING_SEEN = (
    "no call of a model was seen. Either the script makes none, or it makes them on a way that is "
    "not covered: `budgetguard doctor script.py` tells."
)
_MOST_STOPS = 5
_SHOWN = (
    "max_iterations",
    "max_model_calls",
    "max_tool_calls",
    "max_total_tokens",
    "max_cost_usd",
    "max_seconds",
)
