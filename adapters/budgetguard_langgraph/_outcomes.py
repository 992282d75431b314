"""From a graph's result to the outcome of its run."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, cast

from budgetguard_core import AdapterError, Outcome
from budgetguard_core.kit import NOT_EXECUTED, OUTCOME_UNKNOWN, Call, final_text, outcome_of
from budgetguard_core.kit import remember as _remember
from budgetguard_langgraph._messages import DIALECT, ended, is_synthetic, messages_of
from budgetguard_langgraph._seams import TASK, configuration

_NEXT: Final[ContextVar[Told | None]] = ContextVar("budgetguard_next_told", default=None)


def remember(result: Any, messages_key: str, outcome: Outcome) -> None:
    """Keep an outcome for as long as the last message of its result lives."""
    messages = messages_of(result, messages_key)
    if messages:
        _remember(messages[-1], outcome)


class Told:
    """Where the outcome of one streamed run goes: to the stream that its caller holds.

    Attributes:
        outcome: How the run ended, without its messages.
        is_on_messages: Its result has messages, by which it is found.
    """

    is_on_messages = False

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._stream: weakref.ref[Any] | None = None

    def by(self, stream: Any) -> Any:
        """Take the stream, and return it."""
        self._stream = weakref.ref(stream)
        return stream

    def take(self, outcome: Outcome) -> None:
        """Take the outcome, for as long as somebody holds the stream."""
        self.outcome = outcome.model_copy(update={"messages": (), "final": None})
        stream = None if self._stream is None else self._stream()
        if stream is not None:
            _remember(stream, outcome)


@contextmanager
def told_of_stream() -> Generator[Told]:
    """Give what the next stream of this code's is told to whoever makes a result of it."""
    token = _NEXT.set(told := Told())
    try:
        yield told
    finally:
        _NEXT.reset(token)


def next_told() -> Told:
    """Return where the outcome of a stream that begins goes; asked for once."""
    told = _NEXT.get()
    if told is None:
        return Told()
    _NEXT.set(None)
    return told


class Result(dict[str, Any]):
    """A result without messages: a plain dictionary takes no reference to its outcome."""


def with_outcome_of(graph: Any, result: Any, options: dict[str, Any], told: Told) -> Any:
    """Return a result by which its outcome is found; of a stopped run with `stop_reason`.

    Inside another graph it is a part of that one's state.
    """
    ended, values = told.outcome, getattr(result, "value", result)
    if ended is None or not isinstance(values, dict) or configuration().get(TASK) is not None:
        return result
    known = cast("dict[str, Any]", values)
    is_state = options.get("output_keys") is None and options.get("stream_mode") in (None, "values")
    is_state = is_state and not isinstance(graph.stream_channels_asis, str)
    if ended.status == "terminated" and is_state:
        known.setdefault("stop_reason", str(ended.stop_reason))
    if values is not result or told.is_on_messages:
        return result
    return with_own_outcome(known, ended)


def with_own_outcome(values: dict[str, Any], ended: Outcome) -> dict[str, Any]:
    """Return values that know how the run ended that made them."""
    result = Result(values)
    _remember(result, ended)
    return result


def outcome(result: Any, *, messages_key: str = "messages") -> Outcome:
    """Return the outcome of the run that gave this result.

    A result without messages has nothing that an outcome could hang on: use `on_outcome`.

    Args:
        result: What `invoke` or `ainvoke` returned; a stream that is through, of any mode, whose
            outcome is without messages; the last value of a stream; the state of a thread that a
            bounded graph's `get_state` returned; the exception that left; a callback.
        messages_key: The key of the conversation in the graph's state.

    Raises:
        AdapterError: The result is not that of a run with a budget, or holds no messages.
    """
    found = outcome_of(result)
    if found is not None and isinstance(result, Result):
        found = found.model_copy(update={"final": result.get("output")})
    values = getattr(result, "values", None)
    if found is not None and isinstance(values, dict):
        found = _with_messages(found, messages_of(values, messages_key)) or found
    if found is None:
        own = result if isinstance(result, Outcome) else getattr(result, "outcome", None)
        found = own if isinstance(own, Outcome) else None
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
    if found is None or not messages:
        return found
    if found.status == "terminated" and not is_synthetic(messages[-1]):
        started = {call.id for call in found.tool_calls if call.status == "interrupted"}
        marks = {"synthetic": True, "stop_reason": str(found.stop_reason), "run_id": found.run_id}
        done = sum(call.status == "completed" for call in found.tool_calls)
        calls = "1 tool call was" if done == 1 else f"{done} tool calls were"
        so_far = (
            f"{calls} completed; see the results above" if done else "no tool call was completed"
        )
        text = f"This run was stopped before it finished. So far {so_far}."

        def answer(call: Call, _: int) -> str:
            return OUTCOME_UNKNOWN if call.id in started else NOT_EXECUTED

        messages, _ = ended(messages, answer, text, marks)
    final = final_text(messages, DIALECT)
    return found.model_copy(update={"messages": tuple(messages), "final": final})
