"""The report of `budgetguard run`: limits, use, and the cost of each model."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from budgetguard_cli.logs import Problem, opened, read_event, read_lines
from budgetguard_cli.run.folder import ANSWERS, CALLS, TURNS, RunFolder
from budgetguard_cli.run.plug import OF_A_PROCESS
from budgetguard_cli.screen import figure as short_number
from budgetguard_cli.screen import printable, table
from budgetguard_core import Budget, Usage
from budgetguard_core.events import ModelCallAdmitted, ModelCallSettled, Tripped
from budgetguard_core.kit import SystemClock

_NOTHING_SEEN = (
    "no call of a model was seen. Either the script makes none, or it makes them on a way that is "
    "not covered: `budgetguard doctor script.py` tells."
)
_MOST_STOPS = 5
_SHOWN = ("iterations", "model_calls", "tool_calls", "total_tokens", "cost_usd", "seconds")


@dataclass(slots=True)
class ModelUse:
    """The spend on one model."""

    calls: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: Decimal = Decimal(0)
    unpriced: int = 0


class RunReport:
    """The figures of one run: of its ledger, and by model of what its processes have written.

    Args:
        folder: Of the run.
        budget: Its caps.
        exit_code: The script's own.

    Attributes:
        stops: The limits that ended the run, or a part of it.
        usage: What all processes used.
        models: The same by model.
    """

    def __init__(self, folder: RunFolder, budget: Budget, exit_code: int) -> None:
        facts = folder.facts()
        self._run_id = facts.run_id
        self._budget = budget
        self._exit_code = exit_code
        self._notes = folder.notes()
        self.models: dict[str, ModelUse] = {}
        self._estimated = 0
        whole = folder.stop()
        stops = {} if whole is None else {"": whole.model_copy(update={"run_id": self._run_id})}
        for log in sorted(folder.logs.glob("*.jsonl")):
            asked: dict[int, str] = {}
            with opened(str(log)) as file:
                for line in read_lines(file):
                    event = None if isinstance(line, Problem) else read_event(line)
                    if isinstance(event, ModelCallAdmitted):
                        asked[event.call_id] = event.call.model or "unknown"
                    elif isinstance(event, ModelCallSettled):
                        self._settled(event, asked.pop(event.call_id, "unknown"))
                    elif isinstance(event, Tripped) and event.trip.reason in OF_A_PROCESS:
                        stops.setdefault(event.trip.run_id, event.trip)
        self.stops = list(stops.values())
        seconds = (SystemClock.monotonic_ns() - facts.started_ns) / 1e9
        self.usage = self._used(folder, seconds)

    def _settled(self, event: ModelCallSettled, asked: str) -> None:
        use = self.models.setdefault(event.model or asked, ModelUse())
        use.calls += 1
        use.failed += event.error is not None
        self._estimated += event.usage is None or event.usage.estimated
        if event.usage is not None:
            use.input_tokens += event.usage.input_tokens
            use.output_tokens += event.usage.output_tokens
        if event.cost_usd is None:
            use.unpriced += 1
        else:
            use.cost_usd += Decimal(event.cost_usd)

    def _used(self, folder: RunFolder, seconds: float) -> Usage:
        with folder.ledger() as ledger:
            calls, turns, answers = map(ledger.run_usage, (CALLS, TURNS, ANSWERS))
        models = self.models.values()
        return Usage(
            iterations=turns.spent_model_calls + turns.reserved_model_calls,
            model_calls=calls.spent_model_calls
            + calls.reserved_model_calls
            + answers.spent_model_calls,
            tool_calls=calls.spent_tool_calls + calls.reserved_tool_calls,
            total_tokens=calls.spent_tokens + answers.spent_tokens,
            cost_usd=calls.spent_usd + answers.spent_usd,
            reserved_tokens=calls.reserved_tokens,
            reserved_usd=calls.reserved_usd,
            seconds=seconds,
            input_tokens=sum(one.input_tokens for one in models),
            output_tokens=sum(one.output_tokens for one in models),
            unpriced_calls=sum(one.unpriced for one in models),
            failed_calls=sum(one.failed for one in models),
            estimated_calls=self._estimated,
        )

    @property
    def saw_a_call(self) -> bool:
        """True if any call of a model was seen."""
        return self.usage.model_calls > 0 or bool(self.stops)

    def as_json(self) -> str:
        """Return everything as one JSON object; amounts are strings, so that no digit is lost."""
        profile = self._budget.profile
        report: dict[str, Any] = {
            "run_id": self._run_id,
            "exit_code": self._exit_code,
            "profile": None if profile is None else profile.model_dump(),
            "limits": self._budget.caps(),
            "used": self.usage.model_dump(),
            "stops": [
                {"reason": one.reason, "detail": one.detail, "run_id": one.run_id}
                for one in self.stops
            ],
            "models": {name: asdict(use) for name, use in self.models.items()},
            "notes": self._notes,
        }
        return json.dumps(report, default=str)

    def print(self, console: Console) -> None:
        """Write it for people."""
        console.print(self._headline())
        console.print(self._limits())
        if self.models:
            console.print(self._by_model())
        for note in self._notes:
            console.print(Text(f"note: {printable(note)}"))

    def _headline(self) -> Text:
        shown = self.stops[:_MOST_STOPS]
        lines = [f"stopped: {one.reason} ({printable(one.detail)})" for one in shown]
        if len(self.stops) > _MOST_STOPS:
            lines.append(f"and {len(self.stops) - _MOST_STOPS} more")
        if not lines:
            lines = ["no limit was reached" if self.saw_a_call else _NOTHING_SEEN]
        lines.append(f"The script ended with {self._exit_code}.")
        return Text("\n".join(f"budgetguard: {line}" for line in lines))

    def _limits(self) -> Table:
        found = table("limit", "used", "cap", title=f"run {self._run_id[:12]}")
        caps = {name.removeprefix("max_"): cap for name, cap in self._budget.caps().items()}
        for name in dict.fromkeys((*_SHOWN, *caps)):
            used = short_number(getattr(self.usage, name)) if name in _SHOWN else ""
            found.add_row(f"max_{name}", used, short_number(caps[name]) if name in caps else "none")
        for pattern, quota in self._budget.tool_quotas.items():
            found.add_row(f"tool_quotas {printable(pattern)}", "", short_number(quota))
        return found

    def _by_model(self) -> Table:
        found = table("model", "calls", "failed", "input", "output", "cost")
        for name, use in sorted(self.models.items()):
            *counts, cost, unpriced = [*map(short_number, astuple(use))]
            cost += f" and {unpriced} without a price" if use.unpriced else ""
            found.add_row(printable(name), *counts, cost)
        return found
