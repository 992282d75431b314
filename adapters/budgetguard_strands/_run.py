"""One run of one agent: what is remembered between two of Strands' hooks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from contextvars import Token
from typing import Any

from opentelemetry.context import Context

from budgetguard_core import Guard, Trip
from budgetguard_core.kit import FRAME, Frame, OpenModelCall, OpenToolCall, Prompt
from budgetguard_strands._history import Asked, unsaid
from budgetguard_strands._identity import ByIdentity
from budgetguard_strands._opening import Opened
from budgetguard_strands._usage import model_name

CYCLES = "event_loop_cycle_count"
"""The key in an invocation's state under which the cycles of a leg are counted, from 1 on."""

# Asked for each piece of an answer, always by a task. Python 3.11 has no C function for it, which
# costs three times as much as the table that it asks.
_tasks: Any = asyncio.tasks
current_task: Callable[[asyncio.AbstractEventLoop], asyncio.Task[Any]] = (
    _tasks.current_task if sys.version_info >= (3, 12) else _tasks._current_tasks.get  # noqa: SLF001
)
_LOOK_EVERY = 64
_NOTHING: frozenset[str] = frozenset()
# The agents that shorten the conversations of others, and when they did last: in which run, and
# how many turns it had made.
_summarizers: ByIdentity[tuple[str, int] | tuple[()]] = ByIdentity()


class AgentRun:
    """One run of one agent, under one run of the kit.

    A run has several legs where a hook resumes the agent within one invocation.

    Attributes:
        run: What is told what happens, and decides.
        context: OpenTelemetry's context in which the last model call began.
        inside: The run is a part of another one.
        shared: Its guard was given, and nothing of it is reset.
        of_node: It is that of a swarm's or graph's node.
        metrics: Strands' metrics, in which the invocation has its number.
        invocation: That number; a hook that resumes the agent stays in the same invocation.
        resumed: A hook has resumed the agent: the next leg begins its iterations anew.
        waiting: Calls of an earlier leg that waited for a person.
        unwatch: Ends the watch over the tools that run in the background.
        asked: The tool calls of the batch in flight.
        error: What left the run.
        output: The structured output that came with the batch in which the run was stopped.
        limit: The stop that Strands' own limit has made; None where none has.
        snapshot: Where the run paused; None while it does not.
        prompt: What the next prompt is projected with.
        notices: The warnings that the stream has not carried yet.
        is_entered: The running code is inside of the run.
        awaiting: The task that waits for the next event of the loop; None while none does.
    """

    def __init__(self, opened: Opened, agent: Any) -> None:
        self.run, self.inside, self.shared, self.of_node = opened
        self.metrics: object = None
        self.invocation = 0
        self.resumed = False
        self.snapshot: Any = None
        self._paused_in: object = None
        self.error: BaseException | None = None
        self.prompt = Prompt()
        self.frame: Frame = self.run.frame()
        self.context: Context | None = None
        self.waiting: list[OpenToolCall] = []
        self.unwatch: Callable[[], None] | None = None
        self.asked: list[Asked] = []
        # The agent's whole history, while a part of it is sent.
        self._whole: list[Any] | None = None
        self._sent = 0
        self._warned: dict[str, frozenset[str]] = {}
        self.notices: list[dict[str, Any]] = []
        self.begin_leg()
        self.note_warnings(silently=True)
        summarizer = getattr(agent.conversation_manager, "summarization_agent", None)
        if summarizer is not None:
            _summarizers.set(summarizer, ())
        if self._is_summary(agent):
            self.cycle = 1  # its first model call is no turn

    def _is_summary(self, agent: Any) -> bool:
        """Tell whether it begins with a summary of the conversation of the run around it.

        A second one, without a turn between the two, is an agent's that goes round: it counts.
        """
        before, above = _summarizers.get(agent), self.run.above
        own = self.run.guard.budget.max_iterations
        if before is None or above is None or not self.inside or own is not None:
            return False
        now = (above.guard.run_id, above.guard.usage.iterations)
        _summarizers.set(agent, now)
        return before != now

    # A leg, and the model call in flight

    def begin_leg(self) -> None:
        """Forget what only the last leg was about."""
        self.cycle = -1
        self.cycles = 0
        self.invocation_state: dict[str, Any] = {}
        self.overflowed = False
        self.recovered = False
        self.watched = False
        self.streaming = False
        self.cut_off = False
        self.limit: Trip | None = None
        self.output: Any = None
        self.inner: Frame = self.frame
        self._token: Token[Frame | None] | None = None
        self.is_entered = False
        self.awaiting: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._earlier = 0
        self._pieces = 0
        self.due = False
        self.begin_call(None)

    def pause(self, agent: Any) -> None:
        """Keep the counters that the run has where it waits."""
        self.snapshot, self._paused_in = self.run.guard.snapshot(), agent.state

    def is_of(self, agent: Any) -> bool:
        """Tell whether an agent still is where the run paused, and was not taken back."""
        # A snapshot of Strands comes with a state of its own, and with the counters in it; what
        # is inside of another run has none there.
        return self.inside or self._paused_in is agent.state

    def count_cycle(self) -> None:
        """Count a model call that is no retry, where the reference's users look for the figure."""
        self.cycles += 1
        self.invocation_state[CYCLES] = self.cycles

    def take_waiting(self, use: Mapping[str, Any]) -> OpenToolCall | None:
        """Take the call of an earlier leg that waited for a person; None where none did."""
        for one in self.waiting:
            if (one.call.id, one.call.name) == (use["toolUseId"], use["name"]):
                self.waiting.remove(one)
                return one
        return None

    def forget_answered(self) -> None:
        """Forget the last batch, but not what runs in the background and answers later."""
        self.asked = [one for one in self.asked if one.call.state == "started"]

    def begin_call(self, call: OpenModelCall | None) -> None:
        """Forget what the last model call brought."""
        self.call = call
        self.model: Any = None
        self.copied: Any = None
        self.streaming = False
        self.usage: Any = None
        self.written: list[str] = []
        self.unsaid: list[str] = []  # what it wrote that is no text: arguments and reasoning

    def note(self, event: Any) -> None:
        """Note what an event of the model call in flight tells of it."""
        if "data" in event:
            self.written.append(event["data"])
        elif "delta" in event:
            self.unsaid.append(unsaid(event["delta"]))
        elif "event" in event:
            chunk = event["event"]
            if "contentBlockDelta" in chunk:
                self.streaming = not self.due
            elif "metadata" in chunk:
                self.usage = chunk["metadata"].get("usage") or self.usage

    def prune(self, agent: Any) -> None:
        """Leave in the agent's history, for one model call, what is to be sent of it."""
        if self.run.envelope.prune is None:
            return
        kept = self.run.pruned(agent.messages, model_name(agent.model))
        if kept is not None:
            self._whole, self._sent = list(agent.messages), len(kept)
            agent.messages[:] = kept
            self.prompt = Prompt()

    def whole(self, agent: Any) -> list[Any]:
        """Return the agent's history, also while a part of it is sent."""
        return agent.messages if self._whole is None else self._whole

    def give_back(self, agent: Any) -> None:
        """Give the agent its whole history again, with what was added meanwhile."""
        if self._whole is not None:
            whole, self._whole = self._whole, None
            agent.messages[:] = [*whole, *agent.messages[self._sent :]]

    # The context of the run's code

    def enter(self) -> None:
        """Let the running code be inside of the run, for one step."""
        self._token = FRAME.set(self.inner)
        self.is_entered = True

    def leave(self) -> None:
        """Let the running code be outside of the run again, if it is inside."""
        if self._token is not None:
            self.inner = FRAME.get() or self.inner
            FRAME.reset(self._token)
            self._token = None
            self.is_entered = False

    def within(self, call: OpenModelCall | OpenToolCall | None = None) -> None:
        """Let the code that follows in this step be the body of a call, or of none."""
        FRAME.set(self.frame if call is None else call.frame)

    def leave_call(self) -> None:
        """Be in the body of no call of this run: one that went to the background ends elsewhere."""
        frame = FRAME.get()
        if frame is not None and frame.run is self.run and frame.call is not None:
            self.within()

    # The deadline and an abort

    def cut(self) -> None:
        """End what the run awaits; between two events of a stream it awaits nothing."""
        self.due = True
        self.streaming = False
        if self.awaiting is not None and not self._cancelled:
            self._cancelled = True
            self._earlier = self.awaiting.cancelling()
            self.awaiting.cancel()

    def look(self) -> None:
        """Look at the clock and for an abort, where the loop gets no turn to tell of them.

        Once for many pieces: an answer that is all there when it is late is paid, and kept.
        """
        self._pieces += 1
        if self._pieces % _LOOK_EVERY == 0 and self.run.has_to_end and not self.run.has_children:
            self.due = self.run.check() is not None
            self.streaming = self.streaming and not self.due

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
        notices, self.notices = self.notices, []
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
                        self.notices += [_notice(guard, one) for one in given if one not in known]

    # What holds

    @property
    def contexts(self) -> list[Context | None]:
        """OpenTelemetry's contexts in which this cycle's calls began, the innermost first."""
        return [*(one.context for one in self.asked), self.context]

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
