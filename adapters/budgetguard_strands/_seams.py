"""The private names of Strands that the adapter needs, each looked for when it is attached."""

from __future__ import annotations

import functools
import warnings
from collections.abc import AsyncGenerator, Callable, Mapping
from importlib import import_module
from typing import Any, TypeAlias

from strands import Agent
from strands.hooks import AfterInvocationEvent, BeforeToolCallEvent
from strands.middleware import InvokeModelStage
from strands.multiagent.graph import Graph

from budgetguard_core import AdapterError

Events: TypeAlias = AsyncGenerator[Any, None]
Around: TypeAlias = Callable[[Agent, dict[str, Any], Events], Events]

# Outside the range of Strands' own constants (-100 to 100), so that a user's hooks come between.
FIRST = -1000.0
LAST = 1000.0
# Beside the ids of nodes, among which no such one is to be expected.
_KEPT = "budgetguard.run"
_CONTINUED = "_continuation_state"
_CYCLE = "_execute_event_loop_cycle"


def wrap_runs(kind: type[Agent], around: Around) -> None:
    """Let `around` see every event of every run of a class of agents, and end runs in their place.

    The class is wrapped once. A middleware around the whole stream would be a layer more for each
    chunk of an answer, and its stage has moved from release to release.

    Raises:
        AdapterError: This release of Strands has no place for it.
    """
    owner = next((one for one in kind.__mro__ if vars(one).get(_CYCLE) is not None), None)
    if owner is None:
        raise _unsupported("a place around a run")
    own: Callable[..., Events] = vars(owner)[_CYCLE]
    if hasattr(own, "ends_runs"):
        return

    @functools.wraps(own)
    def cycle(self: Agent, invocation_state: dict[str, Any], *args: Any, **kwargs: Any) -> Events:
        return around(self, invocation_state, own(self, invocation_state, *args, **kwargs))

    wrapped: Any = cycle
    wrapped.ends_runs = True
    setattr(owner, _CYCLE, wrapped)


def has_model_middleware(agent: Agent) -> bool:
    """Return whether a middleware can swap the agent's model for a call, or answer in its place."""
    registry = getattr(agent, "_middleware_registry", None)
    handlers = getattr(registry, "_handlers", None)
    return handlers is None or bool(handlers.get(InvokeModelStage))


def join_runs_around(join: Callable[[Agent], None]) -> None:
    """Let `join` see every agent of this process before each of its runs.

    Strands 1.62 and before have no hook of all agents, and the tools that make agents give them
    none. The class is wrapped once, and each run asks one context variable.
    """
    own = Agent.stream_async
    if hasattr(own, "joins_runs_around"):
        return

    @functools.wraps(own)
    def stream_async(self: Agent, *args: Any, **kwargs: Any) -> Any:
        join(self)
        return own(self, *args, **kwargs)

    owner: Any = Agent
    wrapped: Any = stream_async
    wrapped.joins_runs_around = True
    owner.stream_async = wrapped


def is_interrupted(target: Any) -> bool:
    """Tell whether an agent, swarm or graph waits for a person, or goes on with the answer."""
    return bool(getattr(_interrupts(target), "activated", False))


def _interrupts(target: Any) -> Any:
    return getattr(target, "_interrupt_state", None)


def keep_with_interrupts(target: Any, kept: dict[str, Any]) -> None:
    """Keep something beside the questions of a waiting swarm or graph; its session keeps it too."""
    context: dict[str, Any] | None = getattr(_interrupts(target), "context", None)
    if context is not None:
        context[_KEPT] = kept


def kept_with_interrupts(target: Any) -> Any:
    """Return what was kept beside the questions of a waiting swarm or graph; None if nothing."""
    context: Mapping[str, Any] = getattr(_interrupts(target), "context", None) or {}
    return context.get(_KEPT)


def is_asking(agent: Agent, use: Mapping[str, Any]) -> bool:
    """Tell whether a hook before ours waits for a person's word on a tool call."""
    interrupts: Mapping[str, Any] | None = getattr(_interrupts(agent), "interrupts", None)
    if not interrupts:
        return False
    mark = f":before_tool_call:{use['toolUseId']}:"
    return any(mark in name and one.response is None for name, one in interrupts.items())


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


def results_before_interrupt(agent: Agent) -> list[Any]:
    """Return the results of a batch that were there when it was interrupted."""
    pending = getattr(_interrupts(agent), "pending_tool_execution", None)
    return [] if pending is None else list(pending.completed_tool_results)


def forget_interrupt(agent: Agent) -> None:
    """Take back that the agent waits for a person: its run was stopped."""
    if is_interrupted(agent):
        agent._interrupt_state.deactivate()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def goes_on(event: AfterInvocationEvent) -> bool:
    """Tell whether Strands itself goes on after this leg, with the results of background tasks."""
    state = getattr(event, _CONTINUED, None)
    ended = event.result is not None and event.result.stop_reason in ("end_turn", "stop_sequence")
    return ended and bool(getattr(state, "inputs", None))


def result_of(graph: Any) -> Any:
    """Make the result of a graph from the state that it was left in."""
    return graph._build_result([])  # noqa: SLF001


def background_tasks(agent: Agent) -> list[str]:
    """Return the ids of an agent's background tasks that have not ended."""
    tasks = getattr(agent, "_background_tasks", None)
    known: Any = getattr(tasks, "_task_snapshots", tuple)()
    over = ("completed", "failed", "cancelled")
    return [one["task_id"] for one in known if one["status"] not in over]


def has_background_tasks(agent: Agent) -> bool:
    """Tell whether an agent's tools may run in the background."""
    return getattr(agent, "_background_tasks", None) is not None


async def cancel_background_tasks(agent: Agent) -> None:
    """Let Strands wait for an agent's background tasks no more."""
    manager: Any = getattr(getattr(agent, "_background_tasks", None), "_manager", None)
    if manager is not None:
        for task in background_tasks(agent):
            await manager.cancel(task)


def is_in_background(context: Any) -> bool:
    """Tell whether a tool's body runs in the background."""
    return hasattr(context, "_background_interrupt")


def probe(target: Any) -> None:
    """Warn, by name, of what an agent, swarm or graph of this release does not have any more."""
    needs = [(target, "_interrupt_state", "a run that waits for a person counts as ended")]
    if isinstance(target, Agent):
        tasks = getattr(target, "_background_tasks", None)
        continued = getattr(import_module("strands.agent._continuation"), "_STATE_ATTRIBUTE", None)
        needs += [
            (tasks, "_manager", "background tasks outlive a stop"),
            (tasks, "_task_snapshots", "background tasks outlive a stop"),
        ]
        if tasks is not None and continued != _CONTINUED:
            # Set by Strands where it is needed, so only its name can be looked for.
            _warn(f"AfterInvocationEvent.{_CONTINUED}", "a run ends before its background tasks")
    elif isinstance(target, Graph):
        needs.append((target, "_build_result", "a graph that was stopped in a custom node raises"))
    for owner, name, without in needs:
        if owner is not None and not hasattr(owner, name):
            _warn(f"{type(owner).__name__}.{name}", without)


def _warn(missing: str, without: str) -> None:
    warnings.warn(
        f"this release of strands-agents has no {missing}: {without}. "
        "Use a release from 1.62 up to the newest that BudgetGuard names.",
        RuntimeWarning,
        stacklevel=3,
    )


def _unsupported(missing: str) -> AdapterError:
    return AdapterError(
        f"this release of strands-agents must have {missing}, got none. The agent would run "
        "without its budget. Use a release from 1.62 up to the newest that BudgetGuard names."
    )
