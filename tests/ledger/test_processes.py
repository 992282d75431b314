"""Many processes on one ledger: the ceiling holds, and nothing that was settled is lost."""

from __future__ import annotations

import os

import pytest

import ledger_workers as workers
from budgetguard_core.ledger import Ledger
from ledger_servers import PATIENT, ZONE, window_of

KEYS = ("acme", "acme/user-7")
PROCESSES = 8
PAIRS = int(os.environ.get("BUDGETGUARD_TEST_PAIRS", "300"))


@pytest.mark.slow
@pytest.mark.parametrize("by_run", [False, True], ids=["reserve", "run"])
def test_the_ceiling_holds_and_the_sums_agree(place, tmp_path, by_run):
    # A server waits for the disk at each step: all 2,000 on request, as in
    # BUDGETGUARD_TEST_PAIRS=2000; they were run when this was written.
    count = PAIRS if place.kind != "sqlite" else 2000
    # A pair costs 0.0278 dollars in the mean: about 60 % of what they ask for.
    ceiling = int(PROCESSES * count * 2.78e7 * 0.6)
    out = workers.CONTEXT.Queue()
    processes = [
        workers.start(
            workers.pairs, place.url, KEYS, ceiling, count, by_run, seed, tmp_path / "q", out
        )
        for seed in range(PROCESSES)
    ]
    store, top, results = place.store(), 0, []
    with Ledger(place.url, timeout=PATIENT, time_zone=ZONE) as ledger:
        label = ledger.usage(KEYS[0]).daily.window
    while len(results) < PROCESSES:
        assert any(process.is_alive() for process in processes) or not out.empty()
        top = max(top, window_of(store, KEYS[0], label).charged.usd)
        while not out.empty():
            results.append(out.get())
    for process in processes:
        process.join()
    spent, refused = (sum(result[place] for result in results) for place in range(2))
    assert refused
    assert top <= ceiling
    for key in KEYS:
        row = window_of(store, key, label)
        assert row.charged.usd == row.spent.usd == spent, key
    store.close()
