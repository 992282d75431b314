"""The end of a streamed run, in place of the SDK's own task and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from agents import RunResultStreaming
from agents.stream_events import RunItemStreamEvent, StreamEvent

from budgetguard_core import BudgetExceeded
from budgetguard_core.kit import outcome_of, remember
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._ending import ended
from budgetguard_openai_agents._run import Recorder
from budgetguard_openai_agents._tools import hide_gate


class StreamEnding:
    """Watches a streamed run and ends its stream normally.

    Args:
        recorder: The hooks of the run.
        result: What the SDK returned; its task and its events are replaced.
        given: The input of the run.
        options: Its options.
    """

    def __init__(
        self,
        recorder: Recorder,
        result: RunResultStreaming,
        given: Any,
        options: dict[str, Any],
    ) -> None:
        self._recorder = recorder
        self._result = result
        self._given = given
        self._options = options
        self._work = cast("asyncio.Task[Any]", result.run_loop_task)
        self._events = result.stream_events
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
        await ended(self._recorder, self._work, self._given, self._options, self._result)

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
        closing, self._recorder.closing = self._recorder.closing, []
        for item in closing:
            if item.type == "message_output_item":
                yield RunItemStreamEvent(name="message_output_created", item=item)
            elif item.type in ("tool_call_output_item", "handoff_output_item"):
                yield RunItemStreamEvent(name="tool_output", item=item)
