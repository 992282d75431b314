"""The command without its extra, and what it says of itself."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib import metadata

import pytest
import typer
from typer.testing import CliRunner

import layout
from budgetguard_cli.app import app
from budgetguard_cli.screen import printable
from run_logs import write


@pytest.mark.parametrize(
    ("blocked", "named"), [(["typer", "rich"], "rich and typer"), (["rich"], "rich,")]
)
def test_without_the_extra_one_line_says_what_to_install(blocked, named):
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "from budgetguard_cli.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert named in line
    assert 'pip install ".[cli]"' in line


@pytest.mark.sample(2)
@pytest.mark.parametrize("columns", ["80", "140"])
def test_help_groups_the_commands_in_panels(columns):
    done = CliRunner().invoke(app, ["--help"], env={"COLUMNS": columns})
    assert done.exit_code == 0
    places = [done.output.index(f"─ {panel} ─") for panel in ("Start", "Look", "Tune", "Tenants")]
    assert places == sorted(places)
    assert max(map(len, done.output.splitlines())) <= int(columns)
    rows = re.findall(r"│ (\w+) ", done.output)
    assert {command[0] for command in COMMANDS} <= set(rows)


def test_the_version_is_that_of_the_distribution(budgetguard):
    done = budgetguard("--version")
    assert (done.returncode, done.stdout.decode().strip()) == (
        0,
        f"budgetguard {metadata.version('budgetguard')}",
    )


def commands(group, path=()):
    for name, one in group.commands.items():
        yield from commands(one, (*path, name)) if hasattr(one, "commands") else [(*path, name)]


COMMANDS = sorted(commands(typer.main.get_command(app)))


@pytest.mark.sample(5)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_an_example_and_json_where_a_machine_may_read_it(command):
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0
    text = " ".join(done.output.split())
    assert re.search(rf"Examples?: (BUDGETGUARD_LOG=logs )?budgetguard {' '.join(command)}\b", text)
    assert "--json" in text


@pytest.mark.slow
def test_help_names_every_cap(budgetguard):
    from budgetguard_core.budget import DIMENSIONS

    text = budgetguard("replay", "--help").stdout.decode()
    assert [name for name in DIMENSIONS if f"--{name.replace('_', '-')} " not in text] == []


def test_the_extra_is_not_needed_to_import_the_core():
    program = "import budgetguard_core, sys; sys.exit('rich' in sys.modules)"
    subprocess.run([sys.executable, "-I", "-c", program], check=True)


@pytest.mark.parametrize("command", [*COMMANDS, ("ledger",)], ids=" ".join)
def test_the_help_of_a_command_fits_and_names_no_type_of_python(command):
    text = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, text.splitlines())) <= 80
    for wrong in ("[[", "...}...", "...]...", "<", "INTEGER", ";..."):
        assert wrong not in text.replace("0.1<=x<=3600", "")


def test_the_readme_names_every_command():
    text = (layout.ROOT / "adapters/budgetguard_cli/README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[a-z]+", " ".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))))
    assert {command[-1] for command in COMMANDS} <= named


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
@pytest.mark.parametrize("command", ["demo --quick --framework loop", "show log.jsonl"])
def test_closed_output_is_no_error(tmp_path, command, closed):
    write(tmp_path / "log.jsonl")
    shell = f"exec {shlex.quote(sys.executable)} -P -m budgetguard_cli {command} {closed}"
    done = subprocess.run(
        ["/bin/sh", "-c", shell], cwd=tmp_path, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, b"Traceback" in done.stdout + done.stderr) == (0, False), done.stderr


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "command",
    [
        ["show", "NAME"],
        ["watch", "NAME", "--once"],
        ["doctor", "NAME"],
        ["run", "--max-iterations", "3", "NAME"],
        ["ledger", "runs", "--ledger", "sqlite:///NAME"],
    ],
    ids=" ".join,
)
def test_a_name_that_no_file_can_have_is_one_that_is_not_there(budgetguard, tmp_path, command):
    arguments = [one.replace("NAME", "x" * 300) for one in command]
    done = budgetguard(*arguments, BUDGETGUARD_LOG=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert b"output" not in done.stderr


def test_a_text_from_outside_is_bounded_as_it_is_shown():
    assert printable("a" * 300) == "a" * 300
    for text in ("a" * 301, "\x1b" * 300, "\x1b" * 10_000):
        shown = printable(text)
        assert len(shown) == 300
        assert shown.endswith("...")
