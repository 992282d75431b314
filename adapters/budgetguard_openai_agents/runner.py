"""The runner that ends a stopped run as a normal result."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

from agents import (
    Agent,
    AgentsException,
    MaxTurnsExceeded,
    ModelResponse,
    RunConfig,
    RunContextWrapper,
    RunErrorDetails,
    RunHooks,
    RunItem,
    Runner,
    RunResult,
    RunResultStreaming,
    RunState,
    TResponseInputItem,
)
from agents.items import ItemHelpers
from agents.run import (
    DEFAULT_MAX_TURNS,
    AgentRunner,
    get_default_agent_runner,
    set_default_agent_runner,
)
from agents.run_internal.run_steps import NextStepRunAgain
from agents.stream_events import RunItemStreamEvent, StreamEvent

from budgetguard_core import (
    AdapterError,
    Budget,
    Guard,
    Mode,
    Outcome,
    StopReason,
    Trip,
    Violation,
    end_run,
    synthetic_metadata,
    synthetic_text,
)
from budgetguard_openai_agents._history import (
    SyntheticMessage,
    closing_items,
    new_for_session,
    part,
    synthetic_message,
)
from budgetguard_openai_agents._settings import BoundedSettings, bounded_config, config_of
from budgetguard_openai_agents.hooks import ACTIVE, BudgetHooks, Meter, RunStopped, is_gate

# After the deadline, a sub-agent's own calls end first, then the sub-agent, then the run.
_GRACE = 0.15
_GRACE_BELOW = 0.05
_RESUME = (
    "Run the agent again under a fresh budget, with the same session or conversation, with "
    "result.to_input_list(), or with result.to_state()."
)


async def bounded_run(
    agent: Agent[Any],
    input: str | list[TResponseInputItem] | RunState[Any],  # noqa: A002 - the SDK's name
    *,
    budget: Budget | Guard,
    hooks: RunHooks[Any] | None = None,
    **options: Any,
) -> RunResult:
    """Run an agent within a budget: `Runner.run` that ends as a normal result when it is stopped.

    Args:
        agent: The agent to start with.
        input: What the user says, a history, or a `RunState` to go on from.
        budget: A `Budget` (a fresh guard for this run) or a `Guard` (shared by reference).
        hooks: Your own run hooks, or `BudgetHooks` with more options for the same budget.
        options: Whatever else `Runner.run` takes.

    Returns:
        The result; `outcome(result)` says how it ended.
    """
    return await Runner.run(agent, input, hooks=_hooks(budget, hooks), **_lifted(options))


def bounded_run_sync(
    agent: Agent[Any],
    input: str | list[TResponseInputItem] | RunState[Any],  # noqa: A002 - the SDK's name
    *,
    budget: Budget | Guard,
    hooks: RunHooks[Any] | None = None,
    **options: Any,
) -> RunResult:
    """Do what `bounded_run` does, where there is no event loop."""
    return Runner.run_sync(agent, input, hooks=_hooks(budget, hooks), **_lifted(options))


def bounded_run_streamed(
    agent: Agent[Any],
    input: str | list[TResponseInputItem] | RunState[Any],  # noqa: A002 - the SDK's name
    *,
    budget: Budget | Guard,
    hooks: RunHooks[Any] | None = None,
    **options: Any,
) -> RunResultStreaming:
    """Do what `bounded_run` does, streamed. The synthetic last message is an event like any other.

    A consumer that leaves `stream_events` early cancels the run.
    """
    return Runner.run_streamed(agent, input, hooks=_hooks(budget, hooks), **_lifted(options))


def outcome(result: RunResult | RunResultStreaming) -> Outcome:
    """Return how a run ended: status, stop reason, use, messages, how to go on.

    Raises:
        AdapterError: The run had no budget, is not over yet, or failed or was cancelled.
    """
    found = result.__dict__.get("_budgetguard_outcome")
    if not isinstance(found, Outcome):
        raise AdapterError(
            "outcome needs the result of a run that had a budget and is over, got one without. "
            "Consume stream_events() first, or run the agent with BudgetHooks."
        )
    return found


def unsent_input(result: RunResult | RunResultStreaming) -> list[TResponseInputItem]:
    """List what a conversation kept by the server has not seen yet of a run that was stopped.

    With `conversation_id` or `previous_response_id` the server waits for the results of the last
    tool calls; send them before the user's next words:
    `Runner.run(agent, unsent_input(result) + [message], conversation_id=...)`.
    """
    unsent: list[TResponseInputItem] = []
    for item in reversed(result.new_items):
        if isinstance(item, SyntheticMessage):
            continue
        if item.type not in ("tool_call_output_item", "handoff_output_item"):
            break
        unsent.insert(0, item.to_input_item())
    return unsent


def install() -> None:
    """Have runs with a budget end normally. Runs without one go to the runner there was before."""
    current = get_default_agent_runner()
    if not isinstance(current, BudgetRunner):
        set_default_agent_runner(BudgetRunner(current))


class BudgetRunner(AgentRunner):
    """Wraps the runner there was before; does nothing but pass on where no budget is active."""

    def __init__(self, previous: AgentRunner) -> None:
        self._previous = previous

    async def run(self, starting_agent: Agent[Any], input: Any, **options: Any) -> RunResult:  # noqa: A002
        """Run, and turn a stop into a result."""
        meter = _bind(starting_agent, input, options)
        if meter is None:
            return await self._previous.run(starting_agent, input, **options)
        active = ACTIVE.set(meter)
        try:
            work = asyncio.create_task(self._previous.run(starting_agent, input, **options))
        finally:
            ACTIVE.reset(active)
        try:
            trip, data = await _ended(meter, work)
        except BaseException as error:
            _failed(meter, error)
            raise
        session = options.get("session")
        if trip is None:
            result = work.result()
            _hide_gates(result)
            meter.end_batch()
            if meter.stopping is None or result.interruptions:
                await _conclude(meter, None, result, result.final_output)
                return result
            # The agent ended with a tool's result, and it was that of a refused call.
            trip, data = meter.stopping, _data_of(result)
        result, closing = _partial_result(meter, trip, data, input, options)
        await _store(meter, session, closing)
        await _conclude(meter, trip, result, result.final_output)
        return result

    def run_sync(self, starting_agent: Agent[Any], input: Any, **options: Any) -> RunResult:  # noqa: A002
        """Run in an event loop of its own."""
        if isinstance(options.get("hooks"), BudgetHooks) or ACTIVE.get() is not None:
            return super().run_sync(starting_agent, input, **options)
        return self._previous.run_sync(starting_agent, input, **options)

    def run_streamed(
        self,
        starting_agent: Agent[Any],
        input: Any,  # noqa: A002
        **options: Any,
    ) -> RunResultStreaming:
        """Run in the background, and turn a stop into the end of the stream."""
        meter = _bind(starting_agent, input, options)
        if meter is None:
            return self._previous.run_streamed(starting_agent, input, **options)
        active = ACTIVE.set(meter)
        try:
            result = self._previous.run_streamed(starting_agent, input, **options)
        finally:
            ACTIVE.reset(active)
        _Stream(meter, result, input, options.get("session"))
        return result


class _Stream:
    """The end of a streamed run, in place of the SDK's task and of its events."""

    def __init__(
        self,
        meter: Meter,
        result: RunResultStreaming,
        given: Any,
        session: Any,
    ) -> None:
        self._meter = meter
        self._result = result
        self._given = given
        self._session = session
        self._work = cast("asyncio.Task[Any]", result.run_loop_task)
        self._events = result.stream_events
        self._closing: list[RunItem] = []
        # The consumer's side raises by itself when it sees the turns used up; the run does too.
        result._max_turns_handled = True  # noqa: SLF001 - there is no other way to have one ending
        result.run_loop_task = asyncio.create_task(self._run())
        # A task that is cancelled before its first step never comes to pass it on.
        result.run_loop_task.add_done_callback(lambda _: self._work.cancel())
        cast("Any", result).stream_events = self._stream

    async def _run(self) -> None:
        meter, result = self._meter, self._result
        try:
            trip, data = await _ended(meter, self._work)
        except BaseException as error:
            _failed(meter, error)
            raise
        _hide_gates(result)
        meter.end_batch()
        cancelled = getattr(result, "_cancel_mode", "none") != "none"
        if trip is None and (meter.stopping is None or result.interruptions or cancelled):
            await _conclude(meter, None, result, result.final_output)
            return
        await self._close(trip or cast("Trip", meter.stopping), data)

    async def _close(self, trip: Trip, data: RunErrorDetails | None) -> None:
        meter, result = self._meter, self._result
        items = result.new_items
        waiting = [item for item in items if item.type == "tool_approval_item"]
        for item in waiting:
            items.remove(item)
        closing = closing_items(meter.turns[-1:], items, result.raw_responses)
        text = _text(meter, [*items, *closing])
        closing.append(
            synthetic_message(result.last_agent, text, synthetic_metadata(meter.guard, trip))
        )
        items.extend(closing)
        result._model_input_items.extend(closing)  # noqa: SLF001 - to_state() reads them there
        if meter.turns and not any(one is meter.turns[-1].response for one in result.raw_responses):
            result.raw_responses = [*result.raw_responses, meter.turns[-1].response]
        result.final_output = text
        result.is_complete = True
        state = getattr(result, "_state", None)
        if state is not None:
            state._current_step = NextStepRunAgain()  # noqa: SLF001 - as the SDK does between turns
        self._closing = [item for item in closing if item.type != "tool_call_item"]
        await _store(meter, self._session, closing, self._unsaved_input())
        await _conclude(meter, trip, result, text)

    def _unsaved_input(self) -> list[TResponseInputItem]:
        """List the user's words, where the run was stopped before the SDK saved them."""
        result = self._result
        if self._session is None or isinstance(self._given, RunState):
            return []
        if result._stream_input_persisted:  # noqa: SLF001
            return []
        return ItemHelpers.input_to_new_input_list(self._given)

    async def _stream(self) -> AsyncIterator[StreamEvent]:
        events = self._events()
        left = True
        try:
            async for event in events:
                yield event
            left = False
        finally:
            if left and not self._work.done():
                self._result.cancel()
            await cast("Any", events).aclose()
        closing, self._closing = self._closing, []
        for item in closing:
            name: Any = "tool_output" if item.type.endswith("output_item") else ""
            if item.type == "message_output_item":
                name = "message_output_created"
            if name:
                yield RunItemStreamEvent(name=name, item=item)


def _hooks(budget: Budget | Guard, hooks: RunHooks[Any] | None) -> BudgetHooks:
    if isinstance(hooks, BudgetHooks) and hooks.budget is budget:
        return hooks
    return BudgetHooks(budget, hooks)


def _lifted(options: dict[str, Any]) -> dict[str, Any]:
    return {"max_turns": None, **options}


def _bind(agent: Agent[Any], given: Any, options: dict[str, Any]) -> Meter | None:
    """Make the hooks of a run and put them into its options; None when nothing bounds it."""
    hooks, above = options.get("hooks"), ACTIVE.get()
    if isinstance(hooks, BudgetHooks):
        guard = hooks.guard_below(None if above is None else above.guard)
        config, inner = hooks, hooks.inner
    elif above is not None:
        guard, config, inner = above.guard.child(), None, hooks
    else:
        return None
    run_config = config_of(options.get("run_config")) or RunConfig()
    if isinstance(run_config.model_settings, BoundedSettings):
        run_config = replace(run_config, model_settings=run_config.model_settings.base)
    state = given if isinstance(given, RunState) else None
    if state is not None and state._current_agent is not None:  # noqa: SLF001
        agent = state._current_agent  # noqa: SLF001
    elif state is None and _is_user_turn(given) and config is not None:
        guard.user_turn()
    meter = Meter(
        guard,
        config,
        inner,
        agent,
        run_config,
        server_side=bool(
            options.get("conversation_id")
            or options.get("previous_response_id")
            or options.get("auto_previous_response_id")
        ),
    )
    options["hooks"] = meter
    if _bounds_calls(meter):
        options["run_config"] = bounded_config(options.get("run_config"), meter)
    if _has_cap(guard):
        if options.get("max_turns", DEFAULT_MAX_TURNS) == DEFAULT_MAX_TURNS:
            options["max_turns"] = None
        if state is not None and state._max_turns == DEFAULT_MAX_TURNS:  # noqa: SLF001
            state._max_turns = None  # noqa: SLF001
    return meter


def _bounds_calls(meter: Meter) -> bool:
    return meter.guard.mode is not Mode.OFF


def _has_cap(guard: Guard | None) -> bool:
    while guard is not None:
        if guard.mode is Mode.ENFORCE and guard.budget.caps():
            return True
        guard = guard.parent
    return False


def _is_user_turn(given: Any) -> bool:
    if isinstance(given, str):
        return True
    last = cast("list[Any]", given)[-1:]
    return bool(last) and part(last[0], "role") == "user"


async def _ended(
    meter: Meter, work: asyncio.Task[Any]
) -> tuple[Trip | None, RunErrorDetails | None]:
    """Wait for a run's work and tell how it ended; what is not ours to end is raised."""
    grace = _GRACE if meter.guard.parent is None else _GRACE_BELOW
    trip = await meter.supervise(work, grace)
    if trip is not None:
        meter.cut()
        error = None if not work.done() or work.cancelled() else work.exception()
        data = error.run_data if isinstance(error, AgentsException) else None
        if work.done() and not work.cancelled() and error is None and meter.stopping is None:
            # It came to its end after all while it was being cancelled: a paid answer is kept.
            return None, None
        return trip, data
    if work.cancelled():
        raise asyncio.CancelledError
    error = work.exception()
    if error is None:
        return None, None
    meter.settle_failed(error)
    trip = _trip_of(meter, error)
    if trip is None:
        raise error
    meter.end_batch(error)
    return trip, error.run_data if isinstance(error, AgentsException) else None


def _trip_of(meter: Meter, error: BaseException) -> Trip | None:
    """Tell why the run was stopped, if that is what its exception says."""
    if isinstance(error, MaxTurnsExceeded):
        violation = Violation(reason=StopReason.FRAMEWORK_LIMIT, detail=str(error))
        return Trip(
            reason=violation.reason, violations=(violation,), run_id=meter.guard.run_id
        )
    if meter.stopping is not None and (
        (isinstance(error, RunStopped) and error.trip is meter.stopping)
        # The call's last failure, after which the budget had no place for another attempt.
        or not isinstance(error, RunStopped)
    ):
        return meter.stopping
    if type(error).__name__ == "ModelTimeoutError":
        return meter.guard.check()
    return None


def _failed(meter: Meter, error: BaseException) -> None:
    meter.settle_failed(error)
    meter.end_batch(error)


def _partial_result(
    meter: Meter,
    trip: Trip,
    data: RunErrorDetails | None,
    given: Any,
    options: dict[str, Any],
) -> tuple[RunResult, list[RunItem]]:
    """Build the result of a stopped run, and list the items that the SDK did not know."""
    turns = meter.turns[-1:]
    if data is None:
        data = _data_from(meter, given, options)
        closing = closing_items(meter.turns, [], [])
        last = closing_items(turns, [], [])
    else:
        closing = last = closing_items(turns, data.new_items, data.raw_responses)
    items = [item for item in data.new_items if item.type != "tool_approval_item"]
    responses = list(data.raw_responses)
    for turn in meter.turns:
        if not any(turn.response is response for response in responses):
            responses.append(turn.response)
    text = _text(meter, [*items, *closing])
    message = synthetic_message(data.last_agent, text, synthetic_metadata(meter.guard, trip))
    result = _result(data, [*items, *closing, message], responses, text, options)
    return result, [*last, message]


def _result(
    data: RunErrorDetails,
    items: list[RunItem],
    responses: list[ModelResponse],
    text: str,
    options: dict[str, Any],
) -> RunResult:
    result = RunResult(
        input=data.input,
        new_items=items,
        raw_responses=responses,
        final_output=text,
        input_guardrail_results=data.input_guardrail_results,
        output_guardrail_results=data.output_guardrail_results,
        tool_input_guardrail_results=data.tool_input_guardrail_results,
        tool_output_guardrail_results=data.tool_output_guardrail_results,
        context_wrapper=data.context_wrapper,
        _last_agent=data.last_agent,
        max_turns=options.get("max_turns"),
    )
    _hide_gates(result)
    # What to_state() goes on from; the SDK sets the same on the results that it builds.
    result._model_input_items = list(items)  # noqa: SLF001
    result._current_turn = len(responses)  # noqa: SLF001
    result._original_input = copy.copy(data.input)  # noqa: SLF001
    cast("Any", result)._current_step_for_state = NextStepRunAgain()
    result._conversation_id = options.get("conversation_id")  # noqa: SLF001
    if options.get("previous_response_id") or options.get("auto_previous_response_id"):
        result._previous_response_id = result.last_response_id  # noqa: SLF001
        result._auto_previous_response_id = bool(options.get("auto_previous_response_id"))  # noqa: SLF001
    return result


def _data_of(result: RunResult) -> RunErrorDetails:
    return RunErrorDetails(
        input=result.input,
        new_items=result.new_items,
        raw_responses=result.raw_responses,
        last_agent=result.last_agent,
        context_wrapper=result.context_wrapper,
        input_guardrail_results=result.input_guardrail_results,
        output_guardrail_results=result.output_guardrail_results,
        tool_input_guardrail_results=result.tool_input_guardrail_results,
        tool_output_guardrail_results=result.tool_output_guardrail_results,
    )


def _data_from(meter: Meter, given: Any, options: dict[str, Any]) -> RunErrorDetails:
    """Rebuild what a cancelled run takes with it from what its hooks saw."""
    sent: Any = meter.first_input
    if sent is None:
        sent = _history_of(given) if isinstance(given, RunState) else given
    return RunErrorDetails(
        input=sent,
        new_items=[],
        raw_responses=[],
        last_agent=meter.agent,
        context_wrapper=meter.context or RunContextWrapper(context=options.get("context")),
        input_guardrail_results=[],
        output_guardrail_results=[],
    )


def _history_of(state: RunState[Any]) -> list[TResponseInputItem]:
    items = [one for one in state._generated_items if one.type != "tool_approval_item"]  # noqa: SLF001
    items += closing_items([], items, [])
    before = ItemHelpers.input_to_new_input_list(state._original_input)  # noqa: SLF001
    return [*before, *(item.to_input_item() for item in items)]


def _text(meter: Meter, items: Sequence[RunItem]) -> str:
    """Write the synthetic message; a run above gets what its sub-agent had said so far with it."""
    text = synthetic_text(meter.guard)
    if meter.guard.parent is None:
        return text
    said = ItemHelpers.text_message_outputs(list(items))
    return f"{said}\n\n{text}" if said else text


def _hide_gates(result: RunResult | RunResultStreaming) -> None:
    results = result.tool_input_guardrail_results
    if results:
        result.tool_input_guardrail_results = [
            one for one in results if not is_gate(one.guardrail)
        ]


async def _store(
    meter: Meter,
    session: Any,
    closing: Sequence[RunItem],
    unsaved: Sequence[TResponseInputItem] = (),
) -> None:
    """Add to the user's session what the run was stopped before."""
    if session is None:
        return
    try:
        stored = await session.get_items(limit=2 * len(closing) + 8)
        await session.add_items([*unsaved, *new_for_session(closing, stored)])
    except Exception as error:  # noqa: BLE001 - a session that fails must not hide the result
        meter.guard.report(f"session: {type(error).__name__}: {error}")


async def _conclude(
    meter: Meter,
    trip: Trip | None,
    result: RunResult | RunResultStreaming,
    final: Any,
) -> None:
    """End the run in the engine's order, and put the outcome where `outcome` finds it."""
    store = None if meter.config is None else meter.config.store
    messages = result.to_input_list()

    def end() -> Outcome:
        return end_run(
            meter.guard,
            trip=trip,
            messages=messages,
            final=final,
            store=store,
            next_step=None if trip is None else "call the model",
            resume=None if trip is None else _RESUME,
        )

    if trip is None and store is None:
        found = end()
    else:
        found = await asyncio.to_thread(end)
    result.__dict__["_budgetguard_outcome"] = found
    if trip is not None and meter.config is not None and meter.config.on_trip == "raise":
        raise RunStopped(trip, found)


