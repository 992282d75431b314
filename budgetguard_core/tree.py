"""What a guard shares with its sub-agents: one lock, one numbering, one log."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from budgetguard_core.breakers import BreakerRegistry
from budgetguard_core.clock import Clock
from budgetguard_core.decision import Admit
from budgetguard_core.errors import ConfigurationError, text_of
from budgetguard_core.events import Event, EventBase
from budgetguard_core.pricing import PriceBook
from budgetguard_core.sinks import Listener, Sink

_LOG = logging.getLogger("budgetguard")
_ERRORS_KEPT = 20
# One for all: each empty one is an object of 216 bytes.
_NOTHING: frozenset[int] = frozenset()
UNPROJECTED = (
    "a model call without any projection was admitted under a cap on tokens or dollars: calls at "
    "the same time can pass the cap. Give ModelCall input_tokens, and set "
    "max_output_tokens_per_call."
)
_E = TypeVar("_E", bound=EventBase)


class Tree:
    """What a guard shares with its sub-agents: one lock, one numbering, one log."""

    __slots__ = (
        "__weakref__",
        "_breakers",
        "attachments",
        "call_id",
        "clock",
        "delivering",
        "delivery",
        "errors",
        "failed",
        "lock",
        "log_arguments",
        "now",
        "open",
        "outbox",
        "postponed",
        "price_book",
        "seq",
        "sinks",
        "waiting",
        "wall",
    )

    def __init__(
        self,
        clock: Clock,
        price_book: PriceBook,
        sinks: Sequence[Sink],
        log_arguments: bool,
        breakers: BreakerRegistry | None,
    ) -> None:
        # Re-entrant, because a signal handler may abort the run in the middle of an admission.
        self.lock = threading.RLock()
        # Re-entrant, because a listener may abort or extend the guard that it listens to.
        self.delivery = threading.RLock()
        self.delivering = False
        self.clock = clock
        # A step takes it out before it calls it: what a slot holds is slow to call as a method is.
        self.now = clock.monotonic_ns
        self.wall = clock.wall_ns
        self.price_book = price_book
        self.sinks = tuple(sinks)
        self.log_arguments = log_arguments
        self._breakers = breakers
        # Lists, because an empty deque or set takes as much memory as all else in here.
        self.failed: tuple[str, ...] = ()
        self.errors: list[str] = []
        self.outbox: list[Event] = []
        self.postponed: list[Callable[[], object]] = []
        self.open: dict[int, Admit] = {}
        # Those of them that wait for a person, or were left by a process that is gone.
        self.waiting = _NOTHING
        self.attachments: dict[type, Any] = {}
        self.seq = 0
        self.call_id = 0
        _TREES.add(self)

    @property
    def breakers(self) -> BreakerRegistry:
        """What the runs share that were given nothing to share; made when one has use for it."""
        with self.lock:
            if self._breakers is None:
                self._breakers = BreakerRegistry()
            return self._breakers

    def go_on_from(self, seq: int, call_id: int, tickets: Sequence[Admit]) -> None:
        """Take over the numbers, and the calls in flight, of a run in another process."""
        self.seq = seq
        self.call_id = call_id
        self.open.update((ticket.call_id, ticket) for ticket in tickets)
        # They are nothing that this process's time counts for.
        self.waiting = self.waiting.union(ticket.call_id for ticket in tickets)

    def send_to(self, sinks: Sequence[Sink]) -> None:
        """Let events go to these sinks from now on."""
        self.sinks = tuple(sinks)

    def wait_for(self, call_ids: Sequence[int]) -> None:
        """Note calls in flight that wait for a person."""
        self.waiting = self.waiting.union(call_ids) & self.open.keys()

    def go_on_with(self, call_ids: Sequence[int]) -> None:
        """Note that these wait for nobody any more."""
        self.waiting = self.waiting.difference(call_ids)

    def number_from(self, seq: int) -> None:
        """Let the next event have the number after `seq`."""
        self.seq = seq

    def make(self, kind: type[_E], run_id: str, now: int, facts: dict[str, Any]) -> _E:
        """Build an event, and let it wait for the sinks if there are any. Under the lock."""
        followed = bool(self.sinks)
        seq = self.seq + followed
        event = kind.of(seq, run_id, now, self.wall(), facts)
        if followed:
            # Last, and no call: an interrupt leaves no number without its event.
            self.outbox += (event,)  # type: ignore[arg-type]
            self.seq = seq
        return event

    def take(self, kind: type[EventBase], fields: dict[str, Any]) -> None:
        """Let an event of these fields, with the next number, wait for the sinks. Under the lock.

        Args:
            kind: What happened.
            fields: All of its fields, in their order.
        """
        event = kind.made(fields)
        # Last, and no call: an interrupt leaves no number without its event.
        self.outbox += (event,)  # type: ignore[arg-type]
        self.seq += 1

    def deliver(self, *, wait: bool = False) -> None:
        """Hand the waiting events to the sinks, in order, outside the lock.

        Args:
            wait: Return only when every event that waits has been handed over.
        """
        while self.postponed:
            self.postponed.pop(0)()
        # Whoever holds it is in the middle of the same: it takes these events with it, so that a
        # slow sink delays the step that wrote and no other. Asked again, because it may have been
        # through just before it let go.
        outbox, delivery = self.outbox, self.delivery
        while outbox and delivery.acquire(wait):
            within = self.delivering
            try:
                if within:
                    # A listener acted on its guard: the loop that called it goes on with the event,
                    # or the sinks after it would see this event before the one it listened to.
                    return
                self.delivering = True
                while outbox:
                    event = outbox.pop(0)
                    for sink in self.sinks:
                        try:
                            sink.emit(event)
                        except Exception as error:
                            self.report(f"sink {type(sink).__name__}", error)
            finally:
                self.delivering = within
                delivery.release()

    def postpone(self, act: Callable[[], object]) -> bool:
        """Let something wait for the end of the step that this thread is in the middle of.

        For a signal handler: what it does now would come into the log in the midst of the step,
        and before it in a replay. False where this thread is in no step.
        """
        if not self.lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - as Condition does
            return False
        self.postponed.append(act)
        return True

    def free_locks(self) -> None:
        """Free the locks: the threads that held them are not in this process."""
        self.lock = threading.RLock()
        self.delivery = threading.RLock()
        self.delivering = False

    def warn_once(self, sentence: str) -> None:
        """Log a sentence that holds no text from outside, the first time."""
        if sentence not in self.failed:
            self.failed += (sentence,)
            _LOG.warning(sentence)

    def keep_error(self, sentence: str) -> None:
        """Keep a failure for the outcome: the last 20 of them."""
        self.errors.append(sentence)
        del self.errors[:-_ERRORS_KEPT]

    def report(self, what: str, error: Exception) -> None:
        """Keep what failed for the outcome, and log it the first time, without its text."""
        self.keep_error(f"{what}: {type(error).__name__}: {text_of(error)}")
        if what not in self.failed:
            self.failed += (what,)
            _LOG.warning("%s failed: %s", what, type(error).__name__)


_TREES: weakref.WeakSet[Tree] = weakref.WeakSet()


def _after_fork() -> None:
    for tree in list(_TREES):
        tree.free_locks()


if hasattr(os, "register_at_fork"):  # pragma: no branch - Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)


def as_sink(sink: Sink | Callable[[Event], object]) -> Sink:
    """Turn a callable into a sink; leave a sink as it is."""
    if isinstance(sink, Sink):
        return sink
    if callable(sink):
        return Listener(sink)
    raise ConfigurationError(
        f"a sink must take events, got {type(sink).__name__}. "
        "Pass a callable, or an object with emit and flush."
    )
