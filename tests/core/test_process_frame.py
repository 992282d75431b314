"""A process that is bounded as a whole: its frame is around all code, threads included."""

from __future__ import annotations

import threading

import pytest

from budgetguard_core import Budget, Guard
from budgetguard_core.frame import FRAME, NOWHERE, Frame, bound_process
from budgetguard_core.kit import Envelope, current_guard


@pytest.fixture
def guard():
    guard = Guard(Budget(max_iterations=2))
    bound_process(Frame(guard))
    yield guard
    bound_process(None)


def in_a_thread(act):
    found = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


def test_it_is_found_here_and_in_a_plain_thread(guard):
    assert current_guard() is guard
    assert in_a_thread(current_guard) is guard


def test_a_run_in_a_block_in_a_thread_is_charged_to_both(guard):
    inner = Guard(Budget())

    def act():
        with inner.activate():
            run = Envelope(budget=Budget()).open()
        return [one for part in run.guards for one in part.ancestry]

    assert {guard, inner} <= set(in_a_thread(act))


def test_nowhere_is_outside_of_it(guard):
    token = FRAME.set(NOWHERE)
    try:
        assert current_guard() is None
        assert Envelope(budget=Budget()).open().guard.parent is None
    finally:
        FRAME.reset(token)
    assert current_guard() is guard


def test_after_it_there_is_none():
    assert current_guard() is None
