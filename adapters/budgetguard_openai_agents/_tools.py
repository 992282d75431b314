"""Copies of an agent's tools for one turn, which ask the run that they are called in.

The user's own tools are never changed. The copies hold no run: they find it around them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, cast

import agents
from agents.editor import ApplyPatchResult

from budgetguard_core import BudgetExceeded
from budgetguard_core.kit import NOT_EXECUTED, PROGRESS_TOOL, entered
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._frame import RunFrame, recorder_here
from budgetguard_openai_agents._history import RequestedCall, picture_of

_ORIGINAL = "_budgetguard_original"


def tools_of_a_turn(recorder: Any, tools: list[agents.Tool]) -> list[agents.Tool]:
    """Return copies of an agent's tools, and the one that reports progress where that is asked."""
    copies = [_copy_of(recorder, tool) for tool in tools]
    asks = recorder.run.guard.budget.progress is not None
    if asks and not any(tool.name == PROGRESS_TOOL.name for tool in tools):
        copies.append(copied(_progress_tool()))
    return copies


def _copy_of(recorder: Any, tool: agents.Tool) -> agents.Tool:
    """Return a tool's copy, that of the turn before where a function tool is what it was."""
    if not isinstance(tool, agents.FunctionTool):
        return copied(tool)
    known = recorder.copies.get(id(tool))
    if known is None or known[0] is not tool or known[1] != vars(tool):
        known = recorder.copies[id(tool)] = tool, {**vars(tool)}, copied(tool)
    return cast("agents.Tool", known[2])


def copied(tool: agents.Tool) -> agents.Tool:
    """Return a copy of a tool that asks before its body starts; itself where it cannot."""
    if hasattr(tool, _ORIGINAL):
        return tool
    made: Any = copy.copy(tool)
    if isinstance(tool, agents.FunctionTool):
        made = _seams.with_invoker(tool, partial(_function_body, tool))
        if tool.needs_approval is True or callable(tool.needs_approval):
            made.needs_approval = partial(_needs_approval, tool.needs_approval)
    elif isinstance(tool, agents.CustomTool):
        made.on_invoke_tool = _asking(made, tool.on_invoke_tool)
    elif isinstance(tool, agents.ShellTool | agents.LocalShellTool) and tool.executor is not None:
        made.executor = _asking(made, tool.executor)
    elif isinstance(tool, agents.ApplyPatchTool):
        made.editor = _Proxy(made, tool.editor, _failed_edit)
    elif isinstance(tool, agents.ComputerTool):
        made.computer = _computer(tool)
    else:
        return tool
    setattr(made, _ORIGINAL, tool)
    return cast("agents.Tool", made)


def original(tool: agents.Tool) -> agents.Tool:
    """Return the user's own tool."""
    own: agents.Tool = getattr(tool, _ORIGINAL, tool)
    if isinstance(own, agents.ComputerTool) and isinstance(own.computer, _Proxy):
        # The SDK makes another copy for a computer of the run's own.
        return cast("agents.Tool", own.computer.copy_of)
    return own


def _function_body(
    tool: agents.FunctionTool, body: Callable[[Any, str], Awaitable[Any]]
) -> Callable[[Any, str], Awaitable[Any]]:
    is_agent = _seams.is_agent_tool(tool)

    async def counted_body(context: Any, arguments: str) -> Any:
        recorder, requested = _at_work(tool, context)
        if requested is None:
            return await body(context, arguments)
        if requested.open_call.state != "started":
            return requested.open_call.refusal or NOT_EXECUTED
        result = None
        try:
            with _Noted(recorder, requested):
                result = await body(context, arguments)
        except BudgetExceeded as stop:
            # It stops the run at its next step; a text of failure would invite another try.
            final = None if stop.outcome is None else stop.outcome.final
            requested.partial = "" if final is None else str(final)
            return requested.partial
        except Exception:
            if not is_agent or requested.partial is None:
                raise
            requested.error = None
        # What the agent was stopped with is a text, whatever would have made an output of it.
        return result if requested.partial is None or not is_agent else requested.partial

    counted_body.__dict__.update(getattr(body, "__dict__", {}))
    return counted_body


async def _needs_approval(own: Any, context: Any, arguments: Any, call_id: str) -> bool:
    """Ask a person as the tool says, but of no call that a limit has refused."""
    recorder = recorder_here()
    if recorder is not None and recorder.has_refused(call_id):
        return False
    answer = own(context, arguments, call_id) if callable(own) else own
    return bool(await answer if inspect.isawaitable(answer) else answer)


def _at_work(tool: Any, context: Any) -> tuple[Any, RequestedCall | None]:
    recorder = recorder_here()
    return recorder, None if recorder is None else recorder.find(context, tool)


def _asking(
    tool: Any, execute: Callable[..., Any], refused: Callable[[str], Any] = str
) -> Callable[..., Any]:
    """Wrap the body of a copy to ask before it starts; `refused` makes a result of a refusal."""

    @wraps(execute)
    def asking(*given: Any, **named: Any) -> Any:
        recorder, requested = _at_work(tool, given[0] if given else None)
        if requested is None:
            return execute(*given, **named)
        if requested.open_call.state != "started":
            return refused(requested.open_call.refusal or NOT_EXECUTED)
        with _Noted(recorder, requested):
            result = execute(*given, **named)
        return _awaited(recorder, requested, result) if inspect.isawaitable(result) else result

    return asking


class _Noted(entered):
    """The block around the body of a call, which notes what it raises."""

    __slots__ = ("_requested",)

    def __init__(self, recorder: Any, requested: RequestedCall) -> None:
        super().__init__(RunFrame(recorder, requested))
        self._requested = requested

    def __exit__(self, *ending: Any) -> None:
        super().__exit__(*ending)
        self._requested.error = ending[1] or self._requested.error


async def _awaited(recorder: Any, requested: RequestedCall, result: Awaitable[Any]) -> Any:
    with _Noted(recorder, requested):
        return await result


@agents.AsyncComputer.register
class _Proxy:
    """The editor or the computer of a copy; a computer's methods may be those of a sync one."""

    def __init__(self, tool: Any, own: Any, refused: Callable[[str], Any]) -> None:
        self.copy_of = tool
        self._own = own
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._own, name)
        return _asking(self.copy_of, own, self._refused) if callable(own) else own


def _failed_edit(text: str) -> ApplyPatchResult:
    return ApplyPatchResult(status="failed", output=text)


def _computer(tool: agents.ComputerTool[Any]) -> Any:
    # Of a computer that is made for each run, the tool shows the one that was made last.
    is_shared = isinstance(tool.computer, agents.Computer | agents.AsyncComputer)
    if is_shared and not _seams.makes_computers(tool):
        return _Proxy(tool, tool.computer, picture_of)

    async def make(*, run_context: Any) -> _Proxy:
        # The user's tool makes one for each run, and disposes of it.
        own = await agents.resolve_computer(tool=tool, run_context=run_context)
        return _Proxy(tool, own, picture_of)

    return make


def _progress_tool() -> agents.FunctionTool:
    """Make the tool that a model reports its progress with."""

    async def report(_: Any, arguments: str) -> str:
        return PROGRESS_TOOL.report(arguments)

    return agents.FunctionTool(
        name=PROGRESS_TOOL.name,
        description=PROGRESS_TOOL.description,
        params_json_schema=dict(PROGRESS_TOOL.parameters),
        on_invoke_tool=report,
        strict_json_schema=False,
    )
