"""Holds whose process has gone: listed, and settled from the logs or at full value.

A hold stays charged in full until somebody settles it here. Below full value it may be settled only
when its holder cannot spend any more: after twice the time to live, and with proof that its runs
have ended, or on a person's word.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import Amount, to_amount
from budgetguard_core.ledger.ledger import Ledger
from budgetguard_core.ledger.step import TTL_SECONDS, HoldRecord, Step
from budgetguard_core.ledger.windows import Window

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Proof:
    """The proof of the logs for one hold."""

    spent: Amount
    complete: bool
    """Every run that names the hold has ended, and every call of it was settled at a price."""


def expired_holds(ledger: Ledger) -> list[HoldRecord]:
    """Return the holds that are to be reconciled: open, and silent for longer than they said."""
    now = ledger.now()
    return [hold for hold in ledger.holds() if not hold.closed and hold.expires <= now]


def is_long_gone(hold: HoldRecord, now: float) -> bool:
    """Return whether twice the time to live has passed since the reservation."""
    return now >= hold.expires + TTL_SECONDS


def settle_hold(ledger: Ledger, hold: HoldRecord, spent: Amount | None = None) -> Amount:
    """Settle a hold in its holder's place, at full value if no amount is given.

    Nothing that was reported is taken back. A holder that wakes up finds its hold closed; what it
    reports then still counts.

    Returns:
        What the hold is charged now.
    """
    amount = hold.charge if spent is None else spent
    windows = tuple(Window(key, label, 0.0, 0.0) for key, label in hold.windows)
    step = Step("settle", hold.id, windows, amount, owner=hold.owner)
    return ledger.connection.send(step).amount


def read_proofs(files: Iterable[Path]) -> Mapping[str, Proof]:
    """Read trajectory logs, also gzipped: what was spent under which hold.

    Each admitted model call names the hold that it was set aside in (`holds`), and its settlement
    what it used. A hold is proved when all its calls are settled with a cost and all their runs
    have ended. A line that makes no sense proves nothing, and takes the proof from a hold that it
    speaks of.

    Raises:
        ConfigurationError: A file cannot be read.
    """
    calls: dict[tuple[str, str], list[str]] = {}
    spent: dict[str, Amount] = {}
    runs: dict[str, set[str]] = {}
    broken: set[str] = set()
    ended: set[str] = set()
    for event in _events(files):
        run, kind = str(event.get("run_id")), event.get("event")
        call = (run, str(event.get("call_id")))
        if kind == "model_call_admitted" and isinstance(event.get("holds"), list):
            holds = [str(one) for one in cast("list[Any]", event["holds"])]
            broken.update(calls.get(call, ()))  # two calls of one number: one has no settlement
            calls[call] = holds
            ended.discard(run)  # it goes on
            for hold in holds:
                runs.setdefault(hold, set()).add(run)
                spent.setdefault(hold, Amount())
        elif kind in ("model_call_settled", "model_call_withdrawn"):
            for hold in calls.pop(call, []):
                used = _used(event)
                if used is None:
                    broken.add(hold)
                else:
                    spent[hold] = spent[hold].plus(used)
        elif kind in ("run_ended", "housekeeping_ended"):
            ended.add(run)
    broken.update(hold for holds in calls.values() for hold in holds)
    return {
        hold: Proof(amount, hold not in broken and runs[hold] <= ended)
        for hold, amount in spent.items()
    }


def _used(event: Mapping[str, Any]) -> Amount | None:
    if event["event"] == "model_call_withdrawn":
        return Amount()
    usage, cost = event.get("usage"), event.get("cost_usd")
    if not isinstance(usage, list) or cost is None:
        return None
    try:
        prompt, completion, *_ = cast("list[Any]", usage)
        return to_amount(Decimal(str(cost)), _whole(prompt) + _whole(completion), 1)
    except (ValueError, ArithmeticError, ConfigurationError):
        return None


def _whole(tokens: object) -> int:
    if type(tokens) is not int or tokens < 0:
        raise ValueError
    return tokens


def _events(files: Iterable[Path]) -> Iterable[Mapping[str, Any]]:
    for path in dict.fromkeys(path.absolute() for path in files):  # a file named twice counts once
        try:
            with path.open("rb") as file:
                packed = file.peek(len(_GZIP)).startswith(_GZIP)
                for line in gzip.GzipFile(fileobj=file) if packed else file:
                    try:
                        event: object = json.loads(line)
                    except ValueError:  # the last line of a process that was killed
                        continue
                    if isinstance(event, dict):
                        yield cast("dict[str, Any]", event)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            continue  # cut short: what it proves is what was read
        except OSError as error:
            raise ConfigurationError(
                f"a log must be a file that can be read, got {error.strerror}. Name another."
            ) from None
