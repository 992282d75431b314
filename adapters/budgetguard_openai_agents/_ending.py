"""What the SDK would have returned, built for a run that was stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agents import (
    ItemHelpers,
    RunContextWrapper,
    RunErrorDetails,
    RunItem,
    RunResult,
    RunResultStreaming,
    RunState,
    TResponseInputItem,
)

from budgetguard_core import Outcome, Trip, end_run, synthetic_metadata, synthetic_text
from budgetguard_openai_agents import _internals
from budgetguard_openai_agents._history import (
    SyntheticMessage,
    closing_items,
    new_for_session,
    synthetic_message,
)
from budgetguard_openai_agents._meter import Meter, RunStopped, is_gate

OUTCOME = "_budgetguard_outcome"
_RESUME = (
    "Run the agent again under a fresh budget, with the same session or conversation, with "
    "result.to_input_list(), or with result.to_state()."
)


def partial_result(
    meter: Meter,
    trip: Trip,
    data: RunErrorDetails | RunResult | None,
    given: Any,
    options: dict[str, Any],
) -> tuple[RunResult, list[RunItem]]:
    """Build the result of a stopped run.

    Args:
        meter: The hooks of the run.
        trip: Why it was stopped.
        data: What the SDK knows of it, None when its work was cancelled.
        given: The input of the run.
        options: Its options.

    Returns:
        The result, and its last items, which the user's session may not have.
    """
    turns = meter.turns[-1:]
    if data is None:
        data = _data_from(meter, given, options)
        closing = closing_items(meter.turns, [], [])
        last = closing_items(turns, [], [])
    else:
        closing = last = closing_items(turns, data.new_items, data.raw_responses, meter.resumed)
    items = [item for item in data.new_items if item.type != "tool_approval_item"]
    responses = list(data.raw_responses)
    for turn in meter.turns:
        if not any(turn.response is response for response in responses):
            responses.append(turn.response)
    message = last_message(meter, trip, data.last_agent, [*items, *closing])
    result = RunResult(
        input=data.input,
        new_items=[*items, *closing, message],
        raw_responses=responses,
        final_output=_text_of(message),
        input_guardrail_results=data.input_guardrail_results,
        output_guardrail_results=data.output_guardrail_results,
        # Older versions do not report these of a run that failed.
        tool_input_guardrail_results=getattr(data, "tool_input_guardrail_results", []),
        tool_output_guardrail_results=getattr(data, "tool_output_guardrail_results", []),
        context_wrapper=data.context_wrapper,
        _last_agent=data.last_agent,
        max_turns=options.get("max_turns"),
    )
    hide_gates(result)
    _internals.complete_result(result, options)
    return result, [*last, message]


def close_streamed(meter: Meter, trip: Trip, result: RunResultStreaming) -> list[RunItem]:
    """Give a streamed result its end; return the items that were added."""
    for item in [one for one in result.new_items if one.type == "tool_approval_item"]:
        result.new_items.remove(item)
    closing = closing_items(meter.turns[-1:], result.new_items, result.raw_responses, meter.resumed)
    message = last_message(meter, trip, result.last_agent, [*result.new_items, *closing])
    closing.append(message)
    _internals.extend_streamed(result, closing)
    if meter.turns and not any(one is meter.turns[-1].response for one in result.raw_responses):
        result.raw_responses = [*result.raw_responses, meter.turns[-1].response]
    result.final_output = _text_of(message)
    result.is_complete = True
    return closing


def last_message(meter: Meter, trip: Trip, agent: Any, items: list[RunItem]) -> SyntheticMessage:
    """Make the synthetic message; a run above also gets what its sub-agent had said so far."""
    text = synthetic_text(meter.guard)
    if meter.guard.parent is not None:
        said = ItemHelpers.text_message_outputs(items)
        text = f"{said}\n\n{text}" if said else text
    return synthetic_message(agent, text, synthetic_metadata(meter.guard, trip))


def hide_gates(result: RunResult | RunResultStreaming) -> None:
    """Take what our gates reported out of a result: they are not the user's guardrails."""
    results = result.tool_input_guardrail_results
    if results:
        result.tool_input_guardrail_results = [one for one in results if not is_gate(one.guardrail)]


async def store_in_session(
    meter: Meter,
    session: Any,
    closing: Sequence[RunItem],
    unsaved: Sequence[TResponseInputItem] = (),
) -> None:
    """Add to the user's session what the run was stopped before adding."""
    if session is None:
        return
    try:
        stored = await session.get_items(limit=2 * len(closing) + 8)
        await session.add_items([*unsaved, *new_for_session(closing, stored)])
    except Exception as error:
        meter.guard.report(f"session: {type(error).__name__}: {error}")


async def conclude(meter: Meter, trip: Trip | None, result: RunResult | RunResultStreaming) -> None:
    """End the run in the engine's order, and put the outcome where `outcome` finds it."""
    config = meter.config
    store = None if config is None else config.store
    messages = result.to_input_list()

    def end() -> Outcome:
        return end_run(
            meter.guard,
            trip=trip,
            messages=messages,
            final=result.final_output,
            store=store,
            next_step=None if trip is None else "call the model",
            resume=None if trip is None else _RESUME,
        )

    if trip is None and store is None:
        found = end()
    else:
        found = await asyncio.to_thread(end)
    setattr(result, OUTCOME, found)
    if trip is not None and config is not None and config.on_trip == "raise":
        raise RunStopped(trip, found)


def _data_from(meter: Meter, given: Any, options: dict[str, Any]) -> RunErrorDetails:
    """Rebuild what a cancelled run takes with it from what its hooks saw."""
    sent: Any = meter.first_input
    if sent is None:
        sent = _history_of(given, meter) if isinstance(given, RunState) else given
    return RunErrorDetails(
        input=sent,
        new_items=[],
        raw_responses=[],
        last_agent=meter.agent,
        context_wrapper=meter.context or RunContextWrapper(context=options.get("context")),
        input_guardrail_results=[],
        output_guardrail_results=[],
    )


def _history_of(state: Any, meter: Meter) -> list[TResponseInputItem]:
    items = _internals.items_of(state)
    items += closing_items([], items, [], meter.resumed)
    history = [one.to_input_item() for one in items if one.type != "tool_approval_item"]
    return [*_internals.input_of(state), *history]


def _text_of(message: SyntheticMessage) -> str:
    return ItemHelpers.text_message_output(message)
