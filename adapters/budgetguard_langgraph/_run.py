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
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar
from uuid import UUID

from langchain_core.messages import BaseMessage
from langgraph.errors import GraphBubbleUp

from budgetguard_core import Outcome, RunFencedError, Trip
from budgetguard_core.kit import (
    FRAME,
    Call,
    Flow,
    Frame,
    ModelTurn,
    OpenToolCall,
    Run,
    Session,
    ToolCalls,
    close_history,
    current,
)
from budgetguard_langgraph._branch import Branch, are_due
from budgetguard_langgraph._messages import DIALECT
from budgetguard_langgraph._pauses import Thread, pending
from budgetguard_langgraph._seams import GraphCall, is_drained, surrounding_run_id
from budgetguard_langgraph.interrupts import NotRetried, is_budget_interrupt

_REPLIES: Final = 16
_KEPT: Final = 64
"""Graphs inside a run whose prompts and tool calls are known at the same time."""
_PAUSED: Final = "Command(resume=answer), on the same thread"
_STOPPED: Final = "resume(graph, config, budget), with a checkpointer"

RunId: TypeAlias = UUID | str
"""A run id of LangChain's; LangGraph takes ids that are none, as texts, and keeps them."""


@dataclass(slots=True)
class ModelCallInFlight:
    """A model call from its start hook to its end.

    Attributes:
        turn: The call, in the kit's words.
        branch: Its graph; `place` is where in it: the next call there after a failure is a retry.
        bounded: The budget's completion bound has reached the request.
        reported: The usage that the chunks of its stream report.
    """

    turn: ModelTurn
    branch: Branch
    location: Any
    prompt: Sequence[Any]
    speaker: str | None
    bounded: bool = False
    reported: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])


_Flight = TypeVar("_Flight", ModelCallInFlight, OpenToolCall)


class Stretch(Frame):
    """A stretch of a LangChain run, from its start hook to its end: a chain, a model call, a tool.

    It is the record of that by its run id, and the frame of its code. Hooks have no block to enter
    it in: they set it, and `leave` takes it back.

    Attributes:
        flight: The call that it is, and not only a part of.
        forget: Takes back what waits for the end of its task.
    """

    __slots__ = ("before", "closed", "flight", "forget", "graph_run", "key", "run_id")

    def __init__(
        self,
        graph_run: GraphRun,
        run_id: RunId | None = None,
        call: Any = None,
        flight: ModelCallInFlight | OpenToolCall | None = None,
    ) -> None:
        # As `Frame` does: one is made for each step.
        run = self.run = graph_run.run
        self.guard, self.call, self.parent = run.guard, call, run.parent
        self.graph_run, self.run_id, self.flight = graph_run, run_id, flight
        self.closed = False
        self.forget: Callable[[], object] | None = None
        before = FRAME.get()
        self.before = _open(before) if type(before) is Stretch and before.closed else before
        self.key: int | str = run_id.int if type(run_id) is UUID else str(run_id)
        if run_id is not None:
            OWNERS[self.key] = self
            graph_run.stretches.add(self)

    def leave(self) -> None:
        """Forget it, and take the frame back.

        LangChain calls the end hooks of asynchronous code in another context: where this one was
        set it stays, and from now on stands for what was there before.
        """
        graph_run = self.graph_run
        graph_run.stretches.discard(self)
        OWNERS.pop(self.key, None)
        if self.forget is not None:
            self.forget()
        if graph_run.idle is not None and not graph_run.tools:
            graph_run.idle.set()
        self.closed = True
        self.parent = before = self.before
        if FRAME.get() is self:
            # Also a chain that is over meanwhile: what it has begun is still a part of its run.
            FRAME.set(before)

    def landed(self, kind: type[_Flight]) -> _Flight | None:
        """Return the call of this kind that it is, once, and leave it."""
        flight = self.flight
        if self.closed or not isinstance(flight, kind):
            return None
        self.leave()
        return flight

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


class Fenced(RunFencedError, GraphBubbleUp, NotRetried):
    """A run that was resumed elsewhere ends here, of a type that no layer retries or swallows."""


class GraphRun(Session):
    """One run of the kit, as LangChain's hooks tell of it.

    Its own tool calls are those that waited for a person; each graph in it has a branch.

    Attributes:
        opener: The callback that opened it; `outer` is the run of this adapter around it.
        root: The id of the chain that it began with; None for calls outside of any chain.
        stretches: What goes on of it, as hooks tell.
        ends_in_a_node: Its graph has a middleware, which writes the ending of a guard around it.
        waits: A person was asked, or the graph stopped at a breakpoint.
        open_before: The tool calls that were open when it began: those of a killed process.
        graph_call: The call of the graph that it is, where it is one; `thread` is where its
            counters lie while it waits.
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
        # A call of a process that died while it waited is made once more.
        super().__init__(run, DIALECT, resumed=answered)
        self._graphs: OrderedDict[str, Branch] = OrderedDict()
        self.is_saved = run.is_saved
        self.opener = opener
        self.root = root
        self.outer = outer
        self.lock = threading.RLock()
        self.stretches: set[Stretch] = set()
        self.open_before = run.guard.open_tool_calls()
        self.graph_call: GraphCall | None = None
        self.thread: Thread | None = None
        self.inner: dict[int, GraphRun] = {}
        self.failed: OrderedDict[Any, None] = OrderedDict()
        self.handoffs: set[str] = set()
        self.sent: Sequence[Any] = ()
        self.last_reply: BaseMessage | None = None
        self.interrupted: list[OpenToolCall] = []
        self.ends_in_a_node = False
        self.waits = False
        self.next_step: str | None = None
        self.stopped_inside: Trip | None = None
        self.last_model: tuple[Any, Sequence[BaseMessage]] = (None, ())
        self.model_name: str | None = None
        self.idle: threading.Event | None = None
        self._first_steps: dict[RunId | None, Any] = {}
        self._replies: deque[str] = deque(maxlen=_REPLIES)

    # The runs around it

    def run_of(self, callback: object) -> GraphRun | None:
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

    def propagates(self, trip: Trip) -> bool:
        """Return whether a stop is that of a run around this one, and has to reach it.

        Runs that are the same call of a graph end together, and a guard that is active in a block
        around the outermost run stops that run itself.
        """
        call = self
        while call.outer is not None and call.root is not None and call.outer.root == call.root:
            call = call.outer
        frame = call.run.parent
        while frame is not None and frame.run is None:
            frame = frame.parent
        return frame is not None and call.run.is_of_parent_run(trip)

    def notify(self, trip: Trip) -> None:
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
                ends = ends or guard.tree.halted
            trip = run.check() if ends else None
        if trip is None:
            return None
        with self.lock:
            return None if any(are_due(calls) for calls in self._all_calls()) else trip

    @property
    def last_request(self) -> list[BaseMessage]:
        """The last conversation that a model was sent, with its answer."""
        return [one for one in (*self.sent, self.last_reply) if isinstance(one, BaseMessage)]

    def branch(self, node: object) -> Branch:
        """Return the graph around a node: tasks have a namespace of their own below its own."""
        namespace = str(node or "").rpartition("|")[0]
        with self.lock:
            found = self._graphs.get(namespace)
            if found is None:
                found = self._graphs[namespace] = Branch(
                    self.run, self.calls, is_answered=self.resumed
                )
                if len(self._graphs) > _KEPT:
                    self._graphs.popitem(last=False)
        return found

    def _all_calls(self) -> list[ToolCalls]:
        return [*(one.calls for one in list(self._graphs.values())), self.calls]

    def has_failed(self, location: Any) -> None:
        """Note that a call failed here: the next one at this place is another attempt."""
        with self.lock:
            self.failed[location] = None
            if len(self.failed) > _KEPT:
                self.failed.popitem(last=False)

    def is_in_turn(self, text: str, prompt: Sequence[Any]) -> bool:
        """Return whether an answer belongs to what was said before in this run.

        A graph that asks about one document after the other gets the same answer many times, and
        is no conversation.
        """
        with self.lock:
            before = set(self._replies)
            self._replies.append(text)
        last_reply = [getattr(one, "content", one) for one in prompt[-_REPLIES:]]
        return not before or any(isinstance(one, str) and one in before for one in last_reply)

    # What goes on

    @property
    def tools(self) -> list[OpenToolCall]:
        """The tool calls in flight."""
        return [one.flight for one in list(self.stretches) if isinstance(one.flight, OpenToolCall)]

    def wait_for_tools(self, seconds: float) -> None:
        """Block until no tool is in flight, at most so long."""
        self.idle = threading.Event()
        if self.tools:
            self.idle.wait(seconds)

    def forget_model_calls(self, error: BaseException, node: str = "") -> None:
        """Charge the model calls in flight, or those below a node: they report nothing."""
        for one in list(self.stretches):
            flight = one.flight
            if isinstance(flight, ModelCallInFlight) and str(flight.location).startswith(node):
                flight.turn.failed(error)
                one.leave()

    # The end

    def over(self, error: BaseException | None) -> None:
        """Note that the graph or chain that this run is has ended, and whether it waits."""
        self.leave(error)
        if self.graph_call is not None:
            at_breakpoint, writes, location = self.graph_call.chain_left()
            found = pending(writes)
            if self.thread is not None and location is not None:
                self.thread.moved(location)
            requested = any(not is_budget_interrupt(one) for one in found)
            self.waits = requested or is_drained(error) or (at_breakpoint and not found)

    def leave(self, error: BaseException | None) -> None:
        """Settle what reported no end, and forget every id."""
        for calls in self._all_calls():
            calls.close()
        self.forget_model_calls(error or asyncio.CancelledError())
        for one in list(self.stretches):
            if one.flight is None:
                one.leave()
            OWNERS.pop(one.key, None)
        for inner in self.inner.values():
            inner.leave(error)
        self.inner.clear()

    def _closed(self, messages: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return close_history(messages, self.dialect, self._answer)

    def _answer(self, call: Call, number: int) -> Any:
        for calls in self._all_calls():
            if any((one.call.id, one.call.name) == (call.id, call.name) for one in calls):
                return calls.answer(call, number)
        return self.calls.answer(call, number)

    def ended(
        self,
        messages: Sequence[BaseMessage],
        trip: Trip | None = None,
        error: BaseException | None = None,
        *,
        waits: bool = False,
    ) -> Flow[Outcome]:
        """End the run: it completed, was stopped or failed, or waits for a person or to go on."""
        if trip is not None:
            self.stop(trip)
        outcome = yield from self.finish(
            messages,
            error=error,
            waits=waits,
            next_step=self.next_step,
            resume=_PAUSED if waits else _STOPPED,
        )
        self._graphs.clear()
        self.settle_interrupted()
        if waits and error is not None:
            self.attach(error)
        return outcome

    def save_counters(self) -> None:
        """Save a checkpoint of the run, where it has a store.

        Raises:
            Fenced: The run was resumed elsewhere.
        """
        if not self.is_saved:
            return
        try:
            self.run.save()
        except RunFencedError as error:
            raise Fenced(str(error)) from error

    def settle_interrupted(self) -> None:
        """Report the tools whose task was cancelled: nothing of them runs any more."""
        calls, self.interrupted = self.interrupted, []
        for call in calls:
            self.run.finished(call, error="interrupted")


OWNERS: Final[dict[int | str, Stretch]] = {}
"""The runs that go on, by LangChain's run id: of the innermost run that holds it."""


def record_of(run_id: RunId | None) -> Stretch | None:
    """Return what goes on under a run id."""
    # The hash of a UUID is made in Python, at each look-up.
    return OWNERS.get(run_id.int if type(run_id) is UUID else run_id)  # type: ignore[arg-type]


def owner_of(
    record: Stretch | None, parent_run_id: RunId | None, frame: Frame | None
) -> GraphRun | None:
    """Return the innermost run that a call in a frame belongs to, as far as it is known.

    The record is that of the call or of the chain around it.
    """
    if record is None and OWNERS:
        record = record_of(surrounding_run_id())
    known = None if record is None else record.graph_run
    enclosing = frame.graph_run if type(frame) is Stretch else _run_of(frame)
    if known is None and enclosing is None and parent_run_id is not None:
        known = _outlived()
    if known is None or (
        enclosing is not None and enclosing is not known and enclosing.is_below(known)
    ):
        return enclosing
    return known


def current_run() -> GraphRun | None:
    """Return the run of this adapter that the code is a part of, by its frame."""
    return _run_of(current())


def _run_of(frame: Frame | None) -> GraphRun | None:
    while frame is not None:
        if type(frame) is Stretch:
            return frame.graph_run
        frame = frame.parent
    return None


def _outlived() -> GraphRun | None:
    """Return the run of a chain that is over and unknown by now: what it began may outlive it."""
    frame = FRAME.get()
    if type(frame) is Stretch and (not frame.run.ended or frame.is_live):
        return frame.graph_run
    return None


def is_counted_below(graph_run: GraphRun, frame: Frame | None) -> bool:
    """Return whether a run of another adapter, inside this one, counts the calls in a frame."""
    if frame is None or type(frame) is Stretch or frame.run is None:
        return False
    parent = frame.run.parent
    while parent is not None:
        if parent.run is graph_run.run:
            return True
        parent = parent.parent
    return False


def when_task_ends(call_back: Callable[[], None]) -> Callable[[], object] | None:
    """Call back when the current task ends, until what is returned is called.

    A cancelled call reports no end.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    if task is None:
        return None

    def ended(_: object) -> None:
        call_back()

    task.add_done_callback(ended)
    return lambda: task.remove_done_callback(ended)
