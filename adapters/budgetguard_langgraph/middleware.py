"""The middleware: an agent of `create_agent` that ends its runs by itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NotRequired, Unpack, cast

from langchain.agents.middleware.types import (
    AgentMiddleware,
    AgentState,
    ExtendedModelResponse,
    ModelResponse,
    OmitFromInput,
)
from langchain_core.messages import BaseMessage, ToolMessage
from langgraph.types import Command

from budgetguard_core import (
    OUTCOME_UNKNOWN,
    AdapterError,
    Budget,
    BudgetExceeded,
    Guard,
    synthetic_metadata,
    synthetic_text,
)
from budgetguard_core.kit import Envelope, EnvelopeOptions, current, cut_short, envelope_of
from budgetguard_langgraph._ambient import agents
from budgetguard_langgraph._history import is_synthetic, results_for, synthetic_message
from budgetguard_langgraph._owners import owner_of
from budgetguard_langgraph._run import GraphRun
from budgetguard_langgraph._seams import configuration, middleware_of
from budgetguard_langgraph.callback import BudgetCallback
from budgetguard_langgraph.interrupts import BudgetInterrupt


class BudgetState(AgentState[Any]):
    """What the middleware keeps in the agent's state."""

    stop_reason: NotRequired[Annotated[str | None, OmitFromInput]]
    """Why the run was stopped; None or absent when it ended by itself."""


class BudgetMiddleware(AgentMiddleware[BudgetState, Any]):
    """Bounds an agent: `create_agent(model, tools, middleware=[BudgetMiddleware(budget)])`.

    Every model call of the agent counts, also those of other middleware (summaries, tool selection,
    fallbacks, retries), wherever this one stands in the list; first is best, because then nothing
    swallows a stop. A stopped run ends as the agent normally does, with a closed history. Tools and
    the sub-agents in them spend the same budget. With a callback on the same guard nothing counts
    twice.

    Args:
        budget: A budget: a fresh guard per run, which a person's answer to an interrupt does not
            end. A guard, shared by reference. An envelope. None: what is around the agent
            (`guard.activate`, a run).
        options: As `budgetguard_core.kit.Envelope` takes them.

    Raises:
        ConfigurationError: The budget or an option is none.
        AdapterError: The releases of LangGraph and LangChain are not supported.
    """

    state_schema = BudgetState

    def __init__(
        self,
        budget: Budget | Guard | Envelope | None = None,
        **options: Unpack[EnvelopeOptions],
    ) -> None:
        super().__init__()
        self.tools: Sequence[Any] = ()
        self._around = budget is None
        self.callback = _Callback(envelope_of(budget, default=Budget(), **options))

    # The run

    def before_agent(self, state: BudgetState, runtime: Any) -> dict[str, Any] | None:
        """Begin a run: it was not stopped yet."""
        if self._around and current() is None and owner_of(None, None) is None:
            raise AdapterError(
                "BudgetMiddleware needs a guard, got none. Pass a budget, or run the agent "
                "in `with guard.activate():`."
            )
        return None if state.get("stop_reason") is None else {"stop_reason": None}

    async def abefore_agent(self, state: BudgetState, runtime: Any) -> dict[str, Any] | None:
        """Begin a run."""
        return self.before_agent(state, runtime)

    # Its steps

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Answer in the model's place when the run is stopped."""
        try:
            return handler(request)
        except BudgetExceeded as stop:
            return self._ending(request, stop)

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Answer in the model's place when the run is stopped; deadline and abort cancel it."""
        try:
            with self._watched():
                return await handler(request)
        except BudgetExceeded as stop:
            return self._ending(request, stop)

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Keep a stop inside a tool from ending the whole graph."""
        try:
            return handler(request)
        except BudgetExceeded as stop:
            return self._interrupted(request, stop)

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Keep a stop inside a tool from ending the whole graph; deadline and abort cancel it."""
        try:
            with self._watched():
                return await handler(request)
        except BudgetExceeded as stop:
            return self._interrupted(request, stop)

    # The ending

    def _mine(self) -> GraphRun | None:
        """Return the run whose ending this middleware writes."""
        owner = owner_of(None, None)
        if owner is None:
            return None
        if self._around:
            return owner
        return owner.opened_by(self.callback)

    @contextmanager
    def _watched(self) -> Generator[None]:
        mine = self._mine()
        if mine is None:
            yield
            return
        with cut_short(mine.run) as watch:
            yield
        if watch is not None and watch.trip is not None:
            mine.release(str(configuration().get("checkpoint_ns", "")))
            raise BudgetInterrupt(watch.trip)

    def _ending(self, request: Any, stop: BudgetExceeded) -> Any:
        messages: list[BaseMessage] = list(request.messages)
        mine = self._ends(stop)
        if mine is None or is_synthetic(messages[-1] if messages else None):
            # The second: something goes on after the end; the graph is stopped where it is.
            raise stop
        guard = mine.run.guard
        results = results_for(messages, mine.started(), mine.results)
        last = synthetic_message(
            [*messages, *results], synthetic_text(guard), synthetic_metadata(guard, stop.trip)
        )
        response = ModelResponse(result=[*results, last])
        update: dict[str, Any] = {"jump_to": "end", "stop_reason": str(stop.trip.reason)}
        return ExtendedModelResponse(model_response=response, command=Command(update=update))

    def _interrupted(self, request: Any, stop: BudgetExceeded) -> ToolMessage:
        if self._ends(stop) is None:
            raise stop
        call = request.tool_call
        return ToolMessage(
            OUTCOME_UNKNOWN, tool_call_id=call["id"], name=call["name"], status="error"
        )

    def _ends(self, stop: BudgetExceeded) -> GraphRun | None:
        """Return this agent's run, unless the stop is that of a run around it and goes through."""
        mine = self._mine()
        return None if mine is None or mine.goes_through(stop.trip) else mine


class _Callback(BudgetCallback):
    """The callback of the agents that a middleware is part of; it is found by their graphs."""

    def _stands_back(self, owner: GraphRun | None) -> bool:
        """Leave to others what is a part of the middleware's own guard already."""
        guard = self.envelope.budget
        if owner is None or not isinstance(guard, Guard):
            return False
        return any(guard in one.lineage for one in owner.run.guards)


def _callback_of(graph: Any) -> BudgetCallback | None:
    found = middleware_of(graph, BudgetMiddleware)
    if found is None or found._around:  # noqa: SLF001 - its own
        return None
    return cast("BudgetCallback", found.callback)


agents.append(_callback_of)
