"""How a run that LangChain's hooks have told of ends: completed, terminated, paused or failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from langchain_core.messages import BaseMessage, messages_to_dict

from budgetguard_core import (
    Outcome,
    Trip,
    synthetic_metadata,
    synthetic_text,
)
from budgetguard_langgraph._history import closed, final_text, placed, results_for
from budgetguard_langgraph._run import GraphRun

RESUME: Final = "resume(graph, config, budget), with a checkpointer"


def closing_of(
    graph_run: GraphRun, trip: Trip, messages: Sequence[BaseMessage], answer: str | None = None
) -> list[BaseMessage]:
    """Return the conversation of a stopped run, closed; with the model's last answer, if any."""
    guard = graph_run.run.guard
    results = results_for(messages, graph_run.started(), graph_run.asked.results)
    metadata = synthetic_metadata(guard, trip, finalized=answer is not None)
    return closed(messages, results, answer or synthetic_text(guard), metadata)


def conclude(
    graph_run: GraphRun, messages: Sequence[BaseMessage], trip: Trip | None = None
) -> Outcome:
    """End a run that came to its end or was stopped; its history is closed already."""
    run = graph_run.run
    outcome = run.end(
        messages,
        final_text(messages),
        trip=trip,
        saved_messages=_saved(graph_run, messages),
        next_step=graph_run.next_step,
        resume=RESUME,
    )
    graph_run.settle_interrupted()
    return outcome


def fail(graph_run: GraphRun, error: BaseException, messages: Sequence[BaseMessage]) -> Outcome:
    """End a run that an exception or a cancellation left; open calls get their results."""
    whole = placed(messages, results_for(messages, graph_run.started(), graph_run.asked.results))
    outcome = graph_run.run.fail(
        error, whole, saved_messages=_saved(graph_run, whole), resume=RESUME
    )
    graph_run.settle_interrupted()
    return outcome


def pause(graph_run: GraphRun, messages: Sequence[BaseMessage]) -> Outcome:
    """Say that a run waits for a person."""
    return graph_run.run.pause(
        messages,
        saved_messages=_saved(graph_run, messages),
        resume="Command(resume=answer), on the same thread",
    )


def _saved(graph_run: GraphRun, messages: Sequence[BaseMessage]) -> list[dict[str, Any]] | None:
    return None if graph_run.run.envelope.store is None else messages_to_dict(list(messages))
