"""Threads and pools that code of a block starts are a part of the block."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.pool import ThreadPool

import pytest

from budgetguard_core import Budget, BudgetExceeded, Guard
from budgetguard_core import threads as instrumentation
from budgetguard_core.frame import FRAME
from budgetguard_core.kit import current_guard, envelope_of
from budgetguard_loop import bounded, guarded, run_bounded

CALLS = 30


@guarded(Budget(), kind="model")
def ask(prompt):
    return f"An answer to {prompt}."


def try_to_ask(number):
    with suppress(BudgetExceeded):
        return ask(str(number))


class Worker(threading.Thread):
    """A thread that is one by inheritance."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def run(self):
        try_to_ask(self.number)


def in_threads():
    in_all([threading.Thread(target=try_to_ask, args=(one,)) for one in range(CALLS)])


def in_workers():
    in_all([Worker(one) for one in range(CALLS)])


def in_timers():
    in_all([threading.Timer(0, try_to_ask, [one]) for one in range(CALLS)])


def in_all(threads):
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def in_a_pool():
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(try_to_ask, range(CALLS)))


def in_a_thread_pool():
    with ThreadPool(4) as pool:
        pool.map(try_to_ask, range(CALLS))


def in_an_executor():
    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(None, try_to_ask, one) for one in range(CALLS)))

    asyncio.run(main())


def in_a_thread_of_a_thread():
    in_all([threading.Thread(target=in_threads)])


@contextmanager
def in_bounded(guard):
    with bounded(guard):
        yield


@contextmanager
def in_activate(guard):
    with guard.activate():
        yield


WORK = [
    in_threads,
    in_workers,
    in_timers,
    in_a_pool,
    in_a_thread_pool,
    in_an_executor,
    in_a_thread_of_a_thread,
]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
@pytest.mark.parametrize("block", [in_bounded, in_activate], ids=["bounded", "activate"])
def test_calls_in_threads_of_a_block_spend_its_budget(block, work):
    guard = Guard(Budget(max_model_calls=5))
    with block(guard):
        work()
    assert guard.usage.model_calls == 5
    assert guard.trip.reason == "max_model_calls"


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_calls_in_threads_of_a_tool_spend_the_budget_of_its_run(work):
    guard = Guard(Budget(max_model_calls=5))
    asks = {"id": "1", "type": "function", "function": {"name": "fan", "arguments": "{}"}}
    reply = {"role": "assistant", "content": "", "tool_calls": [asks]}
    outcome = run_bounded(lambda messages: reply, guard, messages="Go.", tools={"fan": work})
    assert outcome.status == "terminated"
    assert outcome.usage.model_calls == 5


@pytest.mark.parametrize("way", ["submit", "map"])
def test_a_pool_that_is_older_than_the_block(way):
    guard = Guard(Budget(max_model_calls=5))
    with ThreadPoolExecutor(1) as pool, ThreadPool(1) as other:
        pool.submit(int).result()
        with guard.activate():
            if way == "submit":
                for one in range(CALLS):
                    pool.submit(try_to_ask, one).result()
            else:
                other.map(try_to_ask, range(CALLS))
        assert pool.submit(current_guard).result() is None
        assert other.apply(current_guard) is None
    assert guard.usage.model_calls == 5


def test_a_worker_that_one_block_made_is_not_of_it_in_another():
    first, second = Guard(), Guard()
    with ThreadPoolExecutor(1) as pool:
        with first.activate():
            assert pool.submit(current_guard).result() is first
        with second.activate():
            assert pool.submit(current_guard).result() is second
        assert pool.submit(current_guard).result() is None


def test_a_thread_of_an_ended_run_is_in_no_run():
    begin, found = threading.Event(), []

    def late():
        begin.wait(5)
        found.append(current_guard())

    with bounded(Budget()):
        thread = threading.Thread(target=late)
        thread.start()
    begin.set()
    thread.join()
    assert found == [None]


def state():
    return (
        threading.Thread.start,
        ThreadPoolExecutor.submit,
        ProcessPoolExecutor.submit,
        ThreadPool.map,
        ThreadPool.apply_async,
    )


@pytest.fixture
def bare():
    """Nothing is wrapped: what other tests dropped without its end is gone."""
    gc.collect()
    with Guard().activate():
        pass


def test_outside_of_blocks_nothing_is_wrapped(bare):
    before = state()
    with bounded(Budget()), Guard().activate():
        with Guard().activate():
            assert not set(state()) & set(before)
        assert not set(state()) & set(before)
    assert state() == before
    with suppress(KeyError), bounded(Budget()):
        raise KeyError
    assert state() == before


def test_a_run_that_is_dropped_without_its_end_keeps_no_wrap(bare):
    before = state()
    run = envelope_of(Budget()).open()
    assert not set(state()) & set(before)
    del run
    gc.collect()
    with Guard().activate():
        pass
    assert state() == before


def test_a_wrap_of_somebody_else_on_top_stays(bare):
    # As it stands in the class: a wrap of wrapt's differs on each access.
    before, seen = vars(threading.Thread)["start"], []
    guard = Guard()
    try:
        with guard.activate():
            ours = threading.Thread.start

            def theirs(self):
                seen.append(self)
                ours(self)

            threading.Thread.start = theirs
        assert threading.Thread.start is theirs
        with guard.activate():
            assert threading.Thread.start is theirs
            found = []
            in_all([threading.Thread(target=lambda: found.append(current_guard()))])
        assert found == [guard]
        in_all([threading.Thread(target=lambda: found.append(current_guard()))])
        assert found == [guard, None]
        assert len(seen) == 2
        threading.Thread.start = ours
        with guard.activate():
            pass
        assert vars(threading.Thread)["start"] is before
    finally:
        threading.Thread.start = before


@pytest.fixture
def instrumented(bare):
    """OpenTelemetry's instrumentation of threads, as Strands turns it on for the process."""
    telemetry = pytest.importorskip("opentelemetry.instrumentation.threading")
    classes = (threading.Thread, threading.Timer, ThreadPoolExecutor)
    before = [dict(vars(one)) for one in classes]
    instrumentor = telemetry.ThreadingInstrumentor()
    if not instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.instrument()
        yield
        instrumentor.uninstrument()
    else:
        yield
    for one, names in zip(classes, before, strict=True):
        for name in ("start", "run", "submit"):
            if name not in names and name in vars(one):
                delattr(one, name)


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
@pytest.mark.usefixtures("instrumented")
def test_calls_in_threads_that_telemetry_follows_spend_the_budget(work):
    classes = (threading.Thread, threading.Timer, ThreadPoolExecutor)
    before = [dict(vars(one)) for one in classes]
    guard = Guard(Budget(max_model_calls=5))
    with guard.activate():
        work()
    assert guard.usage.model_calls == 5
    for one, names in zip(classes, before, strict=True):
        assert all(vars(one)[name] is value for name, value in names.items())


def test_processes_are_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(instrumentation, "_WARNED", set())
    caplog.set_level(logging.WARNING, "budgetguard")
    guard = Guard(Budget(max_model_calls=5))
    with ProcessPoolExecutor(1) as pool, guard.activate():
        assert pool.submit(int, "1").result() == 1
        assert pool.submit(int, "2").result() == 2
    about = [one.message for one in caplog.records if "process" in one.message]
    assert len(about) == 1


def test_a_frame_of_a_block_is_not_kept_by_a_pool():
    with ThreadPoolExecutor(1) as pool:
        with Guard().activate():
            pool.submit(int).result()
        assert pool.submit(FRAME.get).result() is None
