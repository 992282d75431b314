"""Every private name of LangGraph and LangChain that this adapter touches, and nothing else.

LangChain's hooks do not say from where they are called, so some facts are read off the call stack.
`probe` looks for all of it when the adapter is attached: a release without one of these names is
refused, never bounded in part.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import FrameType
from typing import Any, Final, cast

import langgraph.errors
from langchain_core.callbacks import BaseCallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.errors import GraphRecursionError
from langgraph.pregel import Pregel  # pyright: ignore[reportMissingTypeStubs]

from budgetguard_core import AdapterError

TASK: Final = "__pregel_task_id"
PUSH: Final = "__pregel_push"
INTERRUPT: Final = "__interrupt__"
START: Final = "__start__"
ROOT: Final = "__root__"
CHECKPOINTER: Final = "__pregel_checkpointer"
HANDOFF: Final = "__handoff_destination"
"""In the metadata of the handoff tools of langgraph-supervisor and langgraph-swarm."""

# The framework's own caps; the later ones only since LangGraph 1.2.
FRAMEWORK_LIMITS: Final[tuple[type[Exception], ...]] = (
    GraphRecursionError,
    *(
        getattr(langgraph.errors, name)
        for name in ("GraphDrained", "NodeTimeoutError")
        if hasattr(langgraph.errors, name)
    ),
)

_SUPPORTED: Final = "langgraph 1.1.5 and later with langchain-core 1.2.10 and later, below 2"
_DEEPEST: Final = 150
_NEAREST: Final = 12
_MANAGER: Final = 7
_STREAMS: Final = frozenset({"stream", "astream"})
_STARTS: Final = frozenset({"on_chat_model_start", "on_llm_start"})
_CALLS: Final = frozenset({"generate", "agenerate", "stream", "astream"})
_RUNNING: Final = frozenset(
    {"_execute_tool_sync", "_execute_tool_async", "_run_one", "_arun_one", "run_one", "arun_one"}
)
_NODES: Final = frozenset({"ToolNode", "_ToolNode"})
_TOOL_RUN: Final = frozenset({"run", "arun"})
# `create_agent` binds it to every agent; it is nobody's choice.
_BOUND_LIMIT: Final = 9_999
_DEFAULT_LIMIT: Final = 10_007


@cache
def probe() -> None:
    """Look for everything that is relied upon.

    Raises:
        AdapterError: A name is missing in the releases that are installed.
    """
    missing = [
        f"the local {local!r} of {owner.__name__}.{method}"
        for owner, methods, locals_ in (
            (Pregel, ("stream", "astream"), ("self", "config", "loop")),
            (BaseChatModel, ("generate", "agenerate"), ("self", "kwargs")),
        )
        for method in methods
        for local in locals_
        if not _has_local(owner, method, local)
    ]
    if missing:
        raise AdapterError(
            f"this adapter needs {_SUPPORTED}, got releases without {missing[0]}. "
            "Install a supported release."
        )


def _has_local(owner: type, method: str, local: str) -> bool:
    code: Any = getattr(inspect.unwrap(getattr(owner, method)), "__code__", None)
    return code is not None and local in (*code.co_varnames, *code.co_cellvars)


# The call stack


def _frames(depth: int) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - no public way
    for _ in range(depth):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _frame_of(names: frozenset[str], local: str, depth: int = _DEEPEST) -> FrameType | None:
    for frame in _frames(depth):
        code = frame.f_code
        if code.co_name in names and (local in code.co_varnames or local in code.co_cellvars):
            return frame
    return None


class GraphCall:
    """One call of a graph's `stream` or `astream`, held by its frame until it is over.

    Hooks at the end of an asynchronous run are called in a task of their own, from where the call
    cannot be seen.
    """

    __slots__ = ("_frame", "config", "graph")

    def __init__(self, frame: FrameType) -> None:
        self._frame: FrameType | None = frame
        self.graph: Any = frame.f_locals["self"]
        self.config: Any = frame.f_locals.get("config")

    def interrupts(self) -> tuple[bool, list[Any]]:
        """Let go of the call; tell whether it stopped at a breakpoint, and its interrupts."""
        frame, self._frame = self._frame, None
        loop: Any = None if frame is None else frame.f_locals.get("loop")
        status = str(getattr(loop, "status", "done"))
        if status == "done":
            return False, []
        writes: Any = getattr(loop, "checkpoint_pending_writes", ())
        found = [one for write in writes if write[1] == INTERRUPT for one in write[2]]
        return status.startswith("interrupt_"), found


def graph_call() -> GraphCall | None:
    """Return the call of a graph whose hook is running."""
    for frame in _frames(_NEAREST):
        if frame.f_code.co_name in _STREAMS and isinstance(frame.f_locals.get("self"), Pregel):
            return GraphCall(frame)
    return None


def graph_of_manager() -> Any:
    """Return the graph that makes its callbacks in this hook: a call of it begins."""
    for frame in _frames(_MANAGER):
        if frame.f_code.co_name in _STREAMS:
            found = frame.f_locals.get("self")
            return cast("Any", found) if isinstance(found, Pregel) else None
    return None


def request_around() -> tuple[Any, dict[str, Any] | None, list[Any] | None]:
    """Return the model whose start hook is running, the settings of its request, and its messages.

    Settings and messages are the very objects that go on to the provider's package. Where several
    prompts start together there are no messages.
    """
    frame = _frame_of(_CALLS, "kwargs", _NEAREST)
    if frame is None:
        return None, None, None
    values = frame.f_locals
    settings, messages = values.get("kwargs"), values.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[0], list):
        listed = cast("list[Any]", messages)
        messages = listed[0] if len(listed) == 1 else None
    return (
        values.get("self"),
        cast("dict[str, Any]", settings) if isinstance(settings, dict) else None,
        cast("list[Any]", messages) if isinstance(messages, list) else None,
    )


def close_pending_hooks() -> None:
    """Close the coroutines of other callbacks' hooks, which a raising one leaves behind.

    langchain-core awaits them one after the other and drops the rest; each would warn.
    """
    frame = _frame_of(_STARTS, "inline_tasks")
    if frame is None:
        return
    for name in ("inline_tasks", "non_inline_tasks"):
        tasks: list[Any] = frame.f_locals.get(name, [])
        for task in tasks:
            # The one that runs now is suspended nowhere, and must not be closed.
            if getattr(task, "cr_frame", None) is not None and not task.cr_running:
                task.close()


# Configurations


def configuration(config: Any = None) -> Mapping[str, Any]:
    """Return the configurable part of a configuration, of the code's own if none is given."""
    found: Any = var_child_runnable_config.get() if config is None else config
    return {} if found is None else found.get("configurable") or {}


def surrounding_run_id() -> Any:
    """Return the id of the chain that the code is a part of."""
    manager: Any = (var_child_runnable_config.get() or {}).get("callbacks")
    return getattr(manager, "parent_run_id", None)


def surrounding_callbacks() -> Any:
    """Return the callbacks that code inherits which is given none."""
    return (var_child_runnable_config.get() or {}).get("callbacks") or []


def with_callback(callbacks: Any, added: Any) -> Any:
    """Return callbacks in their own form, with one more."""
    if isinstance(callbacks, BaseCallbackManager):
        callbacks = callbacks.copy()
        callbacks.add_handler(added, inherit=True)
        return callbacks
    return [*callbacks, added]


def recursion_limit(graph: Any, config: Any, needed: int | None) -> int | None:
    """Return a limit that does not fire within the caps; None to leave it as it is.

    One that the user set holds, wherever it was set.
    """
    given: Any = None if config is None else config.get("recursion_limit")
    own: Any = None if graph.config is None else graph.config.get("recursion_limit")
    if needed is None or given is not None:
        return None
    module = sys.modules.get("langgraph._internal._config")
    default = int(getattr(module, "DEFAULT_RECURSION_LIMIT", _DEFAULT_LIMIT))
    if own is not None and own not in (_BOUND_LIMIT, default):
        return None
    return needed if needed > (own or default) else None


# Tools


class ToolCallRefused:
    """The name under which a refused call shows up in a `ToolNode`; see `refusal`."""

    message: str


_REFUSALS: dict[type[Exception], type[Exception]] = {}


def enclosing_tool_node() -> Any:
    """Return the `ToolNode` that runs the tool whose start hook is running, or None.

    It is on the stack, unless a sync tool of an async graph runs in a thread: then it is in the
    task that LangGraph's configuration leads to.
    """
    frame = _frame_of(_RUNNING, "self")
    node = None if frame is None else frame.f_locals.get("self")
    if _is_tool_node(node):
        return node
    call = configuration().get("__pregel_call")
    for reference in getattr(call, "args", ()):
        process = getattr(reference() if callable(reference) else None, "proc", None)
        for step in (process, *getattr(process, "steps", ())):
            if _is_tool_node(step):
                return step
    return None


def tool_call_id_of_stack() -> str | None:
    """Return the id of the tool call that starts, where a hook is not told."""
    frame = _frame_of(_TOOL_RUN, "tool_call_id")
    found = None if frame is None else frame.f_locals.get("tool_call_id")
    return found if isinstance(found, str) else None


def refusal(node: Any, message: str) -> Exception | None:
    """Make the exception that this `ToolNode` turns into an error result, if it would.

    Anything else that it would not handle fails the whole node, and its siblings with it.
    """
    if node is None:
        return None
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


def _is_tool_node(value: object) -> bool:
    return any(kind.__name__ in _NODES for kind in type(value).__mro__)


def _home(node: Any) -> str:
    (kind,) = [kind for kind in type(node).__mro__ if kind.__name__ in _NODES][:1]
    return kind.__module__


# Agents


def middleware_of(graph: Any, kind: type) -> Any:
    """Return the middleware of this kind that an agent of `create_agent` was built with."""
    for name, node in graph.nodes.items():
        if not name.endswith(".before_agent"):
            continue
        for hook in ("func", "afunc"):
            found = getattr(getattr(getattr(node, "bound", None), hook, None), "__self__", None)
            if isinstance(found, kind):
                return found
    return None


# LangChain's log


class _StopsAreNoErrors(logging.Filter):
    """Takes out the warning that langchain-core writes for each stop."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (
            isinstance(record.args, tuple)
            and len(record.args) == 3
            and str(record.args[2]).startswith(
                ("BudgetInterrupt(", "BudgetStop(", "BudgetExceeded(", "ToolCallRef")
            )
        )


logging.getLogger("langchain_core.callbacks.manager").addFilter(_StopsAreNoErrors())
