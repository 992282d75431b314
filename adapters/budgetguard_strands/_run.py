"""One run of one agent: what is remembered between two of Strands' hooks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import Token
from dataclasses import dataclass
from typing import Any, NamedTuple

from opentelemetry.context import Context

from budgetguard_core import Guard, Snapshot, Trip
from budgetguard_core.kit import FRAME, Frame, ModelTurn, OpenModelCall, OpenToolCall, Session
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
        metrics: Strands' metrics, in which the invocation has its number.
        nudged: What was added to a message for the model call in flight, and the words.
        invocation: That number; a hook that resumes the agent stays in the same invocation.
        resumed: A hook has resumed the agent: the next attempt begins its iterations anew.
        asked: The tool calls of the batch in flight.
        admitting: Held while one of them is admitted.
        context: OpenTelemetry's context in which the last model call began.
        unwatch: Ends the watch over the tools that run in the background.
        error: What left the run.
        output: The structured output that came with the batch in which the run was stopped.
        limit: The stop that Strands' own limit has made; None where none has.
        paused: Where the run paused; None while it does not.
        token: Undoes that the running code is inside of the run; None while it is not.
        awaiting: The task that waits for the next event of the loop; None while none does.
        due: The run is to be left as soon as it can be.
    """

    def __init__(self, opened: Opened, agent: Any) -> None:
        self.run, resumed, self.inside, self.shared, self.of_node = opened
        self.session = Session(self.run, DIALECT, resumed=resumed)
        self.nudged: tuple[list[Any], object] = [], None
        self.metrics: object = None
        self.invocation = 0
        self.resumed = False
        self.paused: Paused | None = None
        self.error: BaseException | None = None
        self.frame: Frame = self.run.frame()
        self.context: Context | None = None
        self.unwatch: Callable[[], None] | None = None
        self.asked: list[Asked] = []
        self.admitting = asyncio.Lock()
        self._warned: dict[str, int] = {}
        self.notices: list[dict[str, Any]] = []
        self.note_warnings()
        self.notices.clear()  # they were given before it began
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
        self.overflowed = self.recovered = self.watched = self.cut_off = False
        self.limit: Trip | None = None
        self.output: Any = None
        self.inner: Frame = self.frame
        self.token: Token[Frame | None] | None = None
        self.awaiting: asyncio.Task[Any] | None = None
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

    def note(self, event: Any) -> None:
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

    # The context of the run's code

    def enter(self) -> None:
        """Make the running code a part of the run, for one step."""
        if self.token is None:
            self.token = FRAME.set(self.inner)

    def leave(self) -> None:
        """Undo that."""
        if self.token is not None:
            self.inner = FRAME.get() or self.inner
            FRAME.reset(self.token)
            self.token = None

    def within(self, call: OpenModelCall | OpenToolCall | None = None) -> None:
        """Make the code that follows in this step the body of a call, or of none."""
        FRAME.set(self.frame if call is None else call.frame)

    def leave_call(self) -> None:
        """Leave the body of a call of this run: one that went to the background ends elsewhere."""
        frame = FRAME.get()
        if frame is not None and frame.run is self.run and frame.call is not None:
            self.within()

    # The deadline and an abort

    def cut(self) -> None:
        """End what the run awaits; between two events of a stream it awaits nothing."""
        self.due = True
        if self.awaiting is not None and not self._cancelled:
            self._cancelled = True
            self._earlier = self.awaiting.cancelling()
            self.awaiting.cancel()

    def look(self) -> None:
        """Look at the clock and for an abort, where the loop gets no turn to tell of them.

        Once for many pieces: an answer that is all there when it is late is paid, and kept.
        """
        self.pieces += 1
        if self.pieces % _LOOK_EVERY == 0 and self.run.has_to_end and not self.run.has_children:
            self.due = self.run.check() is not None

    def took_effect(self) -> bool:
        """Return whether a cancellation that came up was the watch's, and take it back if so."""
        if not self._cancelled:
            return False
        self._cancelled = False
        task = self.awaiting or asyncio.current_task()
        # Somebody else may have cancelled the task as well: then it has to stay cancelled.
        return task is not None and task.uncancel() <= self._earlier

    # Warnings

    def note_warnings(self) -> None:
        """Collect the warnings that were given since the last time, for the stream."""
        for nearest in self.run.guards:
            for guard in nearest.lineage:
                given, known = guard.warnings, self._warned.get(guard.run_id, 0)
                if len(given) != known:
                    self._warned[guard.run_id] = len(given)
                    self.notices += [_notice(guard, one) for one in given[known:]]

    @property
    def contexts(self) -> list[Context | None]:
        """OpenTelemetry's contexts in which this cycle's calls began, the innermost first."""
        return [*(one.context for one in self.asked), self.context]

    @property
    def changes_requests(self) -> bool:
        """True if a budget, here or above, bounds each completion or has a fallback model."""
        every = (one.budget for nearest in self.run.guards for one in nearest.lineage)
        return any(one.max_output_tokens_per_call or one.fallback_model for one in every)


def _notice(guard: Guard, dimension: str) -> dict[str, Any]:
    limit = getattr(guard.budget, dimension, None)
    used = getattr(guard.usage, "seconds" if dimension == "max_seconds" else dimension[4:], None)
    return {"run_id": guard.run_id, "dimension": dimension, "limit": limit, "used": used}
