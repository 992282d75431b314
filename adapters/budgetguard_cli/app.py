"""The commands, in the panels of `--help`."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from budgetguard_cli import ledger
from budgetguard_cli.calibrate import calibrate
from budgetguard_cli.demo import demo
from budgetguard_cli.doctor import doctor
from budgetguard_cli.kill import kill, revive
from budgetguard_cli.quickstart import quickstart
from budgetguard_cli.replay import replay
from budgetguard_cli.report import report
from budgetguard_cli.run.command import run
from budgetguard_cli.show import show
from budgetguard_cli.watch import watch


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
_ledger = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="The ledger of all tenants."
)


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


_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Start": (demo, quickstart, doctor),
    "Look": (show, watch, report),
    "Tune": (calibrate, replay),
    "Tenants": (kill, revive),
}
for _panel, _functions in _PANELS.items():
    for _function in _functions:
        app.command(rich_help_panel=_panel)(_function)
    if _panel == "Start":
        # The arguments of a script are its own, not those of `run`.
        _settings = {"allow_interspersed_args": False}
        app.command(rich_help_panel=_panel, context_settings=_settings)(run)
for _function in (ledger.show, ledger.reconcile, ledger.check, ledger.adopt):
    _ledger.command()(_function)
_ledger.command("set")(ledger.set_ceilings)
app.add_typer(_ledger, name="ledger", rich_help_panel="Tenants")
