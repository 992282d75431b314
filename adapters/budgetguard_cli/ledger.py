"""`budgetguard ledger`, `kill` and `revive`: what tenants may spend, and who is stopped."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from decimal import Decimal
from getpass import getuser
from typing import Annotated, Any, cast

import typer

from budgetguard_cli.options import AsJson, LedgerUrl, dollars, open_ledger
from budgetguard_cli.runs import read_runs
from budgetguard_cli.screen import answer, cell, only, printable, refuse, say, table, write_json
from budgetguard_cli.show import log_folder, logs_of
from budgetguard_core.ledger import WindowUsage
from budgetguard_core.ledger.amounts import Amount, to_amount, to_dollars
from budgetguard_core.ledger.step import TTL_SECONDS, HoldRecord

_KINDS = {"d": "day", "m": "month", "r": "of"}
_SMALLEST_SHOWN = Decimal("0.000001")
_CEILINGS = ("daily_usd", "daily_tokens", "monthly_usd", "monthly_tokens")


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
    with open_ledger(url) as ledger:
        rows = [row for row in ledger.windows() if tenant in (None, row.key)]
        latest = {(row.key, row.window[0]): row for row in rows}  # in the order of their labels
        rows = rows if past else [row for row in rows if row in latest.values()]
        if as_json:
            write_json(*map(asdict, rows))
            return
        found = table("tenant", "window", "spent", "reserved", "ceiling", "used")
        for row in rows:
            found.add_row(
                cell(row.key),
                f"{_KINDS[row.window[0]]} {row.window[2:]}",
                _both(row.spent_usd, row.spent_tokens),
                _both(row.reserved_usd, row.reserved_tokens),
                _ceilings(row.ceiling_usd, row.ceiling_tokens),
                _share(row),
            )
        say(found)
        shown = {at: (row.ceiling_usd, row.ceiling_tokens) for at, row in latest.items()}
        for key, stored in sorted(ledger.ceilings().items()):
            holds = {(key, kind): _figures(stored.get(kind)) for kind in "dm"}
            if tenant in (None, key) and not holds.items() <= shown.items():
                say(_stored(key, stored))
        say(f"ledger {ledger.id} at {ledger.url}, {_instant(ledger.now())}")
        say(*(f"killed: {one.detail}" for one in ledger.kills()))


def set_ceilings(
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="The tenant, or another key.")
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

    Example: budgetguard ledger set --tenant acme --daily-usd 20
    """
    if (tenant is None) != default:
        refuse("ledger set needs --tenant or --default, got neither or both. Name one.")
    texts = daily_usd, daily_tokens, monthly_usd, monthly_tokens
    given = dict(zip(_CEILINGS, texts, strict=True))
    if clear == any(text is not None for text in given.values()):
        refuse("ledger set needs ceilings or --clear, got neither or both. Use --daily-usd 20.")
    with open_ledger(url, may_be_new=True) as ledger:
        if clear:
            ledger.clear_ceilings(tenant)
        else:
            found = ledger.ceilings()
            stored = _plain(found.get(tenant or "") or found.get("", {}))
            new = {name: _ceiling(name, text) for name, text in given.items() if text is not None}
            ledger.set_ceilings(tenant, **cast("Any", {**stored, **new}))
        now = ledger.ceilings().get(tenant or "", {})
    record = {"key": tenant, "own": bool(now), **{name: _plain(now)[name] for name in given}}
    answer(as_json, [record], _stored(tenant or "", now))


def reconcile(
    url: LedgerUrl = None,
    full: Annotated[
        bool, typer.Option("--full", help="Settle the rest as if all of it had been spent.")
    ] = False,
    hold: Annotated[
        str | None,
        typer.Option(help="Only this one: settle it at --usd and --tokens, your word for it."),
    ] = None,
    usd: Annotated[
        Decimal | None,
        typer.Option(parser=dollars, help="What --hold really spent; all of it if left out."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="What --hold really used; all of it if left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what processes left that have gone, and settle it.

    Such reservations stay charged until then. Below full value only after twice their time to
    live, on your word. Ends with 1 when some are left.

    Example: budgetguard ledger reconcile --full
    """
    if (usd is not None or tokens is not None) != (hold is not None):
        refuse("--hold needs --usd or --tokens, and they need --hold, got one without the other.")
    with open_ledger(url) as ledger:
        waiting = [one for one in ledger.expired_holds() if hold in (None, one.id)]
        if hold is not None and not waiting:
            refuse(
                f"--hold must be on the list of what is to be reconciled, got "
                f"{printable(hold)[:200]!r}. See `budgetguard ledger reconcile`."
            )
        results: list[tuple[HoldRecord, Amount | None, str]] = []
        for one in waiting:
            charged, status = None, "to be settled"
            if hold is not None and ledger.now() < one.expires + TTL_SECONDS:
                status = "its process may be alive: wait"
            elif hold is not None or full:
                amount = to_amount(
                    to_dollars(one.charge.usd) if usd is None else usd,
                    one.charge.tokens if tokens is None else tokens,
                    *one.charge[2:],
                )
                charged = ledger.settle_hold(one, None if hold is None else amount)
                status = f"settled at {_both(to_dollars(charged.usd), charged.tokens)}"
            results.append((one, charged, status))
    _list_holds(results, as_json, "nothing is to be reconciled")
    if any(charged is None for _, charged, _ in results):
        raise typer.Exit(1)


def runs(url: LedgerUrl = None, as_json: AsJson = False) -> None:
    """List the runs with a call under way, or left open by a process that has gone.

    Example: budgetguard ledger runs
    """
    with open_ledger(url) as ledger:
        now, holds = ledger.now(), [one for one in ledger.holds() if not one.closed]
    rows = [(one, None, "under way" if now < one.expires else "to be reconciled") for one in holds]
    _list_holds(rows, as_json, "no call is under way")


def adopt(url: LedgerUrl = None, as_json: AsJson = False) -> None:
    """Accept the ledger as it is, after it was wiped or restored.

    Processes that refused go on.

    Example: budgetguard ledger adopt --ledger redis://10.0.0.5:6379/0
    """
    with open_ledger(url) as ledger:
        record = {"ledger": ledger.adopt(), "url": ledger.url}
    answer(as_json, [record], f"adopted: ledger {record['ledger']} at {record['url']}")


def check(url: LedgerUrl = None, as_json: AsJson = False) -> None:
    """Compare every window with the sum of its reservations (SQLite).

    Ends with 1 on a gap.

    Example: budgetguard ledger check --ledger sqlite:///ledger.sqlite3
    """
    with open_ledger(url) as ledger:
        wrong = ledger.check()
    status = wrong or ["every window equals the sum of its reservations"]
    answer(as_json, ({"problem": line} for line in wrong), *status)
    if wrong:
        raise typer.Exit(1)


def kill(
    url: LedgerUrl = None,
    tenant: Annotated[str | None, typer.Option(help="Stop this tenant.")] = None,
    run: Annotated[
        str | None,
        typer.Option(help="Stop this run; of one in BUDGETGUARD_LOG the beginning of its id does."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop everything.")] = False,
    why: Annotated[str, typer.Option(help="For the record, and in the run's outcome.")] = "",
    who: Annotated[str | None, typer.Option(help="You, if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Stop a run, a tenant or everything, in every process.

    It holds until it is revived. Processes see it within half a second and a trip to the ledger.

    Example: budgetguard kill --tenant acme --why "spends without end"
    """
    _one_of(tenant, run, everything)
    with open_ledger(url) as ledger:
        who, run = who or _user(), _whole_id(run)
        done = ledger.kill(tenant=tenant, run=run, everything=everything, who=who, why=why)
        answer(as_json, [done._asdict()], done.detail)


def revive(
    url: LedgerUrl = None,
    tenant: Annotated[str | None, typer.Option(help="This tenant.")] = None,
    run: Annotated[str | None, typer.Option(help="This run, by the beginning of its id.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The switch for everything.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take a kill switch back: new runs may start.

    What it stopped stays stopped. Other switches stay: a tenant that was killed by name stays
    killed after `revive --all`.

    Example: budgetguard revive --tenant acme
    """
    _one_of(tenant, run, everything)
    with open_ledger(url) as ledger:
        before = {kill.flag: kill for kill in ledger.kills()}
        if run is not None:
            run = only(run, (flag[2:] for flag in before if flag.startswith("r:"))) or run
        ledger.revive(tenant=tenant, run=run, everything=everything)
        left = ledger.kills()
    revived = [kill for flag, kill in before.items() if flag not in {one.flag for one in left}]
    status = [f"revived: {kill.detail}" for kill in revived]
    status = status or ["nothing was revived: no such kill switch was set"]
    status += [f"still killed: {kill.detail}" for kill in left]
    answer(as_json, (kill._asdict() for kill in revived), *status)


def _list_holds(
    holds: Sequence[tuple[HoldRecord, Amount | None, str]], as_json: bool, none: str
) -> None:
    rows = table("reservation", "run or process", "tenant", "charged", "made", "result")
    for one, _, status in holds:
        rows.add_row(
            *map(cell, (one.id, one.owner, ", ".join(dict(one.windows)))),
            _both(to_dollars(one.charge.usd), one.charge.tokens),
            _instant(one.made),
            status,
        )
    answer(as_json, (_record(*one) for one in holds), rows if holds else none)


def _record(one: HoldRecord, settled: Amount | None, result: str) -> dict[str, object]:
    amounts = {"charged": one.charge, "settled": settled}
    return {
        "id": one.id,
        "owner": one.owner,
        "keys": list(dict(one.windows)),
        "made": one.made,
        **{f"{name}_usd": found and to_dollars(found.usd) for name, found in amounts.items()},
        **{f"{name}_tokens": found and found.tokens for name, found in amounts.items()},
        "result": result,
    }


def _plain(stored: Mapping[str, Amount]) -> dict[str, Decimal | int | None]:
    """Return stored ceilings by the names of their options, all dimensions of them."""
    return {
        f"{period}_{name}": (to_dollars(value) if name == "usd" else value) or None
        for kind, period in (("d", "daily"), ("m", "monthly"))
        for name, value in stored.get(kind, Amount())._asdict().items()
    }


def _stored(key: str, stored: Mapping[str, Amount]) -> str:
    day, month = (_ceilings(*_figures(stored.get(kind))) for kind in "dm")
    status = f"a day {day}, a month {month}" if stored else "none of its own"
    return f"ceilings of {printable(key) if key else 'the default'}: {status}"


def _figures(ceiling: Amount | None) -> tuple[Decimal | None, int | None]:
    usd, tokens = (0, 0) if ceiling is None else (ceiling.usd, ceiling.tokens)
    return to_dollars(usd) if usd else None, tokens or None


def _ceiling(name: str, text: str) -> Decimal | int | None:
    if text.lower() == "none":
        return None
    if name.endswith("usd"):
        return dollars(text)
    try:
        return int(text)
    except ValueError:
        refuse(f"tokens must be a whole number, got {text[:40]!r}. Use 100000.")


def _both(usd: Decimal, tokens: int) -> str:
    return f"${usd.quantize(_SMALLEST_SHOWN).normalize():f}  {tokens:,} tokens"


def _ceilings(usd: Decimal | None, tokens: int | None) -> str:
    parts = [f"${usd:f}"] if usd is not None else []
    parts += [f"{tokens:,} tokens"] if tokens is not None else []
    return "  ".join(parts) or "none"


def _share(row: WindowUsage) -> str:
    """Return the share of its nearest ceiling that a window has used, spent and reserved."""
    pairs = (
        (row.spent_usd + row.reserved_usd, row.ceiling_usd),
        (Decimal(row.spent_tokens + row.reserved_tokens), row.ceiling_tokens),
    )
    shares = [used / ceiling for used, ceiling in pairs if ceiling]
    return f"{max(shares):.0%}" if shares else ""


def _instant(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _one_of(tenant: str | None, run: str | None, everything: bool) -> None:
    given = (tenant is not None) + (run is not None) + everything
    if given != 1:
        refuse(f"exactly one of --tenant, --run and --all must be given, got {given}. Name one.")


def _whole_id(run: str | None) -> str | None:
    """Return the id of the only logged run that begins so; else what was given: it may begin."""
    if run is None or log_folder() is None:
        return run
    found, _ = read_runs(logs_of(run))
    return only(run, (id_ for one in found for id_ in one.nodes)) or run


def _user() -> str:
    try:
        return getuser()
    except (OSError, KeyError, ImportError):
        return ""
