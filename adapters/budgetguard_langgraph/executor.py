"""LangChain's older `AgentExecutor`, with an ending that is a result."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from langchain_classic.agents import AgentExecutor
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import Runnable, RunnableConfig

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    CheckpointStore,
    Guard,
    Outcome,
    Trip,
    end_run,
    synthetic_metadata,
    synthetic_text,
)
from budgetguard_langgraph._calls import Calls
from budgetguard_langgraph._watch import Watch
from budgetguard_langgraph.callback import BudgetCallback, check_arguments, guard_around


class _Callback(BudgetCallback):
    def __init__(self, guard: Guard) -> None:
        super().__init__(guard)
        self._concludes = False


class BoundedExecutor(Runnable[dict[str, Any], dict[str, Any]]):
    """An `AgentExecutor` that ends within a budget; made by `bounded_executor`."""

    def __init__(
        self,
        executor: AgentExecutor,
        budget: Budget | Guard,
        on_trip: Literal["return", "raise"],
        store: CheckpointStore | None,
    ) -> None:
        self._executor = executor
        self._budget = budget
        self._on_trip = on_trip
        self._store = store
        self.outcome: Outcome | None = None
        """The outcome of the run that ended last."""

    def invoke(
        self,
        input: dict[str, Any],
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Run the agent; a stopped run returns the steps that it took."""
        guard, mine = self._begin(config)
        steps: list[Any] = []
        result: dict[str, Any] = {}
        stopped: BudgetExceeded | None = None
        try:
            # The steps come out of a stream only; what `invoke` had so far is lost when it raises.
            for chunk in self._executor.stream(input, mine, **kwargs):
                result = _taken(chunk, steps, result)
        except BudgetExceeded as stop:
            stopped = stop
        finally:
            guard.attachment(Calls).leave()
        return self._end(guard, stopped, input, result, steps)

    async def ainvoke(
        self,
        input: dict[str, Any],
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Run the agent; deadline and abort also end what hangs."""
        guard, mine = self._begin(config)
        steps: list[Any] = []
        result: dict[str, Any] = {}
        stopped: BudgetExceeded | None = None
        parts: Any = self._executor.astream(input, mine, **kwargs)
        watch = Watch(guard)
        try:
            async with watch:
                while True:
                    try:
                        async with watch.pull():
                            chunk = await anext(parts)
                    except StopAsyncIteration:
                        break
                    result = _taken(chunk, steps, result)
        except BudgetExceeded as stop:
            stopped = stop
        except TimeoutError:
            if watch.trip is None:
                raise
            stopped = BudgetExceeded(watch.trip)
        finally:
            guard.attachment(Calls).leave()
            await parts.aclose()
        return await asyncio.to_thread(self._end, guard, stopped, input, result, steps)

    def _begin(self, config: RunnableConfig | None) -> tuple[Guard, RunnableConfig]:
        budget = self._budget
        if isinstance(budget, Guard):
            guard = budget
        else:
            around = guard_around(cast("Mapping[str, Any] | None", config))
            guard = Guard(budget) if around is None else around.child(budget)
        mine = cast("dict[str, Any]", dict(config or {}))
        callbacks: Any = mine.get("callbacks") or []
        if isinstance(callbacks, list):
            mine["callbacks"] = [*cast("list[Any]", callbacks), _Callback(guard)]
        else:
            mine["callbacks"] = callbacks.copy()
            mine["callbacks"].add_handler(_Callback(guard), inherit=True)
        guard.attachment(Calls).enter()
        return guard, cast("RunnableConfig", mine)

    def _end(
        self,
        guard: Guard,
        stopped: BudgetExceeded | None,
        given: dict[str, Any],
        result: dict[str, Any],
        steps: Sequence[Any],
    ) -> dict[str, Any]:
        trip = None if stopped is None else stopped.trip
        ended = {**given, **result}
        if trip is not None:
            ended = {
                **given,
                "output": synthetic_text(guard),
                "intermediate_steps": list(steps),
                "stop_reason": str(trip.reason),
            }
        outcome = end_run(
            guard,
            trip=trip,
            messages=_history(given, steps, ended.get("output"), guard, trip),
            final=ended.get("output"),
            store=self._store,
            saved_messages=[str(step) for step in steps],
        )
        self.outcome = outcome
        if trip is not None and self._on_trip == "raise":
            raise BudgetExceeded(trip, outcome)
        return ended


def bounded_executor(
    executor: AgentExecutor,
    budget: Budget | Guard,
    *,
    on_trip: Literal["return", "raise"] = "return",
    store: CheckpointStore | None = None,
) -> BoundedExecutor:
    """Return the executor, ending within a budget: `{output, intermediate_steps, stop_reason}`.

    The executor's own `max_iterations` (15) and `max_execution_time` stay in force beside it.

    Args:
        executor: The executor.
        budget: A budget: a fresh guard per call. Or a guard, shared by reference.
        on_trip: `return`, or `raise` to have `BudgetExceeded` raised, with the outcome.
        store: Where the guard's checkpoint goes when the run ends.

    Raises:
        AdapterError: It is not an `AgentExecutor`.
        ConfigurationError: The budget is neither a `Budget` nor a `Guard`.
    """
    check_arguments(budget, on_trip)
    if not isinstance(cast("object", executor), AgentExecutor):
        raise AdapterError(
            f"bounded_executor takes an AgentExecutor, got {type(executor).__name__}. "
            "Use bounded for a graph, or pass BudgetCallback in the config."
        )
    return BoundedExecutor(executor, budget, on_trip, store)


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
    marks = {} if trip is None else synthetic_metadata(guard, trip)
    return [*messages, AIMessage(str(output), response_metadata=marks)]


def _observed(action: Any, observation: Any) -> BaseMessage:

    id_ = getattr(action, "tool_call_id", None)
    if id_ is None:
        return HumanMessage(str(observation))
    return ToolMessage(str(observation), tool_call_id=id_, name=action.tool)
