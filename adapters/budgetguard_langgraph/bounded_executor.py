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
    Flow,
    envelope_of,
    required,
    run_awaited,
    run_blocking,
    synthetic_metadata,
    synthetic_text,
)
from budgetguard_langgraph._endings import with_own_outcome
from budgetguard_langgraph._run import current_run
from budgetguard_langgraph._seams import surrounding_callbacks, with_callback
from budgetguard_langgraph._view import Parts
from budgetguard_langgraph.callback import BudgetCallback

with required("langchain-classic", module="langchain_classic", extra="langchain"):
    from langchain_classic import agents

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
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Run the agent; a stopped run returns the steps that it took."""
        return run_blocking(self._run(input, config, kwargs, self._executor.stream))

    async def ainvoke(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Run the agent; deadline and abort also end what hangs."""
        return await run_awaited(self._run(input, config, kwargs, self._executor.astream))

    def _run(
        self, given: dict[str, Any], config: Any, options: dict[str, Any], stream: Any
    ) -> Flow[dict[str, Any]]:
        callback = BudgetCallback(self._envelope)
        callback.ends_elsewhere = True
        mine = callback.open(current_run(), given, config)
        run = mine.run
        enclosing: dict[str, Any] = dict(config or {})
        callbacks = enclosing.get("callbacks") or surrounding_callbacks()
        attached = {**enclosing, "callbacks": with_callback(callbacks, callback)}
        steps: list[Any] = []
        result: dict[str, Any] = {}
        trip: Trip | None = None
        # The steps come out of a stream only; what `invoke` had so far is lost when it raises.
        parts = Parts(mine, stream(given, attached, **options), (BudgetExceeded,))
        try:
            while parts.trip is None and (chunk := (yield parts.next)) is not Parts.OVER:
                steps += ((one.action, one.observation) for one in chunk.get("steps", ()))
                if "output" in chunk:
                    result = {name: one for name, one in chunk.items() if name != "messages"}
        except BudgetExceeded as stop:
            trip = stop.trip
        except BaseException as error:
            yield parts.close()
            mine.leave(error)
            self.outcome = yield from mine.ended(_history(given, steps), error=error)
            raise
        yield parts.close()
        mine.leave(None)
        trip = run.stopped_by or parts.trip or trip
        ended = {**given, **result}
        output = ended.get("output")
        if trip is not None:
            output = synthetic_text(run.guard)
            ended = {**given, "output": output, "intermediate_steps": steps}
        elif run.is_enforced and _LIMIT.match(str(output)):
            trip = run.framework_limit(str(output))
        if trip is not None:
            ended["stop_reason"] = str(trip.reason)
            mine.stop(trip)
        marks = {} if trip is None else synthetic_metadata(run.guard, trip)
        messages = _history(given, steps)
        if output is not None:
            messages.append(AIMessage(str(output), response_metadata=marks))
        outcome = self.outcome = yield from mine.ended(messages)
        if trip is not None and (run.is_to_raise or mine.propagates(trip)):
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


def _history(given: dict[str, Any], steps: Sequence[Any]) -> list[BaseMessage]:
    messages: list[BaseMessage] = [HumanMessage(str(given.get("input", "")))]
    for action, observation in steps:
        messages += getattr(action, "message_log", None) or [AIMessage(str(action.log))]
        id_ = getattr(action, "tool_call_id", None)
        text = str(observation)
        made = ToolMessage(text, tool_call_id=id_, name=action.tool) if id_ else HumanMessage(text)
        messages.append(made)
    return messages
