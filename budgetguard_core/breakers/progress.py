"""Progress: the model says at times how far it is, and a run that does not move is found.

A planner can wander for ever without calling anything twice. What it says about its own work
shows that: the next subgoal is the same again, or the work left does not get less.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple, cast

from budgetguard_core.settings import ProgressReports
from budgetguard_core.stop import StopReason, Violation

REPORT_PROGRESS: Final = "report_progress"
"""The name of the tool."""
REPORT_PROGRESS_DESCRIPTION: Final = (
    "Say how far the work is. Call it when you are asked to, and go on with the work after it. "
    "It changes nothing and nobody answers."
)
"""The description of the tool that the model reads."""
REPORT_PROGRESS_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "claims_so_far": {
            "type": "array",
            "items": {"type": "string"},
            "description": "What is done or known for certain by now.",
        },
        "next_subgoal": {
            "type": "string",
            "description": "What you want to achieve next, in one sentence.",
        },
        "estimated_remaining_steps": {
            "type": "integer",
            "minimum": 0,
            "description": "How many more steps you think the work takes.",
        },
    },
    "required": ["claims_so_far", "next_subgoal", "estimated_remaining_steps"],
    "additionalProperties": False,
}
"""The JSON Schema of the tool's arguments."""

NOTED: Final = "Noted. Go on."
"""The result of a report that could be read."""

_REQUEST = (
    f"Before you go on, call {REPORT_PROGRESS}: say what is done so far, what you want to achieve "
    "next, and how many more steps you think it takes."
)
_AGAIN = "Take another approach, or report what blocks you."
_MOST_STEPS = 10**9
_NOT_A_WORD = re.compile(r"[\W_]+")


class ProgressReport(NamedTuple):
    """A report of progress by the model, as far as it is kept."""

    subgoal: str
    """A digest of the next subgoal."""
    estimate: int
    """Steps that the model thinks are left."""


class ProgressSignal:
    """Judges a run's reports of progress, at constant memory. The guard's lock is its lock.

    Whoever admits the iterations of a run calls `iteration` for each, and takes the `nudge` before
    it, even where it cannot be delivered; `tripped` says that the run is to be stopped.

    Attributes:
        due: A request or a correction waits to be taken.
        tripped: The run is to be stopped: nothing changed after the correction.
    """

    def __init__(self, settings: ProgressReports) -> None:
        self.settings = settings
        self.user_turn()

    def user_turn(self) -> None:
        """Forget everything: the user spoke, so the work may be another."""
        self._begun = False
        self._since = 0
        self._subgoal = ""
        self._estimate = 0
        self._same = 0
        self._flat = 0
        # Requests in a row that brought no report.
        self._requested = 0
        # A request was taken, and the turn that may answer it is not over.
        self._waiting = False
        # What the model was corrected for: "", "same", "flat" or "silent".
        self._cause = ""
        self.due = False
        self.tripped = False

    def iteration(self) -> None:
        """Take in that a turn of the loop is to begin: the one before it, if any, is over."""
        if not self._begun:
            self._begun = True
        elif self._waiting:
            self._waiting = False
            self._requested += 1
            self.tripped = bool(self._cause)
            self.due = not self.tripped
        else:
            self._since = since = self._since + 1
            if since >= self.settings.every_iterations:
                self.due = True

    def note(self, report: ProgressReport) -> None:
        """Take in a report that was read."""
        same = bool(self._same) and report.subgoal == self._subgoal
        flat = bool(self._flat) and report.estimate >= self._estimate
        # Who reports more often than asked is not nearer to a standstill for that.
        requested = self._waiting or not self._same
        if self._cause == "same":
            self.tripped = same and requested
            over = not same
        elif self._cause == "flat":
            self.tripped = flat and requested
            over = not flat
        else:
            over = bool(self._cause)
        if over:
            # It has changed what it was corrected for: everything else begins anew as well.
            self._cause = ""
            same = flat = False
        self._same = self._same + requested if same else 1
        self._flat = self._flat + requested if flat else 1
        self._subgoal = report.subgoal
        if requested or not flat:
            self._estimate = report.estimate
        self._requested = 0
        if requested:
            self._since = 0
            self._waiting = False
        self.due = not (self._cause or self.tripped) and bool(self._standstill())

    def nudge(self) -> str | None:
        """Take the sentence for the model that is due: a request, or a correction."""
        if not self.due:
            return None
        self.due = False
        self._since = 0
        cause = "" if self._cause else self._standstill()
        self._cause = self._cause or cause
        if cause == "same":
            return f"You have named the same next subgoal {self._same} times. {_AGAIN}"
        if cause == "flat":
            return f"By your last {self._flat} reports there is no less work to do. {_AGAIN}"
        self._waiting = True
        if cause:
            return f"You were asked how far the work is and did not say. {_AGAIN} {_REQUEST}"
        return _REQUEST

    def violation(self) -> Violation:
        """Return why the run is stopped; requested when `tripped`."""
        settings = self.settings
        if self._requested:
            limit, used = settings.unanswered, self._requested
            what = f"requests in a row for a report were not answered, unanswered={limit}"
        elif self._cause == "same":
            limit, used = settings.same_subgoal, self._same
            what = f"reports in a row had the same next subgoal, same_subgoal={limit}"
        else:
            limit, used = settings.flat_estimate, self._flat
            what = f"reports in a row had an estimate that did not fall, flat_estimate={limit}"
        return Violation(
            reason=StopReason.STALLED,
            limit=limit,
            used=used,
            detail=f"{used} {what}; the model was corrected in between",
        )

    def _standstill(self) -> str:
        """Name what shows a standstill; empty for none."""
        settings = self.settings
        if self._requested >= settings.unanswered:
            return "silent"
        if self._same >= settings.same_subgoal:
            return "same"
        return "flat" if self._flat >= settings.flat_estimate else ""


def read_report(arguments: object) -> ProgressReport | str:
    """Read a report of the model; where that fails, return what is wrong with it, for the model."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        return _wrong("the arguments", "an object")
    fields = cast("Mapping[Any, Any]", arguments)
    subgoal = fields.get("next_subgoal")
    if not isinstance(subgoal, str) or not subgoal.strip():
        return _wrong("next_subgoal", "a sentence")
    estimate = _whole(fields.get("estimated_remaining_steps"))
    if estimate is None:
        return _wrong("estimated_remaining_steps", "a whole number >= 0")
    # Words alone: "Fix the parser." is the subgoal "fix the parser" again.
    words = _NOT_A_WORD.sub(" ", subgoal.casefold()).strip() or subgoal.strip()
    digest = blake2b(words.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return ProgressReport(digest, min(estimate, _MOST_STEPS))


def _wrong(name: str, rule: str) -> str:
    return f"Not noted: {name} must be {rule}. Call {REPORT_PROGRESS} again."


def _whole(value: object) -> int | None:
    if isinstance(value, str):
        # A model writes a number as a string now and then. More digits than these mean nothing.
        text = value.strip()
        value = int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if type(value) is int and value >= 0 else None
