"""The blocks of the README run, with the real client over HTTP, and print what they say."""

from __future__ import annotations

import re
from importlib.metadata import version

import openai
import pytest
from pytest_examples import CodeExample, EvalExample, find_examples

from budgetguard_core.ledger import Ledger
from http_flows import BY_SDK
from layout import ROOT
from provider_server import ProviderServer

README = ROOT / "adapters" / "budgetguard_http" / "README.md"
BLOCKS = [block for block in find_examples(str(README)) if block.prefix.startswith("python")]
SCHEMA = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}


def my_agent_loop(client, messages=None):
    """Any loop: it asks, runs the tools, and ends where the answer asks for none."""
    messages = messages or [{"role": "user", "content": "Go."}]
    for number in range(50):
        reply = client.chat.completions.create(model="gpt-4o", messages=messages, tools=[SCHEMA])
        answer = reply.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            return messages
        for call in answer.tool_calls:
            result = {"role": "tool", "tool_call_id": call.id, "content": f"result {number}"}
            messages.append(result)
    raise AssertionError("nothing has ended the loop")


def test_there_are_six_recipes_and_each_runs():
    assert [block.prefix for block in BLOCKS] == ["python"] * 6


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.start_line}")
def test_block_prints_what_it_says(block: CodeExample, eval_example: EvalExample, tmp_path):
    eval_example.set_config(line_length=120)
    with (
        ProviderServer() as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        eval_example.run_print_check(
            block,
            module_globals={
                "client": client,
                "my_agent_loop": my_agent_loop,
                "question": [{"role": "user", "content": "Go."}],
                "page": [],
                "ledger": Ledger(f"sqlite:///{tmp_path}/ledger.sqlite3", daily_usd=20),
                "confirm": lambda question: True,
            },
        )


def table():
    """Return the flows that the README names, and the releases they ran with, by SDK."""
    _, found = README.read_text(encoding="utf-8").split("| SDK | flows |\n|---|---|\n")
    flows, releases = {}, {}
    for line in found.partition("\n\n")[0].splitlines():
        name, told = line.strip("| ").split(" | ")
        sdk, release = name.split()
        releases[sdk] = release
        flows[sdk] = told.split(", ")
    return flows, releases


def test_the_table_names_the_flows_that_are_tested():
    flows, _ = table()
    bedrock = (ROOT / "tests/adapters/test_http_bedrock.py").read_text(encoding="utf-8")
    operations = set(
        re.findall(r"client(?:_of\(server\))?\.(converse\w*|invoke_model\w*)\(", bedrock)
    )
    told = flows.pop("boto3")
    assert sorted(told) == sorted(f"`{one}`" for one in operations)
    assert flows == {sdk: list(named) for sdk, named in BY_SDK.items()}


def test_the_table_names_the_generation_that_is_installed():
    _, releases = table()
    for sdk, release in releases.items():
        assert release.split(".")[0] == version(sdk).split(".")[0]
