"""A run's meter as those meet it whom some of its caps do not bind."""

from __future__ import annotations

from copy import copy
from typing import Any, cast

from budgetguard_core.budget import DIMENSIONS
from budgetguard_core.caps import INFINITY, Caps, Marks
from budgetguard_core.meter import Meter


class ExemptMeter:
    """A run's meter as housekeeping meets it: neither the run's iterations nor its time bind.

    It is asked in the meter's place, and only asked: what was used is charged to the meter.
    """

    __slots__ = ("_meter",)

    def __init__(self, meter: Meter) -> None:
        self._meter: Meter
        object.__setattr__(self, "_meter", meter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meter, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name != "iterations":
            setattr(self._meter, name, value)

    @property
    def caps(self) -> Caps:
        """The caps that are left."""
        caps: Caps = copy(self._meter.caps)
        caps.iterations = caps.nanoseconds = INFINITY
        return caps

    @property
    def marks(self) -> Marks:
        """The marks that are left."""
        marks: Marks = copy(self._meter.marks)
        marks.iterations = marks.nanoseconds = INFINITY
        return marks

    @property
    def mark_calls(self) -> float:
        """The mark of the model calls."""
        return self.marks.model_calls

    def fits_model_call(self, now: int, retry: bool, tokens: int, cost: int) -> bool:
        """Tell whether one more model call is within what is left."""
        return Meter.fits_model_call(cast("Meter", self), now, retry, tokens, cost)

    def fits_tool_calls(self, now: int) -> bool:
        """Tell whether a batch of tool calls is within what is left."""
        return Meter.fits_tool_calls(cast("Meter", self), now)


class ReserveMeter(ExemptMeter):
    """A stopped run's meter as its last answer meets it: tokens and dollars bind, and in whole."""

    @property
    def halt(self) -> bool:
        """Nothing else stands against it; that the run was stopped is why it is asked for."""
        return False

    @property
    def caps(self) -> Caps:
        """The caps that are left."""
        caps = Caps(self._meter.caps.budget.model_copy(update={"finalize_reserve": None}))
        caps.iterations = caps.model_calls = caps.tool_calls = caps.nanoseconds = INFINITY
        return caps

    @property
    def marks(self) -> Marks:
        """The marks that are left."""
        return Marks(self.caps, DIMENSIONS)
