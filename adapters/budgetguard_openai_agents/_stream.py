"""The end of a streamed run, in place of the SDK's own task and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from agents import MaxTurnsExceeded, RunItem, RunResultStreaming
from agents.stream_events import RunItemStreamEvent, StreamEvent

from budgetguard_core import BudgetExceeded, Trip
from budgetguard_core.kit import outcome_of, remember
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._ending import (
    close_streamed,
    conclude,
    fail,
    is_answered,
    store_in_session,
)
from budgetguard_openai_agents._last import answer_of
from budgetguard_openai_agents._run import Recorder
from budgetguard_openai_agents._tools import hide_gate


class StreamEnding:
    """Watches a streamed run and ends its stream normally.

    Args:
        recorder: The hooks of the run.
        result: What the SDK returned; its task and its events are replaced.
        given: The input of the run.
        session: The user's session, if any.
    """

    def __init__(
        self, recorder: Recorder, result: RunResultStreaming, given: Any, session: Any
    ) -> None:
        self._recorder = recorder
        self._result = result
        self._given = given
        self._session = session
        self._work = cast("asyncio.Task[Any]", result.run_loop_task)
        self._events = result.stream_events
        self._closing: list[RunItem] = []
        if recorder.run.is_enforced:
            _seams.take_over_turns(result)
        _seams.tap_events(result, recorder.see)
        result.run_loop_task = asyncio.create_task(self._run())
        result.run_loop_task.add_done_callback(self._is_over)
        cast("Any", result).stream_events = self._stream

    def _is_over(self, task: asyncio.Task[Any]) -> None:
        # A task that is cancelled before its first step never comes to end anything.
        self._work.cancel()
        _seams.end_events(self._result)
        if task.cancelled() and not self._recorder.run.ended:
            self._recorder.close(asyncio.CancelledError())
            remember(self._result, self._recorder.run.fail(asyncio.CancelledError()))

    async def _run(self) -> None:
        recorder, result, run = self._recorder, self._result, self._recorder.run
        trip: Trip | None = None
        is_cut = False
        try:
            trip = await recorder.supervised(self._work)
            if trip is None or (self._work.done() and not self._work.cancelled()):
                self._work.result()
                if not result.interruptions:
                    _seams.raise_tripwire(result)
            else:
                is_cut = True
                recorder.cut_off()
        except BaseException as error:
            trip = await self._left_by(error)
            if trip is None:
                await fail(recorder, error, self._given, result)
                raise
            recorder.cut_off(error)
        if trip is None and _seams.ran_out_of_turns(result):
            detail = f"Max turns ({result.max_turns}) exceeded"
            if not run.is_enforced:
                await fail(recorder, MaxTurnsExceeded(detail), self._given, result)
                return
            trip = run.framework_limit(detail)
        if _seams.is_cancelled(result) and not (result.interruptions or run.stopped_by):
            left = asyncio.CancelledError("the stream was cancelled")
            await fail(recorder, left, self._given, result)
            return
        trip = trip or recorder.calls.stopping or run.stopped_by
        if trip is not None and not (
            result.interruptions or is_answered(recorder, result, is_cut=is_cut)
        ):
            answer = await answer_of(recorder, trip, self._given, result, self._session)
            self._closing = close_streamed(recorder, trip, result, answer)
            await store_in_session(recorder, self._session, self._given, result)
        await conclude(recorder, trip, result)

    async def _left_by(self, error: BaseException) -> Trip | None:
        if isinstance(error, asyncio.CancelledError) and self._recorder.run.stopped_by is not None:
            # The SDK cancels a run whose input guardrail failed.
            await asyncio.wait({self._work}, timeout=0)
            failed = _seams.take_failed_guardrail(self._result)
            if failed is not None:
                cast("asyncio.Task[Any]", asyncio.current_task()).uncancel()
                error = failed
        return self._recorder.left_by(error)

    async def _stream(self) -> AsyncIterator[StreamEvent]:
        events = cast("Any", self._events())
        left = True
        try:
            async for event in events:
                yield event
            left = False
        except Exception as error:
            # The consumer's side may hear of a failed guardrail before the run has ended, and in
            # 0.18 is the only one to hear of it.
            self._work.cancel()
            shell = cast("asyncio.Task[Any]", self._result.run_loop_task)
            await asyncio.wait({shell})
            failure = None if shell.cancelled() else shell.exception()
            if failure is not None and isinstance(error, BudgetExceeded):
                # A judge was stopped beside it.
                raise failure from None
            if failure is not None or shell.cancelled() or self._recorder.left_by(error) is None:
                known = outcome_of(self._result, messages=self._result.to_input_list())
                if known is not None and outcome_of(error) is None:
                    # A judge's verdict that came with the stop.
                    remember(error, known)
                hide_gate(getattr(error, "run_data", None))
                raise
            left = False
        finally:
            if left and not self._work.done():
                self._result.cancel()
            await events.aclose()
        closing, self._closing = self._closing, []
        for item in closing:
            if item.type == "message_output_item":
                yield RunItemStreamEvent(name="message_output_created", item=item)
            elif item.type in ("tool_call_output_item", "handoff_output_item"):
                yield RunItemStreamEvent(name="tool_output", item=item)
