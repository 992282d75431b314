"""The call of a user's function: the settings that it takes, and where it runs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from budgetguard_core.kit import OpenModelCall, OpenToolCall, Run

_SETTINGS = ("max_output_tokens", "model", "nudge", "seconds")


class Settings:
    """Which settings a function takes, and what it has of its own for them.

    What the caller gives stays as it is. A default is a bound of the user's: a setting only ever
    lowers it, and takes its place where it is None.

    Attributes:
        knows_of_tools: The function takes `without_tools`, for a last answer.
        takes_model: It takes `model`, the model that the call has to go to.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = None
        parameters = () if self._signature is None else self._signature.parameters.values()
        self.knows_of_tools = any(one.name == "without_tools" for one in parameters)
        self.takes_model = any(one.name == "model" for one in parameters)
        self._own: dict[str, Any] = {
            parameter.name: parameter.default
            for parameter in parameters
            if parameter.name in _SETTINGS and parameter.kind is not parameter.POSITIONAL_ONLY
        }

    def for_call(
        self,
        run: Run,
        call: OpenModelCall | OpenToolCall,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        nudges: bool = True,
    ) -> dict[str, Any]:
        """Return the keywords to add to the arguments of a call.

        Args:
            run: The run that the call is a part of.
            call: The admitted call.
            args: What the caller gives by position.
            kwargs: What the caller gives by name.
            nudges: The correction that is due is for this function.
        """
        if not self._own:
            return {}
        given = self._given(args, kwargs or {})
        values = _values(run, call, nudges=nudges)
        added: dict[str, Any] = {}
        for name, own in self._own.items():
            if name in given:
                continue
            value = values[name]
            if name == "model" and value is None:
                continue
            if own is inspect.Parameter.empty or own is None or name == "model":
                added[name] = value
            elif isinstance(own, int | float) and value is not None:
                added[name] = min(own, value)
        return added

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the caller gives by the names of the function's parameters."""
        if self._signature is not None:
            try:
                return dict(self._signature.bind_partial(*args, **kwargs).arguments)
            except TypeError:
                pass  # The call itself will say what is wrong.
        return {"args": tuple(args), **kwargs}

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[str]:
        return {*kwargs, *(self.arguments(args, kwargs) if args else ())}


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling a function gives something to await."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - asks how it is called, not whether
    )


async def called(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function on the event loop if it is async, in a thread if it is not."""
    if is_async(function) or inspect.isasyncgenfunction(function):
        return await awaited(function(*args, **kwargs))
    return await awaited(await asyncio.to_thread(function, *args, **kwargs))


async def awaited(value: Any) -> Any:
    """Return what a function gave, awaited where it has to be."""
    return await value if inspect.isawaitable(value) else value


async def close_stream(stream: Any) -> None:
    """Close what chunks were read from, if it can be closed."""
    close = getattr(stream, "aclose", None) or getattr(stream, "close", None)
    if close is not None:
        await awaited(close())


def _values(run: Run, call: OpenModelCall | OpenToolCall, *, nudges: bool) -> dict[str, Any]:
    if isinstance(call, OpenModelCall):
        return {
            "max_output_tokens": call.max_output_tokens,
            "model": call.fallback_model or call.call.model,
            "seconds": call.seconds,
            "nudge": call.nudge if nudges else None,
        }
    return {**dict.fromkeys(_SETTINGS), "seconds": run.time_left()}
