"""The private names of Strands that the adapter needs, each looked for when it is attached."""

# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, TypeAlias

from opentelemetry import trace
from strands import Agent
from strands.hooks import AfterInvocationEvent, BeforeToolCallEvent
from strands.middleware import InvokeModelStage

from budgetguard_core import AdapterError

_USE_ANOTHER = "Use a release from 1.62 up to the newest that BudgetGuard names."

try:
    from strands.agent._continuation import _STATE_ATTRIBUTE as _CONTINUED
    from strands.middleware._agent_stream import AgentStreamStage
except ImportError as error:
    raise AdapterError(
        "this release of strands-agents must have a place around a run, got none. The agent would "
        f"run without its budget. {_USE_ANOTHER}"
    ) from error

__all__ = ["AgentStreamStage"]

Events: TypeAlias = AsyncGenerator[Any, None]

# Outside the range of Strands' own constants (-100 to 100), so that a user's hooks come between.
FIRST = -1000.0
LAST = 1000.0
# Beside the ids of nodes, among which no such one is to be expected.
_KEPT = "budgetguard.run"


def has_model_middleware(agent: Agent) -> bool:
    """Return whether a middleware can swap the agent's model for a call, or answer in its place."""
    return bool(agent._middleware_registry._handlers.get(InvokeModelStage))


def has_background_tasks(agent: Agent) -> bool:
    """Return whether an agent's tools may run in the background."""
    return agent._background_tasks is not None


def goes_on(event: AfterInvocationEvent) -> bool:
    """Return whether Strands itself goes on after this, with the results of background tasks."""
    state = getattr(event, _CONTINUED, None)
    ended = event.result is not None and event.result.stop_reason in ("end_turn", "stop_sequence")
    return ended and bool(getattr(state, "inputs", None))


async def append(agent: Any, message: Any, report: Callable[[str, Exception], None]) -> None:
    """Add a message as the agent does: kept by its session manager, seen by every hook.

    What a hook or session manager raises is reported; the run ends all the same.
    """
    try:
        await agent._append_messages(message)
    except Exception as error:
        report("message added", error)


# Questions to a person


def is_interrupted(target: Any) -> bool:
    """Return whether an agent, swarm or graph waits for a person, or goes on with the answer."""
    return bool(target._interrupt_state.activated)


def interrupts_of(target: Any) -> dict[str, Any]:
    """Return the questions of an agent, swarm or graph to a person, with the answers, by id."""
    found: dict[str, Any] = target._interrupt_state.interrupts
    return found


def kept_with_interrupts(target: Any) -> dict[str, Any]:
    """Return what is kept beside the questions of a waiting swarm or graph, to be changed.

    Its session keeps it too.
    """
    kept: dict[str, Any] = target._interrupt_state.context.setdefault(_KEPT, {})
    return kept


def is_asking(agent: Agent, use: Mapping[str, Any]) -> bool:
    """Return whether a hook before ours waits for a person's word on a tool call."""
    mark = f":before_tool_call:{use['toolUseId']}:"
    interrupts = interrupts_of(agent).items()
    return any(mark in name and one.response is None for name, one in interrupts)


class _NoAnswer(str):
    """The answer to a question that nobody is asked: empty, whatever a hook reads of it."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> str:
        return self

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the default, as a dictionary without the key."""
        del key
        return default


def ask_nobody(event: BeforeToolCallEvent) -> None:
    """Answer what the hooks after this one ask a person about a call that is refused anyway."""

    def interrupt(name: str, reason: Any = None, response: Any = None) -> Any:
        del name, reason
        return _NoAnswer() if response is None else response

    # The event takes no attributes of others.
    object.__setattr__(event, "interrupt", interrupt)


def results_before_interrupt(agent: Agent) -> list[tuple[Any, Any]]:
    """List the tool uses of a batch that had a result when it was interrupted, and the results."""
    pending = agent._interrupt_state.pending_tool_execution
    if pending is None:
        return []
    blocks = pending.assistant_message["content"]
    uses = {one["toolUse"]["toolUseId"]: one["toolUse"] for one in blocks if "toolUse" in one}
    return [(uses[one["toolUseId"]], one) for one in pending.completed_tool_results]


def forget_interrupt(agent: Agent) -> None:
    """Take back that the agent waits for a person: its run was stopped."""
    agent._interrupt_state.deactivate()


# Spans: Strands ends those of what answers or fails, and no others


def end_spans(outer: trace.Span, cycle: trace.Span | None, error: BaseException | None) -> None:
    """End the spans of a cut cycle: those that what came up has passed, or the current one."""
    found = [trace.get_current_span()]
    step = None if error is None else error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if str(frame.f_globals.get("__name__")).startswith("strands."):
            own = [one for one in frame.f_locals.values() if isinstance(one, trace.Span)]
            found = [*own, *found]
        step = step.tb_next
    for span in (*found, cycle):
        if span is not None and span is not outer and span.is_recording():
            span.end()


def probe(target: Any) -> None:
    """Look for the private names that an agent, swarm or graph needs.

    Raises:
        AdapterError: This release lacks one.
    """
    of_agents = ("_append_messages", "_background_tasks", "_middleware_registry")
    for name in ("_interrupt_state", *(of_agents if isinstance(target, Agent) else ())):
        if not hasattr(target, name):
            where = f"{type(target).__name__}.{name}"
            raise AdapterError(f"Strands must have {where}, got a release without. {_USE_ANOTHER}")
