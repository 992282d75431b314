"""One run of one agent: what is remembered between two of Strands' hooks."""

from __future__ import annotations

import asyncio
from contextvars import Token
from typing import Any

from opentelemetry import trace

from budgetguard_core import Guard, Trip
from budgetguard_core.frame import FRAME
from budgetguard_core.kit import Frame, OpenModelCall, OpenToolCall, Prompt
from budgetguard_strands._history import Asked
from budgetguard_strands._opening import Opened

_NOTHING: frozenset[str] = frozenset()


class AgentRun:
    """One run of one agent, under one run of the kit.

    A run has several legs where a hook resumes the agent within one invocation.

    Attributes:
        run: What is told what happens, and decides.
        inside: The run is a part of another one.
        shared: Its guard was given, and nothing of it is reset.
        of_node: It is that of a swarm's or graph's node.
        metrics: Strands' metrics, in which the invocation has its number.
        invocation: That number; a hook that resumes the agent stays in the same invocation.
        resumed: A hook has resumed the agent: the next leg begins its iterations anew.
        waiting: Calls of an earlier leg that waited for a person.
        asked: The tool calls of the batch in flight.
        error: What left the run.
        snapshot: Where the run paused; None while it does not.
        prompt: What the next prompt is projected with.
    """

    def __init__(self, opened: Opened) -> None:
        self.run, self.inside, self.shared, self.of_node = opened
        self.metrics: object = None
        self.invocation = 0
        self.resumed = False
        self.snapshot: Any = None
        self.error: BaseException | None = None
        self.prompt = Prompt()
        self.span: trace.Span | None = None
        self.waiting: list[OpenToolCall] = []
        self.asked: list[Asked] = []
        self._warned: dict[str, frozenset[str]] = {}
        self._notices: list[dict[str, Any]] = []
        self.begin_leg()
        self.note_warnings(silently=True)

    # A leg, and the model call in flight

    def begin_leg(self) -> None:
        """Forget what only the last leg was about."""
        self.cycle = -1
        self.overflowed = False
        self.recovered = False
        self.watched = False
        self.streaming = False
        self.cut_off = False
        self.inner: Frame = self.run.frame()
        self._token: Token[Frame | None] | None = None
        self.awaiting: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._earlier = 0
        self.due = False
        self.begin_call(None)

    def begin_call(self, call: OpenModelCall | None) -> None:
        """Forget what the last model call brought."""
        self.call = call
        self.model: Any = None
        self.copied: Any = None
        self.streaming = False
        self.usage: Any = None
        self.written: list[str] = []

    # The context of the run's code

    @property
    def is_entered(self) -> bool:
        """Whether the running code is inside of the run."""
        return self._token is not None

    def enter(self) -> None:
        """Let the running code be inside of the run, for one step."""
        self._token = FRAME.set(self.inner)

    def leave(self) -> None:
        """Let the running code be outside of the run again, if it is inside."""
        if self._token is not None:
            self.inner = FRAME.get() or self.inner
            FRAME.reset(self._token)
            self._token = None

    def within(self, call: OpenModelCall | OpenToolCall | None = None) -> None:
        """Let the code that follows in this step be the body of a call, or of none."""
        FRAME.set(self.run.frame() if call is None else call.frame)

    # The deadline and an abort

    def cut(self) -> None:
        """End what the run awaits; between two events of a stream it awaits nothing."""
        self.due = True
        self.streaming = False
        if self.awaiting is not None and not self._cancelled:
            self._cancelled = True
            self._earlier = self.awaiting.cancelling()
            self.awaiting.cancel()

    def took_effect(self) -> bool:
        """Tell whether a cancellation that came up was the watcher's, and take it back if so."""
        if not self._cancelled:
            return False
        self._cancelled = False
        task = self.awaiting or asyncio.current_task()
        # Somebody else may have cancelled the task as well: then it has to stay cancelled.
        return task is not None and task.uncancel() <= self._earlier

    # Warnings

    def take_notices(self) -> list[dict[str, Any]]:
        """Return the warnings that the stream has not carried yet, and forget them."""
        notices, self._notices = self._notices, []
        return notices

    def note_warnings(self, *, silently: bool = False) -> None:
        """Collect the warnings that were given since the last time, for the stream."""
        for nearest in self.run.guards:
            for guard in nearest.lineage:
                given = guard.warnings
                known = self._warned.get(guard.run_id, _NOTHING)
                if len(given) != len(known):
                    self._warned[guard.run_id] = frozenset(given)
                    if not silently:
                        self._notices += [_notice(guard, one) for one in given if one not in known]

    # What holds

    @property
    def trip(self) -> Trip | None:
        """Why the run has to end."""
        return self.run.stopped_by

    @property
    def is_bounded(self) -> bool:
        """Whether the completion of each call is bounded, here or above."""
        return any(
            guard.budget.max_output_tokens_per_call is not None
            for nearest in self.run.guards
            for guard in nearest.lineage
        )


def _notice(guard: Guard, dimension: str) -> dict[str, Any]:
    limit = getattr(guard.budget, dimension, None)
    used = getattr(guard.usage, "seconds" if dimension == "max_seconds" else dimension[4:], None)
    return {"run_id": guard.run_id, "dimension": dimension, "limit": limit, "used": used}
