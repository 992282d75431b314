"""`budgetguard watch`: every run on this machine, live, with a bar for each cap."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from budgetguard_cli.logs import Line, Problem, by_attempt, is_there, read_lines
from budgetguard_cli.runs import Run, Runs
from budgetguard_cli.screen import cell, counted, figure, printable, refuse, say, write_json
from budgetguard_cli.show import log_folder, plain
from budgetguard_core.kit import SystemClock

_MOST_RUNS = 12
_BAR_WIDTH = 24
_SILENT_S = 30
_NS = 1_000_000_000


def watch(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LOG",
            help="Event logs that are being written, or folders of them; the folder that "
            "BUDGETGUARD_LOG names if left out.",
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Look once: one JSON object for each run.")
    ] = False,
) -> None:
    """Watch runs live: a bar for each cap.

    Reads logs that are being written. Ctrl-C ends it.

    Example: BUDGETGUARD_LOG=logs budgetguard watch

    Ends with 0, and with 2 when there is nothing to watch.
    """
    folder = log_folder()
    named = logs or ([folder] if folder else [])
    if not named:
        refuse("nothing to watch. Name logs or a folder, or set BUDGETGUARD_LOG.")
    for name in named:
        if not is_there(name) and name != folder:
            refuse(f"{printable(name)}: No such file or folder. Name one that exists.")
    view = _Logs([Path(name) for name in named])
    if as_json:
        view.look()
        write_json(*map(plain, view.shown()))
    elif once:
        say(view.render())
    else:
        with suppress(KeyboardInterrupt), Live(view.render(), auto_refresh=False) as live:
            never = threading.Event()
            while not never.wait(interval):
                live.update(view.render(), refresh=True)


@dataclass
class _Tail:
    """A log that grows; only whole lines are read."""

    path: Path
    runs: Runs
    offset: int = 0
    number: int = 0
    problems: int = 0
    """Lines that could not be read."""
    unreadable: str = ""
    """Why the file cannot be opened; empty where it can, or went away."""

    def read(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                for line in read_lines(file, self.number):
                    if isinstance(line, Line) and line.last:
                        break
                    name = str(self.path)
                    problem = line if isinstance(line, Problem) else self.runs.take(name, line)
                    self.problems += problem is not None
                    self.offset, self.number = file.tell(), line[0]
            self.unreadable = ""
        except FileNotFoundError:
            return  # it went away: what it said stays
        except OSError as error:
            self.unreadable = error.strerror or type(error).__name__


@dataclass
class _Logs:
    """All logs, and all runs in them."""

    paths: Sequence[Path]
    tails: dict[Path, _Tail] = field(default_factory=lambda: dict[Path, _Tail]())
    known: Runs = field(default_factory=lambda: Runs())
    now_ns: int = 0

    def look(self) -> None:
        self.now_ns = SystemClock.wall_ns()
        for path in self.paths:
            for log in sorted(path.glob("*.jsonl"), key=by_attempt) if path.is_dir() else [path]:
                if log not in self.tails:
                    self.tails[log] = _Tail(log, self.known)
        for tail in self.tails.values():
            tail.read()

    def shown(self) -> list[Run]:
        """Return the runs that go on, the longest first, then those that have ended."""
        return sorted(
            self.known.roots,
            key=lambda run: (0, run.started_ns) if _goes_on(run) else (1, -run.last_ns),
        )

    def render(self) -> Group:
        """Look, and return the view."""
        self.look()
        runs = self.shown()
        going = sum(map(_goes_on, runs))
        spent = sum((run.spent.cost_usd for run in runs), Decimal(0))
        ended = f"{len(runs) - going:,} ended, {figure(spent)} spent"
        parts: list[Any] = [Text(f"{going:,} going on, {ended}", "bold")]
        parts += [_run(run, self.now_ns) for run in runs[:_MOST_RUNS]]
        if len(runs) > _MOST_RUNS:
            parts.append(Text(f"and {len(runs) - _MOST_RUNS:,} more"))
        if not runs:
            parts.append(Text("no run yet"))
        for log, tail in self.tails.items():
            unread = f"{counted(tail.problems, 'line')} could not be read" if tail.problems else ""
            for problem in filter(None, (unread, tail.unreadable)):
                parts.append(cell(f"{log}: {problem}", "red"))
        return Group(*parts)


def _goes_on(run: Run) -> bool:
    return run.root.status in (None, "paused")


def _run(run: Run, now_ns: int) -> Group:
    root = run.root
    labels = "  ".join(filter(None, (root.profile, *root.tenant)))
    styles = {"terminated": "red", "failed": "red", None: "cyan"}
    title = Text.assemble(
        (printable(root.run_id)[:40], "bold"),
        (f"  {_state(run, now_ns)}  ", styles.get(root.status, "green")),
        (printable(labels), "dim"),
    )
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=18, no_wrap=True)
    table.add_column(max_width=_BAR_WIDTH)
    table.add_column(no_wrap=True)
    for one in run.caps(now_ns):
        full = one.share >= 1
        style = "red" if full else "yellow" if one.share >= root.budget.warn_at else "green"
        done = min(one.share, 1.0)
        bar = ProgressBar(total=1.0, completed=done, complete_style=style, finished_style=style)
        table.add_row(Text(one.name), bar, Text(f"{one.share:4.0%}  {one}"))
    return Group(title, table)


def _state(run: Run, now_ns: int) -> str:
    root = run.root
    if root.status is None:
        silent = (now_ns - run.last_ns) / _NS
        return f"silent for {silent:,.0f} s" if silent > _SILENT_S else "goes on"
    return root.ending
