"""A last answer of a stopped graph, from the model that its last request went to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from langchain_core.messages import BaseMessage

from budgetguard_core import Trip
from budgetguard_core.kit import (
    Answer,
    Flow,
    ModelCall,
    OpenModelCall,
    Prompt,
    Step,
    close_history,
    in_words,
    last_answer,
    reported_cost,
    token_usage,
)
from budgetguard_langgraph._bounds import bind, words_of
from budgetguard_langgraph._messages import DIALECT, text_of
from budgetguard_langgraph._run import GraphRun

# None of the callbacks that the graph was called with: their run is over.
_ALONE: Final[Any] = {"callbacks": []}


def answer_of_the_last_model(
    graph_run: GraphRun,
    trip: Trip,
    messages: Sequence[BaseMessage],
    *,
    model: Any = None,
    system: Sequence[BaseMessage] = (),
) -> Flow[str | None]:
    """Ask for the last answer that a stopped run may have; None where it has none.

    Args:
        graph_run: The run.
        trip: Why it was stopped.
        messages: The conversation.
        model: The model; the one that the last request went to if left out.
        system: What that was told besides.
    """
    last = last_answer(graph_run.run, trip)
    requested, told = graph_run.asked_model
    asked: Any = requested if model is None else model
    if last is None or asked is None:
        return None
    whole, _ = close_history(messages, DIALECT, graph_run.answers(messages))
    sent = in_words([*(system or told), *whole], DIALECT)
    name = getattr(asked, "model_name", None) or getattr(asked, "model", None)
    call = ModelCall(
        model=graph_run.model_name or (name if isinstance(name, str) else None),
        input_tokens=Prompt().project(sent),
    )

    def given(opened: OpenModelCall) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if words_of(asked) is not None:
            bind(asked, settings, opened.max_output_tokens, opened)
        return settings

    def ask(opened: OpenModelCall) -> Answer:
        return _answer(asked.invoke(sent, _ALONE, **given(opened)))

    async def ask_async(opened: OpenModelCall) -> Answer:
        return _answer(await asked.ainvoke(sent, _ALONE, **given(opened)))

    answer: str | None = yield Step(
        lambda: last.ask(call, ask), lambda: last.ask_async(call, ask_async)
    )
    return answer


def _answer(reply: Any) -> Answer:
    if isinstance(reply, str):
        # A text model says no more.
        return Answer(text=reply)
    return Answer(text=text_of(reply), usage=token_usage(reply), cost_usd=reported_cost(reply))
