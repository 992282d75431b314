"""Time as a parameter: the machine's, and the one that tests move."""

from __future__ import annotations

import pytest

from budgetguard_core import ConfigurationError
from budgetguard_core.kit import SystemClock
from budgetguard_core.testing import ManualClock


def test_the_machines_clock():
    clock = SystemClock()
    assert clock.monotonic_ns() <= clock.monotonic_ns()
    assert clock.wall_ns() > 10**18


def test_a_manual_clock_moves_only_when_told_to():
    clock = ManualClock()
    assert (clock.monotonic_ns(), clock.wall_ns()) == (0, 0)
    clock.advance(1.5)
    clock.advance(0)
    assert (clock.monotonic_ns(), clock.wall_ns()) == (1_500_000_000, 1_500_000_000)


def test_time_does_not_go_back():
    with pytest.raises(ConfigurationError, match=r"seconds must be >= 0, got -1\."):
        ManualClock().advance(-1)
