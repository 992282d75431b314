"""The detector of runs that bring nothing new: repeated calls, errors, polls and replies.

Why one rule for calls: a call is *stale* when the same tool, the same arguments and the same
result were seen at or after the latest new call. Stale calls in a row are what an identical call,
a cycle of tools and two agents in a circle have in common, while paging, polling that advances,
and "change something, check everything again" bring something new and are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator

from budgetguard_core.canonical import digest
from budgetguard_core.decision import ToolCall
from budgetguard_core.errors import shown
from budgetguard_core.loop_detection import LoopDetection
from budgetguard_core.masking import (
    SHORT,
    WAITS,
    fingerprint_alike,
    fingerprint_reply,
    says_not_yet,
)
from budgetguard_core.stop import StopReason, Violation

_LONGEST_NAME = 64
_LONGEST_CYCLE = 4
_RECENT_KEPT = 2 * _LONGEST_CYCLE

_UNSPEAKABLE = re.compile(r"[^\w.:/-]+")
_UNNAMED = "assistant"
_ADVICE = "try another approach, or report what blocks you."
_PATIENCE = "wait longer before you ask again, do something else, or report what blocks you."

_Key: TypeAlias = tuple[str, str, str]
_Reply: TypeAlias = tuple[str, str]
_Seen = TypeVar("_Seen", _Key, _Reply)


@lru_cache(maxsize=64)
def _as_set(names: tuple[str, ...]) -> frozenset[str]:
    """Return the names as a set, the same one for all runs that have them."""
    return frozenset(names)


class _Row:
    """The number in a row, and whether the model was nudged."""

    def __init__(self, name: str, settings: LoopDetection) -> None:
        self.name = name
        self.nudge_after: int = getattr(settings, f"nudge_after{_suffix(name)}")
        self.stop_after: int = getattr(settings, f"stop_after{_suffix(name)}")
        # Where nobody takes the nudge.
        self.patience: int = self.stop_after + settings.window
        self.length = 0
        self.nudged_at = 0

    def start(self, length: int, nudged_at: int = 0) -> None:
        self.length = length
        self.nudged_at = nudged_at

    def step(self, grows: bool, first: int = 0) -> None:
        """Go on with the row, or start anew."""
        if grows:
            self.length += 1
        else:
            self.length = first
            self.nudged_at = 0

    def notify(self) -> None:
        """Note that the model knows: it has one more to adapt."""
        self.nudged_at = self.length

    @property
    def due(self) -> bool:
        return not self.nudged_at and self.length >= self.nudge_after

    @property
    def tripped(self) -> bool:
        if self.nudged_at:
            return self.length >= self.stop_after and self.length > self.nudged_at
        return self.length >= self.patience


class _Rows(NamedTuple):
    """The rows, those first that say most about what is wrong."""

    same_error: _Row
    errors: _Row
    stale: _Row
    repeats: _Row
    waits: _Row
    replies: _Row
    short_replies: _Row


# Of each row, what a violation counts.
_COUNTED = {
    "same_error": "times in a row the same call ended with the same error",
    "errors": "calls in a row ended with the same error",
    "stale": "calls in a row brought a result already seen for the same arguments",
    "repeats": "times in a row the same call brought a result that differs in times and ids alone",
    "waits": "more calls brought the same answer: not yet",
    "replies": "replies in a row were made before",
    "short_replies": "replies in a row were made before, word for word",
}
# Of each row, the words to the model.
_NUDGES = {
    "same_error": "You have called {names} with these arguments {length} times and got the same "
    "error each time",
    "errors": "Your latest {length} calls of {names} ended with the same error, whatever the "
    "arguments",
    "repeats": "You have called {names} with these arguments again and again, and the latest "
    "{more} results differ in times and ids alone",
    "waits": "You have asked {names} again {length} times, and it answers that it is not ready yet",
    "same_call": "You have called {names} with these arguments {times} times and got the same "
    "result each time",
    "circle": "You are going round in a circle of the same {period} calls ({names}), and they "
    "bring the same results each time",
    "stale": "Your latest calls ({names}) were made before with the same arguments, and brought "
    "the same results again",
    "circle_of_replies": "The conversation goes round in a circle ({names}): its latest replies "
    "were all made before",
    "replies": "The latest replies ({names}) were all made before",
}


def _suffix(name: str) -> str:
    return "" if name == "stale" else f"_{name}"


class _State(BaseModel):
    """The state of a detector, as it is stored."""

    model_config = ConfigDict(defer_build=True, extra="forbid")

    seen: list[_Key]
    fresh: NonNegativeInt
    recent: list[_Key]
    times: NonNegativeInt
    masked: str | None
    waiting: list[_Key]
    error: tuple[str, str] | None
    earlier_replies: list[_Reply]
    replies: list[_Reply]
    rows: dict[str, tuple[NonNegativeInt, NonNegativeInt]]

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        rows = {name: length for name, (length, _) in self.rows.items()}
        of_replies = rows.pop("replies", 0) + rows.pop("short_replies", 0)
        if (
            self.rows.keys() != set(_Rows._fields)
            or (any(rows.values()) and not self.recent)
            or (of_replies and not self.replies)
        ):
            raise ValueError("a row counts what is not there")
        return self


class LoopDetector:
    """Finds rows that bring nothing new, at constant memory and constant cost per call.

    Whoever admits the steps of a run takes the `nudge` before each, even where it cannot be
    delivered, and stops when `tripped`. Not safe for threads by itself: the guard's lock is.

    Attributes:
        due: A nudge waits to be taken.
        tripped: The run is to be stopped: a row is as long as its `stop_after`, and longer than
            when the nudge was taken. Where nobody takes it, `window` more trip as well.
        ignored: The names of arguments to leave out of a call's fingerprint.
        ignored_results: The names to leave out of the fingerprint of a result.
        reply: The number of replies that were begun.
    """

    def __init__(self, settings: LoopDetection) -> None:
        self._window = settings.window
        patterns = "|".join(translate(pattern) for pattern in settings.exempt)
        self._exempt = re.compile(patterns).match if patterns else None
        self.ignored = _as_set(tuple(settings.ignore_arguments))
        self.ignored_results = _as_set(tuple(settings.ignore_results))
        self._rows = _Rows(*(_Row(name, settings) for name in _Rows._fields))
        # Those that are not at 0.
        self._growing: list[_Row] = []
        # The generation in which each call was last seen, the least recent first. A new call
        # begins a generation, so what was seen at or after it is of the current one.
        self._seen: dict[_Key, int] = {}
        self._generation = 0
        self._recent: list[_Key] = []
        # How often the latest call was made in a row.
        self._times = 0
        # The latest result without times and ids, where its call was a repetition.
        self._masked: str | None = None
        # The calls that were answered with "not yet" since the latest progress.
        self._waiting: dict[_Key, int] = {}
        self._error: tuple[str, str] | None = None
        self._error_reply = 0
        self._earlier_replies: dict[_Reply, int] = {}
        self._replies: list[_Reply] = []
        self.due = False
        self.tripped = False
        self.reply = 0

    def begin_reply(self) -> None:
        """Begin a reply of the model: the calls that it asks for are one step of a row of errors.

        Where no reply is ever begun, each call is a reply of its own.
        """
        self.reply += 1

    def alike(self, call: ToolCall, text: str, *, failed: bool = False) -> str | None:
        """Digest a result without its times, durations and ids, where a row needs that.

        Args:
            call: The call that has ended, before it is observed.
            text: The text of its result or error.
            failed: It is that of an error.

        Returns:
            None unless the result says "not yet", or the call is the latest one made again.
        """
        if not failed and says_not_yet(text):
            return f"{WAITS}{fingerprint_alike(text, self.ignored)}"
        made = (_short(call.name), call.fingerprint)
        if self._recent and self._recent[-1][:2] == made:
            return fingerprint_alike(text, self.ignored)
        return None

    def observe(
        self,
        tool: str,
        arguments: str,
        result: str,
        error: str | None = None,
        alike: str | None = None,
    ) -> None:
        """Take in a call that has ended, failed ones included.

        Args:
            tool: The tool's name, or what stands for it (a handoff, a node of a graph).
            arguments: The `fingerprint` of its arguments.
            result: The `fingerprint_result` of its result, or of the text of its error. Constant
                where there is none (a handoff).
            error: The `fingerprint_error` of the text of its error, or where that is not known,
                what stands in for it. None when the call did not fail.
            alike: What `alike` returned for it.
        """
        if self._exempt is not None and self._exempt(tool):
            return
        key = (_short(tool), arguments, result)
        rows, recent = self._rows, self._recent
        latest = recent[-1] if recent else None
        seen = self._seen.get(key, 0)
        self._generation += not seen
        _remember(self._seen, key, self._generation, self._window)
        recent.append(key)
        del recent[:-_RECENT_KEPT]

        if not seen and error is None and alike is None:
            # Progress: it ends every row.
            self._times, self._error, self._masked = 1, None, None
            self._waiting.clear()
            if self._growing:
                for row in self._rows:
                    row.start(0)
                self._judge()
            return
        again = key == latest
        self._times = self._times + 1 if again else 1
        failed = error is not None
        rows.same_error.step(again and failed and rows.same_error.length > 0, first=int(failed))
        kind = None if error is None else (key[0], error)
        if kind is None or kind != self._error:
            rows.errors.start(int(failed))
        elif not self.reply or self.reply != self._error_reply:
            rows.errors.step(grows=True)
        self._error = kind
        self._error_reply = self.reply
        rows.stale.step(seen == self._generation)
        if not seen:
            rows.replies.start(0)
            rows.short_replies.start(0)
        self._poll(key, alike, repeats=latest is not None and latest[:2] == key[:2], new=not seen)
        self._judge()

    def _poll(self, key: _Key, alike: str | None, *, repeats: bool, new: bool) -> None:
        rows = self._rows
        waits = alike is not None and alike.startswith(WAITS)
        if alike is not None and waits:
            wait = (key[0], key[1], alike)
            rows.waits.step(wait in self._waiting)
            _remember(self._waiting, wait, 0, self._window)
            # To wait is no repetition, so it is to stale calls what a turn of the user is.
            self._begin_anew()
        elif new:
            rows.waits.start(0)
            self._waiting.clear()
        same = alike is not None and alike == self._masked
        rows.repeats.step(repeats and same and not waits)
        self._masked = alike

    def observe_reply(
        self, speaker: str | None, text: str, *, fingerprint: str | None = None
    ) -> None:
        """Take in a reply that asks for no tool.

        Args:
            speaker: The name of the agent or node that made it; None where there is one only.
            text: The reply. White space around it does not count; one without text (an image, a
                parsed object) is not looked at.
            fingerprint: The `fingerprint_reply` of the text, where it is known already; then
                the text is not read.
        """
        name = speaker or _UNNAMED
        if speaker is not None and self._exempt is not None and self._exempt(name):
            return
        if fingerprint is None:
            if not text or text.isspace():
                return
            fingerprint = fingerprint_reply(text)
        reply = (_short(name), fingerprint)
        known = reply in self._earlier_replies
        rows = self._rows
        rows.short_replies.step(known)
        # A short one that repeats neither adds to the row of the others nor ends it.
        if not known or not fingerprint.startswith(SHORT):
            rows.replies.step(known)
        _remember(self._earlier_replies, reply, 0, self._window)
        self._replies.append(reply)
        del self._replies[:-_RECENT_KEPT]
        self._judge()

    def user_turn(self) -> None:
        """End the rows: the user spoke. What was seen and said is remembered.

        What the user says is as new as a new call: asked to check again, an agent may make its
        calls once more, with the same results, before one is stale; but for the latest, which is
        what a run that is stuck goes on with.
        The same call with the same error is no better for it, so that row goes on.
        """
        rows = self._rows
        self._begin_anew()
        for row in rows:
            if row is not rows.same_error:
                row.start(0)
        self._error = None
        # The user's turn is to be answered: one more error ends the run, and not the old ones.
        if rows.same_error.nudged_at:
            rows.same_error.notify()
        self._judge()

    def _begin_anew(self) -> None:
        """End the row of stale calls; the latest one alone can be stale at once."""
        self._generation += 1
        if self._recent:
            self._seen[self._recent[-1]] = self._generation
        self._rows.stale.start(0)

    def nudge(self) -> str | None:
        """Take the corrective sentence for the model, if one is due; it counts as given then.

        It speaks of the work alone, and is due once in a row.
        """
        due = [row for row in self._rows if row.due]
        if not due:
            return None
        for row in due:
            row.notify()
        self._judge()
        row = due[0]
        period, names = self._cycle_of(row)
        kind = row.name.removeprefix("short_")
        if kind == "replies" and period > 1:
            kind = "circle_of_replies"
        elif kind == "stale" and period:
            kind = "circle" if period > 1 else "same_call"
        facts = {"length": row.length, "more": row.length + 1, "times": self._times}
        advice = _PATIENCE if row is self._rows.waits else _ADVICE
        return f"{_NUDGES[kind].format(names=names, period=period, **facts)}; {advice}"

    def _cycle_of(self, row: _Row) -> tuple[int, str]:
        """Return how long the cycle of a row is, 0 for none, and the names in it."""
        if row is self._rows.replies or row is self._rows.short_replies:
            return _cycle(self._replies, row.length)
        if row is self._rows.stale:
            return _cycle(self._recent, row.length)
        return 0, _speakable(self._recent[-1][0])

    def violation(self) -> Violation:
        """Return why the run is stopped; requested when `tripped`.

        The reason is `oscillation` when the latest calls or replies went twice round a cycle of 2
        to 4 different ones, and `no_progress` otherwise.
        """
        rows = self._rows
        row = next((row for row in rows if row.tripped), rows.stale)
        period, names = self._cycle_of(row)
        where = f"cycle of {period}" if period > 1 else "latest"
        setting = f"stop_after{_suffix(row.name)}={row.stop_after}"
        return Violation(
            reason=StopReason.OSCILLATION if period > 1 else StopReason.NO_PROGRESS,
            limit=row.stop_after,
            used=row.length,
            detail=f"{row.length} {_COUNTED[row.name]}, {setting}; {where}: {names}",
        )

    def state(self) -> dict[str, Any]:
        """Return what the detector knows, ready for JSON. It holds no argument and no result."""
        generation = self._generation
        return {
            "seen": [list(key) for key in self._seen],
            "fresh": sum(last == generation for last in self._seen.values()),
            "recent": [list(key) for key in self._recent],
            "times": self._times,
            "masked": self._masked,
            "waiting": [list(key) for key in self._waiting],
            "error": None if self._error is None else list(self._error),
            "earlier_replies": [list(reply) for reply in self._earlier_replies],
            "replies": [list(reply) for reply in self._replies],
            "rows": {row.name: [row.length, row.nudged_at] for row in self._rows},
        }

    @classmethod
    def from_state(cls, settings: LoopDetection, state: object) -> Self:
        """Make a detector that goes on where another's `state` was taken.

        Under other settings the rows are kept and judged by the new numbers.
        """
        try:
            known = _State.model_validate(state)
        except ValueError:
            raise ValueError(
                f"the state of a loop detector must be what state() returned, got {shown(state)}. "
                "Use a new LoopDetector to go on without it."
            ) from None
        detector = cls(settings)
        window = settings.window
        kept = known.seen[-window:]
        detector._generation = 2
        detector._seen = {
            key: 2 if position >= len(kept) - known.fresh else 1
            for position, key in enumerate(kept)
        }
        detector._recent, detector._replies = known.recent, known.replies
        detector._times, detector._masked, detector._error = known.times, known.masked, known.error
        detector._waiting = dict.fromkeys(known.waiting[-window:], 0)
        detector._earlier_replies = dict.fromkeys(known.earlier_replies[-window:], 0)
        for row in detector._rows:
            row.start(*known.rows[row.name])
        detector._judge()
        return detector

    def _judge(self) -> None:
        rows = self._growing = [row for row in self._rows if row.length]
        self.due = any(row.due for row in rows)
        self.tripped = any(row.tripped for row in rows)


def _remember(seen: dict[_Seen, int], one: _Seen, generation: int, window: int) -> None:
    """Put one of the different calls or replies last; the least recent goes."""
    if seen.pop(one, None) is None and len(seen) == window:
        del seen[next(iter(seen))]
    seen[one] = generation


def _cycle(latest: Sequence[_Key] | Sequence[_Reply], row: int) -> tuple[int, str]:
    """Find the shortest cycle that the latest went round twice, 0 for none, and its names."""
    period = 0
    for length in range(1, _LONGEST_CYCLE + 1):
        if len(latest) >= 2 * length and latest[-length:] == latest[-2 * length : -length]:
            period = length
            break
    names = [_speakable(one[0]) for one in latest[-(period or row) :]]
    return period, ", ".join(names if period else dict.fromkeys(names))


def _short(name: str) -> str:
    """Shorten a name that the model wrote: what is kept of it must not grow with it."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:40]}#{digest(name)}"


def _speakable(name: str) -> str:
    """Make a name that the model wrote safe to put into a sentence."""
    return _UNSPEAKABLE.sub("_", name)[:_LONGEST_NAME] or "_"
