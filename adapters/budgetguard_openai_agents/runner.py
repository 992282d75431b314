"""Runs within a budget, and the runner that ends a stopped run as a normal result."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

from agents import (
    Agent,
    RunConfig,
    RunErrorDetails,
    RunHooks,
    Runner,
    RunResult,
    RunResultStreaming,
    RunState,
    TResponseInputItem,
)
from agents.run import (
    DEFAULT_MAX_TURNS,
    AgentRunner,
    get_default_agent_runner,
    set_default_agent_runner,
)

from budgetguard_core import AdapterError, Budget, Guard, Mode, Outcome
from budgetguard_openai_agents import _internals
from budgetguard_openai_agents._ending import (
    OUTCOME,
    conclude,
    hide_gates,
    partial_result,
    store_in_session,
)
from budgetguard_openai_agents._history import SyntheticMessage, part
from budgetguard_openai_agents._meter import ACTIVE, Meter
from budgetguard_openai_agents._settings import BoundedSettings, bounded_config, config_of
from budgetguard_openai_agents._stream import StreamEnding
from budgetguard_openai_agents.hooks import BudgetHooks, below, release


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
        options: Whatever else `Runner.run` takes. `max_turns` is None unless you give it.

    Returns:
        The result; `outcome(result)` says how the run ended.
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

    A consumer that leaves `stream_events()` early cancels the run.
    """
    return Runner.run_streamed(agent, input, hooks=_hooks(budget, hooks), **_lifted(options))


def outcome(result: RunResult | RunResultStreaming) -> Outcome:
    """Return how a run ended: status, stop reason, use, messages, how to go on.

    Raises:
        AdapterError: The run had no budget, is not over yet, or failed or was cancelled.
    """
    found = getattr(result, OUTCOME, None)
    if not isinstance(found, Outcome):
        raise AdapterError(
            "outcome needs the result of a run that had a budget and is over, got one without. "
            "Consume stream_events() first, or run the agent with BudgetHooks."
        )
    return found


def unsent_input(result: RunResult | RunResultStreaming) -> list[TResponseInputItem]:
    """List what a conversation that the server keeps has not seen yet of a run that was stopped.

    With `conversation_id` or `previous_response_id` the server waits for the results of the last
    tool calls; send them before the user's next words:
    `Runner.run(agent, [*unsent_input(result), message], conversation_id=...)`.
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
    """Wraps the runner there was before; only passes on where no budget is active."""

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
        known: RunErrorDetails | RunResult | None
        trip, known = await meter.ended(work)
        if trip is None:
            result = work.result()
            hide_gates(result)
            if meter.stopping is None or result.interruptions:
                await conclude(meter, None, result)
                return result
            # The agent ended with a tool's result, and it was that of a refused call.
            trip, known = meter.stopping, result
        result, closing = partial_result(meter, trip, known, input, options)
        await store_in_session(meter, options.get("session"), closing)
        await conclude(meter, trip, result)
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
        except BaseException:
            release(meter.guard)
            raise
        finally:
            ACTIVE.reset(active)
        StreamEnding(meter, result, input, options.get("session"))
        return result


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
        guard, config, inner = below(above.guard), None, hooks
    else:
        return None
    if isinstance(given, RunState):
        agent = _internals.agent_of(given, agent)
    elif config is not None and _is_user_turn(given):
        guard.user_turn()
    meter = Meter(
        guard,
        config,
        inner,
        agent,
        _own_config(options.get("run_config")),
        server_side=any(
            options.get(name)
            for name in ("conversation_id", "previous_response_id", "auto_previous_response_id")
        ),
    )
    if isinstance(given, RunState):
        meter.go_on(_internals.approved_calls(given, agent))
    options["hooks"] = meter
    if guard.mode is not Mode.OFF:
        options["run_config"] = bounded_config(options.get("run_config"), meter)
    if _has_cap(guard):
        if options.get("max_turns", DEFAULT_MAX_TURNS) == DEFAULT_MAX_TURNS:
            options["max_turns"] = None
        if isinstance(given, RunState):
            _internals.lift_turns(given)
    return meter


def _own_config(given: RunConfig | dict[str, Any] | None) -> RunConfig:
    config = config_of(given) or RunConfig()
    if isinstance(config.model_settings, BoundedSettings):
        return replace(config, model_settings=config.model_settings.base)
    return config


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
