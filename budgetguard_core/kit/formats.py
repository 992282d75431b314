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
    field = parts_of(call)
    function = field("function") or field("custom") or field("toolUse") or field("function_call")
    about = parts_of(function) if function else field
    arguments = about("arguments")
    if arguments is None:
        arguments = about("input")
    if arguments is None:
        arguments = about("args")
    id_ = field("call_id") or field("id") or about("id") or about("toolUseId") or ""
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
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            id_ = message.get("tool_call_id") or message.get("tool_name")  # Ollama's
            return Turn("tool", (), (), ((str(id_), content_text(content)),), False, (message,))
        requested = message.get("tool_calls") if role == "assistant" else None
        parts: Sequence[Any] = (content,)
        if not isinstance(content, str):
            parts = () if content is None else _listed(content)
            parts = [part(one, "text") if part(one, "type") == "text" else one for one in parts]
        calls = tuple(read_call(one) for one in requested) if requested else ()
        synthetic = isinstance(message, SyntheticMessage)
        return Turn(cast("Any", role), tuple(parts), calls, synthetic=synthetic)

    def results(self, results: Sequence[tuple[Call, Any]], onto: Message | None) -> list[Message]:
        """Write tool results, each a message of its own."""
        made = [
            {"role": "tool", "tool_call_id": call.id, "content": str(text)}
            for call, text in results
        ]
        return made if onto is None else [onto, *made]

    def ending(self, text: str, metadata: Mapping[str, Any], onto: Message | None) -> Message:
        """Write the synthetic last message."""
        written = "" if onto is None else message_text(onto)
        return SyntheticMessage(f"{written}\n\n{text}" if written else text, metadata)

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


def _turn(role: Role, items: Iterable[tuple[Any, Any]], synthetic: bool) -> Turn:
    """Return a turn of its items: each as it was read (a call, a result's id and text), and raw."""
    parts: list[Any] = []
    calls: list[Call] = []
    results: list[tuple[str, str]] = []
    raw: list[Any] = []
    for read, item in items:
        if isinstance(read, Call):
            calls.append(read)
        elif not isinstance(read, tuple):
            parts.append(read)
        elif role == "assistant":
            parts.append(item)  # the provider has run the tool
        else:
            results.append(cast("tuple[str, str]", read))
            raw.append(item)
    return Turn(role, tuple(parts), tuple(calls), tuple(results), synthetic, tuple(raw))


class Converse:
    """The dialect of Bedrock's Converse: a list of blocks, with results among the user's.

    It reads those of Anthropic and Gemini as well.
    """

    def read(self, message: Message) -> Turn:
        """Read a message."""
        name: Any = message.get("role") or "user"
        blocks: Any = message.get("content") or message.get("parts") or ()
        blocks = [{"text": blocks}] if isinstance(blocks, str) else blocks
        synthetic = isinstance(message, SyntheticMessage)
        role: Role = "assistant" if name == "model" else name
        return _turn(role, ((_read_block(one), one) for one in blocks), synthetic)

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
        written: list[Any] = [] if onto is None else onto["content"]
        blocks: Any = [*written, {"text": text}]
        return SyntheticMessage(text, metadata, role="assistant", content=blocks)

    def words(self, role: str, parts: Sequence[Any]) -> Message:
        """Write one message of these parts."""
        blocks = [{"text": one} if isinstance(one, str) else one for one in parts]
        return {"role": role, "content": blocks}

    def plain(self, messages: Sequence[Message]) -> list[Message]:
        """Write messages as plain data."""
        return to_plain(messages)


def _read_block(block: Message) -> Any:
    call: Any = block.get("toolUse") or block.get("function_call") or block.get("functionCall")
    if call or block.get("type") == "tool_use":
        call = call or block
        return block if call.get("type") == "server_tool_use" else read_call(call)
    result = block.get("toolResult")
    if result is not None:
        texts = [
            {"text": json.dumps(one["json"], ensure_ascii=False, default=str)}
            if "json" in one
            else one
            for one in result.get("content") or ()
        ]
        return str(result.get("toolUseId")), content_text(texts)
    if block.get("type") == "tool_result":
        return str(block.get("tool_use_id")), content_text(block.get("content"))
    result = block.get("function_response") or block.get("functionResponse")
    if result is not None:
        return str(result.get("id") or result.get("name")), str(result.get("response"))
    return block if block.get("thought") else block.get("text", block)


class Responses:
    """The dialect of OpenAI's Responses: what it reads are items that `grouped` put together."""

    def read(self, message: Items | Message) -> Turn:
        """Read the items of one message, or one item alone."""
        items = [message] if isinstance(message, dict) else message
        synthetic = any(isinstance(item, SyntheticMessage) for item in items)
        role = _speaker(items[0]) if items else "user"
        read = ((one, item) for item in items for one in _read_item(item))
        return _turn(role, read, synthetic)

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


_CALLS: Final = frozenset(
    f"{name}_call"
    for name in ("apply_patch", "computer", "custom_tool", "function", "local_shell", "shell")
)
_RESULTS: Final = frozenset(f"{name}_output" for name in _CALLS)


def _read_item(item: Message) -> Iterable[Any]:
    kind = item.get("type", "message")
    if kind in _CALLS:
        if part(item.get("environment"), "type") == "container_reference":
            return ()  # the provider has run it
        call = read_call(item)
        own = item.get("action") or item.get("operation")
        return [call if call.name else Call(call.id, kind.removesuffix("_call"), own)]
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
