"""The history of an agent: closing it, and the synthetic last message."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from opentelemetry.context import Context
from strands.hooks import MessageAddedEvent

from budgetguard_core import NOT_EXECUTED
from budgetguard_core.kit import OpenToolCall, is_stop, part

# Plain dictionaries: the keys differ between Strands releases, and `metadata` is younger than some.
Message: TypeAlias = dict[str, Any]

STOPPED = "This work was stopped before it finished."
"""The result of a tool whose body was stopped by a limit of the run around it."""

_NOTHING: dict[str, Any] = {}


@dataclass(eq=False, slots=True)
class Asked:
    """One tool call of the batch in flight. It is told apart from others by its identity."""

    use: Mapping[str, Any]
    call: OpenToolCall
    context: Context
    result: Any = None


def find_call(asked: Sequence[Asked], use: Mapping[str, Any]) -> Asked | None:
    """Find the open call of a tool use: that very one, or else one of the same id."""
    same_id = None
    for one in asked:
        if one.result is not None:
            continue
        if one.use is use:
            return one
        if same_id is None and one.use["toolUseId"] == use["toolUseId"]:
            same_id = one
    return same_id


def results_for_open_calls(
    messages: Sequence[Any], asked: Sequence[Asked], earlier: Sequence[Mapping[str, Any]]
) -> Message | None:
    """Answer the tool uses of the last message, or return None when none is open.

    Args:
        messages: The agent's history.
        asked: The calls of the batch in flight.
        earlier: Results of the same batch from before it was interrupted.
    """
    last: Message = messages[-1] if messages else {}
    uses = [block["toolUse"] for block in last.get("content", ()) if "toolUse" in block]
    if not uses:
        return None
    # The last attempt counts of a call that a hook had tried again.
    left = list({id(one.use): one for one in asked}.values())
    kept = list(earlier)
    content: list[dict[str, Any]] = []
    for use in uses:
        name = use["toolUseId"]
        one = next((one for one in left if one.use is use), None) or next(
            (one for one in left if one.use["toolUseId"] == name), None
        )
        result: Any = None
        if one is not None:
            left.remove(one)
            result = one.result or error_result(name, str(one.call.answer))
        else:
            done = next((each for each in kept if each["toolUseId"] == name), None)
            if done is not None:
                kept.remove(done)
                result = done
        content.append({"toolResult": result or error_result(name, NOT_EXECUTED)})
    return {"role": "user", "content": content}


def error_result(tool_use_id: str, text: str) -> dict[str, Any]:
    """Make the result of a tool call that brought nothing."""
    return {"toolUseId": tool_use_id, "status": "error", "content": [{"text": text}]}


def synthetic_message(partial: str, text: str, metadata: Mapping[str, Any]) -> Message:
    """Make the last message of a stopped run: what the model had written so far, and the note."""
    content = [{"text": part} for part in (partial, text) if part]
    return {"role": "assistant", "content": content, "metadata": dict(metadata)}


def is_synthetic(message: Mapping[str, Any]) -> bool:
    """Tell whether a message is the synthetic last one of a stopped run."""
    metadata: Mapping[str, Any] = message.get("metadata") or _NOTHING
    return metadata.get("synthetic") is True


def is_of_stop(message: Mapping[str, Any], kept: Any) -> bool:
    """Tell whether a message is the last of a run that was stopped, in whatever words.

    Args:
        message: The last message of the history.
        kept: What the agent's state holds of its last run.
    """
    stopped = part(kept, "unfinished") == "stopped" and not has_tool_use(message["content"])
    return is_synthetic(message) or (stopped and message["role"] == "assistant")


def has_tool_use(content: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a message's content asks for a tool."""
    return any("toolUse" in block for block in content)


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text blocks of a message, one to a line."""
    return "\n".join(block["text"] for block in message.get("content", ()) if "text" in block)


def unsaid(delta: object) -> str:
    """Return what a piece of an answer says beside text: arguments of a tool call, or reasoning."""
    if not isinstance(delta, Mapping):
        return ""
    parts = cast("Mapping[str, Any]", delta).values()
    said = [part(one, "input") or part(one, "text") for one in parts]
    return "".join(one for one in said if isinstance(one, str))


def with_text(result: Mapping[str, Any], *texts: str) -> Any:
    """Copy a tool result and add text blocks to it."""
    content = [*result.get("content", ()), *({"text": text} for text in texts if text)]
    return {**result, "content": content}


def of_stopped(result: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Any:
    """Make the result of a sub-agent that was stopped: its last words, and what it had found."""
    texts = dict.fromkeys((text_of(messages[-1]), partial_work(messages)))
    content = [one for one in result.get("content", ()) if "json" in one]
    content += [{"text": text} for text in texts if text]
    return {**result, "content": content, "status": "error"}


def partial_work(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the last text that the model wrote before a synthetic last message."""
    for message in reversed(messages[:-1]):
        if message.get("role") == "assistant" and text_of(message):
            return text_of(message)
    return ""


def is_of_a_stop(error: Any) -> bool:
    """Tell whether an exception, or what it was raised from, says only that a run was stopped."""
    while isinstance(error, BaseException):
        if is_stop(error):
            return True
        error = error.__cause__
    return False


async def append(agent: Any, message: Message, report: Callable[[str, Exception], None]) -> None:
    """Add a message as the agent does: kept by its session manager, seen by every hook.

    Args:
        agent: The agent.
        message: What is added.
        report: Hears of a hook or session manager that failed; the run ends all the same.
    """
    messages = agent.messages
    if messages and "tracking_id" in messages[-1]:
        # Younger releases number every message, and the session managers keep the number.
        message["tracking_id"] = str(uuid.uuid4())
    messages.append(message)
    event = MessageAddedEvent(agent=agent, message=cast("Any", message))
    try:
        await agent.hooks.invoke_callbacks_async(event)
    except Exception as error:
        report("message added", error)
