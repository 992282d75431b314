"""Tool calls in a response, and a history in which every one of them has a result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from agents import (
    Agent,
    Handoff,
    HandoffCallItem,
    HandoffOutputItem,
    ItemHelpers,
    MessageOutputItem,
    ModelResponse,
    ReasoningItem,
    RunItem,
    ToolCallItem,
    ToolCallOutputItem,
    TResponseInputItem,
)
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from budgetguard_core import NOT_EXECUTED, OUTCOME_UNKNOWN, Admit, StopReason, ToolCall
from budgetguard_core.decision import ToolKind

# How the SDK names the tools that are called without a name.
_LOCAL = {
    "apply_patch_call": "apply_patch",
    "computer_call": "computer",
    "custom_tool_call": "",
    "function_call": "",
    "local_shell_call": "local_shell",
    "shell_call": "shell",
}
_HOSTED = {
    "code_interpreter_call": "code_interpreter",
    "file_search_call": "file_search",
    "image_generation_call": "image_generation",
    "mcp_call": "",
    "web_search_call": "web_search",
}


@dataclass
class SyntheticMessage(MessageOutputItem):
    """The last message of a run that was stopped. The model did not write it."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """`synthetic`, `stop_reason` and `run_id`. They stay here: no provider accepts them."""

    def to_input_item(self) -> TResponseInputItem:
        """Return the message in the short form, without an id that no provider has given."""
        return {"role": "assistant", "content": ItemHelpers.text_message_output(self)}


@dataclass(slots=True)
class Requested:
    """A tool call of a response, and what became of it."""

    raw: Any
    call: ToolCall
    ticket: Admit | None = None
    refusal: str | None = None
    """What the model gets in place of a result."""
    reason: StopReason | None = None
    """Why the call was refused, where the run goes on."""
    started: bool = False
    ended: bool = False
    result: object = None
    target: Agent[Any] | None = None
    """The agent that a handoff led to."""

    def shown(self) -> object:
        """Return the result that the history shows."""
        if self.ended:
            return self.result
        return OUTCOME_UNKNOWN if self.started else self.refusal or NOT_EXECUTED


@dataclass(slots=True)
class Turn:
    """One response of a model and the tool calls in it."""

    agent: Agent[Any]
    response: ModelResponse
    requested: list[Requested] = field(default_factory=list[Requested])


def part(item: object, name: str) -> Any:
    """Read a field of an item, which is a model of the client library or a mapping."""
    if isinstance(item, Mapping):
        return cast("Mapping[str, Any]", item).get(name)
    return getattr(item, name, None)


def requested_calls(agent: Agent[Any], items: Iterable[Any]) -> list[Requested]:
    """List the tool calls among the items of a response, in the order the model wrote them."""
    handoffs = handoff_names(agent)
    found: list[Requested] = []
    for item in items:
        kind: ToolKind = "function"
        type_ = part(item, "type")
        if type_ in _HOSTED:
            name = _HOSTED[type_] or part(item, "name")
            call_id, kind = part(item, "id"), "hosted"
        elif type_ in _LOCAL:
            name = _LOCAL[type_] or part(item, "name")
            call_id = part(item, "call_id")
            if type_ == "function_call" and name in handoffs:
                kind = "handoff"
        else:
            continue
        call = ToolCall(name=str(name), arguments=_arguments(item), id=call_id, kind=kind)
        found.append(Requested(item, call))
    return found


def handoff_names(agent: Agent[Any]) -> set[str]:
    """Return the names under which an agent's handoffs look like tools to the model."""
    return {
        one.tool_name if isinstance(one, Handoff) else Handoff.default_tool_name(one)
        for one in agent.handoffs
    }


def synthetic_message(agent: Agent[Any], text: str, metadata: dict[str, Any]) -> SyntheticMessage:
    """Make the last message of a run that was stopped."""
    message = ResponseOutputMessage(
        id=f"msg_{metadata['run_id']}",
        type="message",
        role="assistant",
        status="completed",
        content=[ResponseOutputText(text=text, type="output_text", annotations=[], logprobs=[])],
    )
    return SyntheticMessage(agent=agent, raw_item=message, metadata=metadata)


def closing_items(
    turns: Sequence[Turn],
    items: Sequence[RunItem],
    responses: Sequence[ModelResponse],
    resumed: Sequence[Requested] = (),
) -> list[RunItem]:
    """List what is missing behind the items of a run for its history to be whole.

    Args:
        turns: What the model answered and what became of it, as far as it can be missing.
        items: The items that the SDK kept.
        responses: The responses that the SDK kept.
        resumed: What became of calls that were asked for before this run went on.
    """
    known = {one.call.id: one for one in resumed}
    asked = {_call_id(item) for item in items if _is_call(item)}
    answered = {_call_id(item) for item in items if item.type.endswith("_output_item")}
    missing: list[RunItem] = []
    for turn in turns:
        kept = any(response is turn.response for response in responses)
        missing += _turn_items(turn, asked, answered, kept=kept)
        asked |= {one.call.id for one in turn.requested}
        answered |= asked
    for item in items:
        if _is_call(item) and _call_id(item) not in answered:
            # It waited for approval. Whatever was not heard of since never started.
            one = known.get(_call_id(item)) or Requested(item.raw_item, ToolCall(name=""))
            missing += result_items(item.agent, item.raw_item, one.shown())
    return missing


def _turn_items(turn: Turn, asked: set[Any], answered: set[Any], *, kept: bool) -> list[RunItem]:
    by_id = {id(one.raw): one for one in turn.requested}
    calls: list[RunItem] = []
    results: list[RunItem] = []
    reasoning = all(_can_answer(one.raw) for one in turn.requested)
    for item in turn.response.output:
        requested = by_id.get(id(item))
        type_ = part(item, "type")
        if requested is not None and requested.call.kind != "hosted":
            new = requested.call.id not in asked
            if new and _can_answer(item):
                calls.append(_call_item(turn.agent, requested))
            if requested.call.id not in answered:
                results += _results(turn.agent, requested)
        elif kept:
            continue
        elif requested is not None:
            calls.append(ToolCallItem(agent=turn.agent, raw_item=cast("Any", item)))
        elif type_ == "message":
            calls.append(MessageOutputItem(agent=turn.agent, raw_item=cast("Any", item)))
        elif type_ == "reasoning" and reasoning:
            # A provider rejects reasoning without the call that followed it.
            calls.append(ReasoningItem(agent=turn.agent, raw_item=cast("Any", item)))
    return [*calls, *results]


def _call_item(agent: Agent[Any], requested: Requested) -> RunItem:
    if requested.call.kind == "handoff":
        return HandoffCallItem(agent=agent, raw_item=requested.raw)
    return ToolCallItem(agent=agent, raw_item=requested.raw)


def _results(agent: Agent[Any], requested: Requested) -> list[RunItem]:
    if requested.target is not None:
        return [
            HandoffOutputItem(
                agent=agent,
                raw_item=_function_output(requested.raw, requested.shown()),
                source_agent=agent,
                target_agent=requested.target,
            )
        ]
    return result_items(agent, requested.raw, requested.shown())


def result_items(agent: Agent[Any], raw: Any, result: object) -> list[RunItem]:
    """Make the result of a tool call; none where only the tool itself can make one."""
    type_, call_id = part(raw, "type"), part(raw, "call_id")
    text = result if isinstance(result, str) else str(result)
    output: Any
    if type_ == "function_call":
        output = _function_output(raw, result)
    elif type_ == "custom_tool_call":
        output = {"type": "custom_tool_call_output", "call_id": call_id, "output": text}
    elif type_ == "local_shell_call":
        output = {"type": "local_shell_call_output", "call_id": call_id, "output": text}
    elif type_ == "apply_patch_call":
        output = {
            "type": "apply_patch_call_output",
            "call_id": call_id,
            "status": "failed",
            "output": text,
        }
    elif type_ == "shell_call":
        shown = {"stdout": "", "stderr": text, "outcome": {"type": "exit", "exit_code": 1}}
        output = {"type": "shell_call_output", "call_id": call_id, "output": [shown]}
    else:
        return []
    return [ToolCallOutputItem(agent=agent, raw_item=output, output=result)]


def _function_output(raw: Any, result: object) -> Any:
    if isinstance(raw, ResponseFunctionToolCall):
        return ItemHelpers.tool_call_output_item(raw, result)
    return {
        "type": "function_call_output",
        "call_id": part(raw, "call_id"),
        "output": str(result),
    }


def _can_answer(raw: Any) -> bool:
    return bool(part(raw, "type") != "computer_call")


def _is_call(item: RunItem) -> bool:
    return item.type in ("tool_call_item", "handoff_call_item")


def _call_id(item: RunItem) -> Any:
    return part(item.raw_item, "call_id")


def _arguments(item: object) -> Any:
    for name in ("arguments", "input", "action", "operation"):
        value = part(item, name)
        if value is not None:
            return value
    return None


def transfer_text(agent: Agent[Any]) -> str:
    """Return what the SDK answers to the call of a handoff."""
    return json.dumps({"assistant": agent.name})


def new_for_session(
    items: Sequence[RunItem], stored: Sequence[TResponseInputItem]
) -> list[TResponseInputItem]:
    """List the items that a session does not hold yet.

    Args:
        items: The last turn's items that may be missing, and the closing ones.
        stored: The end of what the session holds.
    """
    there = {(part(item, "type"), part(item, "call_id")) for item in stored}
    saved = any(
        _is_call(item) and (part(item.raw_item, "type"), _call_id(item)) in there for item in items
    )
    new: list[TResponseInputItem] = []
    for item in items:
        raw = item.to_input_item()
        call_id = part(raw, "call_id")
        if call_id is not None:
            if (part(raw, "type"), call_id) not in there:
                new.append(raw)
        elif not saved or isinstance(item, SyntheticMessage):
            new.append(raw)
    return new
