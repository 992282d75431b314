"""The guards of a script's processes on one ledger and one folder, in one process."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import pytest

from budgetguard_cli.run.attach import RunLedger
from budgetguard_cli.run.folder import RunFolder
from budgetguard_cli.run.report import RunReport
from budgetguard_cli.run.script import Patience
from budgetguard_core import Budget, FinalizeReserve, StopReason, Trip
from budgetguard_core.kit import Admit, ModelCall, Refuse, Stop, TokenUsage, ToolCall, Violation


class Bounded:
    """A run, and what its processes would be."""

    def __init__(self, folder, budget):
        self.folder = folder
        self.budget = budget
        self.plugs = []

    def process(self):
        """Return the guard of another process."""
        self.plugs.append(RunLedger(RunFolder(self.folder.url)))
        return self.plugs[-1].guard()

    @property
    def stop(self):
        return self.folder.stop()

    @property
    def report(self):
        return RunReport(self.folder, self.budget, 0)


@pytest.fixture
def bounded(monkeypatch):
    # Two processes of one number would wait for each other's file.
    numbers = iter(range(10**6, 10**7))
    monkeypatch.setattr("budgetguard_cli.run.folder.os.getpid", lambda: next(numbers))

    @contextmanager
    def bounded(**caps):
        budget = Budget(**caps)
        with RunFolder.made(budget) as folder:
            run = Bounded(folder, budget)
            try:
                yield run
            finally:
                for plug in run.plugs:
                    plug.ledger.close()

    return bounded


def spend(guard, tokens=110, **call):
    decision = guard.admit_model_call(ModelCall(model="gpt-4o", input_tokens=100, **call))
    if isinstance(decision, Admit):
        guard.settle_model_call(decision, TokenUsage(100, tokens - 100))
    return decision


def test_the_caps_are_exact_over_processes_and_threads(bounded):
    with bounded(max_iterations=37) as run:
        guards = [run.process() for _ in range(4)]
        with ThreadPoolExecutor(8) as pool:
            decisions = list(pool.map(lambda n: spend(guards[n % 4]), range(80)))
        assert sum(isinstance(one, Admit) for one in decisions) == 37
        reasons = {str(one.trip.reason) for one in decisions if isinstance(one, Stop)}
        assert reasons == {"max_iterations"}
        used = run.report.usage
        assert (used.iterations, used.total_tokens) == (37, 37 * 110)
        assert run.report.models["gpt-4o"].calls == 37
        assert run.report.models["gpt-4o"].cost_usd == used.cost_usd


def test_threads_that_start_at_once_get_exactly_what_there_is(bounded):
    """A refusal in one thread does not take what another was granted, and has yet to admit."""
    with bounded(max_model_calls=3) as run:
        guard = run.process()
        start = threading.Barrier(50)

        def ask(_):
            start.wait(60)
            return spend(guard)

        with ThreadPoolExecutor(50) as pool:
            decisions = list(pool.map(ask, range(50)))
        assert sum(isinstance(one, Admit) for one in decisions) == 3
        assert run.report.usage.model_calls == 3


def test_a_refusal_overtakes_no_call_whose_grant_is_on_its_way(bounded, monkeypatch):
    with bounded(max_model_calls=1) as run:
        guard = run.process()
        plug = run.plugs[0]
        reserve, wait_for, waits = plug.ledger.reserve, plug._changed.wait_for, threading.Event()
        refused = []
        other = threading.Thread(target=lambda: refused.append(spend(guard)))

        def slow(*arguments, **amounts):
            granted = reserve(*arguments, **amounts)
            other.start()
            assert waits.wait(60)
            return granted

        def told(*arguments):
            waits.set()
            return wait_for(*arguments)

        monkeypatch.setattr(plug.ledger, "reserve", slow)
        monkeypatch.setattr(plug._changed, "wait_for", told)
        assert isinstance(spend(guard), Admit)
        other.join()
        assert isinstance(refused[0], Stop)


def test_the_stop_of_another_process_overtakes_no_call_that_was_granted_before(
    bounded, monkeypatch
):
    with bounded(max_model_calls=3) as run:
        guard, other = run.process(), run.process()
        plug = guard.state.own_plugs[0]
        waiting = plug.obtain(["run"])
        while isinstance(spend(other), Admit):
            pass
        assert run.stop.reason is StopReason.MAX_MODEL_CALLS
        seen = []

        def wait_for(is_let_in, _):
            seen.append((is_let_in(), guard.trip))
            plug.decided((waiting,))

        monkeypatch.setattr(plug._changed, "wait_for", wait_for)
        assert isinstance(spend(guard), Stop)
        assert seen == [(False, None)]


def test_parallel_batches_start_exactly_as_many_tools_as_there_are(bounded):
    with bounded(max_tool_calls=3, loop_detection=None) as run:
        guards = [run.process(), run.process()]
        start = threading.Barrier(20)

        def ask(number):
            start.wait(60)
            return guards[number % 2].admit_tool_call(ToolCall(name="look"))

        with ThreadPoolExecutor(20) as pool:
            decisions = list(pool.map(ask, range(20)))
        assert sum(isinstance(one, Admit) for one in decisions) == 3


def test_dollars_are_reserved_for_all_processes(bounded):
    call = ModelCall(cost_usd=Decimal("0.10"))
    with bounded(max_cost_usd=Decimal("0.30")) as run:
        first, second = run.process(), run.process()
        held = [first.admit_model_call(call), second.admit_model_call(call)]
        held.append(first.admit_model_call(call))
        assert isinstance(second.admit_model_call(call), Stop)
        first.settle_model_call(held[0], TokenUsage(1, 1), cost_usd=Decimal("0.10"))
        # A stop is sticky; what was taken back counts as nothing all the same.
        second.withdraw(held[1])
        assert run.report.usage.model_calls == 2
        assert isinstance(run.process().admit_model_call(call), Stop)


def test_an_answer_that_is_longer_than_what_all_processes_have_left_is_refused(bounded):
    call = ModelCall(model="gpt-4o", input_tokens=100, max_output_tokens=800)
    with bounded(max_total_tokens=1_000) as run:
        spend(run.process(), tokens=500, max_output_tokens=800)
        assert isinstance(run.process().admit_model_call(call), Stop)
        assert run.report.usage.total_tokens == 500


def test_an_answer_of_unknown_length_leaves_room_for_those_beside_it(bounded):
    call = ModelCall(model="gpt-4o", input_tokens=100)
    with bounded(max_total_tokens=1_500) as run:
        first, second = run.process(), run.process()
        alone = first.admit_model_call(call)
        assert isinstance(second.admit_model_call(call), Stop)
        first.settle_model_call(alone, TokenUsage(100, 900))
        assert run.report.usage.total_tokens == 1_000
    with bounded(max_total_tokens=500) as run:
        assert isinstance(run.process().admit_model_call(call), Admit)


def test_on_an_event_loop_the_ledger_is_asked_and_told_in_threads(bounded):
    asked = []

    async def work(guard):
        for _ in range(2):  # the second fits only once the first is settled
            call = ModelCall(model="gpt-4o", input_tokens=100)
            ticket = await asyncio.to_thread(guard.admit_model_call, call)
            guard.settle_model_call(ticket, TokenUsage(100, 10))

    with bounded(max_total_tokens=250) as run:
        guard = run.process()
        store = run.plugs[0].ledger.connection.store()
        step = store.step
        store.step = lambda one: asked.append(threading.current_thread()) or step(one)
        asyncio.run(work(guard))
        guard.check()
        assert run.report.usage.total_tokens == 220
    assert threading.main_thread() not in asked


@pytest.mark.slow
def test_a_batch_is_admitted_in_order_by_what_all_processes_have_left(bounded):
    with bounded(max_tool_calls=3, tool_quotas={"mail": 1}) as run:
        first, second = run.process(), run.process()
        (mailed,) = first.admit_tool_calls([ToolCall(name="mail", arguments={"to": "a"})])
        first.settle_tool_call(mailed, "sent")
        batch = [ToolCall(name=name, arguments={"n": n}) for n, name in enumerate("xmxx")]
        batch[1].name = "mail"
        kinds = [type(one) for one in second.admit_tool_calls(batch)]
        assert kinds == [Admit, Refuse, Admit, Stop]
        assert run.report.usage.tool_calls == 3
        assert isinstance(second.admit_model_call(), Stop)
        assert isinstance(first.admit_model_call(), Stop)


def test_a_tool_call_that_was_not_made_gives_its_place_back(bounded):
    with bounded(max_tool_calls=1) as run:
        guard = run.process()
        (ticket,) = guard.admit_tool_calls([ToolCall(name="x")])
        guard.withdraw(ticket)
        assert isinstance(run.process().admit_tool_call(ToolCall(name="x")), Admit)


def test_retries_are_no_turns(bounded):
    with bounded(max_iterations=1) as run:
        spend(run.process())
        retry = ModelCall(model="gpt-4o", retry=True)
        assert isinstance(run.process().admit_model_call(retry), Admit)
        assert isinstance(spend(run.process()), Stop)


def test_the_time_is_that_of_the_whole_run(bounded):
    with bounded(max_seconds=60) as run:
        guard = run.process()
        assert 0 < guard.time_left() < 60
        assert guard.check() is None
        plug = RunLedger(RunFolder(run.folder.url))
        plug.facts.started_ns -= 61 * 10**9
        run.plugs.append(plug)
        assert str(spend(plug.guard()).trip.reason) == "max_seconds"
        assert str(run.stop.reason) == "max_seconds"


def test_used_up_is_not_stopped(bounded):
    with bounded(max_iterations=1) as run:
        spend(run.process())
        assert run.stop is None


def test_a_stop_reaches_every_process(bounded):
    held = Violation(reason=StopReason.ABORTED, detail="by hand")
    with bounded(max_iterations=9) as run:
        guard = run.process()
        run.folder.end(Trip(reason=held.reason, violations=(held,), run_id="x"))
        assert str(spend(guard).trip.reason) == "aborted"
        assert guard.cancellation.cancelled
        assert [one.detail for one in run.report.stops] == ["by hand"]


def test_a_script_that_asks_on_after_its_own_loop_is_aborted(bounded):
    with bounded(max_iterations=999) as run:
        guard = run.process().child()
        for _ in range(200):
            decision = guard.admit_model_call()
            if isinstance(decision, Stop):
                continue
            guard.settle_model_call(decision, TokenUsage(1, 1))
            (ticket,) = guard.admit_tool_calls([ToolCall(name="look", arguments={})])
            if isinstance(ticket, Admit):
                guard.settle_tool_call(ticket, "nothing")
        assert {str(one.reason) for one in run.report.stops} == {"no_progress", "aborted"}
        assert isinstance(spend(run.process()), Stop)


def test_a_limit_of_the_scripts_own_is_no_stop_of_the_run(bounded):
    with bounded(max_iterations=9) as run:
        guard = run.process().child(Budget(max_iterations=1))
        spend(guard)
        assert isinstance(spend(guard), Stop)
        assert run.stop is None
        assert run.report.usage.iterations == 1


def test_a_last_answer_is_paid_from_what_was_kept_back(bounded):
    reserve = FinalizeReserve(tokens=500)
    with bounded(max_total_tokens=1_000, finalize_reserve=reserve) as run:
        guard = run.process()
        spend(guard, tokens=500)
        assert isinstance(spend(guard), Stop)
        assert run.report.usage.total_tokens == 500


def test_without_budgetguard_run_everything_is_refused(bounded):
    with bounded(max_iterations=9) as run:
        guard = run.process()
        spend(guard)
    decision = spend(guard)
    assert (str(decision.trip.reason), decision.trip.detail) == (
        "aborted",
        "`budgetguard run` is gone",
    )
    assert isinstance(guard.admit_tool_call(ToolCall(name="x")), Stop)


def test_the_grace_is_over_for_a_script_that_calls_on_and_not_for_one_that_waits(bounded):
    with bounded(max_model_calls=1) as run:
        patience = Patience(run.folder, run.budget)
        guard = run.process()
        spend(guard)
        assert patience.waited_s() == 0
        spend(guard)
        assert patience.waited_s() == 0
        stop = run.folder.logs.with_name("stop")
        begun = stop.stat().st_mtime_ns
        os.utime(stop, ns=(begun, begun - 60 * 10**9))  # the stop was a minute ago
        patience = Patience(run.folder, run.budget)
        assert patience.waited_s() == patience.waited_s() == 0  # it waits for its children
        spend(guard)
        assert 60 <= patience.waited_s() < 300


def test_the_grace_is_over_for_a_script_that_waits_where_time_is(bounded):
    with bounded(max_seconds=60) as run:
        patience = Patience(run.folder, run.budget)
        assert patience.waited_s() == 0
        patience._started_ns -= 61 * 10**9
        first = patience.waited_s()
        assert 1 <= first < patience.waited_s()
        assert [str(one.reason) for one in run.report.stops] == ["max_seconds"]


def test_the_folder_is_this_users_alone_and_holds_no_arguments(bounded):
    with bounded(max_tool_calls=1) as run:
        path = Path(run.folder.logs).parent
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        run.process().admit_tool_call(ToolCall(name="x", arguments={"password": "hunter2"}))
        assert all(b"hunter2" not in one.read_bytes() for one in path.rglob("*") if one.is_file())
    assert not path.exists()
