"""`budgetguard ledger reconcile`: reservations whose process has gone."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

import typer

from budgetguard_cli.options import AsJson, LedgerUrl, dollars, opened_ledger
from budgetguard_cli.screen import cell, printable, refuse, say, table, write_json
from budgetguard_cli.windows import both, instant
from budgetguard_core.ledger.amounts import Amount, to_amount, to_dollars
from budgetguard_core.ledger.reconcile import expired_holds, is_long_gone, settle_hold
from budgetguard_core.ledger.step import HoldRecord


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
    """List reservations whose process has gone, and settle them. They stay charged until then.

    Below full value only after twice their time to live, on your word. Ends with 1 when some are
    left.

    Example: budgetguard ledger reconcile --full
    """
    if (usd is not None or tokens is not None) != (hold is not None):
        refuse("--hold needs --usd or --tokens, and they need --hold, got one without the other.")
    with opened_ledger(url) as ledger:
        waiting = [one for one in expired_holds(ledger) if hold in (None, one.id)]
        if hold is not None and not waiting:
            refuse(
                f"--hold must be on the list of what is to be reconciled, got "
                f"{printable(hold)[:200]!r}. See `budgetguard ledger reconcile`."
            )
        results: list[tuple[HoldRecord, Amount | None, str]] = []
        for one in waiting:
            charged, said = None, "to be settled"
            if hold is not None and not is_long_gone(one, ledger.now()):
                said = "its process may be alive: wait"
            elif hold is not None or full:
                amount = to_amount(
                    to_dollars(one.charge.usd) if usd is None else usd,
                    one.charge.tokens if tokens is None else tokens,
                )
                charged = settle_hold(ledger, one, None if hold is None else amount)
                said = f"settled at {both(to_dollars(charged.usd), charged.tokens)}"
            results.append((one, charged, said))
    if as_json:
        write_json(*(_record(*one) for one in results))
    else:
        rows = table(
            "reservation", "run or process", "tenant", "charged", "reported", "made", "result"
        )
        for one, _, said in results:
            rows.add_row(
                cell(one.id),
                cell(one.owner),
                cell(", ".join(_keys(one))),
                both(to_dollars(one.charge.usd), one.charge.tokens),
                both(to_dollars(one.spent.usd), one.spent.tokens),
                instant(one.made),
                said,
            )
        say(rows if results else "nothing is to be reconciled")
    if any(charged is None for _, charged, _ in results):
        raise typer.Exit(1)


def _record(one: HoldRecord, settled: Amount | None, result: str) -> dict[str, object]:
    amounts = {"charged": one.charge, "reported": one.spent, "settled": settled}
    return {
        "id": one.id,
        "owner": one.owner,
        "keys": _keys(one),
        "made": one.made,
        **{f"{name}_usd": found and to_dollars(found.usd) for name, found in amounts.items()},
        **{f"{name}_tokens": found and found.tokens for name, found in amounts.items()},
        "result": result,
    }


def _keys(one: HoldRecord) -> list[str]:
    return list(dict.fromkeys(key for key, _ in one.windows))
