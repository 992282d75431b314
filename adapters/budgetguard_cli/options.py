"""The options that several commands have, and how they are read."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, cast

import typer

from budgetguard_cli.logs import is_there
from budgetguard_cli.screen import printable, refuse
from budgetguard_core import Budget, BudgetGuardError
from budgetguard_core.ledger import Ledger
from budgetguard_core.profiles import load_profile

_SQLITE = "sqlite:///"


def dollars(text: str) -> Decimal:
    """Read an amount of US dollars."""
    try:
        return Decimal(text)
    except InvalidOperation:
        msg = f"must be an amount of US dollars, got {text[:40]!r}. Use 20."
        raise typer.BadParameter(msg) from None


def _quota(text: str) -> tuple[str, int]:
    tool, _, number = text.rpartition("=")
    if not tool or not re.fullmatch("[0-9]{1,18}", number):
        msg = f"must be a tool and a whole number, such as search_web=3, got {text[:40]!r}."
        raise typer.BadParameter(msg)
    return tool, int(number)


AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Logs = Annotated[
    list[str], typer.Argument(metavar="LOG", help="Event logs, also gzipped, or folders of them.")
]
LedgerUrl = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="URL",
        envvar="BUDGETGUARD_LEDGER",
        help="sqlite:///file, redis://... or postgresql://...; a file in the home directory if "
        "left out.",
    ),
]
ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="The profile that the caps come from; other options win over it.",
        envvar="BUDGETGUARD_PROFILE",
    ),
]


def _budget(
    profile: ProfileName = None,
    max_iterations: Annotated[int | None, typer.Option(help="Turns of the loop.")] = None,
    max_model_calls: Annotated[int | None, typer.Option(help="Model calls, with retries.")] = None,
    max_tool_calls: Annotated[int | None, typer.Option(help="Tool calls.")] = None,
    max_total_tokens: Annotated[
        int | None, typer.Option(help="Tokens, prompt plus completion.")
    ] = None,
    max_output_tokens_per_call: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Completion tokens of one call.")
    ] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Seconds from the start on.")] = None,
    max_cost_usd: Annotated[
        Decimal | None, typer.Option(parser=dollars, help="US dollars, exact.")
    ] = None,
    tool_quota: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_quota,
            metavar="TOOL=N",
            help="Calls of one tool, by name or pattern: search_web=3. May be given again.",
        ),
    ] = None,
    count_unpriced_as_zero: Annotated[
        bool,
        typer.Option(
            "--count-unpriced-as-zero",
            help="Models of unknown price are free under --max-cost-usd.",
        ),
    ] = False,
    loop_detection: Annotated[bool, typer.Option(help="Stop what brings nothing new.")] = True,
) -> Budget:
    """Return the budget of these options; what they leave out has no cap, or the profile's."""
    given: dict[str, Any] = {
        name: cap for name, cap in locals().items() if name.startswith("max_") and cap is not None
    }
    if tool_quota:
        given["tool_quotas"] = dict(tool_quota)
    if count_unpriced_as_zero:
        given["on_unpriced"] = "count_zero"
    if not loop_detection:
        given["loop_detection"] = None
    try:
        own = Budget(**given)
        return load_profile(profile).under(own) if profile else own
    except BudgetGuardError as error:
        refuse(str(error))


def budgeted(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a budget in the place of its parameter `budget`."""
    options = inspect.signature(_budget, eval_str=True).parameters
    parameters: list[inspect.Parameter] = []
    for name, one in inspect.signature(command, eval_str=True).parameters.items():
        parameters += options.values() if name == "budget" else [one]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        budget = _budget(**{name: given.pop(name) for name in options})
        command(budget=budget, **given)

    keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    cast("Any", call).__signature__ = inspect.Signature(keywords)
    return call


@contextmanager
def open_ledger(url: str | None, *, may_be_new: bool = False) -> Generator[Ledger]:
    """Open the ledger of a command, which ends with 2 and one sentence on what is wrong.

    One that `may_be_new` is made where there is none. Else a wrong path would be an empty ledger,
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
