"""One graph inside a run: its prompts, and the tool calls that its models have asked for."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Final

from langchain_core.messages import AIMessage, ToolMessage

from budgetguard_core.kit import OpenToolCall, Prompt, Run, ToolCall, ToolCalls
from budgetguard_langgraph._models import tool_call

_KINDS: Final = {
    "Error: Failed to parse structured output": "invalid structured answer",
    "Error: Model incorrectly returned multiple structured": "invalid structured answer",
    "is not a valid tool": "unknown tool",
}
"""LangChain's answers to a call without a body, by a part of their text."""
_KEPT: Final = 64


class Branch:
    """The prompts and tool calls of one graph in a run.

    The calls of one answer are admitted together, when the first of them starts: LangChain answers
    some of them without a body. Used under the lock of the run.
    """

    def __init__(self, run: Run, paused: ToolCalls, *, is_answered: bool) -> None:
        self.prompt = Prompt()
        self.calls = ToolCalls(run, paused)
        self._run = run
        self._requested: list[list[ToolCall]] = []
        self._is_answered = is_answered

    def put(self, calls: list[ToolCall]) -> None:
        """Take the tool calls of an answer."""
        self.calls.next_reply()
        self._requested = [*self._requested[-_KEPT:], calls]

    def admitted(self, calls: list[ToolCall]) -> list[OpenToolCall]:
        """Ask for the calls of an answer that a person has let go, in the model's order."""
        ids = {one.id for one in calls}
        self._requested = [
            one for one in self._requested if ids.isdisjoint(call.id for call in one)
        ]
        return self.calls.offer(calls)

    def offer(self, id_: str | None, name: str, node: Any) -> bool:
        """Ask for the answer that has a call; return whether that was asked for by now."""
        for calls in self._requested:
            if any((one.id, one.name) == (id_, name) for one in calls):
                self._requested.remove(calls)
                self.calls.offer(_known(calls, node))
                break
        return any(
            not one.taken and (one.call.id, one.call.name) == (id_, name) for one in self.calls
        )

    def look_at(self, prompt: Sequence[Any], handoffs: Container[str]) -> None:
        """Report the calls that have a result in the next prompt and that no tool has run.

        That is the framework's structured output, a name that it does not know, a node that
        answers by itself, a person's rejection: nothing of it is counted, and all is looked at for
        repetition.
        """
        was_answered, self._is_answered = self._is_answered, False
        if not self._requested and not was_answered:
            return  # nearly always
        message, results = _last_results(prompt)
        for calls in [one for one in self._requested if all(call.id in results for call in one)]:
            self._requested.remove(calls)
            for call in calls:
                if call.name not in handoffs:
                    self._report(call, results[call.id])
        if was_answered and message is not None and results:
            ran = {(one.id, one.name) for one in self._run.guard.tool_calls}
            for one in message.tool_calls:
                call = tool_call(one)
                is_rejected = call.id in results and (call.id, call.name) not in ran
                if is_rejected and call.name not in handoffs:
                    self._report(call, results[call.id], "rejected")

    def _report(self, call: ToolCall, result: ToolMessage, kind: str | None = None) -> None:
        text = str(result.content)
        known = next((kind for part, kind in _KINDS.items() if part in text), None)
        if known is not None or result.status == "error":
            self.without_body(call, text, known or kind)
            return
        call_made = ToolCall(name=call.name, arguments=call.arguments, id=call.id, kind="output")
        record = self._run.tool_call(call_made)
        self._run.start(record)
        self._run.finished(record, result.content)

    def without_body(self, call: ToolCall, result: str, kind: str | None) -> None:
        """Report a call that got an error in place of its body."""
        ToolCalls(self._run).answered_without_body(call, result, kind=kind)


def are_due(calls: ToolCalls) -> bool:
    """Return whether calls of a batch are due: those that are refused get a result too."""
    return any(not one.taken or one.state == "waiting" for one in calls)


def _known(calls: list[ToolCall], node: Any) -> list[ToolCall]:
    """Leave out the names that a node does not know: they start nothing. One that starts is."""
    tools = getattr(node, "tools_by_name", None) if calls[1:] else None
    return calls if tools is None else [one for one in calls if one.name in tools]


def _last_results(prompt: Sequence[Any]) -> tuple[AIMessage | None, dict[Any, ToolMessage]]:
    """Return the last answer in a prompt, and the results after it by id."""
    results: dict[Any, ToolMessage] = {}
    for message in reversed(prompt):
        if isinstance(message, ToolMessage):
            results[message.tool_call_id] = message
        elif isinstance(message, AIMessage):
            return message, results
    return None, results
