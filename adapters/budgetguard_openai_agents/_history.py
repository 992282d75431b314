"""Tool calls in a response, and a history in which every one of them has a result."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from agents import (
    Agent,
    CompactionItem,
    Handoff,
    HandoffCallItem,
    HandoffOutputItem,
    ItemHelpers,
    MCPListToolsItem,
    MessageOutputItem,
    ModelResponse,
    OpenAIChatCompletionsModel,
    ReasoningItem,
    RunItem,
    ToolCallItem,
    ToolCallOutputItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
    TResponseInputItem,
)
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from budgetguard_core import NOT_EXECUTED, OUTCOME_UNKNOWN, ToolCall
from budgetguard_core.kit import OpenToolCall, ToolKind, part, parts_of
from budgetguard_openai_agents import _seams

# How the SDK names the tools that are called without a name.
LOCAL = {
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
# What a response holds beside calls and their results, as the SDK has it in a history.
_REPORTED: dict[str, type[Any]] = {
    "compaction": CompactionItem,
    "mcp_list_tools": MCPListToolsItem,
    "message": MessageOutputItem,
    "program": ToolCallItem,
    "reasoning": ReasoningItem,
    "tool_search_call": ToolSearchCallItem,
    "tool_search_output": ToolSearchOutputItem,
}
_ARGUMENTS = ("arguments", "input", "action", "operation")
_PNG = "data:image/png;base64,"
# The words "Not executed." and "Outcome unknown.", black on white.
_NOT_EXECUTED = (
    "iVBORw0KGgoAAAANSUhEUgAAAFYAAAAQAQAAAACkLLUrAAAAZ0lEQVR42mP8zwADf5kYEAAPewEDAwPDCwYFBqbPDlDR"
    "BgaGj8nsP470KTn2yf9h+Og5/1OiyqR0lfl/mBgZGP4JPUhgeMDAwMLA8IU57+SCvxYMDEyMUias6V7LznplMTCS7gY4"
    "AAC9xB2JC8/j4gAAAABJRU5ErkJggg=="
)
_OUTCOME_UNKNOWN = (
    "iVBORw0KGgoAAAANSUhEUgAAAGgAAAAQAQAAAADSFgegAAAAb0lEQVR42mP8z4AEmBhI4C1gYGBg+O/AwMDAwPQTIsoI"
    "IT+J/zXy5gk25BOP2b2BhcEh+Nv6Z8lmhwsP3mBgYmBgSBB5wMAgwPCGgYGJgeHLAgYLBoYPDAoMDAw/HhyzuNr+w1Nl"
    "xmu1ekbyXYYEAOgQHWOk+U/zAAAAAElFTkSuQmCC"
)


@dataclass
class SyntheticMessage(MessageOutputItem):
    """The last message of a run that was stopped. The model did not write it."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """`synthetic`, `stop_reason` and `run_id`. They stay here: no provider accepts them."""
    is_of_chat: bool = False
    """The model that was at work gives no ids."""

    def to_input_item(self) -> TResponseInputItem:
        """Return the message in the short form, without an id; as the SDK has those of chats."""
        if self.is_of_chat:
            # For a chat completion the SDK (0.24) cannot read the short form once it was in JSON.
            return super().to_input_item()
        return {"role": "assistant", "content": ItemHelpers.text_message_output(self)}


@dataclass(slots=True, eq=False)
class Asked:
    """A tool call that the model asked for. It is told apart by the object in its response."""

    raw: Any
    call: ToolCall
    opened: OpenToolCall | None = None
    """What the budget says of it, once it was asked."""
    target: Agent[Any] | None = None
    """The agent that a handoff led to."""
    error: BaseException | None = None
    """What the tool raised, whatever the SDK made of that."""
    partial: str | None = None
    """What a run inside the tool had brought when it was stopped."""
    is_begun: bool = False
    """The SDK has come to it."""

    @property
    def type(self) -> str:
        """The kind of item."""
        return str(part(self.raw, "type"))

    @property
    def is_local(self) -> bool:
        """True if a tool on this side is called: no handoff, and not by the provider."""
        return self.call.kind == "function"

    def shown(self) -> object:
        """Return the result that the history shows."""
        return NOT_EXECUTED if self.opened is None else self.opened.answer


@dataclass(slots=True)
class Turn:
    """One response of a model and the tool calls in it."""

    agent: Agent[Any]
    response: ModelResponse
    asked: list[Asked] = field(default_factory=list[Asked])
    is_withheld: bool = False
    """It is an answer that nobody has judged who had to: no part of it is shown."""

    def has(self, item: RunItem) -> bool:
        """Return whether an item of the SDK's is from this response."""
        return any(item.raw_item is one for one in self.response.output)


def asked_calls(agent: Agent[Any], items: Iterable[Any]) -> list[Asked]:
    """List the tool calls among the items of a response, in the order the model wrote them."""
    found: list[Asked] = []
    listed = [(item, parts_of(item)) for item in items]
    answered: set[Any] = set()
    if len(listed) > 1:
        # A shell may be the provider's own.
        answered = {held("call_id") for _, held in listed if _is_output(held("type"))} - {None}
    for item, held in listed:
        kind: ToolKind = "function"
        type_ = held("type")
        if type_ in LOCAL:
            name = LOCAL[type_] or held("name")
            call_id = held("call_id")
            if call_id in answered:
                kind = "hosted"
            if type_ == "function_call":
                if agent.handoffs and name in handoff_names(agent):
                    kind = "handoff"
                name = _seams.qualified_name(name, held("namespace"))
        elif type_ in _HOSTED:
            name = _HOSTED[type_] or held("name")
            call_id, kind = held("id"), "hosted"
        else:
            continue
        arguments = None
        for name_of_arguments in _ARGUMENTS:
            arguments = held(name_of_arguments)
            if arguments is not None:
                break
        call = ToolCall(name=str(name), arguments=arguments, id=call_id, kind=kind)
        found.append(Asked(item, call))
    return found


def _is_output(type_: object) -> bool:
    return str(type_).endswith("_output")


def handoff_names(agent: Agent[Any]) -> set[str]:
    """Return the names under which an agent's handoffs look like tools to the model."""
    return {
        one.tool_name if isinstance(one, Handoff) else Handoff.default_tool_name(one)
        for one in agent.handoffs
    }


def picture_of(text: str) -> str:
    """Return the screenshot that answers a computer call: the one it made, or the words of a text.

    A picture is the only result that a provider takes for such a call.
    """
    if " " not in text:
        return text
    return _OUTCOME_UNKNOWN if text == OUTCOME_UNKNOWN else _NOT_EXECUTED


def synthetic_message(
    agent: Agent[Any], text: str, metadata: dict[str, Any], responses: Sequence[ModelResponse]
) -> SyntheticMessage:
    """Make the last message of a run that was stopped."""
    message = ResponseOutputMessage(
        id=_seams.NO_ID,
        type="message",
        role="assistant",
        status="completed",
        content=[ResponseOutputText(text=text, type="output_text", annotations=[], logprobs=[])],
    )
    output = [item for response in responses for item in response.output]
    is_of_chat = any(part(item, "id") == _seams.NO_ID for item in output) or (
        not output and isinstance(agent.model, OpenAIChatCompletionsModel)
    )
    return SyntheticMessage(agent=agent, raw_item=message, metadata=metadata, is_of_chat=is_of_chat)


def closing_items(
    turns: Sequence[Turn],
    items: Sequence[RunItem],
    responses: Sequence[ModelResponse],
    earlier: Sequence[RunItem] = (),
    resumed: Sequence[Asked] = (),
) -> list[RunItem]:
    """List what is missing behind the items of a run for its history to be whole.

    Args:
        turns: What the model answered and what became of it.
        items: The items that the SDK kept.
        responses: The responses that the SDK kept.
        earlier: The first of these items, which are of an earlier leg of the run.
        resumed: What became of calls that the earlier leg had asked for.
    """
    calls = _count_calls(items)
    calls.subtract(_count_calls(earlier))
    results = _count_results(items)
    results.subtract(_count_results(earlier))
    known = {id(one.raw): one for one in resumed}
    by_id = {one.call.id: one for one in resumed}
    missing: list[RunItem] = []
    open_before = _count_results(earlier)
    for item in earlier:
        if not _is_call(item):
            continue
        call_id = _call_id(item)
        if open_before[call_id] > 0:
            open_before[call_id] -= 1
        elif results[call_id] > 0:
            results[call_id] -= 1
        else:
            # It waited for approval. Whatever was not heard of since never started.
            one = known.get(id(item.raw_item)) or by_id.get(call_id)
            shown = NOT_EXECUTED if one is None else one.shown()
            missing += result_items(item.agent, item.raw_item, shown)
    shown = {id(item.raw_item) for item in items}
    for turn in turns:
        kept = any(response is turn.response for response in responses)
        if kept and turn is not turns[-1]:
            # Whole, but for what a filter of the user's took away.
            there = [one.call.id for one in turn.asked if id(one.raw) in shown]
            calls.subtract(there)
            results.subtract(there)
        elif not turn.is_withheld:
            missing += _turn_items(turn, calls, results, kept=kept)
    return missing


def turn_items(turn: Turn) -> list[RunItem]:
    """List everything of a turn whose calls are about to start, with a result for each of them.

    Who reads it later finds a process that was killed: what might have started may have been done.
    """
    return _turn_items(turn, Counter(), Counter(), kept=False, may_run=True)


def _turn_items(
    turn: Turn,
    calls: Counter[Any],
    results: Counter[Any],
    *,
    kept: bool,
    may_run: bool = False,
) -> list[RunItem]:
    by_raw = {id(one.raw): one for one in turn.asked}
    asked: list[RunItem] = []
    answered: list[RunItem] = []
    for item in turn.response.output:
        one = by_raw.get(id(item))
        type_ = part(item, "type")
        if one is not None and one.call.kind != "hosted":
            if calls[one.call.id] > 0:
                calls[one.call.id] -= 1
            else:
                asked.append(_call_item(turn.agent, one))
            if results[one.call.id] > 0:
                results[one.call.id] -= 1
            else:
                waits = one.opened is not None and one.opened.state == "waiting"
                shown = OUTCOME_UNKNOWN if may_run and waits else one.shown()
                answered += _results(turn.agent, one, shown)
        elif kept:
            continue
        elif one is not None:
            asked.append(ToolCallItem(agent=turn.agent, raw_item=cast("Any", item)))
        elif type_ in _REPORTED:
            raw: Any = _plain(item) if type_ == "compaction" else item
            asked.append(_REPORTED[type_](agent=turn.agent, raw_item=raw))
        elif _is_output(type_):
            raw, output = item, part(item, "result" if type_ == "program_output" else "output")
            asked.append(ToolCallOutputItem(agent=turn.agent, raw_item=raw, output=output))
    return [*asked, *answered]


def _plain(item: Any) -> Any:
    dump = getattr(item, "model_dump", None)
    return item if dump is None else dump(exclude_unset=True)


def _call_item(agent: Agent[Any], one: Asked) -> RunItem:
    if one.call.kind == "handoff":
        return HandoffCallItem(agent=agent, raw_item=one.raw)
    return ToolCallItem(agent=agent, raw_item=one.raw)


def _results(agent: Agent[Any], one: Asked, shown: object) -> list[RunItem]:
    if one.target is not None:
        return [
            HandoffOutputItem(
                agent=agent,
                raw_item=_function_output(one.raw, shown),
                source_agent=agent,
                target_agent=one.target,
            )
        ]
    return result_items(agent, one.raw, shown)


def result_items(agent: Agent[Any], raw: Any, result: object) -> list[RunItem]:
    """Make the result of a tool call; none for a kind that this release does not know."""
    type_, call_id = part(raw, "type"), part(raw, "call_id")
    text = result if isinstance(result, str) else str(result)
    output: Any
    if type_ == "function_call":
        output = _function_output(raw, result)
    elif type_ == "custom_tool_call":
        output = {"type": "custom_tool_call_output", "call_id": call_id, "output": text}
    elif type_ == "computer_call":
        screen = {"type": "computer_screenshot", "image_url": f"{_PNG}{picture_of(text)}"}
        output = {"type": "computer_call_output", "call_id": call_id, "output": screen}
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


def _is_call(item: RunItem) -> bool:
    return item.type in ("tool_call_item", "handoff_call_item") and _call_id(item) is not None


def _count_calls(items: Sequence[RunItem]) -> Counter[Any]:
    return Counter(_call_id(item) for item in items if _is_call(item))


def _count_results(items: Sequence[RunItem]) -> Counter[Any]:
    return Counter(_call_id(item) for item in items if item.type.endswith("_output_item"))


def _call_id(item: RunItem) -> Any:
    return part(item.raw_item, "call_id")


def history_of(given: Any, items: Sequence[RunItem]) -> list[Any]:
    """Return the history of a run: what it was given, and its items."""
    return [
        *ItemHelpers.input_to_new_input_list(given),
        *(item.to_input_item() for item in items),
    ]


def transfer_text(agent: Agent[Any]) -> str:
    """Return what the SDK answers to the call of a handoff."""
    return json.dumps({"assistant": agent.name})
