"""The ambient guard, and what an adapter keeps with a tree of guards."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading

import pytest

from budgetguard_core import Budget, Guard
from budgetguard_core.kit import ModelCall, current_guard


class Notes:
    pass


def test_the_innermost_block_counts_and_leaving_it_restores_the_outer():
    assert current_guard() is None
    outer, inner = Guard(), Guard()
    with outer.activate() as active:
        assert active is outer
        with inner.activate():
            assert current_guard() is inner
        assert current_guard() is outer
    assert current_guard() is None


def test_tasks_threads_and_copied_contexts_see_it():
    seen = {}

    async def task():
        return current_guard()

    async def main():
        return await asyncio.create_task(task())

    guard = Guard()
    with guard.activate():
        seen["task"] = asyncio.run(main())
        copied = contextvars.copy_context()
        for name, run in (
            ("thread", lambda: seen.update(thread=current_guard())),
            ("copied", lambda: seen.update(copied=copied.run(current_guard))),
        ):
            thread = threading.Thread(target=run, name=name)
            thread.start()
            thread.join()
    assert seen == {"task": guard, "thread": guard, "copied": guard}


def test_an_attachment_is_one_for_a_whole_tree_and_kind():
    guard = Guard()
    notes = guard.tree.attachment(Notes)
    assert isinstance(notes, Notes)
    assert guard.child().tree.attachment(Notes) is notes
    assert Guard().tree.attachment(Notes) is not notes


def test_a_block_in_which_nothing_was_admitted_says_so(caplog):
    guard = Guard(Budget(max_iterations=1))
    with guard.activate():
        pass
    (said,) = caplog.records
    assert (said.name, said.levelno) == ("budgetguard", logging.WARNING)
    assert "no call was admitted" in said.getMessage()


def test_a_block_that_bounds_something_or_fails_says_nothing(caplog):
    guard = Guard(Budget(max_iterations=1))
    with guard.activate():
        guard.child().admit_model_call(ModelCall())
    with pytest.raises(KeyError), Guard().activate():
        raise KeyError
    with guard.activate():
        guard.admit_model_call(ModelCall())
    with guard.activate():  # it was stopped: that nothing is admitted is what it is for
        guard.admit_model_call(ModelCall())
    with Guard(mode="off").activate():
        pass
    assert caplog.records == []
