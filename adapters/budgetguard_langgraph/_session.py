"""One call of a bounded graph's entry point: whose it is, what the caller sees, how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast
from uuid import UUID

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.pregel import Pregel  # pyright: ignore[reportMissingTypeStubs]
from langgraph.types import Command, StateSnapshot, StateUpdate

from budgetguard_core import Budget, BudgetExceeded, Outcome, Snapshot, StopReason, Trip
from budgetguard_core.kit import (
    Chunk,
    Envelope,
    Flow,
    Resume,
    Run,
    Scope,
    Step,
    entered,
    in_thread,
    load_to_resume,
    named,
    take_answers,
)
from budgetguard_langgraph import _approvals
from budgetguard_langgraph._closing import (
    FOLD,
    addressed,
    answered,
    asked_in,
    conversation_key,
    holds_another,
    write,
)
from budgetguard_langgraph._endings import (
    Told,
    answer_of_the_last_model,
    closing_of,
    conclude,
    fail,
    limit_of,
    pause,
    remember,
)
from budgetguard_langgraph._messages import DIALECT, has_open_calls, messages_of
from budgetguard_langgraph._pauses import Thread, both, called_with
from budgetguard_langgraph._run import GraphRun, Stretch, run_around
from budgetguard_langgraph._seams import (
    CHECKPOINTER,
    FRAMEWORK_LIMITS,
    TASK,
    configuration,
    graph_call,
    is_drained,
    recursion_limit,
    surrounding_callbacks,
    thread_of,
    with_callback,
)
from budgetguard_langgraph._view import View
from budgetguard_langgraph.callback import BudgetCallback
from budgetguard_langgraph.interrupts import BudgetInterrupt
from budgetguard_langgraph.questions import asker, taken

RUN_ID: Final = "budgetguard_run_id"
"""The key in a checkpoint's metadata that leads to the guard's own checkpoint."""


@dataclass(slots=True)
class Terms:
    """How a graph is bounded; shared by its copies; `earlier` is the run that is resumed."""

    envelope: Envelope
    messages_key: str = "messages"
    grace: float = 2.0
    earlier: Resume | None = None


class Attached(BudgetCallback):
    """The callback of what opens its run and writes its ending itself."""

    ends_elsewhere = True

    def _start_chain(
        self, serialized: dict[str, Any] | None, inputs: Any, *, run_id: UUID, **facts: Any
    ) -> Flow[None]:
        """Note whose run a chain belongs to; the first one is the graph itself."""
        mine = self._last
        if mine is not None and mine.root is None:
            mine.root, mine.graph_call = run_id, graph_call()
        yield from super()._start_chain(serialized, inputs, run_id=run_id, **facts)

    def begin(self, run: Run, outer: GraphRun | None, *, answered: bool = False) -> GraphRun:
        """Take a run that was opened for this call."""
        _approvals.attach()
        self._last = graph_run = GraphRun(run, self, None, outer, answered=answered)
        return graph_run


class Parts:
    """The stream of a run, pulled chunk by chunk: what reads it is no part of the run.

    One pull is made after the other in the very task of the run: its context is the run's.
    """

    OVER: Final = object()

    def __init__(self, graph_run: GraphRun, parts: Any, stops: tuple[type[Exception], ...]) -> None:
        self._frame = Stretch(graph_run)
        self._parts = parts
        self._stops = stops
        self._scope = Scope(graph_run.run)
        self.next = Step(self._next, self._anext)
        """The step of the next chunk; `OVER` where there is none."""

    @property
    def trip(self) -> Trip | None:
        """The stop by which a pull was cut."""
        return self._scope.trip

    def close(self) -> Step:
        """Return the step that ends the stream."""
        self._scope.close()
        return Step(self._close, self._aclose)

    def _next(self) -> Any:
        with entered(self._frame):
            return next(self._parts, self.OVER)

    async def _anext(self) -> Any:
        with entered(self._frame), self._scope:
            return await anext(self._parts, self.OVER)
        return self.OVER  # it was cut

    def _close(self) -> None:
        with entered(self._frame), suppress(*self._stops):
            self._parts.close()

    async def _aclose(self) -> None:
        with entered(self._frame), suppress(*self._stops):
            await self._parts.aclose()


class Session:
    """One call of an entry point."""

    def __init__(
        self,
        graph: Any,
        terms: Terms,
        given: Any,
        config: Any,
        options: dict[str, Any],
        told: Told | None = None,
    ) -> None:
        self.graph = graph
        self.terms = terms
        self.config: Any = dict(config or {})
        self._given: Any = given
        self._options = options
        self._told = told
        around = called_with(graph.config, config)
        # As LangGraph puts it together, for a tenant that is looked up in it.
        self._asked: Any = {**(graph.config or {}), **self.config, "configurable": around}
        self.nested = TASK in around
        own = isinstance(graph.checkpointer, BaseCheckpointSaver)
        lasting = graph.checkpointer is True and CHECKPOINTER in around
        is_kept = (own and not self.nested) or lasting
        self.checkpointed = is_kept and around.get("thread_id") is not None
        self.thread = Thread(graph, around)
        self._outer = run_around()
        self.slot = self.thread.slot_in(self._outer)
        self.address: Any = self.thread.config
        if lasting:
            self.address["configurable"][CHECKPOINTER] = around[CHECKPOINTER]
        self.key = conversation_key(graph, terms.messages_key)
        self._view = View(graph, options, nested=self.nested)
        self._callback = Attached(terms.envelope, messages_key=terms.messages_key)
        # How it ends: the conversation, what is new in it, the values, and the thread.
        self._messages: Sequence[BaseMessage] = ()
        self._closing: Sequence[BaseMessage] = ()
        self._values: Any = None
        self._state: StateSnapshot | None = None

    def flow(self, parts_of: Callable[[Any, Any, dict[str, Any]], Any]) -> Flow[None]:
        """Run the graph, and close its run."""
        state = kept = None
        if self.checkpointed:
            state = yield self._read()
            if self._goes_on:
                kept = yield from self.thread.kept(self.slot)
        earlier: tuple[Snapshot, int | None] | None = None
        if kept is None and (found := self.terms.earlier) is not None:
            earlier = yield in_thread(lambda: named(found, self.terms.envelope.store))
        has_left = self._begin(state, kept, earlier)
        # LangGraph's own limit ends a run normally only where one is enforced.
        limits = FRAMEWORK_LIMITS if self.graph_run.run.is_enforced else ()
        stops: tuple[type[Exception], ...] = (BudgetExceeded, *limits)
        error: BaseException | None = None
        parts: Parts | None = None
        try:
            if has_left:
                yield from self._close_what_was_left()
            stream = parts_of(self._given, self.config, self._options)
            parts = Parts(self.graph_run, stream, stops)
            while parts.trip is None and (chunk := (yield parts.next)) is not Parts.OVER:
                for one in self._view.seen(chunk):
                    yield Chunk(one)
        except stops as stop:
            error = stop
        except BaseException as left:
            if parts is not None:
                yield parts.close()
            yield from self._fail(left)
            raise
        if parts is not None:
            yield parts.close()
        trip = self._trip(error, None if parts is None else parts.trip)
        if trip is not None:
            yield from self._stopped(trip, error)
        outcome: Outcome = yield self._step(partial(self._conclude, trip))
        if self.checkpointed:
            yield from self.thread.leave(self.graph_run.run.guard, outcome, self.slot)
        run = self.graph_run.run
        if trip is not None and self.graph_run.goes_through(trip):
            # So that nobody takes the partial result for an answer.
            raise BudgetInterrupt(trip, outcome)
        if run.trip is not None and run.is_to_raise:
            raise BudgetExceeded(run.trip, outcome)
        if trip is not None:
            chunks = self._view.last_chunks(
                self.key, self._closing, self._values, str(trip.reason), self._state
            )
            for one in chunks:
                yield Chunk(one)

    def _read(self) -> Step:
        plain: Any = Pregel
        return both(plain.get_state, plain.aget_state, self.graph, self.address)

    def _write(self, updates: list[list[StateUpdate]]) -> Flow[Any]:
        graph = self.graph
        return (
            yield both(graph.bulk_update_state, graph.abulk_update_state, self.address, updates)
        )

    def _step(self, action: Callable[[], Any]) -> Step:
        return Step(action, lambda: self.graph_run.run.in_thread(action))

    # Before

    @property
    def _goes_on(self) -> bool:
        """True if the call goes on with what the thread was at."""
        return self._given is None or isinstance(self._given, Command)

    def _begin(
        self,
        state: StateSnapshot | None,
        kept: Snapshot | None,
        earlier: tuple[Snapshot, int | None] | None,
    ) -> bool:
        """Open the run and attach it.

        Returns:
            Whether a new turn begins on a thread that a stopped run left open.

        Raises:
            AdapterError: A budget stop is to be answered like a person's approval.
        """
        stops, questions = asked_in(state, self.thread.waiting)
        answers, self._given = taken(self._given, questions)
        if getattr(self._given, "resume", None) is not None and (stops or self.thread.was_stopped):
            self._given = addressed(self._given, questions)
        fresh, attempt, answered = False, None, kept is not None
        if kept is None and self._goes_on and state is not None and state.next:
            kept, attempt = self._killed(state)
            fresh = kept is not None and (
                stops or kept.trip is not None or kept.parent_run_id is not None
            )
        if kept is None and earlier is not None:
            kept, attempt = earlier
            fresh = isinstance(self.terms.earlier, Outcome) or kept.trip is not None
            self._put_before_input(state, kept.messages)
        run = self.terms.envelope.open(
            user_spoke=not self._goes_on,
            resume=kept,
            fresh=fresh,
            config=self._asked,
            given=self._given,
            thread=thread_of(self._asked),
            asks=asker(self.terms.envelope, self.thread),
        )
        take_answers(run, answers)
        if attempt is not None and kept is not None:
            run.go_on_as(attempt, kept.run_id)
        # Its first node may be one that asks no model, and hang.
        run.guard.start()
        self.graph_run = self._callback.begin(run, self._outer, answered=answered)
        self.graph_run.thread, self.graph_run.slot = self.thread, self.slot
        self._attach()
        if self._given is None and state is not None and not state.next:
            # Nothing is left to run: the thread still tells how it ended.
            self.checkpointed = False
        if state is None or self._goes_on or not state.next or questions:
            return False
        return stops or has_open_calls(messages_of(state.values, self.key))

    def _put_before_input(self, state: StateSnapshot | None, earlier: Sequence[Any]) -> None:
        """Give the graph what an earlier run left, where no thread of its own holds it."""
        key, given = self.key, self._given
        is_known = state is not None and bool(messages_of(state.values, key))
        if key is None or is_known or not isinstance(given, dict):
            return
        values = cast("dict[str, Any]", given)
        new: Any = values.get(key) or ()
        listed = new if isinstance(cast("object", new), list | tuple) else [new]
        self._given = {**values, key: [*DIALECT.from_plain(earlier), *listed]}

    def _close_what_was_left(self) -> Flow[None]:
        """Close what a stopped run left open on the thread."""
        left = yield both(self.graph.get_state, self.graph.aget_state, self.address)
        self._moved((yield from self._write([FOLD])))
        if self.key is not None:
            rest = answered(self.graph, self.key, (yield self._read()), left)
            if rest is not None:
                self._moved((yield from self._write(rest)))

    def _moved(self, config: Any) -> None:
        """Begin at what was written to the thread, where the call names the checkpoint before."""
        self.thread.moved(config)
        place = self.address["configurable"].get("checkpoint_id")
        if place is not None:
            self.config["configurable"] = {**configuration(self.config), "checkpoint_id": place}

    def _killed(self, state: StateSnapshot) -> tuple[Snapshot | None, int | None]:
        """Take up the counters of a process that ended without a word, with all that it used.

        From here on that process, and any other that took them up before, cannot go on.
        """
        envelope, run_id = self.terms.envelope, dict(state.metadata or {}).get(RUN_ID)
        if envelope.store is None or not isinstance(run_id, str):
            return None, None
        if not isinstance(envelope.budget, Budget):
            return None, None
        return load_to_resume(envelope.store, run_id)

    def _attach(self) -> None:
        config = self.config
        callbacks: Any = config.get("callbacks")
        if callbacks is None:
            callbacks = surrounding_callbacks()
        config["callbacks"] = with_callback(callbacks, self._callback)
        if self.terms.envelope.store is not None:
            marks = {RUN_ID: self.graph_run.run.guard.run_id}
            config["metadata"] = {**(config.get("metadata") or {}), **marks}
        budget = self.graph_run.run.guard.budget
        counts = [n for n in (budget.max_iterations, budget.max_model_calls) if n is not None]
        # A number of super-steps that the caps end first, whatever the graph.
        needed = (min(counts) + 2) * (len(self.graph.nodes) + 1) if counts else None
        limit = recursion_limit(self.graph, config, needed)
        if limit is not None:
            config["recursion_limit"] = limit
        if self._is_to_outlive_a_kill and self._options.get("durability") is None:
            self._options["durability"] = "sync"
        for name in [name for name, value in self._options.items() if value is None]:
            del self._options[name]

    @property
    def _is_to_outlive_a_kill(self) -> bool:
        """True if each step is to be on the disk before the next: what it used is, in a store.

        A state that is one table too: LangGraph writes interrupts into it while it is saved. It
        hands this down, and a subgraph that has no checkpointer cannot wait for one.
        """
        is_one_value = isinstance(self.graph.stream_channels_asis, str)
        has_store = self.terms.envelope.store is not None
        if not (has_store or is_one_value) or self.nested or not self.checkpointed:
            return False
        return all(one.checkpointer is not False for _, one in self.graph.get_subgraphs())

    # After

    def _trip(self, error: BaseException | None, cut: Trip | None) -> Trip | None:
        """Return why the run was stopped, or None when it ended by itself."""
        run = self.graph_run.run
        if cut is not None:
            return cut
        if error is None and self.graph_run.waits:
            return None
        if error is not None and not isinstance(error, BudgetExceeded):
            return run.framework_limit(f"{type(error).__name__}: {str(error)[:200]}")
        trip = run.stopped_by or self.graph_run.stopped_inside
        return error.trip if trip is None and isinstance(error, BudgetExceeded) else trip

    def _stopped(self, trip: Trip, error: BaseException | None) -> Flow[None]:
        """Close the conversation of a stopped run, on its thread too."""
        graph_run, timely = self.graph_run, (StopReason.MAX_SECONDS, StopReason.ABORTED)
        if graph_run.tools and not self.nested and trip.reason not in timely:
            # They may still finish: nothing says that they hang.
            yield in_thread(lambda: graph_run.wait_for_tools(self.terms.grace))
        graph_run.leave(error)
        state: StateSnapshot | None = (yield self._read()) if self.checkpointed else None
        values = self._values_of(state)
        if self.key is not None and holds_another(values, self.key):
            self.key = None
        is_workflow = not hasattr(self.graph, "builder")
        if state is not None and state.next:
            if is_workflow or (self.nested and self.key is None):
                # Its tasks stay as they are, to be run when it is resumed: a graph below another
                # one is begun anew unless it is open. A conversation goes on from what it holds.
                state = None
            else:
                self.thread.moved((yield from self._write([FOLD])))
                state = yield self._read()
        values = self._values_of(state)
        messages = messages_of(values, self.key)
        # Without any, or where the caller does not ask for them, what the model was sent is known.
        seen = messages or graph_run.conversation
        answer = yield from answer_of_the_last_model(graph_run, trip, seen)
        whole, self._closing = closing_of(graph_run, trip, messages, answer)
        self._messages = whole
        if not messages:
            self._messages, _ = closing_of(graph_run, trip, seen, answer)
        self._values = self._shown(self._view.of_state(values), whole, trip)
        graph_run.tell(trip)
        if state is not None and self.key is not None and not is_workflow:
            written = yield from self._write(write(self.graph, self.key, whole))
            self.thread.moved(written)
            if self._view.shows_checkpoints:
                self._state = yield self._read()

    def _values_of(self, state: StateSnapshot | None) -> Any:
        return self._view.latest if state is None or not state.values else state.values

    def _shown(self, values: Any, whole: Sequence[BaseMessage], trip: Trip) -> Any:
        """Return what the caller gets: the same type as ever, with the closed conversation."""
        key, keys = self.key, self._view.keys
        if isinstance(keys, str) and keys == key:
            return list(whole)
        if isinstance(keys, str):
            # A workflow that was stopped has no value; that of an earlier turn is none of it.
            workflow = not hasattr(self.graph, "builder")
            return {"stop_reason": str(trip.reason)} if workflow else values
        if not isinstance(values, dict) and values is not None:
            return values
        ended: dict[str, Any] = dict(cast("dict[str, Any]", values or {}))
        if key is not None and key in keys:
            ended[key] = list(whole)
        return {**ended, "stop_reason": str(trip.reason)}

    def _seen(self) -> Sequence[BaseMessage]:
        return messages_of(self._view.latest, self.key) or self.graph_run.conversation

    def _conclude(self, trip: Trip | None) -> Outcome:
        """End the run: checkpoint, record, outcome."""
        graph_run = self.graph_run
        if trip is None:
            self._messages, self._values = self._seen(), self._view.latest
        if trip is None and graph_run.waits:
            outcome = pause(graph_run, self._messages)
        else:
            trip = trip or limit_of(graph_run, self._messages)
            outcome = conclude(graph_run, self._messages, trip)
        remember(self._values, self.key or self.terms.messages_key, outcome)
        if self._told is not None:
            self._told.is_on_messages = bool(self._messages) and self.key is not None
            self._told.take(outcome)
        return outcome

    def _fail(self, error: BaseException) -> Flow[None]:
        """End a run that an exception or a cancellation left."""
        graph_run = self.graph_run
        graph_run.leave(error)
        ends = pause if is_drained(error) else fail
        yield self._step(lambda: ends(graph_run, self._seen(), error))
        if is_drained(error):
            yield from self.thread.keep(graph_run.run.guard, self.slot)
