"""Sizes of prompts before they are sent: everything in them, each message looked at once."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from json.encoder import encode_basestring
from typing import Any, Final, NamedTuple, cast

from pydantic import BaseModel, TypeAdapter

from budgetguard_core.kit.media import NAMED, block_tokens, data_tokens, named_tokens
from budgetguard_core.kit.records import MODEL, fields_of, kind_of, part
from budgetguard_core.usage import TokenUsage, estimate_tokens

_MESSAGE_TOKENS: Final = 5
"""Role and separators of a message: five in ChatML and Llama 3, three to four with OpenAI."""
_ENCRYPTED_BYTES: Final = 5
"""Bytes of Base64 to a token of the reasoning that is encrypted in it."""
_MOST_PARTS: Final = 100_000
"""Parts that are looked at in one message; objects may refer to themselves."""

_NOT_SENT: Final = frozenset(
    {
        "additional_kwargs",
        "annotations",
        "artifact",
        "cachePoint",
        "cache_control",
        "call_id",
        "citations",
        "conversation_id",
        "created_at",
        "extras",
        "finish_reason",
        "id",
        "invalid_tool_calls",
        "kind",
        "logprobs",
        "metadata",
        "model",
        "object",
        "part_kind",
        "provider_data",
        "provider_details",
        "provider_specific_fields",
        "response_metadata",
        "role",
        "run_id",
        "signature",
        "status",
        "stop_reason",
        "thinking_blocks",
        "thoughtSignature",
        "thought_signature",
        "toolUseId",
        "tool_call_chunks",
        "tool_call_id",
        "tool_use_id",
        "type",
        "usage",
        "usage_metadata",
    }
)
"""Fields of messages and their blocks besides the text that a model reads."""
_JSON: Final = frozenset(
    {"args", "arguments", "input", "json", "parameters", "response", "structuredContent"}
)
"""Fields written as JSON for the model: all of it counts, whatever the names in it."""
_ENCRYPTED: Final = frozenset({"encrypted_content", "redactedContent", "redacted_content"})
_MAY_BE_ENCRYPTED: Final = _ENCRYPTED | {"data"}
# Tuples, because a union is made anew wherever it is written.
_NUMBERS: Final = (bool, int, float)
_LISTS: Final = (list, tuple)
_CALLS: Final = frozenset({"function_call", "tool_call", "tool_use"})
_INPUT_SCHEMAS: Final = (
    "tool_call_schema",
    "params_json_schema",
    "input_json_schema",
    "inputSchema",
    "args_schema",
)
"""The fields in which tools of LangChain, the OpenAI Agents SDK and MCP keep their input schema."""
_ABOUT: Final = ("name", "tool_name", "description", "tool_description")


def estimate(content: object) -> int:
    """Estimate the tokens of content: a message, a block, a text, or a list of them.

    Counted is what a model reads: texts, names and arguments of tool calls, results. Images,
    sound, video and files count as `budgetguard_core.kit.media` says.

    Args:
        content: In the format of any provider or framework, as plain data or objects.
    """
    total = 0
    parts: list[Any] = [content]
    for one in islice(parts, _MOST_PARTS):  # which grow meanwhile
        # Nearly every part is one of these, and is known by its type alone.
        kind = kind_of(one)
        if kind is dict:
            total += _estimate_fields(one, parts)
            continue
        if kind is str and one[:5] != "data:":
            total += estimate_tokens(one) if one else 0
            continue
        if kind is list:
            parts += one
            continue
        if type(kind) is MODEL:
            extra = one.__pydantic_extra__
            fields = {**one.__dict__, **extra} if extra else one.__dict__
            total += _estimate_fields(fields, parts)
            continue
        if one is None or isinstance(one, _NUMBERS):
            continue
        if isinstance(one, _LISTS):
            parts.extend(cast("Sequence[object]", one))
            continue
        allowance = data_tokens(one)
        if allowance is not None:
            total += allowance
        elif isinstance(one, str):
            total += estimate_tokens(one) if one else 0
        elif (fields := fields_of(one)) is not None:
            total += _estimate_fields(fields, parts)
    return total


def estimate_schema(schema: object) -> int:
    """Estimate the tokens of a tool or of an output schema.

    Args:
        schema: As a provider takes it, a tool of a framework, a type, or a function.
    """
    return 0 if schema is None else estimate_tokens(_schema_text(schema))


def project(
    messages: object,
    *,
    system: object = None,
    tools: object = (),
    output_schema: object = None,
) -> int:
    """Estimate the tokens of one prompt. `Prompt` does the same for a conversation.

    Args:
        messages: A text, a message, or a list of messages.
        system: What is sent in front of the messages and is none of them.
        tools: All that the model may call, as for `estimate_schema`.
        output_schema: What the answer has to fit, as for `estimate_schema`.
    """
    return Prompt().project(messages, system=system, tools=tools, output_schema=output_schema)


class _Seen(NamedTuple):
    length: int = 0
    first: object = None
    last: object = None
    tokens: int = 0


_NOTHING: Final[tuple[tuple[object, ...], int]] = ((), 0)
"""Of a prompt that is messages alone."""


class Prompt:
    """Projects the prompts of one conversation, at a cost that does not grow with it.

    A prompt that goes on from the one before, as told by its number of messages, the first of them
    and the last that is known, is that one and what came after it; any other is looked at anew. A
    message that is changed in place later counts as it was.

    Args:
        server_side: The provider keeps the history, so that each prompt holds only what is new.
    """

    __slots__ = ("_fixed", "_reply", "_seen", "_server_side")

    def __init__(self, *, server_side: bool = False) -> None:
        self._server_side = server_side
        # One attribute each, so that calls at the same time never see halves of two prompts.
        self._seen = _Seen()
        self._fixed = _NOTHING
        self._reply: tuple[object, int] = (self, 0)

    def project(
        self,
        messages: object,
        *,
        system: object = None,
        tools: object = (),
        output_schema: object = None,
    ) -> int:
        """Estimate the tokens of the prompt that is about to be sent; arguments as `project`'s."""
        listed = _listed(messages)
        fixed = self._size_of_fixed(system, _listed(tools), output_schema)
        seen = self._seen
        if self._server_side:
            return max(seen.tokens + fixed + _estimate_messages(listed), 0)
        if not _goes_on(seen, listed):
            seen = _Seen()
        if len(listed) > seen.length:
            tokens = seen.tokens
            reply, measured = self._reply
            for message in listed[seen.length :]:
                tokens += _MESSAGE_TOKENS
                tokens += measured if message is reply else estimate(message)
            seen = _Seen(len(listed), listed[0], listed[-1], tokens)
        self._seen = seen
        return max(seen.tokens + fixed, 0)

    def replied(self, reply: object, usage: TokenUsage) -> None:
        """Take what the provider measured for a reply as its size in the prompts that hold it.

        Beside `measured` for prompts that go on at the same time, which say nothing of each other.

        Args:
            reply: The very message that the prompts will hold.
            usage: Of the call. Reasoning is not sent again.
        """
        self._reply = reply, usage.output_tokens - usage.reasoning_tokens

    def measured(self, usage: TokenUsage | None, *, reply: object = None) -> None:
        """Take what the provider measured for the last prompt as the base of the next.

        Args:
            usage: Of the call; figures that were estimated, and None, change nothing.
            reply: The reply as it stands next in the conversation: then it counts as measured too,
                less the reasoning, which is not sent again.
        """
        if usage is None or usage.estimated or not usage.input_tokens:
            return
        tokens = usage.total_tokens if self._server_side else usage.input_tokens
        tokens -= self._fixed[1]
        length, first, last, _ = self._seen
        if reply is not None and not self._server_side:
            tokens += usage.output_tokens - usage.reasoning_tokens
            first, last = first if length else reply, reply
            length += 1
        self._seen = _Seen(length, first, last, tokens)

    def _size_of_fixed(self, system: object, tools: Sequence[object], output_schema: object) -> int:
        if system is None and not tools and output_schema is None:
            self._fixed = _NOTHING
            return 0
        parts = (system, *tools, output_schema)
        known, tokens = self._fixed
        if not _same(known, parts):
            tokens = estimate(system) + sum(map(estimate_schema, (*tools, output_schema)))
            self._fixed = (parts, tokens)
        return tokens


def _listed(given: object) -> Sequence[object]:
    if given is None:
        return ()
    if isinstance(given, _LISTS):
        return given  # pyright: ignore[reportUnknownVariableType] - without a call of `cast`
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return list(cast("Sequence[object]", given))
    return (given,)


def _goes_on(seen: _Seen, messages: Sequence[object]) -> bool:
    if not seen.length or len(messages) < seen.length:
        return not seen.length
    return _same(seen.first, messages[0]) and _same(seen.last, messages[seen.length - 1])


def _same(one: object, other: object) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # the comparison is the framework's or the user's own
        return False


def _estimate_messages(messages: Sequence[object]) -> int:
    total = 0
    for message in messages:
        total += _MESSAGE_TOKENS + estimate(message)
    return total


def _estimate_fields(fields: Mapping[Any, Any], parts: list[object]) -> int:
    """Estimate what a message or block holds itself; what is inside goes to the parts."""
    allowance = block_tokens(fields)
    if allowance is not None:
        return allowance
    total = 0
    for name, value in fields.items():
        if name in _NOT_SENT or value is None:
            continue
        if type(value) is str or isinstance(value, str):
            if name in _MAY_BE_ENCRYPTED and _is_encrypted(name, fields):
                total += len(value) // _ENCRYPTED_BYTES + 1
            elif value:
                parts.append(value)
            continue
        if value.__class__ is list and not value and name not in _JSON:
            continue
        if name == "tool_calls" and _are_in_content(fields.get("content")):
            continue
        allowance = named_tokens(name, value) if name in NAMED else None
        if allowance is not None:
            total += allowance
        elif isinstance(value, bytes) and _is_encrypted(name, fields):
            total += len(value) // _ENCRYPTED_BYTES + 1
        elif name in _JSON:
            total += estimate_tokens(_json(value))
        else:
            parts.append(value)
    return total


def _are_in_content(content: object) -> bool:
    """Return whether calls are blocks of the content too, as in LangChain's messages."""
    if type(content) is str:
        return False
    blocks = cast("list[object]", content) if isinstance(content, list) else ()
    return any(part(block, "type") in _CALLS for block in blocks)


def _is_encrypted(name: object, fields: Mapping[Any, Any]) -> bool:
    return name in _ENCRYPTED or (name == "data" and fields.get("type") == "redacted_thinking")


def _schema_text(schema: object) -> str:
    if isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping):
        return _json(cast("object", schema))
    if inspect.isfunction(schema) or inspect.ismethod(schema):
        return f"{schema.__name__}{inspect.signature(schema)}\n{inspect.getdoc(schema)}"
    if isinstance(schema, type):
        return _json(cast("object", schema))
    of_strands = getattr(schema, "tool_spec", None)
    if of_strands is not None:
        return _json(of_strands)
    output = getattr(schema, "json_schema", None)
    if callable(output):
        return _json(_called(output))
    for name in _INPUT_SCHEMAS:
        inner = getattr(schema, name, None)
        if inner is not None:
            about = (getattr(schema, each, None) for each in _ABOUT)
            return _json([inner, *filter(None, about)])
    return _json(schema)


def _called(method: Callable[[], object]) -> object:
    try:
        return method()
    except Exception:  # OpenAI Agents: an output that is plain text has no schema
        return None


def _json(value: object) -> str:
    text = _flat(cast("Any", value)) if kind_of(value) is dict else None
    if text is not None:
        return text
    try:
        return _ENCODER.encode(value)
    except Exception:  # it refers to itself, or its own code failed
        return type(value).__name__


def _flat(fields: dict[Any, Any]) -> str | None:
    """Write texts by name as the encoder does, which takes ten times as long; None for others."""
    written: list[str] = []
    for name, value in fields.items():
        if type(name) is not str or type(value) is not str:
            return None
        written.append(f"{encode_basestring(name)}: {encode_basestring(value)}")
    return "{" + ", ".join(written) + "}"


def _plain(value: object) -> object:
    if isinstance(value, type):
        return _schema_of(cast("type[object]", value))
    if isinstance(value, bytes | bytearray | memoryview):
        return None
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    return str(value)


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, skipkeys=True, default=_plain)


def _schema_of(of: type[object]) -> object:
    try:
        return TypeAdapter(of).json_schema()
    except Exception:  # no schema can be made for it
        return of.__name__
