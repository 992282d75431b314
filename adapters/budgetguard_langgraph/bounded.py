"""The same graph, of the same type, whose every entry point returns a closed partial result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, Unpack, cast, overload

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.pregel import Pregel  # pyright: ignore[reportMissingTypeStubs]
from langgraph.pregel.protocol import PregelProtocol  # pyright: ignore[reportMissingTypeStubs]
from langgraph.types import StateSnapshot, StateUpdate

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    Guard,
    Outcome,
    Snapshot,
    StopReason,
    Trip,
)
from budgetguard_core.kit import (
    Chunk,
    Envelope,
    EnvelopeOptions,
    Flow,
    ProfileOptions,
    Resume,
    Step,
    envelope_of,
    in_thread,
    load_to_resume,
    named,
    run_iterated,
    run_streamed,
)
from budgetguard_langgraph._endings import (
    OutcomeHolder,
    ended_by_a_limit,
    question_to,
    remember,
    with_outcome_of,
)
from budgetguard_langgraph._messages import (
    DIALECT,
    FOLD,
    addressed,
    answered,
    conversation_key,
    has_open_calls,
    holds_another,
    messages_of,
    stops_and_questions,
    write,
)
from budgetguard_langgraph._pauses import Thread, both, called_with, with_outcome
from budgetguard_langgraph._run import current_run
from budgetguard_langgraph._seams import (
    CHECKPOINTER,
    FRAMEWORK_LIMITS,
    TASK,
    configuration,
    is_drained,
    probe,
    surrounding_callbacks,
    with_callback,
)
from budgetguard_langgraph._view import Parts, View
from budgetguard_langgraph.callback import BudgetCallback, goes_on
from budgetguard_langgraph.interrupts import BudgetInterrupt
from budgetguard_langgraph.questions import taken

_G = TypeVar("_G", bound=Pregel[Any, Any, Any, Any])
RUN_ID: Final = "budgetguard_run_id"
"""The key in a checkpoint's metadata that leads to the guard's own checkpoint."""


@dataclass(slots=True)
class Terms:
    """The bounds of a graph, shared by its copies; `earlier` is the run that is resumed."""

    envelope: Envelope
    messages_key: str = "messages"
    grace: float = 2.0
    earlier: Resume | None = None


class BoundedGraph(Pregel[Any, Any, Any, Any]):
    """Overrides what every entry point of a graph goes through; made by `bounded`."""

    _budgetguard: tuple[Terms, ...]

    def stream(self, input: Any, config: Any = None, **options: Any) -> Any:
        """Stream as the graph does; a stopped run ends with the closed state.

        When it is through, `outcome(stream)` tells how the run ended, in every stream mode.
        """
        holder = options.pop("budgetguard", None) or OutcomeHolder()
        return holder.by(self._stream(self._budgetguard, holder, input, config, options))

    def _stream(
        self,
        budgets: Sequence[Terms],
        holder: OutcomeHolder | None,
        given: Any,
        config: Any,
        options: dict[str, Any],
    ) -> Any:
        if not budgets:
            yield from self._plain.stream(given, config, **options)
            return
        *inner, terms = budgets
        call = Session(self, terms, given, config, options, holder)
        yield from run_iterated(call.flow(partial(self._stream, inner, None)))

    def astream(self, input: Any, config: Any = None, **options: Any) -> Any:
        """Stream as `stream` does; deadline and abort also end what hangs."""
        holder = options.pop("budgetguard", None) or OutcomeHolder()
        return holder.by(self._astream(self._budgetguard, holder, input, config, options))

    async def _astream(
        self,
        budgets: Sequence[Terms],
        holder: OutcomeHolder | None,
        given: Any,
        config: Any,
        options: dict[str, Any],
    ) -> Any:
        if budgets:
            *inner, terms = budgets
            call = Session(self, terms, given, config, options, holder)
            stream: Any = run_streamed(call.flow(partial(self._astream, inner, None)), [])
        else:
            stream = self._plain.astream(given, config, **options)
        async with aclosing(stream) as parts:
            async for part in parts:
                yield part

    def invoke(self, input: Any, config: Any = None, **options: Any) -> Any:
        """Return what the graph does; of a stopped run with a key `stop_reason`."""
        holder = OutcomeHolder()
        result = self._plain.invoke(input, config, budgetguard=holder, **options)
        return with_outcome_of(self, result, options, holder)

    async def ainvoke(self, input: Any, config: Any = None, **options: Any) -> Any:
        """Return what the graph does; of a stopped run with a key `stop_reason`."""
        holder = OutcomeHolder()
        result = await self._plain.ainvoke(input, config, budgetguard=holder, **options)
        return with_outcome_of(self, result, options, holder)

    def get_state(self, config: Any, *, subgraphs: bool = False) -> StateSnapshot:
        """Return the state of a thread; `outcome` takes it, where a run ended at it."""
        state = self._plain.get_state(config, subgraphs=subgraphs)
        saver = Thread(self, configuration(config)).saver
        return state if saver is None else with_outcome(state, saver.get_tuple(state.config))

    async def aget_state(self, config: Any, *, subgraphs: bool = False) -> StateSnapshot:
        """Return the state of a thread; `outcome` takes it, where a run ended at it."""
        state = await self._plain.aget_state(config, subgraphs=subgraphs)
        saver = Thread(self, configuration(config)).saver
        return state if saver is None else with_outcome(state, await saver.aget_tuple(state.config))

    @property
    def _plain(self) -> Any:
        return super()

    def copy(self, update: dict[str, Any] | None = None) -> Any:
        """Copy the graph; the copy is bounded in the same way."""
        return bind(plain(self).copy(update), self._budgetguard)


@overload
def bounded(
    graph: _G,
    budget: Budget | Guard | Envelope,
    *,
    messages_key: str = "messages",
    grace: float = 2.0,
    resume: Resume | None = None,
    **options: Unpack[EnvelopeOptions],
) -> _G: ...


@overload
def bounded(
    graph: _G,
    *,
    messages_key: str = "messages",
    grace: float = 2.0,
    resume: Resume | None = None,
    **options: Unpack[ProfileOptions],
) -> _G: ...


def bounded(
    graph: _G,
    budget: Budget | Guard | Envelope | None = None,
    *,
    messages_key: str = "messages",
    grace: float = 2.0,
    resume: Resume | None = None,
    **options: Any,
) -> _G:
    """Return the same graph, of the same type, that ends every run within a budget.

    Every entry point (`invoke`, `stream`, `batch`, `astream_events`, ...) returns what it normally
    does. A stopped run returns its state so far: all tool calls answered, a synthetic last message
    with `response_metadata["stop_reason"]`, and a key `stop_reason`. With a checkpointer the
    thread is closed in the same way. A run that completes gives what it gives unguarded. A graph
    that is bounded already is then bounded by both budgets.

    Args:
        graph: Any compiled graph: of `StateGraph.compile()`, `create_agent`, `@entrypoint`, ...
        budget: A budget: a fresh guard per call and per item of a batch; a part of the run around
            it, if there is one. A guard, shared by reference. Or an envelope.
        messages_key: The key of the conversation in the graph's state; where the state has none of
            that name, the only channel with `add_messages` is it.
        grace: Seconds that tools in flight are given to finish when the run is stopped, except by
            its deadline or an abort.
        resume: An earlier run that this graph goes on from: its `Outcome`, its `Snapshot`, or its
            id in `store`. The messages of that run come before those of the input, where the
            graph's thread has none. What its own thread holds goes on by `resume`.
        options: As `budgetguard_core.kit.Envelope` takes them. With a `store` the guard is saved
            on every step, and each step is on the disk before the next begins: a run that was
            killed goes on in another process with all that it used.

    Raises:
        AdapterError: The graph is not a compiled graph, or the releases are not supported.
        ConfigurationError: The budget or an option is none.
    """
    envelope = envelope_of(budget, **options)
    if not isinstance(cast("object", graph), Pregel):
        way_out = "Compile it first, or pass BudgetCallback in the config."
        if isinstance(graph, PregelProtocol):
            way_out = "Its steps are taken elsewhere: bound the graph there, where it runs."
        raise AdapterError(f"bounded takes a compiled graph, got {type(graph).__name__}. {way_out}")
    probe()
    budgets = (*terms_of(graph), Terms(envelope, messages_key, grace, resume))
    return cast("_G", bind(plain(graph), budgets))


def terms_of(graph: Any) -> tuple[Terms, ...]:
    """Return how a graph is bounded, the outermost budget last; nothing for a plain one."""
    return cast("tuple[Terms, ...]", getattr(graph, "_budgetguard", ()))


def plain(graph: Any) -> Any:
    """Return a bounded graph as it was before, and any other as it is."""
    if not isinstance(graph, BoundedGraph):
        return graph
    kind = type(cast("object", graph)).__mro__[2]
    return _made(kind, {k: v for k, v in vars(graph).items() if k != "_budgetguard"})


def bind(graph: Any, budgets: tuple[Terms, ...]) -> Any:
    """Return a plain graph, bounded by these."""
    plain_kind = cast("type[Any]", type(graph))
    name, module = f"Bounded{plain_kind.__name__}", {"__module__": __name__}
    kind = type(name, (BoundedGraph, plain_kind), module)
    return _made(kind, {**vars(graph), "_budgetguard": budgets})


def _made(kind: type[Any], attributes: dict[str, Any]) -> Any:
    found: Any = object.__new__(kind)
    found.__dict__.update(attributes)
    return found


class Session:
    """One call of an entry point."""

    def __init__(
        self,
        graph: Any,
        terms: Terms,
        given: Any,
        config: Any,
        options: dict[str, Any],
        holder: OutcomeHolder | None = None,
    ) -> None:
        self.graph = graph
        self.terms = terms
        self.config: Any = dict(config or {})
        self._given: Any = given
        self._options = options
        self._reported = holder
        enclosing = called_with(graph.config, config)
        # As LangGraph puts it together, for a tenant that is looked up in it.
        self._requested: Any = {**(graph.config or {}), **self.config, "configurable": enclosing}
        self.nested = TASK in enclosing
        own = isinstance(graph.checkpointer, BaseCheckpointSaver)
        lasting = graph.checkpointer is True and CHECKPOINTER in enclosing
        is_kept = (own and not self.nested) or lasting
        self.checkpointed = is_kept and enclosing.get("thread_id") is not None
        self._outer = current_run()
        self.thread = Thread(graph, enclosing, self._outer)
        self.address: Any = self.thread.config
        if lasting:
            self.address["configurable"][CHECKPOINTER] = enclosing[CHECKPOINTER]
        self.key = conversation_key(graph, terms.messages_key)
        self._view = View(graph, options, nested=self.nested)
        self._callback = BudgetCallback(terms.envelope, messages_key=terms.messages_key)
        self._callback.ends_elsewhere = True
        # How it ends: what is new in the conversation, the values, and the thread.
        self._closing: Sequence[BaseMessage] = ()
        self._values: Any = None
        self._state: StateSnapshot | None = None

    def flow(self, parts_of: Callable[[Any, Any, dict[str, Any]], Any]) -> Flow[None]:
        """Run the graph, and close its run."""
        state = kept = None
        if self.checkpointed:
            state = yield self._read()
            if goes_on(self._given):
                kept = yield from self.thread.kept()
        earlier: tuple[Snapshot, int | None] | None = None
        if kept is None and (found := self.terms.earlier) is not None:
            earlier = yield in_thread(lambda: named(found, self.terms.envelope.store))
        has_open_calls_left = self._begin(state, kept, earlier)
        # LangGraph's own limit ends a run normally only where one is enforced.
        limits = FRAMEWORK_LIMITS if self.graph_run.run.is_enforced else ()
        stops: tuple[type[Exception], ...] = (BudgetExceeded, *limits)
        error: BaseException | None = None
        parts: Parts | None = None
        try:
            if has_open_calls_left:
                yield from self._close_open_calls()
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
        outcome = yield from self._conclude(trip)
        if self.checkpointed:
            yield from self.thread.leave(self.graph_run.run.guard, outcome)
        run = self.graph_run.run
        if trip is not None and self.graph_run.propagates(trip):
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

    # Before

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
        stops, questions = stops_and_questions(state, self.thread.waiting)
        answers, self._given = taken(self._given, questions)
        if getattr(self._given, "resume", None) is not None and (stops or self.thread.was_stopped):
            self._given = addressed(self._given, questions)
        fresh, attempt, answered = False, None, kept is not None
        if kept is None and goes_on(self._given) and state is not None and state.next:
            kept, attempt = self._killed(state)
            fresh = kept is not None and (
                stops or kept.trip is not None or kept.parent_run_id is not None
            )
        if kept is None and earlier is not None:
            kept, attempt = earlier
            fresh = isinstance(self.terms.earlier, Outcome) or kept.trip is not None
            self._put_before_input(state, kept.messages)
        self.graph_run = self._callback.open(
            self._outer,
            self._given,
            self._requested,
            self.thread,
            answers,
            resume=kept,
            fresh=fresh,
            answered=answered,
        )
        if attempt is not None and kept is not None:
            self.graph_run.run.go_on_as(attempt, kept.run_id)
        self._attach()
        if self._given is None and state is not None and not state.next:
            # Nothing is left to run: the thread still tells how it ended.
            self.checkpointed = False
        if state is None or goes_on(self._given) or not state.next or questions:
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

    def _close_open_calls(self) -> Flow[None]:
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
        position = self.address["configurable"].get("checkpoint_id")
        if position is not None:
            self.config["configurable"] = {**configuration(self.config), "checkpoint_id": position}

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
        graph_run.stop(trip)
        seen = messages or graph_run.last_request
        ending = yield from graph_run.close(seen, question_to(graph_run))
        whole = ending.history
        self._closing = ending.new
        if not messages:
            whole = self._closing = [ending.message]
        self._values = self._shown(self._view.of_state(values), whole, trip)
        graph_run.notify(trip)
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
        return messages_of(self._view.latest, self.key) or self.graph_run.last_request

    def _conclude(self, trip: Trip | None) -> Flow[Outcome]:
        """End the run: checkpoint, record, outcome."""
        graph_run = self.graph_run
        messages = self._seen()
        waits = trip is None and graph_run.waits
        if trip is None:
            self._values = self._view.latest
            if not waits:
                ended_by_a_limit(graph_run, messages)
        outcome = yield from graph_run.ended(messages, trip, waits=waits)
        remember(self._values, self.key or self.terms.messages_key, outcome)
        if self._reported is not None:
            self._reported.is_on_messages = bool(outcome.messages) and self.key is not None
            self._reported.take(outcome)
        return outcome

    def _fail(self, error: BaseException) -> Flow[None]:
        """End a run that an exception or a cancellation left."""
        graph_run = self.graph_run
        graph_run.leave(error)
        outcome = yield from graph_run.ended(self._seen(), error=error, waits=is_drained(error))
        if outcome.status == "paused":
            yield from self.thread.leave(graph_run.run.guard, outcome)
