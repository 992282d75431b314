"""The dialects of providers' message formats, for every adapter whose framework speaks one.

`CHAT`: chat completions. `CONVERSE`: Bedrock's Converse, and Strands. `ANTHROPIC`: its messages.
`GEMINI`: its contents. `RESPONSES`: the items of OpenAI's Responses, put together by `grouped`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            id_ = message.get("tool_call_id") or message.get("tool_name")  # Ollama's
            return Turn("tool", (), (), ((str(id_), content_text(content)),), False, (message,))
        asked = message.get("tool_calls") if role == "assistant" else None
        parts: Sequence[Any] = (content,)
        if not isinstance(content, str):
            parts = () if content is None else _listed(content)
            parts = [part(one, "text") if part(one, "type") == "text" else one for one in parts]
        calls = tuple(read_call(one) for one in asked) if asked else ()
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
        said = "" if onto is None else message_text(onto)
        return SyntheticMessage(f"{said}\n\n{text}" if said else text, metadata)

    def words(self, role: str, messages: Sequence[Sequence[Any]]) -> Message:
        """Write one message of the parts of several."""
        given = [one for parts in messages for one in parts]
        if all(isinstance(one, str) for one in given):
            return {"role": role, "content": "\n\n".join(given)}
        blocks = [{"type": "text", "text": one} if isinstance(one, str) else one for one in given]
        return {"role": role, "content": blocks}

    def plain(self, messages: Sequence[Message]) -> list[Message]:
        """Write messages as plain data."""
        return to_plain(messages)


Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The dialect of a format whose messages are lists of blocks, results among the user's.

    Attributes:
        key: The name of the list in a message.
        assistant: The name of the assistant's role.
        read_block: Reads a block: a `Call`, the id and text of a result, a text, or the block.
        write_text: Writes a text.
        write_result: Writes a result.
    """

    key: str
    assistant: str
    read_block: Callable[[Message], Any]
    write_text: Callable[[str], Message]
    write_result: Callable[[Call, Any], Message]

    def read(self, message: Message) -> Turn:
        """Read a message."""
        parts: list[Any] = []
        calls: list[Call] = []
        results: list[tuple[str, str]] = []
        raw: list[Message] = []
        role: Any = message.get("role") or "user"
        for block in self._blocks(message):
            read = self.read_block(block)
            if isinstance(read, Call):
                calls.append(read)
            elif not isinstance(read, tuple):
                parts.append(read)
            elif role == self.assistant:
                parts.append(block)  # of a tool that the provider has run
            else:
                results.append(cast("tuple[str, str]", read))
                raw.append(block)
        name: Any = "assistant" if role == self.assistant else role
        synthetic = isinstance(message, SyntheticMessage)
        return Turn(name, tuple(parts), tuple(calls), tuple(results), synthetic, tuple(raw))

    def results(self, results: Sequence[tuple[Call, Any]], onto: Message | None) -> list[Message]:
        """Write tool results: all of a batch are one message."""
        made = [self.write_result(call, text) for call, text in results]
        if onto is None:
            return [{"role": "user", self.key: made}]
        # Some providers want results before all else.
        there = self._blocks(onto)
        count = sum(isinstance(self.read_block(one), tuple) for one in there)
        return [{**onto, self.key: [*there[:count], *made, *there[count:]]}]

    def ending(self, text: str, metadata: Mapping[str, Any], onto: Message | None) -> Message:
        """Write the synthetic last message."""
        said = [] if onto is None else self._blocks(onto)
        message = {"role": self.assistant, self.key: [*said, self.write_text(text)]}
        return SyntheticMessage(text, metadata, **message)

    def words(self, role: str, messages: Sequence[Sequence[Any]]) -> Message:
        """Write one message of the parts of several."""
        given = [one for parts in messages for one in parts]
        blocks = [self.write_text(one) if isinstance(one, str) else one for one in given]
        return {"role": self.assistant if role == "assistant" else role, self.key: blocks}

    def plain(self, messages: Sequence[Message]) -> list[Message]:
        """Write messages as plain data."""
        return to_plain(messages)

    def _blocks(self, message: Message) -> list[Message]:
        blocks: Any = message.get(self.key) or []
        return [self.write_text(blocks)] if isinstance(blocks, str) else list(blocks)


def _converse(block: Message) -> Any:
    if "toolUse" in block:
        return block if block["toolUse"].get("type") == "server_tool_use" else read_call(block)
    result = block.get("toolResult")
    if result is None:
        return block.get("text", block)
    content = [
        {"text": json.dumps(one["json"], ensure_ascii=False, default=str)} if "json" in one else one
        for one in result.get("content") or ()
    ]
    return str(result.get("toolUseId")), content_text(content)


def _converse_result(call: Call, text: Any) -> Message:
    status = "error" if text in (NOT_EXECUTED, OUTCOME_UNKNOWN) else "success"
    content = [{"text": str(text)}]
    return {"toolResult": {"toolUseId": call.id, "status": status, "content": content}}


def _anthropic(block: Message) -> Any:
    kind = block.get("type")
    if kind == "tool_use":
        return read_call(block)
    if kind == "tool_result":
        return str(block.get("tool_use_id")), content_text(block.get("content"))
    return block.get("text", block) if kind == "text" else block


def _gemini(block: Message) -> Any:
    call = block.get("function_call") or block.get("functionCall")
    if call is not None:
        # Gemini gives no ids to most calls: their results are found by the name.
        return Call(
            str(call.get("id") or call.get("name")), str(call.get("name")), call.get("args")
        )
    result = block.get("function_response") or block.get("functionResponse")
    if result is not None:
        told: dict[str, Any] = result.get("response") or {}
        text: Any = next(iter(told.values())) if len(told) == 1 else told
        return str(result.get("id") or result.get("name")), str(text)
    return block["text"] if "text" in block and not block.get("thought") else block


def _gemini_result(call: Call, text: Any) -> Message:
    own = {} if call.id == call.name else {"id": call.id}
    return {"function_response": {**own, "name": call.name, "response": {"output": str(text)}}}


class Responses:
    """The dialect of OpenAI's Responses: what it reads are items that `grouped` put together."""

    def read(self, message: Items | Message) -> Turn:
        """Read the items of one message, or one item alone."""
        message = [message] if isinstance(message, dict) else message
        parts: list[Any] = []
        calls: list[Call] = []
        results: list[tuple[str, str]] = []
        raw: list[Message] = []
        for item in message:
            kind = item.get("type", "message")
            if kind in _CALLS:
                # A shell in the provider's container is none of the client's.
                if part(item.get("environment"), "type") != "container_reference":
                    call = read_call(item)
                    own = item.get("action") or item.get("operation")
                    calls.append(call if call.name else Call(call.id, kind[: -len("_call")], own))
            elif kind in _RESULTS:
                results.append((str(item.get("call_id")), content_text(item.get("output"))))
                raw.append(item)
            elif kind == "message":
                blocks = _listed(item.get("content") or ())
                parts += [one if isinstance(one, str) else one.get("text", one) for one in blocks]
        synthetic = any(isinstance(item, SyntheticMessage) for item in message)
        role = _speaker(message[0]) if message else "user"
        return Turn(role, tuple(parts), tuple(calls), tuple(results), synthetic, tuple(raw))

    def results(self, results: Sequence[tuple[Call, Any]], onto: Items | None) -> list[Items]:
        """Write tool results: items that stand together."""
        made = [_output(call, text) for call, text in results]
        return [made if onto is None else [*onto, *made]]

    def ending(self, text: str, metadata: Mapping[str, Any], onto: Items | None) -> Items:
        """Write the synthetic last message, after the items that it goes on from."""
        blocks: Any = [{"type": "output_text", "text": text, "annotations": []}]
        item: Message = {"type": "message", "role": "assistant", "content": blocks}
        return [*(onto or ()), SyntheticMessage(text, metadata, **item)]

    def words(self, role: str, messages: Sequence[Sequence[Any]]) -> Items:
        """Write one message of the parts of several."""
        kind = "output_text" if role == "assistant" else "input_text"
        given = [one for parts in messages for one in parts]
        blocks = [{"type": kind, "text": one} if isinstance(one, str) else one for one in given]
        return [{"type": "message", "role": role, "content": blocks}]

    def plain(self, messages: Sequence[Items]) -> list[Items]:
        """Write messages as plain data."""
        return [to_plain(items) for items in messages]


_CALLS: Final = frozenset(
    f"{name}_call"
    for name in ("apply_patch", "computer", "custom_tool", "function", "local_shell", "shell")
)
_RESULTS: Final = frozenset(f"{name}_output" for name in _CALLS)


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
CONVERSE: Final = Blocks(
    "content",
    "assistant",
    _converse,
    lambda text: {"text": text},
    _converse_result,
)
"""The dialect of Bedrock's Converse, and of Strands."""
ANTHROPIC: Final = Blocks(
    "content",
    "assistant",
    _anthropic,
    lambda text: {"type": "text", "text": text},
    lambda call, text: {"type": "tool_result", "tool_use_id": call.id, "content": str(text)},
)
GEMINI: Final = Blocks("parts", "model", _gemini, lambda text: {"text": text}, _gemini_result)
RESPONSES: Final = Responses()
"""The dialect of OpenAI's Responses, whose items `grouped` puts together."""
