"""The ambient guard, and what an adapter keeps with a tree of guards."""

from __future__ import annotations

import asyncio
import contextvars
import threading

from budgetguard_core import Guard


class Notes:
    pass


def test_the_innermost_block_counts_and_leaving_it_restores_the_outer():
    assert Guard.active() is None
    outer, inner = Guard(), Guard()
    with outer.activate() as active:
        assert active is outer
        with inner.activate():
            assert Guard.active() is inner
        assert Guard.active() is outer
    assert Guard.active() is None


def test_tasks_and_copied_contexts_see_it_and_bare_threads_do_not():
    seen = {}

    async def task():
        return Guard.active()

    async def main():
        return await asyncio.create_task(task())

    guard = Guard()
    with guard.activate():
        seen["task"] = asyncio.run(main())
        copied = contextvars.copy_context()
        for name, run in (
            ("thread", lambda: seen.update(thread=Guard.active())),
            ("copied", lambda: seen.update(copied=copied.run(Guard.active))),
        ):
            thread = threading.Thread(target=run, name=name)
            thread.start()
            thread.join()
    assert seen == {"task": guard, "thread": None, "copied": guard}


def test_an_attachment_is_one_for_a_whole_tree_and_kind():
    guard = Guard()
    notes = guard.attachment(Notes)
    assert isinstance(notes, Notes)
    assert guard.child().attachment(Notes) is notes
    assert Guard().attachment(Notes) is not notes
