"""Runs within a budget."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ItemHelpers,
    RunHooks,
    Runner,
    RunResult,
    RunResultStreaming,
    RunState,
    TResponseInputItem,
)

from budgetguard_core import AdapterError, Budget, Guard, Outcome
from budgetguard_core.kit import Envelope, EnvelopeOptions, outcome_of, part
from budgetguard_core.kit import outcome as kit_outcome
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents.hooks import BudgetHooks

_OF_THE_BUDGET = frozenset({*EnvelopeOptions.__annotations__, "resume"})


async def bounded_run(
    agent: Agent[Any],
    input: str | list[TResponseInputItem] | RunState[Any],  # noqa: A002 - the SDK's name
    *,
    budget: Budget | Guard | Envelope | None = None,
    hooks: RunHooks[Any] | None = None,
    **options: Any,
) -> RunResult:
    """Run an agent within a budget: `Runner.run` that ends as a normal result when it is stopped.

    Args:
        agent: The agent to start with.
        input: What the user says, a history, or a `RunState` to go on from.
        budget: A `Budget` (a fresh guard for this run), a `Guard` (shared by reference), or an
            `Envelope`.
        hooks: Your own run hooks, or `BudgetHooks` with more options for the same budget.
        options: `resume` and the options of `BudgetHooks`, and whatever else `Runner.run` takes.
            `max_turns` is None unless you give it.

    Returns:
        The result; `outcome(result)` says how the run ended.
    """
    hooks, rest = _hooks(budget, hooks, options)
    return await Runner.run(agent, input, hooks=hooks, **rest)


def bounded_run_sync(
    agent: Agent[Any],
    input: str | list[TResponseInputItem] | RunState[Any],  # noqa: A002 - the SDK's name
    *,
    budget: Budget | Guard | Envelope | None = None,
    hooks: RunHooks[Any] | None = None,
    **options: Any,
) -> RunResult:
    """Do what `bounded_run` does, where there is no event loop."""
    hooks, rest = _hooks(budget, hooks, options)
    return Runner.run_sync(agent, input, hooks=hooks, **rest)


def bounded_run_streamed(
    agent: Agent[Any],
    input: str | list[TResponseInputItem] | RunState[Any],  # noqa: A002 - the SDK's name
    *,
    budget: Budget | Guard | Envelope | None = None,
    hooks: RunHooks[Any] | None = None,
    **options: Any,
) -> RunResultStreaming:
    """Do what `bounded_run` does, streamed. The synthetic last message is an event like any other.

    A consumer that leaves `stream_events()` early cancels the run.
    """
    hooks, rest = _hooks(budget, hooks, options)
    return Runner.run_streamed(agent, input, hooks=hooks, **rest)


def outcome(result: RunResult | RunResultStreaming | BaseException | Outcome) -> Outcome:
    """Return how a run ended: status, stop reason, use, messages, how to go on.

    Args:
        result: What the run returned, a stream that was cancelled included, or the exception that
            left it; an outcome is returned as it is.

    Raises:
        AdapterError: The run had no budget, or is not over yet.
    """
    if not isinstance(result, RunResult | RunResultStreaming):
        return kit_outcome(result)
    found = outcome_of(result)
    if found is None:
        raise AdapterError(
            "outcome needs the result of a run that had a budget and is over, got one without. "
            "Consume stream_events() first, or run the agent with BudgetHooks."
        )
    messages = tuple(result.to_input_list())
    return found.model_copy(update={"messages": messages, "final": result.final_output})


def unsent_input(result: RunResult | RunResultStreaming) -> list[TResponseInputItem]:
    """List what a conversation that the server keeps has not seen yet of a run that was stopped.

    With `conversation_id` or `previous_response_id` the server waits for the results of the last
    tool calls; send them before the user's next words:
    `Runner.run(agent, [*unsent_input(result), message], conversation_id=...)`. Of a run that was
    stopped before its model answered, it is all that the run was given.
    """
    unsent: list[TResponseInputItem] = []
    waiting: set[Any] = set()
    if result.raw_responses:
        output = result.raw_responses[-1].output
        waiting = {_id_of(raw) for raw in output if not _is_answer(raw)}
        waiting -= {_id_of(raw) for raw in output if _is_answer(raw)}
    for item in reversed(result.new_items):
        raw = item.raw_item
        if part(raw, "id") == _seams.NO_ID:
            continue  # a synthetic message, of this run or of the one that it went on from
        if item.type != "input_item" and not (_is_answer(raw) and _id_of(raw) in waiting):
            break
        unsent.insert(0, item.to_input_item())
    given = () if result.raw_responses else ItemHelpers.input_to_new_input_list(result.input)
    return [*given, *unsent]


def _is_answer(raw: Any) -> bool:
    """Return whether an item is the result of a call, or what was said to the request for one."""
    return str(part(raw, "type")).endswith(("_output", "_response"))


def _id_of(raw: Any) -> Any:
    return part(raw, "call_id") or part(raw, "approval_request_id") or part(raw, "id")


def _hooks(
    budget: Budget | Guard | Envelope | None, hooks: RunHooks[Any] | None, options: dict[str, Any]
) -> tuple[BudgetHooks, dict[str, Any]]:
    own: dict[str, Any] = {n: v for n, v in options.items() if n in _OF_THE_BUDGET}
    rest = {n: v for n, v in options.items() if n not in _OF_THE_BUDGET}
    if isinstance(hooks, BudgetHooks) and not own and hooks.envelope.budget is budget:
        own, budget = {"resume": hooks.resume}, hooks.envelope
    bounded = BudgetHooks(budget, hooks, **own)
    bounded.keeps_max_turns = "max_turns" in rest
    return bounded, {"max_turns": None, **rest}
