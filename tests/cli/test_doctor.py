"""`budgetguard doctor`: what is covered, what is not, and what its exit code says."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from budgetguard_cli import doctor as command
from budgetguard_cli.app import app
from budgetguard_cli.doctor import Entry, declared, packages
from budgetguard_cli.source import Source, read_source

ROOT = Path(__file__).parents[2]


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(script=None, *options, **environment):
        arguments = ["doctor", "--json", *options]
        if script is not None:
            (tmp_path / "script.py").write_text(script)
            arguments.append("script.py")
        result = CliRunner().invoke(app, arguments, env=environment)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()]

    return run


def names(found, status):
    return [(one["kind"], one["name"]) for one in found if one["status"] == status]


def test_what_is_installed_is_covered_in_supported_releases(doctor):
    code, found = doctor()
    assert code == 0
    covered = dict.fromkeys(one["name"] for one in found if one["kind"] == "framework")
    assert {"langgraph", "langchain-core", "openai-agents", "strands-agents"} <= covered.keys()
    graph = next(one for one in found if one["name"] == "langgraph")
    assert graph["version"]
    assert "budgetguard_langgraph" in graph["detail"]
    assert "<2,>=1.1.5" in graph["detail"]


def test_a_covered_script(doctor):
    script = "from openai import OpenAI\nmodel = 'gpt-4o'\nimport strands\n"
    code, found = doctor(script)
    assert (code, names(found, "problem")) == (0, [])
    assert names(found, "ok") == [
        ("client", "openai"),
        ("framework", "strands-agents"),
        ("model", "gpt-4o"),
    ]


@pytest.mark.parametrize(
    "script",
    [
        "import aiobotocore.session as s; s.get_session().create_client('bedrock-runtime')",
        "import requests\nrequests.post('https://api.openai.com/v1/completions')",
        "from urllib import request\nrequest.urlopen('http://localhost/v1/chat/completions')",
        "import agents.realtime",
        "from agents import realtime",
        "import importlib; importlib.import_module('vertexai')",
        "import openai\nwith openai.OpenAI().realtime.connect() as one: pass",
        "from google import genai\ngenai.Client().aio.live.connect()",
        "def broken(:",
        "from strands.bidi import BidiAgent",
        "from strands.experimental.bidi import BidiAgent",
        "from strands_tools import workflow",
        "import strands_tools.workflow",
        "from strands_tools.agent_graph import agent_graph",
    ],
)
def test_what_is_not_covered_ends_with_1(doctor, script):
    code, found = doctor(script)
    assert code == 1
    # A client that is not installed is one, too.
    (_,) = [one for one in names(found, "problem") if one[0] in ("way", "script")]


@pytest.mark.parametrize(
    ("imports", "problems", "notes"),
    [
        ("import strands", [], ["no adapter"]),
        ("import strands, budgetguard_strands", [], []),
        ("import strands, langgraph, budgetguard_langgraph", ["strands"], []),
        ("import strands, langgraph, budgetguard_langgraph, budgetguard_http", [], []),
        ("import langgraph, openai, budgetguard_langgraph", [], ["openai"]),
        ("import pydantic_ai, budgetguard_pydantic_ai", [], []),
        ("import openai, budgetguard_loop", [], []),
    ],
)
def test_mixes_that_are_not_covered_are_named(doctor, imports, problems, notes):
    code, found = doctor(imports)
    mixes = [one for one in found if one["kind"] == "mix"]
    assert names(mixes, "problem") == [("mix", name) for name in problems]
    assert names(mixes, "note") == [("mix", name) for name in notes]
    assert code == bool(problems)


def test_what_concerns_run_is_kept_apart(doctor, tmp_path):
    (tmp_path / "graph.py").write_text("import langgraph")
    text = CliRunner().invoke(app, ["doctor", "graph.py"], env={"COLUMNS": "140"}).stdout
    parent, below = text.split("Under `budgetguard run` alone:")
    assert "raw thread pool" in below
    assert "raw thread pool" not in parent


@pytest.mark.parametrize(
    ("script", "covered"),
    [
        ("from strands import Agent\nfrom strands_tools import swarm", "strands-agents"),
        ("import boto3; boto3.client('bedrock-runtime')", "boto3"),
    ],
)
def test_agents_that_tools_of_strands_make_and_bedrock_are_covered(doctor, script, covered):
    code, found = doctor(script)
    assert (code, names(found, "problem")) == (0, [])
    assert covered in dict(names(found, "ok")).values()


@pytest.mark.parametrize(
    "script",
    [
        "import ollama",
        "import litellm\nlitellm.completion(model='ollama/qwen3', messages=[])",
        "from crewai import Agent, Crew",
        "from smolagents import CodeAgent",
        "import dspy",
    ],
)
def test_what_stands_on_the_clients_is_found(doctor, script):
    _, found = doctor(script)
    clients = [one for one in found if one["kind"] == "client"]
    assert len(clients) == 1
    # It need not be installed where the doctor is.
    assert "covered" in clients[0]["detail"] or clients[0]["version"] is None


def test_a_script_in_which_nothing_is_found_is_told_what_was_looked_at(doctor):
    _, found = doctor("import json\nimport langfuse")
    assert "json, langfuse" in found[0]["detail"]


@pytest.mark.parametrize(
    "script",
    ["import boto3; boto3.client('s3')", "import requests; requests.get('https://example.com')"],
)
def test_other_work_of_the_same_libraries_is_none_of_ours(doctor, script):
    code, found = doctor(script)
    assert code == 0
    assert names(found, "note") == [("script", "script.py")]


def test_modules_beside_the_script_are_read_and_hide_packages(doctor, tmp_path):
    (tmp_path / "agents.py").write_text("import vertexai")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "__init__.py").write_text("")
    (tmp_path / "deep" / "er.py").write_text("from anthropic import Anthropic")
    code, found = doctor("import agents\nfrom deep import er")
    assert code == 1
    assert names(found, "problem") == [("way", "vertexai")]
    assert names(found, "ok") == [("client", "anthropic")]


def test_nothing_of_a_script_is_run(doctor, tmp_path):
    doctor("open('ran', 'w')")
    assert not (tmp_path / "ran").exists()


def test_prices(doctor):
    script = (
        "Agent(model='openai:gpt-4o')\nf(model_id='nobody-knows-1')\ng(model='two words')\n"
        "post(json={'model': 'claude-sonnet-4-5'})\n"
    )
    code, found = doctor(script, "--model", "gpt-4o-mini")
    assert code == 1
    assert names(found, "problem") == [("model", "nobody-knows-1")]
    known = [name for kind, name in names(found, "ok") if kind == "model"]
    assert known == ["gpt-4o-mini", "claude-sonnet-4-5", "openai:gpt-4o"]


def test_profile_and_file(doctor, tmp_path):
    assert names(doctor("", "--profile", "research")[1], "ok") == [("profile", "research")]
    code, found = doctor("", "--profile", "resaerch")
    assert (code, names(found, "problem")) == (1, [("profile", "resaerch")])
    (tmp_path / "budgetguard.toml").write_text("[profiles.mine]\nversion = 1\nmax_iterations = 0\n")
    code, found = doctor("")
    assert code == 1
    assert "budgetguard.toml:3" in found[-1]["detail"]


def test_nothing_of_a_finding_is_cut(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "one_word_that_is_wider_than_any_column_of_this_table_can_be_here"
    (tmp_path / f"{name}.py").write_text("def broken(:")
    table = CliRunner().invoke(app, ["doctor", f"{name}.py"], env={"COLUMNS": "60"}).stdout
    assert "…" not in table
    assert max(map(len, table.splitlines()[1:])) <= 60
    assert "".join(name.split("_")[-3:]) in re.sub(r"[\s_]", "", table)


def test_ledger(doctor, tmp_path):
    code, found = doctor("", "--ledger", f"sqlite:///{tmp_path}/none.sqlite3")
    assert (code, names(found, "problem")) == (1, [("ledger", "sqlite")])
    url = f"sqlite:///{tmp_path}/my%20ledger.sqlite3?synchronous=normal"
    set_ = CliRunner().invoke(
        app, ["ledger", "set", "--tenant", "acme", "--daily-usd", "5", "--ledger", url]
    )
    assert set_.exit_code == 0, set_.stderr
    code, found = doctor("", "--ledger", url)
    assert (code, names(found, "ok")) == (0, [("ledger", "sqlite")])


def test_a_release_that_is_not_supported_is_a_problem(monkeypatch):
    monkeypatch.setattr(command, "_ranges", lambda: {("x", "pytest"): SpecifierSet("<1")})
    one = Entry(adapter="budgetguard_x", module="pytest", distribution="pytest", extra="x")
    (finding,) = packages([one], Source(modules={"pytest"}))
    assert finding.status == "problem"
    assert "supported are <1" in finding.detail


def test_what_is_used_and_not_installed_is_a_problem():
    one = Entry(adapter="budgetguard_x", module="x", distribution="no-such-thing", extra="x")
    assert [f.status for f in packages([one], Source(modules={"x.y"}))] == ["problem"]
    assert list(packages([one], None)) == []


def test_each_adapter_of_a_framework_declares_its_coverage():
    declaring = {one.adapter for one in declared() if not one.why}
    assert declaring == {
        f"budgetguard_{name}"
        for name in ("http", "langgraph", "openai_agents", "pydantic_ai", "strands")
    }
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for one in declared():
        assert one.why or one.extra in extras["optional-dependencies"]


def test_relative_imports_are_read(tmp_path):
    (tmp_path / "near.py").write_text("import anthropic")
    (tmp_path / "script.py").write_text("from . import near\nfrom .near import x\n")
    assert read_source(tmp_path / "script.py").imports("anthropic")


def test_a_missing_script_is_said():
    result = CliRunner().invoke(app, ["doctor", "nowhere.py"])
    assert result.exit_code == 2
    assert "the script must be a file, got nowhere.py" in result.stderr
