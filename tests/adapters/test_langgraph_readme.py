"""The blocks of the LangGraph adapter's README run, and print what they say they print."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from pytest_examples import CodeExample, EvalExample, find_examples

from langgraph_graphs import StrictChat, search, sticky, thread, user
from layout import ROOT

README = ROOT / "adapters" / "budgetguard_langgraph" / "README.md"
BLOCKS = [block for block in find_examples(str(README)) if block.prefix == "python"]


class Page:
    """What a chunk is sent to."""

    async def send(self, mode, chunk, *, cost):
        assert mode in ("messages", "values")
        assert cost >= 0


def test_there_are_seven_recipes():
    assert len(BLOCKS) == 7


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.start_line}")
def test_block_prints_what_it_says(
    block: CodeExample, eval_example: EvalExample, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    model = StrictChat(script=sticky(), model_name="gpt-4o")  # one that has a price
    needs_a_thread = "config" in block.source
    saver = InMemorySaver() if needs_a_thread else None
    eval_example.set_config(line_length=120)
    eval_example.run_print_check(
        block,
        module_globals={
            "agent": create_agent(model, [search], checkpointer=saver),
            "given": user("What is new?"),
            "config": thread(),
            "page": Page(),
            "ui": SimpleNamespace(confirm=lambda question: True),
        },
    )
