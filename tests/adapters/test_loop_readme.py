"""The blocks of the loop adapter's README run, one after the other, and print what they say."""

from __future__ import annotations

from pytest_examples import find_examples

from layout import ROOT

README = ROOT / "adapters" / "budgetguard_loop" / "README.md"
BLOCKS = [block for block in find_examples(str(README)) if block.prefix == "python"]


def test_the_blocks_print_what_they_say(capsys):
    assert len(BLOCKS) == 7
    names: dict[str, object] = {"__name__": "readme"}
    for block in BLOCKS:
        exec(compile(block.source, f"README.md:{block.start_line}", "exec"), names)
        said = [
            line.partition("#> ")[2]
            for line in block.source.splitlines()
            if line.lstrip().startswith("#> ")
        ]
        assert capsys.readouterr().out.splitlines() == said, f"line {block.start_line}"
