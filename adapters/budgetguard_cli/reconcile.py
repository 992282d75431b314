"""`budgetguard ledger reconcile`: reservations whose process has gone."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from budgetguard_cli.logs import Unreadable, readable
from budgetguard_cli.options import AsJson, LedgerUrl, dollars, opened_ledger
from budgetguard_cli.screen import cell, printable, refuse, say, table, write_json
from budgetguard_cli.windows import both, instant
from budgetguard_core.ledger import Ledger
from budgetguard_core.ledger.amounts import Amount, to_amount, to_dollars
from budgetguard_core.ledger.reconcile import (
    Proof,
    expired_holds,
    is_long_gone,
    read_proofs,
    settle_hold,
)
from budgetguard_core.ledger.step import HoldRecord


class Result(NamedTuple):
    """The result of one reservation."""

    settled: Amount | None
    words: str


class Word(NamedTuple):
    """The amount that a person gives for one reservation; None leaves a dimension at full value."""

    hold: str
    usd: Decimal | None
    tokens: int | None


def reconcile(
    url: LedgerUrl = None,
    logs: Annotated[
        list[str] | None,
        typer.Option(
            "--log",
            help="Event logs, or a folder of them: settle what they prove. May be given again.",
            show_default=False,
        ),
    ] = None,
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

    Below full value only after twice their time to live, with a log in which their runs end, or on
    your word. Ends with 1 when some are left.

    Example: budgetguard ledger reconcile --log runs.jsonl --full
    """
    if (usd is not None or tokens is not None) != (hold is not None):
        refuse("--hold needs --usd or --tokens, and they need --hold, got one without the other.")
    word = None if hold is None else Word(hold, usd, tokens)
    try:
        files = [Path(name) for name in readable(logs or [])]
    except Unreadable as error:
        refuse(str(error))
    with opened_ledger(url) as ledger:
        waiting = expired_holds(ledger)
        if word is not None:
            waiting = [one for one in waiting if one.id == word.hold]
            if not waiting:
                refuse(
                    f"--hold must be on the list of what is to be reconciled, got "
                    f"{printable(word.hold)[:200]!r}. See `budgetguard ledger reconcile`."
                )
        proofs = read_proofs(files)
        now = ledger.now()
        results = [(one, _settle(ledger, one, now, proofs, word, full)) for one in waiting]
    if as_json:
        write_json(*(_record(*one) for one in results))
    else:
        _print_table(results)
    if any(result.settled is None for _, result in results):
        raise typer.Exit(1)


def _settle(
    ledger: Ledger,
    hold: HoldRecord,
    now: float,
    proofs: Mapping[str, Proof],
    word: Word | None,
    full: bool,
) -> Result:
    proof, gone = proofs.get(hold.id), is_long_gone(hold, now)
    amount: Amount | None = None
    if word is not None:
        given = to_amount(
            to_dollars(hold.charge.usd) if word.usd is None else word.usd,
            hold.charge.tokens if word.tokens is None else word.tokens,
        )
        if not gone:
            return Result(None, "its process may be alive: wait")
        amount = given
    elif proof is not None and proof.complete and gone:
        if proof.spent.usd < hold.spent.usd or proof.spent.tokens < hold.spent.tokens:
            return Result(None, "the logs miss calls")
        amount = proof.spent
    elif not full:
        return Result(None, "to be settled")
    charged = settle_hold(ledger, hold, amount)
    return Result(charged, f"settled at {both(to_dollars(charged.usd), charged.tokens)}")


def _print_table(results: list[tuple[HoldRecord, Result]]) -> None:
    rows = table("reservation", "run or process", "tenant", "charged", "reported", "made", "result")
    for one, result in results:
        rows.add_row(
            cell(one.id),
            cell(one.owner),
            cell(", ".join(_keys(one))),
            both(to_dollars(one.charge.usd), one.charge.tokens),
            both(to_dollars(one.spent.usd), one.spent.tokens),
            instant(one.made),
            result.words,
        )
    say(rows if results else "nothing is to be reconciled")


def _record(one: HoldRecord, result: Result) -> dict[str, object]:
    settled = result.settled
    return {
        "id": one.id,
        "owner": one.owner,
        "keys": _keys(one),
        "charged_usd": to_dollars(one.charge.usd),
        "charged_tokens": one.charge.tokens,
        "reported_usd": to_dollars(one.spent.usd),
        "reported_tokens": one.spent.tokens,
        "made": one.made,
        "settled_usd": None if settled is None else to_dollars(settled.usd),
        "settled_tokens": None if settled is None else settled.tokens,
        "result": result.words,
    }


def _keys(one: HoldRecord) -> list[str]:
    return list(dict.fromkeys(key for key, _ in one.windows))
