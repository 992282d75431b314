"""`budgetguard doctor`: its options, and what it prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from budgetguard_cli.logs import is_there
from budgetguard_cli.options import AsJson, LedgerUrl
from budgetguard_cli.screen import printable, refuse, table, write_json

if TYPE_CHECKING:
    from budgetguard_cli.doctor.checks import Finding


def doctor(
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="SCRIPT",
            help="A Python script: what it imports is looked at, and nothing of it is run. "
            "Without, everything that is installed.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model whose price is needed; again for more.", show_default=False),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="The profile that is to be used.",
            envvar="BUDGETGUARD_PROFILE",
            show_envvar=True,
            show_default=False,
        ),
    ] = None,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Check what would hold here: frameworks, prices, ledger.

    For a script: whether everything that it uses to call models is covered, in a supported
    release. What it imports in a way that its text does not show is not seen.

    Example: budgetguard doctor agent.py --model gpt-4o --profile research

    Ends with 0; with 1 when something that is used is not covered or would not hold; with 2 when
    the script cannot be found.
    """
    from budgetguard_cli.doctor import checks
    from budgetguard_cli.doctor.declared import declared
    from budgetguard_cli.doctor.source import read_source

    source = None
    if script is not None:
        if not is_there(script) or not Path(script).is_file():
            refuse(f"the script must be a file, got {printable(script)}. Check the path.")
        source = read_source(Path(script))
    everything = declared()
    found = list(checks.packages(everything, source))
    models = list(model or ())
    if source is not None:
        found += checks.ways(everything, source)
        found += checks.mixes(everything, source)
        models += sorted(source.models - set(models))
        facts: list[tuple[checks.Status, str]] = [
            ("problem", problem) for problem in source.problems
        ]
        if not any(one.kind in ("framework", "client", "way") for one in found):
            facts.append(("note", "nothing that calls models was found in its imports."))
        found += [
            checks.Finding(kind="script", name=script or "", status=status, detail=detail)
            for status, detail in facts
        ]
    found += checks.models(models)
    found += checks.profile(profile)
    if ledger is not None:
        found.append(checks.ledger(ledger))
    if as_json:
        write_json(*map(asdict, found))
    else:
        looked = [script or "all that is installed", *(f"model {name}" for name in models)]
        looked += [f"profile {profile}"] if profile else []
        looked += ["the ledger"] if ledger is not None else []
        typer.echo(f"Looked at: {printable(', '.join(looked))}.")
        _print(one for one in found if one.kind != "run")
        if any(one.kind == "run" for one in found):
            typer.echo("\nUnder `budgetguard run` alone:")
            _print(one for one in found if one.kind == "run")
    if any(one.status == "problem" for one in found):
        raise typer.Exit(1)


def _print(found: Iterable[Finding]) -> None:
    styles = {"problem": "bold red", "note": "yellow"}
    rows = table("", "what", "name", "release", "finding")
    for one in found:
        rows.add_row(
            Text(one.status, style=styles.get(one.status, "")),
            one.kind,
            Text(printable(one.name)),
            one.version or "",
            Text(printable(one.detail)),
        )
    Console().print(rows)
