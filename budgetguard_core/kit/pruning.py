"""Shorter prompts once a model's context window is nearly full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.kit.records import part

Prune: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Takes the messages of a request, in the framework's own form, and returns those to send."""


def keep_turns(last: int = 6, *, first: int = 0) -> Prune:
    """Make a `prune` that keeps the beginning of a conversation and its last turns.

    A turn is what the model said, with the results of its tool calls and what it was told then, so
    that calls and results stay together. What comes before the first turn, the instructions and the
    task, is always kept. It reads the messages of every framework that has an adapter.

    Args:
        last: How many turns are kept at the end.
        first: How many are kept after the task.

    Raises:
        ConfigurationError: A number makes no sense.
    """
    for name, value, least in (("last", last, 1), ("first", first, 0)):
        if type(value) is not int or value < least:
            raise ConfigurationError(
                f"{name} must be a whole number >= {least}, got {value!r}. Use keep_turns(last=6)."
            )

    def prune(messages: list[Any]) -> Sequence[Any]:
        starts = [
            position
            for position, message in enumerate(messages)
            if _is_the_models(message) and not (position and _is_the_models(messages[position - 1]))
        ]
        if len(starts) <= first + last:
            return messages
        return [*messages[: starts[first]], *messages[starts[-last] :]]

    return prune


def _is_the_models(message: Any) -> bool:
    role = part(message, "role")
    if role is not None:
        return bool(role == "assistant")
    kind = str(part(message, "type") or "")
    # LangChain's messages; the items of OpenAI's Responses.
    return kind in ("ai", "AIMessageChunk", "reasoning") or kind.endswith("_call")
