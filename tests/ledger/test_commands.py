"""The commands of the ledger, end to end, on each of the stores."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from budgetguard_cli.app import app
from budgetguard_cli.screen import printable
from budgetguard_core import Guard
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.run_log import RunLog


@pytest.fixture
def budgetguard_process():
    """The command as users run it."""

    def call(*arguments):
        command = [sys.executable, "-I", "-m", "budgetguard_cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    return call


def run(place, *arguments):
    environment = {"BUDGETGUARD_LEDGER": place.url, "COLUMNS": "200"}
    return CliRunner().invoke(app, list(arguments), env=environment)


@pytest.mark.sample(3)
def test_show_and_set(place, opened):
    assert run(place, "ledger", "set", "--tenant", "acme", "--daily-usd", "20").exit_code == 0
    told = run(place, "ledger", "set", "--tenant", "acme", "--monthly-tokens", "5000")
    assert told.output == "ceilings of acme: a day $20, a month 5,000 tokens\n"
    told = run(place, "ledger", "set", "--default", "--daily-usd", "3", "--json")
    assert json.loads(told.stdout) == {
        "key": None,
        "own": True,
        "daily_usd": "3",
        "daily_tokens": None,
        "monthly_usd": None,
        "monthly_tokens": None,
    }
    ledger = opened(place)
    assert "ceilings of acme: a day $20, " in run(place, "ledger", "show").output
    ledger.reserve(("acme", "=cmd|x"), usd=2, tokens=9).settle(1.5, 7)
    ledger.reserve("acme", usd=1)
    shown = run(place, "ledger", "show").output
    assert "acme" in shown
    assert "$1.5  7 tokens" in shown
    assert "12%" in shown  # 2.5 of 20
    assert "ceilings of acme" not in shown
    assert "ceilings of the default: a day $3, a month none" in shown
    assert f"ledger {ledger.id}" in shown
    record = json.loads(
        run(place, "ledger", "show", "--json", "--tenant", "acme").stdout.split("\n")[0]
    )
    assert (record["spent_usd"], record["reserved_usd"], record["ceiling_usd"]) == (
        "1.5",
        "1",
        "20",
    )
    lines = run(place, "ledger", "show", "--past", "--json").stdout.splitlines()
    assert len(lines) == 4
    run(place, "ledger", "set", "--tenant", "acme", "--daily-usd", "none")
    assert ledger.ceilings()["acme"]["d"] == Amount()
    shown = run(place, "ledger", "show").output
    assert "$20" not in shown  # the one that holds now
    assert "ceilings of acme" not in run(place, "ledger", "show").output
    assert "ceilings of the default: a day" in shown
    cleared = run(place, "ledger", "set", "--tenant", "acme", "--clear")
    assert cleared.output == "ceilings of acme: none of its own\n"
    assert set(ledger.ceilings()) == {""}


@pytest.mark.sample(3)
def test_kill_and_revive(place, opened):
    ledger = opened(place)
    ledger.reserve("acme", usd=1)
    killed = run(place, "kill", "--run", "run-1", "--who", "ann", "--why", "loops")
    assert "killed by ann" in killed.output
    assert "killed: run 'run-1' was killed by ann" in run(place, "ledger", "show").output
    said = json.loads(run(place, "kill", "--tenant", "beta", "--who", "bob", "--json").stdout)
    assert (said["flag"], said["who"]) == ("t:beta", "bob")
    revived = run(place, "revive", "--run", "run-1")
    assert revived.exit_code == 0
    assert "revived: run 'run-1' was killed by ann" in revived.output
    assert "still killed: tenant 'beta' was killed by bob" in revived.output
    said = json.loads(run(place, "revive", "--tenant", "beta", "--json").stdout)
    assert said["flag"] == "t:beta"
    assert ledger.kills() == []
    assert "no such kill switch was set" in run(place, "revive", "--all").output


@pytest.mark.slow
def test_what_is_wrong_is_said_in_one_sentence(sqlite, opened):
    opened(sqlite).reserve("acme", usd=1)
    for arguments in (
        ("kill",),
        ("kill", "--all", "--run", "r"),
        ("revive",),
        ("kill", "--tenant", "a\n"),
        ("ledger", "set", "--tenant", "acme", "--daily-tokens", "1.5"),
        ("ledger", "set", "--tenant", "acme", "--daily-usd", "nan"),
        ("ledger", "set", "--tenant", "acme", "--monthly-usd=-1"),
        ("ledger", "reconcile", "--hold", "x"),
        ("ledger", "reconcile", "--usd", "1"),
        ("ledger", "reconcile", "--hold", "x", "--usd", "1"),
        ("ledger", "set"),
        ("ledger", "set", "--tenant", "acme"),
        ("ledger", "set", "--tenant", "acme", "--clear", "--daily-usd", "1"),
        ("ledger", "show", "--ledger", "mysql://x"),
        ("ledger", "check", "--ledger", "redis://127.0.0.1:1"),
    ):
        done = run(sqlite, *arguments)
        assert done.exit_code == 2, arguments
        assert done.stderr.startswith("budgetguard: "), arguments
        assert done.stderr.count("\n") == 1
    done = run(sqlite, "ledger", "set", "--tenant", "acme", "--daily-usd", "many")
    assert done.exit_code == 2
    assert "must be an amount of US dollars, got 'many'" in " ".join(done.stderr.split())


def test_a_logged_run_is_killed_by_the_beginning_of_its_id(sqlite, opened, tmp_path):
    opened(sqlite).set_ceilings("acme", daily_usd=1)
    for name in ("9f0c11", "9f0d"):
        guard = Guard(run_id=name, sinks=[RunLog(tmp_path)])
        guard.start()
        Guard.restore(guard.snapshot(), sinks=[RunLog(tmp_path)])  # in a log of its own
    environment = {"BUDGETGUARD_LEDGER": sqlite.url, "BUDGETGUARD_LOG": str(tmp_path)}
    kill = ["kill", "--json", "--run"]
    done = CliRunner().invoke(app, [*kill, "9f0c"], env=environment)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["flag"].endswith("9f0c11")
    assert CliRunner().invoke(app, [*kill, "9f0"], env=environment).exit_code == 2
    done = CliRunner().invoke(app, [*kill, "other"], env=environment)
    assert json.loads(done.stdout)["flag"].endswith("other")
    assert CliRunner().invoke(app, [*kill, ""], env=environment).exit_code == 2
    done = CliRunner().invoke(app, ["revive", "--json", "--run", "9f"], env=environment)
    assert json.loads(done.stdout)["flag"] == "r:9f0c11"


def test_runs_with_a_call_under_way(place, opened):
    ledger = opened(place)
    ledger.reserve(("acme", "acme/user-7"), usd=2)
    ledger.reserve("acme", usd=1).settle(1)
    (line,) = run(place, "ledger", "runs", "--json").stdout.splitlines()
    found = json.loads(line)
    assert (found["keys"], found["result"]) == (["acme", "acme/user-7"], "under way")
    assert float(found["charged_usd"]) == 2
    assert found["owner"] in run(place, "ledger", "runs").stdout.replace("\n", "")


COMMANDS = [
    *(("ledger", name) for name in ("show", "set", "runs", "reconcile")),
    *(("ledger", name) for name in ("adopt", "check")),
    *((name,) for name in ("kill", "revive")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_command_has_an_example_and_speaks_json(sqlite, command):
    done = run(sqlite, *command, "--help")
    assert done.exit_code == 0
    assert f"Example: budgetguard {' '.join(command)}" in done.output
    assert "--json" in done.output
    assert "BUDGETGUARD_LEDGER" in done.output


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_file_that_is_not_there_is_no_empty_ledger(sqlite, command):
    options = {"set": ("--tenant=acme", "--daily-usd=1"), "kill": ("--all",), "revive": ("--all",)}
    done = run(sqlite, *command, *options.get(command[-1], ()))
    if command[-1] == "set":
        assert done.exit_code == 0
        return
    assert done.exit_code == 2
    assert "a ledger must be there, got no file" in done.stderr
    assert not sqlite.path.exists()


def test_json_of_the_rest(sqlite, opened):
    opened(sqlite).reserve("acme", usd=1)
    assert json.loads(run(sqlite, "ledger", "adopt", "--json").stdout)["url"].startswith("sqlite:")
    assert run(sqlite, "ledger", "check", "--json").stdout == ""
    assert run(sqlite, "ledger", "reconcile", "--json").stdout == ""
    with contextlib.closing(sqlite3.connect(sqlite.path)) as db:
        db.execute("UPDATE bg_windows SET charged1 = 0 WHERE label LIKE 'd%'")
        db.commit()
    damaged = run(sqlite, "ledger", "check", "--json")
    assert damaged.exit_code == 1
    assert "in the window" in json.loads(damaged.stdout)["problem"]


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    "name", ["x'; DROP TABLE windows; --", "*", "a\u202eb", "=1+1", "[red]x", ":x:"]
)
def test_hostile_names_in_the_commands(place, opened, name):
    ledger = opened(place)
    ledger.reserve((name, "acme"), usd=2).settle(1)
    attached = ledger.attach(name, name, on_kill=id, on_warning=id)
    ledger.send_heartbeat()
    assert run(place, "ledger", "set", "--tenant", name, "--daily-usd", "5").exit_code == 0
    killed = run(place, "kill", "--tenant", name, "--why", "\x1b[2J\nx", "--who", name)
    for done in (
        killed,
        run(place, "ledger", "show"),
        run(place, "ledger", "show", "--tenant", name),
        run(place, "ledger", "reconcile"),
        run(place, "revive", "--tenant", name),
    ):
        assert done.exit_code == 0, done.output
        assert all(line.isprintable() for line in done.output.splitlines()), name
    records = map(json.loads, run(place, "ledger", "show", "--json").stdout.splitlines())
    assert {record["key"] for record in records} == {"acme", name}
    shown = run(place, "ledger", "show", "--tenant", name).output
    assert "acme" not in shown
    assert printable(name) in shown
    attached.close()


@pytest.mark.slow
def test_the_commands_reach_a_process_of_their_own(sqlite, opened, budgetguard_process):
    ledger = opened(sqlite, daily_usd=1)
    ledger.reserve("acme", usd=0.1)
    run_ = ledger.attach("run-1", "acme", on_kill=id, on_warning=id)
    ledger.send_heartbeat()
    done = budgetguard_process("kill", "--tenant", "acme", "--ledger", sqlite.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert run_.obtain(Amount(tokens=1)).reason == "aborted"
    assert "acme" in budgetguard_process("ledger", "show", "--ledger", sqlite.url).stdout


def test_check_and_adopt(sqlite, place, opened):
    opened(place).reserve("acme", usd=1)
    done = run(place, "ledger", "check")
    assert done.exit_code == (0 if place.kind == "sqlite" else 2)
    assert "adopted: ledger" in run(place, "ledger", "adopt").output
    opened(sqlite).reserve("acme", usd=1)
    with contextlib.closing(sqlite3.connect(sqlite.path)) as db:
        db.execute("UPDATE bg_windows SET charged1 = 0")
        db.commit()
    damaged = run(sqlite, "ledger", "check")
    assert damaged.exit_code == 1
    assert "in the window" in damaged.output


@pytest.mark.sample(3)
@pytest.mark.parametrize("figure", ["-1", "nan", "0", "-0.5", "1e40"])
def test_what_the_advice_says_of_a_ceiling_is_taken(place, opened, figure):
    refused = run(place, "ledger", "set", "--tenant", "acme", "--daily-usd", figure)
    assert refused.exit_code == 2
    assert "Use 0" not in refused.output
    assert "Use None for no ceiling" in refused.output
    told = run(
        place, "ledger", "set", "--tenant", "acme", "--daily-usd", "None", "--daily-tokens", "9"
    )
    assert told.output == "ceilings of acme: a day 9 tokens, a month none\n"
