"""How a run that LangChain's hooks have told of ends, and how its outcome is found."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Any, Final, cast

from langchain_core.messages import AIMessage, BaseMessage

from budgetguard_core import AdapterError, BudgetExceeded, Outcome, Trip
from budgetguard_core.kit import (
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    Answer,
    Call,
    Flow,
    ModelCall,
    OpenModelCall,
    Prompt,
    Step,
    close_history,
    final_text,
    in_words,
    last_answer,
    outcome_of,
    reported_cost,
    synthetic_metadata,
    synthetic_text,
    token_usage,
)
from budgetguard_core.kit import remember as kept_with
from budgetguard_langgraph._bounds import bind, words_of
from budgetguard_langgraph._messages import DIALECT, ended, is_synthetic, messages_of, text_of
from budgetguard_langgraph._run import GraphRun
from budgetguard_langgraph._seams import TASK, configuration, is_drained
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
    """Return what ends the code in which a run was stopped."""
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


# A last answer


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
    """Ask for the last answer that a stopped run may have; None where it has none."""
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


# From a result to its outcome


def remember(result: Any, messages_key: str, outcome: Outcome) -> None:
    """Keep an outcome for as long as the last message of its result lives."""
    messages = messages_of(result, messages_key)
    if messages:
        kept_with(messages[-1], outcome)


class Told:
    """Where the outcome of one streamed run goes: to the stream that its caller holds.

    Attributes:
        outcome: How the run ended, without its messages.
        is_on_messages: Its result has messages, by which it is found.
    """

    is_on_messages = False

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._stream: weakref.ref[Any] | None = None

    def by(self, stream: Any) -> Any:
        """Take the stream, and return it."""
        self._stream = weakref.ref(stream)
        return stream

    def take(self, outcome: Outcome) -> None:
        """Take the outcome, for as long as somebody holds the stream."""
        self.outcome = outcome.model_copy(update={"messages": (), "final": None})
        stream = None if self._stream is None else self._stream()
        if stream is not None:
            kept_with(stream, outcome)


class Result(dict[str, Any]):
    """A result without messages: a plain dictionary takes no reference to its outcome."""


def with_outcome_of(graph: Any, result: Any, options: dict[str, Any], told: Told) -> Any:
    """Return a result by which its outcome is found; of a stopped run with `stop_reason`.

    Inside another graph it is a part of that one's state.
    """
    ended, values = told.outcome, getattr(result, "value", result)
    if ended is None or not isinstance(values, dict) or configuration().get(TASK) is not None:
        return result
    known = cast("dict[str, Any]", values)
    is_state = options.get("output_keys") is None and options.get("stream_mode") in (None, "values")
    is_state = is_state and not isinstance(graph.stream_channels_asis, str)
    if ended.status == "terminated" and is_state:
        known.setdefault("stop_reason", str(ended.stop_reason))
    if values is not result or told.is_on_messages:
        return result
    return with_own_outcome(known, ended)


def with_own_outcome(values: dict[str, Any], ended: Outcome) -> dict[str, Any]:
    """Return values that know how the run ended that made them."""
    result = Result(values)
    kept_with(result, ended)
    return result


def outcome(result: Any, *, messages_key: str = "messages") -> Outcome:
    """Return the outcome of the run that gave this result.

    A result without messages has nothing that an outcome could hang on: use `on_outcome`.

    Args:
        result: What `invoke` or `ainvoke` returned; a stream that is through, of any mode, whose
            outcome is without messages; the last value of a stream; the state of a thread that a
            bounded graph's `get_state` returned; the exception that left; a callback.
        messages_key: The key of the conversation in the graph's state.

    Raises:
        AdapterError: The result is not that of a run with a budget, or holds no messages.
    """
    found = outcome_of(result)
    if found is not None and isinstance(result, Result):
        found = found.model_copy(update={"final": result.get("output")})
    values = getattr(result, "values", None)
    if found is not None and isinstance(values, dict):
        found = _with_messages(found, messages_of(values, messages_key)) or found
    if found is None:
        own = result if isinstance(result, Outcome) else getattr(result, "outcome", None)
        found = own if isinstance(own, Outcome) else None
    messages = messages_of(getattr(result, "value", result), messages_key)
    if found is None and messages:
        found = _with_messages(outcome_of(messages[-1]), messages)
    if not isinstance(found, Outcome):
        raise AdapterError(
            f"outcome takes the result of a run with a budget, got {type(result).__name__} "
            "without one. Pass what invoke returned, or use on_outcome."
        )
    return found


def _with_messages(found: Outcome | None, messages: list[Any]) -> Outcome | None:
    """Give an outcome its conversation back, closed again where the state could not be."""
    if found is None or not messages:
        return found
    if found.status == "terminated" and not is_synthetic(messages[-1]):
        started = {call.id for call in found.tool_calls if call.status == "interrupted"}
        marks = {"synthetic": True, "stop_reason": str(found.stop_reason), "run_id": found.run_id}
        done = sum(call.status == "completed" for call in found.tool_calls)
        calls = "1 tool call was" if done == 1 else f"{done} tool calls were"
        so_far = (
            f"{calls} completed; see the results above" if done else "no tool call was completed"
        )
        text = f"This run was stopped before it finished. So far {so_far}."

        def answer(call: Call, _: int) -> str:
            return OUTCOME_UNKNOWN if call.id in started else NOT_EXECUTED

        messages, _ = ended(messages, answer, text, marks)
    final = final_text(messages, DIALECT)
    return found.model_copy(update={"messages": tuple(messages), "final": final})
