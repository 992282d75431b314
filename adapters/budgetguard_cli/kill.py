"""`budgetguard kill` and `revive`: who is stopped, in every process."""

from __future__ import annotations

from getpass import getuser
from typing import Annotated

import typer

from budgetguard_cli.options import AsJson, LedgerUrl, opened_ledger
from budgetguard_cli.runs import read_runs
from budgetguard_cli.screen import answer, only, refuse
from budgetguard_cli.show import log_folder, logs_of


def kill(
    url: LedgerUrl = None,
    tenant: Annotated[str | None, typer.Option(help="Stop this tenant.")] = None,
    run: Annotated[
        str | None,
        typer.Option(help="Stop this run; of one in BUDGETGUARD_LOG the beginning of its id does."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop everything.")] = False,
    why: Annotated[str, typer.Option(help="For the record, and in the run's outcome.")] = "",
    who: Annotated[str | None, typer.Option(help="You, if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Stop a run, a tenant or everything, in every process.

    It holds until it is revived. Processes see it within half a second and a trip to the ledger.

    Example: budgetguard kill --tenant acme --why "spends without end"
    """
    _one_of(tenant, run, everything)
    with opened_ledger(url) as ledger:
        who, run = who or _user(), _whole_id(run)
        done = ledger.kill(tenant=tenant, run=run, everything=everything, who=who, why=why)
        answer(as_json, [done._asdict()], done.detail)


def revive(
    url: LedgerUrl = None,
    tenant: Annotated[str | None, typer.Option(help="This tenant.")] = None,
    run: Annotated[str | None, typer.Option(help="This run, by the beginning of its id.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The switch for everything.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take a kill switch back: new runs may start.

    What it stopped stays stopped. Other switches stay: a tenant that was killed by name stays
    killed after `revive --all`.

    Example: budgetguard revive --tenant acme
    """
    _one_of(tenant, run, everything)
    with opened_ledger(url) as ledger:
        before = {kill.flag: kill for kill in ledger.kills()}
        if run is not None:
            run = only(run, (flag[2:] for flag in before if flag.startswith("r:"))) or run
        ledger.revive(tenant=tenant, run=run, everything=everything)
        left = ledger.kills()
    revived = [kill for flag, kill in before.items() if flag not in {one.flag for one in left}]
    said = [f"revived: {kill.detail}" for kill in revived]
    said = said or ["nothing was revived: no such kill switch was set"]
    said += [f"still killed: {kill.detail}" for kill in left]
    answer(as_json, (kill._asdict() for kill in revived), *said)


def _one_of(tenant: str | None, run: str | None, everything: bool) -> None:
    given = (tenant is not None) + (run is not None) + everything
    if given != 1:
        refuse(f"exactly one of --tenant, --run and --all must be given, got {given}. Name one.")


def _whole_id(run: str | None) -> str | None:
    """Return the id of the only logged run that begins so; else what was given: it may begin."""
    if run is None or log_folder() is None:
        return run
    found, _ = read_runs(logs_of(run))
    return only(run, (id_ for one in found for id_ in one.nodes)) or run


def _user() -> str:
    try:
        return getuser()
    except (OSError, KeyError, ImportError):
        return ""
