"""A store that answers slowly: the event loop goes on, and a cancelled call holds nothing."""

from __future__ import annotations

import asyncio
import threading

import pytest

from budgetguard_core import Budget, Guard
from budgetguard_core.kit import Stop, ToolCall, envelope_of
from budgetguard_core.kit.flow import run_awaited, run_blocking
from budgetguard_core.kit.model_turn import Request
from budgetguard_core.kit.session import Session
from budgetguard_core.plugs import Hold, Plug
from budgetguard_loop._history import CHAT

USER = {"role": "user", "content": "Go."}
SEARCH = ToolCall(name="search", arguments={}, id="1")


class Held(Hold):
    def __init__(self, store):
        self._store = store

    def settle(self, ended, ticket):
        self._store.held -= 1


class SlowStore(Plug):
    """Reserves when `answers` is set, and counts what is held."""

    waits = True

    def __init__(self):
        self.answers = threading.Event()
        self.asked = threading.Event()
        self.given = threading.Event()
        self.held = 0
        self.thread = None

    def reserve(self, owner, ask):
        self.thread = threading.get_ident()
        self.asked.set()
        assert self.answers.wait(60)
        self.held += 1
        if ask.call is None:
            ask.hold_for(0, Held(self))
        else:
            ask.holds += (Held(self),)
        self.given.set()
        return True


@pytest.fixture
def store(monkeypatch):
    made = SlowStore()
    monkeypatch.setattr("budgetguard_core.guard.plugs_of", lambda guard, **_: (made,))
    return made


def asks(kind, session):
    if kind == "model":
        return session.model(Request(messages=[USER]))
    if kind == "batch":
        return session.calls.ask([SEARCH])
    return session.calls.begin(SEARCH)


def ends(kind, session, asked):
    if kind == "model":
        session.run.take_back(asked.call)
    else:
        session.calls.close()
        for one in session.calls:
            session.calls.finished(one, "found")


KINDS = ("model", "batch", "call")


def opened(guard):
    return run_blocking(Session.open(envelope_of(guard), CHAT))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_goes_on_while_a_store_answers(kind, store):
    async def main():
        session = opened(Guard(Budget(max_iterations=3)))
        asking = asyncio.create_task(run_awaited(asks(kind, session)))
        assert await asyncio.to_thread(store.asked.wait, 60)
        ticks = 0
        for _ in range(100):
            await asyncio.sleep(0)
            ticks += not asking.done()
        store.answers.set()
        asked = await asking
        assert store.held == 1
        ends(kind, session, asked)
        return ticks

    assert asyncio.run(main()) == 100
    assert store.held == 0


@pytest.mark.parametrize("kind", KINDS)
def test_code_without_a_loop_asks_in_its_own_thread(kind, store):
    store.answers.set()
    session = opened(Guard(Budget(max_iterations=3)))
    ends(kind, session, run_blocking(asks(kind, session)))
    assert store.thread == threading.get_ident()
    assert store.held == 0


@pytest.mark.parametrize("answers", ["before it is cancelled", "after it was cancelled"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_admission_that_is_cancelled_leaves_nothing_reserved(kind, answers, store):
    guard = Guard(Budget(max_iterations=1, max_tool_calls=1, max_total_tokens=1000))

    async def main():
        session = opened(guard)
        asking = asyncio.create_task(run_awaited(asks(kind, session)))
        assert await asyncio.to_thread(store.asked.wait, 60)
        if answers == "before it is cancelled":
            store.answers.set()
            assert store.given.wait(60)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        store.answers.set()

    asyncio.run(main())
    assert store.held == 0
    assert guard.usage.iterations == guard.usage.model_calls == guard.usage.tool_calls == 0
    assert not guard.open_calls()
    # The place is free again.
    assert not isinstance(guard.admit_model_call(), Stop)
