"""`budgetguard export`: runs as labelled examples of an evaluation set."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from budgetguard_cli.lines import Line, Problem
from budgetguard_cli.recordings import NO_START, STDIN, Reading, Unreadable, read_event, readable
from budgetguard_cli.terminal import printable, refuse
from budgetguard_core import Event
from budgetguard_core.events import (
    HousekeepingBegan,
    ModelCallAdmitted,
    ModelCallRefused,
    ModelCallSettled,
    RunEnded,
    RunRestored,
    RunStarted,
    ToolCallSettled,
    ToolCallsRequested,
    Tripped,
)

VERSION = 1
_UNFINISHED = "unfinished"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(export)


@dataclass
class Example:
    """One run, as its log tells it."""

    run_id: str
    parent_run_id: str | None = None
    budget: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    stop: dict[str, Any] | None = None
    end: RunEnded | None = None
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])

    def take(self, event: Event) -> None:
        """Take in an event of the run."""
        if isinstance(event, ModelCallAdmitted):
            self._begin(event.call_id, {"kind": "model", "model": event.call.model})
        elif isinstance(event, ModelCallSettled):
            step = self._calls.pop(event.call_id, {})
            used = event.usage
            tokens = None if used is None else [used.input_tokens, used.output_tokens]
            step.update(tokens=tokens, cost_usd=event.cost_usd, error=event.error)
            step["model"] = event.model or step.get("model")
        elif isinstance(event, ModelCallRefused):
            self.steps.append(
                {"kind": "model", "model": event.call.model, "refused": str(event.reason)}
            )
        elif isinstance(event, ToolCallsRequested):
            for call in event.calls:
                asked: dict[str, Any] = {"kind": "tool", "name": call.name}
                asked |= {"arguments_hash": call.fingerprint, "decision": call.decision}
                if call.arguments is not None:
                    asked["arguments"] = call.arguments
                self._begin(call.call_id, asked)
        elif isinstance(event, ToolCallSettled):
            step = self._calls.pop(event.call_id, {})
            step.update(result_hash=event.fingerprint, error=event.error)
        elif isinstance(event, Tripped):
            self.stop = event.trip.model_dump(mode="json")

    def _begin(self, call_id: int | None, step: dict[str, Any]) -> None:
        self.steps.append(step)
        if call_id is not None:
            self._calls[call_id] = step

    def to_json(self) -> dict[str, Any]:
        """Return the example; its label is how the run ended."""
        end = self.end
        return {
            "version": VERSION,
            "run_id": self.run_id,
            "parent_run_id": self.parent_run_id,
            "label": _UNFINISHED if end is None else end.status,
            "stop_reason": None if end is None else end.stop_reason,
            "error": None if end is None else end.error,
            "profile": None if end is None or end.profile is None else end.profile.model_dump(),
            "budget": self.budget,
            "usage": None if end is None else end.usage.model_dump(mode="json"),
            "stop": self.stop,
            "steps": self.steps,
        }


class Examples:
    """The runs of logs, each told when it has ended.

    Attributes:
        unfinished: Those that have not, by id: a later leg may be in another log.
    """

    def __init__(self) -> None:
        self.unfinished: dict[str, Example] = {}
        self._begun: set[str] = set()

    def read(self, lines: Iterable[Line | Problem]) -> Iterator[Example | Problem]:
        """Tell the runs that end in the lines of a log."""
        for line in lines:
            event = line if isinstance(line, Problem) else read_event(line)
            if event is None:
                continue
            if isinstance(event, Problem):
                yield event
                continue
            if isinstance(event, RunStarted | RunRestored):
                self._begun.add(event.run_id)
            elif event.run_id not in self._begun:
                yield Problem(line[0], NO_START)
                continue
            yield from self._told(event)

    def _told(self, event: Event) -> Iterator[Example]:
        runs = self.unfinished
        if isinstance(event, RunStarted):
            if event.run_id in runs:
                yield runs.pop(event.run_id)  # another run of that name, which nobody ended
            runs[event.run_id] = Example(event.run_id, event.parent_run_id, event.budget)
        elif isinstance(event, RunRestored):
            parent = event.snapshot.get("parent_run_id")
            run = runs.setdefault(event.run_id, Example(event.run_id, parent))
            run.budget = event.snapshot.get("budget")
        elif isinstance(event, HousekeepingBegan):
            # It is work about a run, and nothing that a model is to be judged by.
            runs.pop(event.run_id, None)
        elif event.run_id in runs:
            run = runs[event.run_id]
            run.take(event)
            if isinstance(event, RunEnded):
                run.end = event
                yield runs.pop(event.run_id)


def export(
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG",
            help="Event logs of BudgetGuard's, also gzipped, or folders of them; - is standard "
            "input.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="The file to write; - is standard output.")
    ] = STDIN,
) -> None:
    """Write runs as labelled examples of an evaluation set: JSON Lines, a run each.

    The label is how the run ended: completed, terminated (with the limit that stopped it), failed,
    or unfinished where its log ends before it does. Arguments of tool calls are in it only where
    they were logged; their hashes always are. Ends with 0, with 1 when a line could not be read
    (the rest is written), and with 2 when a file is wrong.

    Example: budgetguard export logs -o set.jsonl
    """
    reading, found = Reading(Console(stderr=True)), Examples()
    try:
        ended = reading.files(readable(logs), found.read)
        written = _write(chain(ended, found.unfinished.values()), output)
    except OSError as error:
        if output == STDIN:
            raise
        refuse(f"{printable(output)}: {error.strerror}. Name a file that can be written.")
    except Unreadable as error:
        refuse(str(error))
    typer.echo(f"{written:,} examples written, {reading.problems:,} lines not read.", err=True)
    if reading.problems:
        raise typer.Exit(1)


def _write(found: Iterable[Example], output: str) -> int:
    lines = (json.dumps(example.to_json(), ensure_ascii=False) for example in found)
    if output == STDIN:
        return _write_lines(sys.stdout, lines)
    target = Path(output).resolve()
    if target.exists() and not target.is_file():
        # A pipe or a device: nothing may take its place.
        with target.open("w", encoding="utf-8", errors="replace") as file:
            return _write_lines(file, lines)
    # The set may be among the logs by mistake: nothing is lost before all is read.
    part = Path(f"{target}.part")
    try:
        with part.open("w", encoding="utf-8", errors="replace") as file:
            written = _write_lines(file, lines)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return written


def _write_lines(file: TextIO, lines: Iterable[str]) -> int:
    written = 0
    for line in lines:
        file.write(f"{line}\n")
        written += 1
    return written
