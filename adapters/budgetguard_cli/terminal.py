"""What a command says to the person at the terminal."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table

_LONGEST = 300


def printable(text: str) -> str:
    """Make a text from outside fit for a terminal: one line, no control characters, 300 at most."""
    line = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text[: _LONGEST + 1]
    )
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def table(*columns: str, title: str | None = None) -> Table:
    """Return a table that folds what is too long for the terminal: nothing of it is cut."""
    made = Table(title=title)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def complain(errors: Console, text: str) -> None:
    """Say what is wrong with a line."""
    errors.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def refuse(sentence: str) -> NoReturn:
    """End the command with 2 and a sentence."""
    typer.echo(f"budgetguard: {sentence}", err=True)
    raise typer.Exit(2)
