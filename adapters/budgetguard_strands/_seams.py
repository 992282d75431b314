"""Where Strands releases differ: hook order, the place around a run, the events of a stream."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping
from importlib import import_module
from typing import Any, TypeAlias

from strands import Agent
from strands.hooks import AfterInvocationEvent, HookRegistry

from budgetguard_core import AdapterError

Events: TypeAlias = AsyncGenerator[Any, None]
Around: TypeAlias = Callable[[Agent, dict[str, Any], Events], Events]

# Outside the range of Strands' own constants (-100 to 100), so that a user's hooks come between.
FIRST = -1000.0
LAST = 1000.0


def _find(name: str, *modules: str) -> Any:
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (AttributeError, ImportError):
            continue
    return None


AGENT_STREAM = _find(
    "AgentStreamStage",
    "strands.middleware",
    "strands.middleware._agent_stream",
    "strands._middleware.stages",
    "strands._middleware",
)
INVOKE_MODEL = _find(
    "InvokeModelStage", "strands.middleware", "strands._middleware.stages", "strands._middleware"
)
StopEvent = _find("EventLoopStopEvent", "strands.types._events", "strands.types.events")
StreamEvent = _find("TypedEvent", "strands.types.events", "strands.types._events")
# Whether hooks can be put first and last, or come in the order of their registration.
ORDERED = "order" in inspect.signature(HookRegistry.add_callback).parameters


def add_hook(agent: Agent, event: Any, callback: Any, order: float) -> None:
    """Register a callback at either end of its event's queue, in every release."""
    if ORDERED:
        agent.hooks.add_callback(event, callback, order=order)
        return
    # Releases without `order` call by place, and the hooks of an end in reverse.
    agent.hooks.add_callback(event, callback)
    callbacks: list[Any] = agent.hooks._registered_callbacks[event]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    ending = event.__name__.startswith("After")
    if (order == LAST) is ending:
        callbacks.insert(0, callbacks.pop())


def wrap_runs(agent: Agent, around: Around) -> None:
    """Let `around` see every event of every run of an agent, and end the run in its place.

    Raises:
        AdapterError: This release of Strands has no place for it.
    """
    if StopEvent is None or StreamEvent is None:
        raise _unsupported("the event that ends a run")
    if AGENT_STREAM is not None:
        _add_middleware(
            agent,
            AGENT_STREAM,
            lambda context, proceed: around(
                context.agent, context.invocation_state, proceed(context)
            ),
        )
        return
    cycle: Callable[..., Events] | None = getattr(agent, "_execute_event_loop_cycle", None)
    if cycle is None:
        raise _unsupported("a place around a run")

    def run(invocation_state: dict[str, Any], *args: Any, **kwargs: Any) -> Events:
        return around(agent, invocation_state, cycle(invocation_state, *args, **kwargs))

    # This agent's own loop only; the class stays as it is.
    agent._execute_event_loop_cycle = run  # type: ignore[method-assign]  # noqa: SLF001


def has_model_middleware(agent: Agent) -> bool:
    """Tell whether anything can swap the agent's model for a call, or answer in its place."""
    registry = getattr(agent, "_middleware_registry", None)
    handlers = getattr(registry, "_handlers", None)
    return INVOKE_MODEL is not None and (handlers is None or bool(handlers.get(INVOKE_MODEL)))


def sets_model() -> bool:
    """Tell whether this release lets a call go to another model than the agent's."""
    context: Any = _find(
        "InvokeModelContext",
        "strands.middleware",
        "strands._middleware.stages",
        "strands._middleware",
    )
    return context is not None and "model" in context.__dataclass_fields__


def watch_models(agent: Agent, called: Callable[[Agent, Any], Any]) -> bool:
    """Let `called` know which model each call really goes to, and choose it.

    Costs every chunk a little.

    Returns:
        False where the release has no place for it: each call goes to the agent's model.
    """
    if INVOKE_MODEL is None:
        return False

    sets = sets_model()

    def note(context: Any, proceed: Callable[[Any], Events]) -> Events:
        if sets:
            context.model = called(context.agent, context.model)
        else:
            called(context.agent, context.agent.model)
        return proceed(context)

    _add_middleware(agent, INVOKE_MODEL, note)
    return True


def pass_on(agent: Agent, name: str, begin: Callable[[Any], None]) -> None:
    """Let the agents that Strands' own tools make from this one call `begin` when they are run.

    They inherit the interventions of their maker, and nothing else.
    """
    registry = getattr(agent, "_intervention_registry", None)
    handlers = getattr(registry, "_handlers", None)
    handler = _find("InterventionHandler", "strands.interventions")
    proceed = _find("Proceed", "strands.interventions")
    if handlers is None or handler is None or proceed is None:
        return  # this release has no such tools
    if any(one.name == name for one in handlers):
        return

    def before_invocation(_: object, event: Any) -> Any:
        begin(event)
        return proceed()

    inherited = type(
        "Inherited", (handler,), {"name": name, "before_invocation": before_invocation}
    )
    # Not appended: the list may be the user's own, and shared.
    registry._handlers = [*handlers, inherited()]  # type: ignore[union-attr]  # noqa: SLF001


def is_interrupted(agent: Agent) -> bool:
    """Tell whether the agent waits for a person, or goes on with the answer."""
    return bool(getattr(getattr(agent, "_interrupt_state", None), "activated", False))


def is_asking(agent: Agent, use: Mapping[str, Any]) -> bool:
    """Tell whether a hook before ours waits for a person's word on a tool call."""
    state = getattr(agent, "_interrupt_state", None)
    interrupts: Mapping[str, Any] = getattr(state, "interrupts", None) or {}
    mark = f":before_tool_call:{use['toolUseId']}:"
    return any(mark in name and one.response is None for name, one in interrupts.items())


def results_before_interrupt(agent: Agent) -> list[Any]:
    """Return the results of a batch that were there when it was interrupted."""
    state = getattr(agent, "_interrupt_state", None)
    pending = getattr(state, "pending_tool_execution", None)
    if pending is not None:
        return list(pending.completed_tool_results)
    # Releases before 1.40 keep them among the context.
    context: Mapping[str, Any] = getattr(state, "context", None) or {}
    return list(context.get("tool_results", ()))


def forget_interrupt(agent: Agent) -> None:
    """Take back that the agent waits for a person: its run was stopped."""
    if is_interrupted(agent):
        agent._interrupt_state.deactivate()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def goes_on(event: AfterInvocationEvent) -> bool:
    """Tell whether Strands itself goes on after this leg, with the results of background tasks."""
    state = getattr(event, "_continuation_state", None)
    return bool(getattr(state, "inputs", None))


def _add_middleware(agent: Agent, stage: Any, handler: Callable[[Any, Any], Events]) -> None:
    add = getattr(agent, "add_middleware", None)
    if add is None:
        add = agent._middleware_registry.add_middleware  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    add(stage, handler)


def _unsupported(missing: str) -> AdapterError:
    return AdapterError(
        f"this release of strands-agents must have {missing}, got none. The agent would run "
        "without its budget. Use a release from 1.30 up to the newest that BudgetGuard names."
    )
