"""From a graph's result to the outcome of its run."""

from __future__ import annotations

from typing import Any

from budgetguard_core import AdapterError, Outcome
from budgetguard_core.kit import outcome_of
from budgetguard_core.kit import remember as _remember
from budgetguard_langgraph._history import (
    closed,
    final_text,
    is_synthetic,
    messages_of,
    results_for,
)


def remember(result: Any, messages_key: str, outcome: Outcome) -> None:
    """Keep an outcome for as long as the last message of its result lives."""
    messages = messages_of(result, messages_key)
    if messages:
        _remember(messages[-1], outcome)


def outcome(result: Any, *, messages_key: str = "messages") -> Outcome:
    """Return the outcome of the run that gave this result.

    A result without messages has nothing that an outcome could hang on: use `on_outcome`.

    Args:
        result: What `invoke` or `ainvoke` returned, the last value of a stream, or the exception
            that they raised.
        messages_key: The key of the conversation in the graph's state.

    Raises:
        AdapterError: The result is not that of a run with a budget, or holds no messages.
    """
    found = outcome_of(result)
    if found is None:
        found = getattr(result, "outcome", None) if isinstance(result, BaseException) else None
    messages = messages_of(getattr(result, "value", result), messages_key)
    if found is None and messages:
        found = _with_messages(outcome_of(messages[-1]), messages)
    if not isinstance(found, Outcome):
        raise AdapterError(
            f"outcome takes the result of a run with a budget, got {type(result).__name__} "
            "without one. Pass what invoke returned, or use on_outcome."
        )
    return found


def _with_messages(found: Outcome | None, messages: list[Any]) -> Outcome | None:
    """Give an outcome its conversation back, closed again where the state could not be."""
    if found is None:
        return None
    if found.status == "terminated" and not is_synthetic(messages[-1]):
        started = [call.id for call in found.tool_calls if call.status == "interrupted"]
        metadata = {
            "synthetic": True,
            "stop_reason": str(found.stop_reason),
            "run_id": found.run_id,
        }
        done = sum(call.status == "completed" for call in found.tool_calls)
        calls = "1 tool call was" if done == 1 else f"{done} tool calls were"
        text = (
            f"This run was stopped before it finished. So far {calls} completed; "
            "see the results above."
        )
        messages = closed(messages, results_for(messages, started), text, metadata)
    return found.model_copy(update={"messages": tuple(messages), "final": final_text(messages)})
