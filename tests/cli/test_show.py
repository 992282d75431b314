"""`budgetguard show`, end to end."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal

import pytest
from typer.testing import CliRunner

from budgetguard_cli.app import app
from budgetguard_core import Budget, Guard, JsonLinesSink, MemoryStore
from budgetguard_core.breakers import RateLimit
from budgetguard_core.kit import Envelope, ModelCall, TokenUsage, ToolCall, end_run
from budgetguard_core.ledger import Ledger
from budgetguard_core.run_log import RunLog
from budgetguard_core.testing import ManualClock
from run_logs import COST_OF_A_CALL, budget, finalized, in_attempts, work, write
from sticky_runs import NEEDS, RUNS


@pytest.fixture
def log(tmp_path):
    return write(tmp_path / "log.jsonl")


def shown(budgetguard, log, run):
    done = budgetguard("show", log, "--run", run)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_one_run_is_a_tree(budgetguard, log):
    text = shown(budgetguard, log, "stopped")
    for said in (
        "run stopped: terminated, max_iterations",
        "profile research version 3",
        "5 model calls",
        "gpt-4o: 4 calls",
        "search: 2 calls (2 refused)",
        "run helper: completed",
        "read_page: 1 call",
        "refused: 2 tool_quota, 1 max_iterations",
        "stopped: max_iterations",
        "max_iterations=5 reached: 5 used",
        "it was about to: call the model",
        "to go on: Resume it under a fresh budget: its history is closed, no completed tool call "
        "runs again.\n",
    ):
        assert said in text, said


def test_a_conversation_is_a_tree_of_its_runs(budgetguard, tmp_path):
    terms = Envelope(
        budget=Budget(max_iterations=8),
        conversation=Budget(max_model_calls=20),
        conversation_id="chat-7",
        store=MemoryStore(),
        sinks=[RunLog(tmp_path)],
    )
    for _ in range(2):
        run = terms.open()
        run.answered(run.model_call(ModelCall(model="gpt-4o")), TokenUsage(50, 50))
        run.end()
    listed = budgetguard("show", BUDGETGUARD_LOG=str(tmp_path)).stdout.decode()
    assert "conversation-chat-7" in listed
    assert "1 run." in listed
    text = budgetguard("show", "conv", BUDGETGUARD_LOG=str(tmp_path)).stdout.decode()
    assert "run conversation-chat-7: completed" in text
    assert "max_model_calls: [##..................] 10% 2 of 20" in text
    assert text.count(": completed") == 3
    watched = budgetguard("watch", tmp_path, "--once").stdout.decode()
    assert "conversation-chat-7" in watched


def test_a_cheaper_model_is_named(budgetguard, tmp_path):
    path = tmp_path / "log.jsonl"
    caps = Budget(max_total_tokens=1000, fallback_at=0.1, fallback_model="gpt-4o-mini")
    sink = JsonLinesSink(path)
    run = Envelope(budget=Guard(caps, run_id="cheap", sinks=[sink])).open()
    for _ in range(2):
        call = run.model_call(ModelCall(model="gpt-4o"), may_fall_back=True)
        run.answered(call, TokenUsage(50, 50))
    run.end()
    sink.close()
    text = shown(budgetguard, path, "cheap")
    assert "fell back to gpt-4o-mini, at the share of max_total_tokens" in text
    assert "gpt-4o-mini: 1 call" in text


@pytest.mark.slow
def test_who_spent_what_adds_up(budgetguard, log):
    (run,) = [json.loads(budgetguard("show", log, "--run", "stopped", "--json").stdout)]

    def costs(node, part):
        own = sum(Decimal(one["cost_usd"]) for one in node[part].values())
        return own + sum(costs(child, part) for child in node["runs"])

    total = Decimal(run["usage"]["cost_usd"])
    assert total == 5 * Decimal(COST_OF_A_CALL)
    assert costs(run, "models") == total
    assert costs(run, "tools") == total
    assert run["shares"]["max_iterations"] == 1.0
    assert run["violations"][0]["limit"] == 5
    assert run["runs"][0]["run_id"] == "helper"


@pytest.mark.slow
def test_a_last_answer_is_told_apart_and_adds_up(budgetguard, tmp_path):
    log = tmp_path / "log.jsonl"
    with JsonLinesSink(log) as sink:
        outcome = finalized(sink)
    assert outcome.finalized
    text = budgetguard("show", log).stdout.decode()
    assert "last answer\n" in text
    assert "the model gave a last answer, from the reserve" in text
    assert "not ended" not in text
    run = json.loads(budgetguard("show", log, "--json").stdout)
    (answer,) = run["runs"]
    assert (run["finalized"], answer["housekeeping"]) == (True, "last answer")
    assert answer["to_go_on"] is None
    total = Decimal(run["usage"]["cost_usd"])
    assert total == 3 * Decimal(COST_OF_A_CALL) == outcome.usage.cost_usd
    for part in ("models", "tools"):
        spent = [*run[part].values(), *answer[part].values()]
        assert sum(Decimal(one["cost_usd"]) for one in spent) == total, part


@pytest.mark.slow
def test_what_rate_limits_did_is_said(budgetguard, tmp_path):
    log = tmp_path / "log.jsonl"
    limits = {
        "search": RateLimit(rate=0.01),
        "fetch": RateLimit(rate=0.01, max_wait_duration=200.0),
    }
    with JsonLinesSink(log) as sink:
        guard = Guard(Budget(rate_limits=limits), sinks=[sink], clock=ManualClock())
        for name in ("search", "search", "fetch", "fetch"):
            guard.admit_tool_calls([ToolCall(name=name, id=name, arguments={})])
        guard.abort("enough")
        guard.admit_tool_calls([ToolCall(name="late", arguments={})])
    text = budgetguard("show", log).stdout.decode()
    assert "refused: 1 velocity, 1 aborted" in text
    assert "delayed by rate limits: 1 call" in text


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("near", "run near: completed"),
        ("failed", "run failed: failed, TimeoutError"),
        ("killed", "It has not ended: it is still going, or its process was killed."),
    ],
)
def test_every_ending_is_said(budgetguard, log, run, said):
    assert said in shown(budgetguard, log, run)


def test_a_log_with_several_runs_is_listed(budgetguard, log):
    text = budgetguard("show", log).stdout.decode()
    for run in ("stopped", "near", "failed", "killed"):
        assert run in text
    assert "4 runs. Show one by the beginning of its id." in text


@pytest.mark.slow
def test_a_run_is_found_by_its_id(budgetguard, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    write(folder / "near.jsonl")
    done = budgetguard("show", "near", "--json", BUDGETGUARD_LOG=str(folder))
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [run["run_id"] for run in runs] == ["near"]


@pytest.mark.parametrize("name", ["team/run 1", ".hidden", "x" * 150, "packed.jsonl"])
def test_a_run_of_any_name_is_found(budgetguard, tmp_path, name):
    log = RunLog(tmp_path)
    end_run(Guard(Budget(), run_id=name, sinks=[log]), trip=None)
    if name == "packed.jsonl":
        (file,) = tmp_path.iterdir()
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    done = budgetguard("show", name, "--json", BUDGETGUARD_LOG=str(tmp_path))
    assert json.loads(done.stdout)["run_id"] == name


@pytest.mark.sample(4)
@pytest.mark.parametrize("adapter", sorted(RUNS))
def test_the_log_of_every_adapter_is_shown(budgetguard, tmp_path, monkeypatch, adapter):
    pytest.importorskip(NEEDS[adapter])
    monkeypatch.setenv("BUDGETGUARD_LOG", str(tmp_path))
    outcome = RUNS[adapter](Budget(max_iterations=3))
    done = budgetguard("show", outcome.run_id, "--json")
    run = json.loads(done.stdout)
    assert run["status"] == "terminated"
    assert run["usage"]["total_tokens"] == outcome.usage.total_tokens
    assert run["tools"]["read_page"]["calls"] == outcome.usage.tool_calls
    assert run["damaged"] is None


@pytest.mark.slow
def test_half_a_line_at_the_end_is_a_run_that_goes_on(budgetguard, log):
    log.write_bytes(log.read_bytes()[:-20])
    assert budgetguard("show", log).returncode == 0


@pytest.mark.slow
def test_errors_are_clear(budgetguard, log, tmp_path):
    missing = budgetguard("show", tmp_path / "none")
    assert (missing.returncode, b"No such file" in missing.stderr) == (2, True)
    unknown = budgetguard("show", log, "--run", "other")
    assert (unknown.returncode, b"run 'other' is not in" in unknown.stderr) == (2, True)
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    nothing = budgetguard("show", empty)
    assert (nothing.returncode, b"holds no run" in nothing.stderr) == (2, True)
    log.write_bytes(b"{broken}\n" + log.read_bytes())
    damaged = budgetguard("show", log, "--run", "near")
    assert (damaged.returncode, f"{log}:1:".encode() in damaged.stderr) == (1, True)


@pytest.mark.slow
def test_what_a_log_holds_cannot_write_to_the_terminal(budgetguard, tmp_path):
    from budgetguard_core import Guard, JsonLinesSink
    from budgetguard_core.kit import ModelCall

    with JsonLinesSink(tmp_path / "log.jsonl") as sink:
        guard = Guard(run_id="\x1b]0;owned\x07", sinks=[sink])
        guard.admit_model_call(ModelCall(model="[red]\x1b[2J"))
    done = budgetguard("show", tmp_path / "log.jsonl")
    assert b"\x1b" not in done.stdout
    assert b"\x07" not in done.stdout


def test_a_run_is_shown_with_all_its_attempts(budgetguard, tmp_path):
    in_attempts(tmp_path, ends=False)
    text = budgetguard("show", "asks", BUDGETGUARD_LOG=str(tmp_path)).stdout.decode()
    assert "run asks: paused" in text
    assert "gpt-4o: 3 calls" in text
    assert "to go on: It waits for a person" in text


def invoke(*arguments, code=0, **environment):
    env = {"COLUMNS": "140", **environment}
    done = CliRunner().invoke(app, ["show", *map(str, arguments)], env=env)
    assert done.exit_code == code, done.output
    return done.output


def named(folder, *ids):
    for at, run_id in enumerate(ids):
        clock = ManualClock()
        clock.advance(3600 * at)
        guard = Guard(budget(max_iterations=9), run_id=run_id, sinks=[RunLog(folder)], clock=clock)
        work(guard, clock, 1)
        end_run(guard, trip=None)


@pytest.mark.parametrize("columns", ["80", "140"])
def test_without_an_argument_the_runs_of_the_folder_are_listed_newest_first(tmp_path, columns):
    named(tmp_path, "first", "second", "third")
    text = invoke(BUDGETGUARD_LOG=str(tmp_path), COLUMNS=columns)
    assert max(map(len, text.splitlines())) <= int(columns)
    places = [text.index(name) for name in ("third", "second", "first")]
    assert places == sorted(places)
    for part in ("started", "gpt-4o", "research", "$0.00325", "completed", "3 runs"):
        assert part in text, part
    listed = invoke("--json", BUDGETGUARD_LOG=str(tmp_path)).splitlines()
    assert [json.loads(line)["run_id"] for line in listed] == ["third", "second", "first"]


def test_made_up_ids_are_listed_as_short_as_they_are_unique_and_chosen_ones_whole(tmp_path):
    same = "0123456789ab"
    named(tmp_path, same + "0" * 20, same + "1" * 20, "nightly-report-of-tuesday")
    text = invoke(BUDGETGUARD_LOG=str(tmp_path))
    assert f" {same}0 " in text
    assert f" {same}1 " in text
    assert " nightly-report-of-tuesday " in text


def test_a_run_is_found_by_a_unique_beginning_of_its_id(tmp_path):
    named(tmp_path, "abc1", "abd2", "abd2-of-another-process")
    folder = str(tmp_path)
    assert json.loads(invoke("abd", "--json", BUDGETGUARD_LOG=folder))["run_id"] == "abd2"
    assert "must begin one id, got abc1, abd2" in invoke("ab", code=2, BUDGETGUARD_LOG=folder)
    assert "is not in" in invoke("x", code=2, BUDGETGUARD_LOG=folder)


def test_a_run_as_markdown_is_its_tree_without_any_text_or_tenant_of_the_run(tmp_path):
    url = f"sqlite:///{tmp_path}/ledger.sqlite3"
    paid = {"tenant": "acme 4111", "ledger": Ledger(url, daily_usd=9)}
    with JsonLinesSink(tmp_path / "log.jsonl") as sink:
        guard = Guard(budget(max_iterations=1), run_id="<b>|@team", sinks=[sink], **paid)
        child = guard.child(Budget(), run_id="helper")
        child.abort("card 4111")
        child.admit_model_call(ModelCall(model="gpt-4o"))
        end_run(child, trip=child.trip)
        work(guard, ManualClock(), 3)
        end_run(guard, trip=guard.trip, next_step="pay 4111 1111 to bob")
    text = invoke(tmp_path / "log.jsonl", "--markdown")
    assert text.startswith("```text\nrun <b>|@team: terminated, max_iterations\n")
    assert text.endswith("\n```\n")
    assert "── stopped: max_iterations\n" in text
    assert "── stopped: aborted\n" in text
    assert "4111" not in text
    assert "4111" in invoke(tmp_path / "log.jsonl")


def test_without_a_folder_there_is_nothing_to_list():
    assert "set BUDGETGUARD_LOG" in invoke(code=2, BUDGETGUARD_LOG="")
