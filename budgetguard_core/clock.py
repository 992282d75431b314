"""Time, as a parameter. No other module reads a clock."""

from __future__ import annotations

import time
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """The two readings that a guard needs."""

    def monotonic_ns(self) -> int:
        """Nanoseconds that only grow. For measuring; the zero point means nothing."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch. For time stamps; never for measuring."""
        ...


class SystemClock:
    """The machine's clocks."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)
