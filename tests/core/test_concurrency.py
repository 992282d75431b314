"""Threads and tasks on one guard: exact together, in order, and never stuck."""

from __future__ import annotations

import ast
import asyncio
import inspect
import random
import sys
import threading
from collections import Counter
from decimal import Decimal
from functools import partial

import pytest

import budgetguard_core.counters as counters_module
import budgetguard_core.guard as guard_module
from budgetguard_core import Budget, Guard, replay
from budgetguard_core.kit import Admit, ModelCall, Refuse, Stop, TokenUsage, ToolCall
from budgetguard_core.testing import ManualClock

THREADS = 64


def in_threads(work, count=THREADS):
    """Let `work(number)` run in many threads that begin together; re-raise what they raise."""
    barrier, failed = threading.Barrier(count), []

    def run(number):
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if failed:
        raise failed[0]


@pytest.fixture(autouse=True)
def switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("budget", "cap"),
    [
        (Budget(max_iterations=100), 100),
        (Budget(max_model_calls=100), 100),
        (Budget(max_total_tokens=1000), 100),
        (Budget(max_cost_usd=1), 100),
    ],
    ids=["iterations", "model_calls", "tokens", "dollars"],
)
def test_64_threads_get_exactly_the_cap_of_model_calls(budget, cap):
    guard, admitted = Guard(budget), []

    def work(number):
        for _ in range(10):
            call = ModelCall(input_tokens=4, max_output_tokens=6, cost_usd=Decimal("0.01"))
            decision = guard.admit_model_call(call)
            if isinstance(decision, Admit):
                admitted.append(decision.call_id)
                guard.settle_model_call(decision, TokenUsage(4, 6), cost_usd=Decimal("0.01"))

    in_threads(work)
    assert len(admitted) == len(set(admitted)) == cap
    usage = guard.usage
    assert (usage.model_calls, usage.total_tokens) == (cap, 10 * cap)
    assert (usage.cost_usd, usage.reserved_tokens) == (cap * Decimal("0.01"), 0)


def test_64_threads_get_exactly_the_cap_of_tool_calls_in_batches():
    guard = Guard(Budget(max_tool_calls=301, tool_quotas={"a": 50}, loop_detection=None))
    answers = []

    def work(number):
        for step in range(5):
            batch = [ToolCall(name=name, arguments=[number, step]) for name in "abb"]
            for decision in guard.admit_tool_calls(batch):
                answers.append((type(decision), getattr(decision, "call_id", None)))
                if isinstance(decision, Admit):
                    guard.settle_tool_call(decision, [number, step])

    in_threads(work)
    kinds = Counter(kind for kind, _ in answers)
    assert kinds[Admit] == guard.usage.tool_calls == 301
    assert kinds[Stop] > 0
    assert guard.tool_counts["a"] <= 50
    assert set(kinds) <= {Admit, Stop, Refuse}
    assert guard.open_calls() == ()


def test_many_children_share_what_is_left():
    guard = Guard(Budget(max_iterations=500, max_tool_calls=300, loop_detection=None))
    children = [guard.child(Budget(max_iterations=20)) for _ in range(THREADS)]

    def work(number):
        child = children[number].child()
        for step in range(25):
            decision = child.admit_model_call()
            if isinstance(decision, Admit):
                child.settle_model_call(decision, TokenUsage(1, 1))
            tool = child.admit_tool_call(ToolCall(name="a", arguments=[number, step]))
            if isinstance(tool, Admit):
                child.settle_tool_call(tool, step)

    in_threads(work)
    usage = guard.usage
    assert (usage.iterations <= 500, usage.tool_calls) == (True, 300)
    assert sum(child.usage.iterations for child in children) == usage.iterations
    assert sum(child.usage.tool_calls for child in children) == 300
    assert usage.total_tokens == 2 * usage.iterations
    assert guard.trip is not None
    assert max(child.usage.iterations for child in children) <= 20


def test_one_ticket_that_many_threads_settle_is_charged_once():
    guard = Guard()
    ticket = guard.admit_model_call()
    answers = []
    in_threads(lambda number: answers.append(guard.settle_model_call(ticket, TokenUsage(5, 5))))
    assert Counter(answers) == {True: 1, False: THREADS - 1}
    assert guard.usage.total_tokens == 10


def test_sinks_get_every_event_once_and_in_order():
    seen, slow = [], []
    guard = Guard(
        Budget(max_iterations=300, loop_detection=None),
        sinks=[lambda event: seen.append(event.seq), lambda event: slow.append(event)],
    )

    def work(number):
        mine = guard.child() if number % 2 else guard
        for step in range(8):
            decision = mine.admit_model_call()
            if isinstance(decision, Admit):
                mine.settle_model_call(decision, TokenUsage(1, 1))
            tool = mine.admit_tool_call(ToolCall(name="a", arguments=[number, step]))
            if isinstance(tool, Admit):
                mine.settle_tool_call(tool, step)

    in_threads(work)
    assert seen == list(range(1, len(seen) + 1))
    assert [event.seq for event in slow] == seen
    assert guard.snapshot().seq == len(seen)
    # The log is the run: what was counted in it, in its order, is what the guard counted.
    replayed = replay(slow)
    assert replayed.usage.iterations == guard.usage.iterations == 300
    assert replayed.usage.tool_calls == guard.usage.tool_calls
    assert replayed.trip == guard.trip


def test_a_listener_may_ask_its_guard_while_others_work():
    guard = Guard(Budget(max_iterations=50), sinks=[lambda event: event.seq > 1 and guard.usage])
    in_threads(lambda number: [guard.admit_model_call() for _ in range(5)])
    assert guard.usage.iterations == 50
    assert guard.tree.errors == ()


def test_abort_from_another_thread_ends_all_at_their_next_step():
    guard = Guard()
    child = guard.child()
    stopped, going = [], threading.Barrier(9)

    def work(number):
        if number == 8:
            going.wait()
            guard.abort("user")
            return
        mine = child if number % 2 else guard
        for step in range(1_000_000):
            decision = mine.admit_model_call()
            if isinstance(decision, Stop):
                stopped.append(decision.trip)
                return
            mine.settle_model_call(decision, TokenUsage(1, 1))
            if step == 5:
                going.wait()

    in_threads(work, 9)
    assert len(stopped) == 8
    assert {(str(trip.reason), trip.detail) for trip in stopped} == {("aborted", "user")}
    assert guard.cancellation.cancelled
    assert child.cancellation.wait(0)


def test_what_reads_a_guard_sees_whole_steps():
    guard = Guard(Budget(max_model_calls=3000, loop_detection=None))
    done = threading.Event()

    def work(number):
        if number == 0:
            while not done.is_set():
                usage = guard.usage
                assert usage.total_tokens == usage.input_tokens + usage.output_tokens
                assert usage.total_tokens % 10 == 0
                snapshot = guard.snapshot()
                flying = sum(call.reserved_tokens for call in snapshot.open_calls)
                assert snapshot.counters["reserved_tokens"] == flying
                assert len(guard.tool_calls) <= 256 + THREADS
            return
        for _ in range(100):
            decision = guard.admit_model_call(ModelCall(input_tokens=10))
            if not isinstance(decision, Admit):
                break
            tool = guard.admit_tool_call(ToolCall(name="a"))
            guard.settle_model_call(decision, TokenUsage(3, 7))
            guard.settle_tool_call(tool, "x")
        if number == 1:
            done.set()

    in_threads(work, 8)


@pytest.mark.slow
def test_10_000_tasks_get_exactly_the_cap():
    guard = Guard(Budget(max_iterations=1234, max_tool_calls=2000, loop_detection=None))
    child = guard.child(Budget(max_tool_calls=500))
    order = random.Random(7)
    counts = Counter()

    async def task(number):
        mine = child if number % 3 == 0 else guard
        for _ in range(order.randrange(3)):
            await asyncio.sleep(0)
        decision = mine.admit_model_call()
        counts["model", type(decision)] += 1
        await asyncio.sleep(0)
        batch = [ToolCall(name="a", arguments=number), ToolCall(name="b", arguments=number)]
        for tool in mine.admit_tool_calls(batch):
            counts["tool", type(tool)] += 1
            if isinstance(tool, Admit):
                await asyncio.sleep(0)
                mine.settle_tool_call(tool, number)
        if isinstance(decision, Admit):
            mine.settle_model_call(decision, TokenUsage(1, 1))

    async def main():
        await asyncio.gather(*(task(number) for number in range(10_000)))

    asyncio.run(main())
    assert counts["model", Admit] == guard.usage.iterations == 1234
    assert counts["tool", Admit] == guard.usage.tool_calls <= 2000
    assert child.usage.tool_calls <= 500
    assert guard.usage.total_tokens == 2 * 1234
    assert guard.open_calls() == child.open_calls() == ()


class Interrupt(BaseException):
    """What a signal handler raises."""


def statements(module):
    """Where the statements begin. Within one, CPython looks for interrupts at calls alone."""
    tree = ast.parse(inspect.getsource(module))
    return {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)}


INTERRUPTIBLE = {module.__file__: statements(module) for module in (guard_module, counters_module)}


def interrupted_at(number, work):
    """Raise at the `number`th statement of the guard and the meter; False where none is left."""
    before, left = sys.gettrace(), [number]

    def trace(frame, event, argument):
        lines = INTERRUPTIBLE.get(frame.f_code.co_filename)
        if lines is not None:
            if event == "line" and frame.f_lineno in lines:
                left[0] -= 1
                if left[0] == 0:
                    raise Interrupt
            return trace
        return None

    sys.settrace(trace)
    try:
        work()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("usage", [TokenUsage(5, 4), TokenUsage(5, 4, 1, 1, 1, 1)])
def test_a_charge_that_is_interrupted_anywhere_loses_nothing(usage):
    number, spans = 1, 0
    while True:
        events = []
        guard = Guard(Budget(max_total_tokens=100), clock=ManualClock(), sinks=[events.append])
        child = guard.child().child()
        ticket = child.admit_model_call(ModelCall(input_tokens=7, cost_usd=Decimal(2)))
        settle = partial(child.settle_model_call, ticket, usage, cost_usd=Decimal(3))
        if not interrupted_at(number, settle):
            break
        settle()
        for one in (guard, child):
            used = one.usage
            assert (used.total_tokens, used.cost_usd) == (9, 3), number
            assert (used.reserved_tokens, used.reserved_usd) == (0, 0), number
        assert guard.open_calls() == ()
        guard.tree.flush()
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert replay(events).snapshot().counters == guard.snapshot().counters, number
        number += 1
        spans += 1
    assert spans > 20


class HandlesSignals(ManualClock):
    """Calls what a signal handler would, in the thread that is inside the guard."""

    handler = None

    def monotonic_ns(self):
        handler, self.handler = self.handler, None
        if handler is not None:
            handler()
        return super().monotonic_ns()

    def wall_ns(self):
        return self.monotonic_ns()


@pytest.mark.parametrize("read", [False, True])
def test_an_abort_from_a_signal_handler_keeps_the_log_in_order_and_replayable(read):
    clock, events = HandlesSignals(), []
    guard = Guard(Budget(max_iterations=10), clock=clock, sinks=[events.append])
    clock.handler = guard.abort
    if read:
        assert guard.usage.iterations == 0
    else:
        assert isinstance(guard.admit_model_call(), Admit)
    assert isinstance(guard.admit_model_call(), Stop)
    assert isinstance(guard.admit_tool_call(ToolCall(name="a")), Stop)
    assert guard.cancellation.cancelled
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    again = replay(events)
    assert again.trip == guard.trip
    assert again.snapshot().counters == guard.snapshot().counters


def test_a_tool_call_after_a_postponed_abort_is_stopped():
    clock = HandlesSignals()
    guard = Guard(clock=clock)
    clock.handler = guard.abort
    assert guard.usage.iterations == 0
    assert isinstance(guard.admit_tool_call(ToolCall(name="a")), Stop)


def test_a_slow_sink_delays_the_step_that_wrote_and_no_other():
    entered, go_on, seen = threading.Event(), threading.Event(), []

    def slow(event):
        seen.append(event.seq)
        if event.event == "aborted":
            entered.set()
            assert go_on.wait(20)

    guard = Guard(sinks=[slow])
    child = guard.child()
    aborting = threading.Thread(target=child.abort, daemon=True)
    aborting.start()
    assert entered.wait(20)
    others = threading.Thread(
        target=lambda: [guard.settle_model_call(guard.admit_model_call(), TokenUsage(1, 1))],
        daemon=True,
    )
    others.start()
    others.join(20)
    assert not others.is_alive()
    assert not go_on.is_set()
    go_on.set()
    aborting.join(20)
    guard.tree.flush()
    assert seen == list(range(1, 6))


@pytest.mark.parametrize("sinks", [(), (lambda event: None,)], ids=["silent", "logged"])
def test_an_interrupted_settlement_is_made_in_whole_and_the_interrupt_goes_on(monkeypatch, sinks):
    guard = Guard(clock=ManualClock(), sinks=sinks)
    ticket = guard.admit_model_call()
    interrupts = [Interrupt()]

    def interrupting(function):
        def call(*args):
            answer = function(*args)
            if interrupts:
                raise interrupts.pop()
            return answer

        return call

    monkeypatch.setattr(counters_module, "settle", interrupting(counters_module.settle))
    with pytest.raises(Interrupt):
        guard.settle_model_call(ticket, TokenUsage(1, 1))
    assert guard.open_calls() == ()
    assert not guard.settle_model_call(ticket, TokenUsage(1, 1))
