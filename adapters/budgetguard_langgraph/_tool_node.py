"""Whether a refused tool call can be answered with an error result by the `ToolNode` around it."""

from __future__ import annotations

import sys
from typing import Any, Final, cast

from langchain_core.runnables.config import var_child_runnable_config

from budgetguard_langgraph._stack import frame_of

_RUNNING: Final = frozenset(
    {"_execute_tool_sync", "_execute_tool_async", "_run_one", "_arun_one", "run_one", "arun_one"}
)
_NODES: Final = frozenset({"ToolNode", "_ToolNode"})
_TOOL_RUN: Final = frozenset({"run", "arun"})


class ToolCallRefused:
    """The name under which a refused call shows up in a `ToolNode`; see `refusal`."""

    message: str


_REFUSALS: dict[type[Exception], type[Exception]] = {}


def enclosing_tool_node() -> Any:
    """Return the `ToolNode` that runs the tool whose start hook is running, or None.

    It is on the stack, unless a sync tool of an async graph runs in a thread: then it is in the
    task that LangGraph's configuration leads to.
    """
    frame = frame_of(_RUNNING, "self")
    node = None if frame is None else frame.f_locals.get("self")
    if _is_tool_node(node):
        return node
    return _tool_node_of_task()


def tool_call_id_of_stack() -> str | None:
    """Return the id of the tool call that starts; langchain-core tells it only since 1.1."""
    frame = frame_of(_TOOL_RUN, "tool_call_id")
    found = None if frame is None else frame.f_locals.get("tool_call_id")
    return found if isinstance(found, str) else None


def refusal(node: Any, message: str) -> Exception | None:
    """Make the exception that this `ToolNode` turns into an error result, if it would.

    Anything else that it would not handle fails the whole node, and its siblings with it.
    """
    if node is None:
        return None
    # LangGraph has it since 1.0.2; before, a node handles every exception or none.
    base = getattr(sys.modules.get(_home(node)), "ToolInvocationError", Exception)
    refused = _REFUSALS.get(base)
    if refused is None:
        # Each module has its own error, and its node handles no other.
        kind = type("ToolCallRefused", (ToolCallRefused, base), {})
        refused = _REFUSALS[base] = cast("type[Exception]", kind)
    flag = getattr(node, "_handle_tool_errors", None)
    if flag is None:
        flag = getattr(node, "handle_tool_errors", None)
    if not _handles(flag, refused):
        return None
    error: Any = refused.__new__(refused)
    error.args = (message,)
    error.message = message
    error.tool_name, error.tool_kwargs, error.source, error.filtered_errors = "", {}, None, []
    return cast("Exception", error)


def _handles(flag: Any, refused: type[Exception]) -> bool:
    if isinstance(flag, (bool, str)):
        return bool(flag)
    if isinstance(flag, (type, tuple)):
        return issubclass(refused, flag)
    # A handler of the user's own would answer with words of its own.
    return getattr(flag, "__name__", "") == "_default_handle_tool_errors"


def _tool_node_of_task() -> Any:
    config = var_child_runnable_config.get()
    call = (config or {}).get("configurable", {}).get("__pregel_call")
    for reference in getattr(call, "args", ()):
        process = getattr(reference() if callable(reference) else None, "proc", None)
        for step in (process, *getattr(process, "steps", ())):
            if _is_tool_node(step):
                return step
    return None


def _is_tool_node(value: object) -> bool:
    return any(kind.__name__ in _NODES for kind in type(value).__mro__)


def _home(node: Any) -> str:
    (kind,) = [kind for kind in type(node).__mro__ if kind.__name__ in _NODES][:1]
    return kind.__module__
