"""LangChain's older `AgentExecutor`, with an ending that is a result."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Unpack, cast

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import Runnable, RunnableConfig

from budgetguard_core import AdapterError, Budget, BudgetExceeded, Guard, Outcome, Trip
from budgetguard_core.kit import (
    Envelope,
    EnvelopeOptions,
    cut_short,
    entered,
    envelope_of,
    required,
    synthetic_metadata,
    synthetic_text,
)
from budgetguard_langgraph._outcomes import with_own_outcome
from budgetguard_langgraph._run import GraphRun, Stretch, run_around
from budgetguard_langgraph._seams import surrounding_callbacks, thread_of, with_callback
from budgetguard_langgraph._session import Attached

with required("langchain-classic", module="langchain_classic", extra="langchain"):
    from langchain_classic import agents

_NOTHING = object()
_LIMIT = re.compile(r"Agent stopped due to (max iterations|iteration limit or time limit)\.$")
"""The words with which an executor ends by a limit of its own."""


class BoundedExecutor(Runnable[dict[str, Any], dict[str, Any]]):
    """An `AgentExecutor` that ends within a budget; made by `bounded_executor`."""

    def __init__(self, executor: agents.AgentExecutor, envelope: Envelope) -> None:
        self._executor = executor
        self._envelope = envelope
        self.outcome: Outcome | None = None
        """The outcome of the run that ended last."""

    def invoke(
        self,
        input: dict[str, Any],
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Run the agent; a stopped run returns the steps that it took."""
        mine, attached = self._begin(config, input)
        steps: list[Any] = []
        result: dict[str, Any] = {}
        stopped: BudgetExceeded | None = None
        with entered(Stretch(mine)):
            try:
                # The steps come out of a stream only; what `invoke` had so far is lost when it
                # raises.
                for chunk in self._executor.stream(input, attached, **kwargs):
                    result = _taken(chunk, steps, result)
            except BudgetExceeded as stop:
                stopped = stop
            except BaseException as error:
                self._fail(mine, error, input, steps)
                raise
        return self._end(mine, None if stopped is None else stopped.trip, input, result, steps)

    async def ainvoke(
        self,
        input: dict[str, Any],
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Run the agent; deadline and abort also end what hangs."""
        mine, attached = self._begin(config, input)
        steps: list[Any] = []
        result: dict[str, Any] = {}
        trip: Trip | None = None
        parts: Any = self._executor.astream(input, attached, **kwargs)
        with entered(Stretch(mine)):
            try:
                while trip is None:
                    chunk: Any = _NOTHING
                    with cut_short(mine.run) as watch:
                        chunk = await anext(parts, _NOTHING)
                    trip = watch.trip
                    if chunk is _NOTHING:
                        break
                    result = _taken(chunk, steps, result)
            except BudgetExceeded as stop:
                trip = stop.trip
            except BaseException as error:
                self._fail(mine, error, input, steps)
                raise
            finally:
                await parts.aclose()
        return self._end(mine, trip, input, result, steps)

    def _begin(
        self, config: RunnableConfig | None, given: dict[str, Any]
    ) -> tuple[GraphRun, RunnableConfig]:
        callback = Attached(self._envelope)
        run = self._envelope.open(
            user_spoke=True, config=config, given=given, thread=thread_of(config)
        )
        mine = callback.begin(run, run_around())
        attached = cast("dict[str, Any]", dict(config or {}))
        callbacks: Any = attached.get("callbacks") or surrounding_callbacks()
        attached["callbacks"] = with_callback(callbacks, callback)
        return mine, cast("RunnableConfig", attached)

    def _fail(
        self, mine: GraphRun, error: BaseException, given: dict[str, Any], steps: Sequence[Any]
    ) -> None:
        mine.leave(error)
        history = _history(given, steps, None, mine.run.guard, None)
        self.outcome = mine.run.fail(error, history, saved_messages=[str(step) for step in steps])

    def _end(
        self,
        mine: GraphRun,
        trip: Trip | None,
        given: dict[str, Any],
        result: dict[str, Any],
        steps: Sequence[Any],
    ) -> dict[str, Any]:
        mine.leave(None)
        run = mine.run
        trip = run.stopped_by or trip
        ended = {**given, **result}
        if trip is not None:
            ended = {
                **given,
                "output": synthetic_text(run.guard),
                "intermediate_steps": list(steps),
                "stop_reason": str(trip.reason),
            }
        else:
            detail = str(ended.get("output"))
            if run.is_enforced and _LIMIT.match(detail):
                trip = run.framework_limit(detail)
                ended = {**ended, "stop_reason": str(trip.reason)}
        outcome = run.end(
            _history(given, steps, ended.get("output"), run.guard, trip),
            ended.get("output"),
            trip=trip,
            saved_messages=[str(step) for step in steps],
            next_step=mine.next_step,
        )
        mine.settle_interrupted()
        self.outcome = outcome
        if trip is not None and (run.is_to_raise or mine.goes_through(trip)):
            raise BudgetExceeded(trip, outcome)
        return with_own_outcome(ended, outcome)


def bounded_executor(
    executor: agents.AgentExecutor,
    budget: Budget | Guard | Envelope | None = None,
    **options: Unpack[EnvelopeOptions],
) -> BoundedExecutor:
    """Return the executor, ending within a budget: `{output, intermediate_steps, stop_reason}`.

    The executor's own `max_iterations` (15) and `max_execution_time` stay in force beside it.

    Args:
        executor: The executor.
        budget: A budget: a fresh guard per call. A guard, shared by reference. Or an envelope.
        options: As `budgetguard_core.kit.Envelope` takes them.

    Raises:
        AdapterError: It is not an `AgentExecutor`.
        ConfigurationError: The budget or an option is none.
    """
    envelope = envelope_of(budget, **options)
    if not isinstance(cast("object", executor), agents.AgentExecutor):
        raise AdapterError(
            f"bounded_executor takes an AgentExecutor, got {type(executor).__name__}. "
            "Use bounded for a graph, or pass BudgetCallback in the config."
        )
    return BoundedExecutor(executor, envelope)


def _taken(chunk: Any, steps: list[Any], result: dict[str, Any]) -> dict[str, Any]:
    steps.extend((step.action, step.observation) for step in chunk.get("steps", ()))
    if "output" not in chunk:
        return result
    return {name: value for name, value in chunk.items() if name != "messages"}


def _history(
    given: dict[str, Any], steps: Sequence[Any], output: Any, guard: Guard, trip: Trip | None
) -> list[BaseMessage]:
    messages: list[BaseMessage] = [HumanMessage(str(given.get("input", "")))]
    for action, observation in steps:
        messages += getattr(action, "message_log", None) or [AIMessage(str(action.log))]
        messages.append(_observed(action, observation))
    if output is None:
        return messages
    marks = {} if trip is None else synthetic_metadata(guard, trip)
    return [*messages, AIMessage(str(output), response_metadata=marks)]


def _observed(action: Any, observation: Any) -> BaseMessage:
    id_ = getattr(action, "tool_call_id", None)
    if id_ is None:
        return HumanMessage(str(observation))
    return ToolMessage(str(observation), tool_call_id=id_, name=action.tool)
