"""The deadline and an abort cut work in flight, on an event loop and in threads."""

import asyncio
import threading

import pytest

from budgetguard_core import Budget, Mode, StopReason
from budgetguard_core.kit import Envelope, Scope, Watch, cut_short, supervised
from budgetguard_core.kit import cancel as watching

SOON = 0.05


def opened(budget, **options):
    run = Envelope(budget=budget, **options).open()
    run.guard.start()
    return run


async def forever():
    await asyncio.get_running_loop().create_future()


async def test_the_deadline_cuts_what_a_block_awaits():
    run = opened(Budget(max_seconds=SOON))
    async with asyncio.timeout(5):
        with cut_short(run) as watch:
            await forever()
    assert watch.trip.reason is StopReason.MAX_SECONDS
    assert run.trip is watch.trip
    assert asyncio.current_task().cancelling() == 0


async def test_an_abort_from_a_thread_cuts_at_once():
    run = opened(Budget())
    async with asyncio.timeout(5):
        with cut_short(run) as watch:
            threading.Thread(target=run.guard.abort).start()
            await forever()
    assert watch.trip.reason is StopReason.ABORTED


async def test_the_callers_own_cancellation_stays_one():
    async def work():
        with cut_short(opened(Budget(max_seconds=60))):
            await forever()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_from_both_sides_stays_the_callers():
    run = opened(Budget())

    async def work():
        with cut_short(run):
            await forever()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    run.guard.abort()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_ends_in_the_moment_of_the_cut_is_kept():
    run = opened(Budget())
    with cut_short(run) as watch:
        run.guard.abort()
        watch._watch._look()
        result = "done"
    assert result == "done"
    assert asyncio.current_task().cancelling() == 0


async def test_an_extended_deadline_holds():
    run = opened(Budget(max_seconds=SOON))
    cut = []
    watch = Watch(run, lambda: cut.append(1))
    run.guard.extend(max_seconds=60)
    await asyncio.sleep(SOON * 2)
    watch.close()
    watch.close()
    assert cut == []


async def test_an_observing_run_is_not_cut():
    run = opened(Budget(), mode=Mode.OBSERVE)
    cut = []
    watch = Watch(run, lambda: cut.append(1))
    run.guard.abort()
    watch._look()
    watch.close()
    watch._look()
    watch._arm()
    assert cut == []


async def test_runs_inside_end_first(monkeypatch):
    monkeypatch.setattr(watching, "GRACE", 0.001)
    outer = opened(Budget(max_seconds=SOON))
    with outer.entered():
        inner = Envelope(budget=Budget()).open()
    ended = []

    def cut_inner():
        ended.append("inner")
        inner.end()

    inside = Watch(inner, cut_inner)
    over = asyncio.get_running_loop().create_future()

    def cut_outer():
        ended.append("outer")
        over.set_result(None)

    outside = Watch(outer, cut_outer)
    async with asyncio.timeout(5):
        await over
    inside.close()
    outside.close()
    assert ended == ["inner", "outer"]


async def test_a_run_inside_that_never_ends_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(watching, "GRACE", 0.001)
    outer = opened(Budget())
    with outer.entered():
        inner = Envelope(budget=Budget()).open()
    over = asyncio.get_running_loop().create_future()
    watch = Watch(outer, lambda: over.set_result(None))
    outer.guard.abort()
    async with asyncio.timeout(5):
        await over
    watch.close()
    assert not inner.ended


async def test_a_supervised_task_is_cancelled_at_the_deadline():
    run = opened(Budget(max_seconds=SOON))
    work = asyncio.create_task(forever())
    async with asyncio.timeout(5):
        trip = await supervised(run, work)
    assert trip.reason is StopReason.MAX_SECONDS
    assert work.cancelled()


async def test_a_supervised_task_that_ends_is_left_alone():
    async def work():
        return "done"

    task = asyncio.create_task(work())
    assert await supervised(opened(Budget(max_seconds=60)), task) is None
    assert task.result() == "done"


async def test_a_supervised_task_is_cancelled_with_its_caller():
    work = asyncio.create_task(forever())
    caller = asyncio.create_task(supervised(opened(Budget()), work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.cancelled()


@pytest.mark.parametrize("ending", ["returns", "raises", "is cancelled"])
async def test_work_that_does_not_let_itself_be_cancelled_is_left_behind(monkeypatch, ending):
    monkeypatch.setattr(watching, "UNCANCELLABLE", 0.01)
    run, over = opened(Budget()), asyncio.Event()

    async def stubborn():
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue
        if ending == "raises":
            raise ValueError("late")
        if ending == "is cancelled":
            raise asyncio.CancelledError

    work = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    run.guard.abort()
    async with asyncio.timeout(5):
        assert await supervised(run, work) is not None
    assert "did not let itself be cancelled" in run.guard.tree.errors[0]
    over.set()
    await asyncio.wait({work})


def test_without_an_event_loop_a_block_is_left_alone():
    with cut_short(opened(Budget(max_seconds=0.001))) as watch:
        assert watch.trip is None


def test_beside_a_blocking_call_the_deadline_cuts_from_a_thread():
    cut = threading.Event()
    watch = Watch(opened(Budget(max_seconds=SOON)), cut.set)
    assert cut.wait(60)
    watch.close()
    assert watch.trip.reason is StopReason.MAX_SECONDS


def test_beside_a_blocking_call_an_abort_cuts_at_once():
    run, cut = opened(Budget()), threading.Event()
    watch = Watch(run, cut.set)
    run.guard.abort()
    assert cut.is_set()
    watch.close()


def test_an_abort_after_the_loop_is_gone_is_harmless():
    run = opened(Budget())

    async def main():
        Watch(run, lambda: None)

    asyncio.run(main())
    run.guard.abort()
    assert run.check() is not None


def test_a_watch_that_is_closed_looks_no_more():
    cuts = []
    run = Envelope(budget=Budget(max_seconds=100)).open()
    watch = Watch(run, lambda: cuts.append(1))
    watch.close()
    timer = watch._timer
    watch._look()  # it was on its way when the watch was closed
    assert watch._timer is timer
    assert cuts == []


async def test_of_blocks_that_follow_each_other_the_next_is_cut_and_nothing_between():
    run = opened(Budget())
    cutting = Scope(run)
    with cutting as watch:
        await asyncio.sleep(0)
    run.guard.abort()
    for _ in range(5):
        await asyncio.sleep(0)
    assert watch.trip is None
    async with asyncio.timeout(5):
        with cutting as watch:
            await forever()
    assert watch.trip.reason is StopReason.ABORTED
    assert asyncio.current_task().cancelling() == 0
    cutting.close()


async def test_the_deadline_that_passes_between_blocks_cuts_the_next():
    run = opened(Budget(max_seconds=SOON))
    cutting = Scope(run)
    with cutting:
        pass
    async with asyncio.timeout(5):
        while run.time_left():
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        with cutting as watch:
            await forever()
    assert watch.trip.reason is StopReason.MAX_SECONDS
    cutting.close()


def test_blocks_on_one_event_loop_after_the_other_are_each_cut():
    run = opened(Budget())
    cutting = Scope(run)

    async def block():
        async with asyncio.timeout(5):
            with cutting as watch:
                asyncio.get_running_loop().call_soon(run.guard.abort)
                await forever()
        return watch.trip

    async def nothing():
        with cutting as watch:
            return watch.trip

    assert asyncio.run(nothing()) is None
    assert asyncio.run(block()).reason is StopReason.ABORTED
    cutting.close()
