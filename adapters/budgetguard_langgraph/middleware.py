"""The middleware: an agent of `create_agent` that ends its runs by itself."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal, NotRequired, cast
from weakref import WeakKeyDictionary

import langchain.agents.middleware.types as types
from langchain.agents.middleware.types import (
    AgentMiddleware,
    AgentState,
    ModelResponse,
    OmitFromInput,
    PrivateStateAttr,
)
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    ToolMessage,
    messages_to_dict,
)
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.types import Command

from budgetguard_core import (
    OUTCOME_UNKNOWN,
    AdapterError,
    Budget,
    BudgetExceeded,
    CheckpointStore,
    Guard,
    Mode,
    Snapshot,
    Trip,
    end_run,
)
from budgetguard_langgraph._calls import Calls, chain, keep
from budgetguard_langgraph._history import (
    final_text,
    is_synthetic,
    results_for,
    synthetic_message,
)
from budgetguard_langgraph._outcomes import remember
from budgetguard_langgraph._usage import estimate_prompt
from budgetguard_langgraph._watch import Watch
from budgetguard_langgraph.callback import (
    ATTACHED,
    BudgetCallback,
    check_arguments,
    guard_around,
    root_around,
)
from budgetguard_langgraph.interrupts import BudgetInterrupt, BudgetStop

# Since langchain 1.1; before, the synthetic answer alone ends the agent.
_EXTENDED: Final[Any] = getattr(types, "ExtendedModelResponse", None)
_OUTPUT_BOUNDS: Final = {
    "google_genai": "max_output_tokens",
    "google_vertexai": "max_output_tokens",
}
_TIMEOUTS: Final = frozenset({"openai", "azure", "azure_openai", "anthropic"})
_PROVIDERS: Final[WeakKeyDictionary[type, str]] = WeakKeyDictionary()
_CHECKPOINTER: Final = "__pregel_checkpointer"


class BudgetState(AgentState[Any]):
    """What the middleware keeps in the agent's state."""

    stop_reason: NotRequired[Annotated[str | None, OmitFromInput]]
    """Why the run was stopped; None or absent when it ended by itself."""
    budgetguard: NotRequired[Annotated[dict[str, Any], PrivateStateAttr]]
    """The run's guard: its id, and a snapshot where there is a checkpointer."""


class _Callback(BudgetCallback):
    """The callback that counts for a middleware; the middleware writes the ending."""

    def __init__(self, guard: Guard, store: CheckpointStore | None) -> None:
        super().__init__(guard, store=store)
        self._concludes = False
        self._saves = store is not None
        self._corrects = False


class BudgetMiddleware(AgentMiddleware[BudgetState, Any]):
    """Bounds an agent: `create_agent(model, tools, middleware=[BudgetMiddleware(budget)])`.

    A stopped run ends as the agent normally does, by `jump_to`, with a closed history. Each
    attempt of a retrying middleware is a model call when this one stands after it in the list, so
    put it last. Tools and the sub-agents in them spend the same budget. The model call gets the
    time left and the bound of its output. With a callback on the same guard nothing counts twice.

    Args:
        budget: A budget: a fresh guard per run, which a person's answer to an interrupt does not
            end. Or a guard, shared by reference. None: the guard that is active (`guard.activate`).
        on_trip: `return`, or `raise` to have `BudgetExceeded` raised, with the outcome.
        store: Where the guard's checkpoints go.

    Raises:
        ConfigurationError: The budget is neither a `Budget` nor a `Guard`.
    """

    state_schema = BudgetState

    def __init__(
        self,
        budget: Budget | Guard | None = None,
        *,
        on_trip: Literal["return", "raise"] = "return",
        store: CheckpointStore | None = None,
    ) -> None:
        super().__init__()
        check_arguments(Budget() if budget is None else budget, on_trip)
        self.tools: Sequence[Any] = ()
        self._budget = budget
        self._on_trip = on_trip
        self._store = store
        self._lock = threading.Lock()
        self._guards: OrderedDict[str, Guard] = OrderedDict()

    # The run

    def before_agent(self, state: BudgetState, runtime: Any) -> dict[str, Any] | None:
        """Begin a run: its guard, and a history that a stopped run may have left open."""
        update: dict[str, Any] = {}
        if isinstance(self._budget, Budget):
            around = guard_around(None)
            guard = Guard(self._budget) if around is None else around.child(self._budget)
            self._know(guard)
            update["budgetguard"] = self._mark(guard, snapshot=False)
        else:
            guard = self._guard(state)
            guard.user_turn()
        if state.get("stop_reason") is not None:
            update["stop_reason"] = None
        return update or None

    async def abefore_agent(self, state: BudgetState, runtime: Any) -> dict[str, Any] | None:
        """Begin a run."""
        return self.before_agent(state, runtime)

    def after_agent(self, state: BudgetState, runtime: Any) -> dict[str, Any] | None:
        """End a run: checkpoint, incident record, outcome."""
        guard = self._guard(state)
        messages = state["messages"]
        last = messages[-1] if messages else None
        trip = guard.trip if last is not None and is_synthetic(last) else None
        if isinstance(self._budget, Budget):
            with self._lock:
                self._guards.pop(guard.run_id, None)
        calls, root = guard.attachment(Calls), root_around(guard)
        if calls.wrapped or not (root is None or calls.ends((root, guard.run_id))):
            return self._told(trip)
        outcome = end_run(
            guard,
            trip=trip,
            messages=messages,
            final=final_text(messages),
            store=self._store,
            saved_messages=None if self._store is None else messages_to_dict(messages),
        )
        remember(state, "messages", outcome)
        if trip is not None and self._on_trip == "raise":
            raise BudgetStop(trip, outcome)
        return self._told(trip)

    async def aafter_agent(self, state: BudgetState, runtime: Any) -> dict[str, Any] | None:
        """End a run, without blocking the loop."""
        return await asyncio.to_thread(self.after_agent, state, runtime)

    # Its steps

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Admit the call as it goes out; when the run is stopped, answer in the model's place."""
        guard, outer = self._guard(request.state), guard_around(None)
        with self._attached(guard):
            try:
                return self._kept(guard, handler(self._request(request, guard)))
            except BudgetExceeded as stop:
                return self._ending(request, guard, outer, stop)

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Admit the call as it goes out; deadline and abort cancel it."""
        guard, outer = self._guard(request.state), guard_around(None)
        with self._attached(guard) as callback:
            try:
                return self._kept(
                    guard,
                    await _watched(guard, callback, handler(self._request(request, guard))),
                )
            except BudgetExceeded as stop:
                return self._ending(request, guard, outer, stop)

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Admit the tool; the calls in it spend the same budget."""
        guard, outer = self._guard(request.state), guard_around(None)
        with self._attached(guard):
            try:
                return handler(request)
            except BudgetExceeded as stop:
                return _interrupted(request, guard, outer, stop)

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Admit the tool; deadline and abort cancel it."""
        guard, outer = self._guard(request.state), guard_around(None)
        with self._attached(guard) as callback:
            try:
                return await _watched(guard, callback, handler(request))
            except BudgetExceeded as stop:
                return _interrupted(request, guard, outer, stop)

    # The guard of a run

    def _guard(self, state: Any) -> Guard:
        if isinstance(self._budget, Guard):
            return self._budget
        if self._budget is None:
            active = Guard.active()
            if active is None:
                raise AdapterError(
                    "BudgetMiddleware needs a guard, got none. Pass a budget, or run the agent "
                    "in `with guard.activate():`."
                )
            return active
        mark: dict[str, Any] = state.get("budgetguard") or {}
        run_id = str(mark.get("run_id"))
        with self._lock:
            known = self._guards.get(run_id)
        if known is not None:
            return known
        # Another process began the run, or it waited for an answer for very long.
        text = mark.get("snapshot")
        saved = None if text is None else Snapshot.from_json(text)
        if saved is None and self._store is not None:
            saved = self._store.load(run_id)
        if saved is None:
            restored = Guard(self._budget)
        elif saved.parent_run_id is not None:
            # What was around it is gone, and its caps are not in the snapshot.
            restored = Guard.restore(saved, self._budget)
        else:
            restored = Guard.restore(saved, stop_when=self._budget.stop_when)
        self._know(restored)
        return restored

    def _know(self, guard: Guard) -> None:
        with self._lock:
            keep(self._guards, guard.run_id, guard)

    def _mark(self, guard: Guard, *, snapshot: bool) -> dict[str, Any]:
        return {
            "run_id": guard.run_id,
            "snapshot": guard.snapshot().to_json() if snapshot else None,
        }

    @contextmanager
    def _attached(self, guard: Guard) -> Generator[BudgetCallback]:
        calls = guard.attachment(Calls)
        key = f"middleware {guard.run_id}"
        with calls.lock:
            callback = calls.handlers.get(key)
            if callback is None:
                callback = _Callback(guard, self._store)
                keep(calls.handlers, key, callback)
        token = ATTACHED.set(callback)
        try:
            yield callback
        finally:
            ATTACHED.reset(token)

    # What goes out, and what comes back

    def _request(self, request: Any, guard: Guard) -> Any:
        """Hand over the correction that is due, the time left and the bound of the output."""
        changes: dict[str, Any] = {}
        correction = guard.take_nudge() if guard.mode is Mode.ENFORCE else None
        if correction is not None:
            changes["messages"] = [*request.messages, HumanMessage(correction)]
        settings = _settings(request, guard)
        if settings:
            changes["model_settings"] = {**request.model_settings, **settings}
        return request.override(**changes) if changes else request

    def _kept(self, guard: Guard, response: Any) -> Any:
        """Put the guard's snapshot into the checkpoint, next to the answer it has paid for."""
        if _EXTENDED is None or not isinstance(self._budget, Budget):
            return response
        configurable = (var_child_runnable_config.get() or {}).get("configurable", {})
        if configurable.get(_CHECKPOINTER) is None:
            return response
        command = None
        if isinstance(response, _EXTENDED):
            response, command = response.model_response, response.command
        update = dict(getattr(command, "update", None) or {})
        update["budgetguard"] = self._mark(guard, snapshot=True)
        return _EXTENDED(model_response=_response(response), command=Command(update=update))

    def _ending(self, request: Any, guard: Guard, outer: Guard | None, stop: BudgetExceeded) -> Any:
        messages: list[BaseMessage] = list(request.messages)
        if _is_above(guard, outer, stop.trip) or is_synthetic(messages[-1] if messages else None):
            # The second: something goes on after the end; the graph is stopped where it is.
            raise stop
        results = results_for(messages, guard)
        last = synthetic_message([*messages, *results], guard, stop.trip)
        response = ModelResponse(result=[*results, last])
        if _EXTENDED is None:
            return response
        update: dict[str, Any] = {"jump_to": "end", "stop_reason": str(stop.trip.reason)}
        return _EXTENDED(model_response=response, command=Command(update=update))

    def _told(self, trip: Trip | None) -> dict[str, Any] | None:
        if trip is None or _EXTENDED is not None:
            return None
        return {"stop_reason": str(trip.reason)}


async def _watched(guard: Guard, callback: BudgetCallback, call: Awaitable[Any]) -> Any:
    async with Watch(guard) as watch:
        try:
            async with watch.pull():
                return await call
        except TimeoutError:
            if watch.trip is None:
                raise
            callback.release(_namespace())
            raise BudgetInterrupt(watch.trip) from None
        except asyncio.CancelledError:
            callback.release(_namespace())
            raise


def _namespace() -> str:
    config = var_child_runnable_config.get() or {}
    return str(config.get("configurable", {}).get("checkpoint_ns", ""))


def _is_above(guard: Guard, outer: Guard | None, trip: Trip) -> bool:
    """Tell whether an envelope around this agent ended, and not that of the agent itself."""
    if outer is None or outer is guard:
        return False
    return trip.run_id in {one.run_id for one in chain(outer)}


def _interrupted(
    request: Any, guard: Guard, outer: Guard | None, stop: BudgetExceeded
) -> ToolMessage:
    if _is_above(guard, outer, stop.trip):
        raise stop
    call = request.tool_call
    return ToolMessage(OUTCOME_UNKNOWN, tool_call_id=call["id"], name=call["name"], status="error")


def _response(response: Any) -> Any:
    return ModelResponse(result=[response]) if isinstance(response, AIMessage) else response


def _settings(request: Any, guard: Guard) -> dict[str, Any]:
    bounds = [
        one.budget.max_output_tokens_per_call
        for one in chain(guard)
        if one.budget.max_output_tokens_per_call is not None and one.mode is Mode.ENFORCE
    ]
    left = guard.time_left()
    if not bounds and left is None:
        return {}
    provider = _provider(request.model)
    settings: dict[str, Any] = {}
    if bounds:
        name = _OUTPUT_BOUNDS.get(provider, "max_tokens")
        given = request.model_settings.get(name)
        bound = min([*bounds, given] if isinstance(given, int) else bounds)
        settings[name] = max(1, min([bound, *_tokens_left(request.messages, guard)]))
    if left is not None and provider in _TIMEOUTS:
        given = request.model_settings.get("timeout")
        settings["timeout"] = min(left, given) if isinstance(given, (int, float)) else left
    return settings


def _tokens_left(messages: Sequence[AnyMessage], guard: Guard) -> list[int]:
    left: list[int] = []
    for one in chain(guard):
        cap = one.budget.max_total_tokens
        if cap is not None and one.mode is Mode.ENFORCE:
            used = one.usage
            prompt = estimate_prompt(messages, None)
            left.append(cap - used.total_tokens - used.reserved_tokens - prompt)
    return left


def _provider(model: Any) -> str:
    kind = cast("type[object]", type(model))
    known = _PROVIDERS.get(kind)
    if known is None:
        try:
            known = str(model._get_ls_params().get("ls_provider"))  # noqa: SLF001 - for tracers
        except Exception:
            known = ""
        _PROVIDERS[kind] = known
    return known
