"""One last answer of a stopped run, from what its budget has kept back."""

from __future__ import annotations

import asyncio
import threading
from decimal import Decimal

import pytest

from budgetguard_core import (
    Budget,
    ConfigurationError,
    FinalizeReserve,
    Guard,
    Mode,
    Price,
    PriceBook,
    replay,
)
from budgetguard_core.kit import (
    Answer,
    Envelope,
    ModelCall,
    Stop,
    TokenUsage,
    ToolCall,
    last_answer,
)
from budgetguard_core.testing import ManualClock

RESERVE = FinalizeReserve(tokens=1000)
SAID = Answer(text="It is 42.", usage=TokenUsage(200, 50))


def stopped(budget=None, *, tokens=100, **options):
    """Open a run and call the model until it is stopped."""
    run = Envelope(budget=budget or Budget(max_iterations=2, finalize_reserve=RESERVE), **options)
    run = run.open()
    while not isinstance(call := run.model_call(ModelCall(input_tokens=10)), Stop):
        run.answered(call, TokenUsage(tokens, 0))
    return run


def ask(run, answer=SAID, **call):
    last = last_answer(run)
    assert last is not None
    return last.ask(ModelCall(input_tokens=200, **call), lambda _: answer)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "tokens or cost_usd must be given, got neither"),
        ({"tokens": 0}, "tokens must be a whole number >= 1, got 0"),
        ({"tokens": True}, "got True"),
        ({"cost_usd": "1"}, "US dollars"),
        ({"tokens": 5, "seconds": 0}, "seconds must be a number of seconds > 0"),
        ({"token": 5}, "Use tokens"),
    ],
)
def test_a_reserve_that_makes_no_sense_is_refused(fields, text):
    with pytest.raises(ConfigurationError, match=text):
        FinalizeReserve(**fields)


def test_a_reserve_leaves_something_of_its_cap():
    with pytest.raises(ConfigurationError, match="finalize_reserve must be less than max_total_t"):
        Budget(max_total_tokens=1000, finalize_reserve=RESERVE)
    with pytest.raises(ConfigurationError, match=r"max_cost_usd=1, got 1\. Raise"):
        Budget(max_cost_usd=1, finalize_reserve=FinalizeReserve(cost_usd=1))
    with pytest.raises(ConfigurationError):
        Budget(finalize_reserve=1000)


def test_a_budget_with_a_reserve_is_plain_data_and_back():
    budget = Budget(max_cost_usd=1, finalize_reserve=FinalizeReserve(cost_usd=Decimal("0.1")))
    assert Budget.from_json(budget.to_json()) == budget
    assert "finalize_reserve" not in Budget(max_iterations=1).to_json()


def test_what_is_kept_back_stops_the_run_before_its_cap():
    run = stopped(Budget(max_total_tokens=2000, finalize_reserve=RESERVE), tokens=300)
    assert run.guard.usage.total_tokens == 1200
    assert run.trip.detail.endswith("1200 used, 1000 kept back for a last answer")
    assert ask(run) == "It is 42."
    assert run.guard.usage.total_tokens == 1450


def test_dollars_are_kept_back_too():
    prices = PriceBook({"m": Price(input=1000, output=1000)})
    run = Envelope(
        budget=Budget(max_cost_usd=1, finalize_reserve=FinalizeReserve(cost_usd=Decimal("0.5"))),
        price_book=prices,
    ).open()
    while not isinstance(call := run.model_call(ModelCall(model="m", input_tokens=200)), Stop):
        run.answered(call, TokenUsage(200, 0))
    assert run.guard.usage.cost_usd == Decimal("0.4")
    seen = []
    last = last_answer(run)
    text = last.ask(ModelCall(model="m", input_tokens=200), lambda call: seen.append(call) or SAID)
    assert text == "It is 42."
    # Of fifty cents, twenty are the prompt's.
    assert seen[0].max_output_tokens == 300
    assert run.guard.usage.cost_usd == Decimal("0.65")


def test_it_is_counted_and_no_iteration():
    run = stopped()
    assert ask(run) == "It is 42."
    usage = run.guard.usage
    assert (usage.iterations, usage.model_calls, usage.total_tokens) == (2, 3, 450)
    outcome = run.end(final="It is 42.")
    assert (outcome.status, outcome.finalized) == ("terminated", True)
    assert outcome.stop_reason == "max_iterations"


def test_its_seconds_are_kept_back_from_the_run():
    clock = ManualClock()
    reserve = FinalizeReserve(tokens=1000, seconds=20)
    run = Envelope(budget=Budget(max_seconds=60, finalize_reserve=reserve), clock=clock).open()
    run.answered(run.model_call(ModelCall(input_tokens=10)), TokenUsage(100, 0))
    assert run.guard.time_left() == 40
    clock.advance(40)
    stop = run.model_call(ModelCall(input_tokens=10))
    assert stop.trip.detail == (
        "max_seconds=60.0 reached: 40.0 used, 20.0 kept back for a last answer"
    )
    assert ask(run) == "It is 42."
    clock.advance(20)
    assert last_answer(run) is None
    assert run.guard.tree.errors == ("last answer: no time is left for it",)

    # A short run keeps half of its time for its work.
    run = Envelope(budget=Budget(max_seconds=10, finalize_reserve=RESERVE), clock=clock).open()
    run.model_call(ModelCall(input_tokens=10))
    assert run.guard.time_left() == 5


def test_it_passes_the_cap_on_model_calls_but_not_that_on_tokens():
    assert ask(stopped(Budget(max_model_calls=2, finalize_reserve=RESERVE))) == "It is 42."

    # An answer that overshot has taken the reserve with it.
    run = stopped(Budget(max_total_tokens=2000, finalize_reserve=RESERVE), tokens=1900)
    called = []
    assert last_answer(run).ask(ModelCall(input_tokens=90), called.append) is None
    assert not called
    assert run.end().finalized is False


def test_tools_that_the_provider_ran_past_their_cap_do_not_take_it():
    run = Envelope(budget=Budget(max_tool_calls=1, finalize_reserve=RESERVE)).open()
    run.answered(run.model_call(ModelCall(input_tokens=10)), TokenUsage(100, 0))
    run.guard.admit_tool_calls([ToolCall(name="web_search", kind="hosted")] * 3)
    assert isinstance(run.model_call(ModelCall(input_tokens=10)), Stop)
    assert ask(run) == "It is 42."


def test_a_prompt_that_is_more_than_the_reserve_is_not_sent():
    run = stopped()
    called = []
    assert last_answer(run).ask(ModelCall(input_tokens=1000), called.append) is None
    assert not called
    assert run.trip.reason == "max_iterations"
    assert run.guard.usage.model_calls == 2
    (error,) = run.end().errors
    assert error.startswith("last answer: a prompt of 1000 tokens does not fit")


@pytest.mark.parametrize("answer", [Answer(text=" "), ValueError("down")])
def test_without_an_answer_the_run_ends_as_ever(answer):
    run = stopped()

    def model(_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert last_answer(run).ask(ModelCall(input_tokens=200), model) is None
    outcome = run.end()
    assert outcome.finalized is False
    assert outcome.usage.model_calls == 3
    if isinstance(answer, Exception):
        assert outcome.errors == ("last answer: ValueError: down",)
        assert outcome.usage.failed_calls == 1
    assert run.guard.open_calls() == ()


def test_it_is_not_given_to_a_run_that_was_aborted():
    run = Envelope(budget=Budget(max_iterations=2, finalize_reserve=RESERVE)).open()
    run.guard.abort()
    assert isinstance(run.model_call(ModelCall()), Stop)
    assert last_answer(run) is None

    run = stopped()
    run.guard.cancellation.cancel()
    assert last_answer(run) is None


def test_it_is_not_given_without_a_stop_or_a_reserve_or_in_observe():
    assert last_answer(Envelope(budget=Budget(finalize_reserve=RESERVE)).open()) is None
    assert last_answer(stopped(Budget(max_iterations=1))) is None
    run = Envelope(
        budget=Budget(max_iterations=1, finalize_reserve=RESERVE), mode=Mode.OBSERVE
    ).open()
    for _ in range(3):
        run.answered(run.model_call(ModelCall()), TokenUsage(1, 1))
    assert run.guard.observed_trip is not None
    assert last_answer(run, run.guard.observed_trip) is None


def test_a_stop_of_the_run_around_is_answered_by_that_run_alone():
    outer = Envelope(budget=Budget(max_iterations=1, finalize_reserve=RESERVE)).open()
    with outer.entered():
        inner = Envelope(budget=Budget(max_iterations=9, finalize_reserve=RESERVE)).open()
        inner.answered(inner.model_call(ModelCall()), TokenUsage(1, 1))
        assert isinstance(inner.model_call(ModelCall()), Stop)
        assert last_answer(inner) is None
        inner.end()
    assert outer.check() is not None
    assert ask(outer) == "It is 42."


def test_a_part_with_its_own_reserve_answers_for_itself_and_the_run_around_pays():
    outer = Envelope(budget=Budget(max_iterations=9)).open()
    with outer.entered():
        inner = stopped()
        assert ask(inner) == "It is 42."
        inner.end()
    assert outer.guard.usage.model_calls == 3
    assert outer.trip is None
    assert outer.check() is None


def test_a_reserve_above_a_run_without_one_is_that_of_the_run_around():
    outer = Envelope(budget=Budget(max_iterations=9, finalize_reserve=RESERVE)).open()
    with outer.entered():
        assert last_answer(stopped(Budget(max_iterations=1))) is None


def test_runs_on_one_guard_and_in_a_block_share_its_reserve():
    guard = Guard(Budget(max_total_tokens=2000, finalize_reserve=RESERVE))
    first = Envelope(budget=guard).open()
    second = Envelope(budget=guard).open()
    first.answered(first.model_call(ModelCall()), TokenUsage(1000, 0))
    assert isinstance(second.model_call(ModelCall()), Stop)
    assert isinstance(first.model_call(ModelCall()), Stop)
    for run in (first, second):
        assert ask(run, Answer(text="Yes.", usage=TokenUsage(300, 100))) == "Yes."
    assert guard.usage.total_tokens == 1800
    # What is left is less than the third prompt needs.
    third = Envelope(budget=guard).open()
    third.check()
    assert ask(third) is None

    guard = Guard(Budget(max_iterations=2, finalize_reserve=RESERVE))
    with guard.activate():
        run = stopped(Budget(max_iterations=9))
        assert ask(run) == "It is 42."
    # The limit of a block that keeps nothing back is not passed for a run's own reserve.
    with Guard(Budget(max_iterations=1)).activate():
        run = stopped(Budget(max_iterations=9, finalize_reserve=RESERVE))
        assert last_answer(run) is None


def test_a_call_that_hangs_is_left_when_its_time_is_over():
    reserve = FinalizeReserve(tokens=1000, seconds=0.05)
    released = threading.Event()
    run = stopped(Budget(max_iterations=1, finalize_reserve=reserve))
    assert last_answer(run).ask(ModelCall(input_tokens=1), lambda _: released.wait(60)) is None
    released.set()
    assert "TimeoutError" in run.end().errors[0]

    async def hang(_):
        await asyncio.Event().wait()

    async def main():
        run = stopped(Budget(max_iterations=1, finalize_reserve=reserve))
        assert await last_answer(run).ask_async(ModelCall(input_tokens=1), hang) is None
        assert "TimeoutError" in run.end().errors[0]
        assert run.guard.usage.model_calls == 2

    asyncio.run(main())


def test_asynchronously_it_is_the_same():
    async def say(call):
        assert call.max_output_tokens == 800
        return SAID

    async def fail(_):
        raise ValueError

    async def main():
        run = stopped()
        assert await last_answer(run).ask_async(ModelCall(input_tokens=200), say) == "It is 42."
        assert await last_answer(stopped()).ask_async(ModelCall(input_tokens=2000), say) is None
        assert await last_answer(stopped()).ask_async(ModelCall(input_tokens=2), fail) is None
        run = stopped()
        reached = asyncio.Event()

        async def left():
            asked = last_answer(run).ask_async(ModelCall(), hang)
            assert await asked is None
            run.end()
            await asyncio.sleep(0)
            raise AssertionError

        async def late():
            await last_answer(stopped()).ask_async(ModelCall(), hang)
            await asyncio.sleep(60)

        async def hang(_):
            reached.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(left())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert run.outcome.status == "terminated"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(late(), 0.01)

    asyncio.run(main())


def test_a_log_with_a_last_answer_is_lived_through_again():
    events = []
    run = stopped(sinks=[events.append])
    ask(run)
    run.end()
    again, usage = replay(events).usage, run.guard.usage
    assert (again.total_tokens, again.model_calls) == (usage.total_tokens, 3)
    assert again.iterations == 2


def test_an_abort_cuts_it_at_once_and_is_no_failure():
    long = FinalizeReserve(tokens=1000, seconds=3600)
    run = stopped(Budget(max_iterations=1, finalize_reserve=long))
    released = threading.Event()

    def hang(_):
        # From a thread of its own, as a person would.
        threading.Thread(target=run.guard.abort).start()
        released.wait(60)

    assert last_answer(run).ask(ModelCall(input_tokens=1), hang) is None
    assert not released.is_set()
    released.set()
    outcome = run.end()
    assert (outcome.stop_reason, outcome.finalized, outcome.errors) == ("max_iterations", False, ())
    assert run.guard.open_calls() == ()

    async def hang_async(_):
        threading.Thread(target=guards.pop().abort).start()
        await asyncio.Event().wait()

    async def swallow(_):
        guards.pop().abort()
        return SAID

    async def main():
        for model, text in ((hang_async, None), (swallow, "It is 42.")):
            run = stopped(Budget(max_iterations=1, finalize_reserve=long))
            guards.append(run.guard)
            asked = last_answer(run).ask_async(ModelCall(input_tokens=1), model)
            assert await asyncio.wait_for(asked, 60) == text
            assert run.end().errors == ()
            await asyncio.sleep(0)
            assert asyncio.current_task().cancelling() == 0

    guards = []
    asyncio.run(main())


def test_the_caller_that_cancels_in_the_same_moment_is_heard():
    long = FinalizeReserve(tokens=1000, seconds=3600)

    async def main():
        run = stopped(Budget(max_iterations=1, finalize_reserve=long))

        async def hang(_):
            run.guard.abort()
            asyncio.get_running_loop().call_soon(task.cancel)
            await asyncio.Event().wait()

        async def left():
            assert await last_answer(run).ask_async(ModelCall(input_tokens=1), hang) is None
            await asyncio.sleep(60)

        task = asyncio.create_task(left())
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
