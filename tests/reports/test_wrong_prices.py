"""A price in the wrong unit locks a tenant out; a ceiling is raised while workers wait.

litellm #20615, #22726, #25760.
"""

from __future__ import annotations

import pytest

from budgetguard_core import Budget, ConfigurationError, Guard, Price, PriceBook
from budgetguard_core.kit import ModelCall, Stop
from budgetguard_core.kit import TokenUsage as Usage
from budgetguard_core.ledger import Ledger

RIGHT = PriceBook({"house-model": Price(input=2.5, output=10)})


def spend(ledger, prices=RIGHT):
    """Make one call of $0.0045 at the right price; return why it was not made."""
    guard = Guard(Budget(max_iterations=25), ledger=ledger, tenant="acme", price_book=prices)
    call = guard.admit_model_call(ModelCall(model="house-model"))
    if isinstance(call, Stop):
        return call.trip.reason
    guard.settle_model_call(call, Usage(input_tokens=1000, output_tokens=200))
    return None


def test_a_price_of_a_token_where_that_of_a_million_is_meant_is_refused():
    with pytest.raises(ConfigurationError, match="1000000 US dollars"):
        PriceBook({"house-model": Price(input=2_500_000, output=10_000_000)})


def test_a_tenant_that_a_wrong_price_locked_out_is_let_in_again(tmp_path):
    wrong = PriceBook({"house-model": Price(input=25_000, output=100_000)})
    with Ledger(f"sqlite:///{tmp_path / 'ledger'}", daily_usd=10, monthly_usd=100) as ledger:
        assert spend(ledger, wrong) is None
        assert spend(ledger) == "tenant_daily"
        ledger.set_ceilings("acme", daily_usd=20_000, monthly_usd=20_000)
        assert spend(ledger) is None


def test_a_ceiling_is_raised_and_lowered_at_the_next_call(tmp_path):
    with Ledger(f"sqlite:///{tmp_path / 'ledger'}", daily_usd=0.02) as ledger:
        # What a call may cost has to fit, not only what it costs.
        assert [spend(ledger) for _ in range(6)][-1] == "tenant_daily"
        ledger.set_ceilings("acme", daily_usd=0.05)
        assert spend(ledger) is None
        ledger.set_ceilings("acme", daily_usd=0.02)
        assert spend(ledger) == "tenant_daily"
