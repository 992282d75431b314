"""Tool calls in a response, a history in which each has a result, and what a session lacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import agents
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from budgetguard_core import kit
from budgetguard_core.kit import Turn as Reply
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
    "compaction": agents.CompactionItem,
    "mcp_list_tools": agents.MCPListToolsItem,
    "message": agents.MessageOutputItem,
    "program": agents.ToolCallItem,
    "reasoning": agents.ReasoningItem,
    "tool_search_call": agents.ToolSearchCallItem,
    "tool_search_output": agents.ToolSearchOutputItem,
}
_ARGUMENTS = ("arguments", "input", "action", "operation")
# The words "Not executed." and "Outcome unknown.", black on white.
_PICTURES = {
    kit.NOT_EXECUTED: (
        "iVBORw0KGgoAAAANSUhEUgAAAFYAAAAQAQAAAACkLLUrAAAAZ0lEQVR42mP8zwADf5kYEAAPewEDAwPDCwYFBqbPDlDR"
        "BgaGj8nsP470KTn2yf9h+Og5/1OiyqR0lfl/mBgZGP4JPUhgeMDAwMLA8IU57+SCvxYMDEyMUias6V7LznplMTCS7gY4"
        "iVBORw0KGgoAAAANSUhEUgAAAGgAAAAQAQAAAADSFgegAAAAb0lEQVR42mP8z4AEmBhI4C1gYGBg+O/AwMDAwPQTIsoI"
    ),
    kit.OUTCOME_UNKNOWN: (
        "IT+J/zXy5gk25BOP2b2BhcEh+Nv6Z8lmhwsP3mBgYmBgSBB5wMAgwPCGgYGJgeHLAgYLBoYPDAoMDAw/HhyzuNr+w1Nl"
        "xmu1ekbyXYYEAOgQHWOk+U/zAAAAAElFTkSuQmCC"
    ),
}


@dataclass
class SyntheticMessage(agents.MessageOutputItem):
    """The last message of a run that was stopped. The model did not write it."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """`synthetic`, `stop_reason` and `run_id`. They stay here: no provider accepts them."""

    def to_input_item(self) -> agents.TResponseInputItem:
        """Return the message in the short form, without an id: no provider has given it one."""
        return {"role": "assistant", "content": agents.ItemHelpers.text_message_output(self)}


@dataclass(slots=True, eq=False)
class RequestedCall:
    """A tool call that the model asked for. It is told apart by the object in its response."""

    raw: Any
    call: kit.ToolCall
    """The call as the budget knows it."""
    open_call: kit.OpenToolCall = field(init=False)
    """Its record, whose tickets the budget gives once it is asked."""
    error: BaseException | None = None
    """The exception that the tool raised, whatever the SDK made of that."""
    partial: str | None = None
    """The partial result of a run inside the tool that was stopped."""
    is_begun: bool = False
    """The SDK has come to it."""

    def __post_init__(self) -> None:
        self.open_call = kit.OpenToolCall(self.call)

    @property
    def type(self) -> str:
        """The kind of item."""
        return str(kit.part(self.raw, "type"))

    @property
    def is_waiting(self) -> bool:
        """True if it was admitted and did not start."""
        return self.open_call.state == "waiting"

    @property
    def is_local(self) -> bool:
        """True if a tool on this side is called: no handoff, and not by the provider."""
        return self.call.kind == "function"


@dataclass(slots=True)
class Turn:
    """One response of a model and the tool calls in it."""

    agent: agents.Agent[Any]
    response: agents.ModelResponse
    requested: list[RequestedCall] = field(default_factory=list[RequestedCall])


class Items(kit.Responses):
    """The dialect of a run's history: input items, each a message by itself."""

    def read(self, message: Any) -> Reply:
        """Read an item."""
        turn = super().read([message])
        return replace(turn, parts=(message,)) if turn.is_empty else turn

    def plain(self, messages: Sequence[Any]) -> list[Any]:
        """Return them: they are plain data."""
        return list(messages)


ITEMS = Items()


def requested_calls(agent: agents.Agent[Any], items: Iterable[Any]) -> list[RequestedCall]:
    """List the tool calls among the items of a response, in the order the model wrote them."""
    found: list[RequestedCall] = []
    handoffs = {
        one.tool_name if isinstance(one, agents.Handoff) else agents.Handoff.default_tool_name(one)
        for one in agent.handoffs
    }
    listed = [(item, kit.parts_of(item)) for item in items]
    answered: set[Any] = set()
    if len(listed) > 1:
        # A shell may be the provider's own.
        outputs = [held for _, held in listed if str(held("type")).endswith("_output")]
        answered = {held("call_id") for held in outputs} - {None}
    for item, held in listed:
        kind: kit.ToolKind = "function"
        type_ = held("type")
        if type_ in LOCAL:
            name = LOCAL[type_] or held("name")
            call_id = held("call_id")
            if call_id in answered:
                kind = "hosted"
            if type_ == "function_call":
                if name in handoffs:
                    kind = "handoff"
                # As the SDK names it: with its namespace, unless that repeats the name.
                space = held("namespace")
                name = f"{space}.{name}" if space and space != name else name
        elif type_ in _HOSTED:
            name = _HOSTED[type_] or held("name")
            call_id, kind = held("id"), "hosted"
        else:
            continue
        given = (held(name_of_arguments) for name_of_arguments in _ARGUMENTS)
        arguments = next((one for one in given if one is not None), None)
        call = kit.ToolCall(name=str(name), arguments=arguments, id=call_id, kind=kind)
        found.append(RequestedCall(item, call))
    return found


def picture_of(text: str) -> str:
    """Return the screenshot that answers a computer call: the one it made, or the words of a text.

    A picture is the only result that a provider takes for such a call.
    """
    return _PICTURES.get(text, _PICTURES[kit.NOT_EXECUTED]) if " " in text else text


def synthetic_message(
    agent: agents.Agent[Any], text: str, metadata: dict[str, Any]
) -> SyntheticMessage:
    """Make the last message of a run that was stopped."""
    message = ResponseOutputMessage(
        id=_seams.NO_ID,
        type="message",
        role="assistant",
        status="completed",
        content=[ResponseOutputText(text=text, type="output_text", annotations=[], logprobs=[])],
    )
    return SyntheticMessage(agent=agent, raw_item=message, metadata=metadata)


def closing_items(
    turns: Sequence[Turn],
    items: Sequence[agents.RunItem],
    responses: Sequence[agents.ModelResponse],
    resumed: Sequence[RequestedCall] = (),
) -> list[agents.RunItem]:
    """List what is missing behind the items that the SDK kept, for the history to be whole.

    `resumed` are the calls that an earlier attempt of the run had asked for.
    """
    whole = list(items)
    of_turns = [one for turn in turns for one in turn.requested]
    requested = {id(one.raw): one for one in [*of_turns, *resumed]}
    by_id = {one.call.id: one for one in resumed}

    def close() -> None:
        for item in _open(whole):
            # Of an earlier attempt, whatever was not heard of since never started.
            one = requested.get(id(item.raw_item)) or by_id.get(_call_id(item))
            whole.extend(_results(item.agent, item.raw_item, one))

    for turn in turns:
        kept = any(response is turn.response for response in responses)
        # One that was kept is whole, but for what a filter of the user's took away.
        if not kept or turn is turns[-1]:
            close()
            whole += _made(turn, items, kept=kept)
    close()
    return whole[len(items) :]


def turn_items(turn: Turn) -> list[agents.RunItem]:
    """List everything of a turn whose calls are about to start, with a result for each of them.

    Who reads it later finds a process that was killed: what might have started may have been done.
    """
    made = _made(turn, (), kept=False)
    for one in turn.requested:
        if one.call.kind != "hosted":
            shown = kit.OUTCOME_UNKNOWN if one.is_waiting else one.open_call.answer
            made += _results(turn.agent, one.raw, one, shown)
    return made


def _made(turn: Turn, items: Sequence[agents.RunItem], *, kept: bool) -> list[agents.RunItem]:
    """Make the items of a turn that the SDK has not; of one that it kept, the calls alone."""
    by_raw = {id(one.raw): one for one in turn.requested}
    shown = {id(item.raw_item) for item in items}
    made: list[agents.RunItem] = []
    for raw in turn.response.output:
        one, type_ = by_raw.get(id(raw)), kit.part(raw, "type")
        is_hosted = one is None or one.call.kind == "hosted"
        if id(raw) in shown or (kept and is_hosted):
            continue
        item: Any = raw.model_dump(exclude_unset=True) if type_ == "compaction" else raw
        if one is not None:
            is_handoff = one.call.kind == "handoff"
            made.append(_seams.call_item(turn.agent, item, is_handoff=is_handoff))
        elif type_ in _REPORTED:
            made.append(_REPORTED[type_](agent=turn.agent, raw_item=item))
        elif str(type_).endswith("_output"):
            output = kit.part(raw, "result" if type_ == "program_output" else "output")
            made.append(agents.ToolCallOutputItem(agent=turn.agent, raw_item=item, output=output))
    return made


def _open(items: Iterable[agents.RunItem]) -> list[agents.RunItem]:
    """List the calls without a result; where ids repeat, it is that of the first."""
    open_call: list[agents.RunItem] = []
    for item in items:
        call_id = _call_id(item)
        if item.type in ("tool_call_item", "handoff_call_item") and call_id is not None:
            open_call.append(item)
        elif item.type.endswith("_output_item"):
            of = next((n for n, one in enumerate(open_call) if _call_id(one) == call_id), None)
            if of is not None:
                del open_call[of]
    return open_call


def _results(
    agent: agents.Agent[Any], raw: Any, one: RequestedCall | None, shown: object = None
) -> list[agents.RunItem]:
    """Make the result of a tool call; none for a kind that this release does not know."""
    result = shown or (kit.NOT_EXECUTED if one is None else one.open_call.answer)
    type_, text = kit.part(raw, "type"), str(result)
    output: Any = {"type": f"{type_}_output", "call_id": kit.part(raw, "call_id"), "output": text}
    if type_ not in LOCAL:
        return []
    if type_ == "function_call":
        if isinstance(raw, ResponseFunctionToolCall):
            output = agents.ItemHelpers.tool_call_output_item(raw, result)
    elif type_ == "computer_call":
        image = f"data:image/png;base64,{picture_of(text)}"
        output["output"] = {"type": "computer_screenshot", "image_url": image}
    elif type_ == "apply_patch_call":
        output["status"] = "failed"
    elif type_ == "shell_call":
        outcome = {"type": "exit", "exit_code": 1}
        output["output"] = [{"stdout": "", "stderr": text, "outcome": outcome}]
    return [agents.ToolCallOutputItem(agent=agent, raw_item=output, output=result)]


def _call_id(item: agents.RunItem) -> Any:
    return kit.part(item.raw_item, "call_id")


def history_of(given: Any, items: Sequence[agents.RunItem]) -> list[Any]:
    """Return the history of a run: what it was given, and its items."""
    own = agents.ItemHelpers.input_to_new_input_list(given)
    return [*own, *(item.to_input_item() for item in items)]
