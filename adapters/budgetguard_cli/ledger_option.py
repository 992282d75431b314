"""`--ledger`: which ledger a command speaks to, and how it says what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from typing import Annotated

import typer

from budgetguard_cli.recordings import is_there
from budgetguard_cli.terminal import refuse
from budgetguard_core import BudgetGuardError
from budgetguard_core.ledger import Ledger

LedgerUrl = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        envvar="BUDGETGUARD_LEDGER",
        show_envvar=True,
        help="sqlite:///file, redis://... or postgresql://...; a file in the home directory if "
        "left out.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]

_SQLITE = "sqlite:///"


@contextmanager
def opened(url: str | None, *, may_be_new: bool = False) -> Generator[Ledger]:
    """Open the ledger of a command, which ends with 2 and one sentence on what is wrong.

    Args:
        url: As the user gave it.
        may_be_new: Make the file where there is none. Else a wrong path would be an empty ledger,
            and a kill in it would stop nobody.
    """
    try:
        with Ledger(url, timeout=5.0) as ledger:
            file = missing_file(ledger)
            if file is not None and not may_be_new:
                refuse(
                    f"a ledger must be there, got no file {shown(file)}. Name the one that "
                    "your processes use with --ledger, or make it with `budgetguard ledger set`."
                )
            yield ledger
    except BudgetGuardError as error:
        refuse(str(error))


def missing_file(ledger: Ledger) -> str | None:
    """Return the file of a ledger in SQLite that is not there yet."""
    file = ledger.url.removeprefix(_SQLITE)
    return None if file == ledger.url or is_there(file) else file


def dollars(text: str, option: str) -> Decimal:
    """Read an amount of US dollars."""
    try:
        return Decimal(text)
    except InvalidOperation:
        refuse(f"{option} must be a number, got {text[:40]!r}. Use 20.")


def whole(text: str, option: str) -> int:
    """Read a number of tokens."""
    try:
        return int(text)
    except ValueError:
        refuse(f"{option} must be a whole number, got {text[:40]!r}. Use 100000.")


def print_json(records: Iterable[Mapping[str, object]]) -> None:
    """Write one object a line; amounts are strings, so that no digit is lost."""
    for record in records:
        sys.stdout.write(json.dumps(record, default=str) + "\n")


def shown(name: str) -> str:
    """Return a name as a terminal may show it."""
    return name if name.isprintable() else ascii(name)
