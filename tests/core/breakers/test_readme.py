"""The examples of the breakers' README run, and print what they say they print."""

import pytest
from pytest_examples import CodeExample, EvalExample, find_examples

from layout import ROOT

README = ROOT / "budgetguard_core" / "breakers" / "README.md"
BLOCKS = [block for block in find_examples(str(README)) if block.prefix == "python"]


def test_every_breaker_has_an_example():
    assert len(BLOCKS) == 6


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.start_line}")
def test_block_prints_what_it_says(block: CodeExample, eval_example: EvalExample):
    eval_example.set_config(line_length=300)
    eval_example.run_print_check(block)
