"""One last answer of a stopped run, paid from what its budget has kept back for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from budgetguard_core.budget import Budget
from budgetguard_core.decision import ModelCall, Stop
from budgetguard_core.guard import Guard, Mode
from budgetguard_core.housekeeping import Housekeeping, late
from budgetguard_core.kit.ambient import Frame, entered
from budgetguard_core.kit.calls import OpenModelCall
from budgetguard_core.kit.cancel import Scope
from budgetguard_core.kit.flow import Flow, Step, run_awaited, run_blocking
from budgetguard_core.kit.run import Run
from budgetguard_core.reserve import FinalizeReserve
from budgetguard_core.stop import StopReason, Trip

ANSWER_NOW = (
    "Answer now with what you know so far, and say what is still open. Tools can no longer be used."
)
"""The request to the model; for this call alone, so that no history holds it."""
_LONGEST = 4096  # tokens that every current model may write
_SHORTEST = 64  # tokens below which an answer says nothing
_LEAST_WAIT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of the model.

    Attributes:
        text: Its words; what it asked tools for is not looked at.
        usage: The provider's record, as `Run.answered` takes it.
        model: The model that was really called, if the provider says so.
        cost_usd: What the provider says it cost.
    """

    text: str
    usage: Any = None
    model: str | None = None
    cost_usd: Decimal | None = None


class LastAnswer:
    """The last answer that a stopped run may have; made by `last_answer`.

    Args:
        run: The stopped run; not ended yet, its history closed.
        payer: The guard whose budget has the reserve: the run's own, or one that it shares.
        reserve: The reserve.
    """

    def __init__(self, run: Run, payer: Guard, reserve: FinalizeReserve) -> None:
        left = payer.clock.time_left(whole=True)
        self._seconds = reserve.seconds if left is None else min(reserve.seconds, left)
        caps = Budget(
            max_total_tokens=reserve.tokens,
            max_cost_usd=reserve.cost_usd,
            max_seconds=self._seconds,
            max_output_tokens_per_call=min(reserve.tokens or _LONGEST, _LONGEST),
            on_unpriced=payer.budget.on_unpriced,
            loop_detection=None,
        )
        self._run = run
        self._block = Housekeeping(
            lambda: run.guard.child(caps), self._seconds, answers_for=payer.run_id
        )

    def requested(
        self,
        call: ModelCall,
        model: Callable[[OpenModelCall], Answer],
        model_async: Callable[[OpenModelCall], Awaitable[Answer]],
    ) -> Flow[str | None]:
        """Make the call: in a thread, which is left behind at its end, or in this task.

        It ends when its time is over, and when the run is aborted. A caller that cancels the run
        ends the call, and then what the run does after its end.

        Args:
            call: The model's name and the size of the prompt.
            model: Makes the call, without tools, within its `max_output_tokens` and `seconds`.
            model_async: The same on an event loop.

        Returns:
            The answer; None where there is none, for whatever reason: the run ends as without it.
        """
        try:
            with entered(self._run.frame()), self._block as keeper:
                open_call = yield from self._open_call(call, keeper)
                if open_call is None:
                    return None
                try:
                    with entered(open_call.frame):
                        answer: Answer = yield Step(
                            lambda: self._in_thread(lambda: model(open_call), keeper),
                            lambda: self._awaited(lambda: model_async(open_call), keeper),
                        )
                except BaseException as error:
                    self._run.failed(open_call, error)
                    raise
                return self._taken(open_call, answer)
        except asyncio.CancelledError:
            # The run is to be ended first: the cancellation comes up again at the next `await`.
            task = asyncio.current_task()
            if task is not None:  # pragma: no branch - only a task can be cancelled
                task.uncancel()
                task.cancel()
            return None
        except _Aborted:
            return None
        except Exception as error:
            self._run.guard.tree.report("last answer", error)
            return None

    def ask(self, call: ModelCall, model: Callable[[OpenModelCall], Answer]) -> str | None:
        """Make the call as `asked` does, in a thread."""
        either: Any = model
        return run_blocking(self.requested(call, model, either))

    async def ask_async(
        self, call: ModelCall, model: Callable[[OpenModelCall], Awaitable[Answer]]
    ) -> str | None:
        """Make the call as `asked` does, in this task."""
        either: Any = model
        return await run_awaited(self.requested(call, either, model))

    async def _awaited(self, work: Callable[[], Awaitable[Answer]], keeper: Guard) -> Answer:
        limit = asyncio.timeout(keeper.time_left())
        try:
            async with limit:
                with Scope(self._run, once=True):
                    return await work()
        except TimeoutError:
            if not limit.expired():
                raise
        raise _Aborted if self._run.aborted else TimeoutError(late(self._seconds))

    def _open_call(self, call: ModelCall, keeper: Guard) -> Flow[OpenModelCall | None]:
        call.min_output_tokens = max(call.min_output_tokens, _SHORTEST)
        open_call = yield from self._run.ask(lambda: self._run.model_call(call))
        if isinstance(open_call, Stop):
            self._run.guard.tree.report(
                f"last answer: a prompt of {call.input_tokens} tokens does not fit into what is "
                "left of finalize_reserve, or of what others pay"
            )
            return None
        open_call.frame = Frame(keeper, run=self._run, call=open_call, parent=self._run.parent)
        return open_call

    def _taken(self, open_call: OpenModelCall, answer: Answer) -> str | None:
        text = answer.text.strip()
        self._run.answered(
            open_call, answer.usage, text=text, model=answer.model, cost_usd=answer.cost_usd
        )
        self._run.finalized = bool(text)
        return text or None

    def _in_thread(self, work: Callable[[], Answer], keeper: Guard) -> Answer:
        """Wait for some work, but no longer than its guard allows and the run goes on."""
        woken = threading.Event()
        answers: list[Answer] = []
        errors: list[BaseException] = []

        def body() -> None:
            try:
                answers.append(work())
            except BaseException as error:
                errors.append(error)
            finally:
                woken.set()

        threading.Thread(target=copy_context().run, args=(body,), daemon=True).start()
        forget = self._run.on_abort(woken.set)
        try:
            # Asked again after each wait, because the clock may not be the system's.
            while not woken.wait(max(keeper.time_left() or 0, _LEAST_WAIT)):
                if not keeper.time_left():
                    raise TimeoutError(late(self._seconds))
        finally:
            forget()
        if errors:
            raise errors[0]
        if not answers:
            raise _Aborted
        return answers[0]


class _Aborted(Exception):
    """The run was aborted while its last answer was written."""


def last_answer(run: Run, trip: Trip | None = None) -> LastAnswer | None:
    """Return the last answer that a run may have; None where it has none.

    It has one where a budget with a `finalize_reserve` is enforced and a limit stops the run, this
    run's or one of those that it shares its budget with. It has none where it was aborted, or where
    the stop propagates to the run around it, which may have its own.

    Args:
        run: The stopped run.
        trip: Why it was stopped; what stands against it if left out.
    """
    trip = trip or run.stopped_by
    if trip is None or run.aborted or run.guard.mode is not Mode.ENFORCE:
        return None
    if any(violation.reason is StopReason.ABORTED for violation in trip.violations):
        return None
    for guard in run.guard.ancestry:
        if run.is_inside(guard.run_id):
            return None
        reserve = guard.budget.finalize_reserve
        if reserve is not None and guard.mode is Mode.ENFORCE:
            if any(one.run_id == trip.run_id for one in guard.ancestry[1:]):
                return None
            if guard.clock.time_left(whole=True) == 0:
                run.guard.tree.report("last answer: no time is left for it")
                return None
            return LastAnswer(run, guard, reserve)
    return None
