"""The tool calls of a run: asked for together, found by identity, answered or run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from agents import (
    Agent,
    AgentsException,
    ApplyPatchTool,
    ComputerTool,
    FunctionTool,
    LocalShellTool,
    RunHooks,
    RunItem,
    ShellTool,
    Tool,
)

from budgetguard_core import BudgetExceeded, StopReason, Trip
from budgetguard_core.kit import (
    FRAME,
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    Batch,
    Frame,
    OpenToolCall,
    Run,
    ToolCall,
    Violation,
    part,
    run_awaited,
)
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._history import LOCAL, Asked, asked_calls

_NO_RESULT = "no result"
_NO_TOOL: Any = None
# What the calls of tools look like that are called without a name, the likeliest first.
_TYPES: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (ShellTool, ("shell_call", "local_shell_call")),
    (LocalShellTool, ("local_shell_call", "shell_call")),
    (ApplyPatchTool, ("apply_patch_call",)),
    (ComputerTool, ("computer_call",)),
)


class RunStopped(BudgetExceeded, AgentsException):
    """A run was stopped: `trip` says why, `outcome` is the partial result.

    It leaves a run only with `on_trip="raise"`, or through a run inside a run whose limit it was.
    """


class RunFrame(Frame):
    """Code of a run of the SDK; `asked` is the tool call whose body it is."""

    __slots__ = ("asked", "calls")

    def __init__(self, calls: ToolCalls, asked: Asked | None = None) -> None:
        run = calls.run
        call = None if asked is None else asked.opened
        super().__init__(run.guard, run=run, call=call, above=run.above)
        self.calls = calls
        self.asked = asked


class ToolCalls:
    """The tool calls of one run.

    Args:
        run: The run, as the budget knows it.
        hooks: The user's hooks.

    Attributes:
        turn_frame: What the turn at hand runs in, its model call included; at first all of the run.
        tools: The tools of the turn at hand.
        copies: The copies of its tools.
        bounds: The hooks of the run, which its models ask; None where nothing bounds them.
        earlier: The items of an earlier attempt of the run.
        resumed: The calls that the earlier attempt had asked for, and left to this one.
        may_wait: A store or a person has a say in what is admitted.
        stopping: Why the run ends, where it is no limit of the budget's.
    """

    def __init__(self, run: Run, hooks: RunHooks[Any]) -> None:
        self.run = run
        self.hooks = hooks
        self.turn_frame: Frame = RunFrame(self)
        self.tools: list[Tool] = []
        self.bounds: Any = None
        self.earlier: list[RunItem] = []
        self.resumed: list[Asked] = []
        self.stopping: Trip | None = None
        self._batch: list[Asked] = []
        self.may_wait = any(guard.state.may_wait for guard in run.guards)
        self.copies: dict[int, Any] = {}

    async def answer(self, question: Callable[[], Any]) -> Any:
        """Ask the guards; where a store has a say in a thread, or it would block the event loop."""
        return await run_awaited(self.run.ask(question))

    async def ask(self, batch: list[Asked]) -> None:
        """Ask for the calls of a reply, all together, or stop the run."""
        self._batch = batch
        if self.may_wait:
            await self.answer(lambda: self._opened(batch))
        else:
            self._opened(batch)
        trip = self.run.trip
        if trip is not None and not any(
            one.is_local and one.opened and one.opened.state == "waiting" for one in batch
        ):
            self.stop(trip)

    def _opened(self, batch: list[Asked]) -> Batch:
        # What the provider has run already takes its places before anything else starts.
        listed = sorted(batch, key=lambda one: one.call.kind != "hosted")
        answers = self.run.batch(one.call for one in listed)
        for asked, opened in zip(listed, answers, strict=True):
            asked.opened = opened
        return answers

    def has_refused(self, call_id: str) -> bool:
        """Return whether a limit has refused a call of the reply at hand."""
        refused = (one for one in self._batch if one.opened and one.opened.state == "refused")
        return any(one.call.id == call_id for one in refused)

    def trip_of(self, violation: Violation) -> Trip:
        """Make the stop of a limit that is not the budget's own."""
        return Trip(reason=violation.reason, violations=(violation,), run_id=self.run.guard.run_id)

    def stop(self, trip: Trip) -> NoReturn:
        """End the run from within."""
        self.stopping = trip
        raise RunStopped(trip)

    def _find(self, context: Any, tool: Tool, *states: str) -> Asked | None:
        """Find a call: by the object in its response, or else the next one of its tool."""
        raw = getattr(context, "tool_call", None)
        if raw is not None:
            known = False
            for one in self._batch:
                if one.raw is raw:
                    known = True
                    if one.opened is not None and one.opened.state in states:
                        return one
            if known:
                return None
        call_id = getattr(context, "tool_call_id", None)
        here = [one for one in self._batch if one.opened and one.opened.state in states]
        if call_id is not None:
            # The SDK made another object of the call, as it does on a resume.
            return next((one for one in here if one.call.id == call_id), None)
        # Shells, computers and patches come without an id, one after the other.
        same = self._alike(tool)
        if same:
            at_work = next((one for one in reversed(same) if one.is_begun), None)
            return at_work if at_work in here else None
        return next((one for one in here if one.call.name == getattr(tool, "name", None)), None)

    async def admitted(self, context: Any) -> str | None:
        """Make this task the body of a call that is about to start, once it has its place.

        Returns:
            None, or what is given in place of its result.
        """
        asked = self._find(context, _NO_TOOL, "waiting", "refused", "started")
        if asked is None or asked.opened is None:
            return None
        if asked.opened.state == "waiting":
            await self.run.wait_async(asked.opened)
        refusal = self.refusal(asked)
        if refusal is None:
            # The SDK starts the body in a task that it makes of this one.
            FRAME.set(RunFrame(self, asked))
        return refusal

    async def start(self, context: Any, tool: Tool) -> bool:
        """Start a call's body; returns False where something else is its result.

        Raises:
            RunStopped: The call may not start, and nothing else can be its result.
        """
        asked = self._at_work(context)
        if asked is None or asked.opened is None or asked.opened.state != "waiting":
            begun = next((one for one in self._alike(tool) if not one.is_begun), None)
            if begun is not None:
                begun.is_begun = True
            asked = self._find(context, tool, "waiting")
            if asked is not None and asked.opened is not None:
                await self.run.wait_async(asked.opened)
            asked = self._find(context, tool, "waiting", "refused")
            asked = asked or self._asked_late(context, tool)
        opened = asked.opened
        if opened is None or self.run.start(opened) is None:
            return True
        if isinstance(tool, FunctionTool):
            # The SDK asks no more before it starts the body.
            reason = opened.reason or StopReason.TOOL_QUOTA
            detail = f"{asked.call.name} could not be refused any more"
            self.stop(opened.trip or self.trip_of(Violation(reason=reason, detail=detail)))
        return False

    def _alike(self, tool: Tool) -> list[Asked]:
        """List the calls of the likeliest kind that a tool answers which is called by no name."""
        for type_ in next((types for kind, types in _TYPES if isinstance(tool, kind)), ()):
            same = [one for one in self._batch if one.type == type_]
            if same:
                return same
        return []

    def _asked_late(self, context: Any, tool: Tool) -> Asked:
        # Its response was not of this run.
        call = ToolCall(
            name=tool.name,
            arguments=getattr(context, "tool_arguments", None),
            id=getattr(context, "tool_call_id", None),
        )
        asked = Asked(getattr(context, "tool_call", None), call)
        self._opened([asked])
        self._batch = [*self._batch, asked]
        self.resumed.append(asked)
        return asked

    def refusal(self, asked: Asked) -> str | None:
        """Return what is given in place of a call's result; None where it may start."""
        opened = asked.opened
        if opened is None:
            return None
        return NOT_EXECUTED if self.run.ended and opened.state == "waiting" else opened.refusal

    def running(self, context: Any, tool: Tool) -> Asked | None:
        """Return the call whose body runs, or is about to."""
        asked = self._at_work(context)
        if asked is not None:
            return asked
        for states in (("started",), ("waiting",), ("refused",), ("completed", "failed")):
            asked = self._find(context, tool, *states)
            if asked is not None:
                return asked
        return None

    def _at_work(self, context: Any) -> Asked | None:
        """Return the call whose body this task was made, if the context is that of it."""
        frame = FRAME.get()
        asked = frame.asked if isinstance(frame, RunFrame) and frame.calls is self else None
        is_it = asked is not None and asked.raw is getattr(context, "tool_call", None)
        return asked if is_it else None

    def leave_partial(self, call: OpenToolCall, text: str) -> None:
        """Keep what a run inside the body of a call had brought when it was stopped."""
        for asked in self._batch:
            if asked.opened is call:
                asked.partial = text

    def handed_over(self, to_agent: Agent[Any], answer: str) -> None:
        """Settle the call that was a handoff."""
        for asked in self._batch:
            if asked.call.kind == "handoff" and asked.opened and asked.opened.state == "waiting":
                asked.target = to_agent
                self.run.finished(asked.opened, answer)
                break

    # Attempts of a run that waited for a person, and the end of a batch and of the run

    def go_on(self, state: Any, agent: Agent[Any]) -> None:
        """Take over the open calls of an earlier attempt, and ask for those approved, together."""
        self.earlier = _seams.items_of(state)
        tickets = list(self.run.guard.open_tool_calls())
        decided = [
            (item, _seams.approval_of(state, item))
            for item in state.get_interruptions()
            if item.agent is agent
        ]
        fresh: list[Asked] = []
        raws = [item.raw_item for item, approved in decided if approved]
        for asked in asked_calls(agent, raws):
            ticket = _take(tickets, asked.call.id)
            self.resumed.append(asked)
            if ticket is None:
                fresh.append(asked)
            else:
                asked.opened = OpenToolCall(asked.call, [ticket])
        for item, approved in decided:
            if approved is False:
                ticket = _take(tickets, part(item.raw_item, "call_id"))
                if ticket is not None:
                    self.run.guard.withdraw(ticket, waits=True)
                for asked in asked_calls(agent, [item.raw_item]):
                    self._rejected(asked.call)
        started = [one.raw_item for one in self.earlier if part(one.raw_item, "type") in LOCAL]
        for asked in asked_calls(agent, started):
            # A run inside this one waited too: its tool is still at work.
            ticket = _take(tickets, asked.call.id)
            if ticket is not None:
                asked.opened = OpenToolCall(asked.call, [ticket])
                self.run.start(asked.opened)
                self.resumed.append(asked)
        self._opened(fresh)
        self._batch = self.resumed

    def _rejected(self, call: ToolCall) -> None:
        """Report a call that a person rejected: no tool call, but an error of its kind."""
        without_body = ToolCall(name=call.name, arguments=call.arguments, id=call.id, kind="output")
        self.run.finished(self.run.tool_call(without_body), error="rejected")

    def wait(self, call_ids: set[Any]) -> None:
        """Leave what waits for a person to the attempt that goes on with the answer.

        Its places are given back until then: what a person refuses is no tool call. Where the run
        was stopped meanwhile they could not be had again, and are kept.
        """
        keeps = self.run.stopped_by is not None and self.run.guard.parent is None
        for asked in self._batch:
            opened = asked.opened
            if opened is None or asked.call.kind == "hosted":
                continue
            waits = asked.call.id in call_ids
            if not (waits and keeps):
                self.run.withdrawn(opened, waits=waits)
        self._batch = []

    def close(self, error: BaseException | None = None) -> None:
        """Account for the calls of a batch that the SDK has finished with."""
        for asked in self._batch:
            if asked.opened is None or asked.call.kind == "hosted":
                continue
            if asked.opened.state == "started":
                # Nobody was told how it ended.
                cause = asked.error or error or _NO_RESULT
                self.run.finished(asked.opened, OUTCOME_UNKNOWN, error=cause)
            # The SDK knew its id and ran nothing, or was stopped before.
            self.run.withdrawn(asked.opened)
        self._batch = []

    def cut_off(self) -> None:
        """Account for a run that was cut: what was started may have taken effect."""
        for asked in self._batch:
            if asked.opened is not None and asked.call.kind != "hosted":
                self.run.withdrawn(asked.opened)
        self._batch = []

    def let_go(self) -> None:
        """Keep nothing of a run that is over, so that it is freed without a garbage collection."""
        if self.bounds is not None:
            self.bounds.models, self.bounds.sent = {}, None
        self.turn_frame = Frame(self.run.guard)
        self.bounds = None
        self.tools, self.copies, self.resumed = [], {}, []


def around() -> ToolCalls | None:
    """Return the tool calls of the run of the SDK around this code, an ended one included."""
    frame = FRAME.get()
    # What a tool's body has run and left behind is not around it.
    while frame is not None:
        if isinstance(frame, RunFrame):
            return frame.calls
        if frame.is_live:
            return None
        frame = frame.above
    return None


def _take(tickets: list[Any], call_id: Any) -> Any:
    for ticket in tickets:
        if ticket.call.id == call_id:
            tickets.remove(ticket)
            return ticket
    return None
