"""The Python blocks of the ledger's README run."""

from __future__ import annotations

from decimal import Decimal

import pytest
from pytest_examples import CodeExample, EvalExample, find_examples

from budgetguard_core.decision import Admit
from budgetguard_core.kit import ModelCall, TokenUsage
from budgetguard_core.ledger import ledger as ledger_module
from layout import ROOT

README = ROOT / "budgetguard_core" / "ledger" / "README.md"
BLOCKS = [block for block in find_examples(str(README)) if block.prefix == "python"]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.start_line}")
def test_block_runs(block: CodeExample, eval_example: EvalExample, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    eval_example.set_config(line_length=120)
    eval_example.run_print_check(block)
    for ledger in ledger_module._BY_URL.values():
        ledger.close()
    ledger_module._BY_URL.clear()


def test_the_first_block_bounds_the_tenant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = {}
    exec(compile(BLOCKS[0].source, "README.md", "exec"), made)
    made["ledger"]._outbox._folder = tmp_path
    spent = 0
    while isinstance(
        ticket := made["guard"].admit_model_call(ModelCall(cost_usd=Decimal(3))), Admit
    ):
        made["guard"].settle_model_call(ticket, TokenUsage(1, 1), cost_usd=Decimal(3))
        spent += 3
    assert (spent, ticket.trip.reason) == (18, "tenant_daily")
    made["ledger"].close()


def test_every_command_that_is_named_is_there():
    from typer.main import get_command

    from budgetguard_cli.app import app

    command = get_command(app)
    text = README.read_text("utf-8")
    for name in ("kill", "revive", "runs", *command.commands["ledger"].commands):
        assert name in text
