"""Copies of an agent's tools for one turn, which ask the run that they are called in.

The user's own tools are never changed. The copies hold no run: they find it around them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Protocol, cast

from agents import (
    ApplyPatchTool,
    AsyncComputer,
    Computer,
    ComputerTool,
    CustomTool,
    FunctionTool,
    LocalShellTool,
    ShellTool,
    Tool,
    ToolGuardrailFunctionOutput,
    ToolInputGuardrail,
    ToolInputGuardrailData,
    ToolInputGuardrailResult,
    resolve_computer,
)
from agents.editor import ApplyPatchResult

from budgetguard_core import BudgetExceeded
from budgetguard_core.kit import PROGRESS_TOOL
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._history import Asked, picture_of

_NAME = "budgetguard"
_ORIGINAL = "_budgetguard_original"
_RESULTS = "tool_input_guardrail_results"
_EDITS = frozenset({"create_file", "update_file", "delete_file"})


class Calls(Protocol):
    """The part of a run that the copies need."""

    async def admitted(self, context: Any) -> str | None:
        """Make this task the body of a call; or return what is given in place of its result."""
        ...

    def refusal(self, asked: Asked) -> str | None:
        """Return what is given in place of a call's result; None where it may start."""
        ...

    def running(self, context: Any, tool: Tool) -> Asked | None:
        """Return the call whose body runs now."""
        ...

    def entered(self, asked: Asked) -> Any:
        """Make the code of a block the body of a call."""
        ...


class Finder(Protocol):
    """Finds the run around the code that runs."""

    def __call__(self) -> Calls | None:
        """Return it; None outside of any."""
        ...


class Gates:
    """Makes the copies.

    Args:
        find: Finds the run around the code that runs.
    """

    def __init__(self, find: Finder) -> None:
        self._find = find
        self._gate = ToolInputGuardrail[Any](guardrail_function=self._answer, name=_NAME)

    def tool(self, tool: Tool) -> Tool:
        """Return a copy of a tool that asks before its body starts; itself where it cannot."""
        if hasattr(tool, _ORIGINAL):
            return tool
        gated: Any
        if isinstance(tool, FunctionTool):
            gated = self._function(tool)
        elif isinstance(tool, CustomTool):
            gated = copy.copy(tool)
            gated.on_invoke_tool = self.asking(gated, tool.on_invoke_tool)
        elif isinstance(tool, ShellTool | LocalShellTool):
            if tool.executor is None:
                return tool
            gated = copy.copy(tool)
            gated.executor = self.asking(gated, tool.executor)
        elif isinstance(tool, ApplyPatchTool):
            gated = copy.copy(tool)
            gated.editor = _Editor(self, gated, tool.editor)
        elif isinstance(tool, ComputerTool):
            gated = self._computer(tool)
        else:
            return tool
        setattr(gated, _ORIGINAL, tool)
        return cast("Tool", gated)

    def _computer(self, tool: ComputerTool[Any]) -> ComputerTool[Any]:
        gated = copy.copy(tool)
        # Of a computer that is made for each run, the tool shows the one that was made last.
        is_shared = isinstance(tool.computer, Computer | AsyncComputer)
        if is_shared and not _seams.makes_computers(tool):
            gated.computer = _Screen(self, tool, tool.computer)
            return gated

        async def make(*, run_context: Any) -> _Screen:
            # The user's tool makes one for each run, and disposes of it.
            return _Screen(self, tool, await resolve_computer(tool=tool, run_context=run_context))

        gated.computer = make
        return gated

    def _function(self, tool: FunctionTool) -> FunctionTool:
        gated = _seams.with_invoker(tool, lambda body: self._body(tool, body))
        gated.tool_input_guardrails = [self._gate, *(tool.tool_input_guardrails or ())]
        return gated

    async def _answer(self, data: ToolInputGuardrailData) -> ToolGuardrailFunctionOutput:
        calls = self._find()
        refusal = None if calls is None else await calls.admitted(data.context)
        if refusal is not None:
            return ToolGuardrailFunctionOutput.reject_content(refusal)
        return ToolGuardrailFunctionOutput.allow()

    def _body(
        self, tool: FunctionTool, body: Callable[[Any, str], Awaitable[Any]]
    ) -> Callable[[Any, str], Awaitable[Any]]:
        is_agent = _seams.is_agent_tool(tool)

        async def noted(context: Any, arguments: str) -> Any:
            calls = self._find()
            asked = None if calls is None else calls.running(context, tool)
            if asked is None:
                return await body(context, arguments)
            try:
                result = await body(context, arguments)
            except BudgetExceeded as stop:
                # It stops the run at its next step; a text of failure would invite another try.
                asked.error = stop
                asked.partial = text_of(stop)
                return asked.partial
            except BaseException as error:
                if not (is_agent and asked.partial is not None and isinstance(error, Exception)):
                    asked.error = error
                    raise
                result = None
            # What the agent was stopped with is a text, whatever would have made an output of it.
            return asked.partial if is_agent and asked.partial is not None else result

        noted.__dict__.update(getattr(body, "__dict__", {}))
        return noted

    def asking(
        self,
        tool: Any,
        execute: Callable[..., Any],
        refused: Callable[[str], Any] = str,
    ) -> Callable[..., Any]:
        """Request admission before a copy's body starts; `refused` makes a result of a refusal."""

        @wraps(execute)
        def asking(*given: Any, **named: Any) -> Any:
            calls = self._find()
            context = given[0] if isinstance(tool, CustomTool) else None
            asked = None if calls is None else calls.running(context, tool)
            if calls is None or asked is None:
                return execute(*given, **named)
            refusal = calls.refusal(asked)
            if refusal is not None:
                return refused(refusal)
            with _noted(calls, asked):
                result = execute(*given, **named)
            return _awaited(calls, asked, result) if inspect.isawaitable(result) else result

        return asking


class _Editor:
    """The editor of a copy."""

    def __init__(self, gates: Gates, tool: Any, editor: Any) -> None:
        def refused(text: str) -> ApplyPatchResult:
            return ApplyPatchResult(status="failed", output=text)

        self._asking = partial(gates.asking, tool, refused=refused)
        self._own = editor

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._own, name)
        return self._asking(own) if name in _EDITS else own


@AsyncComputer.register
class _Screen:
    """The computer of a copy; its methods may be those of a sync one."""

    def __init__(self, gates: Gates, tool: Any, computer: Any) -> None:
        self._asking = partial(gates.asking, tool, refused=picture_of)
        self._own = computer
        self.tool = tool

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._own, name)
        return self._asking(own) if inspect.ismethod(own) else own


@contextmanager
def _noted(calls: Calls, asked: Asked) -> Generator[None]:
    with calls.entered(asked):
        try:
            yield
        except BaseException as error:
            asked.error = error
            raise


async def _awaited(calls: Calls, asked: Asked, result: Awaitable[Any]) -> Any:
    with _noted(calls, asked):
        return await result


def original(tool: Tool) -> Tool:
    """Return the user's own tool."""
    own: Tool = getattr(tool, _ORIGINAL, tool)
    if isinstance(own, ComputerTool) and isinstance(own.computer, _Screen):
        # The SDK makes another copy for a computer of the run's own.
        return cast("Tool", own.computer.tool)
    return own


def progress_tool() -> FunctionTool:
    """Make the tool that a model reports its progress with."""

    async def report(_: Any, arguments: str) -> str:
        return PROGRESS_TOOL.report(arguments)

    return FunctionTool(
        name=PROGRESS_TOOL.name,
        description=PROGRESS_TOOL.description,
        params_json_schema=dict(PROGRESS_TOOL.parameters),
        on_invoke_tool=report,
        strict_json_schema=False,
    )


def text_of(stop: BudgetExceeded) -> str:
    """Return what a run that was stopped had brought, as one text."""
    return "" if stop.outcome is None or stop.outcome.final is None else str(stop.outcome.final)


def hide_gate(*owners: Any) -> None:
    """Take the results of the copies' own guardrail out of what users see."""
    for owner in owners:
        # Older releases do not report them of a run that failed.
        results: list[ToolInputGuardrailResult] = getattr(owner, _RESULTS, [])
        own = [one for one in results if one.guardrail.get_name() != _NAME]
        if len(own) < len(results):
            setattr(owner, _RESULTS, own)
