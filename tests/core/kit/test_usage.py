"""What a call used, out of records of every shape: plain data, and records that do not add up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from budgetguard_core.kit import TokenUsage
from budgetguard_core.kit.usage import answered_usage, merge_usage, reported_cost, token_usage
from budgetguard_core.usage import check_token_usage

# Each as its provider's reference shows it: where the parts stand, and what they come to.
WIRE = {
    "chat completions": (
        {
            "usage": {
                "prompt_tokens": 2006,
                "completion_tokens": 300,
                "total_tokens": 2306,
                "prompt_tokens_details": {"cached_tokens": 1920, "audio_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 192, "audio_tokens": 0},
            }
        },
        TokenUsage(2006, 300, cache_read_tokens=1920, reasoning_tokens=192),
    ),
    "chat completions with cache writes": (
        {
            "usage": {
                "prompt_tokens": 100,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30},
            }
        },
        TokenUsage(100, 5, cache_read_tokens=60, cache_write_tokens=30),
    ),
    "Responses": (
        {
            "object": "response",
            "usage": {
                "input_tokens": 75,
                "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 8},
                "output_tokens": 1186,
                "output_tokens_details": {"reasoning_tokens": 1024},
                "total_tokens": 1261,
            },
        },
        TokenUsage(75, 1186, cache_read_tokens=32, cache_write_tokens=8, reasoning_tokens=1024),
    ),
    "the end of a Responses stream": (
        {
            "type": "response.completed",
            "response": {"usage": {"input_tokens": 7, "output_tokens": 3}},
        },
        TokenUsage(7, 3),
    ),
    "Anthropic": (
        {
            "type": "message",
            "usage": {
                "input_tokens": 21,
                "cache_creation_input_tokens": 188,
                "cache_read_input_tokens": 1000,
                "cache_creation": {
                    "ephemeral_5m_input_tokens": 88,
                    "ephemeral_1h_input_tokens": 100,
                },
                "output_tokens": 393,
                "output_tokens_details": {"thinking_tokens": 300},
            },
        },
        TokenUsage(1209, 393, 1000, 188, 100, 300),
    ),
    "Anthropic, writes told by lifetime alone": (
        {
            "input_tokens": 1,
            "cache_read_input_tokens": 0,
            "cache_creation": {"ephemeral_5m_input_tokens": 2, "ephemeral_1h_input_tokens": 3},
            "output_tokens": 1,
        },
        TokenUsage(6, 1, 0, 5, 3),
    ),
    "the start of an Anthropic stream": (
        {
            "type": "message_start",
            "message": {
                "usage": {"input_tokens": 25, "cache_read_input_tokens": 5, "output_tokens": 1}
            },
        },
        TokenUsage(30, 1, cache_read_tokens=5),
    ),
    "Anthropic with compaction": (
        {
            "input_tokens": 23_000,
            "output_tokens": 1_000,
            "cache_read_input_tokens": 0,
            "iterations": [
                {"type": "compaction", "input_tokens": 180_000, "output_tokens": 3_500},
                {"type": "message", "input_tokens": 23_000, "output_tokens": 1_000},
            ],
        },
        TokenUsage(203_000, 4_500),
    ),
    "Gemini": (
        {
            "usageMetadata": {
                "promptTokenCount": 100,
                "cachedContentTokenCount": 60,
                "toolUsePromptTokenCount": 40,
                "candidatesTokenCount": 10,
                "thoughtsTokenCount": 500,
                "totalTokenCount": 650,
                "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 100}],
            }
        },
        TokenUsage(140, 510, cache_read_tokens=60, reasoning_tokens=500),
    ),
    "Gemini, all of it thoughts": (
        {
            "usage_metadata": {
                "prompt_token_count": 9,
                "thoughts_token_count": 50,
                "total_token_count": 59,
            }
        },
        TokenUsage(9, 50, reasoning_tokens=50),
    ),
    "Gemini behind a compatible gateway": (
        {"prompt_tokens": 2_493, "completion_tokens": 10, "total_tokens": 122_493},
        TokenUsage(2_493, 120_000),
    ),
    "xAI": (
        {
            "prompt_tokens": 32,
            "completion_tokens": 9,
            "total_tokens": 135,
            "completion_tokens_details": {"reasoning_tokens": 94},
        },
        TokenUsage(32, 103, reasoning_tokens=94),
    ),
    "reasoning beside the completion, no total": (
        {
            "prompt_tokens": 32,
            "completion_tokens": 9,
            "completion_tokens_details": {"reasoning_tokens": 94},
        },
        TokenUsage(32, 103, reasoning_tokens=94),
    ),
    "DeepSeek": (
        {
            "prompt_tokens": 100,
            "prompt_cache_hit_tokens": 64,
            "prompt_cache_miss_tokens": 36,
            "completion_tokens": 5,
            "total_tokens": 105,
        },
        TokenUsage(100, 5, cache_read_tokens=64),
    ),
    "Moonshot": (
        {"prompt_tokens": 19, "completion_tokens": 21, "total_tokens": 40, "cached_tokens": 10},
        TokenUsage(19, 21, cache_read_tokens=10),
    ),
    "Groq stream": (
        {
            "choices": [],
            "x_groq": {"id": "req_1", "usage": {"prompt_tokens": 5, "completion_tokens": 6}},
        },
        TokenUsage(5, 6),
    ),
    "Bedrock Converse": (
        {
            "output": {"message": {"role": "assistant", "content": [{"text": "Hi"}]}},
            "stopReason": "end_turn",
            "usage": {
                "inputTokens": 10,
                "outputTokens": 20,
                "totalTokens": 1530,
                "cacheReadInputTokens": 1000,
                "cacheWriteInputTokens": 500,
                "cacheDetails": [
                    {"ttl": "1h", "inputTokens": 200},
                    {"ttl": "5m", "inputTokens": 300},
                ],
            },
            "ResponseMetadata": {"HTTPStatusCode": 200},
        },
        TokenUsage(1510, 20, 1000, 500, 200),
    ),
    "Bedrock Converse stream": (
        {"metadata": {"usage": {"inputTokens": 7, "outputTokens": 8, "totalTokens": 15}}},
        TokenUsage(7, 8),
    ),
    "Bedrock, a total without the cache that is larger than the input": (
        {"inputTokens": 10, "outputTokens": 5, "totalTokens": 15, "cacheReadInputTokens": 100},
        TokenUsage(110, 5, cache_read_tokens=100),
    ),
    "Bedrock, no total": (
        {"inputTokens": 100, "outputTokens": 5, "cacheReadInputTokens": 60},
        TokenUsage(160, 5, cache_read_tokens=60),
    ),
    "Bedrock invocation metrics": (
        {
            "amazon-bedrock-invocationMetrics": {
                "inputTokenCount": 12,
                "outputTokenCount": 3,
                "invocationLatency": 900,
            }
        },
        TokenUsage(12, 3),
    ),
    "Strands with a provider that counts the cache inside": (
        {
            "event": {
                "metadata": {
                    "usage": {
                        "inputTokens": 100,
                        "outputTokens": 10,
                        "totalTokens": 110,
                        "cacheReadInputTokens": 60,
                    }
                }
            }
        },
        TokenUsage(100, 10, cache_read_tokens=60),
    ),
    "a message of Strands": (
        {
            "role": "assistant",
            "content": [{"text": "Hi"}],
            "metadata": {"usage": {"inputTokens": 3, "outputTokens": 2, "totalTokens": 5}},
        },
        TokenUsage(3, 2),
    ),
    "Ollama": (
        {"model": "llama3.2", "done": True, "prompt_eval_count": 26, "eval_count": 298},
        TokenUsage(26, 298),
    ),
    "Cohere v2": (
        {
            "usage": {
                "billed_units": {"input_tokens": 5.0, "output_tokens": 7.0},
                "tokens": {"input_tokens": 71.0, "output_tokens": 9.0},
                "cached_tokens": 64.0,
            }
        },
        TokenUsage(71, 9, cache_read_tokens=64),
    ),
    "the end of a Cohere stream": (
        {
            "type": "message-end",
            "delta": {"usage": {"tokens": {"input_tokens": 71, "output_tokens": 9}}},
        },
        TokenUsage(71, 9),
    ),
    "Cohere v1": (
        {"text": "Hi", "meta": {"billed_units": {"input_tokens": 5, "output_tokens": 7}}},
        TokenUsage(5, 7),
    ),
    "Mistral stream": (
        {"data": {"usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}}},
        TokenUsage(4, 2),
    ),
    "LangChain": (
        {
            "usage_metadata": {
                "input_tokens": 970,
                "output_tokens": 50,
                "total_tokens": 1020,
                "input_token_details": {
                    "cache_read": 800,
                    "cache_creation": 0,
                    "ephemeral_5m_input_tokens": 40,
                    "ephemeral_1h_input_tokens": 30,
                },
                "output_token_details": {"reasoning": 20},
            }
        },
        TokenUsage(970, 50, 800, 70, 30, 20),
    ),
    "LangChain, a service tier of OpenAI": (
        {
            "input_tokens": 100,
            "output_tokens": 50,
            "input_token_details": {"priority": 40, "priority_cache_read": 60},
            "output_token_details": {"priority_reasoning": 20, "priority": 30},
        },
        TokenUsage(100, 50, cache_read_tokens=60, reasoning_tokens=20),
    ),
    "LangChain, what a text model reports": (
        {
            "generations": [[{"text": "Hi"}]],
            "llm_output": {"token_usage": {"prompt_tokens": 8, "completion_tokens": 9}},
        },
        TokenUsage(8, 9),
    ),
    "LiteLLM": (
        {
            "prompt_tokens": 110,
            "completion_tokens": 5,
            "cache_read_input_tokens": 80,
            "cache_creation_input_tokens": 20,
            "prompt_tokens_details": {
                "cached_tokens": 80,
                "cache_creation_tokens": 20,
                "cache_creation_token_details": {
                    "ephemeral_5m_input_tokens": 15,
                    "ephemeral_1h_input_tokens": 5,
                },
            },
        },
        TokenUsage(110, 5, 80, 20, 5),
    ),
    "embeddings": ({"usage": {"prompt_tokens": 8, "total_tokens": 8}}, TokenUsage(8, 0)),
    "floats": ({"prompt_tokens": 100.0, "completion_tokens": 4.2}, TokenUsage(100, 5)),
    "digits": ({"prompt_tokens": "100", "completion_tokens": "5"}, TokenUsage(100, 5)),
    "the prompt is what is left of the total": (
        {"completion_tokens": 5, "total_tokens": 105},
        TokenUsage(100, 5),
    ),
    "cached tokens above the prompt": (
        {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30},
        },
        TokenUsage(90, 5, cache_read_tokens=60, cache_write_tokens=30),
    ),
    "an answer from LangChain's cache": (
        {"usage_metadata": {"input_tokens": 0, "output_tokens": 0, "total_cost": 0}},
        TokenUsage(),
    ),
}


@pytest.mark.parametrize(("record", "usage"), WIRE.values(), ids=WIRE)
def test_a_record_is_read_in_full(record, usage):
    read = token_usage(record)

    assert read == usage
    check_token_usage(read)


@dataclass
class DataRecord:
    prompt_tokens: int
    completion_tokens: int


class Model(BaseModel):
    model_config = ConfigDict(extra="allow")

    usage: object = None


class Named:
    __slots__ = ()

    def __repr__(self) -> str:
        return type(self).__name__


class Slotted(Named):
    __slots__ = ("completion_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens, self.completion_tokens = 10, 5


class Properties(Named):
    """As messages of protobuf are: no fields, only properties."""

    __slots__ = ()
    prompt_tokens = property(lambda self: 10)
    completion_tokens = property(lambda self: 5)
    total_tokens = property(lambda self: 15)


@pytest.mark.parametrize(
    "record",
    [
        DataRecord(10, 5),
        SimpleNamespace(usage=DataRecord(10, 5)),
        SimpleNamespace(usage=SimpleNamespace(prompt_tokens=10, completion_tokens=5)),
        Model(usage={"prompt_tokens": 10, "completion_tokens": 5}),
        Model.model_validate({"token_usage": {"prompt_tokens": 10, "completion_tokens": 5}}),
        Model.model_validate({"prompt_tokens": 10, "completion_tokens": 5}),
        Slotted(),
        MappingProxyType(
            {"usage": MappingProxyType({"prompt_tokens": 10, "completion_tokens": 5})}
        ),
        Properties(),
        {"usage": Properties()},
        {"usage": TokenUsage(10, 5)},
        TokenUsage(10, 5),
    ],
    ids=repr,
)
def test_objects_are_read_as_data_is(record):
    assert token_usage(record) == TokenUsage(10, 5)


@pytest.mark.parametrize(
    "record",
    [
        None,
        "prompt_tokens",
        b"usage",
        7,
        [],
        {},
        Named(),
        SimpleNamespace(),
        {"usage": None},
        {"usage": {}},
        {"usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}},
        {"usage": {"prompt_tokens": None, "completion_tokens": None}},
        {"usage": {"prompt_tokens": "a lot", "completion_tokens": math.nan}},
        {"generations": [[]]},
        {"usage_metadata": {}, "content": "prompt_tokens"},
        {"metadata": {"prompt_tokens": 10, "completion_tokens": 5}},  # the user's own
        {"choices": [{"message": {"content": '{"usage": {"prompt_tokens": 3}}'}}]},
        {1: 2, "usage": {3: 4}},
    ],
    ids=repr,
)
def test_what_reports_nothing_is_no_usage(record):
    assert token_usage(record) is None


class Failing:
    @property
    def usage(self):
        raise RuntimeError

    prompt_tokens = usage


def test_a_property_that_raises_is_not_there():
    assert token_usage(Failing()) is None
    assert token_usage({"message": Failing(), "response": {"usage": TokenUsage(1, 2)}}) == (
        TokenUsage(1, 2)
    )


def test_a_stand_in_for_a_response_reports_nothing():
    assert token_usage(MagicMock()) is None
    assert reported_cost(MagicMock()) is None
    assert token_usage(MagicMock(usage=MagicMock(prompt_tokens=10, completion_tokens=5))) == (
        TokenUsage(10, 5)
    )


def test_a_known_zero_is_one():
    assert token_usage(TokenUsage()) == TokenUsage()
    assert answered_usage(TokenUsage(), projected_input=50, written="Hi") == TokenUsage()


@pytest.mark.parametrize(
    "wrong", [-5, math.nan, math.inf, -math.inf, True, "many", "-5", [], 10**30], ids=repr
)
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens", "total_tokens"])
def test_a_figure_that_can_not_be_read_lowers_no_other(name, wrong):
    record = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120, name: wrong}

    usage = token_usage(record)

    assert usage == TokenUsage(100, 20, estimated=True)


def test_a_figure_that_is_left_out_is_estimated_and_said_so():
    assert token_usage({"prompt_tokens": 100}) == TokenUsage(100, 0, estimated=True)
    assert token_usage({"completion_tokens": 5}) == TokenUsage(0, 5, estimated=True)
    assert token_usage({"total_tokens": 70}) == TokenUsage(0, 70, estimated=True)
    assert token_usage({"prompt_tokens": 100, "total_tokens": 3}) == TokenUsage(100, estimated=True)


def test_figures_of_a_token_usage_are_made_to_fit():
    given = TokenUsage(5, 5, 10, 10, 20, 10)
    broken = given._replace(output_tokens=None)

    assert token_usage(given) == TokenUsage(30, 10, 10, 20, 20, 10)
    assert token_usage(broken) == TokenUsage(30, 10, 10, 20, 20, 10, estimated=True)
    assert token_usage({"usage": given}) == token_usage(given)


def test_a_record_that_contains_itself_ends():
    record: dict[str, object] = {"tokens": {"cache_creation": {}}, "prompt_tokens": 3}
    record["tokens"] = record["message"] = record

    assert token_usage(record) == TokenUsage(3, estimated=True)
    event: dict[str, object] = {"type": "ping"}
    event["event"] = event
    assert token_usage(event) is None


NAMES = st.sampled_from(
    sorted(
        {name for record, _ in WIRE.values() for name in record}
        | {
            "prompt_tokens",
            "completion_tokens",
            "input_tokens",
            "output_tokens",
            "inputTokens",
            "outputTokens",
            "total_tokens",
            "totalTokens",
            "cache_read_input_tokens",
            "cacheReadInputTokens",
            "prompt_tokens_details",
            "input_token_details",
            "output_tokens_details",
            "cached_tokens",
            "cache_read",
            "reasoning_tokens",
            "cacheDetails",
            "iterations",
            "total_cost",
            "ttl",
        }
    )
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10**6),
    st.floats(),
    st.text(max_size=5),
    st.integers(0, 50).map(str),
)
RECORDS = st.recursive(
    st.dictionaries(NAMES, VALUES, max_size=6),
    lambda inner: st.dictionaries(NAMES, inner | VALUES | st.lists(inner, max_size=2), max_size=5),
    max_leaves=6,
)


@pytest.mark.slow
@given(RECORDS, RECORDS, st.integers(0, 100), st.text(max_size=20))
def test_no_record_raises_and_every_result_can_be_settled(one, other, projected, written):
    usages = [token_usage(one), token_usage(other)]
    usages.append(merge_usage(*usages))
    usages.append(answered_usage(one, projected_input=projected, written=written))

    for usage in usages:
        if usage is not None:
            check_token_usage(usage)
    cost = reported_cost(one)
    assert cost is None or cost >= 0


FIGURE = st.integers(1, 10**6) | st.floats(1, 10**6) | st.just(math.nan) | st.just(-3) | st.none()


@given(
    st.fixed_dictionaries(
        {
            "prompt_tokens": FIGURE,
            "completion_tokens": FIGURE,
            "total_tokens": FIGURE,
            "prompt_tokens_details": st.fixed_dictionaries({"cached_tokens": FIGURE}),
            "completion_tokens_details": st.fixed_dictionaries({"reasoning_tokens": FIGURE}),
        }
    )
)
def test_usage_is_never_below_what_any_figure_says(record):
    usage = token_usage(record)

    def says(value):
        return value if value is not None and value > 0 else 0

    cached = says(record["prompt_tokens_details"]["cached_tokens"])
    reasoning = says(record["completion_tokens_details"]["reasoning_tokens"])
    totals = [record[f"{name}_tokens"] for name in ("prompt", "completion", "total")]
    if usage is None:
        assert not any(map(says, (*totals, cached, reasoning)))
        return
    assert usage.input_tokens >= max(says(record["prompt_tokens"]), cached)
    assert usage.output_tokens >= max(says(record["completion_tokens"]), reasoning)
    assert usage.total_tokens >= says(record["total_tokens"])


DETAIL = st.integers(-1, 150) | st.just(2.0) | st.none() | st.just(True)
DETAILS = st.none() | st.dictionaries(
    st.sampled_from(
        ["cached_tokens", "reasoning_tokens", "audio_tokens", "flex_cache_read", "other"]
    ),
    DETAIL,
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "prompt_tokens": DETAIL,
            "completion_tokens": DETAIL,
            "total_tokens": st.integers(0, 300) | st.just(110.0),
            "prompt_tokens_details": DETAILS,
            "completion_tokens_details": DETAILS,
        },
    ),
    st.booleans(),
)
def test_the_plainest_records_are_read_as_any_other(record, adds_up):
    if adds_up:
        record |= {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    assert token_usage(record) == token_usage({**record, "service_tier": "default"})


# Streams


def test_the_figures_of_a_stream_are_joined():
    start = {
        "message": {"usage": {"input_tokens": 25, "cache_read_input_tokens": 5, "output_tokens": 1}}
    }
    end = {"type": "message_delta", "usage": {"output_tokens": 40}}

    usage = merge_usage(token_usage(start), token_usage(end))

    assert usage == TokenUsage(30, 40, cache_read_tokens=5)
    assert merge_usage(None, usage) is usage
    assert merge_usage(usage, None) is usage
    assert merge_usage(None, None) is None


def test_totals_so_far_are_not_added():
    chunks = [TokenUsage(10, done) for done in (1, 5, 9)]
    usage = None
    for chunk in chunks:
        usage = merge_usage(usage, chunk)
    assert usage == TokenUsage(10, 9)


def test_joined_figures_fit_and_say_what_is_still_estimated():
    prompt, answer = TokenUsage(10, estimated=True), TokenUsage(0, 5, estimated=True)

    assert merge_usage(prompt, answer) == TokenUsage(10, 5)
    assert merge_usage(prompt, prompt) == prompt
    assert merge_usage(prompt, TokenUsage(10, 0)) == TokenUsage(10, 0)
    parts = TokenUsage(10, 1, 10), TokenUsage(10, 1, 0, 10)
    assert merge_usage(*parts) == TokenUsage(20, 1, 10, 10)


# Answered calls


def test_what_was_reported_is_charged():
    reported = {"prompt_tokens": 10, "completion_tokens": 5}
    assert answered_usage(reported, projected_input=900, written="x" * 900) == TokenUsage(10, 5)


def test_a_call_without_usage_is_estimated():
    usage = answered_usage({"usage": None}, projected_input=900, written="four words of text")

    assert usage is not None
    assert usage.input_tokens == 900
    assert usage.output_tokens >= 4
    assert usage.estimated
    assert answered_usage(None, projected_input=9) == TokenUsage(9, 1, estimated=True)


def test_without_usage_and_projection_a_call_is_unmetered():
    assert answered_usage({"usage": None}, projected_input=0, written="some text") is None


@pytest.mark.parametrize("output", [0, None])
def test_an_output_of_nothing_beside_a_text_is_estimated(output):
    record = {"prompt_tokens": 10, "completion_tokens": output}

    usage = answered_usage(record, projected_input=90, written="some text that was written")

    assert usage is not None
    assert usage.output_tokens >= 5
    assert usage.estimated


def test_an_input_of_nothing_is_the_projection():
    record = {"prompt_tokens": 0, "completion_tokens": 50, "total_tokens": 50}

    usage = answered_usage(record, projected_input=90, written="short")

    assert usage == TokenUsage(90, 50, estimated=True)


def test_an_estimate_is_never_below_a_figure():
    record = {"completion_tokens": -1, "completion_tokens_details": {"reasoning_tokens": 500}}
    assert answered_usage(record, projected_input=9) == TokenUsage(
        9, 500, reasoning_tokens=500, estimated=True
    )


# Costs


@pytest.mark.parametrize(
    ("record", "cost"),
    [
        ({"usage": {"prompt_tokens": 9, "cost": 0.00014}}, Decimal("0.00014")),
        ({"usage": {"cost": "0.05"}}, Decimal("0.05")),
        ({"usage": {"cost": 0}}, Decimal(0)),
        (
            {
                "usage": {
                    "cost": 0.01,
                    "is_byok": True,
                    "cost_details": {"upstream_inference_cost": 0.2},
                }
            },
            Decimal("0.21"),
        ),
        ({"usage": {"cost": 0.01, "is_byok": True}}, Decimal("0.01")),
        (
            {
                "usage": {
                    "cost": 0.2,
                    "is_byok": False,
                    "cost_details": {"upstream_inference_cost": 0.2},
                }
            },
            Decimal("0.2"),
        ),
        ({"usage": {"cost": {"input_tokens_cost": 0.001, "total_cost": 0.006}}}, Decimal("0.006")),
        ({"usage": {"cost_in_usd_ticks": 37756000}}, Decimal("0.0037756")),
        ({"response": {"usage": {"cost_in_usd_ticks": 1}}}, Decimal("1E-10")),
        (
            {"usage_metadata": {"input_tokens": 9, "output_tokens": 9, "total_cost": 0}},
            Decimal(0),
        ),
        (SimpleNamespace(_hidden_params={"response_cost": 2.25e-05}), Decimal("0.0000225")),
        (SimpleNamespace(_hidden_params={"response_cost": None}), None),
        ({"usage": {"cost": -1}}, None),
        ({"usage": {"cost": math.nan}}, None),
        ({"usage": {"cost": math.inf}}, None),
        ({"usage": {"cost": True}}, None),
        ({"usage": {"cost": "free"}}, None),
        ({"usage": {"cost": "9" * 50}}, None),
        ({"usage": {"cost": "1e999999"}}, None),
        ({"usage": {"cost": "1e-999999"}}, None),
        ({"usage": {"prompt_tokens": 9}}, None),
        ({"cost": None}, None),
        (None, None),
    ],
    ids=repr,
)
def test_a_cost_that_is_told_is_read(record, cost):
    assert reported_cost(record) == cost


class _Raises(dict):
    """A record whose own code fails, as a stand-in or a lazy one does."""

    def get(self, *_):
        raise RuntimeError("no connection")

    items = keys = values = __getitem__ = __iter__ = get


class _Lazy(Mapping):
    def __getitem__(self, name):
        raise RuntimeError("no connection")

    def __iter__(self):
        raise RuntimeError("no connection")

    def __len__(self):
        raise RuntimeError("no connection")


class _Property:
    @property
    def __dict__(self):
        raise RuntimeError("no connection")

    @property
    def usage(self):
        raise RuntimeError("no connection")


@dataclass
class _Unset:
    input_tokens: int

    def __getattribute__(self, name):
        if name.startswith("__"):
            return super().__getattribute__(name)
        raise RuntimeError("no connection")


@pytest.mark.parametrize("make", [_Raises, _Lazy, _Property, lambda: _Unset(5)])
@pytest.mark.parametrize(
    "wrap", [lambda one: one, lambda one: {"usage": one, "id": "1"}], ids=["bare", "inside"]
)
def test_a_record_whose_own_code_raises_is_unmetered(make, wrap):
    assert token_usage(wrap(make())) is None
    assert reported_cost(wrap(make())) is None
    assert answered_usage(wrap(make()), projected_input=0) is None
    estimated = answered_usage(wrap(make()), projected_input=7, written="some words")
    assert estimated.estimated
    assert estimated.input_tokens == 7
