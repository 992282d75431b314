from __future__ import annotations

import pytest

from budgetguard_core.ledger import Ledger
from ledger_servers import PATIENT, STORES, ZONE, Place, Quiet, need


@pytest.fixture
def heartbeat():
    """Has the ledger's own thread beat; without it only the test does, with `Ledger.beat`."""


@pytest.fixture(autouse=True)
def _quiet(request, monkeypatch):
    if "heartbeat" not in request.fixturenames:
        monkeypatch.setattr("budgetguard_core.ledger.ledger.Heartbeat", Quiet)


@pytest.fixture(params=STORES)
def place(request, tmp_path):
    """An empty ledger in each of the stores."""
    need(request.param)
    found = Place(request.param, tmp_path)
    yield found
    found.remove()


@pytest.fixture
def sqlite(tmp_path):
    return Place("sqlite", tmp_path)


@pytest.fixture
def store(place):
    made = place.store()
    yield made
    made.close()


@pytest.fixture
def opened(tmp_path):
    """Open ledgers that are closed at the end of the test."""
    made = []

    def open_ledger(url, **options):
        options.setdefault("timeout", PATIENT)
        bounded = any(one.startswith(("daily_", "monthly_", "run_")) for one in options)
        if not bounded and "windows=run" not in getattr(url, "url", url):
            options["daily_model_calls"] = 10**9  # a run is refused where nothing bounds it
        if "clock" not in options:
            options.setdefault("time_zone", ZONE)
        made.append(Ledger(getattr(url, "url", url), queue=tmp_path / "queue", **options))
        return made[-1]

    yield open_ledger
    for ledger in made:
        ledger.close()
