"""A last answer of a stopped graph, from the model that its last request went to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from budgetguard_core import Trip
from budgetguard_core.kit import (
    ANSWER_NOW,
    Answer,
    LastAnswer,
    ModelCall,
    OpenModelCall,
    Prompt,
    last_answer,
    reported_cost,
    token_usage,
)
from budgetguard_langgraph._bounds import bind, can_be_bound
from budgetguard_langgraph._run import GraphRun


@dataclass(frozen=True, slots=True)
class LastCall:
    """The last answer that a stopped graph may have, and what its model is asked."""

    last: LastAnswer
    call: ModelCall
    model: Any
    sent: list[BaseMessage]

    def ask(self) -> str | None:
        """Ask, where no event loop runs."""
        return self.last.ask(
            self.call,
            lambda opened: _answer(self.model.invoke(self.sent, _ALONE, **self._given(opened))),
        )

    async def ask_async(self) -> str | None:
        """Ask on an event loop."""

        async def say(opened: OpenModelCall) -> Answer:
            return _answer(await self.model.ainvoke(self.sent, _ALONE, **self._given(opened)))

        return await self.last.ask_async(self.call, say)

    def _given(self, opened: OpenModelCall) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if can_be_bound(self.model):
            bind(self.model, settings, opened.max_output_tokens, opened)
        return settings


# None of the callbacks that the graph was called with: their run is over.
_ALONE: Any = {"callbacks": []}


def last_call(
    graph_run: GraphRun,
    trip: Trip,
    messages: Sequence[BaseMessage],
    *,
    model: Any = None,
    system: Sequence[BaseMessage] = (),
) -> LastCall | None:
    """Return the last answer that a stopped graph may have; None where it has none.

    Args:
        graph_run: The run.
        trip: Why it was stopped.
        messages: The conversation, closed but for its last message.
        model: The model; the one that the last request went to if left out.
        system: What that was told besides.
    """
    last = last_answer(graph_run.run, trip)
    asked, said = graph_run.asked_model
    model = asked if model is None else model
    if last is None or model is None:
        return None
    sent = _in_words([*(system or said), *messages])
    name = getattr(model, "model_name", None) or getattr(model, "model", None)
    call = ModelCall(
        model=graph_run.model_name or (name if isinstance(name, str) else None),
        input_tokens=Prompt().project(sent),
    )
    return LastCall(last, call, model, sent)


def _in_words(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Write a conversation without tools, and ask for an answer at its end.

    Anthropic and Bedrock take no calls and results in a request that defines no tools, so they are
    told in words.
    """
    system: dict[str, BaseMessage] = {}
    found: list[BaseMessage] = []
    for message in messages:
        if isinstance(message, SystemMessage):
            system[str(message.content)] = message
        elif isinstance(message, AIMessage):
            calls = [
                f"I called {call['name']} with {json.dumps(call['args'], default=str)}."
                for call in message.tool_calls
            ]
            said = "\n".join(one for one in (_text(message), *calls) if one)
            if said:
                found.append(AIMessage(said))
        elif isinstance(message, ToolMessage):
            _tell(found, f"{message.name or 'The tool'} returned: {_text(message)}")
        elif isinstance(message, HumanMessage):
            _tell(found, message.content)
        else:
            found.append(message)
    _tell(found, ANSWER_NOW)
    return [*system.values(), *found]


def _tell(found: list[BaseMessage], content: Any) -> None:
    """Add what the model is told; nobody speaks twice in a row."""
    last = found[-1] if found else None
    if not isinstance(last, HumanMessage):
        found.append(HumanMessage(content))
    elif isinstance(last.content, str) and isinstance(content, str):
        found[-1] = HumanMessage(f"{last.content}\n\n{content}")
    else:
        found[-1] = HumanMessage([*_parts(last.content), *_parts(content)])


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _answer(reply: Any) -> Answer:
    if isinstance(reply, str):
        # A text model says no more.
        return Answer(text=reply)
    return Answer(text=_text(reply), usage=token_usage(reply), cost_usd=reported_cost(reply))


def _text(message: BaseMessage) -> str:
    text: Any = cast("Any", message).text
    # A method in langchain-core before 1.0, and a text that can be called since.
    return str(text if isinstance(text, str) else text())
