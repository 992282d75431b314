"""The stream of a bounded run, and the caller's view of it and of the state that it ends with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, cast

from langgraph.types import StateSnapshot

from budgetguard_core import Trip
from budgetguard_core.kit import Scope, Step, entered
from budgetguard_langgraph._run import GraphRun, Stretch
from budgetguard_langgraph._seams import INTERRUPT, ROOT
from budgetguard_langgraph.interrupts import is_budget_interrupt

NODE: Final = "budgetguard"
"""The name under which the closing messages show up in `updates` and `messages` streams."""
_STATES: Final = frozenset({"updates", "values"})
_THREADS: Final = frozenset({"checkpoints", "debug"})
_LISTS: Final = frozenset({"debug", "tasks", "checkpoints"})


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


class View:
    """The stream modes and keys that a caller asked for, over those that are needed to close."""

    def __init__(self, graph: Any, options: dict[str, Any], *, nested: bool) -> None:
        mode = options.pop("stream_mode", None)
        if mode is None:
            mode = "values" if nested else graph.stream_mode
        self._single = isinstance(mode, str)
        self._modes: list[str] = [mode] if isinstance(mode, str) else list(mode)
        self._subgraphs = bool(options.get("subgraphs"))
        self._typed = options.get("version", "v1") != "v1"
        self.latest: Any = None
        """The last state, as the caller is to see it."""
        keys = options.get("output_keys")
        self.keys: Any = graph.stream_channels_asis if keys is None else keys
        options["stream_mode"] = (
            self._modes if "values" in self._modes else [*self._modes, "values"]
        )

    @property
    def shows_checkpoints(self) -> bool:
        """True if the caller follows the thread by the stream."""
        return not _THREADS.isdisjoint(self._modes)

    def seen(self, chunk: Any) -> Sequence[Any]:
        """Take note of a chunk, and return what the caller gets of it: one chunk or none."""
        namespace: tuple[str, ...] = ()
        interrupts: tuple[Any, ...] = ()
        if self._typed:
            mode, payload = chunk["type"], chunk["data"]
            namespace, interrupts = tuple(chunk.get("ns", ())), tuple(chunk.get("interrupts", ()))
        elif self._subgraphs:
            namespace, mode, payload = chunk
        else:
            mode, payload = chunk
        if mode in _LISTS or (
            mode in _STATES and isinstance(payload, dict) and INTERRUPT in payload
        ):
            payload = _without_stops(payload)
            if not payload:
                return ()  # it told of nothing else
        if interrupts:
            interrupts = tuple(one for one in interrupts if not is_budget_interrupt(one))
        if mode == "values" and not namespace:
            self.latest = payload
        return (self.chunk(mode, payload, namespace, interrupts),) if mode in self._modes else ()

    def chunk(
        self,
        mode: str,
        payload: Any,
        namespace: tuple[str, ...] = (),
        interrupts: tuple[Any, ...] = (),
    ) -> Any:
        """Return a chunk in the form that the caller asked for."""
        if self._typed:
            part = {"type": mode, "ns": namespace, "data": payload}
            return {**part, "interrupts": interrupts} if mode == "values" else part
        parts = (payload,) if self._single else (mode, payload)
        if self._subgraphs:
            return (namespace, *parts)
        return payload if self._single else parts

    def of_state(self, values: Any) -> Any:
        """Return what the caller sees of a state that was read from its thread."""
        if not isinstance(values, dict) or self.keys == ROOT:
            return cast("Any", values)
        known = cast("dict[str, Any]", values)
        if isinstance(self.keys, str):
            return known.get(self.keys)
        return {key: known[key] for key in self.keys if key in known}

    def last_chunks(
        self,
        key: str | None,
        closing: Sequence[Any],
        values: Any,
        reason: str,
        state: StateSnapshot | None,
    ) -> Iterator[Any]:
        """Yield the end of a stopped stream, in each mode that was asked for."""
        shown = key is not None and (self.keys == key or key in self.keys)
        if "messages" in self._modes and closing:
            about = {"langgraph_node": NODE, "stop_reason": reason}
            yield self.chunk("messages", (closing[-1], about))
        if "updates" in self._modes:
            update: Any = {"stop_reason": reason}
            if shown:
                update = {key: list(closing), **update}
            yield self.chunk("updates", {NODE: update})
        if "values" in self._modes:
            yield self.chunk("values", values)
        if state is not None:
            # By these a server tells whether the thread waits, and what is in it.
            payload = {
                "config": state.config,
                "parent_config": state.parent_config,
                "values": state.values,
                "metadata": state.metadata,
                "next": list(state.next),
                "tasks": [],
            }
            if "checkpoints" in self._modes:
                yield self.chunk("checkpoints", payload)
            if "debug" in self._modes:
                event: dict[str, Any] = {"type": "checkpoint", "payload": payload}
                event["step"] = (state.metadata or {}).get("step")
                event["timestamp"] = state.created_at
                yield self.chunk("debug", event)


def _without_stops(payload: Any) -> Any:
    """Take the interrupts of budgets out of a state, a task, a checkpoint or a debug event."""
    if isinstance(payload, list):
        return [_without_stops(one) for one in cast("list[Any]", payload)]
    if not isinstance(payload, dict):
        return payload
    found: dict[str, Any] = {}
    for name, value in cast("dict[str, Any]", payload).items():
        if name in ("interrupts", INTERRUPT) and isinstance(value, (list, tuple)):
            listed = cast("Sequence[Any]", value)
            kept = [one for one in listed if not is_budget_interrupt(one)]
            if kept or not value or name != INTERRUPT:  # a breakpoint's is empty
                found[name] = kept if isinstance(value, list) else tuple(kept)
        elif name in ("payload", "tasks"):
            found[name] = _without_stops(value)
        else:
            found[name] = value
    return found
