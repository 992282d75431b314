from __future__ import annotations

from decimal import Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import Amount, to_amount, to_ceilings, to_dollars, to_nano


@given(st.integers(-(10**25), 10**25))
def test_nano_dollars_come_back_under_any_context(nano):
    with localcontext(prec=3):
        dollars = to_dollars(nano)
        if nano >= 0:
            assert to_nano(dollars) == nano
    assert Decimal(f"{nano}e-9") == dollars


def test_money_is_rounded_up_once():
    assert to_nano(Decimal("0.0000000001")) == 1
    assert to_nano(0.3) == 300_000_000
    assert to_nano(5) == 5 * 10**9
    assert str(to_dollars(1_500_000_000)) == "1.5"
    assert str(to_dollars(2_000_000_000)) == "2"


@pytest.mark.parametrize(
    "usd",
    [
        *(-1, float("inf"), float("-inf"), -5e-324, 10**5000, 1e308, "1", True, None),
        *map(Decimal, ("NaN", "sNaN", "-NaN", "-1E-30", "1e40")),
    ],
    ids=range(14),
)
def test_what_is_no_amount_is_refused(usd):
    with pytest.raises(ConfigurationError, match=r"^usd must be .* Use .*\.$") as refused:
        to_amount(usd, 0)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("tokens", [-1, 1.5, "1", True, None])
def test_what_is_no_number_of_tokens_is_refused(tokens):
    with pytest.raises(ConfigurationError, match="tokens must be a whole number"):
        to_amount(0, tokens)


@pytest.mark.parametrize("step", [(5_000_000, 0), (0, 2**52)])
def test_a_step_that_no_store_can_count_is_refused(step):
    with pytest.raises(ConfigurationError, match="a step must move less"):
        to_amount(*step)


@pytest.mark.parametrize(
    "ceiling",
    [
        {"daily_usd": 0},
        {"daily_tokens": 0},
        {"run_tokens": True},
        {"run_usd": -1},
        {"daily_usd": ""},
    ],
    ids=str,
)
def test_a_ceiling_is_more_than_nothing(ceiling):
    with pytest.raises(ConfigurationError, match=r"must be .*got .*\. Use "):
        to_ceilings(ceiling, "dmr", 2**62)


def test_a_ceiling_of_none_is_kept_as_zero():
    assert to_ceilings({"daily_usd": None}, "d", 2**62) == {"d": Amount()}
