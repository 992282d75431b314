"""A last answer where tenants pay or an exception is wanted, in every way in."""

from __future__ import annotations

from contextlib import suppress
from decimal import Decimal

import pytest

import layout
from budgetguard_core import Budget, BudgetExceeded, FinalizeReserve, Guard, MemoryStore
from budgetguard_core.kit import ANSWER_NOW, Envelope
from budgetguard_core.ledger import Ledger
from budgetguard_core.pricing import Price, PriceBook
from budgetguard_core.stop import StopReason
from budgetguard_core.testing import Script, calls, says
from budgetguard_core.testing.script import MODEL
from budgetguard_core.testing.trial import Trial
from conformance.drivers import drivers_of, has_drivers, is_installed
from ledger_servers import PATIENT, ZONE

PRICES = PriceBook({MODEL: Price(input=1, output=2)})
"""A call of 100 and 20 tokens costs 0.00014 dollars."""
BUDGET = Budget(max_iterations=2, finalize_reserve=FinalizeReserve(tokens=20_000))
KNOWN = "It is 42."


def ways():
    for adapter in layout.adapters():
        if is_installed(adapter) and has_drivers(adapter):
            for driver in drivers_of(adapter):
                for mode in driver.modes:
                    if driver.has("at_last") and not driver.deviation(45, mode):
                        name = f"{adapter.removeprefix('budgetguard_')}-{driver.name}-{mode}"
                        yield pytest.param(driver, mode, id=name)


every_way = pytest.mark.parametrize(("driver", "mode"), list(ways()))


def answering():
    return Script([calls("search"), calls("search"), says(KNOWN)])


@pytest.mark.sample(7)
@every_way
def test_a_tenant_pays_for_it_and_a_tenant_without_money_gets_none(driver, mode, tmp_path):
    url = f"sqlite:///{tmp_path}/ledger.sqlite3?synchronous=normal"
    for daily, made, reason in (
        ("1", 3, StopReason.MAX_ITERATIONS),
        ("0.0001", 1, StopReason.TENANT_DAILY),
    ):
        queue = tmp_path / daily
        ledger = Ledger(
            url,
            queue=queue,
            timeout=PATIENT,
            time_zone=ZONE,
            daily_usd=Decimal(daily),
        )
        try:
            script = answering()
            guard = Envelope(budget=BUDGET, ledger=ledger, tenant=f"t{made}", price_book=PRICES)
            ran = Trial(driver, mode).run(script, guard)
            outcome = ran.stopped(reason)
            assert (script.calls, outcome.finalized) == (made, made == 3)
            assert len(outcome.errors) == (made == 1)
        finally:
            ledger.close()
        day = ledger.usage(f"t{made}").daily
        assert (day.spent_tokens, day.reserved_usd) == (120 * made, 0)


@pytest.mark.sample(7)
@every_way
def test_an_exception_that_is_wanted_carries_it(driver, mode):
    script, outcomes = answering(), []
    guard = Envelope(budget=BUDGET, on_trip="raise", on_outcome=outcomes.append)
    # Most drivers catch it themselves.
    with suppress(BudgetExceeded):
        Trial(driver, mode).run(script, guard)
    (outcome,) = outcomes
    assert (outcome.finalized, outcome.final, script.calls) == (True, KNOWN, 3)


@pytest.mark.sample(5)
@every_way
def test_a_checkpoint_holds_it_and_its_cost(driver, mode):
    store, outcomes = MemoryStore(), []
    guard = Envelope(budget=BUDGET, store=store, on_outcome=outcomes.append)
    Trial(driver, mode).run(answering(), guard)
    (outcome,) = outcomes
    saved = store.load(outcome.run_id)
    assert KNOWN in str(saved.messages)
    assert ANSWER_NOW not in str(saved.messages)
    assert Guard.restore(saved).usage.model_calls == 3
