"""The keys that one run is charged to, and their windows of now."""

from __future__ import annotations

from budgetguard_core.ledger.amounts import ZERO, Amount
from budgetguard_core.ledger.windows import Key, Window, windows_at, zone_of


class Account:
    """One or several keys that are reserved together.

    Args:
        keys: The tenant first.
        daily: The default ceiling of a day, for each key.
        monthly: The default ceiling of a month, for each key.
    """

    def __init__(self, keys: tuple[Key, ...], daily: Amount = ZERO, monthly: Amount = ZERO) -> None:
        self.keys = keys
        self.names = tuple(key.name for key in keys)
        self.flags = tuple(sorted(("all", *(f"t:{name}" for name in self.names))))
        self._zones = tuple((key.name, zone_of(key.time_zone)) for key in keys)
        self._defaults = (daily, monthly)
        self._cached: tuple[float, float, tuple[Window, ...]] = (0.0, 0.0, ())

    def windows(self, now: float) -> tuple[Window, ...]:
        """Return the day and the month of each key, sorted by key and label."""
        start, end, windows = self._cached
        if not start <= now < end:
            windows = tuple(
                sorted(
                    window
                    for name, zone in self._zones
                    for window in windows_at(name, now, zone, *self._defaults)
                )
            )
            start = max(window.start for window in windows)
            end = min(window.end for window in windows)
            self._cached = (start, end, windows)
        return windows
