"""The blocks of the Strands adapter's README run, and print what they say they print."""

from __future__ import annotations

import pytest
from pytest_examples import CodeExample, EvalExample, find_examples

from budgetguard_core.ledger import Ledger
from budgetguard_core.testing import Script, calls
from conformance.budgetguard_strands_driver import ScriptedModel
from layout import ROOT
from strands_agents import Counter

README = ROOT / "adapters" / "budgetguard_strands" / "README.md"
BLOCKS = [block for block in find_examples(str(README)) if block.prefix == "python"]


def test_there_are_six_recipes():
    assert len(BLOCKS) == 6


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.start_line}")
def test_block_prints_what_it_says(block: CodeExample, eval_example: EvalExample, tmp_path):
    from strands import Agent

    model = ScriptedModel(Script([calls("search")]))
    model.config["model_id"] = "gpt-4o"  # one that has a price
    eval_example.set_config(line_length=120)
    eval_example.run_print_check(
        block,
        module_globals={
            "Agent": Agent,
            "model": model,
            "search": Counter().tool,
            "page": [],
            "ledger": Ledger(f"sqlite:///{tmp_path}/ledger.sqlite3", daily_usd=5),
            "confirm": lambda question: True,
            "folder": str(tmp_path),
        },
    )
