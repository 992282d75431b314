"""One call of a bounded graph's entry point: whose it is, what the caller sees, how it ends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast
from uuid import UUID

import langgraph.errors
from langchain_core.callbacks import BaseCallbackManager
from langchain_core.messages import BaseMessage, messages_to_dict
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.constants import END
from langgraph.errors import GraphRecursionError
from langgraph.types import Command, StateSnapshot, StateUpdate

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    CheckpointStore,
    Guard,
    Outcome,
    StopReason,
    Trip,
    Violation,
    end_run,
)
from budgetguard_langgraph._calls import Calls, chain, keep, part_of
from budgetguard_langgraph._history import (
    final_text,
    merged,
    messages_of,
    results_for,
    synthetic_message,
    unanswered,
)
from budgetguard_langgraph._outcomes import remember
from budgetguard_langgraph.callback import (
    ANSWERED,
    SCOPE,
    BudgetCallback,
    guard_around,
    scope_of,
    stop_of,
)
from budgetguard_langgraph.interrupts import BudgetInterrupt, is_budget_interrupt

NODE: Final = "budgetguard"
"""The name under which the closing messages show up in `updates` and `messages` streams."""
RUN_ID: Final = "budgetguard_run_id"
"""The key in a checkpoint's metadata that leads to the guard's own checkpoint."""

_TASK: Final = "__pregel_task_id"
_INTERRUPT: Final = "__interrupt__"
_INPUT: Final = "__start__"
_PUSH: Final = "__pregel_push"

# The framework's own caps; the later ones only since LangGraph 1.1.
FRAMEWORK_LIMITS: Final[tuple[type[Exception], ...]] = (
    GraphRecursionError,
    *(
        getattr(langgraph.errors, name)
        for name in ("GraphDrained", "NodeTimeoutError")
        if hasattr(langgraph.errors, name)
    ),
)
STOPS: Final[tuple[type[Exception], ...]] = (BudgetExceeded, *FRAMEWORK_LIMITS)


@dataclass(slots=True)
class Terms:
    """How a graph is bounded; shared by its copies."""

    budget: Budget | Guard
    on_trip: Literal["return", "raise"] = "return"
    store: CheckpointStore | None = None
    messages_key: str = "messages"
    grace: float = 2.0
    paused: OrderedDict[Any, Guard] = field(default_factory=OrderedDict[Any, Guard])
    """The guards of threads that wait for a person's answer."""


class _Callback(BudgetCallback):
    """The callback of a bounded graph, which writes the ending itself."""

    def __init__(self, guard: Guard, terms: Terms) -> None:
        super().__init__(guard, store=terms.store, messages_key=terms.messages_key)
        self._concludes = False
        self._saves = terms.store is not None
        self.root: UUID | None = None

    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **facts: Any,
    ) -> None:
        super().on_chain_start(
            serialized, inputs, run_id=run_id, parent_run_id=parent_run_id, **facts
        )
        if self.root is None:
            run = self.run_of(run_id)
            self.root = None if run is None else run.root


class Run:
    """One call of an entry point."""

    def __init__(
        self, graph: Any, terms: Terms, given: Any, config: Any, options: dict[str, Any]
    ) -> None:
        self.graph = graph
        self.terms = terms
        self.given: Any = given
        around: dict[str, Any] = {
            name: value
            for found in (var_child_runnable_config.get(), graph.config, config)
            for name, value in _configurable(found).items()
        }
        self.nested = _TASK in around
        self.checkpointed = (
            not self.nested
            and graph.checkpointer not in (None, False, True)
            and around.get("thread_id") is not None
        )
        names = ("thread_id", "checkpoint_ns")
        self.thread: Any = {"configurable": {n: around[n] for n in names if n in around}}
        self.outer = guard_around(config)
        self.config: Any = dict(config or {})
        self.options = options
        mode = options.pop("stream_mode", None)
        if mode is None:
            mode = "values" if self.nested else graph.stream_mode
        self._single = isinstance(mode, str)
        self._modes: list[str] = [mode] if isinstance(mode, str) else list(mode)
        self._subgraphs = bool(options.get("subgraphs"))
        self._typed = options.get("version", "v1") != "v1"
        self.latest: Any = None
        self._interrupted = False
        self._paused = False

    # Before

    def begin(self, state: StateSnapshot | None) -> list[list[StateUpdate]] | None:
        """Choose the guard and attach it.

        Args:
            state: The thread as it was left, where there is one.

        Returns:
            What has to be written to the thread first, because a stopped run left it open.

        Raises:
            AdapterError: A budget stop is to be answered like a person's approval.
        """
        stops = [i for i in _interrupts(state) if is_budget_interrupt(i)]
        answer = getattr(self.given, "resume", None)
        if answer is not None and stops:
            raise AdapterError(ANSWERED)
        self.guard = self._guard(state, stopped=bool(stops))
        self.calls = self.guard.attachment(Calls)
        shared = self.calls.enter()
        if self.guard is self.terms.budget and self.outer is None:
            if shared:
                self.guard = part_of(self.guard)
            elif not self._goes_on():
                self.guard.user_turn()
        self.callback = _Callback(self.guard, self.terms)
        self._attach()
        if state is None or self._goes_on():
            return None
        messages = messages_of(state.values, self.terms.messages_key)
        if not state.next or not unanswered(messages) or len(stops) < len(_interrupts(state)):
            return None
        return self._updates(results_for(messages, self.guard), fold=True)

    def _guard(self, state: StateSnapshot | None, *, stopped: bool) -> Guard:
        budget = self.terms.budget
        if isinstance(budget, Guard):
            return budget
        goes_on = self._goes_on()
        if self.checkpointed:
            waiting = self.terms.paused.pop(self._thread_id(), None)
            # A person's answer does not begin the run anew.
            if goes_on and waiting is not None:
                return waiting
        if goes_on and state is not None and state.next and self.terms.store is not None:
            restored = self._restored(state, self.terms.store, budget if stopped else None)
            if restored is not None:
                return restored
        return Guard(budget) if self.outer is None else self.outer.child(budget)

    def _goes_on(self) -> bool:
        return self.given is None or isinstance(self.given, Command)

    def _restored(
        self, state: StateSnapshot, store: CheckpointStore, budget: Budget | None
    ) -> Guard | None:
        """Take up the guard of a process that ended without a word, with all that it used."""
        run_id = dict(state.metadata or {}).get(RUN_ID)
        snapshot = None if not isinstance(run_id, str) else store.load(run_id)
        if snapshot is None:
            return None
        given = cast("Budget", self.terms.budget)
        if budget is not None or snapshot.trip is not None or snapshot.parent_run_id is not None:
            return Guard.restore(snapshot, given)
        return Guard.restore(snapshot, stop_when=given.stop_when)

    def _attach(self) -> None:
        config = self.config
        callbacks: Any = config.get("callbacks")
        if callbacks is None:
            callbacks = (var_child_runnable_config.get() or {}).get("callbacks") or []
        if isinstance(callbacks, BaseCallbackManager):
            callbacks = callbacks.copy()
            callbacks.add_handler(self.callback, inherit=True)
        else:
            callbacks = [*callbacks, self.callback]
        config["callbacks"] = callbacks
        marks = {SCOPE: scope_of(self.guard)}
        if self.terms.store is not None:
            marks[RUN_ID] = self.guard.run_id
        config["metadata"] = {**(config.get("metadata") or {}), **marks}
        limit = self._recursion_limit()
        if limit is not None:
            config.setdefault("recursion_limit", limit)
        if self.checkpointed and self.options.get("durability") is None:
            self.options["durability"] = "sync"
        for name in [name for name, value in self.options.items() if value is None]:
            del self.options[name]
        self.options["stream_mode"] = (
            self._modes if "values" in self._modes else [*self._modes, "values"]
        )

    def _recursion_limit(self) -> int | None:
        """Return a number of super-steps that the caps end first, whatever the graph."""
        budget = self.guard.budget
        counts = [n for n in (budget.max_iterations, budget.max_model_calls) if n is not None]
        steps = len(self.graph.nodes) + 1
        return (min(counts) + 2) * steps if counts else None

    def _thread_id(self) -> Any:
        return tuple(self.thread["configurable"].items())

    # While it runs

    def seen(self, chunk: Any) -> Iterator[Any]:
        """Take note of a chunk, and yield what the caller gets of it."""
        namespace, mode, payload, interrupts = self._parts(chunk)
        stops = False
        if mode in ("values", "updates"):
            payload, interrupts, stops = self._without_stops(namespace, payload, interrupts)
        if mode == "values" and not namespace:
            self.latest = payload
        if mode in self._modes and not (stops and mode == "updates" and not payload):
            yield self._chunk(mode, payload, namespace, interrupts)

    def _parts(self, chunk: Any) -> tuple[tuple[str, ...], str, Any, tuple[Any, ...]]:
        if self._typed:
            namespace, interrupts = chunk.get("ns", ()), chunk.get("interrupts", ())
            return tuple(namespace), chunk["type"], chunk["data"], tuple(interrupts)
        if self._subgraphs:
            return (*chunk, ())
        return ((), *chunk, ())

    def _chunk(
        self,
        mode: str,
        payload: Any,
        namespace: tuple[str, ...] = (),
        interrupts: tuple[Any, ...] = (),
    ) -> Any:
        if self._typed:
            part = {"type": mode, "ns": namespace, "data": payload}
            return {**part, "interrupts": interrupts} if mode == "values" else part
        parts = (payload,) if self._single else (mode, payload)
        if self._subgraphs:
            return (namespace, *parts)
        return payload if self._single else parts

    def _without_stops(
        self, namespace: tuple[str, ...], payload: Any, interrupts: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...], bool]:
        told: tuple[Any, ...] = ()
        if isinstance(payload, dict) and _INTERRUPT in payload:
            told = tuple(cast("Sequence[Any]", payload[_INTERRUPT]))
        found = (*interrupts, *told)
        if not found:
            return cast("Any", payload), interrupts, False
        others = [one for one in found if not is_budget_interrupt(one)]
        stopped = len(others) < len(found)
        if not namespace:
            self._interrupted |= stopped
            self._paused |= bool(others)
        if not stopped:
            return cast("Any", payload), interrupts, False
        if told:
            left = {k: v for k, v in cast("dict[str, Any]", payload).items() if k != _INTERRUPT}
            asked = tuple(one for one in told if not is_budget_interrupt(one))
            payload = {**left, _INTERRUPT: asked} if asked else left
        kept = tuple(one for one in interrupts if not is_budget_interrupt(one))
        return cast("Any", payload), kept, True

    # After

    def trip(self, error: Exception | None, cancelled: Trip | None = None) -> Trip | None:
        """Return why the run was stopped, or None when it ended by itself.

        Args:
            error: What ended the graph, if anything.
            cancelled: Why what hung was cancelled, if it was.

        Raises:
            BudgetExceeded: What ended is an envelope above this graph.
        """
        seen, self._prompt = stop_of(self.calls, self.callback.root, self.guard)
        if cancelled is not None:
            error = BudgetInterrupt(cancelled)
        if isinstance(error, BudgetExceeded):
            above = {one.run_id for one in chain(self.outer)}
            if self.nested and error.trip.run_id in above:
                raise error
            return error.trip
        if error is not None:
            detail = f"{type(error).__name__}: {str(error)[:200]}"
            self.guard.hold(Violation(reason=StopReason.FRAMEWORK_LIMIT, detail=detail))
            trip = self.guard.check()
            if trip is None:
                raise error
            return trip
        if self._interrupted:
            return self.guard.trip or seen
        if seen is not None:
            return seen
        # A node may have swallowed the stop, in a run that nobody else shares.
        return self.guard.trip if isinstance(self.terms.budget, Budget) else None

    def wait(self, trip: Trip) -> None:
        """Let tools that are in flight finish, where nothing says that they hang."""
        if self.has_to_wait(trip):
            self.calls.wait_for_tools(self.callback.root, self.terms.grace)

    def has_to_wait(self, trip: Trip) -> bool:
        """Tell whether `wait` would block."""
        if self.nested or trip.reason in (StopReason.MAX_SECONDS, StopReason.ABORTED):
            return False
        return self.calls.runs_tools(self.callback.root)

    def close(self, trip: Trip, state: StateSnapshot | None) -> list[list[StateUpdate]] | None:
        """Close the conversation, and return what has to be written to the thread, if anything."""
        values: Any = self.latest if state is None or not state.values else state.values
        key = self.terms.messages_key
        known = key in self.graph.channels or (isinstance(values, dict) and key in values)
        messages = messages_of(values, key) if known else []
        root = self.callback.root
        results = results_for(messages, self.guard, lambda id_: self.calls.result_of(root, id_))
        last = synthetic_message([*messages, *results], self.guard, trip)
        self._closing = [*results, last]
        self.messages = merged(messages, self._closing)
        self.values: Any = values
        if values is None or isinstance(values, dict):
            ended: dict[str, Any] = {**(values or {}), "stop_reason": str(trip.reason)}
            if known:
                ended[key] = self.messages
            self.values = ended
        if state is None or key not in self.graph.channels:
            return None
        tasks: Any = state.tasks
        sent = any(task.path and task.path[0] == _PUSH for task in tasks)
        if state.next and sent and not unanswered(messages):
            # Tasks with an input of their own cannot be scheduled again: they stay as they are.
            return None
        return self._updates(self._closing, fold=bool(state.next))

    def _updates(self, closing: Sequence[BaseMessage], *, fold: bool) -> list[list[StateUpdate]]:
        """Keep what finished siblings wrote, append, and schedule nothing."""
        kept = [[StateUpdate(None, END)]] if fold else []
        append = [StateUpdate({self.terms.messages_key: list(closing)}, _INPUT)]
        return [*kept, append, [StateUpdate(None, END)]]

    def conclude(self, trip: Trip | None) -> Outcome:
        """Save and record the end of the run, and make its outcome."""
        store = self.terms.store
        key = self.terms.messages_key
        if trip is None:
            self.messages = messages_of(self.latest, key)
            self.values = self.latest
            if self._paused and self.checkpointed and isinstance(self.terms.budget, Budget):
                keep(self.terms.paused, self._thread_id(), self.guard)
        outcome = end_run(
            self.guard,
            trip=trip,
            messages=self.messages,
            final=final_text(self.messages),
            store=store,
            saved_messages=messages_to_dict(self.messages) if store is not None else None,
            resume=None if trip is None else "resume(graph, config, budget)",
        )
        remember(self.values, key, outcome)
        return outcome

    def last_chunks(self, trip: Trip, outcome: Outcome) -> Iterator[Any]:
        """Yield the end of a stopped stream, in each mode that was asked for.

        Raises:
            BudgetExceeded: The caller asked for an exception.
        """
        if self.terms.on_trip == "raise":
            raise BudgetExceeded(trip, outcome)
        key, reason = self.terms.messages_key, str(trip.reason)
        if "messages" in self._modes:
            about = {"langgraph_node": NODE, "stop_reason": reason}
            yield self._chunk("messages", (self._closing[-1], about))
        if "updates" in self._modes:
            yield self._chunk("updates", {NODE: {key: self._closing, "stop_reason": reason}})
        if "values" in self._modes:
            yield self._chunk("values", self.values)


def _configurable(config: Any) -> dict[str, Any]:
    found: Any = None if config is None else config.get("configurable")
    return found or {}


def _interrupts(state: StateSnapshot | None) -> list[Any]:
    if state is None:
        return []
    return [interrupt for task in state.tasks for interrupt in task.interrupts]


def metadata_of(state: StateSnapshot) -> Mapping[str, Any]:
    """Return the metadata of a checkpoint."""
    return cast("Mapping[str, Any]", state.metadata or {})
