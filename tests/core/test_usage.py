"""Tokens of one call, and the sums of a run."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetguard_core import ConfigurationError, Usage
from budgetguard_core.kit import TokenUsage, estimate_tokens
from budgetguard_core.usage import check_token_usage


def test_no_bucket_is_counted_twice():
    usage = TokenUsage(100, 50, cache_read_tokens=60, cache_write_tokens=40, reasoning_tokens=50)
    assert usage.total_tokens == 150
    check_token_usage(usage)
    check_token_usage(TokenUsage(1, 1, 0, 1, 1, 1))
    check_token_usage(TokenUsage())


@pytest.mark.parametrize(
    "field",
    [
        "input_tokens",
        "output_tokens",
        "cache_read_tokens",
        "cache_write_tokens",
        "cache_write_1h_tokens",
        "reasoning_tokens",
    ],
)
@pytest.mark.parametrize("value", [-1, 1.0, "5", None, Decimal(1), float("nan")])
def test_a_count_is_a_whole_number(field, value):
    usage = TokenUsage(1000, 1000, 100, 100, 0, 0)._replace(**{field: value})
    with pytest.raises(ConfigurationError) as caught:
        check_token_usage(usage)
    assert str(caught.value) == (
        f"{field} must be a whole number >= 0, got {value!r}. "
        "Pass usage=None when the provider reported nothing."
    )


@pytest.mark.parametrize("field", ["input_tokens", "output_tokens"])
@pytest.mark.parametrize("value", [10**18 + 1, 10**5000], ids=["one more", "unwritable"])
def test_a_count_has_an_end(field, value):
    """Python refuses to write a number of thousands of digits, and so would every sentence."""
    check_token_usage(TokenUsage(10**18, 10**18))
    with pytest.raises(ConfigurationError, match=rf"{field} must be .* >= 0 and <= {10**18}, got "):
        check_token_usage(TokenUsage()._replace(**{field: value}))


small = st.integers(-2, 6)


@given(st.builds(TokenUsage, small, small, small, small, small, small))
def test_the_check_is_the_rule(usage):
    inputs, outputs, read, write, hour, reasoning, _ = usage
    sound = (
        min(usage[:-1]) >= 0 and read + write <= inputs and hour <= write and reasoning <= outputs
    )
    if sound:
        check_token_usage(usage)
    else:
        with pytest.raises(ConfigurationError):
            check_token_usage(usage)


@pytest.mark.parametrize("record", [5, (1, 2), {"prompt_tokens": 5}, dict.fromkeys("abcdefg", 1)])
def test_a_record_of_another_kind_is_refused(record):
    with pytest.raises(ConfigurationError, match="must be a"):
        check_token_usage(record)


@pytest.mark.parametrize(
    ("text", "tokens"), [("Hi", 1), ("word", 2), ("12", 2), ("你好", 2), ("😀", 3), ("a\n\x7f", 3)]
)
def test_a_text_is_estimated_by_its_letters_digits_and_signs(text, tokens):
    assert estimate_tokens(text) == tokens


@given(st.text(), st.text())
def test_an_estimate_is_never_zero_and_grows_with_its_text(text, more):
    assert estimate_tokens("") == 1
    assert 1 <= estimate_tokens(text) <= estimate_tokens(text + more)
    assert estimate_tokens(text) <= 2 * len(text) + 1


def test_half_a_surrogate_pair_can_be_estimated():
    assert estimate_tokens("\ud800" * 30) >= 1


def test_two_legs_add_up():
    attempt = Usage(iterations=1, total_tokens=5, cost_usd=Decimal("0.1"), seconds=1.5)
    assert attempt + attempt + attempt == Usage(
        iterations=3, total_tokens=15, cost_usd=Decimal("0.3"), seconds=4.5
    )
