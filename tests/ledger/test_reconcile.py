"""Holds whose process has gone, and the command line that settles them."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal

import pytest
from typer.testing import CliRunner

from budgetguard_cli.app import app
from budgetguard_core import Guard
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.kit import ModelCall, TokenUsage, end_run
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.reconcile import Proof, expired_holds, is_long_gone, read_proofs
from budgetguard_core.ledger.step import Step
from budgetguard_core.outcome import Outcome
from budgetguard_core.sinks import JsonLinesSink


def run(place, *arguments):
    environment = {"BUDGETGUARD_LEDGER": place.url, "COLUMNS": "200"}
    return CliRunner().invoke(app, list(arguments), env=environment)


def leave(place, ledger, name, granted, ago):
    """A hold whose process was last heard of `ago` seconds beyond its time to live."""
    store = place.store()
    windows = ledger._of("acme").account.windows(ledger.now())
    step = Step("reserve", name, windows, Amount(granted, 10), owner="worker", ttl=-ago)
    assert store.step(step).status == "ok"
    store.close()


@pytest.mark.slow
def test_expired_holds_stay_charged_and_are_listed(place, opened):
    ledger = opened(place, daily_usd=1)
    ledger.reserve("acme", usd=0.1)  # alive
    leave(place, ledger, "dead", 5 * 10**8, 601)
    leave(place, ledger, "silent", 10**8, 1)
    found = {hold.id: hold for hold in expired_holds(ledger)}
    assert set(found) == {"dead", "silent"}
    assert is_long_gone(found["dead"], ledger.now())
    assert not is_long_gone(found["silent"], ledger.now())
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


def test_a_log_proves_what_a_dead_process_spent(sqlite, opened, tmp_path):
    ledger = opened(sqlite)
    log = tmp_path / "log.jsonl"
    with JsonLinesSink(log) as sink:
        guard = Guard(ledger=ledger, tenant="acme", sinks=[sink])
        ledger._outbox.add = lambda step: None  # the process is killed before it is sent
        call = ModelCall(cost_usd=Decimal("0.2"), input_tokens=5, max_output_tokens=5)
        for _ in range(2):
            ticket = guard.admit_model_call(call)
            guard.settle_model_call(ticket, TokenUsage(5, 4), cost_usd=Decimal("0.15"))
        guard.withdraw(guard.admit_model_call(call))
        sink.flush()
        used, unused = Amount(15 * 10**7, 9, 1), Amount()
        proofs = read_proofs([log])
        assert proofs.keys() == {hold.id for hold in ledger.holds()}
        assert [*proofs.values()] == [Proof(one, complete=False) for one in (used, used, unused)]
        usage = guard.usage
        guard.conclude(
            Outcome(status="completed", stop_reason="completed", run_id=guard.run_id, usage=usage)
        )
        sink.flush()
    with log.open("a") as file:
        file.write('[1]\n{"cut')
    assert all(proof.complete for proof in read_proofs([log]).values())
    # As if the process had been killed long ago.
    store = sqlite.store()
    store._do("UPDATE holds SET expires = made - 601")
    store.close()
    done = run(sqlite, "ledger", "reconcile", "--log", str(tmp_path), "--log", str(log))
    assert done.output.count("settled at $0.15  9 tokens") == 2, done.output
    assert run(sqlite, "ledger", "reconcile", "--log", str(tmp_path / "none")).exit_code == 2


def test_a_log_proves_what_housekeeping_spent(sqlite, opened, tmp_path):
    ledger = opened(sqlite)
    call = ModelCall(cost_usd=Decimal("0.2"), input_tokens=5)
    with JsonLinesSink(tmp_path / "log.jsonl") as sink:
        guard = Guard(ledger=ledger, tenant="acme", sinks=[sink])
        with guard.housekeeping(seconds=60) as keeper:
            ticket = keeper.admit_model_call(call)
            keeper.settle_model_call(ticket, TokenUsage(5, 4), cost_usd=Decimal("0.15"))
        end_run(guard, trip=None)
    (hold,) = ledger.holds()
    assert read_proofs([tmp_path / "log.jsonl"]) == {
        hold.id: Proof(Amount(15 * 10**7, 9, 1), complete=True)
    }


def test_a_call_without_a_cost_proves_nothing(sqlite, opened, tmp_path):
    log = tmp_path / "log.jsonl"
    events = [
        {"run_id": "r", "event": "model_call_admitted", "call_id": 1, "holds": ["a"]},
        {"run_id": "r", "event": "model_call_settled", "call_id": 1, "cost_usd": None},
        {"run_id": "r", "event": "model_call_admitted", "call_id": 2, "holds": ["b"]},
        {"run_id": "r", "event": "model_call_settled", "call_id": 9},
        {"run_id": "r", "event": "run_ended"},
    ]
    log.write_text("\n".join(map(json.dumps, events)))
    assert {name: proof.complete for name, proof in read_proofs([log]).items()} == {
        "a": False,
        "b": False,
    }
    with pytest.raises(ConfigurationError, match="must be a file that can be read"):
        read_proofs([tmp_path])


@pytest.mark.parametrize("damage", ["none", "cut", "overwritten"])
def test_a_packed_log_is_read_as_far_as_it_goes(tmp_path, damage):
    events = [
        {"run_id": "r", "event": "model_call_admitted", "call_id": 1, "holds": ["a"]},
        {"run_id": "r", "event": "run_ended"},
    ]
    packed = bytearray(gzip.compress("".join(f"{json.dumps(one)}\n" for one in events).encode()))
    if damage == "cut":
        del packed[-8:]  # what its checksum was
    elif damage == "overwritten":
        packed[-8:] = b"12345678"
    (log := tmp_path / "log.jsonl.gz").write_bytes(packed)
    assert read_proofs([log]) == {"a": Proof(Amount(), complete=False)}
