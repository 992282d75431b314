"""Shorter prompts once a model's context window is nearly full."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from budgetguard_core import Budget, ConfigurationError, Guard, Mode, Price, PriceBook
from budgetguard_core.kit import Envelope, ModelCall, TokenUsage, keep_turns

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Go."},
    {"role": "assistant", "tool_calls": [{"id": "1"}, {"id": "2"}]},
    {"role": "tool", "tool_call_id": "1"},
    {"role": "tool", "tool_call_id": "2"},
    {"role": "assistant", "content": "Which?"},
    {"role": "user", "content": "That."},
    {"role": "assistant", "tool_calls": [{"id": "3"}]},
    {"role": "tool", "tool_call_id": "3"},
]


def places(messages, kept):
    return [next(n for n, one in enumerate(messages) if one is two) for two in kept]


@pytest.mark.parametrize(
    ("last", "first", "kept"),
    [
        (1, 0, [0, 1, 7, 8]),
        (2, 0, [0, 1, 5, 6, 7, 8]),
        (1, 1, [0, 1, 2, 3, 4, 7, 8]),
        (3, 0, [*range(9)]),
        (2, 1, [*range(9)]),
    ],
)
def test_the_task_and_whole_turns_are_kept(last, first, kept):
    assert places(CHAT, keep_turns(last, first=first)(CHAT)) == kept


def test_items_and_message_objects_are_read():
    items = [
        {"role": "user", "content": "Go."},
        {"type": "reasoning", "id": "r"},
        {"type": "function_call", "call_id": "1"},
        {"type": "function_call", "call_id": "2"},
        {"type": "function_call_output", "call_id": "1"},
        {"type": "function_call_output", "call_id": "2"},
        {"type": "function_call", "call_id": "3"},
        {"type": "function_call_output", "call_id": "3"},
    ]
    assert places(items, keep_turns(1)(items)) == [0, 6, 7]
    kinds = ("system", "human", "ai", "tool", "ai", "human")
    objects = [SimpleNamespace(type=kind) for kind in kinds]
    assert places(objects, keep_turns(1)(objects)) == [0, 1, 4, 5]
    assert keep_turns(1)([]) == []


@pytest.mark.parametrize("numbers", [{"last": 0}, {"last": True}, {"first": -1}, {"first": 1.0}])
def test_numbers_that_make_no_sense_are_refused(numbers):
    with pytest.raises(ConfigurationError, match="must be a whole number >="):
        keep_turns(**numbers)


def opened(prune=keep_turns(1), **options):  # noqa: B008 - never changed
    return Envelope(budget=Budget(max_iterations=9), prune=prune, **options).open()


def fill(run, tokens=125_000):
    call = run.model_call(ModelCall(model="gpt-4o"))
    run.answered(call, TokenUsage(tokens, 10))


def test_nothing_is_cut_before_the_window_is_nearly_full_and_everything_after():
    run = opened()
    assert run.pruned(CHAT) is None
    fill(run, 1000)
    assert run.pruned(CHAT) is None
    fill(run)
    assert places(CHAT, run.pruned(CHAT)) == [0, 1, 7, 8]
    # A short prompt is no reason to send everything again.
    fill(run, 1000)
    assert places(CHAT, run.pruned(CHAT)) == [0, 1, 7, 8]
    assert run.pruned(CHAT[:3]) is None


def test_a_hook_that_fails_cuts_nothing_and_is_reported():
    def broken(messages):
        messages.clear()
        raise LookupError("no such message")

    run = opened(broken)
    fill(run)
    assert run.pruned(CHAT) is None
    assert run.guard.tree.errors == ("prune: LookupError: no such message",)
    assert len(CHAT) == 9
    run = opened(lambda _: [])
    fill(run)
    assert run.pruned(CHAT) is None


def test_an_advisory_run_is_sent_as_it_is_and_so_is_one_without_a_hook():
    run = opened(mode=Mode.OBSERVE)
    fill(run)
    assert run.pruned(CHAT) is None
    run = opened(None)
    fill(run)
    assert run.pruned(CHAT) is None


def test_a_shared_guard_takes_a_hook_and_what_is_none_is_refused():
    run = Envelope(budget=Guard(Budget()), prune=keep_turns(1)).open()
    fill(run)
    assert run.pruned(CHAT)
    with pytest.raises(ConfigurationError, match="prune must be callable, got int"):
        Envelope(budget=Budget(), prune=3)


def test_a_first_prompt_that_nearly_fills_the_window_is_cut():
    prices = PriceBook({"m": Price(input=1, output=1, context_window=1000)})
    long = [{**one, "content": "word " * 300} for one in CHAT]
    run = opened(price_book=prices)
    assert run.pruned(CHAT, "m") is None
    assert run.pruned(long, "unknown") is None
    assert run.pruned(long) is None
    assert places(long, run.pruned(long, "m")) == [0, 1, 7, 8]
    # And so is everything after it.
    assert run.pruned(CHAT, "m")
