"""The commands and their options."""

from __future__ import annotations

import io
import sys
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from budgetguard_cli.ledger import register as register_ledger
from budgetguard_cli.replay import JsonReport, TextReport, Unreadable, check, replay_files
from budgetguard_core import Budget, BudgetGuardError, LoopDetection

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

register_ledger(app)


class OnUnpriced(StrEnum):
    """What a cap on dollars does with a model of unknown price."""

    STOP = "stop"
    COUNT_ZERO = "count_zero"


@app.callback()
def budgetguard() -> None:
    """Bound agent loops: see a runaway stopped, or replay recorded runs against a budget."""
    for stream in (sys.stdout, sys.stderr):
        # A file's name may hold what the terminal cannot show.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@app.command()
def demo() -> None:
    """Stop a runaway: a real loop over HTTP against a model that never changes its mind.

    Ends with 0, or with 1 when a section failed.
    """
    from budgetguard_cli.demo import run_demo

    if not run_demo(Console()):
        raise typer.Exit(1)


@app.command()
def replay(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Recorded runs as JSON Lines, also gzipped; - is standard input. Either one "
            "trajectory a line, or BudgetGuard's own event log.",
        ),
    ],
    max_iterations: Annotated[int | None, typer.Option(help="Turns of the loop.")] = None,
    max_model_calls: Annotated[int | None, typer.Option(help="Model calls, with retries.")] = None,
    max_tool_calls: Annotated[int | None, typer.Option(help="Tool calls.")] = None,
    max_total_tokens: Annotated[
        int | None, typer.Option(help="Tokens, prompt plus completion.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Seconds; trajectories have no times.")
    ] = None,
    max_cost_usd: Annotated[str | None, typer.Option(help="US dollars, exact.")] = None,
    on_unpriced: Annotated[
        OnUnpriced, typer.Option(help="What --max-cost-usd does with an unknown price.")
    ] = OnUnpriced.STOP,
    loop_detection: Annotated[bool, typer.Option(help="Stop runs that bring nothing new.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON Lines: stopped runs, files, all.")
    ] = False,
) -> None:
    """Replay recorded runs against a budget: what it would stop, cut and save.

    A run goes on as recorded until the budget stops it; that a correction might have brought the
    model back is not assumed. Ends with 0, with 1 when a line could not be read (the rest is
    replayed), and with 2 when an option or a file is wrong.
    """
    try:
        budget = Budget(
            max_iterations=max_iterations,
            max_model_calls=max_model_calls,
            max_tool_calls=max_tool_calls,
            max_total_tokens=max_total_tokens,
            max_seconds=max_seconds,
            max_cost_usd=None if max_cost_usd is None else _dollars(max_cost_usd),
            on_unpriced=on_unpriced.value,
            loop_detection=LoopDetection() if loop_detection else None,
        )
    except BudgetGuardError as error:
        _refuse(str(error))
    errors = Console(stderr=True)
    try:
        check(files)
        report = JsonReport(sys.stdout, budget) if as_json else TextReport(Console(), budget)
        clean = replay_files(files, budget, report, errors, progress=errors.is_terminal)
    except Unreadable as error:
        _refuse(str(error))
    if not clean:
        raise typer.Exit(1)


@app.command()
def baseline(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG...",
            help="Recorded runs, as `budgetguard replay` reads them; - is standard input.",
        ),
    ],
    every: Annotated[
        bool, typer.Option("--all", help="Also runs that did not end well, or do not say.")
    ] = False,
) -> None:
    """Record which tools runs call, as the baseline of `ToolMix`: JSON on standard output.

    Only runs that ended well are taken. Ends with 0, with 1 when a line could not be read (the
    rest is recorded), and with 2 when there is nothing to record, or a file is wrong.
    """
    from budgetguard_cli.baseline import Recorder

    errors = Console(stderr=True)
    recorder = Recorder(every, errors)
    try:
        check(files)
        recorded = recorder.baseline(files)
    except (BudgetGuardError, Unreadable) as error:
        _refuse(str(error))
    typer.echo(recorded.model_dump_json())
    typer.echo(
        f"{recorded.runs:,} runs recorded, {recorder.left_out:,} left out, "
        f"{recorder.problems:,} lines not read.",
        err=True,
    )
    if recorder.problems:
        raise typer.Exit(1)


def _dollars(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        msg = f"must be an amount of US dollars, got {text[:40]!r}."
        raise typer.BadParameter(msg, param_hint="--max-cost-usd") from None


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"budgetguard: {sentence}", err=True)
    raise typer.Exit(2)
