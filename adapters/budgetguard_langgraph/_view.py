"""The caller's view of a bounded graph's stream, and of the state that it ends with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

from langgraph.types import StateSnapshot

from budgetguard_langgraph._seams import INTERRUPT, ROOT
from budgetguard_langgraph.interrupts import is_budget_interrupt

NODE: Final = "budgetguard"
"""The name under which the closing messages show up in `updates` and `messages` streams."""
_STATES: Final = frozenset({"updates", "values"})
_THREADS: Final = frozenset({"checkpoints", "debug"})
_LISTS: Final = frozenset({"debug", "tasks", "checkpoints"})


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
        if mode in _LISTS:
            payload = _without_stops(payload)
        stops = False
        if mode in _STATES:
            payload, interrupts, stops = _asked_for(payload, interrupts)
        if stops and not payload:
            return ()
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


def _asked_for(payload: Any, interrupts: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], bool]:
    """Take the interrupts of budgets out of a state; return whether there were any."""
    known: dict[str, Any] = dict(cast("Any", payload)) if isinstance(payload, dict) else {}
    told = tuple(known.get(INTERRUPT, ()))
    asked = tuple(one for one in told if not is_budget_interrupt(one))
    kept = tuple(one for one in interrupts if not is_budget_interrupt(one))
    if len(asked) == len(told) and len(kept) == len(interrupts):
        return cast("Any", payload), interrupts, False
    if told:
        left = {name: value for name, value in known.items() if name != INTERRUPT}
        payload = {**left, INTERRUPT: asked} if asked else left
    return cast("Any", payload), kept, True


def _without_stops(payload: Any) -> Any:
    """Take the interrupts of budgets out of a task, a checkpoint or a debug event."""
    if isinstance(payload, list):
        return [_without_stops(one) for one in cast("list[Any]", payload)]
    if not isinstance(payload, dict):
        return payload
    found: dict[str, Any] = {}
    for name, value in cast("dict[str, Any]", payload).items():
        if name == "interrupts" and isinstance(value, (list, tuple)):
            kept = [one for one in cast("Sequence[Any]", value) if not is_budget_interrupt(one)]
            found[name] = kept if isinstance(value, list) else tuple(kept)
        elif name in ("payload", "tasks"):
            found[name] = _without_stops(value)
        else:
            found[name] = value
    return found
