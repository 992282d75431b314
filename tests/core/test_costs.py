"""What the engine does more cheaply than it reads: the same answers as the plain way."""

from __future__ import annotations

import threading

from budgetguard_core import Budget, Guard, PriceBook, read_events
from budgetguard_core.cancellation import CancellationToken
from budgetguard_core.kit import ModelCall, TokenUsage, ToolCall
from budgetguard_core.records import line_of


def test_an_event_is_what_validation_would_make_of_its_facts():
    events = []
    guard = Guard(
        Budget(max_iterations=3, max_total_tokens=10_000, tool_quotas={"search": 1}),
        sinks=[events.append],
        log_arguments=True,
    )
    for number in range(5):
        ticket = guard.admit_model_call(ModelCall(model="gpt-4o", input_tokens=10))
        if hasattr(ticket, "trip"):
            break
        guard.settle_model_call(ticket, TokenUsage(10, 5))
        calls = [ToolCall(name="search", arguments={"query": number}, id=str(number))] * 2
        for answer in guard.admit_tool_calls(calls):
            if hasattr(answer, "call_id"):
                guard.settle_tool_call(answer, error=ValueError("no"))
    assert {event.event for event in events} >= {"tripped", "limit_nearly_reached"}
    for event in events:
        plain = type(event)(**vars(event))
        assert event == plain
        assert line_of(event) == line_of(plain)
        assert next(read_events([line_of(event)])) == event
        changed = event.model_copy(update={"seq": 0})
        assert (changed.seq, event.seq == 0) == (0, False)


def test_what_is_kept_of_tool_calls_is_bounded():
    guard = Guard(Budget(loop_detection=None))
    for number in range(1000):
        guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="read", id=str(number))))
    assert [record.id for record in guard.tool_calls] == [str(n) for n in range(744, 1000)]
    assert guard.snapshot().records[0][0] == "744"
    assert len(guard._tool_calls.records) <= 512


def test_runs_without_prices_of_their_own_share_a_book_and_others_do_not():
    assert Guard().tree.price_book is Guard().tree.price_book
    own = PriceBook()
    assert Guard(price_book=own).tree.price_book is own


def test_a_token_wakes_those_who_wait_and_all_below():
    token = CancellationToken()
    below = CancellationToken(token)
    assert not token.wait(0)
    woken = threading.Thread(target=below.wait, args=(10,))
    woken.start()
    token.cancel()
    woken.join(10)
    assert not woken.is_alive()
    assert below.cancelled
    assert below.wait(0)
    assert CancellationToken(token).wait()
