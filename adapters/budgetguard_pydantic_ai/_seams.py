"""Every private name of Pydantic AI that the adapter touches."""

from __future__ import annotations

from copy import copy
from typing import Any

from pydantic_ai import ModelRequestNode, _agent_graph
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.run import AgentRunResult

from budgetguard_core import AdapterError

graph: Any = _agent_graph
NEEDED: dict[Any, tuple[str, ...]] = {
    graph: ("GraphAgentState", "SetFinalResult"),
    ModelRequestNode: ("_resume_suspended", "last_request_context"),
}


def check() -> None:
    """Look for every private name.

    Raises:
        AdapterError: This release lacks one.
    """
    for owner, names in NEEDED.items():
        known = {*dir(owner), *getattr(owner, "__dataclass_fields__", ())}
        missing = sorted(set(names) - known)
        if missing:
            raise AdapterError(
                f"Pydantic AI must have {', '.join(missing)}, got a release without. "
                "Install pydantic-ai-slim>=2.64,<3."
            )


def can_be_named(model: Any) -> bool:
    """Return whether the requests of a model can go to another one of its provider."""
    while isinstance(model, WrapperModel):
        model = model.wrapped
    return "_model_name" in vars(model)


def named(model: Any, name: str) -> Any:
    """Copy a model so that its requests go to another one of its provider."""
    copied: Any = copy(model)
    if isinstance(model, WrapperModel):
        copied.wrapped = named(model.wrapped, name)
    else:
        copied._model_name = name
        copied.__dict__.pop("profile", None)  # of the other name
    return copied


def is_whole(stream: Any) -> bool:
    """Return whether a streamed answer was read to its end."""
    return bool(getattr(stream, "_finished", False))


def is_new_turn(node: Any) -> bool:
    """Return whether a node will make a model call that begins a turn.

    One that the user has streamed is made already; a suspended response that goes on is no turn.
    """
    return (
        isinstance(node, ModelRequestNode)
        and node.last_request_context is None
        and node._resume_suspended is None  # pyright: ignore[reportPrivateUsage]
    )


def result_of(ctx: Any, messages: list[Any], output: Any) -> AgentRunResult[Any]:
    """Return the result of a run that ended outside of its graph."""
    state = graph.GraphAgentState(message_history=messages, usage=ctx.usage, run_id=ctx.run_id)
    earlier = sum(one.run_id != ctx.run_id for one in messages)
    return AgentRunResult(output, None, state, earlier)
