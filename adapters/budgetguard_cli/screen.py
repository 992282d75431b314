"""The terminal: texts, tables, amounts and times as a person reads them, and JSON for machines."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_LONGEST = 300


def printable(text: str) -> str:
    """Make a text from outside fit for a terminal: one line, no control characters, 300 at most."""
    line = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text[: _LONGEST + 1]
    )
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def refuse(sentence: str) -> NoReturn:
    """End the command with 2 and a sentence."""
    typer.echo(f"budgetguard: {sentence}", err=True)
    raise typer.Exit(2)


def only(beginning: str, ids: Iterable[str]) -> str | None:
    """Return the id that begins so, the shortest where it begins all; None where none does.

    Ends the command with 2 where several do.
    """
    begun = {one for one in ids if beginning and one.startswith(beginning)}
    found = sorted(begun, key=lambda one: (len(one), one))
    if any(not one.startswith(found[0]) for one in found):
        names = ", ".join(printable(one)[:40] for one in found[:5])
        refuse(f"{printable(beginning)[:80]!r} must begin one id, got {names}. Write more of it.")
    return found[0] if found else None


def cell(text: object, style: str = "") -> Text:
    """Return a text from outside for a table or a tree: no markup in it is obeyed."""
    return Text(printable(str(text)), style)


def table(*columns: str, right: Iterable[str] = (), title: str | None = None) -> Table:
    """Return an empty table, which folds what is too long, but the figures in columns at the right.

    Nothing of it is cut.
    """
    made = Table(box=None, pad_edge=False, title=title)
    for column in columns:
        is_figure = column in right
        made.add_column(
            column, overflow="fold", no_wrap=is_figure, justify="right" if is_figure else "left"
        )
    return made


def say(*parts: object, errors: bool = False) -> None:
    """Print tables, and texts as whole lines: a line that is folded could not be pasted."""
    for part in parts:
        is_text = isinstance(part, str)
        Console(stderr=errors).print(cell(part) if is_text else part, soft_wrap=is_text)


def write_json(*records: Mapping[str, object], errors: bool = False) -> None:
    """Write one object a line; amounts are strings, so that no digit is lost."""
    for record in records:
        typer.echo(json.dumps(record, default=str), err=errors)


def answer(as_json: bool, records: Iterable[Mapping[str, object]], *parts: object) -> None:
    """Write records for machines, or the same for people."""
    write_json(*records) if as_json else say(*parts)


def in_dollars(amount: Decimal) -> str:
    """Write an amount with four significant digits at least, and whole cents."""
    places = max(2, 3 - amount.adjusted()) if amount else 2
    whole, _, cents = f"{amount:,.{places}f}".partition(".")
    return f"${whole}.{cents.rstrip('0'):0<2}"


def figure(value: float | Decimal) -> str:
    """Write a number, an amount of dollars or seconds."""
    if isinstance(value, Decimal):
        return in_dollars(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def counted(number: int, noun: str) -> str:
    """Write a number of things."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def at_minute(wall_ns: int) -> str:
    """Write a time of a log, in UTC."""
    return dt.datetime.fromtimestamp(wall_ns // 1_000_000_000, dt.UTC).strftime("%Y-%m-%d %H:%M")
