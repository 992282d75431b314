"""A clock that moves only when it is told to."""

from __future__ import annotations

from budgetguard_core.errors import ConfigurationError


class ManualClock:
    """A `Clock` for tests; both readings start at zero and move together."""

    def __init__(self) -> None:
        self._now_ns = 0

    def monotonic_ns(self) -> int:
        """Return the nanoseconds that `advance` has added up to."""
        return self._now_ns

    def wall_ns(self) -> int:
        """Return the same as `monotonic_ns`: the epoch is where the test began."""
        return self._now_ns

    def advance(self, seconds: float) -> None:
        """Advance the time.

        Raises:
            ConfigurationError: `seconds` is negative: time does not go back.
        """
        if seconds < 0:
            raise ConfigurationError(f"seconds must be >= 0, got {seconds}. Time does not go back.")
        self._now_ns += round(seconds * 1_000_000_000)
