"""Approvals by a person: nobody is asked about a tool call that a limit will refuse.

LangChain's middleware asks through a name of its module, which is wrapped once a run begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, cast

from budgetguard_core.kit import NOT_EXECUTED, OpenToolCall, ToolCall, current
from budgetguard_langgraph._model_calls import graph_of
from budgetguard_langgraph._owners import owner_of
from budgetguard_langgraph._run import GraphRun
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
        if mine is None or not isinstance(value, dict):
            return original(value, **options)
        asked = cast("dict[str, Any]", value)
        namespace = graph_of(str(configuration().get("checkpoint_ns") or ""))
        if "action_requests" in asked:
            return _batch(mine, namespace, asked, lambda value: original(value, **options))
        if asked.get("type") != "tool_approval":
            return original(value, **options)
        call = ToolCall(name=asked["name"], arguments=asked["args"], id=asked["tool_call_id"])
        may_reject = "RejectDecision" in str(options.get("response_schema"))
        refusal = _refusal(mine, namespace, call) if may_reject else None
        if refusal is not None:
            return {"type": "reject", "message": refusal}
        answer = original(value, **options)
        if answer["type"] == "reject":
            _rejected(mine, call, answer)
        return answer

    return interrupt


def _refusal(mine: GraphRun, namespace: str, call: ToolCall) -> str | None:
    """Return the result of a refused call, of those that are asked about one by one."""
    before = mine.asked.of_the_same_answer(namespace, call.id)
    record = next((one for one in before if isinstance(one, OpenToolCall)), None)
    if record is not None:
        return record.refusal
    names = [one.call.name if isinstance(one, OpenToolCall) else one.name for one in before]
    if mine.run.refuses_tools([call.name])[0]:
        refused = mine.run.tool_call(call)
        mine.run.withdrawn(refused, waits=True)
        return refused.refusal
    return NOT_EXECUTED if mine.run.refuses_tools([*names, call.name])[-1] else None


def _batch(mine: GraphRun, namespace: str, value: dict[str, Any], ask: Callable[[Any], Any]) -> Any:
    """Ask about the calls of an answer that may run; the others get their refusal.

    They are rejected, so that their result is in the state: what is only let go to its refusal
    would run unasked where the thread goes on under another budget.
    """
    calls, places = calls_to_approve()
    requests, configs = value["action_requests"], value["review_configs"]
    if len(places) != len(requests):
        return ask(value)
    refused = mine.run.refuses_tools([call["name"] for call in calls])
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
            _rejected(mine, going_on[place], decision)
        if kind == "edit":
            edited = {**decision["edited_action"], "id": calls[place]["id"]}
            going_on[place] = _tool_call(edited)
        elif kind != "approve":
            del going_on[place]
    records = mine.asked.admitted(namespace, list(going_on.values()))
    by_place = dict(zip(going_on, records, strict=True))
    for number in set(range(len(requests))) - set(kept):
        record = by_place[places[number]]
        record.taken = True
        # A person has rejected another one, whose place it would have.
        mine.run.withdrawn(record, waits=True)
        decisions[number] = {"type": "reject", "message": record.refusal or NOT_EXECUTED}
    return {**answer, "decisions": [decisions[number] for number in range(len(requests))]}


def _tool_call(call: Any) -> ToolCall:
    return ToolCall(name=call["name"], arguments=call["args"], id=call["id"])


def _rejected(mine: GraphRun, call: ToolCall, decision: Any) -> None:
    mine.asked.without_body(call, str(decision.get("message") or "rejected"), "rejected")
