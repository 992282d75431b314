"""One call of a bounded graph's entry point: whose it is, what the caller sees, how it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast
from uuid import UUID

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.types import Command, StateSnapshot, StateUpdate

from budgetguard_core import Budget, BudgetExceeded, Outcome, Snapshot, StopReason, Trip
from budgetguard_core.kit import (
    Envelope,
    Flow,
    load_to_resume,
    run_blocking,
    take_answers,
)
from budgetguard_langgraph import _approvals, _endings
from budgetguard_langgraph._closing import (
    FOLD,
    addressed,
    answered,
    asked_in,
    conversation_in,
    conversation_key,
    holds_another,
    write,
)
from budgetguard_langgraph._last import answer_of_the_last_model
from budgetguard_langgraph._messages import has_open_calls
from budgetguard_langgraph._outcomes import Told, remember
from budgetguard_langgraph._pauses import Thread, called_with
from budgetguard_langgraph._run import GraphRun, Step, run_around
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
    """How a graph is bounded; shared by its copies; `earlier` is the end of what is resumed."""

    envelope: Envelope
    messages_key: str = "messages"
    grace: float = 2.0
    earlier: Outcome | None = None


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

    def take(self, graph_run: GraphRun) -> None:
        """Take the run that was opened for this call."""
        _approvals.attach()
        self._last = graph_run


@dataclass(slots=True)
class _Ending:
    messages: list[BaseMessage] = field(default_factory=list[BaseMessage])
    closing: list[BaseMessage] = field(default_factory=list[BaseMessage])
    values: Any = None
    state: StateSnapshot | None = None


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
        self._told = told
        self.terms = terms
        self.given: Any = given
        self.config: Any = dict(config or {})
        self.options = options
        around = called_with(graph.config, config)
        # As LangGraph puts it together, for a tenant that is looked up in it.
        self._asked: Any = {**(graph.config or {}), **self.config, "configurable": around}
        self.nested = TASK in around
        own = isinstance(graph.checkpointer, BaseCheckpointSaver)
        lasting = graph.checkpointer is True and CHECKPOINTER in around
        self.checkpointed = around.get("thread_id") is not None and (
            (own and not self.nested) or lasting
        )
        self.thread = Thread(graph, around)
        self.outer = run_around()
        self.slot = self.thread.slot_in(self.outer)
        self.address: Any = self.thread.config
        if lasting:
            self.address["configurable"][CHECKPOINTER] = around[CHECKPOINTER]
        self.key = conversation_key(graph, terms.messages_key)
        self.view = View(graph, options, nested=self.nested)
        self.callback = Attached(terms.envelope, messages_key=terms.messages_key)
        self._end = _Ending()

    # Before

    @property
    def goes_on(self) -> bool:
        """True if the call goes on with what the thread was at."""
        return self.given is None or isinstance(self.given, Command)

    def begin(
        self, state: StateSnapshot | None, kept: Snapshot | None
    ) -> list[list[StateUpdate]] | None:
        """Open the run and attach it.

        Args:
            state: The thread as it was left, where there is one.
            kept: The counters of the run that waits on the thread.

        Returns:
            What has to be written to the thread first, because a stopped run left it open.

        Raises:
            AdapterError: A budget stop is to be answered like a person's approval.
        """
        stops, questions = asked_in(state, self.thread.waiting)
        answers, self.given = taken(self.given, questions)
        if getattr(self.given, "resume", None) is not None and (stops or self.thread.was_stopped):
            self.given = addressed(self.given, questions)
        fresh, attempt, answered = False, None, kept is not None
        if kept is None and self.goes_on and state is not None and state.next:
            kept, attempt = self._killed(state)
            fresh = kept is not None and (
                stops or kept.trip is not None or kept.parent_run_id is not None
            )
        if kept is None and self.terms.earlier is not None:
            kept, fresh = Snapshot.of_outcome(self.terms.earlier), True
        run = self.terms.envelope.open(
            user_spoke=not self.goes_on,
            resume=kept,
            fresh=fresh,
            config=self._asked,
            given=self.given,
            thread=thread_of(self._asked),
            asks=asker(self.terms.envelope, self.thread),
        )
        take_answers(run, answers)
        if attempt is not None and kept is not None:
            run.go_on_as(attempt, kept.run_id)
        # Its first node may be one that asks no model, and hang.
        run.guard.start()
        self.graph_run = GraphRun(run, self.callback, None, self.outer, answered=answered)
        self.graph_run.thread, self.graph_run.slot = self.thread, self.slot
        self.callback.take(self.graph_run)
        self.frame = Step(self.graph_run)
        self._attach()
        if self.given is None and state is not None and not state.next:
            # Nothing is left to run: the thread still tells how it ended.
            self.checkpointed = False
        if state is None or self.goes_on or not state.next or questions:
            return None
        messages = conversation_in(state.values, self.key)
        if not stops and not has_open_calls(messages):
            return None
        return [FOLD]

    def opened(self, state: StateSnapshot, left: StateSnapshot) -> list[list[StateUpdate]] | None:
        """Return what answers the calls that a stopped run left open, for a new turn."""
        return None if self.key is None else answered(self.graph, self.key, state, left)

    def moved(self, config: Any) -> None:
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
        config["callbacks"] = with_callback(callbacks, self.callback)
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
        if self._is_to_outlive_a_kill and self.options.get("durability") is None:
            self.options["durability"] = "sync"
        for name in [name for name, value in self.options.items() if value is None]:
            del self.options[name]

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

    @property
    def stops(self) -> tuple[type[Exception], ...]:
        """The exceptions that end the run normally; LangGraph's limit only if one is enforced."""
        limits = FRAMEWORK_LIMITS if self.graph_run.run.is_enforced else ()
        return (BudgetExceeded, *limits)

    def trip(self, error: BaseException | None, cut: Trip | None = None) -> Trip | None:
        """Return why the run was stopped, or None when it ended by itself.

        Args:
            error: What ended the graph, if anything.
            cut: Why what hung was cancelled, if it was.
        """
        run = self.graph_run.run
        if cut is not None:
            return cut
        if isinstance(error, BudgetExceeded):
            return run.stopped_by or self.graph_run.stopped_inside or error.trip
        if error is not None:
            return run.framework_limit(f"{type(error).__name__}: {str(error)[:200]}")
        if self.graph_run.waits:
            return None
        return run.stopped_by or self.graph_run.stopped_inside

    def has_to_wait(self, trip: Trip) -> bool:
        """Return whether tools are in flight that may still finish: nothing says that they hang."""
        if self.nested or trip.reason in (StopReason.MAX_SECONDS, StopReason.ABORTED):
            return False
        return bool(self.graph_run.tools)

    def wait(self) -> None:
        """Wait for tools that are in flight."""
        self.graph_run.wait_for_tools(self.terms.grace)

    def look_at(self, state: StateSnapshot | None) -> None:
        """See how a stopped run left its state; a channel of the user's own has no conversation."""
        if self.key is not None and holds_another(self._values(state), self.key):
            self.key = None

    def last_answer(self, trip: Trip, state: StateSnapshot | None) -> Flow[str | None]:
        """Ask for the last answer that the run may have; None where it has none."""
        messages = conversation_in(self._values(state), self.key)
        seen = messages or self.graph_run.conversation
        return answer_of_the_last_model(self.graph_run, trip, seen)

    def _values(self, state: StateSnapshot | None) -> Any:
        return self.view.latest if state is None or not state.values else state.values

    def close(
        self, trip: Trip, state: StateSnapshot | None, answer: str | None
    ) -> list[list[StateUpdate]] | None:
        """Close the conversation, and return what has to be written to the thread, if anything.

        Args:
            trip: Why the run was stopped.
            state: The thread, with what finished siblings wrote in it.
            answer: The model's last answer, if it gave one.
        """
        key, values = self.key, self._values(state)
        messages = conversation_in(values, key)
        whole, self._end.closing = _endings.closing_of(self.graph_run, trip, messages, answer)
        self._end.messages = whole
        if not messages:
            # A state without them, or whose caller does not ask for them.
            seen = self.graph_run.conversation
            self._end.messages, _ = _endings.closing_of(self.graph_run, trip, seen, answer)
        self._end.values = self._shown(self.view.of_state(values), whole, trip)
        if state is None or key is None or not hasattr(self.graph, "builder"):
            return None
        return write(self.graph, key, whole)

    def stays_open(self, state: StateSnapshot | None) -> bool:
        """Return whether the tasks of a thread stay as they are, to be run when it is resumed.

        So does a workflow, and a graph below another one, which begins it anew unless it is open;
        a conversation is closed there, because it goes on from what it holds.
        """
        if state is None or not state.next:
            return False
        return (self.nested and self.key is None) or not hasattr(self.graph, "builder")

    def _shown(self, values: Any, whole: Sequence[BaseMessage], trip: Trip) -> Any:
        """Return what the caller gets: the same type as ever, with the closed conversation."""
        key, keys = self.key, self.view.keys
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

    def written(self, state: StateSnapshot) -> None:
        """Take the thread as it is closed, for the streams of checkpoints."""
        self._end.state = state

    def conclude(self, trip: Trip | None) -> Outcome:
        """End the run: checkpoint, record, outcome."""
        graph_run = self.graph_run
        if trip is None:
            messages = conversation_in(self.view.latest, self.key)
            self._end.messages = messages or graph_run.conversation
            self._end.values = self.view.latest
        else:
            graph_run.tell(trip)
        if trip is None and graph_run.waits:
            outcome = _endings.pause(graph_run, self._end.messages)
        else:
            trip = trip or _endings.limit_of(graph_run, self._end.messages)
            outcome = _endings.conclude(graph_run, self._end.messages, trip)
        remember(self._end.values, self.key or self.terms.messages_key, outcome)
        if self._told is not None:
            self._told.is_on_messages = bool(self._end.messages) and self.key is not None
            self._told.take(outcome)
        return outcome

    def leave(self, outcome: Outcome) -> Flow[None]:
        """Leave on the thread how the run ended, or its counters where it waits."""
        if self.checkpointed:
            yield from self.thread.leave(self.graph_run.run.guard, outcome, self.slot)

    def fail(self, error: BaseException) -> Outcome:
        """End a run that an exception or a cancellation left."""
        graph_run = self.graph_run
        graph_run.leave(error)
        messages = conversation_in(self.view.latest, self.key)
        messages = messages or graph_run.conversation
        if not is_drained(error):
            return _endings.fail(graph_run, error, messages)
        outcome = _endings.pause(graph_run, messages, error)
        run_blocking(self.thread.keep(graph_run.run.guard, self.slot))
        return outcome

    def raise_where_asked(self) -> None:
        """Raise where a limit of the framework's has ended the run, and the caller asked for it."""
        run = self.graph_run.run
        if run.trip is not None and run.is_to_raise:
            raise BudgetExceeded(run.trip, run.outcome)

    def last_chunks(self, trip: Trip, outcome: Outcome) -> Iterator[Any]:
        """Yield the end of a stopped stream, in each mode that was asked for.

        Raises:
            BudgetExceeded: The caller asked for an exception, or the stop is that of the run
                around: it goes through, so that nobody takes the partial result for an answer.
        """
        run = self.graph_run.run
        if self.graph_run.goes_through(trip):
            raise BudgetInterrupt(trip, outcome)
        if run.is_to_raise:
            raise BudgetExceeded(trip, outcome)
        yield from self.view.last_chunks(
            self.key, self._end.closing, self._end.values, str(trip.reason), self._end.state
        )
