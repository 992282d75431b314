"""The tool calls that models have asked for, until their nodes run them."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Final

from langchain_core.messages import AIMessage, ToolMessage

from budgetguard_core.kit import Admit, Batch, OpenToolCall, Run, ToolCall, ToolCalls
from budgetguard_langgraph._seams import enclosing_tool_node

_KINDS: Final = {
    "Error: Failed to parse structured output": "invalid structured answer",
    "Error: Model incorrectly returned multiple structured": "invalid structured answer",
    "is not a valid tool": "unknown tool",
}
"""What LangChain answers a call with that has no body, by a part of the text."""
_KEPT: Final = 64
"""Graphs inside a run whose last prompt and last batch are known at the same time."""


@dataclass(slots=True)
class _Asked:
    """The tool calls of one answer of a model."""

    calls: list[ToolCall]
    batch: Batch | None = None


class AskedCalls:
    """The tool calls that were asked for in one run, by the graph that runs them.

    Args:
        run: The run.
        lock: The lock of the run.
        answered: A person has answered the run.

    Attributes:
        results: What calls returned since the last answer, by id: a node may lose them with their
            siblings.
    """

    def __init__(self, run: Run, lock: threading.RLock, *, answered: bool) -> None:
        self._run = run
        self._lock = lock
        self.results: dict[str, list[ToolMessage]] = {}
        self._asked: OrderedDict[str, list[_Asked]] = OrderedDict()
        self._is_answered = answered
        # A call of a process that died while it waited is made once more.
        self._waiting: deque[Admit] = deque(run.guard.open_tool_calls() if answered else ())

    def put(self, namespace: str, calls: list[ToolCall]) -> None:
        """Keep the tool calls of an answer until their node runs them."""
        with self._lock:
            # The graph has gone on, so what it asked for before is answered.
            waiting: list[_Asked] = []
            for asked in self._asked.pop(namespace, ()):
                if asked.batch is None:
                    waiting.append(asked)
                else:
                    self._give_up(asked.batch)
            if not waiting:
                self.results.clear()
            self._asked[namespace] = [*waiting[-_KEPT:], _Asked(calls)]
            shorten(self._asked)

    def answered(
        self, namespace: str, prompt: Sequence[Any], handoffs: Container[str] = ()
    ) -> None:
        """Report the calls that have a result in the next prompt and that no tool has run.

        That is the framework's structured output, a name that it does not know, a node that
        answers by itself: nothing of it is counted, and all is looked at for repetition.

        Args:
            namespace: Where the graph is.
            prompt: What its model is about to be sent.
            handoffs: The tools that hand over; they are reported as such.
        """
        with self._lock:
            listed = self._asked.get(namespace)
            if listed is None and self._is_answered:
                self._answered_by_a_person(namespace, prompt, handoffs)
            if not listed or (listed[0].batch is not None and len(listed) == 1):
                return  # nearly always
            _, results = _last_results(prompt)
            for asked in list(listed):
                if asked.batch is not None or any(one.id not in results for one in asked.calls):
                    continue
                listed.remove(asked)
                for one in asked.calls:
                    if one.name not in handoffs:
                        self._report(one, results[one.id])

    def _answered_by_a_person(
        self, namespace: str, prompt: Sequence[Any], handoffs: Container[str]
    ) -> None:
        """Report the calls of the answer before the pause that no tool has run: rejected ones."""
        self._asked[namespace] = []
        message, results = _last_results(prompt)
        ran = {(one.id, one.name) for one in self._run.guard.tool_calls} if results else ()
        for call in () if message is None else message.tool_calls:
            result, name = results.get(call["id"]), call["name"]
            if result is not None and (call["id"], name) not in ran and name not in handoffs:
                asked = ToolCall(name=name, arguments=call["args"], id=call["id"])
                self._report(asked, result, "rejected")

    def _report(self, call: ToolCall, result: ToolMessage, kind: str | None = None) -> None:
        text = str(result.content)
        known = next((kind for part, kind in _KINDS.items() if part in text), None)
        if known is not None or result.status == "error":
            self.without_body(call, text, known or kind)
            return
        told = ToolCall(name=call.name, arguments=call.arguments, id=call.id, kind="output")
        opened = self._run.tool_call(told)
        self._run.start(opened)
        self._run.finished(opened, result.content)

    def without_body(self, call: ToolCall, result: str, kind: str | None) -> None:
        """Report a call that got an error in place of its body."""
        ToolCalls(self._run).answered_without_body(call, result, kind=kind)

    def of_the_same_answer(
        self, namespace: str, id_: str | None
    ) -> Sequence[ToolCall | OpenToolCall]:
        """Return a call that is asked for already, or the calls of its answer before it."""
        with self._lock:
            for asked in self._asked.get(namespace, ()):
                ids = [one.id for one in asked.calls]
                if id_ in ids and asked.batch is not None:
                    return [one for one in asked.batch if one.call.id == id_ and not one.taken][:1]
                if id_ in ids:
                    return [*asked.calls[: ids.index(id_)]]
        return []

    def admitted(self, namespace: str, calls: list[ToolCall]) -> list[OpenToolCall]:
        """Ask for the calls of an answer that a person has let go, in the model's order."""
        with self._lock:
            batch, ids = self._run.batch(calls), {one.id for one in calls}
            before = [
                one
                for one in self._asked.get(namespace, ())
                if one.batch is not None or ids.isdisjoint(call.id for call in one.calls)
            ]
            self._asked[namespace] = [*before, _Asked(calls, batch)]
            return list(batch)

    def _give_up(self, batch: Batch) -> None:
        """Take back what was admitted and never started."""
        for call in batch.unstarted:
            self._run.withdrawn(call)

    def take(self, namespace: str, id_: str | None, name: str) -> OpenToolCall | None:
        """Return the answer to a tool call that is about to start; None where no model asked.

        The calls of one answer are admitted together, when the first of them starts.

        Args:
            namespace: Where the graph is.
            id_: The call's id.
            name: The tool's name.
        """
        with self._lock:
            waiting = self._resumed(id_, name) if self._waiting else None
            if waiting is not None:
                return waiting
            for asked in self._asked.get(namespace, ()):
                for call in asked.calls:
                    if call.id != id_ or call.name != name:
                        continue
                    if asked.batch is None:
                        asked.batch = self._run.batch(_known(asked.calls))
                    found = asked.batch.take(id_, name)
                    if found is not None:
                        return found
                    break
        return None

    def _resumed(self, id_: str | None, name: str) -> OpenToolCall | None:
        """Find the call that waited for a person: its body runs again, and is the same call."""
        for ticket in self._waiting:
            if ticket.call.id == id_ and ticket.call.name == name:
                self._waiting.remove(ticket)
                return OpenToolCall(ticket.call, (ticket,))
        return None

    def are_due(self) -> bool:
        """Return whether calls of a batch are due: those that are refused get a result too."""
        with self._lock:
            if self._waiting:
                return True
            batches = [one.batch for many in self._asked.values() for one in many]
            return any(
                one is not None and any(not call.taken or call.state == "waiting" for call in one)
                for one in batches
            )

    def leave(self) -> None:
        """Take back what was admitted and never started."""
        for asked in [one for many in self._asked.values() for one in many]:
            if asked.batch is not None:
                self._give_up(asked.batch)
        self._asked.clear()


def _known(calls: list[ToolCall]) -> list[ToolCall]:
    """Leave out the names that the node does not know: they start nothing. One that starts is."""
    tools = getattr(enclosing_tool_node(), "tools_by_name", None) if calls[1:] else None
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


def shorten(store: OrderedDict[Any, Any]) -> None:
    """Forget what came first, of more than a run has at the same time."""
    while len(store) > _KEPT:
        store.popitem(last=False)
