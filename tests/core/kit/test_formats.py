"""The dialects of the kit: one random history in every format, read, closed, ended and asked."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from budgetguard_core.kit import NOT_EXECUTED, history
from budgetguard_core.kit.formats import (
    CHAT,
    RESPONSES,
    Converse,
    SyntheticMessage,
    from_plain,
    grouped,
)
from budgetguard_core.kit.history import Call

MARKS = {"synthetic": True, "stop_reason": "max_iterations"}


def user_input(name, role, text):
    return {
        "chat": {"role": role, "content": text},
        "converse": {"role": role, "content": [{"text": text}]},
        "responses": [{"role": role, "content": text}],
    }[name]


def asked(name, calls):
    if name == "chat":
        made = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": "{}"}}
            for i, n in calls
        ]
        return {"role": "assistant", "content": None, "tool_calls": made}
    if name == "converse":
        made = [{"toolUse": {"toolUseId": i, "name": n, "input": {}}} for i, n in calls]
        return {"role": "assistant", "content": made}
    return [{"type": "function_call", "call_id": i, "name": n, "arguments": "{}"} for i, n in calls]


DIALECTS = {
    "chat": CHAT,
    "converse": Converse(),
    "responses": RESPONSES,
}
BY_FORMAT = pytest.mark.parametrize("name", DIALECTS)


def made(name, seed):
    """A history with batches of calls; some of the results of the last one are missing."""
    dice, messages = random.Random(seed), []
    for turn in range(dice.randint(1, 4)):
        messages.append(user_input(name, "user", f"Question {turn}"))
        calls = [(str(dice.randint(1, 2)), "search") for _ in range(dice.randint(1, 3))]
        messages.append(asked(name, calls))
        known = [(Call(i, n), f"found {place}") for place, (i, n) in enumerate(calls)]
        is_open = dice.random() < 0.5
        known = known[: dice.randint(0, len(known))] if is_open else known
        if known:
            messages += DIALECTS[name].results(known, None)
        if not is_open:
            messages.append(user_input(name, "assistant", "An answer"))
    return messages


def turns(name, messages):
    return [DIALECTS[name].read(message) for message in messages]


@BY_FORMAT
def test_a_history_is_closed_ended_and_asked(name):
    dialect = DIALECTS[name]
    for seed in range(300):
        messages = made(name, seed)
        whole, _ = history.close(messages, dialect, lambda call, number: NOT_EXECUTED)
        assert not history.open_calls(turns(name, whole))
        assert history.close(whole, dialect, lambda call, number: "again") == (whole, [])
        ended, message = history.end(whole, dialect, "It was stopped.", MARKS)
        assert ended[-1] is message
        assert dialect.read(message).synthetic
        assert dialect.read(message).text.endswith("It was stopped.")
        read = turns(name, ended)
        pairs = pairwise(read)
        assert not any(a.role == b.role == "assistant" for a, b in pairs)
        written = turns(name, history.in_words(whole, dialect))
        assert not any(one.calls or one.results for one in written)
        assert written[-1].role == "user"


@BY_FORMAT
def test_the_results_of_a_batch_stay_together(name):
    dialect = DIALECTS[name]
    calls = [Call("1", "search"), Call("2", "search")]
    messages = [user_input(name, "user", "Go."), asked(name, [("1", "search"), ("2", "search")])]
    messages += dialect.results([(calls[0], "found")], None)
    whole, new = history.close(messages, dialect, lambda call, number: NOT_EXECUTED)
    results = [one for turn in turns(name, whole) for one in turn.results]
    assert results == [("1", "found"), ("2", NOT_EXECUTED)]
    assert len(new) == 1
    assert len(whole) == (4 if name == "chat" else 3)


@BY_FORMAT
def test_the_same_is_read_in_every_format(name):
    (turn,) = turns(name, [asked(name, [("1", "search"), ("2", "find")])])
    assert [(call.id, call.name) for call in turn.calls] == [("1", "search"), ("2", "find")]
    assert turn.role == "assistant"
    (turn,) = turns(name, [user_input(name, "assistant", "Yes.")])
    assert (turn.role, turn.text) == ("assistant", "Yes.")


@BY_FORMAT
def test_a_synthetic_message_is_kept_in_a_checkpoint_and_sent_without_marks(name):
    dialect = DIALECTS[name]
    message = dialect.ending("It was stopped.", MARKS, user_input(name, "assistant", "So far."))
    assert dialect.read(message).text.startswith("So far.")
    (plain,) = dialect.plain([message])
    items = json.loads(json.dumps(plain if name == "responses" else [plain]))
    back = [from_plain(one) for one in items]
    assert isinstance(back[-1], SyntheticMessage)
    assert back[-1].metadata == MARKS
    assert back == (message if name == "responses" else [message])
    assert "synthetic" not in json.dumps(message)


def test_items_of_responses_are_grouped_by_their_speaker():
    call = {"type": "function_call", "call_id": "1", "name": "find", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "found"}
    user = {"role": "user", "content": "Go."}
    reasoning = {"type": "reasoning", "summary": []}
    groups = grouped([user, user, reasoning, call, call, output, output, reasoning])
    assert [len(one) for one in groups] == [1, 1, 3, 2, 1]


def test_the_results_of_converse_say_whether_the_call_was_executed():
    (message,) = Converse().results(
        [(Call("1", "a"), "found"), (Call("2", "a"), NOT_EXECUTED)], None
    )
    statuses = [block["toolResult"]["status"] for block in message["content"]]
    assert statuses == ["success", "error"]
