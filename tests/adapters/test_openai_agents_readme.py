"""The blocks of the adapter's README run, over real HTTP, and print what they say they print."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from agents import set_default_openai_client
from agents.models import _openai_shared
from openai import AsyncOpenAI
from pytest_examples import CodeExample, EvalExample, find_examples

import budgetguard_openai_agents
from strict_openai_server import StrictServer

README = Path(budgetguard_openai_agents.__file__).with_name("README.md")
BLOCKS = [block for block in find_examples(str(README)) if block.prefix == "python"]


def test_there_are_the_six_recipes():
    assert len(BLOCKS) == 6


@pytest.fixture
def server(httpserver, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    server = StrictServer(httpserver)
    server.calls = [("search", '{"query": "news"}')]
    client = AsyncOpenAI(base_url=httpserver.url_for("/v1"), api_key="none", max_retries=0)
    before = _openai_shared.get_default_openai_client()
    set_default_openai_client(client, use_for_tracing=False)
    yield server
    set_default_openai_client(before, use_for_tracing=False)  # type: ignore[arg-type]
    asyncio.run(client.close())
    assert server.refusals == []
    assert len(httpserver.log) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.start_line}")
def test_block_prints_what_it_says(block: CodeExample, eval_example: EvalExample, server):
    eval_example.set_config(line_length=120)
    eval_example.run_print_check(block)
