"""Which runs are alive: what each process says of its own, and reads of all."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from budgetguard_core.clock import Clock
from budgetguard_core.ledger.attached import LedgerRun
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.step import Store

_ANNOUNCE_SECONDS = 10.0
_SILENT_SECONDS = 30.0
_FORGOTTEN_SECONDS = 86_400.0
_RUNS_SHOWN = 1000


@dataclass(frozen=True, slots=True)
class AliveRun:
    """A run that some process is working on."""

    run: str
    tenant: tuple[str, ...]
    host: str
    pid: int
    started: float
    """Seconds since the epoch."""
    seen: float
    """When its process was last heard of. Silent for 30 s, it is probably dead."""
    silent: bool


class AliveRuns:
    """One note of each process in the store, about the runs that it works on.

    Args:
        connection: To the store.
        clock: Monotonic time.
    """

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Begin anew in a child process, which has said nothing yet."""
        self._announced_ns: int | None = None
        self._announced: frozenset[tuple[object, ...]] = frozenset()

    def announce(self, runs: Sequence[LedgerRun]) -> None:
        """Say which runs this process works on, where they changed or it is time to say it again.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        now = self._clock.monotonic_ns()
        names = frozenset((run.run, run.account.names, run.started) for run in runs)
        last = self._announced_ns
        due = last is None or now - last > _ANNOUNCE_SECONDS * 1e9
        if names == self._announced and not (due and runs):
            return
        text = None
        if runs:
            note = {
                "host": platform.node(),
                "pid": os.getpid(),
                "seen": self._connection.ask(_now),
                "runs": [[run.run, run.account.names, run.started] for run in runs[:_RUNS_SHOWN]],
            }
            text = json.dumps(note)
            if last is None:
                self._connection.ask(_forget_the_dead)
        name = f"p:{self._connection.holder}"
        self._connection.ask(lambda store: store.write(name, text))
        self._announced, self._announced_ns = names, now

    def all(self) -> list[AliveRun]:
        """Return the runs of all processes, also of those that went silent.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        notes = self._connection.ask(lambda store: store.scan("p:"))
        now = self._connection.ask(_now)
        found: list[AliveRun] = []
        for text in notes.values():
            note = _note(text)
            if note is None:
                continue
            seen = float(note["seen"])
            found += [
                AliveRun(
                    run,
                    tuple(tenant),
                    str(note["host"]),
                    int(note["pid"]),
                    float(started),
                    seen,
                    now - seen > _SILENT_SECONDS,
                )
                for run, tenant, started in note["runs"]
            ]
        return sorted(found, key=lambda one: (one.started, one.run))


def _now(store: Store) -> float:
    return store.now()


def _forget_the_dead(store: Store) -> None:
    """Take away what processes said that have been silent for a day, and so never will."""
    now = store.now()
    for name, text in store.scan("p:").items():
        note = _note(text)
        if note is None or now - float(note["seen"]) > _FORGOTTEN_SECONDS:
            store.write(name, None)


def _note(text: str) -> dict[str, Any] | None:
    """Read what a process said of its runs."""
    try:
        note = cast("dict[str, Any]", json.loads(text))
        return note if {"host", "pid", "seen", "runs"} <= note.keys() else None
    except (ValueError, AttributeError):
        return None
