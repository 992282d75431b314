"""The Python blocks of READMEs in folders of the core run, and print what they say they print."""

import pytest
from pytest_examples import CodeExample, EvalExample, find_examples

from layout import ROOT

# The breakers' and the ledger's have tests of their own beside the code that they show.
FOLDERS = (".", "handoff", "profiles", "telemetry")
READMES = [ROOT / "budgetguard_core" / folder / "README.md" for folder in FOLDERS]
BLOCKS = [block for block in find_examples(*map(str, READMES)) if block.prefix == "python"]


def test_every_readme_has_a_block_to_run():
    assert {block.path for block in BLOCKS} == set(READMES)


@pytest.mark.parametrize(
    "block", BLOCKS, ids=lambda block: f"{block.path.parent.name} {block.start_line}"
)
def test_block_prints_what_it_says(
    block: CodeExample, eval_example: EvalExample, monkeypatch, tmp_path
):
    if block.path.parent.name == "telemetry":
        pytest.importorskip("opentelemetry")
    monkeypatch.chdir(tmp_path)
    eval_example.set_config(line_length=150)
    eval_example.run_print_check(block)
