"""Copies of an agent's tools for one turn, which ask the run that they are called in.

The user's own tools are never changed. The copies hold no run: they find it around them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple, cast

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
from budgetguard_core.kit import FRAME, PROGRESS_TOOL, entered
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._calls import RunFrame, ToolCalls, around
from budgetguard_openai_agents._history import Asked, picture_of

_NAME = "budgetguard"
_ORIGINAL = "_budgetguard_original"
_RESULTS = "tool_input_guardrail_results"
_EDITS = frozenset({"create_file", "update_file", "delete_file"})


class _Copied(NamedTuple):
    """A tool, what it held when its copy was made, and the copy."""

    tool: Tool
    held: tuple[dict[str, Any], tuple[Any, ...]]
    copy: Tool


def begin_turn(calls: ToolCalls, tools: list[Tool]) -> list[Tool]:
    """Give an agent copies of its tools that ask its run, and make this task the turn's."""
    calls.turn_frame = RunFrame(calls)
    FRAME.set(calls.turn_frame)
    known, calls.copies = calls.copies, {}
    calls.tools = [_copy_of(tool, known, calls.copies) for tool in tools]
    asks = calls.run.guard.budget.progress is not None
    if asks and not any(tool.name == PROGRESS_TOOL.name for tool in tools):
        calls.tools.append(copied(_progress_tool()))
    return calls.tools


def _copy_of(tool: Tool, known: dict[int, _Copied], copies: dict[int, Any]) -> Tool:
    """Return a tool's copy, that of the turn before where the tool is what it was."""
    if not isinstance(tool, FunctionTool):
        return copied(tool)
    before = known.get(id(tool))
    # The list may be changed in place.
    held = vars(tool), tuple(tool.tool_input_guardrails or ())
    if before is None or before.tool is not tool or before.held != held:
        before = _Copied(tool, ({**held[0]}, held[1]), copied(tool))
    copies[id(tool)] = before
    return before.copy


def copied(tool: Tool) -> Tool:
    """Return a copy of a tool that asks before its body starts; itself where it cannot."""
    if hasattr(tool, _ORIGINAL):
        return tool
    made: Any
    if isinstance(tool, FunctionTool):
        made = _seams.with_invoker(tool, lambda body: _noted_body(tool, body))
        made.tool_input_guardrails = [_GATE, *(tool.tool_input_guardrails or ())]
        if tool.needs_approval is not False:
            made.needs_approval = partial(_needs_approval, tool.needs_approval)
    elif isinstance(tool, CustomTool):
        made = copy.copy(tool)
        made.on_invoke_tool = _asking(made, tool.on_invoke_tool)
    elif isinstance(tool, ShellTool | LocalShellTool):
        if tool.executor is None:
            return tool
        made = copy.copy(tool)
        made.executor = _asking(made, tool.executor)
    elif isinstance(tool, ApplyPatchTool):
        made = copy.copy(tool)
        made.editor = _Editor(made, tool.editor)
    elif isinstance(tool, ComputerTool):
        made = _computer(tool)
    else:
        return tool
    setattr(made, _ORIGINAL, tool)
    return cast("Tool", made)


def _computer(tool: ComputerTool[Any]) -> ComputerTool[Any]:
    made = copy.copy(tool)
    # Of a computer that is made for each run, the tool shows the one that was made last.
    is_shared = isinstance(tool.computer, Computer | AsyncComputer)
    if is_shared and not _seams.makes_computers(tool):
        made.computer = _Screen(tool, tool.computer)
        return made

    async def make(*, run_context: Any) -> _Screen:
        # The user's tool makes one for each run, and disposes of it.
        return _Screen(tool, await resolve_computer(tool=tool, run_context=run_context))

    made.computer = make
    return made


async def _needs_approval(own: Any, context: Any, arguments: Any, call_id: str) -> bool:
    """Ask a person as the tool says, but of no call that a limit has refused."""
    calls = around()
    if calls is not None and calls.has_refused(call_id):
        return False
    answer = own(context, arguments, call_id) if callable(own) else own
    return bool(await answer if inspect.isawaitable(answer) else answer)


async def _answer(data: ToolInputGuardrailData) -> ToolGuardrailFunctionOutput:
    calls = around()
    refusal = None if calls is None else await calls.admitted(data.context)
    if refusal is not None:
        return ToolGuardrailFunctionOutput.reject_content(refusal)
    return ToolGuardrailFunctionOutput.allow()


_GATE = ToolInputGuardrail[Any](guardrail_function=_answer, name=_NAME)


def _noted_body(
    tool: FunctionTool, body: Callable[[Any, str], Awaitable[Any]]
) -> Callable[[Any, str], Awaitable[Any]]:
    is_agent = _seams.is_agent_tool(tool)

    async def noted(context: Any, arguments: str) -> Any:
        calls = around()
        asked = None if calls is None else calls.running(context, tool)
        if asked is None:
            return await body(context, arguments)
        try:
            result = await body(context, arguments)
        except BudgetExceeded as stop:
            # It stops the run at its next step; a text of failure would invite another try.
            asked.error = stop
            final = None if stop.outcome is None else stop.outcome.final
            asked.partial = "" if final is None else str(final)
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


def _asking(
    tool: Any, execute: Callable[..., Any], refused: Callable[[str], Any] = str
) -> Callable[..., Any]:
    """Wrap the body of a copy to ask before it starts; `refused` makes a result of a refusal."""

    @wraps(execute)
    def asking(*given: Any, **named: Any) -> Any:
        calls = around()
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

    def __init__(self, tool: Any, editor: Any) -> None:
        self._asking = partial(_asking, tool, refused=_failed_edit)
        self._own = editor

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._own, name)
        return self._asking(own) if name in _EDITS else own


def _failed_edit(text: str) -> ApplyPatchResult:
    return ApplyPatchResult(status="failed", output=text)


@AsyncComputer.register
class _Screen:
    """The computer of a copy; its methods may be those of a sync one."""

    def __init__(self, tool: Any, computer: Any) -> None:
        self._asking = partial(_asking, tool, refused=picture_of)
        self._own = computer
        self.tool = tool

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._own, name)
        return self._asking(own) if inspect.ismethod(own) else own


@contextmanager
def _noted(calls: ToolCalls, asked: Asked) -> Generator[None]:
    with entered(RunFrame(calls, asked)):
        try:
            yield
        except BaseException as error:
            asked.error = error
            raise


async def _awaited(calls: ToolCalls, asked: Asked, result: Awaitable[Any]) -> Any:
    with _noted(calls, asked):
        return await result


def original(tool: Tool) -> Tool:
    """Return the user's own tool."""
    own: Tool = getattr(tool, _ORIGINAL, tool)
    if isinstance(own, ComputerTool) and isinstance(own.computer, _Screen):
        # The SDK makes another copy for a computer of the run's own.
        return cast("Tool", own.computer.tool)
    return own


def _progress_tool() -> FunctionTool:
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


def hide_gate(*owners: Any) -> None:
    """Take the results of the copies' own guardrail out of what users see."""
    for owner in owners:
        # Older releases do not report them of a run that failed.
        results: list[ToolInputGuardrailResult] = getattr(owner, _RESULTS, [])
        own = [one for one in results if one.guardrail.get_name() != _NAME]
        if len(own) < len(results):
            setattr(owner, _RESULTS, own)
