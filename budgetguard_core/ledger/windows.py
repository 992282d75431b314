"""Keys and their windows: days and months in the key's time zone, or one for a whole run.

Nothing is ever reset. A window is a row with a label of its own; at its edge another row begins.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias
from unicodedata import category
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import ZERO, Amount

LONGEST_KEY = 200
"""Bytes of a key in UTF-8."""
KINDS = {"d": "day", "m": "month", "r": "run"}
"""The kinds of windows: the first letter of a label."""
CALENDAR = "dm"
"""The windows of a usual ledger."""
RUN = "r"
"""The window of a ledger for one run, `?windows=run`: it never ends."""
_FOR_EVER = 4e10
_DAY = dt.timedelta(days=1)

# A clock that jumps back must meet the row of that day again, so rows stay for long.
DAYS_KEPT = 62
_MONTHS_KEPT = 13


class Window(NamedTuple):
    """A day or a month of one key, as a client computes it. The store's clock decides."""

    key: str
    label: str
    """`d:2026-11-22`, `m:2026-11` or `r:run`; without the zone, so that a change of zone frees
    nothing."""
    start: float
    """Seconds since the epoch."""
    end: float
    ceiling: Amount = ZERO
    """The client's default, 0 for none; what the store holds for the key wins."""
    oldest: str = ""
    """Windows of this key and kind with a smaller label are forgotten when this one is made, if it
    has begun by then."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key with ceilings of its own: a tenant, a user, a team.

    Attributes:
        name: 1 to 200 bytes of UTF-8 without control characters; used as it is, never normalised,
            so that look-alikes are different keys.
        time_zone: Where its days and months begin, as in the IANA data base.
    """

    name: str
    time_zone: str = "UTC"

    def __post_init__(self) -> None:
        check_name(self.name, "tenant")
        zone_of(self.time_zone)


Tenant: TypeAlias = str | Key | Iterable[str | Key]
"""One key, or several that are reserved together; the first is the tenant itself."""


def check_name(name: object, what: str) -> str:
    """Return the name of a key, a run or a reservation, checked."""
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{what} must be a str, got {type(name).__name__}. Use the name that your bills use."
        )
    size = len(name.encode("utf-8", "replace"))
    # A control character, or half of a surrogate pair.
    if not 1 <= size <= LONGEST_KEY or any(category(c) in ("Cc", "Cs") for c in name):
        raise ConfigurationError(
            f"{what} must have 1 to {LONGEST_KEY} bytes of UTF-8 and no control characters, "
            f"got {name[:20]!a}. Use a plain identifier."
        )
    return name


def quoted(name: str) -> str:
    """Return a name for a sentence.

    A look-alike stays what it is, but cannot reorder or break the line it is shown in.
    """
    return ascii(name) if not name.isprintable() else repr(name)


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone, checked."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        raise ConfigurationError(
            f"time_zone must be a name of the IANA data base, got {str(name)[:60]!r}. "
            'Use "Europe/Berlin" or "UTC".'
        ) from None


def as_keys(tenant: Tenant, time_zone: str = "UTC") -> tuple[Key, ...]:
    """Turn what a user gives as `tenant` into keys, in the user's order, checked."""
    if isinstance(tenant, Key):
        return (tenant,)
    if isinstance(tenant, str):
        return (Key(tenant, time_zone),)
    parts = tuple(tenant) if isinstance(tenant, Iterable) else ()
    keys = tuple(one if isinstance(one, Key) else Key(one, time_zone) for one in parts)
    if not 1 <= len(keys) <= 16 or len({key.name for key in keys}) != len(keys):
        got = len(keys) if isinstance(tenant, Iterable) else type(tenant).__name__
        raise ConfigurationError(
            f"tenant must be a name, a Key, or 1 to 16 different ones, got {got}. "
            'Use tenant="acme" or tenant=("acme", "acme/user-7").'
        )
    return keys


class Account:
    """The keys that one run is charged to, the tenant first, and their windows of now."""

    def __init__(self, keys: tuple[Key, ...], ceilings: Mapping[str, Amount]) -> None:
        self.names = tuple(key.name for key in keys)
        self.flags = tuple(sorted(("all", *(f"t:{name}" for name in self.names))))
        self._zones = tuple((key.name, zone_of(key.time_zone)) for key in keys)
        self._ceilings = ceilings
        """The default of each kind of window that the ledger has."""
        self._cached: tuple[float, float, tuple[Window, ...]] = (0.0, 0.0, ())

    def windows(self, now: float) -> tuple[Window, ...]:
        """Return the windows of each key, sorted by key and label."""
        start, end, windows = self._cached
        if not start <= now < end:
            windows = tuple(sorted(self._windows(now)))
            start = max(window.start for window in windows)
            end = min(window.end for window in windows)
            self._cached = (start, end, windows)
        return windows

    def _windows(self, now: float) -> Iterator[Window]:
        for name, zone in self._zones:
            if RUN in self._ceilings:
                yield Window(name, "r:run", 0.0, _FOR_EVER, self._ceilings[RUN])
                continue
            for window in windows_at(name, now, zone):
                yield window._replace(ceiling=self._ceilings[window.label[0]])


def windows_at(key: str, now: float, zone: dt.tzinfo) -> tuple[Window, Window]:
    """Return the day and the month of `key` that hold the instant `now`."""
    day = dt.datetime.fromtimestamp(now, zone).date()
    # Where midnight comes twice or not at all, the date may be the neighbour's for an hour.
    if now >= _midnight(day + _DAY, zone):
        day += _DAY
    elif now < _midnight(day, zone):
        day -= _DAY
    month = day.replace(day=1)
    edges = _midnight(day, zone), _midnight(day + _DAY, zone)
    month_edges = _midnight(month, zone), _midnight(_months_after(month, 1), zone)
    kept, month_kept = day - DAYS_KEPT * _DAY, _months_after(month, -_MONTHS_KEPT)
    return (
        Window(key, f"d:{day}", *edges, oldest=f"d:{kept}"),
        Window(key, f"m:{month:%Y-%m}", *month_edges, oldest=f"m:{month_kept:%Y-%m}"),
    )


def _months_after(first: dt.date, months: int) -> dt.date:
    count = first.year * 12 + first.month - 1 + months
    return dt.date(count // 12, count % 12 + 1, 1)


def _midnight(day: dt.date, zone: dt.tzinfo) -> float:
    # fold=0: the first midnight where it comes twice, the edge of the gap where it does not.
    return dt.datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()
