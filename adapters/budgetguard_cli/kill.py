"""`budgetguard kill`, `revive` and `runs`: who works, and who is stopped."""

from __future__ import annotations

from getpass import getuser
from typing import Annotated, TypedDict

import typer
from rich.text import Text

from budgetguard_cli.ledger_option import AsJson, LedgerUrl, opened, print_json, shown
from budgetguard_cli.ledger_table import console, instant, table
from budgetguard_cli.terminal import refuse
from budgetguard_core.ledger import AliveRun


class Target(TypedDict):
    """What a kill switch is set for."""

    tenant: str | None
    run: str | None
    everything: bool


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(epilog='Example: budgetguard kill --tenant acme --why "spends without end"')(kill)
    app.command(epilog="Example: budgetguard revive --tenant acme")(revive)
    app.command(epilog="Example: budgetguard runs --ledger redis://10.0.0.5:6379/0")(runs)


def kill(
    url: LedgerUrl = None,
    tenant: Annotated[str | None, typer.Option(help="Stop this tenant.")] = None,
    run: Annotated[str | None, typer.Option(help="Stop this run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop everything.")] = False,
    why: Annotated[str, typer.Option(help="For the record, and in the run's outcome.")] = "",
    who: Annotated[str | None, typer.Option(help="You, if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Stop a run, a tenant or everything, in every process.

    It holds until it is revived. Processes see it within half a second and a trip to the ledger.
    """
    target = _one(tenant, run, everything)
    with opened(url) as ledger:
        done = ledger.kill(**target, who=who or _user(), why=why)
        if as_json:
            print_json([done._asdict()])
        else:
            console().print(Text(done.detail))


def revive(
    url: LedgerUrl = None,
    tenant: Annotated[str | None, typer.Option(help="This tenant.")] = None,
    run: Annotated[str | None, typer.Option(help="This run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The switch for everything.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take a kill switch back: new runs may start.

    What it stopped stays stopped. Other switches stay: a tenant that was killed by name stays
    killed after `revive --all`.
    """
    target = _one(tenant, run, everything)
    with opened(url) as ledger:
        before = {kill.flag: kill for kill in ledger.kills()}
        ledger.revive(**target)
        left = ledger.kills()
    revived = [kill for flag, kill in before.items() if flag not in {one.flag for one in left}]
    if as_json:
        print_json(kill._asdict() for kill in revived)
        return
    for kill in revived:
        console().print(Text(f"revived: {kill.detail}"))
    if not revived:
        console().print(Text("nothing was revived: no such kill switch was set"))
    for kill in left:
        console().print(Text(f"still killed: {kill.detail}"))


def runs(url: LedgerUrl = None, as_json: AsJson = False) -> None:
    """List the runs that are alive, and those whose process is silent."""
    with opened(url) as ledger:
        found = ledger.runs()
    if as_json:
        print_json(
            {name: getattr(run, name) for name in AliveRun.__dataclass_fields__} for run in found
        )
        return
    rows = table("run", "tenant", "host", "process", "since", "heard of")
    for run in found:
        rows.add_row(
            shown(run.run),
            ", ".join(map(shown, run.tenant)),
            shown(run.host),
            str(run.pid),
            instant(run.started),
            "silent" if run.silent else instant(run.seen),
        )
    console().print(rows if found else Text("no run is alive"))


def _one(tenant: str | None, run: str | None, everything: bool) -> Target:
    given = (tenant is not None) + (run is not None) + everything
    if given != 1:
        refuse(f"exactly one of --tenant, --run and --all must be given, got {given}. Name one.")
    return {"tenant": tenant, "run": run, "everything": everything}


def _user() -> str:
    try:
        return getuser()
    except (OSError, KeyError, ImportError):
        return ""
