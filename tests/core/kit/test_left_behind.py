"""What a run that was cut leaves behind in a thread is still held to its caps."""

import asyncio
import contextvars
import threading

import pytest

from budgetguard_core import Budget
from budgetguard_core.kit import Envelope, ModelCall, Stop, current, joined


def in_thread(context, work):
    """Run in another thread, within a context."""
    found = []
    thread = threading.Thread(target=lambda: found.append(context.run(work)))
    thread.start()
    thread.join()
    return found[0]


def begun(budget):
    run = Envelope(budget=budget).open()
    with run.entered():
        return run, contextvars.copy_context()


def stop(run):
    while not isinstance(opened := run.model_call(ModelCall()), Stop):
        run.answered(opened, None, text="x")
    run.end()


def fail(run):
    run.fail(ValueError("a sibling failed"))


def cancel(run):
    run.fail(asyncio.CancelledError())


@pytest.mark.parametrize("end", [stop, fail, cancel])
def test_what_goes_on_in_a_thread_is_the_run_s(end):
    run, context = begun(Budget(max_model_calls=2))
    end(run)
    assert in_thread(context, joined) is run
    inside = in_thread(context, lambda: Envelope(budget=Budget()).open())
    stop(inside)
    assert inside.trip.run_id == run.guard.run_id
    assert run.guard.usage.model_calls == 2


@pytest.mark.parametrize("end", [stop, fail, cancel])
def test_in_the_thread_of_the_run_its_work_is_over(end):
    run, context = begun(Budget(max_model_calls=2))
    end(run)
    assert context.run(current) is None


@pytest.mark.parametrize("end", ["end", "pause"])
def test_what_a_run_leaves_behind_that_ended_by_itself_is_nobody_s(end):
    run, context = begun(Budget())
    getattr(run, end)()
    assert in_thread(context, current) is None
