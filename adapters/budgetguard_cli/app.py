"""The commands and their options."""

from __future__ import annotations

import io
import logging
import sys
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup
from typer.models import CommandInfo

from budgetguard_cli.breakers import read_breakers
from budgetguard_cli.calibrate import register as register_calibrate
from budgetguard_cli.doctor.command import register as register_doctor
from budgetguard_cli.ledger import register as register_ledger
from budgetguard_cli.quickstart import register as register_quickstart
from budgetguard_cli.recordings import Unreadable, readable
from budgetguard_cli.replay import JsonReport, TextReport, replay_files
from budgetguard_cli.report import register as register_report
from budgetguard_cli.run.command import register as register_run
from budgetguard_cli.sections import SECTIONS
from budgetguard_cli.show import register as register_show
from budgetguard_cli.terminal import printable, refuse
from budgetguard_cli.watch import register as register_watch
from budgetguard_core import Budget, BudgetGuardError, LoopDetection


class _Commands(TyperGroup):
    """All commands, in panels in their help alone: an error stays one line for a script."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the help."""
        self.rich_markup_mode = "rich"
        for param in self.get_params(ctx):
            param.metavar = ""  # else a column says that a flag is a bool
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

register_calibrate(app)
register_doctor(app)
register_ledger(app)
register_quickstart(app)
register_report(app)
register_run(app)
register_show(app)
register_watch(app)


_PANELS = {
    "Start": ("demo", "quickstart", "doctor", "run"),
    "Look": ("show", "watch", "report"),
    "Tune": ("calibrate", "replay"),
    "Tenants": ("ledger", "kill", "revive", "runs"),
}


class OnUnpriced(StrEnum):
    """What a cap on dollars does with a model of unknown price."""

    STOP = "stop"
    COUNT_ZERO = "count_zero"


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"budgetguard {version('budgetguard')}")
        raise typer.Exit


@app.callback()
def budgetguard(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version, and end."
        ),
    ] = False,
) -> None:
    """Bound agent loops: see a runaway stopped, or replay recorded runs against a budget."""
    del show_version  # its callback has ended the command
    # Logs are lived through again by the engine; what it warns of was said when they were written.
    logging.getLogger("budgetguard").addHandler(logging.NullHandler())
    for stream in (sys.stdout, sys.stderr):
        # A file's name may hold what the terminal cannot show.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@app.command()
def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="One runaway of each framework, at once.")
    ] = False,
    framework: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Show this one: {', '.join(section.name for section in SECTIONS)}. "
            "May be given again.",
        ),
    ] = None,
) -> None:
    """Stop a runaway of each framework, on this machine alone.

    A real loop over HTTP against a model that never changes its mind.

    Example: budgetguard demo --quick

    Ends with 0, with 1 when a section failed, and with 2 when a framework is not known.
    """
    from budgetguard_cli.demo import run_demo

    unknown = [name for name in framework or () if name not in {one.name for one in SECTIONS}]
    if unknown:
        known = ", ".join(section.name for section in SECTIONS)
        refuse(f"--framework must be one of {known}, got {printable(unknown[0])}.")
    sections = [one for one in SECTIONS if not framework or one.name in framework]
    # FORCE_COLOR must not bring a cursor's codes into a file.
    console = Console(force_terminal=None if sys.stdout.isatty() else False)
    if not run_demo(console, sections, quick=quick):
        raise typer.Exit(1)


@app.command()
def replay(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Recorded runs as JSON Lines, also gzipped, or folders of them; - is standard "
            "input. Either one trajectory a line, or BudgetGuard's own event log.",
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
    tool_quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOOL=N",
            help="Calls of one tool, by name or pattern: search_web=3. May be given again.",
        ),
    ] = None,
    on_unpriced: Annotated[
        OnUnpriced, typer.Option(help="What --max-cost-usd does with an unknown price.")
    ] = OnUnpriced.STOP,
    loop_detection: Annotated[bool, typer.Option(help="Stop runs that bring nothing new.")] = True,
    breakers: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Breakers as JSON: the fields of a budget, such as velocity or circuit_breaker.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON Lines: stopped runs, files, all.")
    ] = False,
) -> None:
    """Replay recorded runs: what a budget would stop, cut and save.

    Example: budgetguard replay runs.jsonl --max-iterations 25 --tool-quota search_web=3

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
            tool_quotas=_quotas(tool_quota or []),
            on_unpriced=on_unpriced.value,
            loop_detection=LoopDetection() if loop_detection else None,
            **({} if breakers is None else read_breakers(breakers)),
        )
    except (BudgetGuardError, Unreadable) as error:
        refuse(str(error))
    errors = Console(stderr=True)
    try:
        named = readable(files)
        report = JsonReport(sys.stdout, budget) if as_json else TextReport(Console(), budget)
        clean = replay_files(named, budget, report, errors, progress=errors.is_terminal)
    except Unreadable as error:
        refuse(str(error))
    if not clean:
        raise typer.Exit(1)


def _dollars(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        msg = f"must be an amount of US dollars, got {text[:40]!r}."
        raise typer.BadParameter(msg, param_hint="--max-cost-usd") from None


def _quotas(given: list[str]) -> dict[str, int]:
    quotas: dict[str, int] = {}
    for text in given:
        tool, _, number = text.rpartition("=")
        if not tool or not number.isascii() or not number.isdigit() or len(number) > 18:
            msg = f"must be a tool and a whole number, such as search_web=3, got {text[:40]!r}."
            raise typer.BadParameter(msg, param_hint="--tool-quota")
        quotas[tool] = int(number)
    return quotas


def _group_commands() -> None:
    """Put each command into its panel of `--help`, in the order of the table."""
    order = {name: panel for panel, names in _PANELS.items() for name in names}

    def name_of(info: CommandInfo) -> str:
        return str(info.name or getattr(info.callback, "__name__", ""))

    for command in app.registered_commands:
        command.rich_help_panel = order[name_of(command)]
    for group in app.registered_groups:
        group.rich_help_panel = order[str(group.name)]
    app.registered_commands.sort(key=lambda one: list(order).index(name_of(one)))


_group_commands()
