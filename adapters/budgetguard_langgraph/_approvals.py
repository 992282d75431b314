"""Approvals by a person: nobody is asked about a tool call that a limit will refuse.

LangChain's middleware asks through a name of its module, which is wrapped once a run begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, cast

from budgetguard_core.kit import NOT_EXECUTED, ToolCall, current
from budgetguard_langgraph._branch import Branch
from budgetguard_langgraph._run import owner_of
from budgetguard_langgraph._seams import APPROVALS, calls_to_approve, configuration

_wrapped: Final[set[Any]] = set()


def attach() -> None:
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
        asked = cast("dict[str, Any]", value)
        calls, places = calls_to_approve()
        if len(places) != len(asked["action_requests"]):
            return original(value, **options)
        refused = mine.run.refuses_tools([call["name"] for call in calls])
        with mine.lock:
            return _answered(branch, asked, calls, places, refused, original)

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
        for number, place in enumerate(places)
        if not (refused[place] and "reject" in configs[number]["allowed_decisions"])
    ]
    answer: dict[str, Any] = {"decisions": []}
    if kept:
        asked = {
            "action_requests": [requests[number] for number in kept],
            "review_configs": [configs[number] for number in kept],
        }
        answer = ask({**value, **asked})
        if len(answer["decisions"]) != len(kept):
            return answer
    decisions = dict(zip(kept, answer["decisions"], strict=True))
    going_on = {place: _tool_call(call) for place, call in enumerate(calls)}
    for number, decision in decisions.items():
        place, kind = places[number], decision["type"]
        if kind == "reject":
            text = str(decision.get("message") or "rejected")
            branch.without_body(going_on[place], text, "rejected")
        if kind == "edit":
            edited = {**decision["edited_action"], "id": calls[place]["id"]}
            going_on[place] = _tool_call(edited)
        elif kind != "approve":
            del going_on[place]
    by_place = dict(zip(going_on, branch.admitted(list(going_on.values())), strict=True))
    for number in set(range(len(requests))) - set(kept):
        record = by_place[places[number]]
        # A person has rejected another one, whose place it would have.
        refusal = record.refusal or NOT_EXECUTED
        record.taken = True
        branch.calls.postpone(record)
        decisions[number] = {"type": "reject", "message": refusal}
    return {**answer, "decisions": [decisions[number] for number in range(len(requests))]}


def _tool_call(call: Any) -> ToolCall:
    return ToolCall(name=call["name"], arguments=call["args"], id=call["id"])
