"""The report of `budgetguard run`: limits, use, and the cost of each model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from budgetguard_cli.logs import read_file
from budgetguard_cli.run.folder import ANSWERS, CALLS, OF_A_PROCESS, TURNS, RunFolder
from budgetguard_cli.runs import Runs, Spent
from budgetguard_cli.screen import counted, figure, printable, table
from budgetguard_core import Budget, Usage
from budgetguard_core.kit import SystemClock

_NOTHING_SEEN = (
    "no call of a model was seen. Either the script makes none, or it makes them on a way that is "
    "not covered: `budgetguard doctor script.py` tells."
)
_MOST_STOPS = 5
_SHOWN = ("iterations", "model_calls", "tool_calls", "total_tokens", "cost_usd", "seconds")


class RunReport:
    """The figures of one run: of its ledger, and by model of what its processes have written."""

    def __init__(self, folder: RunFolder, budget: Budget, exit_code: int) -> None:
        facts = folder.facts()
        self._run_id, self._budget, self._exit_code = facts.run_id, budget, exit_code
        self._notes = folder.notes()
        self.models: dict[str, Spent] = {}
        whole = folder.stop()
        stops = {} if whole is None else {"": whole.model_copy(update={"run_id": self._run_id})}
        runs = Runs()
        for log in sorted(folder.logs.glob("*.jsonl")):
            read_file(str(log), runs.take)
        for node in (node for run in runs.roots for node in run.nodes.values()):
            if node.trip is not None and node.trip.reason in OF_A_PROCESS:
                stops.setdefault(node.trip.run_id, node.trip)
            for name, spent in node.models.items():
                self.models.setdefault(name, Spent()).add(spent)
        self.stops = list(stops.values())
        """The limits that ended the run, or a part of it."""
        with folder.ledger() as ledger:
            calls, turns, answers = map(ledger.run_usage, (CALLS, TURNS, ANSWERS))
        made = [one.spent_model_calls + one.reserved_model_calls for one in (calls, answers, turns)]
        exact = {
            "iterations": made[2],
            "model_calls": made[0] + made[1],
            "tool_calls": calls.spent_tool_calls + calls.reserved_tool_calls,
            "total_tokens": calls.spent_tokens + answers.spent_tokens,
            "cost_usd": calls.spent_usd + answers.spent_usd,
            "reserved_tokens": calls.reserved_tokens,
            "reserved_usd": calls.reserved_usd,
            "seconds": (SystemClock.monotonic_ns() - facts.started_ns) / 1e9,
        }
        written = sum((run.recorded.usage for run in runs.roots), Usage())
        self.usage = written.model_copy(update=exact)

    @property
    def saw_a_call(self) -> bool:
        """True if any call of a model was seen."""
        return self.usage.model_calls > 0 or bool(self.stops)

    def plain(self) -> dict[str, Any]:
        """Return it for machines."""
        profile = self._budget.profile
        return {
            "run_id": self._run_id,
            "exit_code": self._exit_code,
            "profile": None if profile is None else profile.model_dump(),
            "limits": self._budget.caps(),
            "used": self.usage.model_dump(),
            "stops": [one.model_dump(include={"reason", "detail", "run_id"}) for one in self.stops],
            "models": {name: asdict(spent) for name, spent in self.models.items()},
            "notes": self._notes,
        }

    def parts(self) -> list[RenderableType]:
        """Return it for people, part by part."""
        lines = [f"stopped: {one.reason} ({printable(one.detail)})" for one in self.stops]
        lines[_MOST_STOPS:] = [f"and {len(lines) - _MOST_STOPS} more"] * (len(lines) > _MOST_STOPS)
        lines = lines or ["no limit was reached" if self.saw_a_call else _NOTHING_SEEN]
        lines.append(f"The script ended with {self._exit_code}.")
        limits = table("limit", "used", "cap", title=f"run {self._run_id[:12]}")
        caps = {name.removeprefix("max_"): cap for name, cap in self._budget.caps().items()}
        for name in dict.fromkeys((*_SHOWN, *caps)):
            used = figure(getattr(self.usage, name)) if name in _SHOWN else ""
            limits.add_row(f"max_{name}", used, figure(caps[name]) if name in caps else "none")
        for pattern, quota in self._budget.tool_quotas.items():
            limits.add_row(f"tool_quotas {printable(pattern)}", "", figure(quota))
        models = table("model", "calls", "failed", "tokens", "cost")
        for name, one in sorted(self.models.items()):
            counts = (one.calls, one.failed, one.tokens)
            models.add_row(printable(name), *map(figure, counts), figure(one.cost_usd))
        notes = [f"note: {printable(note)}" for note in self._notes]
        if self.usage.unpriced_calls:
            notes.insert(0, f"{counted(self.usage.unpriced_calls, 'call')} without a price")
        return [
            *(Text(f"budgetguard: {line}") for line in lines),
            limits,
            *([models] if self.models else []),
            *map(Text, notes),
        ]
