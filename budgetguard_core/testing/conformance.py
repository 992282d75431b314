"""The contract as a suite: each clause checked once, through any adapter's driver and way in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from budgetguard_core.testing.driver import Driver, Feature
from budgetguard_core.testing.message import DriverError, NonConformance
from budgetguard_core.testing.scenario import MODES, CallMode
from budgetguard_core.testing.trial import Trial


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause of the contract."""

    number: int
    title: str
    check: Callable[[Trial], None]
    """Raises `NonConformance` when it does not hold, and whatever the driver failed with."""
    modes: tuple[CallMode, ...] = MODES
    """The ways in for which it has a meaning."""
    needs: Feature | None = None
    """The features that a framework needs for the clause to have a meaning."""

    def lacking(self, driver: Driver) -> str | None:
        """Return why the clause has no meaning for a driver, or None when it has one."""
        return None if self.needs is None else driver.lacks.get(self.needs)

    def is_requested(self, driver: Driver, mode: CallMode) -> bool:
        """Return whether the clause has a meaning for a driver in a mode."""
        return mode in driver.modes and mode in self.modes and self.lacking(driver) is None

    def judge(self, driver: Driver, mode: CallMode) -> None:
        """Check the clause, or that the deviation that is declared for it still stands.

        Raises:
            NonConformance: The clause does not hold.
            DriverError: It holds, and a deviation is declared; or the driver ignores a part of a
                scenario.
        """
        reason = driver.deviation(self.number, mode)
        if reason is None:
            self.check(Trial(driver, mode))
            return
        try:
            self.check(Trial(driver, mode))
        except NonConformance:
            return
        raise DriverError(
            f"clause {self.number} holds through {driver.name} ({mode}), but a deviation is "
            f"declared: {reason!r}. Take it out."
        )
