"""The message format of Pydantic AI, and the place in a history where a paused run is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_ai import messages as chat

from budgetguard_core.kit import Call, ToolCall, Turn

KEY = "budgetguard"


class Dialect:
    """The dialect of Pydantic AI: requests and responses, each a list of parts."""

    def read(self, message: Any) -> Turn:
        """Read a message."""
        if isinstance(message, chat.ModelResponse):
            calls = tuple(Call(c.tool_call_id, c.tool_name, c.args) for c in message.tool_calls)
            text = (message.text,) if message.text else ()
            synthetic = (message.metadata or {}).get("synthetic") is True
            return Turn("assistant", text, calls, synthetic=synthetic)
        results: list[tuple[str, str]] = []
        parts: list[Any] = []
        for part in message.parts:
            if isinstance(part, chat.ToolReturnPart):
                results.append((part.tool_call_id, part.model_response_str(wrap_if_error=False)))
            elif part.part_kind == "retry-prompt" and part.tool_name is not None:
                results.append((part.tool_call_id, part.model_response()))
            elif isinstance(part, chat.UserPromptPart):
                parts += [part.content] if isinstance(part.content, str) else part.content
            else:
                parts.append(part)
        return Turn("tool" if results and not parts else "user", tuple(parts), (), tuple(results))

    def results(self, results: Sequence[tuple[Call, Any]], onto: Any | None) -> list[Any]:
        """Write tool results, as failed ones."""
        made = [chat.ToolReturnPart(c.name, text, c.id, outcome="failed") for c, text in results]
        return [
            chat.ModelRequest(made) if onto is None else replace(onto, parts=[*onto.parts, *made])
        ]

    def ending(self, text: str, metadata: Mapping[str, Any], onto: Any | None) -> Any:
        """Write the synthetic last message, or add it to the answer that it goes on from."""
        parts: list[Any] = [chat.TextPart(text)]
        if onto is None:
            return chat.ModelResponse(parts, model_name=KEY, metadata=dict(metadata))
        parts = [*onto.parts, chat.TextPart(f"\n\n{text}")]
        return replace(onto, parts=parts, metadata={**(onto.metadata or {}), **metadata})

    def words(self, role: str, parts: Sequence[Any]) -> Any:
        """Write one message of these parts."""
        if role == "assistant":
            return chat.ModelResponse([chat.TextPart("\n\n".join(map(str, parts)))])
        own = [part for part in parts if isinstance(part, chat.SystemPromptPart)]
        content = [part for part in parts if not hasattr(part, "part_kind")]
        is_text = all(isinstance(part, str) for part in content)
        request = chat.UserPromptPart("\n\n".join(content) if is_text else content)
        return chat.ModelRequest([*own, request])

    def plain(self, messages: Sequence[Any]) -> list[Any]:
        """Write messages as plain data."""
        dump: Any = chat.ModelMessagesTypeAdapter.dump_python
        return [*dump([*messages], mode="json")]

    def messages(self, plain: Sequence[Any]) -> list[Any]:
        """Return the messages that plain data, or they themselves, are."""
        return chat.ModelMessagesTypeAdapter.validate_python([*plain])


DIALECT = Dialect()


class InHistory:
    """The last request of a history, which holds the counters of a paused run.

    Not the last response: a stream makes that one anew.
    """

    keeps = frozenset({"paused"})

    def __init__(self, messages: Callable[[], Sequence[Any]]) -> None:
        self._messages = messages

    def _last(self) -> chat.ModelRequest | None:
        found = (one for one in reversed(self._messages()) if isinstance(one, chat.ModelRequest))
        return next(found, None)

    def get(self) -> Any:
        """Return the entry, or None."""
        last = self._last()
        return None if last is None else (last.metadata or {}).get(KEY)

    def put(self, entry: dict[str, Any] | None) -> None:
        """Keep an entry."""
        last = self._last()
        if entry and last is not None:
            last.metadata = {**(last.metadata or {}), KEY: entry}


def instructions_of(messages: Sequence[Any]) -> str | None:
    """Return the instructions of a history, which stand beside its messages."""
    requests = (one for one in messages if isinstance(one, chat.ModelRequest))
    return next((one.instructions for one in requests), None)


def tool_call_of(call: Any) -> ToolCall:
    """Return a call in a response as the engine's own."""
    return ToolCall(name=call.tool_name, arguments=call.args, id=call.tool_call_id)


def errors_of(messages: Sequence[Any]) -> list[tuple[ToolCall, Any]]:
    """Return the calls of the last response that got an error, with the part that has it."""
    last = messages[-1].parts if messages else ()
    before = getattr(messages[-2], "tool_calls", ()) if messages[1:] else ()
    calls = {one.tool_call_id: tool_call_of(one) for one in before}
    errors = [one for one in last if getattr(one, "outcome", one.part_kind) != "success"]
    found = [(calls.get(getattr(one, "tool_call_id", "")), one) for one in errors]
    return [(call, one) for call, one in found if call is not None]
