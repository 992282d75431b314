"""`budgetguard ledger`: what tenants spent and reserved, and their ceilings."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, TypedDict

import typer

from budgetguard_cli.options import AsJson, LedgerUrl, dollars, opened_ledger
from budgetguard_cli.screen import cell, printable, refuse, say, table, write_json
from budgetguard_cli.windows import both, ceilings, instant, share, window
from budgetguard_core.ledger import WindowUsage
from budgetguard_core.ledger.amounts import Amount, to_dollars


class _Figures(TypedDict):
    usd: Decimal | None
    tokens: int | None


def show(
    url: LedgerUrl = None,
    tenant: Annotated[str | None, typer.Option(help="Only this one.")] = None,
    past: Annotated[bool, typer.Option("--past", help="Earlier days and months too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what tenants spent and reserved in each window.

    Stored ceilings of which no window tells yet come below the table.

    Example: budgetguard ledger show --ledger sqlite:///ledger.sqlite3
    """
    with opened_ledger(url) as ledger:
        rows = [row for row in ledger.windows() if tenant in (None, row.key)]
        if not past:
            rows = list(_latest(rows))
        if as_json:
            write_json(*map(_record, rows))
            return
        found = table("tenant", "window", "spent", "reserved", "ceiling", "used")
        for row in rows:
            found.add_row(
                cell(row.key),
                window(row.window),
                both(row.spent_usd, row.spent_tokens),
                both(row.reserved_usd, row.reserved_tokens),
                ceilings(row.ceiling_usd, row.ceiling_tokens),
                share(row),
            )
        say(found)
        told = {
            (row.key, row.window[0]): {"usd": row.ceiling_usd, "tokens": row.ceiling_tokens}
            for row in rows  # the latest of a key comes last
        }
        for key, stored in sorted(ledger.ceilings().items()):
            holds = {(key, kind): _figures(stored.get(kind, Amount())) for kind in "dm"}
            if tenant in (None, key) and not holds.items() <= told.items():
                say(_said(key, stored))
        say(f"ledger {ledger.id} at {ledger.url}, {instant(ledger.now())}")
        say(*(f"killed: {one.detail}" for one in ledger.kills()))


def set_ceilings(
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
    as_json: AsJson = False,
) -> None:
    """Set a tenant's ceilings; what is not named stays.

    Each process sees them with its next trip to the ledger; what it has reserved by then it may
    spend. A tenant's first own ceilings begin with those of the stored default.

    Example: budgetguard ledger set acme --daily-usd 20
    """
    if (tenant is None) != default:
        refuse("ledger set needs a tenant or --default, got neither or both. Name one.")
    given = (daily_usd, monthly_usd, daily_tokens, monthly_tokens)
    if clear == any(one is not None for one in given):
        refuse("ledger set needs ceilings or --clear, got neither or both. Use --daily-usd 20.")
    with opened_ledger(url, may_be_new=True) as ledger:
        if clear:
            ledger.clear_ceilings(tenant)
        else:
            found = ledger.ceilings()
            stored = found.get(tenant or "") or found.get("", {})
            day, month = stored.get("d", Amount()), stored.get("m", Amount())
            ledger.set_ceilings(
                tenant,
                daily_usd=_dollars(daily_usd, day),
                monthly_usd=_dollars(monthly_usd, month),
                daily_tokens=_tokens(daily_tokens, day),
                monthly_tokens=_tokens(monthly_tokens, month),
                # Set in Python alone; what is not named stays.
                daily_model_calls=day.model_calls or None,
                daily_tool_calls=day.tool_calls or None,
                monthly_model_calls=month.model_calls or None,
                monthly_tool_calls=month.tool_calls or None,
            )
        now = ledger.ceilings().get(tenant or "", {})
    figures = {
        f"{period}_{unit}": figure
        for period, kind in (("daily", "d"), ("monthly", "m"))
        for unit, figure in _figures(now.get(kind, Amount())).items()
    }
    if as_json:
        write_json({"key": tenant, "own": bool(now), **figures})
    else:
        say(_said(tenant or "", now))


def _said(key: str, stored: Mapping[str, Amount]) -> str:
    day, month = (_figures(stored.get(kind, Amount())) for kind in "dm")
    said = f"a day {ceilings(**day)}, a month {ceilings(**month)}" if stored else "none of its own"
    return f"ceilings of {printable(key) if key else 'the default'}: {said}"


def export(url: LedgerUrl = None, as_json: AsJson = False) -> None:
    """Write every window that the ledger keeps to the standard output, as CSV or JSON.

    Example: budgetguard ledger export > spent.csv
    """
    with opened_ledger(url) as ledger:
        records = [_record(row) for row in ledger.windows()]
    if as_json:
        write_json(*records)
        return
    writer = csv.DictWriter(sys.stdout, [*WindowUsage.__dataclass_fields__], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**record, "key": _inert(record["key"])} for record in records)


def adopt(url: LedgerUrl = None, as_json: AsJson = False) -> None:
    """Accept the ledger as it is, after it was wiped or restored; processes that refused go on.

    Example: budgetguard ledger adopt --ledger redis://10.0.0.5:6379/0
    """
    with opened_ledger(url) as ledger:
        record = {"ledger": ledger.adopt(), "url": ledger.url}
    if as_json:
        write_json(record)
    else:
        say(f"adopted: ledger {record['ledger']} at {record['url']}")


def check(url: LedgerUrl = None, as_json: AsJson = False) -> None:
    """Compare every window with the sum of its reservations (SQLite). Ends with 1 on a gap.

    Example: budgetguard ledger check --ledger sqlite:///ledger.sqlite3
    """
    with opened_ledger(url) as ledger:
        wrong = ledger.check()
    if as_json:
        write_json(*({"problem": line} for line in wrong))
    else:
        say(*(wrong or ["every window equals the sum of its reservations"]))
    if wrong:
        raise typer.Exit(1)


def _latest(rows: Sequence[WindowUsage]) -> Iterable[WindowUsage]:
    last = {(row.key, row.window[0]): row.window for row in rows}  # in the order of their labels
    return (row for row in rows if last[row.key, row.window[0]] == row.window)


def _record(row: WindowUsage) -> dict[str, object]:
    return {name: getattr(row, name) for name in WindowUsage.__dataclass_fields__}


def _inert(name: object) -> str:
    # A spreadsheet takes a cell that begins so for a formula.
    text = str(name)
    return f"'{text}" if text[:1] in "=+-@" else text


def _figures(ceiling: Amount) -> _Figures:
    return {
        "usd": to_dollars(ceiling.usd) if ceiling.usd else None,
        "tokens": ceiling.tokens or None,
    }


def _dollars(text: str | None, stored: Amount) -> Decimal | None:
    if text is None:
        return _figures(stored)["usd"]
    return None if text.lower() == "none" else dollars(text)


def _tokens(text: str | None, stored: Amount) -> int | None:
    if text is None:
        return _figures(stored)["tokens"]
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        refuse(f"tokens must be a whole number, got {text[:40]!r}. Use 100000.")
