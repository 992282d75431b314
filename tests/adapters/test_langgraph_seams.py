"""Private names of the frameworks are in one file, and a release without one of them is refused."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
from pathlib import Path

import pytest

import budgetguard_langgraph
from budgetguard_core import AdapterError

FOLDER = Path(budgetguard_langgraph.__file__).parent
CONSTANTS = "langgraph._internal._constants"
CORE = "langchain_core.language_models"

# Each name that is relied upon, and where it is looked for.
NAMES = [
    (CONSTANTS, "CONFIG_KEY_TASK_ID"),
    (CONSTANTS, "CONFIG_KEY_CHECKPOINTER"),
    (CONSTANTS, "CONFIG_KEY_CALL"),
    (CONSTANTS, "PUSH"),
    (CONSTANTS, "INTERRUPT"),
    ("langgraph.prebuilt.tool_node", "_default_handle_tool_errors"),
    ("langgraph.prebuilt.tool_node", "ToolInvocationError"),
    ("langgraph.prebuilt", "ToolNode._run_one"),
    ("langgraph.prebuilt", "ToolNode._arun_one"),
    ("langgraph.pregel", "Pregel.stream"),
    ("langgraph.pregel", "Pregel.astream"),
    ("langgraph.pregel._loop", "PregelLoop"),
    ("langchain_core.runnables.config", "var_child_runnable_config"),
    (CORE, "BaseChatModel._generate"),
    (CORE, "BaseChatModel.generate"),
    (CORE, "BaseChatModel.agenerate"),
    (CORE, "BaseChatModel.stream"),
    (CORE, "BaseChatModel.astream"),
    ("langchain_core.callbacks", "AsyncCallbackManager.on_chat_model_start"),
    ("langchain_core.callbacks", "AsyncCallbackManager.on_llm_start"),
    ("langchain_core.callbacks.manager", "_ahandle_event_for_handler"),
]
LOCALS = [
    ("langgraph.pregel", "Pregel.stream", "loop"),
    ("langgraph.pregel", "Pregel.stream", "config"),
    ("langgraph.pregel", "Pregel.astream", "loop"),
    ("langgraph.pregel", "Pregel.astream", "config"),
    (CORE, "BaseChatModel.generate", "kwargs"),
    (CORE, "BaseChatModel.generate", "messages"),
    (CORE, "BaseChatModel.agenerate", "kwargs"),
    (CORE, "BaseChatModel.agenerate", "messages"),
    (CORE, "BaseChatModel.stream", "kwargs"),
    (CORE, "BaseChatModel.stream", "messages"),
    (CORE, "BaseChatModel.astream", "kwargs"),
    (CORE, "BaseChatModel.astream", "messages"),
    ("langchain_core.callbacks", "AsyncCallbackManager.on_chat_model_start", "inline_tasks"),
    ("langchain_core.callbacks", "AsyncCallbackManager.on_llm_start", "inline_tasks"),
    ("langchain_core.callbacks.manager", "_ahandle_event_for_handler", "getattr"),
    ("langgraph.prebuilt", "ToolNode.__init__", "_handle_tool_errors"),
    ("langgraph._internal._runnable", "RunnableSeq.__init__", "steps"),
    ("langgraph._internal._runnable", "RunnableCallable.__init__", "func"),
    ("langgraph._internal._runnable", "RunnableCallable.__init__", "afunc"),
]
ANNOTATIONS = [
    ("langgraph.pregel._loop", "PregelLoop", "status"),
    ("langgraph.pregel._loop", "PregelLoop", "checkpoint_pending_writes"),
    ("langgraph.pregel._read", "PregelNode", "bound"),
    ("langgraph.types", "PregelExecutableTask", "proc"),
]


def owner_of(module, path):
    found = importlib.import_module(module)
    *before, name = path.split(".")
    for one in before:
        found = getattr(found, one)
    return found, name


def attach():
    """Import the file anew, as another process would, and attach."""
    before = list(logging.getLogger("langchain_core.callbacks.manager").filters)
    spec = importlib.util.spec_from_file_location("seams_again", FOLDER / "_seams.py")
    again = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(again)
        again.probe()
    finally:
        logging.getLogger("langchain_core.callbacks.manager").filters[:] = before


def refused(name):
    with pytest.raises(AdapterError, match=r"needs langgraph 1\.1\.5 and later") as raised:
        attach()
    assert name in str(raised.value)
    assert "Install a supported release" in str(raised.value)


def test_the_installed_releases_have_it_all():
    attach()


@pytest.mark.parametrize(("module", "path"), NAMES)
def test_a_release_without_a_name_is_refused(monkeypatch, module, path):
    owner, name = owner_of(module, path)
    # A class may have inherited it.
    for one in getattr(owner, "__mro__", (owner,)):
        if name in vars(one):
            monkeypatch.delattr(one, name)
    refused(name)


@pytest.mark.parametrize(("module", "path", "local"), LOCALS)
def test_a_release_that_keeps_it_under_another_name_is_refused(monkeypatch, module, path, local):
    owner, name = owner_of(module, path)

    # All the others are there.
    others = {one for *where, one in LOCALS if where == [module, path]} - {local}

    def changed(self):
        return self

    changed.__code__ = changed.__code__.replace(co_names=tuple(sorted(others)))
    monkeypatch.setattr(owner, name, changed)
    refused(repr(local))


@pytest.mark.parametrize(("module", "path", "attribute"), ANNOTATIONS)
def test_a_release_whose_objects_lack_it_is_refused(monkeypatch, module, path, attribute):
    owner, name = owner_of(module, path)
    for kind in getattr(owner, name).__mro__:
        if attribute in vars(kind).get("__annotations__", ()):
            monkeypatch.delitem(vars(kind)["__annotations__"], attribute)
    refused(repr(attribute))


def test_bounded_the_callback_and_the_middleware_all_look(monkeypatch):
    from langgraph.graph import START, MessagesState, StateGraph

    from budgetguard_core import Budget
    from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, _seams, bounded

    graph = StateGraph(MessagesState)
    graph.add_node("a", lambda s: s)
    graph.add_edge(START, "a")
    compiled = graph.compile()
    owner, _ = owner_of("langgraph.pregel._loop", "PregelLoop")
    monkeypatch.delitem(owner.PregelLoop.__annotations__, "status")
    _seams.probe.cache_clear()
    for attach_one in (lambda b: bounded(compiled, b), BudgetCallback, BudgetMiddleware):
        with pytest.raises(AdapterError, match="'status' in langgraph"):
            attach_one(Budget())
    monkeypatch.undo()
    _seams.probe()


def private_uses(path):
    """Private attributes, private modules and reserved keys that a file names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = ast.unparse(node.value) in ("self", "super()")
            if not own and not node.attr.startswith("__"):
                yield node.attr
        if isinstance(node, ast.ImportFrom) and node.module.startswith("lang"):
            yield from (part for part in node.module.split(".") if part.startswith("_"))
            yield from (one.name for one in node.names if one.name.startswith("_"))
            yield from (one.name for one in node.names if one.name.startswith("var_"))
        if isinstance(node, ast.Constant) and str(node.value).startswith(("__pregel", "__inter")):
            yield node.value


# Attributes of this adapter's own objects.
OWN = {"_budgetguard", "_astream", "_stream", "_enclosing", "_callbacks"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_no_other_file_touches_a_private_name(path):
    found = set(private_uses(path)) - OWN
    assert bool(found) is (path.name == "_seams.py"), found
