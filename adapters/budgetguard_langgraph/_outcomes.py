"""From a graph's result to the outcome of its run."""

from __future__ import annotations

import weakref
from typing import Any

from budgetguard_core import Outcome
from budgetguard_langgraph._history import messages_of

_KNOWN: dict[int, tuple[weakref.ref[Any], Outcome]] = {}


def remember(result: Any, messages_key: str, outcome: Outcome) -> None:
    """Keep the outcome for as long as the last message of the result lives."""
    messages = messages_of(result, messages_key)
    if messages:
        last = messages[-1]
        mark = id(last)

        # Held by the closure: at the interpreter's end the module's own name is gone before.
        def forget(_: object, known: dict[int, Any] = _KNOWN) -> None:
            known.pop(mark, None)

        _KNOWN[mark] = (weakref.ref(last, forget), outcome)


def outcome(result: Any, *, messages_key: str = "messages") -> Outcome | None:
    """Return the outcome of the run that gave this result, or None where it is not known.

    Args:
        result: What `invoke` or `ainvoke` returned, or the last value of a stream.
        messages_key: The key of the conversation in the graph's state.
    """
    messages = messages_of(getattr(result, "value", result), messages_key)
    if not messages:
        return None
    found = _KNOWN.get(id(messages[-1]))
    return found[1] if found is not None and found[0]() is messages[-1] else None
