"""The SDK's private fields, read and set here alone, because it offers no other way."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from agents import Agent, RunItem, TResponseInputItem
from agents.items import ItemHelpers
from agents.run import DEFAULT_MAX_TURNS
from agents.run_internal.run_steps import NextStepRunAgain

from budgetguard_openai_agents._history import part


def take_over_turns(streamed: Any) -> None:
    """Have only the run itself report that its turns are used up, not the consumer's side too."""
    streamed._max_turns_handled = True


def ran_out_of_turns(streamed: Any) -> bool:
    """Tell whether a streamed run ended because of `max_turns`; it says so nowhere else."""
    return (
        streamed.max_turns is not None
        and streamed.current_turn > streamed.max_turns
        and streamed.final_output is None
    )


def is_cancelled(streamed: Any) -> bool:
    """Tell whether the consumer cancelled a streamed run."""
    return getattr(streamed, "_cancel_mode", "none") != "none"


def input_is_saved(streamed: Any) -> bool:
    """Tell whether the user's words are in the session already."""
    return bool(streamed._stream_input_persisted)


def extend_streamed(streamed: Any, items: Sequence[RunItem]) -> None:
    """Add items to a streamed result as the SDK does after a turn, so that `to_state` works."""
    streamed.new_items.extend(items)
    streamed._model_input_items.extend(items)
    if streamed._state is not None:
        streamed._state._current_step = NextStepRunAgain()


def complete_result(result: Any, options: dict[str, Any]) -> None:
    """Set what `to_state` goes on from, as the SDK does on the results that it builds."""
    result._model_input_items = list(result.new_items)
    result._current_turn = len(result.raw_responses)
    result._original_input = copy.copy(result.input)
    result._current_step_for_state = NextStepRunAgain()
    result._conversation_id = options.get("conversation_id")
    if options.get("previous_response_id") or options.get("auto_previous_response_id"):
        result._previous_response_id = result.last_response_id
        result._auto_previous_response_id = bool(options.get("auto_previous_response_id"))


def agent_of(state: Any, starting_agent: Agent[Any]) -> Agent[Any]:
    """Return the agent that a run goes on with."""
    agent: Agent[Any] | None = state._current_agent
    return starting_agent if agent is None else agent


def approved_calls(state: Any, agent: Agent[Any]) -> list[Any]:
    """List the calls of an agent that were approved and run first when a run goes on."""
    return [
        item.raw_item
        for item in state.get_interruptions()
        if item.agent is agent
        and item.tool_name is not None
        and state._context.get_approval_status(
            item.tool_name, part(item.raw_item, "call_id"), existing_pending=item
        )
    ]


def lift_turns(state: Any) -> None:
    """Lift the SDK's default number of turns from a run that goes on."""
    if state._max_turns == DEFAULT_MAX_TURNS:
        state._max_turns = None


def input_of(state: Any) -> list[TResponseInputItem]:
    """Return what a run that goes on was given."""
    return ItemHelpers.input_to_new_input_list(state._original_input)


def items_of(state: Any) -> list[RunItem]:
    """Return what a run that goes on has brought so far."""
    return list(state._generated_items)
