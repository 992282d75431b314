"""`budgetguard ledger`, `kill`, `revive` and `runs`: what tenants spent, and who is stopped."""

from __future__ import annotations

import csv
import datetime as dt
import json
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from getpass import getuser
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from budgetguard_core import BudgetGuardError
from budgetguard_core.ledger import AliveRun, Ledger, WindowUsage
from budgetguard_core.ledger.amounts import Amount, to_dollars
from budgetguard_core.ledger.reconcile import (
    expired_holds,
    is_long_gone,
    read_proofs,
    settle_hold,
)

_KINDS = {"d": "day", "m": "month"}

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

ledger_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="The ledger of all tenants."
)


class Format(StrEnum):
    """How an export is written."""

    CSV = "csv"
    JSON = "json"


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(ledger_app, name="ledger")
    app.command()(kill)
    app.command()(revive)
    app.command()(runs)


@contextmanager
def _opened(url: str | None) -> Generator[Ledger]:
    try:
        with Ledger(url, timeout=5.0) as ledger:
            yield ledger
    except BudgetGuardError as error:
        _refuse(str(error))


@ledger_app.command()
def show(
    url: LedgerUrl = None,
    tenant: Annotated[str | None, typer.Option(help="Only this one.")] = None,
    past: Annotated[bool, typer.Option("--past", help="Earlier days and months too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what tenants spent and reserved in each window, and how many runs are alive."""
    with _opened(url) as ledger:
        rows = [row for row in ledger.windows() if tenant in (None, row.key)]
        if not past:
            rows = list(_latest(rows))
        alive = [run for run in ledger.runs() if not run.silent]
        if as_json:
            _print_json(_window_record(row) for row in rows)
            return
        table = _table("tenant", "window", "spent", "reserved", "ceiling", "used", "runs alive")
        for row in rows:
            working = sum(row.key in run.tenant for run in alive)
            table.add_row(
                _shown(row.key),
                f"{_KINDS[row.window[0]]} {row.window[2:]}",
                _both(row.spent_usd, row.spent_tokens),
                _both(row.reserved_usd, row.reserved_tokens),
                _ceilings(row),
                _share(row),
                str(working) if row.window[0] == "d" else "",
            )
        console = Console()
        console.print(table)
        console.print(Text(f"ledger {ledger.id} at {ledger.url}"))
        for one in ledger.kills():
            console.print(Text(f"killed: {one.detail}"))


@ledger_app.command("set")
def set_(
    tenant: Annotated[
        str | None, typer.Argument(help="A tenant, or any other key.", show_default=False)
    ] = None,
    url: LedgerUrl = None,
    default: Annotated[
        bool, typer.Option("--default", help="The ceilings of all that have none of their own.")
    ] = False,
    daily_usd: Annotated[str | None, typer.Option(help="US dollars a day, or none.")] = None,
    monthly_usd: Annotated[str | None, typer.Option(help="US dollars a month, or none.")] = None,
    daily_tokens: Annotated[str | None, typer.Option(help="Tokens a day, or none.")] = None,
    monthly_tokens: Annotated[str | None, typer.Option(help="Tokens a month, or none.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Back to the default.")] = False,
) -> None:
    """Set a tenant's ceilings; what is not named stays. Seen by the next call of every process."""
    if (tenant is None) != default:
        _refuse("ledger set needs a tenant or --default, got neither or both. Name one.")
    given = (daily_usd, monthly_usd, daily_tokens, monthly_tokens)
    if clear == any(one is not None for one in given):
        _refuse("ledger set needs ceilings or --clear, got neither or both. Use --daily-usd 20.")
    with _opened(url) as ledger:
        if clear:
            ledger.clear_ceilings(tenant)
            return
        found = ledger.ceilings()
        stored = found.get(tenant or "") or found.get("", {})
        day, month = stored.get("d", Amount()), stored.get("m", Amount())
        ledger.set_ceilings(
            tenant,
            daily_usd=_dollars(daily_usd, day, "--daily-usd"),
            monthly_usd=_dollars(monthly_usd, month, "--monthly-usd"),
            daily_tokens=_tokens(daily_tokens, day, "--daily-tokens"),
            monthly_tokens=_tokens(monthly_tokens, month, "--monthly-tokens"),
        )


@ledger_app.command("runs")
def ledger_runs(url: LedgerUrl = None, as_json: AsJson = False) -> None:
    """List the runs that are alive; the same as `budgetguard runs`."""
    runs(url, as_json)


@ledger_app.command()
def export(
    url: LedgerUrl = None,
    format_: Annotated[Format, typer.Option("--format", help="csv or json.")] = Format.CSV,
) -> None:
    """Write every window that the ledger keeps to the standard output."""
    with _opened(url) as ledger:
        records = [_window_record(row) for row in ledger.windows()]
    if format_ is Format.JSON:
        _print_json(records)
        return
    fields = [*WindowUsage.__dataclass_fields__]
    writer = csv.DictWriter(sys.stdout, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**record, "key": _inert(record["key"])} for record in records)


@ledger_app.command()
def reconcile(
    url: LedgerUrl = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option("--log", help="Event logs: settle what they prove.", show_default=False),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Settle the rest as if all of it had been spent.")
    ] = False,
    hold: Annotated[
        str | None, typer.Option(help="Settle this one at --usd and --tokens: your word for it.")
    ] = None,
    usd: Annotated[str | None, typer.Option(help="What was really spent.")] = None,
    tokens: Annotated[int, typer.Option(help="What was really used.")] = 0,
) -> None:
    """List reservations whose process has gone, and settle them. They stay charged until then.

    Below full value only after twice their time to live, with a log in which their runs end.
    Ends with 1 when some are left.
    """
    with _opened(url) as ledger:
        waiting = expired_holds(ledger)
        proofs = read_proofs(logs or [])
        now = ledger.now()
        table = _table("hold", "run or process", "tenant", "charged", "reported", "made", "result")
        left = 0
        for one in waiting:
            proof = proofs.get(one.id)
            gone = is_long_gone(one, now)
            result = "to be settled"
            if hold == one.id and usd is not None:
                if not gone:
                    result = "its process may be alive: wait"
                else:
                    word = _dollars(usd, Amount(), "--usd") or Decimal(0)
                    result = _settled(ledger, one, _amount(word, tokens))
            elif proof is not None and proof.complete and gone:
                enough = proof.spent.usd >= one.spent.usd
                result = _settled(ledger, one, proof.spent) if enough else "the logs miss calls"
            elif full:
                result = _settled(ledger, one, None)
            left += not result.startswith("settled")
            table.add_row(
                _shown(one.id[:12]),
                _shown(one.owner[:24]),
                ", ".join(dict.fromkeys(_shown(key) for key, _ in one.windows)),
                _both(to_dollars(one.charge.usd), one.charge.tokens),
                _both(to_dollars(one.spent.usd), one.spent.tokens),
                _time(one.made),
                result,
            )
        Console().print(table if waiting else Text("nothing is to be reconciled"))
    if left:
        raise typer.Exit(1)


@ledger_app.command()
def adopt(url: LedgerUrl = None) -> None:
    """Accept the ledger as it is, after it was wiped or restored; processes that refused go on."""
    with _opened(url) as ledger:
        Console().print(Text(f"adopted: ledger {ledger.adopt()} at {ledger.url}"))


@ledger_app.command()
def check(url: LedgerUrl = None) -> None:
    """Compare every window with the sum of its reservations (SQLite). Ends with 1 on a gap."""
    with _opened(url) as ledger:
        wrong = ledger.check()
    for line in wrong:
        Console().print(Text(line))
    if wrong:
        raise typer.Exit(1)
    Console().print(Text("every window equals the sum of its reservations"))


def kill(
    url: LedgerUrl = None,
    tenant: Annotated[str | None, typer.Option(help="Stop this tenant.")] = None,
    run: Annotated[str | None, typer.Option(help="Stop this run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop everything.")] = False,
    why: Annotated[str, typer.Option(help="For the record, and in the run's outcome.")] = "",
    who: Annotated[str | None, typer.Option(help="You, if left out.")] = None,
) -> None:
    """Stop a run, a tenant or everything, in every process, until it is revived."""
    with _opened(url) as ledger:
        done = ledger.kill(
            tenant=tenant, run=run, everything=everything, who=who or _user(), why=why
        )
        Console().print(Text(done.detail))


def revive(
    url: LedgerUrl = None,
    tenant: Annotated[str | None, typer.Option(help="This tenant.")] = None,
    run: Annotated[str | None, typer.Option(help="This run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The switch for everything.")] = False,
) -> None:
    """Take a kill switch back. What it stopped stays stopped; new runs may start."""
    with _opened(url) as ledger:
        ledger.revive(tenant=tenant, run=run, everything=everything)


def runs(url: LedgerUrl = None, as_json: AsJson = False) -> None:
    """List the runs that processes are working on."""
    with _opened(url) as ledger:
        found = ledger.runs()
    if as_json:
        _print_json(_run_record(run) for run in found)
        return
    table = _table("run", "tenant", "host", "process", "since", "heard of")
    for run in found:
        table.add_row(
            _shown(run.run),
            ", ".join(map(_shown, run.tenant)),
            _shown(run.host),
            str(run.pid),
            _time(run.started),
            "silent" if run.silent else _time(run.seen),
        )
    Console().print(table if found else Text("no run is alive"))


def _latest(rows: Sequence[WindowUsage]) -> Iterable[WindowUsage]:
    last = {(row.key, row.window[0]): row.window for row in rows}  # in the order of their labels
    return (row for row in rows if last[row.key, row.window[0]] == row.window)


def _settled(ledger: Ledger, hold: Any, spent: Amount | None) -> str:
    charged = settle_hold(ledger, hold, spent)
    return f"settled at {_both(to_dollars(charged.usd), charged.tokens)}"


def _amount(usd: Decimal, tokens: int) -> Amount:
    from budgetguard_core.ledger.amounts import to_amount

    return to_amount(usd, tokens)


def _window_record(row: WindowUsage) -> dict[str, Any]:
    fields = (name for name in WindowUsage.__dataclass_fields__)
    return {name: _plain(getattr(row, name)) for name in fields}


def _run_record(run: AliveRun) -> dict[str, Any]:
    return {name: getattr(run, name) for name in AliveRun.__dataclass_fields__}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Decimal) else value


def _print_json(records: Iterable[dict[str, Any]]) -> None:
    for record in records:
        sys.stdout.write(json.dumps(record) + "\n")


def _inert(name: object) -> str:
    # A spreadsheet takes a cell that begins so for a formula.
    text = str(name)
    return f"'{text}" if text[:1] in "=+-@" else text


def _shown(name: str) -> str:
    return name if name.isprintable() else ascii(name)


def _both(usd: Decimal, tokens: int) -> str:
    return f"${usd.quantize(Decimal('0.000001')).normalize():f}  {tokens:,} tokens"


def _ceilings(row: WindowUsage) -> str:
    parts: list[str] = []
    if row.ceiling_usd is not None:
        parts.append(f"${row.ceiling_usd:f}")
    if row.ceiling_tokens is not None:
        parts.append(f"{row.ceiling_tokens:,} tokens")
    return "  ".join(parts) or "none"


def _share(row: WindowUsage) -> str:
    shares: list[Decimal] = []
    if row.ceiling_usd:
        shares.append((row.spent_usd + row.reserved_usd) / row.ceiling_usd)
    if row.ceiling_tokens:
        shares.append(Decimal(row.spent_tokens + row.reserved_tokens) / row.ceiling_tokens)
    return f"{max(shares):.0%}" if shares else ""


def _time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _figure(text: str | None, option: str, read: Callable[[str], Any], stored: Any) -> Any:
    if text is None:
        return stored
    if text == "none":
        return None
    try:
        return read(text)
    except (InvalidOperation, ValueError):
        _refuse(f"{option} must be a number or none, got {text[:40]!r}. Use 20.")


def _dollars(text: str | None, stored: Amount, option: str) -> Decimal | None:
    found: Decimal | None = _figure(text, option, Decimal, to_dollars(stored.usd) or None)
    return found


def _tokens(text: str | None, stored: Amount, option: str) -> int | None:
    found: int | None = _figure(text, option, int, stored.tokens or None)
    return found


def _user() -> str:
    try:
        return getuser()
    except (OSError, KeyError, ImportError):
        return ""


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"budgetguard: {sentence}", err=True)
    raise typer.Exit(2)
