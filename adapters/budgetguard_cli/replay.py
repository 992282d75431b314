"""`budgetguard replay`: what a budget would have made of recorded runs."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from budgetguard_cli.lines import Line, Problem, read_lines
from budgetguard_cli.money import in_dollars
from budgetguard_cli.recordings import Reading, opened
from budgetguard_cli.terminal import printable
from budgetguard_cli.verdict import REFUSED, Amounts, Verdict, verdicts
from budgetguard_core import Budget, PriceBook
from budgetguard_core.stop import PRECEDENCE, StopReason

_SHOWN = 20
_LINES_PER_UPDATE = 64
_BREAKERS = {
    REFUSED: "tool calls refused",
    "call_delayed": "calls delayed",
    "tool_call_turned_away": "tool calls turned away",
    "circuit_breaker_changed": "circuit breakers changed",
    "tool_mix_unusual": "tool mix told",
}


@dataclass
class Tally:
    """What is reported of one file, or of all."""

    runs: int = 0
    succeeded: int = 0
    runaways: int = 0
    stopped: Counter[StopReason] = field(default_factory=lambda: Counter())
    cut: int = 0
    """Successful runs that would have been stopped."""
    runaways_stopped: int = 0
    untimed: int = 0
    unreported_calls: int = 0
    recorded: Amounts = field(default_factory=Amounts)
    saved: Amounts = field(default_factory=Amounts)
    breakers: Counter[str] = field(default_factory=lambda: Counter())
    """What breakers would have done, by the names of the events; and calls refused."""
    problems: int = 0

    def add(self, verdict: Verdict) -> None:
        """Count one run."""
        self.runs += 1
        self.succeeded += verdict.succeeded is True
        self.runaways += verdict.runaway
        self.untimed += not verdict.timed
        self.unreported_calls += verdict.unreported_calls
        self.recorded += verdict.recorded
        self.breakers += Counter(verdict.breakers)
        if verdict.trip is not None:
            self.stopped[verdict.trip.reason] += 1
            self.cut += verdict.succeeded is True
            self.runaways_stopped += verdict.runaway
            self.saved += verdict.saved

    def include(self, other: Tally) -> None:
        """Add another file's figures."""
        self.runs += other.runs
        self.succeeded += other.succeeded
        self.runaways += other.runaways
        self.stopped += other.stopped
        self.cut += other.cut
        self.runaways_stopped += other.runaways_stopped
        self.untimed += other.untimed
        self.unreported_calls += other.unreported_calls
        self.recorded += other.recorded
        self.breakers += other.breakers
        self.saved += other.saved
        self.problems += other.problems

    def by_reason(self) -> dict[str, int]:
        """Return the stopped runs by reason, in the order of precedence."""
        return {
            str(reason): self.stopped[reason]
            for reason in sorted(self.stopped, key=PRECEDENCE.__getitem__)
        }


class Report(Protocol):
    """How the findings are shown."""

    def run(self, file: str, verdict: Verdict) -> None:
        """Take one run."""
        ...

    def file(self, file: str, tally: Tally) -> None:
        """Take the figures of one file that has been read."""
        ...

    def all(self, files: int, tally: Tally) -> None:
        """Take the figures of all files."""
        ...


class TextReport:
    """For people. Successful runs that would be cut are named, the first 20 of each file."""

    def __init__(self, console: Console, budget: Budget) -> None:
        self._console = console
        self._budget = budget
        self._cut: list[str] = []
        given = [*budget.caps().items(), *budget.tool_quotas.items()]
        caps = ", ".join(f"{printable(name)}={cap}" for name, cap in given)
        detection = "off" if budget.loop_detection is None else "on"
        self._say(f"Budget: {caps or 'no caps'}; loop detection {detection}.")

    def run(self, file: str, verdict: Verdict) -> None:
        """Remember a successful run that would be cut."""
        del file
        if verdict.succeeded and verdict.trip is not None and len(self._cut) < _SHOWN:
            self._cut.append(
                f"line {verdict.line}, run {printable(verdict.run_id)}: {verdict.trip.detail}"
            )

    def file(self, file: str, tally: Tally) -> None:
        """Show one file."""
        self._show(printable(file), tally)
        for line in self._cut:
            self._say(f"  cut: {line}")
        if tally.cut > len(self._cut):
            self._say(f"  cut: {tally.cut - len(self._cut)} more, see --json")
        self._cut.clear()

    def all(self, files: int, tally: Tally) -> None:
        """Show the sum, where there is more than one file."""
        if files > 1:
            self._show(f"All {files} files", tally)
        for note in notes(tally, self._budget):
            self._say(f"Note: {note}")

    def _show(self, title: str, tally: Tally) -> None:
        recorded, saved = tally.recorded, tally.saved
        reasons = ", ".join(f"{reason} {count}" for reason, count in tally.by_reason().items())
        rows = [
            ("runs", f"{tally.runs:,}"),
            ("stopped", f"{tally.stopped.total():,}" + (f" ({reasons})" if reasons else "")),
            ("successful runs cut", f"{tally.cut:,} of {tally.succeeded:,}"),
            ("model calls saved", f"{saved.model_calls:,} of {recorded.model_calls:,}"),
            ("tool calls saved", f"{saved.tool_calls:,} of {recorded.tool_calls:,}"),
            ("tokens saved", f"{saved.tokens:,} of {recorded.tokens:,}"),
            ("dollars saved", f"{_dollars(saved)} of {_dollars(recorded)}"),
        ]
        if tally.runaways:
            rows.insert(
                3, ("runaways stopped", f"{tally.runaways_stopped:,} of {tally.runaways:,}")
            )
        for name, one, whole in (
            ("usage estimated", saved.estimated_calls, recorded.estimated_calls),
            ("price unknown", saved.unpriced_calls, recorded.unpriced_calls),
        ):
            if whole:
                rows.append((name, f"{one:,} of {whole:,} calls"))
        rows += [
            (what, f"{tally.breakers[name]:,}")
            for name, what in _BREAKERS.items()
            if tally.breakers[name]
        ]
        if tally.problems:
            rows.append(("lines not read", f"{tally.problems:,}"))
        self._say(f"\n{title}")
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column()
        for name, value in rows:
            table.add_row(Text(f"  {name}"), Text(value))
        self._console.print(table)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False)


class JsonReport:
    """For programs: JSON Lines. Each stopped run, then its file, and at the end all files."""

    def __init__(self, out: IO[str], budget: Budget) -> None:
        self._out = out
        self._budget = budget

    def run(self, file: str, verdict: Verdict) -> None:
        """Write a run that would be stopped."""
        if verdict.trip is not None:
            self._write(
                type="stopped_run",
                file=file,
                line=verdict.line,
                run_id=verdict.run_id,
                reason=str(verdict.trip.reason),
                detail=verdict.trip.detail,
                succeeded=verdict.succeeded,
                runaway=verdict.runaway,
                recorded=_plain(verdict.recorded),
                saved=_plain(verdict.saved),
            )

    def file(self, file: str, tally: Tally) -> None:
        """Write the figures of one file."""
        self._write(type="file", file=file, **self._figures(tally))

    def all(self, files: int, tally: Tally) -> None:
        """Write the sum."""
        self._write(
            type="all",
            files=files,
            budget=self._budget.to_json(),
            **self._figures(tally),
            notes=notes(tally, self._budget),
        )

    def _figures(self, tally: Tally) -> dict[str, Any]:
        return {
            "runs": tally.runs,
            "succeeded": tally.succeeded,
            "runaways": tally.runaways,
            "stopped": tally.by_reason(),
            "successful_runs_cut": tally.cut,
            "runaways_stopped": tally.runaways_stopped,
            "recorded": _plain(tally.recorded),
            "saved": _plain(tally.saved),
            "breakers": dict(tally.breakers),
            "unreported_calls": tally.unreported_calls,
            "lines_not_read": tally.problems,
        }

    def _write(self, **record: Any) -> None:
        print(json.dumps(record), file=self._out)


def notes(tally: Tally, budget: Budget) -> list[str]:
    """Say what the figures do not hold."""
    found: list[str] = []
    recorded = tally.recorded
    if recorded.estimated_calls:
        found.append(
            f"{recorded.estimated_calls:,} of {recorded.model_calls:,} model calls have no "
            "recorded usage. Their tokens, and the dollars that follow, are estimated from the "
            "recorded texts alone, without system prompts and tool definitions."
        )
    if recorded.unpriced_calls:
        found.append(
            f"{recorded.unpriced_calls:,} model calls have neither a recorded cost nor a known "
            "price. They are not in the dollars."
        )
    if tally.unreported_calls:
        found.append(
            f"{tally.unreported_calls:,} model calls never reported back. What they used is in "
            "no figure."
        )
    if budget.max_seconds is not None and tally.untimed:
        found.append(
            f"max_seconds was not judged for {tally.untimed:,} runs: their recordings have no "
            "times."
        )
    if (budget.velocity or budget.rate_limits) and tally.untimed:
        found.append(
            f"velocity and rate_limits were not judged for {tally.untimed:,} runs: their "
            "recordings have no times."
        )
    return found


def replay_files(
    files: Sequence[str], budget: Budget, report: Report, errors: Console, *, progress: bool
) -> bool:
    """Judge every run of every file, and report.

    Returns:
        Whether every line could be read.

    Raises:
        Unreadable: A file went away since `readable` looked at it.
    """
    prices = PriceBook()
    whole = Tally()
    reading = Reading(errors)
    for file in files:
        tally = Tally()
        before = reading.problems
        with opened(file) as raw, _watched(raw, printable(file), errors, progress) as lines:
            for verdict in reading.without_problems(file, verdicts(lines, budget, prices)):
                tally.add(verdict)
                report.run(file, verdict)
        tally.problems = reading.problems - before
        report.file(file, tally)
        whole.include(tally)
    report.all(len(files), whole)
    return not whole.problems


@contextmanager
def _watched(
    raw: io.BufferedReader, shown: str, errors: Console, progress: bool
) -> Generator[Iterator[Line | Problem]]:
    if not progress:
        yield read_lines(raw)
        return
    size = os.fstat(raw.fileno()).st_size
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        name = shown if len(shown) <= 30 else f"...{shown[-27:]}"
        task = bar.add_task(name, total=size or None)

        def watched() -> Iterator[Line | Problem]:
            for number, line in enumerate(read_lines(raw)):
                if size and number % _LINES_PER_UPDATE == 0:
                    bar.update(task, completed=raw.tell())
                yield line

        yield watched()


def _dollars(amounts: Amounts) -> str:
    # Nothing priced is not the same as nothing spent.
    if amounts.unpriced_calls and amounts.unpriced_calls == amounts.model_calls:
        return "unknown"
    return ("at least " if amounts.unpriced_calls else "") + in_dollars(amounts.cost_usd)


def _plain(amounts: Amounts) -> dict[str, int | str]:
    return {**asdict(amounts), "cost_usd": str(amounts.cost_usd)}
