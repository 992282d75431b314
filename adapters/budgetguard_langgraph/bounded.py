"""The same graph, of the same type, whose every entry point returns a closed partial result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar, Unpack, cast, overload

from langgraph.pregel import Pregel  # pyright: ignore[reportMissingTypeStubs]
from langgraph.pregel.protocol import PregelProtocol  # pyright: ignore[reportMissingTypeStubs]
from langgraph.types import StateSnapshot

from budgetguard_core import AdapterError, Budget, Guard
from budgetguard_core.kit import (
    Envelope,
    EnvelopeOptions,
    ProfileOptions,
    Resume,
    envelope_of,
    run_iterated,
    run_streamed,
)
from budgetguard_langgraph._endings import Told, with_outcome_of
from budgetguard_langgraph._pauses import Thread, with_outcome
from budgetguard_langgraph._seams import configuration, probe
from budgetguard_langgraph._session import Session, Terms

_G = TypeVar("_G", bound=Pregel[Any, Any, Any, Any])


class BoundedGraph(Pregel[Any, Any, Any, Any]):
    """Overrides what every entry point of a graph goes through; made by `bounded`."""

    _budgetguard: tuple[Terms, ...]

    def stream(self, input: Any, config: Any = None, **options: Any) -> Any:
        """Stream as the graph does; a stopped run ends with the closed state.

        When it is through, `outcome(stream)` tells how the run ended, in every stream mode.
        """
        told = options.pop("budgetguard", None) or Told()
        return told.by(self._stream(self._budgetguard, told, input, config, options))

    def _stream(
        self,
        budgets: Sequence[Terms],
        told: Told | None,
        given: Any,
        config: Any,
        options: dict[str, Any],
    ) -> Any:
        if not budgets:
            yield from self._plain.stream(given, config, **options)
            return
        *inner, terms = budgets
        call = Session(self, terms, given, config, options, told)
        yield from run_iterated(call.flow(partial(self._stream, inner, None)))

    def astream(self, input: Any, config: Any = None, **options: Any) -> Any:
        """Stream as `stream` does; deadline and abort also end what hangs."""
        told = options.pop("budgetguard", None) or Told()
        return told.by(self._astream(self._budgetguard, told, input, config, options))

    async def _astream(
        self,
        budgets: Sequence[Terms],
        told: Told | None,
        given: Any,
        config: Any,
        options: dict[str, Any],
    ) -> Any:
        if budgets:
            *inner, terms = budgets
            call = Session(self, terms, given, config, options, told)
            stream: Any = run_streamed(call.flow(partial(self._astream, inner, None)), [])
        else:
            stream = self._plain.astream(given, config, **options)
        async with aclosing(stream) as parts:
            async for part in parts:
                yield part

    def invoke(self, input: Any, config: Any = None, **options: Any) -> Any:
        """Return what the graph does; of a stopped run with a key `stop_reason`."""
        told = Told()
        result = self._plain.invoke(input, config, budgetguard=told, **options)
        return with_outcome_of(self, result, options, told)

    async def ainvoke(self, input: Any, config: Any = None, **options: Any) -> Any:
        """Return what the graph does; of a stopped run with a key `stop_reason`."""
        told = Told()
        result = await self._plain.ainvoke(input, config, budgetguard=told, **options)
        return with_outcome_of(self, result, options, told)

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
