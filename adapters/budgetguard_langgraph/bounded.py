"""The same graph, of the same type, whose every entry point returns a closed partial result."""

from __future__ import annotations

import asyncio
from typing import Any, Literal, TypeVar, cast

from langgraph.pregel import Pregel  # pyright: ignore[reportMissingTypeStubs]

from budgetguard_core import AdapterError, Budget, CheckpointStore, Guard
from budgetguard_langgraph._run import STOPS, Run, Terms
from budgetguard_langgraph._watch import Watch
from budgetguard_langgraph.callback import check_arguments

_G = TypeVar("_G", bound=Pregel[Any, Any, Any, Any])


class BoundedGraph(Pregel[Any, Any, Any, Any]):
    """Overrides what every entry point of a graph goes through; made by `bounded`."""

    _budgetguard: Terms

    def stream(self, input: Any, config: Any = None, **options: Any) -> Any:
        """Stream as the graph does; a stopped run ends with the closed state."""
        run = Run(self, self._budgetguard, input, config, options)
        state = self.get_state(run.thread) if run.checkpointed else None
        opened = run.begin(state)
        error: Exception | None = None
        try:
            if opened is not None:
                self.bulk_update_state(run.thread, opened)
            parts: Any = cast("Any", super()).stream(input, run.config, **run.options)
            for chunk in parts:
                yield from run.seen(chunk)
        except STOPS as stop:
            error = stop
        finally:
            run.calls.leave()
        trip = run.trip(error)
        if trip is None:
            run.conclude(None)
            return
        run.wait(trip)
        plan = run.close(trip, self.get_state(run.thread) if run.checkpointed else None)
        if plan is not None:
            self.bulk_update_state(run.thread, plan)
        for chunk in run.last_chunks(trip, run.conclude(trip)):
            yield chunk

    async def astream(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Any, config: Any = None, **options: Any
    ) -> Any:
        """Stream as the graph does; deadline and abort also end what hangs."""
        run = Run(self, self._budgetguard, input, config, options)
        state = await self.aget_state(run.thread) if run.checkpointed else None
        opened = run.begin(state)
        error: Exception | None = None
        parts: Any = cast("Any", super()).astream(input, run.config, **run.options)
        watch = Watch(run.guard)
        try:
            if opened is not None:
                await self.abulk_update_state(run.thread, opened)
            async with watch:
                while True:
                    try:
                        # One pull after the other in this very task: its context is the run's.
                        async with watch.pull():
                            chunk = await anext(parts)
                    except StopAsyncIteration:
                        break
                    for one in run.seen(chunk):
                        yield one
        except STOPS as stop:
            error = stop
        except TimeoutError:
            if watch.trip is None:
                raise
        finally:
            run.calls.leave()
            await parts.aclose()
        trip = run.trip(error, watch.trip)
        if trip is None:
            await asyncio.to_thread(run.conclude, None)
            return
        if run.has_to_wait(trip):
            await asyncio.to_thread(run.wait, trip)
        plan = run.close(trip, await self.aget_state(run.thread) if run.checkpointed else None)
        if plan is not None:
            await self.abulk_update_state(run.thread, plan)
        outcome = await asyncio.to_thread(run.conclude, trip)
        for chunk in run.last_chunks(trip, outcome):
            yield chunk

    def copy(self, update: dict[str, Any] | None = None) -> Any:
        """Copy the graph; the copy is bounded in the same way."""
        return _bind(plain(self).copy(update), self._budgetguard)


def bounded(
    graph: _G,
    budget: Budget | Guard,
    *,
    on_trip: Literal["return", "raise"] = "return",
    store: CheckpointStore | None = None,
    messages_key: str = "messages",
    grace: float = 2.0,
) -> _G:
    """Return the same graph, of the same type, that ends every run within a budget.

    Every entry point (`invoke`, `stream`, `batch`, `astream_events`, ...) returns what it normally
    does. A stopped run returns its state so far: all tool calls answered, a synthetic last message
    with `response_metadata["stop_reason"]`, and a key `stop_reason`. With a checkpointer the
    thread is closed in the same way and each step is on the disk before the next begins.

    Args:
        graph: Any compiled graph: of `StateGraph.compile()`, `create_agent`, `@entrypoint`, ...
        budget: A budget: a fresh guard per call and per item of a batch; a child of the guard
            around it, if there is one. Or a guard, shared by reference.
        on_trip: `return`, or `raise` to have `BudgetExceeded` raised, with the outcome.
        store: Where the guard's own checkpoints go: on every step, so that a run that was killed
            goes on in another process with all that it used.
        messages_key: The key of the conversation in the graph's state.
        grace: Seconds that tools in flight are given to finish when the run is stopped, except by
            its deadline or an abort.

    Raises:
        AdapterError: The graph is not a compiled graph.
        ConfigurationError: The budget is neither a `Budget` nor a `Guard`.
    """
    check_arguments(budget, on_trip)
    if not isinstance(cast("object", graph), Pregel):
        raise AdapterError(
            f"bounded takes a compiled graph, got {type(graph).__name__}. "
            "Compile it first, or pass BudgetCallback in the config."
        )
    return cast("_G", _bind(plain(graph), Terms(budget, on_trip, store, messages_key, grace)))


def plain(graph: Any) -> Any:
    """Return a bounded graph as it was before, and any other as it is."""
    if not isinstance(graph, BoundedGraph):
        return graph
    kind = type(cast("object", graph)).__mro__[2]
    return _made(kind, {k: v for k, v in vars(graph).items() if k != "_budgetguard"})


def terms_of(graph: Any) -> Terms | None:
    """Return how a graph is bounded, or None for a plain one."""
    return cast("Terms | None", getattr(graph, "_budgetguard", None))


def _bind(graph: Any, terms: Terms) -> Any:
    plain_kind = cast("type[Any]", type(graph))
    kind = type(f"Bounded{plain_kind.__name__}", (BoundedGraph, plain_kind), {})
    return _made(kind, {**vars(graph), "_budgetguard": terms})


def _made(kind: type[Any], attributes: dict[str, Any]) -> Any:
    found: Any = object.__new__(kind)
    found.__dict__.update(attributes)
    return found
