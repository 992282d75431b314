"""Every private name of the SDK that the adapter touches, and what it needs of each release."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import agents
import agents.result
import agents.run
import agents.tool
from agents.agent import AgentBase
from agents.items import ItemHelpers
from agents.models.fake_id import FAKE_RESPONSES_ID
from agents.run_internal import error_handlers, run_loop, run_steps
from agents.version import __version__

from budgetguard_core import AdapterError
from budgetguard_core.kit import part

LOOP = run_loop
"""The module whose `get_model` finds the model of each turn."""
NO_ID = FAKE_RESPONSES_ID
"""The id of a message that no provider has given one: the SDK sends it to none."""
_SUPPORTED = "openai-agents>=0.22.3,<1"

_SENTINEL: Any = getattr(agents.result, "QueueCompleteSentinel", None)

NEEDED: dict[Any, str] = {
    run_loop: "get_model",
    run_steps: "NextStepRunAgain",
    agents.run: "DEFAULT_MAX_TURNS get_default_agent_runner set_default_agent_runner",
    agents.result: "QueueCompleteSentinel",
    agents.tool: "_get_computer_initializer",
    AgentBase: "get_all_tools",
    agents.FunctionTool: "_is_agent_tool tool_input_guardrails",
    agents.RunContextWrapper: "get_approval_status",
    agents.ToolCallItem: "_resolved_tool_name",
    agents.RunResult: (
        "_auto_previous_response_id _conversation_id _current_step_for_state _current_turn "
        "_last_agent _model_input_items _original_input _previous_response_id "
        "_reasoning_item_id_policy _tool_use_tracker_snapshot"
    ),
    agents.RunResultStreaming: (
        "_cancel_mode _create_error_details _event_queue _input_guardrails_task "
        "_model_input_items _state _tool_use_tracker_snapshot run_loop_task"
    ),
    agents.RunState: (
        "_auto_previous_response_id _context _conversation_id _current_agent _current_step "
        "_generated_items _last_processed_response _model_responses _original_input "
        "_previous_response_id _reasoning_item_id_policy _session_items "
        "get_tool_use_tracker_snapshot"
    ),
}
"""Names that a release must have, by their owner."""
_KEPT = "budgetguard.snapshot"
_INVOKER = "_invoke_tool_impl"


def probe() -> None:
    """Look for everything that the adapter needs of the SDK, before any run relies on it.

    Raises:
        AdapterError: This release lacks something; the error says what, and what is supported.
    """
    missing: list[str] = []
    for owner, names in NEEDED.items():
        known = {*dir(owner), *getattr(owner, "__dataclass_fields__", ())}
        missing += [f"{owner.__name__}.{name}" for name in names.split() if name not in known]
    probe = agents.function_tool(lambda: "", name_override="probe")
    if not hasattr(probe.on_invoke_tool, _INVOKER):
        missing.append(f"FunctionTool.on_invoke_tool.{_INVOKER}")
    if missing:
        raise AdapterError(
            f"openai-agents {__version__} must have {', '.join(sorted(missing))} for a budget to "
            f"hold, found none. Install a supported release: {_SUPPORTED}."
        )


# Tools


def is_agent_tool(tool: agents.FunctionTool) -> bool:
    """Return whether a tool is an agent (`as_tool`)."""
    return bool(cast("Any", tool)._is_agent_tool)


def makes_computers(tool: agents.ComputerTool[Any]) -> bool:
    """Return whether a tool makes a computer for each run."""
    return cast("Any", agents.tool)._get_computer_initializer(tool) is not None


def with_invoker(
    tool: agents.FunctionTool,
    wrap: Callable[[Callable[[Any, str], Awaitable[Any]]], Callable[[Any, str], Awaitable[Any]]],
) -> agents.FunctionTool:
    """Copy a tool whose body is wrapped, below what turns its exceptions into texts if there is."""
    copied = copy.copy(tool)
    invoker = copy.copy(copied.on_invoke_tool)
    body = getattr(invoker, _INVOKER, None)
    if body is None:
        copied.on_invoke_tool = wrap(invoker)
    else:
        setattr(invoker, _INVOKER, wrap(body))
        copied.on_invoke_tool = invoker
    return copied


def replace_pending_tools(state: Any, replaced: Callable[[agents.Tool], agents.Tool]) -> None:
    """Replace the tools of the calls that a state goes on with."""
    processed = state._last_processed_response
    held: dict[str, Any] = {} if processed is None else dict(processed.__dict__)
    for calls in held.values():
        for call in cast("list[Any]", calls if isinstance(calls, list) else []):
            for name, value in list(getattr(call, "__dict__", {}).items()):
                if name.endswith("_tool"):
                    setattr(call, name, replaced(value))


async def handled(
    handler: Any, error: Exception, context: Any, agent: Any, **facts: Any
) -> tuple[str | None, Any]:
    """Ask the user's handler of `max_turns` as the SDK does; return the text, and the output."""
    sdk: Any = error_handlers
    made = await sdk.resolve_run_error_handler_result(
        error_handlers={"max_turns": handler},
        error_kind="max_turns",
        error=error,
        context_wrapper=context,
        run_data=sdk.build_run_error_data(last_agent=agent, **facts),
    )
    if made is None:
        return None, None
    final = sdk.validate_handler_final_output(agent, made.final_output)
    text = sdk.format_final_output_text(agent, final) if made.include_in_history else None
    return text, final


# What the tools of calls without a name may be.
NATIVE: dict[str, tuple[type[Any], ...]] = {
    "shell_call": (agents.ShellTool,),
    "local_shell_call": (agents.LocalShellTool, agents.ShellTool),
    "apply_patch_call": (agents.ApplyPatchTool,),
    "computer_call": (agents.ComputerTool,),
}


def call_item(agent: agents.Agent[Any], raw: Any, *, is_handoff: bool) -> agents.RunItem:
    """Make the item of a call as the SDK does: a state is read again only with its own."""
    if is_handoff:
        return agents.HandoffCallItem(agent=agent, raw_item=raw)
    item = agents.ToolCallItem(agent=agent, raw_item=raw)
    kinds = NATIVE.get(part(raw, "type"), ())
    name = next((tool.name for tool in agent.tools if isinstance(tool, kinds)), None)
    cast("Any", item)._resolved_tool_name = name
    return item


# Streamed results


def is_cancelled(streamed: Any) -> bool:
    """Return whether the consumer cancelled a streamed run."""
    return bool(streamed._cancel_mode != "none")


def take_failed_guardrail(streamed: Any) -> BaseException | None:
    """Take the exception of an input guardrail that cancelled a streamed run."""
    task = streamed._input_guardrails_task
    if task is None or not task.done() or task.cancelled() or task.exception() is None:
        return None
    streamed._input_guardrails_task = None
    error: BaseException = task.exception()
    return error


def hold_end(streamed: Any) -> None:
    """Hold the end of a streamed run's events back until `end_events`.

    Behind it the consumer waits for guardrails that may never end.
    """
    queue = streamed._event_queue
    put: Callable[[Any], None] = queue.put_nowait

    def held(event: Any) -> None:
        if not isinstance(event, _SENTINEL) or is_cancelled(streamed):
            put(event)

    queue.put_nowait = held


def raise_tripwire(streamed: Any) -> None:
    """Raise for an input guardrail that tripped after the answer; the SDK does so in the events.

    Raises:
        InputGuardrailTripwireTriggered: One did.
    """
    for result in streamed.input_guardrail_results:
        if result.output.tripwire_triggered:
            error = agents.InputGuardrailTripwireTriggered(result)
            error.run_data = streamed._create_error_details()
            raise error


def end_events(streamed: Any) -> None:
    """End the events of a streamed run, whatever of its work was left behind."""
    task = streamed._input_guardrails_task
    if task is not None and not task.done():
        task.cancel()
        streamed._input_guardrails_task = None
    cast("Any", asyncio.Queue).put_nowait(streamed._event_queue, _SENTINEL())


def extend_streamed(streamed: Any, kept: Sequence[Any], new: Sequence[Any]) -> None:
    """Set the items of a streamed result as the SDK does after a turn, so that `to_state` works."""
    dropped = {id(item) for item in streamed.new_items} - {id(item) for item in kept}
    before = [item for item in streamed._model_input_items if id(item) not in dropped]
    streamed.new_items = [*kept, *new]
    # A handoff may have filtered the calls that the closing results are for.
    items = [(item, part(item.raw_item, "call_id")) for item in (*before, *new)]
    known = Counter(call for _, call in items)
    streamed._model_input_items = [item for item, call in items if call is None or known[call] > 1]
    if streamed._state is not None:
        streamed._state._current_step = run_steps.NextStepRunAgain()


# Results and states


def complete_result(
    result: Any, kept: dict[str, Any], given: Any, config: agents.RunConfig
) -> None:
    """Set what `to_state` goes on from, as the SDK does on the results that it builds."""
    policy = config.reasoning_item_id_policy
    result._reasoning_item_id_policy = policy or getattr(given, "_reasoning_item_id_policy", None)
    result._model_input_items = list(result.new_items)
    result._current_turn = len(result.raw_responses)
    result._original_input = copy.copy(result.input)
    result._current_step_for_state = run_steps.NextStepRunAgain()
    result._conversation_id = kept.get("conversation_id")
    if kept.get("previous_response_id") or kept.get("auto_previous_response_id"):
        result._previous_response_id = result.last_response_id
        result._auto_previous_response_id = bool(kept.get("auto_previous_response_id"))


def drop_items(result: Any, places: set[int]) -> None:
    """Take the new items at these places out of a result."""
    dropped = {id(item) for n, item in enumerate(result.new_items) if n in places}
    result.new_items = [one for one in result.new_items if id(one) not in dropped]
    result._model_input_items = [one for one in result._model_input_items if id(one) not in dropped]


def agent_of(state: Any, starting_agent: agents.Agent[Any]) -> agents.Agent[Any]:
    """Return the agent that a run goes on with."""
    agent: agents.Agent[Any] | None = state._current_agent
    return starting_agent if agent is None else agent


def approval_of(state: Any, item: Any) -> bool | None:
    """Return a person's decision on a call; None without one, or where nothing is called."""
    call_id = part(item.raw_item, "call_id")
    if item.tool_name is None or call_id is None:
        return None  # a request of a hosted server's is no call of a tool on this side
    try:
        status = state._context.get_approval_status(item.tool_name, call_id, existing_pending=item)
    except agents.ModelBehaviorError:
        return None  # of a run inside this one, or changed meanwhile: the SDK says so itself
    return cast("bool | None", status)


def drop_interruption(state: Any, item: Any) -> None:
    """Take a question that is none of the SDK's out of a state, which may hold a copy of it."""
    waiting, call_id = state._current_step.interruptions, part(item.raw_item, "call_id")
    waiting[:] = [one for one in waiting if part(one.raw_item, "call_id") != call_id]
    if not waiting:
        state._current_step = run_steps.NextStepRunAgain()


def context_of(state: Any) -> Any:
    """Return the user's context of a run that goes on."""
    return None if state._context is None else state._context.context


def input_of(state: Any) -> list[Any]:
    """Return what a run that goes on was given."""
    return list(ItemHelpers.input_to_new_input_list(state._original_input))


def items_of(state: Any) -> list[agents.RunItem]:
    """Return what a run that goes on has brought so far."""
    return list(state._session_items or state._generated_items)


def kept_by_server(given: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return how a run names the conversation that its server keeps; nothing without one."""
    names = ("conversation_id", "previous_response_id", "auto_previous_response_id")
    kept = {name: options.get(name) for name in names}
    if isinstance(given, agents.RunState):
        state = cast("Any", given)
        kept = {name: kept[name] or getattr(state, f"_{name}") for name in names}
    return {name: value for name, value in kept.items() if value}


def is_state(given: Any) -> bool:
    """Return whether a run goes on from its state."""
    return isinstance(given, agents.RunState)


def is_unanswered(given: Any) -> bool:
    """Return whether a run goes on in which no model has answered."""
    return is_state(given) and not given._model_responses


class InState:
    """The state of a run, JSON included, which holds the counters of one that waits.

    Attributes:
        result: The result whose state is to hold them.
    """

    keeps = frozenset({"paused"})

    def __init__(self, given: Any) -> None:
        self.given = given
        self.result: Any = None

    def get(self) -> dict[str, Any] | None:
        """Return the entry, or None."""
        if not is_state(self.given):
            return None
        texts: list[str] = self.given.get_tool_use_tracker_snapshot().get(_KEPT, [])
        return json.loads(texts[0]) if texts else None

    def put(self, entry: dict[str, Any] | None) -> None:
        """Keep an entry."""
        if entry is not None:
            # What tools each agent has used; a name that no agent has is passed over.
            used = self.result._tool_use_tracker_snapshot
            self.result._tool_use_tracker_snapshot = {**used, _KEPT: [json.dumps(entry)]}
