"""The message format of Strands, which is that of Bedrock's Converse with marks of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from strands.types.session import encode_bytes_values

from budgetguard_core import kit
from budgetguard_strands._bounds import model_name, with_bound

# Plain dictionaries: the keys differ between Strands releases.
Message: TypeAlias = dict[str, Any]

STOPPED = "This work was stopped before it finished."
"""The result of a tool whose body was stopped by a limit of the run around it."""


def error_result(tool_use_id: str, text: str) -> Any:
    """Write the result of a tool call that brought nothing."""
    return {"toolUseId": tool_use_id, "status": "error", "content": [{"text": text}]}


class Dialect(kit.Converse):
    """The dialect of Strands."""

    def result(self, call: kit.Call, text: Any) -> Message:
        """Write one result; that of a call that has ended is Strands' own."""
        own = cast("Message", text)
        return own if isinstance(text, dict) else error_result(call.id, str(text))

    def read(self, message: Any) -> kit.Turn:
        """Read a message; what a model thought is signed for one request and in no other."""
        turn = super().read(message)
        parts = turn.parts
        if any(not isinstance(one, str) for one in parts):
            parts = tuple(one for one in parts if kit.part(one, "reasoningContent") is None)
        marked = is_synthetic(message)
        return kit.Turn(turn.role, parts, turn.calls, turn.results, marked)

    def ending(self, text: str, metadata: Mapping[str, Any], onto: Message | None) -> Message:
        """Write the synthetic last message."""
        written: list[Any] = [] if onto is None else onto["content"]
        content: list[Any] = [*written, {"text": text}]
        return {"role": "assistant", "content": content, "metadata": dict(metadata)}

    def plain(self, messages: Sequence[Any]) -> list[Any]:
        """Write messages as plain data."""
        return list(encode_bytes_values(list(messages)))


DIALECT = Dialect()


def is_synthetic(message: Mapping[str, Any]) -> bool:
    """Return whether a message is the synthetic last one of a stopped run."""
    return kit.part(message.get("metadata"), "synthetic") is True


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text blocks of a message, one to a line."""
    return "\n".join(block["text"] for block in message.get("content", ()) if "text" in block)


def thought(delta: object) -> str:
    """Return what a piece of an answer has beside text: arguments of a call, or reasoning."""
    parts = cast("Mapping[str, Any]", delta).values() if isinstance(delta, Mapping) else ()
    found = [kit.part(one, "input") or kit.part(one, "text") for one in parts]
    return "".join(one for one in found if isinstance(one, str))


def with_text(result: Mapping[str, Any], *texts: str) -> Any:
    """Copy a tool result and add text blocks to it."""
    content = [*result.get("content", ()), *({"text": text} for text in texts if text)]
    return {**result, "content": content}


def of_stopped(result: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Any:
    """Write the result of a sub-agent that was stopped: its last words, and what it had found."""
    answers = (text_of(one) for one in reversed(messages[:-1]) if one.get("role") == "assistant")
    found = next((text for text in answers if text), "")
    structured = [one for one in result.get("content", ()) if "json" in one]
    texts = dict.fromkeys((text_of(messages[-1]), found))
    return {**with_text({**result, "content": structured}, *texts), "status": "error"}


def last_question(agent: Any) -> kit.LastQuestion:
    """Return how to ask an agent's model for a last answer."""

    async def ask(sent: list[Any], open_call: Any) -> kit.Answer:
        most: int | None = open_call.max_output_tokens
        model = agent.model if most is None else with_bound(agent.model, most)
        text: list[str] = []
        usage: Any = None
        async for event in model.stream(sent, None, agent.system_prompt):
            text.append(event.get("contentBlockDelta", {}).get("delta", {}).get("text") or "")
            usage = event.get("metadata", {}).get("usage") or usage
        return kit.Answer(text="".join(text), usage=kit.token_usage(usage))

    return kit.LastQuestion(
        ask_async=ask, model=model_name(agent.model), system=agent.system_prompt
    )
