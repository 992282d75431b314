"""Histories in the format of OpenAI's chat completions: reading, closing and keeping them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from budgetguard_core import (
    BudgetExceeded,
    ConfigurationError,
    Guard,
    Outcome,
    Trip,
    synthetic_metadata,
    synthetic_text,
)
from budgetguard_core.kit import ANSWER_NOW, part, parts_of

Message: TypeAlias = dict[str, Any]
"""A message as the provider takes it."""

UNFINISHED = "This sub-task was stopped before it finished."
_SYNTHETIC = "budgetguard"


class SyntheticMessage(dict[str, Any]):
    """The assistant message that ends a stopped run; to a provider it is a message as any other.

    Attributes:
        metadata: `synthetic`, `stop_reason` and `run_id`. Not an item, because providers refuse
            messages with keys that they do not know.
    """

    def __init__(self, text: str, metadata: Mapping[str, Any]) -> None:
        super().__init__(role="assistant", content=text)
        self.metadata = dict(metadata)


@dataclass(slots=True)
class RequestedCall:
    """A tool call as the model wrote it."""

    id: str
    name: str
    arguments: Any
    """The arguments' JSON text, or what the SDK has parsed already."""

    def parsed(self) -> dict[str, Any]:
        """Return the arguments as keywords.

        Raises:
            ValueError: They are not a JSON object.
        """
        value: Any = self.arguments
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else {}
            if isinstance(value, dict):
                return cast("dict[str, Any]", value)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            msg = "the arguments are not a JSON object"
            raise ValueError(msg)  # noqa: TRY004 - one kind of error for all that a model writes
        # A tool that changes what it was given must not change the history.
        return deepcopy(dict(cast("Mapping[str, Any]", value)))


def opening(messages: str | Iterable[Any]) -> list[Message]:
    """Copy what a caller begins with; a text is the user's."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}] if messages else []
    if not isinstance(cast("object", messages), Iterable):
        raise ConfigurationError(
            f"messages must be a text or a list of messages, got {type(messages).__name__}. "
            "Leave them out to begin with none."
        )
    return [as_message(message) for message in messages]


def as_message(message: Any) -> Message:
    """Return a message as plain data: a copy of a mapping, or what an object of an SDK dumps.

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(message, SyntheticMessage):
        return message
    if isinstance(message, Mapping):
        return dict(cast("Mapping[str, Any]", message))
    if hasattr(message, "model_dump"):
        return cast("Message", message.model_dump(mode="json", exclude_none=True))
    raise ConfigurationError(
        "messages must be mappings in the format of chat completions, got "
        f"{type(message).__name__}. Pass dictionaries, or the SDK's messages."
    )


def requested_calls(message: Mapping[str, Any]) -> list[RequestedCall]:
    """List the tool calls that an assistant message asks for."""
    if message.get("role") != "assistant":
        return []
    return [read_call(call) for call in message.get("tool_calls") or ()]


def read_call(call: Any) -> RequestedCall:
    """Read one tool call of OpenAI's, Anthropic's, Bedrock's, Gemini's or LangChain's."""
    told = parts_of(call)
    function = told("function") or told("custom") or told("toolUse") or told("function_call")
    about = parts_of(function) if function else told
    arguments = about("arguments")
    if arguments is None:
        arguments = about("input")
    if arguments is None:
        arguments = about("args")
    id_ = told("call_id") or told("id") or about("id") or about("toolUseId") or ""
    return RequestedCall(str(id_), str(about("name") or ""), arguments)


def open_calls(history: Sequence[Message]) -> list[RequestedCall]:
    """List the calls at the end of a history that have no result, in the model's order."""
    end = len(history)
    while end and history[end - 1].get("role") == "tool":
        end -= 1
    if not end:
        return []
    answered = [str(message.get("tool_call_id")) for message in history[end:]]
    waiting: list[RequestedCall] = []
    for call in requested_calls(history[end - 1]):
        # By number and not as a set: a model may give two calls the same id.
        if call.id in answered:
            answered.remove(call.id)
        else:
            waiting.append(call)
    return waiting


def tool_message(id_: str, text: str) -> Message:
    """Make the result of a tool call."""
    return {"role": "tool", "tool_call_id": id_, "content": text}


def take_answer(history: list[Message]) -> str:
    """Take the assistant's last message out of a history, if it asks for nothing; give its text."""
    last = history[-1] if history else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return ""
    return message_text(history.pop())


def end_message(
    guard: Guard, trip: Trip, partial: str = "", answer: str | None = None
) -> SyntheticMessage:
    """Make the synthetic last message; what a cut stream had said so far comes first.

    Args:
        guard: The run's guard.
        trip: Why the run was stopped.
        partial: What the model had said so far.
        answer: The model's last answer, if it gave one.
    """
    text = answer or synthetic_text(guard)
    return SyntheticMessage(
        f"{partial}\n\n{text}" if partial else text,
        synthetic_metadata(guard, trip, finalized=answer is not None),
    )


def asked_at_last(history: Sequence[Message]) -> list[Message]:
    """Copy a closed history and ask for an answer; nobody speaks twice in a row."""
    last = history[-1] if history else {}
    if last.get("role") == "user":
        said = last.get("content")
        if isinstance(said, str):
            return [*history[:-1], {**last, "content": f"{said}\n\n{ANSWER_NOW}"}]
        parts = [*(said or ()), {"type": "text", "text": ANSWER_NOW}]
        return [*history[:-1], {**last, "content": parts}]
    return [*history, {"role": "user", "content": ANSWER_NOW}]


def result_text(result: Any) -> str:
    """Write what a tool returned for the model."""
    if isinstance(result, str):
        return result
    if isinstance(result, Outcome):
        return str(result.final or UNFINISHED)
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except Exception:  # the object's own code runs here, and it must not end the run
        return _written(result)


def error_text(error: BaseException) -> str:
    """Write what a tool raised for the model; a sub-run's trip without reason and figures."""
    if isinstance(error, BudgetExceeded):
        return UNFINISHED if error.outcome is None else result_text(error.outcome)
    return f"Error: {type(error).__name__}: {_written(error)}"


def _written(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message."""
    return content_text(message.get("content"))


def content_text(content: Any) -> str:
    """Return the text of a content: a text itself, or parts of which some are text."""
    if isinstance(content, str):
        return content
    parts = cast("Sequence[Any]", content) if isinstance(content, list) else ()
    return "".join(str(part(item, "text") or "") for item in parts)


def to_plain(history: Iterable[Message]) -> list[Message]:
    """Write a history as plain data for a checkpoint; the marker of its end is kept."""
    return [
        {**message, _SYNTHETIC: message.metadata}
        if isinstance(message, SyntheticMessage)
        else message
        for message in history
    ]


def from_plain(history: Iterable[Any]) -> list[Message]:
    """Read the history of a checkpoint or of an outcome."""
    messages: list[Message] = []
    for message in history:
        plain = as_message(message)
        metadata = plain.pop(_SYNTHETIC, None)
        messages.append(
            plain if metadata is None else SyntheticMessage(message_text(plain), metadata)
        )
    return messages
