"""The middleware: an agent of `create_agent` that ends its runs by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Annotated, Any, NotRequired, Unpack, cast

from langchain.agents.middleware.types import (
    AgentMiddleware,
    AgentState,
    ExtendedModelResponse,
    ModelResponse,
    OmitFromInput,
)
from langchain_core.messages import BaseMessage, ToolMessage
from langgraph.errors import GraphInterrupt
from langgraph.types import Command

from budgetguard_core import AdapterError, Budget, BudgetExceeded, Guard
from budgetguard_core.kit import (
    OUTCOME_UNKNOWN,
    Envelope,
    EnvelopeOptions,
    Flow,
    current,
    cut_short,
    envelope_of,
    run_awaited,
    run_blocking,
)
from budgetguard_langgraph._ambient import agents
from budgetguard_langgraph._endings import question_to
from budgetguard_langgraph._messages import is_synthetic
from budgetguard_langgraph._run import GraphRun, owner_of
from budgetguard_langgraph._seams import configuration, middleware_of
from budgetguard_langgraph.callback import BudgetCallback
from budgetguard_langgraph.interrupts import BudgetInterrupt, is_stop_below
from budgetguard_langgraph.progress import report_progress


class BudgetState(AgentState[Any]):
    """The part of the agent's state that the middleware keeps."""

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
        self, budget: Budget | Guard | Envelope | None = None, **options: Unpack[EnvelopeOptions]
    ) -> None:
        super().__init__()
        self._enclosing = budget is None
        envelope = envelope_of(budget, default=Budget(), **options)
        self.callback = BudgetCallback(envelope)
        self.callback.is_found = self.callback.ends_in_a_node = True
        self.tools: Sequence[Any] = [report_progress] if envelope.may_ask_for_progress else []

    # The run

    def before_agent(self, state: BudgetState, runtime: Any) -> dict[str, Any] | None:
        """Begin a run: it was not stopped yet."""
        frame = current()
        if self._enclosing and frame is None and owner_of(None, None, frame) is None:
            raise AdapterError(
                "BudgetMiddleware needs a guard, got none. Pass a budget, or run the agent "
                "in `with guard.activate():`."
            )
        mine = self._mine()
        if mine is not None and "|" not in (configuration().get("checkpoint_ns") or ""):
            mine.ends_in_a_node = True
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
            return run_blocking(self._ending(request, stop))

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Answer in the model's place when the run is stopped; deadline and abort cancel it."""
        try:
            with self._watched():
                return await handler(request)
        except BudgetExceeded as stop:
            return await run_awaited(self._ending(request, stop))

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Keep a stop inside a tool from ending the whole graph."""
        try:
            return handler(request)
        except (BudgetExceeded, GraphInterrupt) as stop:
            return self._interrupted(request, stop)

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Keep a stop inside a tool from ending the whole graph; deadline and abort cancel it."""
        try:
            with self._watched():
                return await handler(request)
        except (BudgetExceeded, GraphInterrupt) as stop:
            return self._interrupted(request, stop)

    # The ending

    def _mine(self) -> GraphRun | None:
        """Return the run whose ending this middleware writes."""
        owner = owner_of(None, None, current())
        if owner is None:
            return None
        if self._enclosing:
            return owner
        return owner.run_of(self.callback)

    @contextmanager
    def _watched(self) -> Generator[None]:
        mine = self._mine()
        if mine is None:
            yield
            return
        with cut_short(mine.run) as watch:
            yield
        if watch.trip is not None:
            node = str(configuration().get("checkpoint_ns", ""))
            mine.forget_model_calls(asyncio.CancelledError(), node)
            raise BudgetInterrupt(watch.trip)

    def _ending(self, request: Any, stop: BudgetExceeded) -> Flow[ExtendedModelResponse[Any]]:
        messages: list[BaseMessage] = list(request.messages)
        mine = self._mine()
        is_over = is_synthetic(messages[-1] if messages else None)
        if mine is None or is_over or mine.propagates(stop.trip):
            # The second: something goes on after the end; the graph is stopped where it is. The
            # third: it is the stop of a run around this one, which ends.
            raise stop
        known: Any = request.system_message
        system = () if known is None else (known,)
        mine.stop(stop.trip)
        ending = yield from mine.close(messages, question_to(mine, request.model, system))
        mine.ending = None  # that of this agent, which may be one of several in its run
        update: dict[str, Any] = {"jump_to": "end", "stop_reason": str(stop.trip.reason)}
        response = ModelResponse[Any](result=ending.new)
        return ExtendedModelResponse(model_response=response, command=Command(update=update))

    def _interrupted(self, request: Any, stop: BudgetExceeded | GraphInterrupt) -> ToolMessage:
        mine = self._mine()
        trip: Any = getattr(stop, "trip", None)
        if mine is not None and trip is None and is_stop_below(stop):
            trip = mine.run.stopped_by
        if mine is None or trip is None or mine.propagates(trip):
            raise stop
        call = request.tool_call
        return ToolMessage(
            OUTCOME_UNKNOWN, tool_call_id=call["id"], name=call["name"], status="error"
        )


def _callback_of(graph: Any) -> BudgetCallback | None:
    found = middleware_of(graph, BudgetMiddleware)
    if found is None or found._enclosing:  # noqa: SLF001 - its own
        return None
    return cast("BudgetCallback", found.callback)


agents.append(_callback_of)

# `create_agent` has langsmith wrap these, which asks for their signature at each call.
for _hook in (
    BudgetMiddleware.wrap_model_call,
    BudgetMiddleware.wrap_tool_call,
    BudgetMiddleware.awrap_model_call,
    BudgetMiddleware.awrap_tool_call,
):
    cast("Any", _hook).__signature__ = signature(_hook)
