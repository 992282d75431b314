"""The options that several commands have, and how they are read."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

import typer

from budgetguard_cli.logs import is_there
from budgetguard_cli.screen import printable, refuse
from budgetguard_core import BudgetGuardError
from budgetguard_core.ledger import Ledger

_SQLITE = "sqlite:///"


def dollars(text: str) -> Decimal:
    """Read an amount of US dollars."""
    try:
        return Decimal(text)
    except InvalidOperation:
        msg = f"must be an amount of US dollars, got {text[:40]!r}. Use 20."
        raise typer.BadParameter(msg) from None


AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Logs = Annotated[
    list[str],
    typer.Argument(
        metavar="LOG",
        help="BudgetGuard's event logs, also gzipped, or folders of them; - is standard input.",
    ),
]
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
ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="The profile that the caps come from; other options win over it.",
        envvar="BUDGETGUARD_PROFILE",
        show_envvar=True,
        show_default=False,
    ),
]
MaxIterations = Annotated[int | None, typer.Option(help="Turns of the loop.")]
MaxModelCalls = Annotated[int | None, typer.Option(help="Model calls, with retries.")]
MaxToolCalls = Annotated[int | None, typer.Option(help="Tool calls.")]
MaxTotalTokens = Annotated[int | None, typer.Option(help="Tokens, prompt plus completion.")]
MaxInputTokens = Annotated[int | None, typer.Option(help="Of them, those of prompts.")]
MaxOutputTokens = Annotated[int | None, typer.Option(help="Of them, those of completions.")]
MaxSeconds = Annotated[float | None, typer.Option(help="Seconds from the start on.")]
MaxCostUsd = Annotated[
    Decimal | None, typer.Option(parser=dollars, metavar="USD", help="US dollars, exact.")
]
LoopDetectionOn = Annotated[
    bool, typer.Option("--loop-detection/--no-loop-detection", help="Stop what brings nothing new.")
]
CountUnpricedAsZero = Annotated[
    bool,
    typer.Option(
        "--count-unpriced-as-zero", help="Models of unknown price are free under --max-cost-usd."
    ),
]


def budget_fields(
    caps: Mapping[str, Any], *, loop_detection: bool, count_unpriced_as_zero: bool
) -> dict[str, Any]:
    """Return the fields of a budget that options give; those that are left out have no cap."""
    given = {name: cap for name, cap in caps.items() if cap is not None}
    if count_unpriced_as_zero:
        given["on_unpriced"] = "count_zero"
    if not loop_detection:
        given["loop_detection"] = None
    return given


@contextmanager
def opened_ledger(url: str | None, *, may_be_new: bool = False) -> Generator[Ledger]:
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
                    f"a ledger must be there, got no file {printable(file)}. Name the one that "
                    "your processes use with --ledger, or make it with `budgetguard ledger set`."
                )
            yield ledger
    except BudgetGuardError as error:
        refuse(str(error))


def missing_file(ledger: Ledger) -> str | None:
    """Return the file of a ledger in SQLite that is not there yet."""
    file = ledger.url.removeprefix(_SQLITE)
    return None if file == ledger.url or is_there(file) else file
