"""The handoff itself: an `on_outcome` that delivers what was stopped, after the run."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeAlias

from budgetguard_core.errors import ConfigurationError, text_of
from budgetguard_core.handoff.fallback import Fallback, enclosing_fallbacks
from budgetguard_core.handoff.record import HandedOver
from budgetguard_core.outcome import Outcome, Status

_LOG = logging.getLogger("budgetguard")
_ENDS = ("completed", "terminated", "paused", "failed")


class _Queue(Protocol):
    def put_nowait(self, item: Any, /) -> object: ...


Target: TypeAlias = "Callable[[HandedOver], object] | _Queue"
"""A function of what is handed over, async or not, such as `Folder`, `Webhook` and `Fallback`; or a
queue of threads or processes, which gets it as plain data by `put_nowait`."""


class Handoff:
    """Hands runs over when they are stopped: `Envelope(budget, on_outcome=Handoff(target, ...))`.

    It runs after the checkpoint and the record, in a thread of its own, so that no run waits for it
    and nothing that it does changes a result. A program that ends waits for what is under way.
    Because the result is returned before, what fails here cannot be in `Outcome.errors` any more:
    it is in `errors` and in the log.

    Args:
        targets: Where runs go; each gets every one, whatever became of the others. A `Fallback`
            gets none that it has started itself.
        statuses: Which runs are handed over. Parts of other runs are, too, where they have this
            `on_outcome`.

    Attributes:
        errors: The last 20 deliveries that failed; each is logged without its text.

    Raises:
        ConfigurationError: There is no target, or one is none; or there is no such status.
    """

    def __init__(self, *targets: Target, statuses: Sequence[Status] = ("terminated",)) -> None:
        if not targets:
            raise ConfigurationError("a handoff must have a target, got none. Use Folder(path).")
        unknown = [one for one in statuses if one not in _ENDS]
        if unknown or isinstance(statuses, str):
            raise ConfigurationError(
                f"statuses must be among {', '.join(_ENDS)}, got {statuses!r}. "
                'Use ("terminated", "failed").'
            )
        self._targets = [(target, *_deliverer(target)) for target in targets]
        self._statuses = frozenset(statuses)
        self.errors: deque[str] = deque(maxlen=20)
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._under_way: set[Future[None]] = set()

    def __call__(self, outcome: Outcome) -> None:
        """Begin to hand a run over, if it is one of those."""
        if outcome.status not in self._statuses:
            return
        if self._process != os.getpid():
            # A forked process has none of the threads, and whatever lock they held.
            self._begin()
        handed = HandedOver(outcome)
        enclosing = enclosing_fallbacks()
        for target, name, deliver in self._targets:
            if isinstance(target, Fallback) and target in enclosing:
                continue
            try:
                with self._lock:
                    if self._worker is None:
                        self._worker = ThreadPoolExecutor(1, "budgetguard-handoff")
                    task = self._worker.submit(self._deliver, name, deliver, handed)
            except RuntimeError:
                # The interpreter is about to end and starts no work any more.
                self._deliver(name, deliver, handed)
            else:
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for what is under way; False when the time was over before. Blocking."""
        return not wait(set(self._under_way), seconds).not_done

    def _deliver(
        self, name: str, deliver: Callable[[HandedOver], object], handed: HandedOver
    ) -> None:
        try:
            result = deliver(handed)
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except Exception as error:
            self.errors.append(f"{name}: {type(error).__name__}: {text_of(error)}")
            _LOG.warning(
                "handoff of run %r to %s failed: %s",
                handed.outcome.run_id,
                name,
                type(error).__name__,
            )


async def _awaited(result: Awaitable[object]) -> None:
    await result


def _deliverer(target: Target) -> tuple[str, Callable[[HandedOver], object]]:
    name = getattr(target, "__name__", type(target).__name__)
    if isinstance(target, asyncio.Queue):
        raise ConfigurationError(
            "a target must be usable from another thread, got an asyncio.Queue. Use a queue.Queue, "
            "or a function that calls loop.call_soon_threadsafe."
        )
    put = getattr(target, "put_nowait", None)
    if callable(put):
        return name, lambda handed: put(handed.to_json())
    if callable(target):
        return name, target
    raise ConfigurationError(
        f"a target must be a function or have put_nowait, got {type(target).__name__}. "
        "Use Folder(path), Webhook(url, secret), a queue or a function."
    )
