"""`budgetguard ledger reconcile`: reservations whose process has gone."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

import typer

from budgetguard_cli.options import AsJson, LedgerUrl, dollars, opened_ledger
from budgetguard_cli.screen import cell, printable, refuse, say, table, write_json
from budgetguard_cli.windows import both, instant
from budgetguard_core.ledger.amounts import Amount, to_amount, to_dollars
from budgetguard_core.ledger.step import TTL_SECONDS, HoldRecord


def reconcile(
    url: LedgerUrl = None,
    full: Annotated[
        bool, typer.Option("--full", help="Settle all as if all of it had been spent.")
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
    """List reservations whose process has gone, and settle them. They stay charged until then.

    Below full value on your word, and only after twice their time to live. Ends with 1 when some
    are left.

    Example: budgetguard ledger reconcile --full
    """
    if (usd is not None or tokens is not None) != (hold is not None):
        refuse("--hold needs --usd or --tokens, and they need --hold, got one without the other.")
    with opened_ledger(url) as ledger:
        waiting = [one for one in ledger.expired_holds() if hold in (None, one.id)]
        if hold is not None and not waiting:
            refuse(
                f"--hold must be on the list of what is to be reconciled, got "
                f"{printable(hold)[:200]!r}. See `budgetguard ledger reconcile`."
            )
        now = ledger.now()
        records = list[dict[str, object]]()
        for one in waiting:
            settled, result = None, "to be settled"
            if hold is not None and now < one.expires + TTL_SECONDS:
                result = "its process may be alive: wait"
            elif hold is not None or full:
                settled = ledger.settle_hold(one, _spent(one, usd, tokens))
                result = f"settled at {both(to_dollars(settled.usd), settled.tokens)}"
            records.append(_record(one, settled, result))
    if as_json:
        write_json(*records)
    else:
        rows = table("reservation", "run or process", "tenant", "charged", "made", "result")
        for one, record in zip(waiting, records, strict=True):
            rows.add_row(
                cell(one.id),
                cell(one.owner),
                cell(", ".join(_keys(one))),
                both(to_dollars(one.charge.usd), one.charge.tokens),
                instant(one.made),
                str(record["result"]),
            )
        say(rows if waiting else "nothing is to be reconciled")
    if any(record["settled_usd"] is None for record in records):
        raise typer.Exit(1)


def _spent(one: HoldRecord, usd: Decimal | None, tokens: int | None) -> Amount:
    """Return what a person says that was spent; what is left out stays at full value."""
    given = to_amount(usd or 0, tokens or 0)
    return one.charge._replace(
        usd=one.charge.usd if usd is None else given.usd,
        tokens=one.charge.tokens if tokens is None else given.tokens,
    )


def _keys(one: HoldRecord) -> list[str]:
    return list(dict.fromkeys(key for key, _ in one.windows))


def _record(one: HoldRecord, settled: Amount | None, result: str) -> dict[str, object]:
    return {
        "id": one.id,
        "owner": one.owner,
        "keys": _keys(one),
        "charged_usd": to_dollars(one.charge.usd),
        "charged_tokens": one.charge.tokens,
        "made": one.made,
        "settled_usd": None if settled is None else to_dollars(settled.usd),
        "settled_tokens": None if settled is None else settled.tokens,
        "result": result,
    }
