"""`budgetguard watch`: every run on this machine, live, with a bar for each cap."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from budgetguard_cli.logs import LONGEST_LINE, Line, by_attempt, is_there
from budgetguard_cli.runs import Run, Runs, used_of
from budgetguard_cli.screen import cell, counted, figure, printable, refuse, say, write_json
from budgetguard_cli.show import log_folder, plain
from budgetguard_core.kit import SystemClock

_MOST_RUNS = 12
_BAR_WIDTH = 24
_SILENT_S = 30
_CHUNK = 2**20
_NS = 1_000_000_000


def watch(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LOG",
            help="Event logs that are being written, or folders of them; the folder that "
            "BUDGETGUARD_LOG names if left out.",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --once: one JSON object for each run.")
    ] = False,
) -> None:
    """Watch runs live: a bar for each cap.

    Reads logs that are being written. Ctrl-C ends it.

    Example: BUDGETGUARD_LOG=logs budgetguard watch

    Ends with 0, and with 2 when there is nothing to watch.
    """
    if as_json and not once:
        refuse("--json needs --once: a live view is for people. Give both.")
    named = logs or [folder for folder in (log_folder(),) if folder is not None]
    if not named:
        refuse("nothing to watch. Name logs or a folder, or set BUDGETGUARD_LOG.")
    for name in named:
        if not is_there(name) and name != log_folder():
            refuse(f"{printable(name)}: No such file or folder. Name one that exists.")
    view = _Logs([Path(name) for name in named])
    if once:
        view.look()
        if as_json:
            write_json(*map(plain, view.shown()))
        else:
            say(view.render())
        return
    never = threading.Event()
    try:
        with Live(view.refreshed(), console=Console(), auto_refresh=False) as live:
            while not never.wait(interval):
                live.update(view.refreshed(), refresh=True)
    except KeyboardInterrupt:
        return


@dataclass
class _Tail:
    """A log that grows; only whole lines are read."""

    path: Path
    runs: Runs
    offset: int = 0
    number: int = 0
    rest: bytes = b""
    problems: int = 0
    """Lines that could not be read."""
    inode: int | None = None
    unreadable: str = ""
    """Why the file cannot be opened; empty where it can, or went away."""

    def read(self) -> None:
        """Read what is new."""
        try:
            with self.path.open("rb") as file:
                found = self.path.stat()
                if found.st_ino != self.inode or found.st_size < self.offset:
                    # Another file of that name, or one that begins anew.
                    self.inode, self.offset, self.rest, self.number = found.st_ino, 0, b"", 0
                    self.problems = 0
                file.seek(self.offset)
                while data := file.read(_CHUNK):
                    self.offset += len(data)
                    *lines, self.rest = (self.rest + data).split(b"\n")
                    if len(self.rest) > LONGEST_LINE:
                        self.rest = b""
                    for text in lines:
                        self.number += 1
                        if text.strip():
                            line = Line(self.number, text, last=False)
                            problem = self.runs.take(str(self.path), line)
                            self.problems += problem is not None
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
    told: Runs = field(default_factory=lambda: Runs())
    clock: SystemClock = field(default_factory=SystemClock)
    now_ns: int = 0

    def look(self) -> None:
        """Read what is new in every log, and find new logs."""
        self.now_ns = self.clock.wall_ns()
        for path in self.paths:
            for log in sorted(path.glob("*.jsonl"), key=by_attempt) if path.is_dir() else [path]:
                if log not in self.tails:
                    self.tails[log] = _Tail(log, self.told)
        for tail in self.tails.values():
            tail.read()

    def refreshed(self) -> Group:
        """Look, and return the view."""
        self.look()
        return self.render()

    def shown(self) -> list[Run]:
        """Return the runs that go on, the longest first, then those that have ended."""
        runs = self.told.roots
        going = sorted((run for run in runs if _goes_on(run)), key=lambda run: run.started_ns)
        ended = sorted((run for run in runs if not _goes_on(run)), key=lambda run: -run.last_ns)
        return [*going, *ended]

    def render(self) -> Group:
        """Return the view."""
        runs = self.shown()
        going = sum(map(_goes_on, runs))
        spent = sum((run.spent.cost_usd for run in runs), Decimal(0))
        parts: list[Any] = [
            Text(
                f"{going:,} going on, {len(runs) - going:,} ended, {figure(spent)} spent",
                "bold",
            )
        ]
        parts += [_run(run, self.now_ns) for run in runs[:_MOST_RUNS]]
        if len(runs) > _MOST_RUNS:
            parts.append(Text(f"and {len(runs) - _MOST_RUNS:,} more"))
        if not runs:
            parts.append(Text("no run yet"))
        for log, tail in self.tails.items():
            if tail.problems:
                parts.append(
                    cell(f"{log}: {counted(tail.problems, 'line')} could not be read", "red")
                )
            if tail.unreadable:
                parts.append(cell(f"{log}: {tail.unreadable}", "red"))
        return Group(*parts)


def _goes_on(run: Run) -> bool:
    return run.root.status in (None, "paused")


def _run(run: Run, now_ns: int) -> Group:
    root = run.root
    labels = [root.profile or "", *root.tenant]
    title = Text()
    title.append(printable(root.run_id)[:40], "bold")
    title.append(f"  {_state(run, now_ns)}  ", _style(root.status))
    title.append(printable("  ".join(label for label in labels if label)), "dim")
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=18, no_wrap=True)
    table.add_column(max_width=_BAR_WIDTH)
    table.add_column(no_wrap=True)
    caps = root.budget.caps()
    for name, share in _shares(run, now_ns).items():
        cap = caps.get(name)
        used = _seconds(run, now_ns) if name == "max_seconds" else used_of(run.usage, name)
        style = "red" if share >= 1 else "yellow" if share >= root.budget.warn_at else "green"
        table.add_row(
            Text(name),
            ProgressBar(
                total=1.0,
                completed=min(share, 1.0),
                complete_style=style,
                finished_style=style,
            ),
            Text(f"{share:4.0%}  {figure(used)} of {'' if cap is None else figure(cap)}"),
        )
    return Group(title, table)


def _state(run: Run, now_ns: int) -> str:
    root = run.root
    if root.status is None:
        silent = (now_ns - run.last_ns) / _NS
        return f"silent for {silent:,.0f} s" if silent > _SILENT_S else "goes on"
    return root.ending


def _style(status: str | None) -> str:
    return {"terminated": "red", "failed": "red", None: "cyan"}.get(status, "green")


def _seconds(run: Run, now_ns: int) -> float:
    since = (now_ns - run.last_ns) / _NS if run.root.status is None else 0.0
    return run.usage.seconds + max(since, 0.0)


def _shares(run: Run, now_ns: int) -> dict[str, float]:
    shares = run.shares()
    if run.root.budget.max_seconds is not None and "max_seconds" in shares:
        # Time goes on while nothing is written.
        shares["max_seconds"] = _seconds(run, now_ns) / run.root.budget.max_seconds
    return shares
