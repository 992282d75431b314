"""A person on call: a run is stopped at night; find it, see why, raise the ceiling, go on."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from budgetguard_cli.app import app
from budgetguard_core import Budget
from budgetguard_core.ledger import Ledger
from budgetguard_core.testing.scripted import Answers
from budgetguard_loop import run_bounded, scripted

PROMPT = "Find the answer."
BUDGET = Budget(max_iterations=50, loop_detection=None)


@pytest.fixture
def on_call(tmp_path, monkeypatch):
    monkeypatch.setenv("BUDGETGUARD_LOG", str(tmp_path / "logs"))
    monkeypatch.setenv("BUDGETGUARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    monkeypatch.setenv("COLUMNS", "140")

    def budgetguard(*arguments, code=0):
        done = CliRunner().invoke(app, list(arguments))
        assert done.exit_code == code, done.output
        return done.stdout

    return budgetguard


def agent(tmp_path, answers, *, budget=BUDGET, **more):
    made = {
        "tools": {"search": lambda query: f"nothing about {query}"},
        "ledger": f"sqlite:///{tmp_path / 'ledger.sqlite3'}",
        "tenant": "acme",
        "model": "gpt-4o",
        **more,
    }
    return run_bounded(scripted.scripted_model(Answers(answers)), budget, **made)


def test_find_it_see_why_raise_the_ceiling_and_resume(tmp_path, on_call):
    on_call("ledger", "set", "--tenant", "acme", "--daily-usd", "0.001")
    stopped = agent(tmp_path, [{"search": {"query": "x"}}], messages=PROMPT)
    assert stopped.status == "terminated"

    # Which run, and why.
    listed = on_call("show")
    assert "terminated" in listed
    assert "acme" in listed
    (run,) = [json.loads(line) for line in on_call("show", "--json").splitlines()]
    assert run["run_id"] == stopped.run_id
    why = on_call("show", stopped.run_id[:6])
    assert "stopped: tenant_daily" in why
    assert "to go on: Resume it under a fresh budget" in why
    assert "tenant_daily" in on_call("show", stopped.run_id[:6], "--markdown")
    assert "acme" in on_call("ledger", "show")

    # The tenant may spend more, and the run goes on where it was.
    on_call("ledger", "set", "--tenant", "acme", "--daily-usd", "5")
    done = agent(tmp_path, ["Done."], resume=stopped)
    assert (done.status, done.final) == ("completed", "Done.")
    assert on_call("show").count("acme") == 1


def test_kill_the_tenant_revive_it_and_resume(tmp_path, on_call):
    with Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}"):
        on_call("ledger", "set", "--tenant", "acme", "--daily-usd", "5")
        on_call("kill", "--tenant", "acme", "--why", "spends at night")
        stopped = agent(tmp_path, [{"search": {"query": "x"}}], messages=PROMPT)
        assert stopped.stop_reason == "aborted"
        assert "spends at night" in on_call("show", stopped.run_id[:6])
        on_call("revive", "--tenant", "acme")
        done = agent(tmp_path, ["Done."], resume=stopped)
    assert done.status == "completed"
