"""The README's Python blocks run, and print what they say they print."""

import pytest
from pytest_examples import CodeExample, EvalExample, find_examples

from layout import ROOT

BLOCKS = [block for block in find_examples(str(ROOT / "README.md")) if block.prefix == "python"]


def test_the_readme_has_blocks_to_run():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.start_line}")
def test_block_prints_what_it_says(block: CodeExample, eval_example: EvalExample):
    eval_example.set_config(line_length=120)
    eval_example.run_print_check(block)
