"""The commands, in the panels of `--help`."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any, cast

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from budgetguard_cli import ledger
from budgetguard_cli.calibrate import calibrate
from budgetguard_cli.demo import demo
from budgetguard_cli.doctor import doctor
from budgetguard_cli.quickstart import quickstart
from budgetguard_cli.replay import replay
from budgetguard_cli.report import report
from budgetguard_cli.run.command import run
from budgetguard_cli.show import show
from budgetguard_cli.watch import watch


class _Named:
    """A command whose help names values, not the types of Python: `--max-seconds SECONDS`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = cast("Any", super()).get_params(ctx)
        for param in params:
            name = param.name.rpartition("_")[2].upper()
            param.metavar = param.metavar or ("" if getattr(param, "is_flag", False) else name)
            if isinstance(param, TyperArgument):
                vars(param)["display_type_rich"] = _no_type
        return params


def _no_type(ctx: Any) -> None:
    del ctx


class _Command(_Named, TyperCommand):
    """One command."""


class _Commands(_Named, TyperGroup):
    """All commands, in panels in their help alone: an error stays one line for a script."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = "rich"
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_ledger = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The ledger of all tenants: what they spent, and their ceilings.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
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


_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Start": (demo, quickstart, doctor, run),
    "Look": (show, watch, report),
    "Tune": (calibrate, replay),
    "Tenants": (ledger.kill, ledger.revive),
}
for _panel, _functions in _PANELS.items():
    for _function in _functions:
        # The arguments of a script are its own, not those of `run`.
        _settings = {"allow_interspersed_args": _function is not run}
        app.command(cls=_Command, rich_help_panel=_panel, context_settings=_settings)(_function)
_ledger.command(cls=_Command)(ledger.show)
_ledger.command("set", cls=_Command)(ledger.set_ceilings)
for _function in (ledger.runs, ledger.reconcile, ledger.check, ledger.adopt):
    _ledger.command(cls=_Command)(_function)
app.add_typer(_ledger, name="ledger", rich_help_panel="Tenants")
