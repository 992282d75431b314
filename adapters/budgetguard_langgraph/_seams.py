"""Every private name of LangGraph and LangChain that this adapter touches, and nothing else.

LangChain's hooks do not say from where they are called, so some facts are read off the call stack.
`probe` looks for all of it when the adapter is attached: a release without one of these names is
refused, never bounded in part.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from inspect import signature, unwrap
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import langgraph.errors
from langchain_core.callbacks import BaseCallbackManager
from langgraph.constants import START as START
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel  # pyright: ignore[reportMissingTypeStubs]

from budgetguard_core import AdapterError
from budgetguard_core.kit import Flow, part, run_awaited, run_blocking


def _found(module: str, path: str) -> Any:
    """Return what a module knows by this name, or raise what `probe` raises."""
    try:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (AttributeError, ImportError):
        raise _unsupported(f"{module}.{path}") from None
    return found


def _unsupported(missing: str) -> AdapterError:
    return AdapterError(
        "this adapter needs langgraph 1.1.5 and later with langchain-core 1.2.10 and later, below "
        f"2, got releases without {missing}. Install a supported release."
    )


_CONSTANTS: Final = "langgraph._internal._constants"
TASK: Final[str] = _found(_CONSTANTS, "CONFIG_KEY_TASK_ID")
PUSH: Final[str] = _found(_CONSTANTS, "PUSH")
INTERRUPT: Final[str] = _found(_CONSTANTS, "INTERRUPT")
CHECKPOINTER: Final[str] = _found(_CONSTANTS, "CONFIG_KEY_CHECKPOINTER")
_CALL: Final[str] = _found(_CONSTANTS, "CONFIG_KEY_CALL")
_CONFIG: Final[Any] = _found("langchain_core.runnables.config", "var_child_runnable_config")
_DEFAULT_HANDLER: Final = _found("langgraph.prebuilt.tool_node", "_default_handle_tool_errors")
if TYPE_CHECKING:
    from langgraph.prebuilt.tool_node import ToolInvocationError
else:
    ToolInvocationError = _found("langgraph.prebuilt.tool_node", "ToolInvocationError")
ROOT: Final = "__root__"
"""The channel of a graph whose state is one value; LangGraph has no name for it."""
COPY: Final = "__copy__"
"""Whose name a checkpoint is copied in, with what is to run there; LangGraph has none for it."""
HANDOFF: Final = "__handoff_destination"
"""In the metadata of the handoff tools of langgraph-supervisor and langgraph-swarm."""

# What is read off frames and objects: local variables, attributes that are set, annotations.
_READ: Final[tuple[tuple[str, str, frozenset[str]], ...]] = tuple(
    (module, path, frozenset(names.split()))
    for module, path, names in (
        ("langgraph.pregel", "Pregel.stream", "self config loop"),
        ("langgraph.pregel", "Pregel.astream", "self config loop"),
        ("langgraph.pregel._loop", "PregelLoop", "status checkpoint_pending_writes"),
        ("langgraph.pregel._loop", "PregelLoop", "checkpoint_config tasks"),
        ("langgraph.pregel._read", "PregelNode", "bound"),
        ("langgraph.types", "PregelExecutableTask", "proc"),
        ("langgraph._internal._runnable", "RunnableSeq.__init__", "steps"),
        ("langgraph._internal._runnable", "RunnableCallable.__init__", "func afunc"),
        ("langgraph.prebuilt", "ToolNode.__init__", "_handle_tool_errors"),
        ("langgraph.prebuilt", "ToolNode._run_one", "self"),
        ("langgraph.prebuilt", "ToolNode._arun_one", "self"),
        ("langchain_core.callbacks", "AsyncCallbackManager.on_chat_model_start", "inline_tasks"),
        ("langchain_core.callbacks", "AsyncCallbackManager.on_llm_start", "inline_tasks"),
        # The handler's hook is looked up in this very function.
        ("langchain_core.callbacks.manager", "_ahandle_event_for_handler", "getattr"),
        ("langchain_core.language_models", "BaseChatModel.generate", "self kwargs messages"),
        ("langchain_core.language_models", "BaseChatModel.agenerate", "self kwargs messages"),
        ("langchain_core.language_models", "BaseChatModel.stream", "self kwargs messages"),
        ("langchain_core.language_models", "BaseChatModel.astream", "self kwargs messages"),
        ("langchain_core.language_models", "BaseChatModel._generate", "messages"),
    )
)

FRAMEWORK_LIMITS: Final[tuple[type[Exception], ...]] = (GraphRecursionError,)
"""The framework's own caps."""
_DRAINED: Final[Any] = getattr(langgraph.errors, "GraphDrained", None)  # since LangGraph 1.2


def is_drained(error: BaseException | None) -> bool:
    """Return whether a graph was asked to leave off, between two steps, to go on elsewhere."""
    return _DRAINED is not None and isinstance(error, _DRAINED)


_NOTHING: Final[Mapping[str, Any]] = {}
_DEEPEST: Final = 150
_NEAREST: Final = 20
_MANAGER: Final = 7
_STREAMS: Final = frozenset({"stream", "astream"})
_STARTS: Final = frozenset({"on_chat_model_start", "on_llm_start"})
_CALLS: Final = frozenset({"generate", "agenerate", "stream", "astream"})
_APPROVES: Final = frozenset({"after_model"})
_RUNNING: Final = frozenset({"_run_one", "_arun_one"})


@cache
def probe() -> None:
    """Look for everything that is relied upon.

    Raises:
        AdapterError: A name is missing in the releases that are installed.
    """
    for module, path, names in _READ:
        missing = names - _names_in(_found(module, path))
        if missing:
            raise _unsupported(f"{min(missing)!r} in {module}.{path}")


def _names_in(owner: Any) -> set[str]:
    if isinstance(owner, type):
        return {name for kind in owner.__mro__ for name in vars(kind).get("__annotations__", ())}
    code: Any = getattr(unwrap(owner), "__code__", None)
    return set() if code is None else {*code.co_varnames, *code.co_cellvars, *code.co_names}


# The call stack


def _frame_of(names: frozenset[str], local: str, depth: int = _DEEPEST) -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - no public way
    while frame is not None and depth:
        code = frame.f_code
        if code.co_name in names and (local in code.co_varnames or local in code.co_cellvars):
            return frame
        frame = frame.f_back
        depth -= 1
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

    def chain_left(self) -> tuple[bool, list[Any], Any]:
        """Release the call; return whether it is at a breakpoint, its writes, and checkpoint."""
        frame, self._frame = self._frame, None
        loop: Any = None if frame is None else frame.f_locals.get("loop")
        status = str(getattr(loop, "status", "done"))
        found_at = getattr(loop, "checkpoint_config", None)
        if status == "done":
            return False, [], found_at
        # The calls of a workflow ask nobody: it does, once it has come to their answer.
        tasks: dict[str, Any] = getattr(loop, "tasks", {})
        calls = {n for n, one in tasks.items() if one.path[0] == PUSH and one.path[-1] is True}
        writes = [one for one in loop.checkpoint_pending_writes if one[0] not in calls]
        return status.startswith("interrupt_"), writes, found_at


def graph_call() -> GraphCall | None:
    """Return the call of a graph whose hook is running."""
    frame = _frame_of(_STREAMS, "loop", _NEAREST)
    if frame is None or not isinstance(frame.f_locals.get("self"), Pregel):
        return None
    return GraphCall(frame)


APPROVALS: Final = "langchain.agents.middleware.human_in_the_loop"
"""The module whose name `interrupt` is called where a person is asked about tool calls."""


def calls_to_approve() -> tuple[list[Any], list[int]]:
    """Return the tool calls of the answer that a person is asked about, and which of them."""
    frame = _frame_of(_APPROVES, "interrupt_indices", _NEAREST)
    if frame is None:
        return [], []
    return list(frame.f_locals["last_ai_msg"].tool_calls), frame.f_locals["interrupt_indices"]


def graph_of_manager() -> Any:
    """Return the graph that makes its callbacks in this hook: a call of it begins."""
    frame = _frame_of(_STREAMS, "loop", _MANAGER)
    found = None if frame is None else frame.f_locals.get("self")
    return cast("Any", found) if isinstance(found, Pregel) else None


class CurrentRequest(NamedTuple):
    """The request of a model whose start hook is running, as far as it is known.

    Settings and messages are the very objects that go on to the provider's package. Where several
    prompts start together there are no messages.
    """

    parameters: Mapping[str, Any]
    model: Any = None
    settings: dict[str, Any] | None = None
    messages: list[Any] | None = None


def current_request(parameters: Any) -> CurrentRequest:
    """Return the request whose start hook is running, with what the hook is told of it."""
    known: Mapping[str, Any] = parameters or _NOTHING
    frame = _frame_of(_CALLS, "kwargs", _NEAREST)
    if frame is None:
        return CurrentRequest(known)
    values: Any = frame.f_locals
    settings, messages = values["kwargs"], values.get("messages")
    # Told apart by their class, which tells a checker of types nothing of what is in them.
    if messages.__class__ is list and messages and messages[0].__class__ is list:
        messages = messages[0] if len(messages) == 1 else None
    return CurrentRequest(
        known,
        values.get("self"),
        settings if settings.__class__ is dict else None,
        messages if messages.__class__ is list else None,
    )


def _close_pending_hooks() -> None:
    """Close the coroutines of other callbacks' hooks, which a raising one leaves behind.

    langchain-core awaits them one after the other and drops the rest; each would warn.
    """
    frame = _frame_of(_STARTS, "inline_tasks")
    values: Any = {} if frame is None else frame.f_locals
    for task in (*values.get("inline_tasks", ()), *values.get("non_inline_tasks", ())):
        # The one that runs now is suspended nowhere, and must not be closed.
        if getattr(task, "cr_frame", None) is not None and not task.cr_running:
            task.close()


# Hooks

_STEP: Final = "graph:step:"


def is_step(tags: list[str] | None) -> bool:
    """Return whether a chain is the task of a node, by its tags."""
    for tag in tags or ():  # noqa: SIM110 - asked at each step
        if tag.startswith(_STEP):
            return True
    return False


_AWAITS: Final = _found("langchain_core.callbacks.manager", "_ahandle_event_for_handler").__name__


class WaitingHook:
    """A hook that waits as its caller does: in the task of asynchronous code, or blocking.

    langchain-core awaits the hooks of a handler only in asynchronous code, and swallows what an
    awaited one raises in synchronous code. So what it gets to see depends on who asks.
    """

    def __init__(self, flow: Callable[..., Flow[None] | None]) -> None:
        self._flow = flow

    def __get__(self, handler: object, owner: type) -> Any:
        asks = sys._getframe(1).f_code.co_name  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - no public way
        return MethodType(self._awaited if asks == _AWAITS else self._blocking, handler)

    def _blocking(self, handler: object, *given: Any, **facts: Any) -> None:
        flow = self._flow(handler, *given, **facts)
        if flow is not None:  # else there is nothing to wait for
            run_blocking(flow)

    async def _awaited(self, handler: object, *given: Any, **facts: Any) -> None:
        try:
            flow = self._flow(handler, *given, **facts)
            if flow is not None:
                await run_awaited(flow)
        except BaseException:
            _close_pending_hooks()
            raise


# Configurations


def _current_config() -> Mapping[str, Any]:
    """Return the configuration that code inherits."""
    found: Mapping[str, Any] = _CONFIG.get() or _NOTHING
    return found


def thread_of(config: Any) -> str | None:
    """Return the id of the thread that a configuration names."""
    for found_at in ("configurable", "metadata"):
        found = part(part(config, found_at), "thread_id")
        if found is not None:
            return str(found)
    return None


def configuration(config: Any = None) -> Mapping[str, Any]:
    """Return the configurable part of a configuration, of the code's own if none is given."""
    found: Any = _current_config() if config is None else config
    return found.get("configurable") or _NOTHING


def surrounding_run_id() -> Any:
    """Return the id of the chain that the code is a part of."""
    return getattr(_current_config().get("callbacks"), "parent_run_id", None)


def surrounding_callbacks() -> Any:
    """Return the callbacks that code inherits which is given none."""
    return _current_config().get("callbacks") or []


def with_callback(callbacks: Any, added: Any) -> Any:
    """Return callbacks in their own form, with one more."""
    if isinstance(callbacks, BaseCallbackManager):
        callbacks = callbacks.copy()
        callbacks.add_handler(added, inherit=True)
        return callbacks
    return [*callbacks, added]


# Models and tools


def parameters_of(model_kind: Any) -> Mapping[str, Any]:
    """Return what a class of models takes with a call."""
    return signature(model_kind._generate).parameters  # noqa: SLF001 - no public way


def options_of(model: Any, stop: Any = None) -> Any:
    """Return the options that a model of Ollama's sends; None where it does not tell."""
    reads = getattr(model, "_chat_params", None)
    return None if reads is None else reads([], stop)["options"]


class ToolCallRefused(ToolInvocationError):
    """The error that a `ToolNode` turns into a result; see `refusal`."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.tool_name, self.tool_kwargs = "", {}
        self.source = cast("Any", None)
        self.filtered_errors = None


def enclosing_tool_node() -> ToolNode | None:
    """Return the `ToolNode` that runs the tool whose start hook is running, or None.

    It is on the stack, unless a sync tool of an async graph runs in a thread: then it is in the
    task that LangGraph's configuration leads to.
    """
    frame = _frame_of(_RUNNING, "self")
    node: Any = None if frame is None else frame.f_locals.get("self")
    if isinstance(node, ToolNode):
        return node
    for reference in getattr(configuration().get(_CALL), "args", ()):
        process = getattr(reference() if callable(reference) else None, "proc", None)
        for step in (process, *getattr(process, "steps", ())):
            if isinstance(step, ToolNode):
                return step
    return None


def refusal(node: ToolNode | None, message: str) -> Exception | None:
    """Make the exception that this `ToolNode` turns into an error result, if it would.

    Anything else that it would not handle fails the whole node, and its siblings with it.
    """
    flag: Any = getattr(node, "_handle_tool_errors", None)
    if isinstance(flag, (type, tuple)):
        handles = issubclass(ToolCallRefused, cast("Any", flag))
    else:
        # A handler of the user's own would answer with words of its own.
        handles = flag is _DEFAULT_HANDLER or (isinstance(flag, (bool, str)) and bool(flag))
    return ToolCallRefused(message) if handles else None


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
            and str(record.args[2]).startswith(("Budget", "ToolCallRef"))
        )


logging.getLogger("langchain_core.callbacks.manager").addFilter(_StopsAreNoErrors())
