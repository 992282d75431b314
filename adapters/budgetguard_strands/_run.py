"""What an adapter has to remember about one agent's run."""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace

from budgetguard_core import Admit, Guard, Trip
from budgetguard_strands._watchdog import Watchdog

_NOTHING: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class Run:
    """One run of one agent, or of a swarm or graph, under one guard."""

    provider: object
    guard: Guard
    metrics: object = None
    """Strands' metrics, in which the invocation has its number."""
    invocation: int = 0
    """The number of Strands' invocation; a hook that resumes the agent stays in the same one."""
    shared: bool = False
    """The guard was given, and nothing of it is reset."""
    parent: Run | None = None
    bounded: bool = False
    """The completion of each call is bounded."""
    trip: Trip | None = None
    """What ended the run; the guard may have tripped for another one."""
    resumable: bool = False
    """The last leg ended at a checkpoint of Strands' own: the next one belongs to this run."""
    ended: bool = False
    children: int = 0
    """Sub-agents at work."""
    watched: bool = False
    """The leg is inside the watchdog; context-overflow recovery comes by a second time."""

    last_tokens: int = 0
    """Tokens of the last model call."""
    cycle: int = -1
    overflowed: bool = False
    recovered: bool = False
    """The leg has recovered from a context overflow."""
    call: Admit | None = None
    """The model call in flight."""
    model: Any = None
    """The model that the call in flight went to, where Strands tells."""
    usage: dict[str, Any] | None = None
    """The call's usage, as its stream reported it."""
    written: list[str] = field(default_factory=list[str])
    """The text that the call in flight has written so far."""
    span: trace.Span | None = None

    tools: dict[str, Admit] = field(default_factory=dict[str, Admit])
    """Tool calls in flight, by id."""
    results: dict[str, Any] = field(default_factory=dict[str, Any])
    """Finished calls of the batch in flight, by id."""
    correction: str = ""
    """Of a swarm or graph: what its next node is to be told."""
    graph_limit: tuple[int | None] | None = None
    """Of a stopped graph: its own limit, to be put back."""
    warned: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    notices: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Warnings that the stream has not carried yet."""
    dog: Watchdog | None = None
    runs: tuple[Run, ...] = ()
    """The runs that this one is inside of, and itself."""
    entered: Token[tuple[Run, ...]] | None = None
    """To leave the run again when its step ends."""

    def begin_leg(self) -> None:
        """Forget what only the last leg was about."""
        self.cycle = -1
        self.overflowed = False
        self.recovered = False
        self.watched = False
        self.ended = False
        self.resumable = False
        self.begin_call()
        self.results.clear()

    def begin_call(self) -> None:
        """Forget what the last model call brought."""
        self.call = None
        self.model = None
        if self.dog is not None:
            self.dog.streaming = False
        self.usage = None
        self.written.clear()

    def leave(self, around: ContextVar[tuple[Run, ...]]) -> None:
        """Let the running code be outside of the run again, if it is inside."""
        if self.entered is not None:
            around.reset(self.entered)
            self.entered = None

    def take_notices(self) -> list[dict[str, Any]]:
        """Return the warnings for the stream, and forget them."""
        notices, self.notices = self.notices, []
        return notices

    def note_warnings(self, *, silently: bool = False) -> None:
        """Collect the warnings that were given since the last time, for the stream."""
        guard: Guard | None = self.guard
        while guard is not None:
            given = guard.warnings
            known = self.warned.get(guard.run_id, _NOTHING)
            if len(given) != len(known):
                self.warned[guard.run_id] = frozenset(given)
                if not silently:
                    self.notices += [
                        _notice(guard, dimension) for dimension in given if dimension not in known
                    ]
            guard = guard.parent


def _notice(guard: Guard, dimension: str) -> dict[str, Any]:
    limit = getattr(guard.budget, dimension, None)
    used = getattr(guard.usage, "seconds" if dimension == "max_seconds" else dimension[4:], None)
    return {"run_id": guard.run_id, "dimension": dimension, "limit": limit, "used": used}
