"""Requests and answers."""

from __future__ import annotations

from dataclasses import fields

import pytest

from budgetguard_core import Budget, ConfigurationError, Guard, Mode, Snapshot, StopReason, Trip
from budgetguard_core.kit import (
    NOT_AVAILABLE,
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    Admit,
    ModelCall,
    Nudge,
    Refuse,
    Stop,
    ToolCall,
    end_run,
    fingerprint,
)
from budgetguard_core.testing import ManualClock


def ticket(run_id="r", **call):
    return Guard(run_id=run_id, clock=ManualClock()).admit_tool_call(ToolCall(name="a", **call))


def test_requests_take_keywords_only():
    assert all(field.kw_only for kind in (ModelCall, ToolCall) for field in fields(kind))
    with pytest.raises(TypeError):
        ToolCall("a")


@pytest.mark.parametrize("kind", ["x", "", None, "Function"])
def test_a_kind_that_nobody_knows_is_refused(kind):
    with pytest.raises(ConfigurationError, match=r"kind must be one of function, handoff, output"):
        ToolCall(name="a", kind=kind)


def test_answers_cannot_be_changed():
    refuse = Refuse(StopReason.TOOL_QUOTA, "detail")
    stop = Stop(Trip(reason="aborted", violations=(), run_id="r"))
    for answer in (refuse, stop):
        with pytest.raises(AttributeError):
            answer.message = "x"
    assert refuse.message == NOT_AVAILABLE
    assert stop.message == NOT_EXECUTED
    assert issubclass(Nudge, Admit)


@pytest.mark.parametrize("text", [NOT_AVAILABLE, NOT_EXECUTED, OUTCOME_UNKNOWN])
def test_what_the_model_sees_does_not_speak_of_the_budget(text):
    words = text.lower()
    assert not any(word in words for word in ("budget", "cap", "limit", "quota", "cost", "token"))
    assert not any(letter.isdigit() for letter in words)


def test_the_idempotency_key_is_the_calls_own():
    assert ticket(id="x").idempotency_key == ticket(id="x").idempotency_key
    keys = {
        ticket(id="x").idempotency_key,
        ticket(id="y").idempotency_key,
        ticket(id="x", run_id="other").idempotency_key,
        ticket(id="1").idempotency_key,
        ticket().idempotency_key,
        ticket(run_id="r\0", id="x").idempotency_key,
        ticket(id="\0x").idempotency_key,
    }
    assert len(keys) == 7
    assert all(len(key) == 32 for key in keys)


def test_a_key_can_be_made_of_any_id():
    assert len(ticket(id="\ud800").idempotency_key) == 32


def test_calls_without_an_id_are_told_apart_by_their_number():
    guard = Guard(clock=ManualClock())
    first, second = guard.admit_tool_calls([ToolCall(name="a"), ToolCall(name="a")])
    assert first.idempotency_key != second.idempotency_key


def test_calls_with_one_id_are_told_apart_by_what_they_ask_for():
    guard = Guard(clock=ManualClock())
    calls = [ToolCall(name="send", arguments={"to": to}, id="call_0") for to in ("a", "b", "a")]
    first, second, again = (guard.admit_tool_call(call).idempotency_key for call in calls)
    assert len({first, second, again}) == 3


def test_two_calls_that_the_model_meant_twice_never_share_a_key():
    guard, keys = Guard(Budget(loop_detection=None), clock=ManualClock()), []
    for number in range(500):
        # One pair far apart, and many that are given only once.
        for id_ in ("call_0", f"call_{number % 300}", f"unique_{number}"):
            keys.append(guard.admit_tool_call(ToolCall(name="pay", id=id_)).idempotency_key)
        if number % 90 == 0:
            plain = Snapshot.from_json(guard.snapshot().to_json())
            assert len(plain.occurrences["counts"]) <= 64
            for ticket in guard.open_calls():
                guard.settle_tool_call(ticket)
            guard = Guard.restore(guard.snapshot(), clock=ManualClock())
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("fresh", [None, Budget()])
def test_a_call_that_a_gone_process_left_open_is_the_same_call_when_it_is_made_again(fresh):
    guard = Guard(Budget(), clock=ManualClock())
    done = guard.admit_tool_call(ToolCall(name="pay", id="call_0"))
    guard.settle_tool_call(done)
    left = guard.admit_tool_calls([ToolCall(name="pay", id="call_0") for _ in range(2)])
    text = guard.snapshot().to_json()
    again = Guard.restore(Snapshot.from_json(text), fresh, clock=ManualClock())
    made = again.admit_tool_calls([ToolCall(name="pay", id="call_0") for _ in range(3)])
    keys = [ticket.idempotency_key for ticket in made]
    assert keys[:2] == [ticket.idempotency_key for ticket in left]
    assert keys[2] not in {done.idempotency_key, *keys[:2]}


def test_a_leg_that_goes_on_from_an_outcome_has_keys_of_its_own():
    keys: set[str] = set()
    guard = Guard(Budget(), clock=ManualClock())
    for _ in range(3):
        for _ in range(2):
            call = guard.admit_tool_call(ToolCall(name="pay", id="call_0", arguments={"to": "a"}))
            guard.settle_tool_call(call, "paid")
            assert call.idempotency_key not in keys
            keys.add(call.idempotency_key)
        earlier = Snapshot.of_outcome(end_run(guard, trip=None))
        guard = Guard.restore(earlier, Budget(), clock=ManualClock())


def test_a_call_that_was_withdrawn_has_its_key_when_it_is_made_after_all():
    guard = Guard(clock=ManualClock())
    call = guard.admit_tool_call(ToolCall(name="pay", id="a"))
    guard.withdraw(call)
    later = guard.admit_tool_call(ToolCall(name="pay", id="a"))
    assert later.idempotency_key == call.idempotency_key


def test_what_withdrawn_calls_leave_behind_is_bounded():
    guard = Guard(Budget(loop_detection=None), clock=ManualClock())
    for number in range(100):
        guard.withdraw(guard.admit_tool_call(ToolCall(name="pay", id=str(number))))
    keys = {
        guard.admit_tool_call(ToolCall(name="pay", id=str(number))).idempotency_key
        for number in range(100)
    }
    assert len(keys) == 100


def test_a_model_call_has_a_key_too():
    guard = Guard(clock=ManualClock())
    first, second = (guard.admit_model_call() for _ in range(2))
    assert first.idempotency_key != second.idempotency_key


def test_the_key_survives_a_restart():
    guard = Guard(clock=ManualClock())
    call = ToolCall(name="send", id="c1", arguments={"to": "a"})
    before = guard.admit_tool_call(call).idempotency_key
    (after,) = Guard.restore(guard.snapshot(), Budget()).open_tool_calls()
    assert after.idempotency_key == before


def test_a_call_has_the_fingerprint_of_its_arguments_once_it_was_admitted():
    call = ToolCall(name="send", arguments={"to": ["a"]})
    assert call.fingerprint is None
    Guard(clock=ManualClock()).admit_tool_call(call)
    call.arguments["to"].append("b")
    assert call.fingerprint == fingerprint({"to": ["a"]})
    assert ToolCall(name="send", fingerprint="known").fingerprint == "known"


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    ("cap", "own", "answer"),
    [(None, None, None), (10, None, 10), (None, 3, 3), (10, 3, 3), (3, 10, 3)],
)
def test_seconds_are_the_lesser_of_the_own_limit_and_the_time_left(mode, cap, own, answer):
    guard = Guard(Budget(max_seconds=cap), mode=mode, clock=ManualClock())
    admitted = guard.admit_model_call(ModelCall(seconds=own))
    assert admitted.seconds == (answer if mode is Mode.ENFORCE else own)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    ("cap", "own", "answer"),
    [(None, None, None), (10, None, 10), (None, 3, 3), (10, 3, 3), (3, 10, 3)],
)
def test_output_tokens_are_the_lesser_of_the_own_bound_and_the_caps(mode, cap, own, answer):
    guard = Guard(Budget(max_output_tokens_per_call=cap), mode=mode, clock=ManualClock())
    admitted = guard.admit_model_call(ModelCall(max_output_tokens=own))
    assert admitted.max_output_tokens == (answer if mode is Mode.ENFORCE else own)
