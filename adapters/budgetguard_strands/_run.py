"""One run of one agent: what is remembered between two of Strands' hooks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from opentelemetry.context import Context

from budgetguard_core import Guard, Snapshot, Trip
from budgetguard_core.kit import (
    FRAME,
    Frame,
    ModelTurn,
    OpenModelCall,
    OpenToolCall,
    Scope,
    Session,
    Watch,
)
from budgetguard_strands._messages import DIALECT, thought
from budgetguard_strands._opening import ByIdentity, Opened

_LOOK_EVERY = 64
# The agents that shorten the conversations of others, and when they did last: in which run, and
# how many turns it had made.
_summarizers: ByIdentity[tuple[str, int] | tuple[()]] = ByIdentity()


@dataclass(eq=False, slots=True)
class Asked:
    """One tool call of the batch in flight. It is told apart from others by its identity."""

    use: Mapping[str, Any]
    record: OpenToolCall
    context: Context


class Paused(NamedTuple):
    """A run of an agent that waits, in the object that it waits in."""

    snapshot: Snapshot
    inside: bool
    state: object

    def is_of(self, agent: Any) -> bool:
        """Return whether an agent still is where the run paused, and was not taken back."""
        # A snapshot of Strands comes with a state of its own, and with the counters in it; what
        # is inside of another run has none there.
        return self.inside or self.state is agent.state


class AgentRun:
    """One run of one agent, on one session of the kit.

    A run has several attempts where a hook resumes the agent within one invocation.

    Attributes:
        session: The life of the run.
        inside: The run is a part of another one.
        shared: Its guard was given, and nothing of it is reset.
        of_node: It is that of a swarm's or graph's node.
        invocation: Strands' metrics, and the number of the invocation in them.
        nudged: What was added to a message for the model call in flight, and the words.
        resumed: A hook has resumed the agent: the next attempt begins its iterations anew.
        asked: The tool calls of the batch in flight.
        bodies: What runs in the background: each with the loop that it runs on.
        admitting: Held while one of them is admitted.
        context: OpenTelemetry's context in which the last model call began.
        error: What left the run.
        output: The structured output that came with the batch in which the run was stopped.
        limit: The stop that Strands' own limit has made; None where none has.
        paused: Where the run paused; None while it does not.
        is_left: It was stopped, and what runs in the background ends with it.
        due: The run is to be left as soon as it can be.
    """

    def __init__(self, opened: Opened, agent: Any, invocation: tuple[Any, int]) -> None:
        self.run, resumed, self.inside, self.shared, self.of_node = opened
        self.session = Session(self.run, DIALECT, resumed=resumed)
        self.invocation = invocation
        self.nudged: tuple[list[Any], object] = [], None
        self.resumed = self.is_left = False
        self.paused: Paused | None = None
        self.error: BaseException | None = None
        self.frame: Frame = self.run.frame()
        self.context: Context | None = None
        self.asked: list[Asked] = []
        self.bodies: set[tuple[asyncio.AbstractEventLoop, Scope]] = set()
        self.admitting = asyncio.Lock()
        self._lineage = [one for nearest in self.run.guards for one in nearest.lineage]
        self._warned = {one.run_id: len(one.warnings) for one in self._lineage}
        self.begin_attempt()
        summarizer = getattr(agent.conversation_manager, "summarization_agent", None)
        if summarizer is not None:
            _summarizers.set(summarizer, ())
        if self._is_summary(agent):
            self.cycle = 1  # its first model call is no turn

    def _is_summary(self, agent: Any) -> bool:
        """Return whether it begins with a summary of the conversation of the run around it.

        A second one, without a turn between the two, is an agent's that goes round: it counts.
        """
        before, above = _summarizers.get(agent), self.run.above
        own = self.run.guard.budget.max_iterations
        if before is None or above is None or not self.inside or own is not None:
            return False
        now = (above.guard.run_id, above.guard.usage.iterations)
        _summarizers.set(agent, now)
        return before != now

    @property
    def trip(self) -> Trip | None:
        """Why the run has to end."""
        return self.session.trip

    # An attempt, and the model call in flight

    def begin_attempt(self) -> None:
        """Forget what only the last attempt was about."""
        self.cycle = -1
        self.overflowed = self.recovered = self.cut_off = False
        self.limit: Trip | None = None
        self.output: Any = None
        self._inner: Frame = self.frame
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = self.due = False
        self._earlier = self.pieces = 0
        self.begin_call(None)

    def pause(self, agent: Any) -> None:
        """Keep the counters that the run has where it waits."""
        self.paused = Paused(self.run.guard.snapshot(), self.inside, agent.state)

    def begin_call(self, turn: ModelTurn | None) -> None:
        """Forget what the last model call brought, and was sent for it alone."""
        content, words = self.nudged
        content[:] = [one for one in content if one is not words]
        self.nudged = [], None
        self.turn = turn
        self.model: Any = None
        self.copied: Any = None
        self.usage: Any = None
        self.written: list[str] = []

    def ask(self, use: Mapping[str, Any], record: OpenToolCall, context: Context) -> None:
        """Note a tool call; another attempt at one takes the place of the first."""
        for before in [one for one in self.asked if one.use is use]:
            self.session.calls.postpone(before.record)
            self.asked.remove(before)
        self.asked.append(Asked(use, record, context))

    def find(self, use: Mapping[str, Any]) -> Asked | None:
        """Find the open call of a tool use: that very one, or else one of the same id."""
        going_on = [one for one in self.asked if one.record.result is None]
        same = (one for one in going_on if one.use["toolUseId"] == use["toolUseId"])
        return next((one for one in going_on if one.use is use), None) or next(same, None)

    def within(self, call: OpenModelCall | OpenToolCall | None = None) -> None:
        """Make the code that follows in this step the body of a call, or of none."""
        FRAME.set(self.frame if call is None else call.frame)

    # The events

    async def steps(self, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Yield the events of Strands' loop, each made inside of the run, until it has to end."""
        watch = Watch(self.run, self._cut)
        try:
            async with aclosing(events):
                while not self.due:
                    with self._step():
                        event = await anext(events, None)
                    if event is None:
                        return
                    self._note(event)
                    yield event
        finally:
            watch.close()

    @contextmanager
    def _step(self) -> Generator[None]:
        """Make the code of a block a part of the run; nothing shows in the consumer's context."""
        # The consumer may ask for each event in another task.
        self._task = asyncio.current_task()
        token = FRAME.set(self._inner)
        try:
            yield
        finally:
            self._inner = FRAME.get() or self._inner
            FRAME.reset(token)
            self._task = None  # a stream that is left must not hold its consumer

    def _note(self, event: Any) -> None:
        """Note what an event of the model call in flight says of it, and look at the clock.

        Else it is an event of a tool's, or of an agent delegated to.
        """
        turn = self.turn
        if turn is not None:
            if "data" in event:
                self.written.append(event["data"])
            elif "delta" in event:
                turn.piece(thought(event["delta"]))
            elif "event" in event and "metadata" in event["event"]:
                self.usage = event["event"]["metadata"].get("usage") or self.usage
        self.look()

    def look(self) -> None:
        """Look at the clock and for an abort, where the loop gets no turn to tell of them.

        Once for many pieces: an answer that is all there when it is late is paid, and kept.
        """
        self.pieces += 1
        if self.pieces % _LOOK_EVERY == 0 and self.run.has_to_end and not self.run.has_children:
            self.due = self.run.check() is not None

    def _cut(self) -> None:
        """End what the run awaits; between two events of a stream it awaits nothing."""
        self.due = True
        if self._task is not None and not self._cancelled:
            self._cancelled = True
            self._earlier = self._task.cancelling()
            self._task.cancel()

    def took_effect(self) -> bool:
        """Return whether a cancellation that came up was the watch's, and take it back if so."""
        if not self._cancelled:
            return False
        self._cancelled = False
        task = asyncio.current_task()
        # Somebody else may have cancelled the task as well: then it has to stay cancelled.
        return task is not None and task.uncancel() <= self._earlier

    def warnings(self) -> list[dict[str, Any]]:
        """Return the warnings that were given since the last time, for the stream."""
        found: list[dict[str, Any]] = []
        for guard in self._lineage:
            given, known = guard.warnings, self._warned[guard.run_id]
            if len(given) != known:
                self._warned[guard.run_id] = len(given)
                found += [_warning(guard, one) for one in given[known:]]
        return found

    @property
    def contexts(self) -> list[Context | None]:
        """OpenTelemetry's contexts in which this cycle's calls began, the innermost first."""
        return [*(one.context for one in self.asked), self.context]

    @property
    def changes_requests(self) -> bool:
        """True if requests are pruned, or a budget bounds completions or has a fallback model."""
        every = [one.budget for one in self._lineage]
        return self.run.envelope.prune is not None or any(
            one.max_output_tokens_per_call or one.fallback_model for one in every
        )


def _warning(guard: Guard, dimension: str) -> dict[str, Any]:
    limit = getattr(guard.budget, dimension, None)
    used = getattr(guard.usage, "seconds" if dimension == "max_seconds" else dimension[4:], None)
    return {"run_id": guard.run_id, "dimension": dimension, "limit": limit, "used": used}
