"""`budgetguard run` on scripts of every shape: how they are started, and how they start others."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from budgetguard_cli.app import app
from budgetguard_core.ledger import Ledger
from cli.test_run import ASK, start

__all__ = ["start"]

FORKS = (
    ASK
    + """
import threading
begun, release = threading.Event(), threading.Event()
def waits():
    ask("thread")
    begun.set()
    release.wait(60)
thread = threading.Thread(target=waits)
thread.start()
begun.wait(60)
child = os.fork()
if child == 0:
    code = 9
    try:
        ask("forked")
        code = 0
    finally:
        os._exit(code)
print("CODE", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
release.set()
thread.join()
for _ in range(9):
    try:
        ask("after")
    except Exception:
        pass
"""
)


@pytest.mark.slow
def test_a_script_that_forks_after_its_threads(start):
    with start(FORKS, "--max-model-calls", 3) as run:
        assert run.end() == 3, run.err
        assert run.asked == {"thread": 1, "forked": 1, "after": 1}
    assert run.out == "CODE 0\n"


EXECS = (
    ASK
    + """
ask("before")
os.execv(sys.executable, [sys.executable, "ask.py", "after"])
"""
)


@pytest.mark.slow
def test_a_script_that_becomes_another_is_bounded_on_and_found_by_the_id_that_is_printed(
    start, tmp_path
):
    with start(EXECS, "--max-model-calls", 1, BUDGETGUARD_LOG=str(tmp_path / "logs")) as run:
        assert run.end() == 3, run.err
        assert run.asked == {"before": 1}
    assert re.search(r"max_model_calls +1 +1 *\n", run.err)
    (printed,) = re.findall(r" run ([0-9a-f]{12}) *\n", run.err)
    # The log of the second process has that id, too, and more behind it.
    environment = {"BUDGETGUARD_LOG": str(tmp_path / "logs")}
    shown = CliRunner().invoke(app, ["show", printed, "--json"], env=environment)
    (line,) = shown.stdout.splitlines()
    assert re.fullmatch(f"{printed}[0-9a-f]{{20}}", json.loads(line)["run_id"])
    assert len(list((tmp_path / "logs").iterdir())) == 2


READS = """
import sys
for line in sys.stdin:
    print("READ", line.strip())
print("ARGS", sys.argv[1:])
sys.exit("ENDED: é")
"""


def test_standard_input_arguments_and_a_text_as_exit_code_are_the_scripts_own(start):
    arguments = ["script.py", "", "a b", "--max-iterations", "'\"$HOME", "é", "-m", "--"]
    with start(READS, "--max-seconds", 60, arguments=arguments) as run:
        assert run.end("one\ntwo\n") == 1, run.err
    assert run.out == f"READ one\nREAD two\nARGS {arguments[1:]}\n"
    assert "ENDED: é" in run.err


@pytest.mark.sample(2)
@pytest.mark.parametrize(("code", "ends"), [("None", 4), ("300", 300 % 256)])
def test_numbers_as_exit_codes(start, code, ends):
    with start(f"import sys; sys.exit({code})", "--max-seconds", 60) as run:
        assert run.end() == ends, run.err


PACKAGE = """
import sys
from . import tools
from .tools import ask
ask("package")
print(__package__, sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agentic", "prüfung"])
def test_a_package_with_relative_imports(start, tmp_path, name):
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(PACKAGE)
    (package / "tools.py").write_text(ASK)
    with start("", "--max-model-calls", 5, arguments=["-m", name, "-x", "é"]) as run:
        assert run.end() == 0, run.err
        assert run.asked == {"package": 1}
    assert run.out == f"{name} ['-x', 'é']\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "file"),
    [("ordner mit ü/größe.py", "größe.py"), ("ordner mit ü", "__main__.py")],
)
def test_a_script_or_a_folder_with_other_letters(start, tmp_path, script, file):
    folder = tmp_path / "ordner mit ü"
    folder.mkdir()
    (folder / file).write_text("import helfer, sys; print(helfer.__name__, sys.argv, __name__)")
    (folder / "helfer.py").write_text("")
    with start("", "--max-seconds", 60, arguments=[script]) as run:
        assert run.end() == 4, run.err
    assert run.out == f"helfer ['{script}'] __main__\n"


@pytest.mark.slow
def test_a_ledger_is_charged_by_every_process_and_its_tenant_is_a_limit(start, tmp_path):
    url = f"sqlite:///{tmp_path}/ledger.sqlite3"
    script = (
        ASK + "import subprocess\nask('one')\nsubprocess.run([sys.executable, 'ask.py', 'two'])\n"
    )
    options = ("--max-model-calls", 9, "--ledger", url, "--tenant", "acme")
    with start(script, *options) as run:
        assert run.end() == 2
    assert "a ceiling must be set for 'acme'" in run.err
    ledger = Ledger(url)
    ledger.set_ceilings("acme", daily_usd=100)
    with start(script, *options) as run:
        assert run.end() == 0, run.err
        assert run.server.hits == 2
    try:
        days = [row for row in ledger.windows() if row.window[0] == "d"]  # two at midnight
        assert sum(row.spent_tokens for row in days) == 220
        ledger.kill(tenant="acme", who="ann", why="enough")
    finally:
        ledger.close()
    with start(script, *options) as run:
        assert run.end() == 3, run.err
        assert run.server.hits == 0
    assert "acme" in run.err
