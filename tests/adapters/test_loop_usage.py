"""Usage records of the common SDKs, as objects and as plain data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from budgetguard_core import TokenUsage
from budgetguard_loop import token_usage


def as_objects(data):
    if isinstance(data, dict):
        return SimpleNamespace(**{name: as_objects(value) for name, value in data.items()})
    return data


CHAT = {
    "prompt_tokens": 1000,
    "completion_tokens": 200,
    "total_tokens": 1200,
    "prompt_tokens_details": {"cached_tokens": 600, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 150},
}
RESPONSES = {
    "input_tokens": 1000,
    "output_tokens": 200,
    "input_tokens_details": {"cached_tokens": 600},
    "output_tokens_details": {"reasoning_tokens": 150},
}
ANTHROPIC = {
    "input_tokens": 100,
    "output_tokens": 200,
    "cache_read_input_tokens": 600,
    "cache_creation_input_tokens": 300,
    "cache_creation": {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200},
}
CACHED = TokenUsage(1000, 200, cache_read_tokens=600, reasoning_tokens=150)
WRITTEN = TokenUsage(
    1000, 200, cache_read_tokens=600, cache_write_tokens=300, cache_write_1h_tokens=200
)


@pytest.mark.parametrize("shape", [lambda data: data, as_objects])
@pytest.mark.parametrize(
    ("record", "usage"), [(CHAT, CACHED), (RESPONSES, CACHED), (ANTHROPIC, WRITTEN)]
)
def test_known_records(shape, record, usage):
    assert token_usage(shape(record)) == usage
    assert token_usage(shape({"usage": record})) == usage
    assert token_usage(shape({"type": "message_start", "message": {"usage": record}})) == usage
    assert (
        token_usage(shape({"type": "response.completed", "response": {"usage": record}})) == usage
    )


def test_ours_is_taken_as_it_is():
    assert token_usage(CACHED) is CACHED
    assert token_usage({"usage": CACHED}) is CACHED


@pytest.mark.parametrize(
    "nothing",
    [
        None,
        "text",
        {},
        {"usage": None},
        {"usage": {}},
        {"prompt_tokens": 0, "completion_tokens": 0},
        {"prompt_tokens": None, "completion_tokens": None},
        {"prompt_tokens": "12", "completion_tokens": 3.5},
        {"input_tokens": -5, "output_tokens": True},
    ],
)
def test_nothing_reported(nothing):
    assert token_usage(nothing) is None


def test_parts_never_exceed_their_whole():
    record = {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 99, "cache_write_tokens": 99},
        "completion_tokens_details": {"reasoning_tokens": 99},
    }
    assert token_usage(record) == TokenUsage(10, 5, cache_read_tokens=10, reasoning_tokens=5)
