"""Calls back at a time, for work that no event loop watches: one waiting thread for all of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

from budgetguard_core.clock import SystemClock

LONGEST_SLEEP: Final = 1.0
"""Seconds after which the thread looks again; it ends where it finds nothing set."""
_MOMENT_NS: Final = 50_000_000


class Alarm:
    """A time at which somebody is to be called back.

    Args:
        alarms: Where it is set.
        due_ns: When, by the machine's monotonic clock.
        callback: What is called, in a thread of its own.
    """

    __slots__ = ("_alarms", "callback", "due_ns")

    def __init__(self, alarms: Alarms, due_ns: int, callback: Callable[[], object]) -> None:
        self._alarms = alarms
        self.due_ns = due_ns
        self.callback = callback

    def cancel(self) -> None:
        """Take it back; safe to call again, and when it has gone off."""
        self._alarms.forget(self)


class Alarms:
    """The alarms of a process.

    Nearly every call comes back before its deadline. So setting and cancelling is an entry in a
    table: the thread is there from the call before, and is not woken for what is due later than
    it wakes by itself.
    """

    def __init__(self) -> None:
        self._clock = SystemClock()
        self.reset()

    def reset(self) -> None:
        """Begin anew: in a forked child, whose the thread and the calls in flight are not."""
        # Reentrant: a signal's handler may abort a run while its thread sets an alarm.
        self._changed = threading.Condition(threading.RLock())
        self._set: dict[Alarm, None] = {}
        self._thread: threading.Thread | None = None
        self._wakes_ns = 0

    def __len__(self) -> int:
        return len(self._set)

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that waits; None before the first alarm, and a while after the last."""
        return self._thread

    def set(self, seconds: float, callback: Callable[[], object]) -> Alarm:
        """Call back in so many seconds, once."""
        alarm = Alarm(self, self._clock.monotonic_ns() + round(seconds * 1e9), callback)
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._wait, name="budgetguard-alarms", daemon=True)
                thread.start()
                self._thread = thread
            elif alarm.due_ns < self._wakes_ns:
                self._changed.notify()
            self._set[alarm] = None
        return alarm

    def forget(self, alarm: Alarm) -> None:
        """Take an alarm back; nothing of it is kept."""
        with self._changed:
            self._set.pop(alarm, None)

    def _wait(self) -> None:
        while self._slept():
            self._go_off()

    def _slept(self) -> bool:
        """Sleep until something may be due; tell whether anything is set."""
        with self._changed:
            now = self._clock.monotonic_ns()
            latest = now + round(LONGEST_SLEEP * 1e9)
            # No name in this frame may hold an alarm while it sleeps.
            nearest = min((alarm.due_ns for alarm in self._set), default=latest)
            self._wakes_ns = min(nearest, latest)
            self._changed.wait((self._wakes_ns - now) / 1e9)
            if not self._set:
                self._thread = None
            return self._thread is not None

    def _go_off(self) -> None:
        with self._changed:
            now = self._clock.monotonic_ns()
            due = [alarm for alarm in self._set if alarm.due_ns <= now]
            for alarm in due:
                del self._set[alarm]
        for alarm in due:
            try:
                # Each in its own: what is called may write to a disk, or ask a person.
                threading.Thread(target=alarm.callback, daemon=True).start()
            except RuntimeError:
                # No thread is to be had at the moment.
                with self._changed:
                    alarm.due_ns = now + _MOMENT_NS
                    self._set[alarm] = None


ALARMS: Final = Alarms()

if hasattr(os, "register_at_fork"):  # pragma: no branch - Windows has no fork
    os.register_at_fork(after_in_child=ALARMS.reset)
