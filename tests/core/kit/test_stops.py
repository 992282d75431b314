"""A stop is told from any other exception."""

import pytest

from budgetguard_core import BudgetExceeded, StopReason, Trip
from budgetguard_core.kit import Violation, is_stop

HELD = (Violation(reason=StopReason.ABORTED),)
STOP = BudgetExceeded(Trip(reason=StopReason.ABORTED, violations=HELD, run_id="run"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (STOP, True),
        (ValueError(), False),
        (None, False),
        (ExceptionGroup("tasks", [STOP, STOP]), True),
        (ExceptionGroup("tasks", [STOP, ExceptionGroup("more", [STOP])]), True),
        (ExceptionGroup("tasks", [STOP, ValueError()]), False),
    ],
)
def test_a_stop_is_told_from_any_other_exception(error, expected):
    assert is_stop(error) is expected
