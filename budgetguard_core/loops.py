"""The detector of runs that bring nothing new: repeated calls, errors and replies.

Why one rule for calls: a call is *stale* when the same tool, the same arguments and the same
result were seen at or after the latest new call. Stale calls in a row are what an identical call,
a cycle of tools and two agents in a circle have in common, while paging, polling that advances,
and "change something, check everything again" bring something new and are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Any, NamedTuple, Self, TypeAlias, cast

from budgetguard_core.canonical import KEY_MARKS, digest_of, fingerprint_reply, fingerprint_result
from budgetguard_core.errors import shown
from budgetguard_core.loop_detection import LoopDetection
from budgetguard_core.stop import StopReason, Violation

_LONGEST_NAME = 64
_LONGEST_CYCLE = 4
_RECENT_KEPT = 2 * _LONGEST_CYCLE

_UNSPEAKABLE = re.compile(r"[^\w.:/-]+")
_UNNAMED = "assistant"
_ADVICE = "try another approach, or report what blocks you."

_Key: TypeAlias = tuple[str, str, str]
_Reply: TypeAlias = tuple[str, str]


@lru_cache(maxsize=64)
def _as_set(names: tuple[str, ...]) -> frozenset[str]:
    """Return the names as a set, the same one for all runs that have them."""
    return frozenset(names)


class _Row:
    """How many in a row, and whether the model was told."""

    __slots__ = ("length", "nudge_after", "nudged_at", "patience", "stop_after")

    def __init__(self, nudge_after: int, stop_after: int, window: int) -> None:
        self.nudge_after = nudge_after
        self.stop_after = stop_after
        # Where nobody takes the nudge.
        self.patience = stop_after + window
        self.length = 0
        self.nudged_at = 0

    def start(self, length: int, nudged_at: int = 0) -> None:
        self.length = length
        self.nudged_at = nudged_at

    def grow(self) -> None:
        self.length += 1

    def tell(self) -> None:
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
    replies: _Row


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

    __slots__ = (
        "_alike",
        "_digested",
        "_error",
        "_error_reply",
        "_exempt",
        "_generation",
        "_quiet",
        "_recent",
        "_replies",
        "_rows",
        "_said",
        "_seen",
        "_window",
        "due",
        "ignored",
        "ignored_results",
        "reply",
        "tripped",
    )

    def __init__(self, settings: LoopDetection) -> None:
        self._window = window = settings.window
        patterns = "|".join(translate(pattern) for pattern in settings.exempt)
        self._exempt = re.compile(patterns).match if patterns else None
        self.ignored = _as_set(tuple(settings.ignore_arguments))
        self.ignored_results = _as_set(tuple(settings.ignore_results))
        self._rows = _Rows(
            _Row(settings.nudge_after_same_error, settings.stop_after_same_error, window),
            _Row(settings.nudge_after_errors, settings.stop_after_errors, window),
            _Row(settings.nudge_after, settings.stop_after, window),
            _Row(settings.nudge_after_replies, settings.stop_after_replies, window),
        )
        # The generation in which each call was last seen, the least recent first. A new call
        # begins a generation, so what was seen at or after it is of the current one.
        self._seen: dict[_Key, int] = {}
        self._generation = 0
        # The latest calls; more of them than are looked at, or each would cost a cut.
        self._recent: list[_Key] = []
        # How often the latest call was made in a row.
        self._alike = 0
        self._error: tuple[str, str] | None = None
        self._error_reply = 0
        self._said: dict[_Reply, None] = {}
        self._replies: list[_Reply] = []
        # No row has begun: nothing has to be ended by what is new.
        self._quiet = True
        # Keys are fingerprints, because one came from outside or will go there.
        self._digested = False
        self.due = False
        self.tripped = False
        self.reply = 0

    def begin_reply(self) -> None:
        """Begin a reply of the model: the calls that it asks for are one step of a row of errors.

        Where no reply is ever begun, each call is a reply of its own.
        """
        self.reply += 1

    def observe(self, tool: str, arguments: str, result: str, error: str | None = None) -> None:
        """Take in a call that has ended, failed ones included.

        Args:
            tool: The tool's name, or what stands for it (a handoff, a node of a graph).
            arguments: The `arguments_key` or the `fingerprint` of its arguments.
            result: The `result_key` or the `fingerprint_result` of its result, or of the text of
                its error. Constant where there is none (a handoff).
            error: The `fingerprint_error` of the text of its error, or where that is not known,
                what stands in for it. None when the call did not fail.
        """
        if arguments[:1] not in KEY_MARKS or result[:1] not in KEY_MARKS:
            self.settle_on_digests()
        self.take(tool, arguments, result, error)

    def take(self, tool: str, arguments: str, result: str, error: str | None) -> None:
        """Do what `observe` does, for keys; after `settle_on_digests`, for fingerprints too."""
        if self._exempt is not None and self._exempt(tool):
            return
        if len(tool) > _LONGEST_NAME:
            tool = _short(tool)
        if self._digested:
            arguments, result = digest_of(arguments), digest_of(result)
        key = (tool, arguments, result)
        seen = self._seen
        generation = seen.pop(key, 0)
        if generation:
            seen[key] = self._generation
        else:
            self._generation = newest = self._generation + 1
            if len(seen) == self._window:
                del seen[next(iter(seen))]
            seen[key] = newest
        recent = self._recent
        if generation or error is not None or not self._quiet:
            self._count(key, generation, error)
        else:
            self._alike = 1
        recent.append(key)
        if len(recent) > self._window:
            del recent[:-_RECENT_KEPT]

    def settle_on_digests(self) -> None:
        """Compare digests from now on: a fingerprint came from outside, or goes there."""
        if self._digested:
            return
        self._digested = True
        self._seen = {_digested(key): last for key, last in self._seen.items()}
        self._recent = [_digested(key) for key in self._recent]

    def _count(self, key: _Key, generation: int, error: str | None) -> None:
        rows = self._rows
        recent = self._recent
        again = bool(recent) and key == recent[-1]
        self._alike = self._alike + 1 if again else 1
        if again and error is not None and rows.same_error.length > 0:
            rows.same_error.grow()
        else:
            rows.same_error.start(0 if error is None else 1)
        kind = None if error is None else (key[0], error)
        if kind is not None and kind == self._error:
            if not self.reply or self.reply != self._error_reply:
                rows.errors.grow()
        else:
            rows.errors.start(0 if kind is None else 1)
        self._error = kind
        self._error_reply = self.reply
        if generation != self._generation:
            rows.stale.start(0)
        else:
            rows.stale.grow()
        if not generation:
            rows.replies.start(0)
        self._judge()

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
        reply = (name if len(name) <= _LONGEST_NAME else _short(name), fingerprint)
        said = self._said
        row = self._rows.replies
        if reply in said:
            del said[reply]
            row.grow()
        else:
            if len(said) == self._window:
                del said[next(iter(said))]
            row.start(0)
        said[reply] = None
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
        self._generation += 1
        if self._recent:
            self._seen[self._recent[-1]] = self._generation
        rows.stale.start(0)
        rows.errors.start(0)
        rows.replies.start(0)
        self._error = None
        # The user's turn is to be answered: one more error ends the run, and not the old ones.
        if rows.same_error.nudged_at:
            rows.same_error.tell()
        self._judge()

    def nudge(self) -> str | None:
        """Take the corrective sentence for the model, if one is due; it counts as given then.

        It speaks of the work alone, and is due once in a row.
        """
        if not self.due:
            return None
        rows = self._rows
        due = [row for row in rows if row.due]
        first = due[0]
        if first is rows.same_error:
            what = (
                f"You have called {self._latest()} with these arguments {first.length} times and "
                "got the same error each time"
            )
        elif first is rows.errors:
            what = (
                f"Your latest {first.length} calls of {self._latest()} ended with the same error, "
                "whatever the arguments"
            )
        elif first is rows.stale:
            what = self._stale_in_words()
        else:
            what = self._replies_in_words()
        for row in due:
            row.tell()
        self._judge()
        return f"{what}; {_ADVICE}"

    def _stale_in_words(self) -> str:
        period, names = _cycle(self._recent[-_RECENT_KEPT:], self._rows.stale.length)
        if period == 1:
            return (
                f"You have called {names} with these arguments {self._alike} times and got the "
                "same result each time"
            )
        if period:
            return (
                f"You are going round in a circle of the same {period} calls ({names}), and they "
                "bring the same results each time"
            )
        return (
            f"Your latest calls ({names}) were made before with the same arguments, and "
            "brought the same results again"
        )

    def _replies_in_words(self) -> str:
        period, names = _cycle(self._replies, self._rows.replies.length)
        if period > 1:
            return (
                f"The conversation goes round in a circle ({names}): its latest replies were all "
                "made before, word for word"
            )
        return f"The latest replies ({names}) were all made before, word for word"

    def violation(self) -> Violation:
        """Say why the run is stopped; asked when `tripped`.

        The reason is `oscillation` when the latest calls or replies went twice round a cycle of 2
        to 4 different ones, and `no_progress` otherwise.
        """
        rows = self._rows
        row = next((row for row in rows if row.tripped), rows.stale)
        period = 0
        if row is rows.same_error:
            setting = "stop_after_same_error"
            what = "times in a row the same call ended with the same error"
            names = self._latest()
        elif row is rows.errors:
            setting = "stop_after_errors"
            what = "calls in a row ended with the same error"
            names = self._latest()
        elif row is rows.stale:
            setting = "stop_after"
            what = "calls in a row brought a result already seen for the same arguments"
            period, names = _cycle(self._recent[-_RECENT_KEPT:], row.length)
        else:
            setting = "stop_after_replies"
            what = "replies in a row were made before, word for word"
            period, names = _cycle(self._replies, row.length)
        where = f"cycle of {period}" if period > 1 else "latest"
        return Violation(
            reason=StopReason.OSCILLATION if period > 1 else StopReason.NO_PROGRESS,
            limit=row.stop_after,
            used=row.length,
            detail=f"{row.length} {what}, {setting}={row.stop_after}; {where}: {names}",
        )

    def state(self) -> dict[str, Any]:
        """Return what the detector knows, ready for JSON. It holds no argument and no result."""
        self.settle_on_digests()
        generation = self._generation
        return {
            "seen": [list(key) for key in self._seen],
            "fresh": sum(last == generation for last in self._seen.values()),
            "recent": [list(key) for key in self._recent[-_RECENT_KEPT:]],
            "alike": self._alike,
            "error": None if self._error is None else list(self._error),
            "said": [list(reply) for reply in self._said],
            "replies": [list(reply) for reply in self._replies],
            "rows": {
                name: [row.length, row.nudged_at]
                for name, row in zip(_Rows._fields, self._rows, strict=True)
            },
        }

    @classmethod
    def from_state(cls, settings: LoopDetection, state: object) -> Self:
        """Make a detector that goes on where another's `state` was taken.

        Under other settings the rows are kept and judged by the new numbers.

        Raises:
            ValueError: The state is damaged.
        """
        detector = cls(settings)
        try:
            detector._load(cast("dict[str, Any]", state))
        except (AttributeError, KeyError, TypeError, ValueError):
            msg = (
                f"the state of a loop detector must be what state() returned, got {shown(state)}. "
                "Use a new LoopDetector to go on without it."
            )
            raise ValueError(msg) from None
        return detector

    def _load(self, state: dict[str, Any]) -> None:
        seen = dict.fromkeys(_key(entry) for entry in state["seen"])
        recent = [_key(entry) for entry in state["recent"]]
        said = dict.fromkeys(_reply(entry) for entry in state["said"])
        replies = [_reply(entry) for entry in state["replies"]]
        error = None if state["error"] is None else _reply(state["error"])
        fresh, alike = _natural(state["fresh"]), _natural(state["alike"])
        lengths = {
            name: (_natural(length), _natural(nudged_at))
            for name, (length, nudged_at) in state["rows"].items()
        }
        sound = (
            len(state) == 8
            and len(seen) == len(state["seen"])
            and len(said) == len(state["said"])
            and len(recent) <= _RECENT_KEPT
            and len(replies) <= _RECENT_KEPT
            and list(seen)[-1:] == recent[-1:]
            and list(said)[-1:] == replies[-1:]
            and bool(fresh) is bool(alike) is bool(seen)
            and fresh <= len(seen)
            and lengths.keys() == set(_Rows._fields)
            and all(nudged_at <= length for length, nudged_at in lengths.values())
            and lengths["same_error"][0] <= alike
            and bool(lengths["errors"][0]) is (error is not None)
            and (error is None or error[0] == recent[-1][0])
            and (bool(seen) or not lengths["stale"][0])
            and (bool(said) or not lengths["replies"][0])
        )
        if not sound:
            raise ValueError
        kept = list(seen)[-self._window :]
        self._generation = 2
        self._seen = {key: 2 if place >= len(kept) - fresh else 1 for place, key in enumerate(kept)}
        self._recent.extend(recent)
        self._alike = alike
        self._error = error
        self._said = dict.fromkeys(list(said)[-self._window :])
        self._replies.extend(replies)
        for name, (length, nudged_at) in lengths.items():
            row: _Row = getattr(self._rows, name)
            row.start(length, nudged_at)
        self._digested = True
        self._judge()

    def _judge(self) -> None:
        same_error, errors, stale, replies = self._rows
        self._quiet = not (same_error.length or errors.length or stale.length or replies.length)
        self.due = same_error.due or errors.due or stale.due or replies.due
        self.tripped = same_error.tripped or errors.tripped or stale.tripped or replies.tripped

    def _latest(self) -> str:
        return _speakable(self._recent[-1][0])


def _cycle(recent: Iterable[_Key] | Iterable[_Reply], row: int) -> tuple[int, str]:
    """Find the shortest cycle that the latest went round twice, 0 for none, and its names."""
    latest = list(recent)
    period = 0
    for length in range(1, _LONGEST_CYCLE + 1):
        if len(latest) >= 2 * length and latest[-length:] == latest[-2 * length : -length]:
            period = length
            break
    names = [_speakable(one[0]) for one in latest[-(period or row) :]]
    return period, ", ".join(names if period else dict.fromkeys(names))


def _digested(key: _Key) -> _Key:
    tool, arguments, result = key
    return tool, digest_of(arguments), digest_of(result)


def _key(entry: Sequence[object]) -> _Key:
    tool, arguments, result = entry
    if not (isinstance(tool, str) and isinstance(arguments, str) and isinstance(result, str)):
        raise TypeError
    return tool, arguments, result


def _reply(entry: Sequence[object]) -> _Reply:
    name, text = entry
    if not (isinstance(name, str) and isinstance(text, str)):
        raise TypeError
    return name, text


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError
    return value


def _short(name: str) -> str:
    """Shorten a name that the model wrote: what is kept of it must not grow with it."""
    return f"{name[:40]}#{fingerprint_result(name)}"


def _speakable(name: str) -> str:
    """Make a name that the model wrote safe to put into a sentence."""
    return _UNSPEAKABLE.sub("_", name)[:_LONGEST_NAME] or "_"
