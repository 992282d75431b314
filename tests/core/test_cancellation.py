"""The token that work in flight can watch."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from budgetguard_core import Guard
from budgetguard_core.cancellation import CancellationToken
from budgetguard_core.testing import ManualClock


def test_a_token_is_set_once_and_tells_everyone_once():
    token, told = CancellationToken(), []
    token.on_cancel(lambda: told.append("a"))
    token.on_cancel(lambda: told.append("b"))
    assert not token.cancelled
    assert token.wait(0) is False
    assert token.cancel() == []
    assert token.cancel() == []
    assert told == ["a", "b"]
    assert token.cancelled
    assert token.wait() is True


def test_who_comes_late_is_told_at_once():
    token, told = CancellationToken(), []
    token.cancel()
    forget = token.on_cancel(lambda: told.append(1))
    assert told == [1]
    forget()


def test_a_callback_can_be_taken_back():
    token, told = CancellationToken(), []
    forget = token.on_cancel(lambda: told.append(1))
    forget()
    forget()
    token.cancel()
    assert told == []


def test_a_callback_that_fails_stops_no_other():
    token, told = CancellationToken(), []
    token.on_cancel(lambda: 1 / 0)
    token.on_cancel(lambda: told.append(1))
    (error,) = token.cancel()
    assert isinstance(error, ZeroDivisionError)
    assert told == [1]


def test_sub_agents_are_told_and_tell_nobody_above():
    parent = CancellationToken()
    child, other = CancellationToken(parent), CancellationToken(parent)
    grandchild = CancellationToken(child)
    child.cancel()
    assert (grandchild.cancelled, parent.cancelled, other.cancelled) == (True, False, False)
    failing = CancellationToken(other)
    failing.on_cancel(lambda: 1 / 0)
    assert len(parent.cancel()) == 1
    assert other.cancelled


def test_a_child_of_a_cancelled_token_is_cancelled():
    parent = CancellationToken()
    parent.cancel()
    assert CancellationToken(parent).cancelled


@pytest.mark.slow
def test_tokens_of_sub_agents_that_are_gone_are_not_kept():
    parent = CancellationToken()
    gone = weakref.ref(CancellationToken(parent))
    gc.collect()
    assert gone() is None


def test_a_waiting_thread_wakes_up():
    token, woken = CancellationToken(), []
    waiter = threading.Thread(target=lambda: woken.append(token.wait(30)))
    waiter.start()
    token.cancel()
    waiter.join(30)
    assert woken == [True]


def test_abort_sets_the_runs_token_and_reports_callbacks_that_fail():
    guard = Guard(clock=ManualClock())
    child = guard.child()
    child.cancellation.on_cancel(lambda: 1 / 0)
    guard.abort()
    assert guard.cancellation.cancelled
    assert child.cancellation.cancelled
    assert guard.tree.errors == ("on_cancel: ZeroDivisionError: division by zero",)


def test_a_childs_abort_is_its_own():
    guard = Guard(clock=ManualClock())
    child = guard.child()
    child.abort()
    assert not guard.cancellation.cancelled
    assert guard.admit_model_call().call_id
    assert guard.child().admit_model_call().call_id
    assert child.admit_model_call().trip.reason == "aborted"
