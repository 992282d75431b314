"""Holds whose process has gone, and the command line that settles them."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from typer.testing import CliRunner

from budgetguard_cli.app import app
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.step import Step


def run(place, *arguments):
    environment = {"BUDGETGUARD_LEDGER": place.url, "COLUMNS": "200"}
    return CliRunner().invoke(app, list(arguments), env=environment)


def leave(place, ledger, name, granted, ago):
    """A hold whose process was last heard of `ago` seconds beyond its time to live."""
    store = place.store()
    windows = ledger._account("acme").windows(ledger.now())
    step = Step("reserve", name, windows, Amount(granted, 10), owner="worker", ttl=-ago)
    assert store.step(step).status == "ok"
    store.close()


@pytest.mark.slow
def test_expired_holds_stay_charged_and_are_listed(place, opened):
    ledger = opened(place, daily_usd=1)
    ledger.reserve("acme", usd=0.1)  # alive
    leave(place, ledger, "dead", 5 * 10**8, 601)
    leave(place, ledger, "silent", 10**8, 1)
    found = {hold.id: hold for hold in ledger.expired_holds()}
    assert set(found) == {"dead", "silent"}
    assert found["dead"].owner == "worker"
    assert {key for key, _ in found["dead"].windows} == {"acme"}
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (0, Decimal("0.7"))
    listed = run(place, "ledger", "reconcile")
    assert listed.exit_code == 1
    assert "dead" in listed.output
    assert "to be settled" in listed.output
    early = run(place, "ledger", "reconcile", "--hold", "silent", "--usd", "0.01")
    assert "its process may be alive" in early.output
    word = run(place, "ledger", "reconcile", "--hold", "dead", "--usd", "0.2", "--tokens", "3")
    assert "settled at $0.2  3 tokens" in word.output
    again = run(place, "ledger", "reconcile", "--hold", "dead", "--usd", "0.2")
    assert again.exit_code == 2
    assert "--hold must be on the list" in again.stderr
    listed = run(place, "ledger", "reconcile", "--json")
    (record,) = map(json.loads, listed.stdout.splitlines())
    assert (record["id"], record["charged_usd"], record["settled_usd"]) == ("silent", "0.1", None)
    assert record["keys"] == ["acme"]
    rest = run(place, "ledger", "reconcile", "--full")
    assert rest.exit_code == 0
    assert "settled at $0.1  10 tokens" in rest.output
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal("0.3"), Decimal("0.1"))
    assert "nothing is to be reconciled" in run(place, "ledger", "reconcile").output
