"""A session: its calls, its end, and the places that keep what it left."""

from __future__ import annotations

import asyncio

import pytest

from budgetguard_core import Budget, Guard
from budgetguard_core.kit import NOT_EXECUTED, Stop, ToolCall, ToolCalls, envelope_of
from budgetguard_core.kit.flow import Step, run_awaited, run_blocking
from budgetguard_core.kit.history import Turn
from budgetguard_core.kit.model_turn import Request
from budgetguard_core.kit.session import Session
from budgetguard_loop._history import CHAT

BY_WAY = {"sync": run_blocking, "async": lambda flow: asyncio.run(run_awaited(flow))}
USER = {"role": "user", "content": "Go."}


def asks(*ids):
    calls = [
        {"id": one, "type": "function", "function": {"name": "search", "arguments": "{}"}}
        for one in ids
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def search(id_):
    return ToolCall(name="search", arguments={}, id=id_)


class Kept:
    """A location whose I/O is blocking or awaited."""

    keeps = frozenset({"paused", "stopped"})

    def __init__(self):
        self.entry = None
        self.forms = []

    def get(self):
        return self._step(lambda: self.entry)

    def put(self, entry):
        return self._step(lambda: setattr(self, "entry", entry))

    def _step(self, action):
        async def awaited():
            self.forms.append("awaited")
            return action()

        def blocking():
            self.forms.append("blocking")
            return action()

        return Step(blocking, awaited)


def opened(budget, location=None, **given):
    return run_blocking(Session.open(envelope_of(budget), CHAT, location, **given))


@pytest.mark.parametrize("way", BY_WAY)
def test_the_end_fails_the_open_turn(way):
    guard = Guard(Budget(max_tool_calls=9))
    session = opened(guard)
    run_blocking(session.model(Request(messages=[USER])))
    session.calls.offer([search("1")])
    outcome = BY_WAY[way](session.finish([USER], error=RuntimeError("gone")))
    assert outcome.status == "failed"
    assert not guard.open_calls()
    assert outcome.usage.model_calls == 1
    assert outcome.usage.tool_calls == 0


def test_a_cut_answer_ends_the_session():
    session = opened(Budget(max_output_tokens_per_call=5))
    turn = run_blocking(session.model(Request(messages=[USER])))
    assert turn.answered(Turn("assistant", ("So",)), is_cut=True) is not None
    assert session.is_over
    assert session.is_stop(RuntimeError("what the framework makes of it"))


@pytest.mark.parametrize("way", BY_WAY)
def test_a_location_is_blocking_or_awaited(way):
    kept = Kept()
    drive = BY_WAY[way]
    opening = Session.open(envelope_of(Budget()), CHAT, kept, user_input="Go.")
    session = drive(opening)
    drive(session.model(Request(messages=[USER]))).answered(Turn("assistant"))
    session.calls.offer([search("1")])
    assert drive(session.finish([USER, asks("1")], waits=True)).status == "paused"
    assert kept.entry["status"] == "paused"
    again = drive(Session.open(envelope_of(Budget()), CHAT, kept))
    assert again.resumed
    assert again.run.guard.run_id == session.run.guard.run_id
    assert set(kept.forms) == {{"sync": "blocking", "async": "awaited"}[way]}


def test_a_branch_takes_the_call_that_was_left_when_the_run_paused():
    kept = Kept()
    session = opened(Budget(max_tool_calls=1), kept, user_input="Go.")
    session.calls.offer([search("1")])
    run_blocking(session.finish([USER], waits=True))
    again = opened(Budget(max_tool_calls=1), kept)
    calls = ToolCalls(again.run, again.calls)
    record = run_blocking(calls.begin(search("1")))
    assert record.refusal is None
    assert list(calls) == [record]
    assert list(again.calls) == []
    calls.finished(record, "found")
    assert run_blocking(again.finish([USER])).usage.tool_calls == 1


def test_a_call_that_never_began_was_not_executed():
    session = opened(Budget())
    session.calls.offer([search("1")])
    assert run_blocking(session.close([USER, asks("1")])).new[0]["content"] == NOT_EXECUTED


@pytest.mark.parametrize("offered", [True, False])
def test_a_call_that_is_answered_without_its_body_is_no_tool_call_and_a_repeated_error(offered):
    guard = Guard(Budget(max_tool_calls=1))
    session = opened(guard)
    for number in range(30):
        turn = run_blocking(session.model(Request(messages=[USER])))
        if isinstance(turn, Stop):
            break
        turn.answered(Turn("assistant"))
        call = session.calls.offer([search(str(number))])[0] if offered else search(str(number))
        record = session.calls.answered_without_body(call, "The user said no.", kind="rejected")
        assert record.answer == "The user said no."
    assert guard.trip.reason == "no_progress"
    assert guard.usage.tool_calls == 0


def test_a_call_that_a_limit_refused_keeps_its_refusal():
    session = opened(Budget(max_tool_calls=1))
    _, second = session.calls.offer([search("1"), search("2")])
    assert session.calls.answered_without_body(second, "No.") is second
    assert second.state == "refused"
    assert second.answer == second.refusal


@pytest.mark.parametrize(("user_input", "ends"), [(None, True), ("Once more.", False)])
def test_an_answer_to_a_question_is_no_new_user_turn(user_input, ends):
    guard = Guard(Budget())
    for _ in range(12):
        session = opened(guard, user_input=user_input)
        turn = run_blocking(session.model(Request(messages=[USER])))
        if isinstance(turn, Stop):
            break
        turn.answered(Turn("assistant"))
        record = run_blocking(session.calls.begin(search("1")))
        session.calls.finished(record, "the same")
        run_blocking(session.finish([USER]))
    assert (guard.trip is not None) is ends


@pytest.mark.parametrize("entry", [{"status": "paused"}, {"status": "paused", "snapshot": "no"}])
def test_what_cannot_be_read_in_a_location_is_reported_and_the_run_begins_anew(entry):
    kept = Kept()
    kept.entry = entry
    session = opened(Budget(), kept)
    assert not session.resumed
    assert "resume" in str(run_blocking(session.finish([USER])).errors)
