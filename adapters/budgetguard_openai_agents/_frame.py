"""The run of the SDK around the code that runs, the exception that stops it, and its questions.

A cap with `on_trip="ask"` asks a person by an approval of the SDK.
"""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn
from uuid import uuid4

from agents import Agent, AgentsException, RunState, ToolApprovalItem
from openai.types.responses import ResponseFunctionToolCall

from budgetguard_core import BudgetExceeded, Trip
from budgetguard_core.kit import FRAME, PAUSES, Frame, LimitQuestion, Run, part, take_answers
from budgetguard_openai_agents import _seams

NAME: Final = "budget_question"
"""The name of an approval that asks for more budget; its arguments are the question as JSON."""


class RunStopped(BudgetExceeded, AgentsException):
    """A run was stopped: `trip` says why, `outcome` is the partial result.

    It leaves a run only with `on_trip="raise"`, or through a run inside a run whose limit it was.
    """


class RunFrame(Frame):
    """Code of a run of the SDK; `asked` is the tool call whose body it is."""

    __slots__ = ("recorder", "requested")

    def __init__(self, recorder: Any, requested: Any = None) -> None:
        run = recorder.run
        call = None if requested is None else requested.open_call
        super().__init__(run.guard, run=run, call=call, parent=run.parent)
        self.recorder = recorder
        self.requested = requested


def recorder_here() -> Any:
    """Return the hooks of the run of the SDK around this code; None outside of any."""
    frame = FRAME.get()
    # What a tool's body has run and left behind is not around it.
    while frame is not None:
        if isinstance(frame, RunFrame):
            return frame.recorder
        if frame.is_live:
            return None
        frame = frame.parent
    return None


class BudgetAsked(RunStopped):
    """Leaves a run at a step about which a person is asked."""

    def __init__(self, question: LimitQuestion) -> None:
        violations = question.violations
        super().__init__(Trip(reason=question.reason, violations=violations, run_id=""))
        self.question = question


PAUSES.add(BudgetAsked)


def ask(question: LimitQuestion) -> NoReturn:
    """Leave the run; it comes back to the same step with the answer."""
    raise BudgetAsked(question)


def approval(agent: Agent[Any], question: LimitQuestion) -> ToolApprovalItem:
    """Return the interruption that asks."""
    call = ResponseFunctionToolCall(
        type="function_call",
        name=NAME,
        call_id=f"budget_{uuid4().hex}",
        arguments=json.dumps(question.to_json()),
    )
    return ToolApprovalItem(agent=agent, raw_item=call)


def take(state: RunState[Any], agent: Agent[Any], run: Run) -> None:
    """Take the questions of a state and a person's answers; an approval is the same cap again."""
    for item in state.get_interruptions():
        if part(item.raw_item, "name") != NAME or item.agent is not agent:
            continue
        approved = _seams.approval_of(state, item)
        _seams.drop_interruption(state, item)
        requested, more = json.loads(part(item.raw_item, "arguments")), dict[str, Any]()
        for guard in run.guard.ancestry if approved else ():
            cap = guard.budget.caps().get(requested["reason"])
            if guard.run_id == requested["run_id"] and cap is not None:
                used = getattr(guard.usage, requested["reason"].removeprefix("max_"))
                more[requested["reason"]] = used + cap
        if approved is not None:
            take_answers(run, {requested["run_id"]: more or None})
