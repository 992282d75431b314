"""A run of the kit in LangChain's world, and what is known of its calls in flight."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast
from uuid import UUID

from langchain_core.messages import BaseMessage
from langgraph.errors import GraphBubbleUp

from budgetguard_core import Budget, RunFencedError, Trip
from budgetguard_core.kit import (
    FRAME,
    Frame,
    ModelCall,
    OpenModelCall,
    OpenToolCall,
    Prompt,
    Run,
    Stop,
)
from budgetguard_langgraph._asked import AskedCalls, shorten
from budgetguard_langgraph._pauses import Thread, pending
from budgetguard_langgraph._seams import GraphCall, is_drained
from budgetguard_langgraph.interrupts import NotRetried, is_budget_interrupt

_REPLIES: Final = 16

RunId: TypeAlias = int | str | UUID
"""A run id of LangChain's as a key: the number of a UUID, whose own hash is a call of Python's.

LangGraph takes ids that are none, as texts, and keeps them.
"""


class Step(Frame):
    """The frame of a stretch of a LangChain run: a node, a model call, a tool.

    Hooks have no block to enter it in: they set it, and `leave` takes it back.
    """

    __slots__ = ("before", "closed", "graph_run", "run_id")

    def __init__(self, graph_run: GraphRun, call: Any = None, run_id: RunId | None = None) -> None:
        # Four are made in each turn, so the base class is not called.
        self.run = run = graph_run.run
        self.guard = run.guard
        self.call = call
        self.above = run.above
        self.graph_run = graph_run
        self.run_id = run_id
        self.closed = False
        before = FRAME.get()
        self.before = _open(before) if type(before) is Step and before.closed else before

    def leave(self) -> None:
        """Take the frame back.

        LangChain calls the end hooks of asynchronous code in another context: where this one was
        set it stays, and from now on stands for what was there before.
        """
        self.closed = True
        self.above = before = self.before
        if FRAME.get() is self:
            # Also a chain that is over meanwhile: what it has begun is still a part of its run.
            FRAME.set(before)

    @property
    def is_live(self) -> bool:
        """True if code in here still belongs to the run."""
        if not self.run.ended:
            return not self.closed
        if self.call is not None:
            return not self.closed and self.call.is_open
        # Outside of a graph the context is the caller's own, who may go on to something else.
        return self.graph_run.graph_call is not None and self.run.goes_on_here


def _open(frame: Frame | None) -> Frame | None:
    """Return the innermost of these frames that is not closed.

    Where all are, it is the outermost of a run that goes on: that is how what outlives its chain
    is known, and how a long run keeps no more than one of them.
    """
    last: Step | None = None
    while type(frame) is Step and frame.closed and not (frame.run.ended and frame.is_live):
        last, frame = frame, frame.before
    return frame if frame is not None or last is None or last.run.ended else last


@dataclass(slots=True)
class ModelCallInFlight:
    """A model call, from its start hook to its end.

    Attributes:
        asked: What the run was asked for.
        opened: The answer to it; the call begins after the wait that it may ask for.
        model: The model, where a bound has to reach it; `settings` are those of its request.
        call: What was opened, once it has begun; `step` is the frame of what makes it.
        bounded: The budget's completion bound has reached the request.
    """

    run_id: RunId
    facts: Mapping[str, Any]
    parameters: Mapping[str, Any] | None
    prompt: Sequence[Any]
    namespace: str
    place: Any
    model: Any
    settings: dict[str, Any] | None
    asked: ModelCall
    opened: OpenModelCall | Stop
    call: OpenModelCall = field(init=False)
    step: Step = field(init=False)
    bounded: bool = False
    forget: Callable[[], None] | None = None
    streamed: list[str] = field(default_factory=list[str])
    reported: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])


@dataclass(slots=True)
class ToolCallInFlight:
    """A tool call, from its start hook to its end.

    Attributes:
        call: The answer to it; its body starts after the wait that it may ask for.
        step: The frame of its body, once it has started.
    """

    run_id: RunId
    call: OpenToolCall
    step: Step = field(init=False)
    forget: Callable[[], None] | None = None


class Fenced(RunFencedError, GraphBubbleUp, NotRetried):
    """A run that was resumed elsewhere ends here, of a type that no layer retries or swallows."""


class GraphRun:
    """One run of the kit, as LangChain's hooks tell of it.

    Attributes:
        run: The run of the kit.
        opener: The callback that opened it.
        outer: The run around it, where that is one of this adapter too.
        root: The id of the chain that it began with; None for calls outside of any chain.
        chains: The chains that go on, by id, with the frames of their code.
        waits: A person was asked, or the graph stopped at a breakpoint.
        open_before: The tool calls that were open when it began: those of a killed process.
        is_answered: It goes on with a person's answer; `is_saved`: it has a store.
        graph_call: The call of the graph that it is, where it is one; `thread` and `slot` are where
            its counters lie while it waits.
        next_step: What was refused last.
        asked_model: The model of the last request, with its system messages; kept where the run
            may have a last answer. `model_name` is its name for the price.
        sent: What a model was sent last; `said` is its answer.
        stopped_inside: The stop of a run inside this one that is the same call of the graph.
    """

    def __init__(
        self,
        run: Run,
        opener: Any,
        root: RunId | None,
        outer: GraphRun | None,
        *,
        answered: bool = False,
    ) -> None:
        self.run = run
        self.is_saved = run.is_saved
        self.opener = opener
        self.root = root
        self.outer = outer
        self.lock = threading.RLock()
        self.settled = threading.Condition(self.lock)
        self.is_answered = answered
        self.open_before = run.guard.open_tool_calls()
        self._first_steps: dict[RunId | None, Any] = {}
        self.asked = AskedCalls(run, self.lock, answered=answered)
        self.models: dict[RunId, ModelCallInFlight] = {}
        self.tools: dict[RunId, ToolCallInFlight] = {}
        self.chains: dict[RunId, Step | None] = {}
        self.graph_call: GraphCall | None = None
        self.thread: Thread | None = None
        self.slot = 0
        self.inner: dict[int, GraphRun] = {}
        self.failed: OrderedDict[Any, None] = OrderedDict()
        self.handoffs: set[str] = set()
        self.sent: Sequence[Any] = ()
        self.said: BaseMessage | None = None
        self.interrupted: list[OpenToolCall] = []
        self.ends_in_a_node = False
        """Whether its graph has a middleware, which writes the ending of a guard around it."""
        self.waits = False
        self.is_awaited = False
        self.next_step: str | None = None
        self.stopped_inside: Trip | None = None
        self.asked_model: tuple[Any, Sequence[BaseMessage]] = (None, ())
        self.model_name: str | None = None
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()
        self._replies: deque[str] = deque(maxlen=_REPLIES)

    def opened_by(self, callback: object) -> GraphRun | None:
        """Return this run, or the one around it, that a callback opened."""
        found: GraphRun | None = self
        while found is not None and found.opener is not callback:
            found = found.outer
        return found

    def is_below(self, other: GraphRun) -> bool:
        """Return whether this is a part of another run."""
        found = self.outer
        while found is not None and found is not other:
            found = found.outer
        return found is not None

    def goes_through(self, trip: Trip) -> bool:
        """Return whether a stop is that of a run around this one, and has to reach it.

        Runs that are the same call of a graph end together, and a guard that is active in a block
        around the outermost run stops that run itself.
        """
        call = self
        while call.outer is not None and call.root is not None and call.outer.root == call.root:
            call = call.outer
        frame = call.run.above
        while frame is not None and frame.run is None:
            frame = frame.above
        return frame is not None and call.run.is_of_the_run_around(trip)

    def tell(self, trip: Trip) -> None:
        """Notify the runs around this one that are the same call of a graph of its stop."""
        outer = self.outer
        while outer is not None and self.root is not None and outer.root == self.root:
            outer.stopped_inside = outer.stopped_inside or trip
            outer = outer.outer

    def goes_on_with(self, graph: RunId | None, step: int | None) -> bool:
        """Return whether a step of a graph had begun when a person was asked: it is no further one.

        Args:
            graph: The id of the graph's own chain.
            step: The number of its step.
        """
        if self.run.has_to_end:
            return False
        return self._first_steps.setdefault(graph, step) == step

    def has_to_end(self) -> Trip | None:
        """Return the stop that keeps further steps from starting; None while they may.

        Tool calls that were admitted before it still run, each of them in a step of its own.
        """
        run = self.run
        trip = run.stopped_by
        if trip is None:
            ends = run.has_to_end
            for guard in run.guards:
                for one in guard.lineage:
                    ends = ends or one.trip is not None
            trip = run.check() if ends else None
        return None if trip is None or self.asked.are_due() else trip

    # Prompts

    @property
    def budgets(self) -> list[Budget]:
        """Every budget that a call of this run is charged to."""
        return [one.budget for guard in self.run.guards for one in guard.lineage]

    @property
    def conversation(self) -> list[BaseMessage]:
        """The last conversation that a model was sent, with its answer."""
        return [one for one in (*self.sent, self.said) if isinstance(one, BaseMessage)]

    def prompt_of(self, namespace: str) -> Prompt:
        """Return the projection of the prompts of one graph in this run."""
        found = self._prompts.get(namespace)
        if found is None:
            found = self._prompts[namespace] = Prompt()
            shorten(self._prompts)
        return found

    def has_failed(self, place: Any) -> None:
        """Note that a call failed here: the next one at this place is another attempt."""
        with self.lock:
            self.failed[place] = None
            shorten(self.failed)

    def is_said_in_turn(self, text: str, prompt: Sequence[Any]) -> bool:
        """Return whether an answer belongs to what was said before in this run.

        A graph that asks about one document after the other gets the same answer many times, and
        is no conversation.
        """
        with self.lock:
            before = set(self._replies)
            self._replies.append(text)
        return not before or any(getattr(one, "content", one) in before for one in _texts(prompt))

    # Tools in flight

    def runs_tools(self) -> bool:
        """Return whether tools are in flight."""
        return bool(self.tools)

    def wait_for_tools(self, seconds: float) -> None:
        """Block until no tool is in flight, at most so long."""
        with self.settled:
            self.is_awaited = True
            self.settled.wait_for(lambda: not self.tools, seconds)

    def started(self) -> list[str | None]:
        """List the ids of the calls whose body was started and has not ended."""
        flying = [ticket.call.id for ticket in self.run.guard.open_tool_calls()]
        inner = [one.call.call.id for one in self.tools.values()]
        left = [call.call.id for call in self.interrupted]
        return [*dict.fromkeys([*flying, *inner, *left])]

    # The end

    def release(self, node: str) -> None:
        """Charge the model calls below a node that was cancelled; they report nothing."""
        with self.lock:
            ids = [id_ for id_, one in self.models.items() if str(one.place).startswith(node)]
            flying = [self.models.pop(id_) for id_ in ids]
        for one in flying:
            OWNERS.pop(one.run_id, None)
            if one.forget is not None:
                one.forget()
            self.run.failed(one.call, asyncio.CancelledError(), written="".join(one.streamed))
            one.step.leave()

    def left(self, run_id: RunId) -> None:
        """Forget a chain that is over."""
        OWNERS.pop(run_id, None)
        step = self.chains.pop(run_id, None)
        if step is not None:
            step.leave()

    def is_over(self, error: BaseException | None) -> None:
        """Note that the graph or chain that this run is has ended, and whether it waits."""
        self.leave(error)
        if self.graph_call is not None:
            at_breakpoint, writes, place = self.graph_call.left()
            found = pending(writes)
            if self.thread is not None and place is not None:
                self.thread.moved(place)
            asked = any(not is_budget_interrupt(one) for one in found)
            self.waits = asked or is_drained(error) or (at_breakpoint and not found)

    def leave(self, error: BaseException | None) -> None:
        """Settle what reported no end, and forget every id."""
        with self.lock:
            models = list(self.models.values())
            self.asked.leave()
            self._prompts.clear()
            for run_id in (*self.chains, *self.models, *self.tools):
                OWNERS.pop(run_id, None)
            for step in self.chains.values():
                if step is not None:
                    step.leave()
            self.chains.clear()
            self.models.clear()
        for flying in models:
            if flying.forget is not None:
                flying.forget()
            # A cancelled call reports nothing at all.
            self.run.failed(
                flying.call, error or asyncio.CancelledError(), written="".join(flying.streamed)
            )
            flying.step.leave()
        for inner in self.inner.values():
            inner.leave(error)
        self.inner.clear()

    def save(self) -> None:
        """Save a checkpoint of the run, where it has a store.

        Raises:
            Fenced: The run was resumed elsewhere.
        """
        if self.is_saved:
            try:
                self.run.save()
            except RunFencedError as error:
                raise Fenced(str(error)) from error

    def settle_interrupted(self) -> None:
        """Report the tools whose task was cancelled: nothing of them runs any more."""
        calls, self.interrupted = self.interrupted, []
        for call in calls:
            self.run.finished(call, error="interrupted")


OWNERS: Final[dict[RunId, GraphRun]] = {}
"""The innermost run around each chain, model call and tool call that goes on."""


def when_task_ends(call_back: Callable[[], None]) -> Callable[[], None] | None:
    """Call back when the current task ends: a cancelled call reports no end.

    Returns:
        A function that takes it back; None where there is no task.
    """
    task = asyncio.current_task()
    if task is None:
        return None

    def ended(_: object) -> None:
        call_back()

    task.add_done_callback(ended)
    return lambda: cast("None", task.remove_done_callback(ended))


def _texts(prompt: Sequence[Any]) -> list[Any]:
    recent = prompt[-_REPLIES:]
    return [one for one in recent if isinstance(getattr(one, "content", one), str)]
