"""A last answer of a stopped loop: what its step is asked, and what is kept."""

from __future__ import annotations

import asyncio

import pytest

from budgetguard_core import Budget, BudgetExceeded, FinalizeReserve, MemoryStore
from budgetguard_core.kit import ANSWER_NOW
from budgetguard_loop import bounded, run_bounded, run_bounded_async, run_bounded_stream
from budgetguard_loop._history import last_request

BUDGET = Budget(max_iterations=1, finalize_reserve=FinalizeReserve(tokens=9000))
CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "function": {"name": "search", "arguments": "{}"}}],
}


def step(messages, *, without_tools=False):
    if without_tools:
        assert messages[-1]["content"] == ANSWER_NOW
        return "It is 42."
    return CALL


def test_the_checkpoint_has_the_answer_and_not_the_question():
    store = MemoryStore()
    tools = {"search": lambda: "found"}
    outcome = run_bounded(step, BUDGET, messages="Go.", tools=tools, store=store)
    assert (outcome.final, outcome.finalized) == ("It is 42.", True)
    saved = store.load(outcome.run_id)
    assert saved.messages[-1]["content"] == "It is 42."
    assert ANSWER_NOW not in str(saved.messages)
    again = run_bounded(lambda _: "Yes.", BUDGET, resume=outcome, messages="Sure?")
    assert again.final == "Yes."


def test_a_step_that_is_not_async_does_not_hold_up_the_event_loop():
    tools = {"search": lambda: "found"}
    outcome = asyncio.run(run_bounded_async(step, BUDGET, messages="Go.", tools=tools))
    assert outcome.final == "It is 42."


def test_a_stream_is_read_to_its_end_and_ends_with_the_answer():
    closed = []

    class Stream:
        def __init__(self, pieces):
            self.pieces = iter(pieces)

        def __aiter__(self):
            return self

        async def __anext__(self):
            for piece in self.pieces:
                return piece
            raise StopAsyncIteration

        async def close(self):
            closed.append(self)

    def streaming(messages, *, without_tools=False):
        return Stream(["It is ", "42."] if without_tools else [CALL])

    async def main():
        tools = {"search": lambda: "found"}
        stream = run_bounded_stream(streaming, BUDGET, messages="Go.", tools=tools)
        return [chunk async for chunk in stream], stream.outcome

    chunks, outcome = asyncio.run(main())
    assert chunks[-1]["content"] == outcome.final == "It is 42."
    assert len(closed) == 2


def test_a_block_is_told_its_step():
    def loop(run):
        while True:
            with run.model_call("m") as call:
                call.usage = None
                run.messages.append({"role": "assistant", "content": "Thinking."})
                run.messages.append({"role": "user", "content": "Go on."})

    with bounded(BUDGET, messages=[{"role": "user", "content": "Go."}], step=lambda _: "42.") as r:
        loop(r)
    assert (r.outcome.final, r.outcome.finalized) == ("42.", True)
    with bounded(BUDGET, messages=[{"role": "user", "content": "Go."}]) as r:
        loop(r)
    assert r.outcome.finalized is False
    # Nothing is known that could be asked about.
    with bounded(BUDGET, step=lambda _: "42.") as r:
        for _ in range(2):
            with r.model_call("m"):
                pass
    assert r.outcome.finalized is False


def test_an_exception_has_the_answer_too():
    tools = {"search": lambda: "found"}
    with pytest.raises(BudgetExceeded) as stop:
        run_bounded(step, BUDGET, messages="Go.", tools=tools, on_trip="raise")
    assert stop.value.outcome.final == "It is 42."


def test_nobody_speaks_twice_in_a_row():
    said = [{"role": "user", "content": "Go."}]
    assert last_request(said) == [{"role": "user", "content": f"Go.\n\n{ANSWER_NOW}"}]
    said = [{"role": "user", "content": [{"type": "image_url"}]}]
    (message,) = last_request(said)
    assert message["content"][-1] == {"type": "text", "text": ANSWER_NOW}
    assert len(said[0]["content"]) == 1
