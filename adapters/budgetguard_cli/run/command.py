"""`budgetguard run`: its options, and its exit code."""

from __future__ import annotations

import io
import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from budgetguard_cli.logs import is_there
from budgetguard_cli.options import budgeted
from budgetguard_cli.screen import printable, refuse, write_json
from budgetguard_core import Budget, BudgetGuardError
from budgetguard_core.ledger import Ledger

if TYPE_CHECKING:
    from budgetguard_cli.run.report import RunReport

STOPPED = 3
NOTHING_SEEN = 4


@budgeted
def run(
    script: Annotated[
        list[str], typer.Argument(help="A Python script and its arguments; with -m, a module.")
    ],
    budget: Budget,
    is_module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
    ledger: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Charged as well, for --tenant; BUDGETGUARD_LEDGER if left out."
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Whom the run is for.")] = None,
    grace: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=3600,
            metavar="SECONDS",
            help="To end after a stop; then the script is interrupted, terminated and killed, with "
            "as long in between.",
        ),
    ] = 10.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="The report as one JSON object, not as a table.")
    ] = False,
) -> None:
    """Run a script, unchanged, under a budget, with all its processes.

    Its threads and frameworks are included. Calls of models are bounded at HTTP, below every
    client over httpx; runs of LangGraph, the OpenAI Agents SDK, Strands and Pydantic AI end as
    their own partial results. Caps hold for all processes together. The report goes to standard
    error.

    Examples: budgetguard run --max-cost-usd 5 agent.py --verbose;
    budgetguard run --profile research -m my.agent

    Ends with 3 when a limit ended a run, whatever the script says; with 4 when the script ended
    with 0 and no call of a model was seen; else as the script did (128 and the number of a signal
    that killed it); with 2 when an option or a file is wrong.
    """
    if os.name != "posix":
        refuse("run needs a POSIX system, got another. Use the adapters in the script.")
    # They need one to be imported.
    from budgetguard_cli.run.folder import RUN, RunFolder
    from budgetguard_cli.run.report import RunReport
    from budgetguard_cli.run.script import run_script

    if RUN in os.environ:
        refuse("this is bounded by a `budgetguard run` already, got a second. Use python instead.")
    _check_script(script[0], is_module=is_module)
    if tenant is not None:
        ledger = ledger or os.environ.get("BUDGETGUARD_LEDGER")
    if (ledger is None) != (tenant is None):
        refuse("--ledger and --tenant must be given together, got one. Give both.")
    if budget.profile is None and not budget.caps():
        refuse(
            "a run must have a budget, got neither a profile nor a cap. Use --max-cost-usd 5, or "
            "--profile research."
        )
    try:
        if tenant is not None:
            with Ledger(ledger) as ledger_of_run:
                ledger_of_run.require_ceiling(tenant)
        with RunFolder.made(budget, ledger=ledger, tenant=tenant) as folder:
            command = ["-m", *script] if is_module else script
            code = run_script(command, folder, budget, grace_s=grace)
            report = RunReport(folder, budget, code)
    except BudgetGuardError as error:
        refuse(str(error))
    _write(report, as_json)
    if report.stops:
        code = STOPPED
    elif code == 0 and not report.saw_a_call:
        code = NOTHING_SEEN
    raise typer.Exit(code)


def _write(report: RunReport, as_json: bool) -> None:
    console = Console(stderr=True)
    with console.capture() as captured:  # or it would end the command itself
        console.print(*report.parts(), sep="\n")
    try:
        if as_json:
            write_json(report.plain(), errors=True)
        else:
            sys.stderr.write(captured.get())
        sys.stderr.flush()
    except OSError:
        # Nobody reads it any more: the exit code still tells. What is buffered would fail again.
        sys.stderr = io.StringIO()


def _check_script(name: str, *, is_module: bool) -> None:
    if is_module:
        top = name.partition(".")[0]
        if PathFinder.find_spec(top, ["", *sys.path]) is None:
            refuse(f"-m must name a module, got {printable(name)}, which is not installed here.")
    elif not is_there(name):
        refuse(f"the script must be a file, got {printable(name)}, which does not exist. Check it.")
