"""Questions to a person: for more budget (`on_trip="ask"`), and about the calls that may run."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn, cast

from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.types import Command, Interrupt

from budgetguard_core import ConfigurationError
from budgetguard_core.kit import NOT_EXECUTED, PAUSES, Envelope, LimitQuestion, current
from budgetguard_langgraph._branch import Branch
from budgetguard_langgraph._models import tool_call
from budgetguard_langgraph._pauses import Thread
from budgetguard_langgraph._run import owner_of
from budgetguard_langgraph._seams import APPROVALS, calls_to_approve, configuration
from budgetguard_langgraph.interrupts import NotRetried

TYPE: Final = "budget_question"
"""The `type` in the value of an interrupt that asks for more budget."""
# So that a function which asks by `interrupt()` pauses the graph, too.
PAUSES.add(GraphBubbleUp)


class BudgetQuestion(GraphInterrupt, NotRetried):
    """Pauses a graph before a step that a cap would stop.

    `Command(resume={"max_iterations": 40})` raises the caps, `Command(resume=False)` ends the run.
    """

    def __init__(self, question: LimitQuestion) -> None:
        super().__init__()
        value = {"type": TYPE, **question.to_json()}
        # The same of all branches that ask about the same cap: they are one question. Of nothing
        # else, which keeps an answer that is meant for another interrupt away from it.
        about = f"{question.run_id} {question.reason} {question.limit}"
        self.args = ((Interrupt(value, id=uuid.uuid5(uuid.NAMESPACE_OID, about).hex),),)


def ask(question: LimitQuestion) -> NoReturn:
    """Ask by an interrupt; the graph comes back with the answer."""
    raise BudgetQuestion(question)


def asker(envelope: Envelope, thread: Thread | None) -> Any:
    """Return how the runs of a graph ask; None outside of a graph, where nothing waits.

    Raises:
        ConfigurationError: Nobody would keep the question until it is answered.
    """
    if thread is not None and envelope.on_trip == "ask" and not thread.has_checkpointer:
        raise ConfigurationError(
            "on_trip='ask' needs a graph with a checkpointer, where the question waits for its "
            "answer, got none. Compile the graph with one, or pass a function that asks a person."
        )
    return None if thread is None else ask


def taken(given: Any, waiting: Sequence[Interrupt]) -> tuple[dict[str, Any], Any]:
    """Take the answers to a budget's questions out of what a graph is called with.

    Args:
        given: A `Command` with answers: one for all questions of a run, where nothing else waits,
            else by their ids.
        waiting: What waits on the thread.

    Returns:
        The answers by the run that has asked, and the input without them.
    """
    requested = {one.id: one.value for one in waiting}
    ours = {id_: value["run_id"] for id_, value in requested.items() if _is_ours(value)}
    answer: Any = getattr(given, "resume", None)
    if not ours or answer is None:
        return {}, given
    is_for_all = len(ours) == len(requested) and len({*ours.values()}) == 1
    by_id: dict[str, Any] = dict.fromkeys(requested, answer) if is_for_all else {}
    if isinstance(answer, dict) and not requested.keys().isdisjoint(cast("dict[str, Any]", answer)):
        by_id = dict(cast("dict[str, Any]", answer))
    found = {run_id: by_id[id_] for id_, run_id in ours.items() if id_ in by_id}
    rest = {id_: one for id_, one in by_id.items() if id_ not in ours}
    if not found:
        return {}, given
    left: Any = replace(given, resume=rest or None)
    return found, None if left == Command() else left


def _is_ours(value: Any) -> bool:
    return isinstance(value, dict) and cast("dict[str, Any]", value).get("type") == TYPE


_wrapped: Final[set[Any]] = set()


def watch_approvals() -> None:
    """Wrap the function by which LangChain's middleware asks, where that is imported."""
    module: Any = sys.modules.get(APPROVALS)
    asks = getattr(module, "interrupt", None)
    if asks is not None and asks not in _wrapped:
        module.interrupt = found = _asking(asks)
        _wrapped.add(found)


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    def interrupt(value: Any, **options: Any) -> Any:
        mine = owner_of(None, None, current())
        if mine is None or not isinstance(value, dict) or "action_requests" not in value:
            return original(value, **options)
        branch = mine.branch(configuration().get("checkpoint_ns"))
        requested = cast("dict[str, Any]", value)
        calls, places = calls_to_approve()
        if len(places) != len(requested["action_requests"]):
            return original(value, **options)
        refused = mine.run.refuses_tools([call["name"] for call in calls])
        with mine.lock:
            return _answered(branch, requested, calls, places, refused, original)

    return interrupt


def _answered(
    branch: Branch,
    value: dict[str, Any],
    calls: list[Any],
    places: list[int],
    refused: list[bool],
    ask: Callable[[Any], Any],
) -> Any:
    """Ask about the calls of an answer that may run; the others get their refusal.

    They are rejected, so that their result is in the state: what is only let go to its refusal
    would run unasked where the thread goes on under another budget.
    """
    requests, configs = value["action_requests"], value["review_configs"]
    kept = [
        number
        for number, position in enumerate(places)
        if not (refused[position] and "reject" in configs[number]["allowed_decisions"])
    ]
    answer: dict[str, Any] = {"decisions": []}
    if kept:
        requested = {
            "action_requests": [requests[number] for number in kept],
            "review_configs": [configs[number] for number in kept],
        }
        answer = ask({**value, **requested})
        if len(answer["decisions"]) != len(kept):
            return answer
    decisions = dict(zip(kept, answer["decisions"], strict=True))
    going_on = {position: tool_call(call) for position, call in enumerate(calls)}
    for number, decision in decisions.items():
        position, kind = places[number], decision["type"]
        if kind == "reject":
            text = str(decision.get("message") or "rejected")
            branch.without_body(going_on[position], text, "rejected")
        if kind == "edit":
            edited = {**decision["edited_action"], "id": calls[position]["id"]}
            going_on[position] = tool_call(edited)
        elif kind != "approve":
            del going_on[position]
    by_position = dict(zip(going_on, branch.admitted(list(going_on.values())), strict=True))
    for number in set(range(len(requests))) - set(kept):
        record = by_position[places[number]]
        # A person has rejected another one, whose place it would have.
        refusal = record.refusal or NOT_EXECUTED
        record.taken = True
        branch.calls.postpone(record)
        decisions[number] = {"type": "reject", "message": refusal}
    return {**answer, "decisions": [decisions[number] for number in range(len(requests))]}
