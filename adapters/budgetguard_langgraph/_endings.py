"""The ending of a run that LangChain's hooks report, and the search for its outcome."""

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
    LastQuestion,
    OpenModelCall,
    final_text,
    in_words,
    outcome_of,
    reported_cost,
    run_blocking,
    token_usage,
)
from budgetguard_core.kit import remember as kept_with
from budgetguard_langgraph._messages import DIALECT, ended, is_synthetic, messages_of, text_of
from budgetguard_langgraph._models import bind, words_of
from budgetguard_langgraph._run import GraphRun
from budgetguard_langgraph._seams import TASK, configuration, is_drained
from budgetguard_langgraph.interrupts import BudgetInterrupt, BudgetStop

_LIMITS: Final = re.compile(
    "Model call limits exceeded: |('.*' tool|Tool) call limit reached: "
    "|Sorry, need more steps to process this request[.]$"
)
"""The words with which LangChain's own limits end an agent, in a message that no model wrote."""


def ended_by_a_limit(graph_run: GraphRun, messages: Sequence[BaseMessage]) -> None:
    """Stop a run whose graph ended by a limit of the framework's, without an exception."""
    last = messages[-1] if messages else None
    if not isinstance(last, AIMessage) or last.usage_metadata or last.response_metadata:
        return
    text = last.content
    if isinstance(text, str) and _LIMITS.match(text) is not None:
        graph_run.framework_limit(text[:200])


def stop(graph_run: GraphRun, trip: Trip, prompt: Sequence[Any]) -> BudgetInterrupt | BudgetStop:
    """Return what ends the code in which a run was stopped."""
    messages = [message for message in prompt if isinstance(message, BaseMessage)]
    if messages:
        graph_run.sent, graph_run.last_reply = messages, None
    graph_run.notify(trip)
    outcome = None
    if graph_run.root is None and graph_run.outer is None:
        graph_run.stop(trip)
        run_blocking(graph_run.close(messages))
        outcome = run_blocking(graph_run.ended(messages))
    kind = BudgetStop if graph_run.run.envelope.on_trip == "raise" else BudgetInterrupt
    return kind(trip, outcome)


def end(
    graph_run: GraphRun, outputs: Any, error: BaseException | None, messages_key: str
) -> Flow[BudgetExceeded | None]:
    """End a run whose graph or chain is over; return what its caller gets instead of a result."""
    messages = messages_of(outputs, messages_key) or graph_run.last_request
    waits = graph_run.waits and (error is None or is_drained(error))
    if not waits and error is not None and not isinstance(error, BudgetExceeded):
        yield from graph_run.ended(messages, error=error)
        return None
    trip = None if waits else graph_run.trip or graph_run.stopped_inside
    if trip is not None:
        graph_run.stop(trip)
        yield from graph_run.close(messages)
    elif error is None and not waits:
        ended_by_a_limit(graph_run, messages)
    outcome = yield from graph_run.ended(messages, error=error if waits else None, waits=waits)
    if graph_run.thread is not None:
        yield from graph_run.thread.leave(graph_run.run.guard, outcome)
    if isinstance(error, BudgetExceeded):
        error.outcome = outcome if trip is not None else error.outcome or outcome
        return None
    remember(outputs, messages_key, outcome)
    if trip is not None and graph_run.run.is_to_raise:
        return BudgetStop(trip, outcome)
    if trip is not None and graph_run.propagates(trip):
        # So that nobody takes the partial result for an answer.
        return BudgetInterrupt(trip, outcome)
    return None


# None of the callbacks that the graph was called with: their run is over.
_ALONE: Final[Any] = {"callbacks": []}


def question_to(
    graph_run: GraphRun, model: Any = None, system: Sequence[BaseMessage] = ()
) -> LastQuestion | None:
    """Return how the model of the last request, or this one, is asked for a last answer."""
    requested, ending = graph_run.last_model
    requested_model: Any = requested if model is None else model
    if requested_model is None:
        return None
    name = getattr(requested_model, "model_name", None) or getattr(requested_model, "model", None)

    def given(open_call: OpenModelCall) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if words_of(requested_model) is not None:
            bind(requested_model, settings, open_call.max_output_tokens, open_call)
        return settings

    def ask(sent: list[Any], open_call: OpenModelCall) -> Answer:
        return _answer(requested_model.invoke(sent, _ALONE, **given(open_call)))

    async def ask_async(sent: list[Any], open_call: OpenModelCall) -> Answer:
        return _answer(await requested_model.ainvoke(sent, _ALONE, **given(open_call)))

    return LastQuestion(
        ask=ask,
        ask_async=ask_async,
        model=graph_run.model_name or (name if isinstance(name, str) else None),
        write=lambda whole: in_words([*(system or ending), *whole], DIALECT),
    )


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


class OutcomeHolder:
    """The holder of one streamed run's outcome, found by the stream that its caller has.

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


def with_outcome_of(graph: Any, result: Any, options: dict[str, Any], ending: OutcomeHolder) -> Any:
    """Return a result by which its outcome is found; of a stopped run with `stop_reason`.

    Inside another graph it is a part of that one's state.
    """
    ended, values = ending.outcome, getattr(result, "value", result)
    if ended is None or not isinstance(values, dict) or configuration().get(TASK) is not None:
        return result
    known = cast("dict[str, Any]", values)
    is_state = options.get("output_keys") is None and options.get("stream_mode") in (None, "values")
    is_state = is_state and not isinstance(graph.stream_channels_asis, str)
    if ended.status == "terminated" and is_state:
        known.setdefault("stop_reason", str(ended.stop_reason))
    if values is not result or ending.is_on_messages:
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
