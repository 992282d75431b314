"""What stands against a run whatever its caps say: its trip, an abort, held limits, loops."""

from __future__ import annotations

from enum import StrEnum

from budgetguard_core.breakers import REPORT_PROGRESS
from budgetguard_core.budget import Budget
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.loops import LoopDetector
from budgetguard_core.meter import Meter
from budgetguard_core.run_breakers import RunBreakers
from budgetguard_core.stop import StopCondition, StopReason, Trip, Violation, as_condition


class Mode(StrEnum):
    """What a guard does with its limits."""

    ENFORCE = "enforce"
    """Count, warn, and stop the run."""
    OBSERVE = "observe"
    """Count and warn, record the trip that ENFORCE would have made, refuse nothing."""
    OFF = "off"
    """Do nothing."""


class Standing:
    """The reasons of one run to stop that are no caps, and what became of them.

    Where an advisory run has recorded its trip, nothing of its own stands against it any more;
    what an ancestor enforces does.

    Attributes:
        trip: Why the run was stopped, or None.
        observed: The trip that an advisory run would have made, or None.
        aborted: Why somebody asked for the end, or None.
        held: Limits that are not the engine's own.
        detector: Finds loops; None where that is turned off.
        conditions: The user's own.
    """

    __slots__ = (
        "_breakers",
        "_meter",
        "aborted",
        "conditions",
        "detector",
        "held",
        "observed",
        "trip",
    )

    def __init__(
        self, meter: Meter, budget: Budget, mode: Mode, breakers: RunBreakers | None
    ) -> None:
        self._meter = meter
        self._breakers = breakers
        self.begin(budget, mode)

    def begin(self, budget: Budget, mode: Mode) -> None:
        """Forget everything."""
        self.trip: Trip | None = None
        self.observed: Trip | None = None
        self.aborted: str | None = None
        self.held: list[Violation] = []
        detection = None if mode is Mode.OFF else budget.loop_detection
        self.detector = None if detection is None else LoopDetector(detection)
        self.conditions: tuple[StopCondition, ...] = tuple(
            as_condition(one) for one in budget.stop_when
        )
        self.weigh()

    def go_on_from(
        self,
        trip: Trip | None,
        observed: Trip | None,
        aborted: str | None,
        held: tuple[Violation, ...],
        detector: LoopDetector | None,
    ) -> None:
        """Take over what stood against an earlier leg of the run."""
        self.trip = trip
        self.observed = observed
        self.aborted = aborted
        self.held = list(held)
        self.detector = detector
        self.weigh()

    def weigh(self) -> None:
        """Tell the meter whether anything here stands against the next step."""
        own = (
            self.aborted is not None
            or bool(self.held)
            or (self.detector is not None and self.detector.tripped)
            or (self._breakers is not None and self._breakers.tripped)
        )
        looks_on = self.observed is not None
        self._meter.set_halt(self.trip is not None or (own and not looks_on), looks_on)

    def hold(self, violation: Violation) -> None:
        """Let a limit stand against the next step."""
        if self.observed is None and violation not in self.held:
            self.held.append(violation)
            self.weigh()

    def abort(self, detail: str) -> bool:
        """Let the wish for an end stand against the next step; False when it changes nothing."""
        if self.trip is not None or self.aborted is not None or self.observed is not None:
            return False
        self.aborted = detail
        self.weigh()
        return True

    def set_trip(self, trip: Trip) -> None:
        """Stop the run for good."""
        self.trip = trip
        self.weigh()

    def observe_trip(self, trip: Trip) -> None:
        """Record the trip of an advisory run; from here on it looks on."""
        self.observed = trip
        self.weigh()

    def take_nudge(self) -> str | None:
        """Take the correction that is due; there is none where the run only looks on."""
        if self.detector is None or not self.detector.due or self.observed is not None:
            return None
        return self.detector.nudge()

    def take_request(self) -> str | None:
        """Take the request for a report, or the correction after one, that is due."""
        progress = None if self._breakers is None else self._breakers.progress
        if progress is None or self.observed is not None:
            return None
        return progress.nudge()

    def take_message(self) -> str | None:
        """Take what the model should be told before its next call: at most one sentence."""
        return self.take_nudge() or self.take_request()

    @property
    def asks(self) -> bool:
        """Whether the model is asked how far it is."""
        return self._breakers is not None and self._breakers.progress is not None

    def show(self, tool: str, arguments: str, result: str, *, error: str | None = None) -> None:
        """Show the loop detector a call that ended, by its fingerprints."""
        detector = self.detector
        # What a report says is looked at; that it is made again is as it should be.
        if detector is not None and not (tool == REPORT_PROGRESS and self.asks):
            detector.observe(tool, arguments, result, error=error)
            if detector.tripped:
                self.weigh()

    def violations(self, asking: bool) -> list[Violation]:
        """List what holds against any step, whatever it is.

        Args:
            asking: The step is this run's own. A loop is a conversation's: that of an ancestor
                ends with the ancestor's own next step.
        """
        held = list(self.held)
        if self.aborted is not None:
            held.append(Violation(reason=StopReason.ABORTED, detail=self.aborted))
        if asking and self.detector is not None and self.detector.tripped:
            held.append(self.detector.violation())
        progress = None if self._breakers is None else self._breakers.progress
        if asking and progress is not None and progress.tripped:
            held.append(progress.violation())
        return held


def as_mode(mode: Mode | str) -> Mode:
    """Read a mode by its name.

    Raises:
        ConfigurationError: There is no such mode.
    """
    try:
        return Mode(mode)
    except ValueError:
        known = ", ".join(Mode)
        raise ConfigurationError(f"mode must be one of {known}, got {mode!r}.") from None
