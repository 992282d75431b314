"""A run of the kit in LangChain's world, its calls in flight, and whose a call is.

LangChain tells callbacks apart by identity and calls by run ids, so a run is found by the id of the
chain around a call, and by the frame where a configuration did not come through. Where several runs
are around a call, the innermost one counts it: it is a part of the others.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from uuid import UUID

from langchain_core.messages import BaseMessage, ToolMessage
from langgraph.errors import GraphBubbleUp

from budgetguard_core import RunFencedError, Trip
from budgetguard_core.kit import (
    FRAME,
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    Call,
    Frame,
    ModelTurn,
    OpenToolCall,
    Run,
    ToolCalls,
    current,
)
from budgetguard_langgraph._branch import Branch, are_due
from budgetguard_langgraph._pauses import Thread, pending
from budgetguard_langgraph._seams import GraphCall, is_drained, surrounding_run_id
from budgetguard_langgraph.interrupts import NotRetried, is_budget_interrupt

_REPLIES: Final = 16
_KEPT: Final = 64
"""Graphs inside a run whose prompts and tool calls are known at the same time."""

RunId: TypeAlias = UUID | str
"""A run id of LangChain's; LangGraph takes ids that are none, as texts, and keeps them."""


class Stretch(Frame):
    """The frame of a stretch of a LangChain run: a node, a model call, a tool.

    Hooks have no block to enter it in: they set it, and `leave` takes it back.
    """

    __slots__ = ("before", "closed", "graph_run", "run_id")

    def __init__(self, graph_run: GraphRun, call: Any = None, run_id: RunId | None = None) -> None:
        run = graph_run.run
        super().__init__(run.guard, run=run, call=call, above=run.above)
        self.graph_run = graph_run
        self.run_id = run_id
        self.closed = False
        before = FRAME.get()
        self.before = _open(before) if type(before) is Stretch and before.closed else before

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
    last: Stretch | None = None
    while type(frame) is Stretch and frame.closed and not (frame.run.ended and frame.is_live):
        last, frame = frame, frame.before
    return frame if frame is not None or last is None or last.run.ended else last


@dataclass(slots=True)
class InFlight:
    """A call from its start hook to its end; `forget` takes back what waits for its task's end."""

    run_id: RunId
    step: Stretch
    forget: Callable[[], object] = field(init=False, default=lambda: None)


@dataclass(slots=True)
class ModelCallInFlight(InFlight):
    """A model call.

    Attributes:
        turn: The call, in the kit's words.
        branch: Its graph; `place` is where in it: the next call there after a failure is a retry.
        bounded: The budget's completion bound has reached the request.
        reported: The usage that the chunks of its stream report.
    """

    turn: ModelTurn
    branch: Branch
    place: Any
    prompt: Sequence[Any]
    speaker: str | None
    bounded: bool = False
    reported: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])


@dataclass(slots=True)
class ToolCallInFlight(InFlight):
    """A tool call whose body has started."""

    call: OpenToolCall


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
        results: What tools returned since the last answer, by id: a node may lose them with their
            siblings.
        ends_in_a_node: Its graph has a middleware, which writes the ending of a guard around it.
        waits: A person was asked, or the graph stopped at a breakpoint.
        open_before: The tool calls that were open when it began: those of a killed process.
        is_answered: It goes on with a person's answer.
        graph_call: The call of the graph that it is, where it is one; `thread` and `slot` are where
            its counters lie while it waits.
        next_step: What was refused last.
        asked_model: The model of the last request, with its system messages. `model_name` is its
            name for the price.
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
        self.opener = opener
        self.root = root
        self.outer = outer
        self.lock = threading.RLock()
        self.settled = threading.Condition(self.lock)
        self.is_answered = answered
        self.open_before = run.guard.open_tool_calls()
        # A call of a process that died while it waited is made once more.
        self.paused = ToolCalls(run)
        if answered:
            self.paused.restore(self.open_before)
        self.results: dict[str, list[ToolMessage]] = {}
        self.models: dict[RunId, ModelCallInFlight] = {}
        self.tools: dict[RunId, ToolCallInFlight] = {}
        self.chains: dict[RunId, Stretch | None] = {}
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
        self.waits = False
        self.next_step: str | None = None
        self.stopped_inside: Trip | None = None
        self.asked_model: tuple[Any, Sequence[BaseMessage]] = (None, ())
        self.model_name: str | None = None
        self._first_steps: dict[RunId | None, Any] = {}
        self._branches: OrderedDict[str, Branch] = OrderedDict()
        self._replies: deque[str] = deque(maxlen=_REPLIES)

    # The runs around it

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

    # Its steps and conversations

    def goes_on_with(self, graph: RunId | None, step: int | None) -> bool:
        """Return whether a step of a graph had begun already when a person was asked."""
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
        if trip is None:
            return None
        with self.lock:
            calls = (self.paused, *(one.calls for one in self._branches.values()))
            return None if any(are_due(one) for one in calls) else trip

    @property
    def conversation(self) -> list[BaseMessage]:
        """The last conversation that a model was sent, with its answer."""
        return [one for one in (*self.sent, self.said) if isinstance(one, BaseMessage)]

    def branch(self, node: object) -> Branch:
        """Return the graph around a node: tasks have a namespace of their own below its own."""
        namespace = str(node or "").rpartition("|")[0]
        with self.lock:
            found = self._branches.get(namespace)
            if found is None:
                found = Branch(self.run, self.paused, is_answered=self.is_answered)
                self._branches[namespace] = found
                if len(self._branches) > _KEPT:
                    self._branches.popitem(last=False)
        return found

    def has_failed(self, place: Any) -> None:
        """Note that a call failed here: the next one at this place is another attempt."""
        with self.lock:
            self.failed[place] = None
            if len(self.failed) > _KEPT:
                self.failed.popitem(last=False)

    def is_said_in_turn(self, text: str, prompt: Sequence[Any]) -> bool:
        """Return whether an answer belongs to what was said before in this run.

        A graph that asks about one document after the other gets the same answer many times, and
        is no conversation.
        """
        with self.lock:
            before = set(self._replies)
            self._replies.append(text)
        said = [getattr(one, "content", one) for one in prompt[-_REPLIES:]]
        return not before or any(isinstance(one, str) and one in before for one in said)

    # Tools in flight

    def wait_for_tools(self, seconds: float) -> None:
        """Block until no tool is in flight, at most so long."""
        with self.settled:
            self.settled.wait_for(lambda: not self.tools, seconds)

    def answers(self, messages: Sequence[BaseMessage]) -> Callable[[Call, int], Any]:
        """Return what gives the open calls of a conversation their results.

        That is what they returned where it is known, else a note.
        """
        flying = [ticket.call.id for ticket in self.run.guard.open_tool_calls()]
        inner = [one.call.call.id for one in self.tools.values()]
        left = [call.call.id for call in self.interrupted]
        started = {*flying, *inner, *left}
        have = {one.id for one in messages if one.id is not None}
        lost = {
            id_: [one for one in results if one.id is None or one.id not in have]
            for id_, results in self.results.items()
        }

        def answer(call: Call, _: int) -> Any:
            if lost.get(call.id):
                return lost[call.id].pop(0)
            if call.id not in started:
                return NOT_EXECUTED
            started.remove(call.id)
            return OUTCOME_UNKNOWN

        return answer

    # The end

    def forget_model_calls(self, error: BaseException, node: str = "") -> None:
        """Charge the model calls in flight, or those below a node: they report nothing."""
        with self.lock:
            ids = [id_ for id_, one in self.models.items() if str(one.place).startswith(node)]
            flying = [self.models.pop(id_) for id_ in ids]
        for one in flying:
            OWNERS.pop(one.run_id, None)
            one.forget()
            one.turn.failed(error)
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
            for branch in self._branches.values():
                branch.calls.close()
            self._branches.clear()
            for run_id in self.tools:
                OWNERS.pop(run_id, None)
            for run_id in list(self.chains):
                self.left(run_id)
        self.forget_model_calls(error or asyncio.CancelledError())
        for inner in self.inner.values():
            inner.leave(error)
        self.inner.clear()

    def save(self) -> None:
        """Save a checkpoint of the run, where it has a store.

        Raises:
            Fenced: The run was resumed elsewhere.
        """
        if self.run.is_saved:
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


def owner_of(
    run_id: RunId | None, parent_run_id: RunId | None, frame: Frame | None
) -> GraphRun | None:
    """Return the innermost run that a call in a frame belongs to, as far as it is known."""
    known = OWNERS.get(run_id) if run_id is not None else None
    if known is None and parent_run_id is not None:
        known = OWNERS.get(parent_run_id)
    if known is None and OWNERS:
        known = OWNERS.get(surrounding_run_id())
    around = _run_of(frame)
    if known is None and around is None and parent_run_id is not None:
        known = _outlived()
    if known is None or (around is not None and around.is_below(known)):
        return around
    return known


def run_around() -> GraphRun | None:
    """Return the run of this adapter that the code is a part of, by its frame."""
    return _run_of(current())


def _run_of(frame: Frame | None) -> GraphRun | None:
    while frame is not None:
        if isinstance(frame, Stretch):
            return frame.graph_run
        frame = frame.above
    return None


def _outlived() -> GraphRun | None:
    """Return the run of a chain that is over and unknown by now: what it began may outlive it."""
    frame = FRAME.get()
    if type(frame) is Stretch and (not frame.run.ended or frame.is_live):
        return frame.graph_run
    return None


def is_counted_below(graph_run: GraphRun, frame: Frame | None) -> bool:
    """Return whether a run of another adapter, inside this one, counts the calls in a frame."""
    if frame is None or isinstance(frame, Stretch) or frame.run is None:
        return False
    above = frame.run.above
    while above is not None:
        if above.run is graph_run.run:
            return True
        above = above.above
    return False


def when_task_ends(call_back: Callable[[], None]) -> Callable[[], object]:
    """Call back when the current task ends: a cancelled call reports no end.

    Returns:
        A function that takes it back.
    """
    task: asyncio.Task[Any] | None = None
    with suppress(RuntimeError):
        task = asyncio.current_task()
    if task is None:
        return lambda: None

    def ended(_: object) -> None:
        call_back()

    task.add_done_callback(ended)
    return lambda: task.remove_done_callback(ended)
