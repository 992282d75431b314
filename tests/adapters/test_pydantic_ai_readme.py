"""The blocks of the Pydantic AI adapter's README run, and print what they say they print."""

from __future__ import annotations

import asyncio

import pytest
from pytest_examples import CodeExample, EvalExample, find_examples

from budgetguard_core.testing import Script, calls
from conformance.budgetguard_pydantic_ai_driver import ScriptedModel
from layout import ROOT

README = ROOT / "adapters" / "budgetguard_pydantic_ai" / "README.md"
BLOCKS = [block for block in find_examples(str(README)) if block.prefix == "python"]


def test_there_are_five_recipes():
    assert len(BLOCKS) == 5


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.start_line}")
def test_block_prints_what_it_says(block: CodeExample, eval_example: EvalExample):
    from pydantic_ai import Agent

    pages = iter(range(1000))

    def search(value: str = "") -> str:
        return f"page {next(pages)}"

    model = ScriptedModel(Script([calls("search")]), name="gpt-4o")  # one that has a price
    eval_example.set_config(line_length=120)
    with asyncio.Runner() as runner:
        # The framework makes a loop where there is none, and leaves it open.
        asyncio.set_event_loop(runner.get_loop())
        eval_example.run_print_check(
            block, module_globals={"Agent": Agent, "model": model, "search": search}
        )
