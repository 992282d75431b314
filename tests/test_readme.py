"""The README's Python blocks run, and print what they say they print."""

from pytest_examples import EvalExample, find_examples

from layout import ROOT

BLOCKS = [block for block in find_examples(str(ROOT / "README.md")) if block.prefix == "python"]


def test_the_readme_fits_on_a_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len(BLOCKS) >= 4


def test_the_blocks_run_one_after_the_other(eval_example: EvalExample):
    eval_example.set_config(line_length=120)
    names: dict[str, object] = {}
    for block in BLOCKS:
        names = eval_example.run_print_check(block, module_globals=names)
