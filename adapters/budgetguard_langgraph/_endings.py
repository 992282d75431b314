"""How a run that LangChain's hooks have told of ends: completed, terminated, paused or failed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage

from budgetguard_core import BudgetExceeded, Outcome, Trip
from budgetguard_core.kit import (
    Flow,
    close_history,
    final_text,
    synthetic_metadata,
    synthetic_text,
)
from budgetguard_core.kit import remember as kept_with
from budgetguard_langgraph._messages import DIALECT, ended, messages_of
from budgetguard_langgraph._outcomes import remember
from budgetguard_langgraph._run import GraphRun
from budgetguard_langgraph._seams import is_drained
from budgetguard_langgraph.interrupts import BudgetInterrupt, BudgetStop

RESUME: Final = "resume(graph, config, budget), with a checkpointer"


_LIMITS: Final = re.compile(
    "Model call limits exceeded: |('.*' tool|Tool) call limit reached: "
    "|Sorry, need more steps to process this request[.]$"
)
"""The words with which LangChain's own limits end an agent, in a message that no model wrote."""


def limit_of(graph_run: GraphRun, messages: Sequence[BaseMessage]) -> Trip | None:
    """Return the stop of a graph that ended by a limit of the framework's, without an exception."""
    last = messages[-1] if messages else None
    if not isinstance(last, AIMessage) or last.usage_metadata or last.response_metadata:
        return None
    text = last.content
    if not isinstance(text, str) or _LIMITS.match(text) is None:
        return None
    return graph_run.run.framework_limit(text[:200]) if graph_run.run.is_enforced else None


def closing_of(
    graph_run: GraphRun, trip: Trip, messages: Sequence[BaseMessage], answer: str | None = None
) -> tuple[list[BaseMessage], list[BaseMessage]]:
    """Close the conversation of a stopped run; with the model's last answer, if any.

    Returns:
        The whole, and what is new in it.
    """
    guard = graph_run.run.guard
    marks = synthetic_metadata(guard, trip, finalized=answer is not None)
    return ended(messages, graph_run.answers(messages), answer or synthetic_text(guard), marks)


def conclude(
    graph_run: GraphRun, messages: Sequence[BaseMessage], trip: Trip | None = None
) -> Outcome:
    """End a run that came to its end or was stopped; its history is closed already."""
    run = graph_run.run
    outcome = run.end(
        messages,
        final_text(messages, DIALECT),
        trip=trip,
        saved_messages=_saved(graph_run, messages),
        next_step=graph_run.next_step,
        resume=RESUME,
    )
    graph_run.settle_interrupted()
    return outcome


def fail(graph_run: GraphRun, messages: Sequence[BaseMessage], error: BaseException) -> Outcome:
    """End a run that an exception or a cancellation left; open calls get their results."""
    whole, _ = close_history(messages, DIALECT, graph_run.answers(messages))
    outcome = graph_run.run.fail(
        error, whole, saved_messages=_saved(graph_run, whole), resume=RESUME
    )
    graph_run.settle_interrupted()
    return outcome


def pause(
    graph_run: GraphRun, messages: Sequence[BaseMessage], drained: BaseException | None = None
) -> Outcome:
    """Pause a run, which waits for a person, or to go on where it was drained."""
    outcome = graph_run.run.pause(
        messages,
        saved_messages=_saved(graph_run, messages),
        resume="Command(resume=answer), on the same thread",
    )
    if drained is not None:
        kept_with(drained, outcome)
    return outcome


def stop(graph_run: GraphRun, trip: Trip, prompt: Sequence[Any]) -> BudgetInterrupt | BudgetStop:
    """Return what ends the code in which a run was stopped.

    Args:
        graph_run: The run.
        trip: Why it was stopped.
        prompt: What its model was about to be sent, if anything.
    """
    messages = [message for message in prompt if isinstance(message, BaseMessage)]
    if messages:
        graph_run.sent, graph_run.said = messages, None
    graph_run.tell(trip)
    outcome = None
    if graph_run.root is None and graph_run.outer is None:
        outcome = conclude(graph_run, closing_of(graph_run, trip, messages)[0], trip)
    kind = BudgetStop if graph_run.run.envelope.on_trip == "raise" else BudgetInterrupt
    return kind(trip, outcome)


def end(
    graph_run: GraphRun, outputs: Any, error: BaseException | None, messages_key: str
) -> Flow[BudgetExceeded | None]:
    """End a run whose graph or chain is over; return what its caller gets instead of a result."""
    messages = messages_of(outputs, messages_key) or graph_run.conversation
    if graph_run.waits and (error is None or is_drained(error)):
        outcome = pause(graph_run, messages, error)
        if graph_run.thread is not None:
            yield from graph_run.thread.keep(graph_run.run.guard, graph_run.slot)
        remember(outputs, messages_key, outcome)
        return None
    if error is not None and not isinstance(error, BudgetExceeded):
        fail(graph_run, messages, error)
        return None
    trip = graph_run.run.stopped_by or graph_run.stopped_inside
    if trip is not None:
        messages, _ = closing_of(graph_run, trip, messages)
    elif error is None:
        trip = limit_of(graph_run, messages)
    outcome = conclude(graph_run, messages, trip)
    if graph_run.thread is not None:
        yield from graph_run.thread.forget(outcome)
    if isinstance(error, BudgetExceeded):
        error.outcome = outcome if trip is not None else error.outcome or outcome
        return None
    remember(outputs, messages_key, outcome)
    if trip is not None and graph_run.run.is_to_raise:
        return BudgetStop(trip, outcome)
    if trip is not None and graph_run.goes_through(trip):
        # So that nobody takes the partial result for an answer.
        return BudgetInterrupt(trip, outcome)
    return None


def _saved(graph_run: GraphRun, messages: Sequence[BaseMessage]) -> list[dict[str, Any]] | None:
    return None if graph_run.run.envelope.store is None else DIALECT.plain(messages)
