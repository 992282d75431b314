"""The dialects of providers' message formats, for every adapter whose framework speaks one.

`CHAT`: chat completions. `Converse`: Bedrock's, and Strands'. `RESPONSES`: the items of OpenAI's
Responses, put together by `grouped`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

from budgetguard_core.decision import NOT_EXECUTED, OUTCOME_UNKNOWN
from budgetguard_core.kit.history import Call, Turn
from budgetguard_core.kit.records import part, parts_of

Message: TypeAlias = dict[str, Any]
"""A message as the provider takes it."""
Items: TypeAlias = list[Message]
"""Items of Responses that stand for one message."""

_MARKS: Final = "budgetguard"


class SyntheticMessage(dict[str, Any]):
    """The assistant message that ends a stopped run; to a provider it is a message as any other.

    Attributes:
        metadata: `synthetic`, `stop_reason` and `run_id`. Not an item, because providers refuse
            messages with keys that they do not know.
    """

    def __init__(self, text: str, metadata: Mapping[str, Any], **message: Any) -> None:
        super().__init__(message or {"role": "assistant", "content": text})
        self.metadata = dict(metadata)


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message of chat completions."""
    return content_text(message.get("content"))


def content_text(content: Any) -> str:
    """Return the text of a content: a text itself, or parts of which some are text."""
    if isinstance(content, str):
        return content
    parts = cast("Sequence[Any]", content) if isinstance(content, list) else ()
    return "".join(str(part(item, "text") or "") for item in parts)


def _listed(content: Any) -> list[Any]:
    return [*content] if isinstance(content, list | tuple) else [content]


def read_call(call: Any) -> Call:
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
    return Call(str(id_), str(about("name") or ""), arguments)


def to_plain(messages: Iterable[Message]) -> list[Message]:
    """Write messages as plain data for a checkpoint; the marker of a synthetic one is kept."""
    return [
        {**one, _MARKS: one.metadata} if isinstance(one, SyntheticMessage) else one
        for one in messages
    ]


def from_plain(message: Message) -> Message:
    """Read a message of a checkpoint: a synthetic one is marked again."""
    if _MARKS not in message:
        return message
    rest = {name: value for name, value in message.items() if name != _MARKS}
    return SyntheticMessage("", message[_MARKS], **rest)


class Chat:
    """The dialect of chat completions."""

    def read(self, message: Message) -> Turn:
        """Read a message."""
        role, text = message.get("role"), message_text(message)
        if role == "tool":
            return Turn("tool", results=((str(message.get("tool_call_id")), text),))
        asked = message.get("tool_calls") if role == "assistant" else None
        content = message.get("content")
        parts = [] if content is None else _listed(content)
        texts = (part(one, "text") if part(one, "type") == "text" else one for one in parts)
        calls = tuple(read_call(one) for one in asked or ())
        synthetic = isinstance(message, SyntheticMessage)
        return Turn(cast("Any", role), tuple(texts), calls, synthetic=synthetic)

    def results(self, results: Sequence[tuple[Call, Any]], onto: Message | None) -> list[Message]:
        """Write tool results, each a message of its own."""
        made = [
            {"role": "tool", "tool_call_id": call.id, "content": str(text)}
            for call, text in results
        ]
        return made if onto is None else [onto, *made]

    def ending(self, text: str, metadata: Mapping[str, Any], onto: Message | None) -> Message:
        """Write the synthetic last message."""
        said = "" if onto is None else message_text(onto)
        return SyntheticMessage(f"{said}\n\n{text}" if said else text, metadata)

    def words(self, role: str, parts: Sequence[Any]) -> Message:
        """Write one message of these parts."""
        if all(isinstance(one, str) for one in parts):
            return {"role": role, "content": "\n\n".join(parts)}
        blocks = [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]
        return {"role": role, "content": blocks}

    def plain(self, messages: Sequence[Message]) -> list[Message]:
        """Write messages as plain data."""
        return to_plain(messages)


Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


def _turn(role: Role, items: Iterable[Any], synthetic: bool) -> Turn:
    """Return a turn of what was read of its items: calls, results (id and text), other content."""
    parts: list[Any] = []
    calls: list[Call] = []
    results: list[tuple[str, str]] = []
    for item in items:
        kind: list[Any] = parts
        if isinstance(item, Call):
            kind = calls
        elif isinstance(item, tuple):
            kind = results
        kind.append(item)
    return Turn(role, tuple(parts), tuple(calls), tuple(results), synthetic)


class Converse:
    """The dialect of Bedrock's Converse: a list of blocks, with results among the user's."""

    def read(self, message: Message) -> Turn:
        """Read a message."""
        role: Any = message.get("role")
        synthetic = isinstance(message, SyntheticMessage)
        return _turn(role, map(_read_block, message.get("content") or ()), synthetic)

    def results(self, results: Sequence[tuple[Call, Any]], onto: Message | None) -> list[Message]:
        """Write tool results: all of a batch are one message."""
        made = [{"toolResult": self.result(call, text)} for call, text in results]
        if onto is None:
            return [{"role": "user", "content": made}]
        # Some providers want results before all else.
        there = onto["content"]
        count = sum("toolResult" in one for one in there)
        return [{**onto, "content": [*there[:count], *made, *there[count:]]}]

    def result(self, call: Call, text: Any) -> Message:
        """Write one result."""
        status = "error" if text in (NOT_EXECUTED, OUTCOME_UNKNOWN) else "success"
        return {"toolUseId": call.id, "status": status, "content": [{"text": str(text)}]}

    def ending(self, text: str, metadata: Mapping[str, Any], onto: Message | None) -> Message:
        """Write the synthetic last message."""
        said: list[Any] = [] if onto is None else onto["content"]
        blocks: Any = [*said, {"text": text}]
        return SyntheticMessage(text, metadata, role="assistant", content=blocks)

    def words(self, role: str, parts: Sequence[Any]) -> Message:
        """Write one message of these parts."""
        blocks = [{"text": one} if isinstance(one, str) else one for one in parts]
        return {"role": role, "content": blocks}

    def plain(self, messages: Sequence[Message]) -> list[Message]:
        """Write messages as plain data."""
        return to_plain(messages)


def _read_block(block: Message) -> Any:
    if "toolUse" in block:
        return read_call(block)
    result = block.get("toolResult")
    if result is None:
        return block.get("text", block)
    content = [
        {"text": json.dumps(one["json"], ensure_ascii=False, default=str)} if "json" in one else one
        for one in result.get("content") or ()
    ]
    return str(result.get("toolUseId")), content_text(content)


class Responses:
    """The dialect of OpenAI's Responses: what it reads are items that `grouped` put together."""

    def read(self, message: Items) -> Turn:
        """Read the items of one message."""
        synthetic = any(isinstance(item, SyntheticMessage) for item in message)
        role = _speaker(message[0]) if message else "user"
        return _turn(role, (one for item in message for one in _read_item(item)), synthetic)

    def results(self, results: Sequence[tuple[Call, Any]], onto: Items | None) -> list[Items]:
        """Write tool results: items that stand together."""
        made = [_output(call, text) for call, text in results]
        return [made if onto is None else [*onto, *made]]

    def ending(self, text: str, metadata: Mapping[str, Any], onto: Items | None) -> Items:
        """Write the synthetic last message, after the items that it goes on from."""
        blocks: Any = [{"type": "output_text", "text": text, "annotations": []}]
        item: Message = {"type": "message", "role": "assistant", "content": blocks}
        return [*(onto or ()), SyntheticMessage(text, metadata, **item)]

    def words(self, role: str, parts: Sequence[Any]) -> Items:
        """Write one message of these parts."""
        kind = "output_text" if role == "assistant" else "input_text"
        blocks = [{"type": kind, "text": one} if isinstance(one, str) else one for one in parts]
        return [{"type": "message", "role": role, "content": blocks}]

    def plain(self, messages: Sequence[Items]) -> list[Items]:
        """Write messages as plain data."""
        return [to_plain(items) for items in messages]


_CALLS: Final = frozenset({"function_call", "custom_tool_call"})
_RESULTS: Final = frozenset({"function_call_output", "custom_tool_call_output"})


def _read_item(item: Message) -> Iterable[Any]:
    kind = item.get("type", "message")
    if kind in _CALLS:
        return [read_call(item)]
    if kind in _RESULTS:
        return [(str(item.get("call_id")), content_text(item.get("output")))]
    blocks = _listed(item.get("content") or ()) if kind == "message" else ()
    return (one if isinstance(one, str) else one.get("text", one) for one in blocks)


def _output(call: Call, text: Any) -> Message:
    return {"type": "function_call_output", "call_id": call.id, "output": str(text)}


def _speaker(item: Mapping[str, Any]) -> Role:
    kind = item.get("type", "message")
    if kind in _RESULTS:
        return "tool"
    role: Any = item.get("role") if kind == "message" else "assistant"
    return "system" if role == "developer" else role


def grouped(items: Iterable[Message]) -> list[Items]:
    """Group the items of Responses into messages: what one speaker says in a row."""
    groups: list[Items] = []
    for item in items:
        if groups and _speaker(groups[-1][-1]) == _speaker(item) != "user":
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


CHAT: Final = Chat()
"""The dialect of chat completions, without state."""
RESPONSES: Final = Responses()
"""The dialect of OpenAI's Responses, whose items `grouped` puts together."""
