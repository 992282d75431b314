"""A cap that asks a person before it stops a run."""

from __future__ import annotations

import asyncio
import threading

import pytest

from budgetguard_core import Budget, ConfigurationError, Guard, Price, PriceBook, StopReason
from budgetguard_core.kit import Admit, Envelope, ModelCall, Stop, TokenUsage, ToolCall
from budgetguard_core.testing import ManualClock

BOOK = PriceBook({"m": Price(input=10_000, output=10_000)})


class Person:
    """Gives answers in turn, and notes the questions."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.questions = []

    def __call__(self, question):
        self.questions.append(question)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def asked(self):
        return [(str(one.reason), one.limit, one.used) for one in self.questions]


def opened(person, **caps):
    guard = Guard(Budget(loop_detection=None, **caps), price_book=BOOK)
    return Envelope(budget=guard, on_trip=person).open()


def called(run, **facts) -> bool:
    """Make a call of 20 tokens, at 20 cents; False for a stop."""
    call = run.model_call(ModelCall(model="m", **facts))
    if isinstance(call, Stop):
        return False
    run.answered(call, TokenUsage(10, 10))
    return True


@pytest.mark.parametrize(
    ("caps", "more", "calls"),
    [
        ({"max_iterations": 2}, {"max_iterations": 3}, 3),
        ({"max_model_calls": 2}, {"max_model_calls": 4}, 4),
        ({"max_total_tokens": 40}, {"max_total_tokens": 60}, 3),
        ({"max_input_tokens": 20}, {"max_input_tokens": 30}, 3),
        ({"max_output_tokens": 20}, {"max_output_tokens": 30}, 3),
        ({"max_cost_usd": 0.4}, {"max_cost_usd": 0.6}, 3),
    ],
)
def test_each_cap_asks_until_the_answer_is_the_end(caps, more, calls):
    person = Person(more)
    run = opened(person, **caps)
    assert [called(run) for _ in range(calls + 1)] == [True] * calls + [False]
    ((name, cap),) = caps.items()
    assert [one[0] for one in person.asked] == [name, name]
    assert person.questions[0].next_step == "call the model m"
    assert float(person.questions[0].limit) == cap
    assert f"{name}=" in person.questions[0].detail
    outcome = run.end()
    assert (outcome.status, str(outcome.stop_reason)) == ("terminated", name)


def test_it_is_asked_again_where_the_answer_is_not_enough():
    person = Person({"max_total_tokens": 50}, {"max_total_tokens": 500})
    run = opened(person, max_total_tokens=40)
    assert all(called(run) for _ in range(2))
    assert called(run, input_tokens=60)
    assert [one[1] for one in person.asked] == [40, 50]


def test_a_batch_is_asked_about_as_a_whole():
    person = Person({"max_tool_calls": 4})
    run = opened(person, max_tool_calls=3)
    for _ in range(2):
        batch = run.guard.admit_tool_calls([ToolCall(name="a"), ToolCall(name="b")])
        assert all(isinstance(one, Admit) for one in batch)
    assert [one.next_step for one in person.questions] == ["call the tools a, b"]
    last = run.guard.admit_tool_calls([ToolCall(name="a")])
    assert isinstance(last[0], Stop)
    assert len(person.asked) == 2


@pytest.mark.parametrize(
    "answer",
    [
        {"max_iterations": 1},  # not raised
        {"max_usd": 5},
        {"max_tool_calls": 5},  # no cap of this run
        True,
        7,
        ConnectionError("nobody is there"),
    ],
)
def test_an_answer_that_makes_no_sense_is_the_end(answer):
    person = Person(answer)
    run = opened(person, max_iterations=1)
    assert [called(run), called(run)] == [True, False]
    outcome = run.end()
    assert outcome.stop_reason is StopReason.MAX_ITERATIONS
    assert outcome.errors[0].startswith("on_trip: ")
    assert len(person.asked) == 1


def test_time_stands_still_meanwhile():
    clock = ManualClock()

    def person(question):
        clock.advance(1000)
        return {"max_iterations": 2}

    guard = Guard(Budget(max_iterations=1, max_seconds=10), clock=clock)
    run = Envelope(budget=guard, on_trip=person).open()
    assert called(run)
    assert called(run)
    assert run.end().usage.seconds < 1


def test_what_is_no_cap_is_not_asked_about():
    person = Person({"max_iterations": 9}, {"max_seconds": 99})
    clock = ManualClock()
    guard = Guard(Budget(max_seconds=1, max_iterations=1), clock=clock)
    run = Envelope(budget=guard, on_trip=person).open()
    assert called(run)
    clock.advance(2)
    assert not called(run)
    run = opened(person, max_iterations=1)
    assert called(run)
    run.guard.abort()
    assert not called(run)
    assert person.asked == []


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_no_other_mode_asks(mode):
    person = Person()
    guard = Guard(Budget(max_iterations=1), mode=mode)
    run = Envelope(budget=guard, on_trip=person).open()
    assert all(called(run) for _ in range(3))
    assert person.asked == []


def test_a_part_asks_for_the_caps_around_it_and_those_without_a_person_hold():
    person = Person({"max_iterations": 3})
    run = opened(person, max_iterations=2)
    with run.entered():
        inner = Envelope(budget=Budget(max_model_calls=9)).open()
        assert [called(inner) for _ in range(4)] == [True] * 3 + [False]
        assert [one.run_id for one in person.questions] == [run.guard.run_id] * 2

        other = Person({"max_iterations": 50})
        bound = Envelope(budget=Budget(max_iterations=50), on_trip=other).open()
        assert not called(bound)  # the run around it has ended
    assert other.asked == []


def test_threads_at_the_cap_ask_once():
    person = Person({"max_model_calls": 9})
    run = opened(person, max_model_calls=1)
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        called(run)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.guard.usage.model_calls == 8
    assert person.asked == [("max_model_calls", 1, 1)]


def test_a_person_may_answer_in_a_coroutine():
    async def person(question):
        await asyncio.sleep(0)
        return {"max_iterations": 2}

    run = opened(person, max_iterations=1)
    assert [called(run), called(run)] == [True, True]

    async def main():
        run = opened(person, max_iterations=1)
        return [called(run), called(run)]

    assert asyncio.run(main()) == [True, True]


def test_what_is_no_function_is_refused():
    with pytest.raises(ConfigurationError, match="'ask' or a function, got 'please'"):
        Envelope(budget=Budget(), on_trip="please")
    with pytest.raises(ConfigurationError, match="needs a framework that asks by itself"):
        Envelope(budget=Budget(), on_trip="ask").open()
