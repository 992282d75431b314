"""The end of a streamed run, in place of the SDK's own task and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from agents import ItemHelpers, RunItem, RunResultStreaming, RunState, TResponseInputItem
from agents.stream_events import RunItemStreamEvent, StreamEvent

from budgetguard_core import Trip
from budgetguard_openai_agents import _internals
from budgetguard_openai_agents._ending import (
    close_streamed,
    conclude,
    hide_gates,
    store_in_session,
)
from budgetguard_openai_agents._meter import Meter


class StreamEnding:
    """Watches a streamed run and ends its stream normally.

    Args:
        meter: The hooks of the run.
        result: What the SDK returned; its task and its events are replaced.
        given: The input of the run.
        session: The user's session, if any.
    """

    def __init__(self, meter: Meter, result: RunResultStreaming, given: Any, session: Any) -> None:
        self._meter = meter
        self._result = result
        self._given = given
        self._session = session
        work = self._work = cast("asyncio.Task[Any]", result.run_loop_task)
        self._events = result.stream_events
        self._closing: list[RunItem] = []
        _internals.take_over_turns(result)
        result.run_loop_task = asyncio.create_task(self._run())
        # A task that is cancelled before its first step never comes to pass it on.
        result.run_loop_task.add_done_callback(lambda _: work.cancel())
        cast("Any", result).stream_events = self._stream

    async def _run(self) -> None:
        meter, result = self._meter, self._result
        trip, _ = await meter.ended(self._work)
        hide_gates(result)
        if trip is None and _internals.ran_out_of_turns(result):
            trip = meter.framework_limit(f"Max turns ({result.max_turns}) exceeded")
        if trip is None and (
            meter.stopping is None or result.interruptions or _internals.is_cancelled(result)
        ):
            await conclude(meter, None, result)
            return
        trip = trip or cast("Trip", meter.stopping)
        closing = close_streamed(meter, trip, result)
        self._closing = closing
        await store_in_session(meter, self._session, closing, self._unsaved_input())
        await conclude(meter, trip, result)

    def _unsaved_input(self) -> list[TResponseInputItem]:
        """List the user's words, where the run was stopped before the SDK saved them."""
        if (
            self._session is None
            or isinstance(self._given, RunState)
            or _internals.input_is_saved(self._result)
        ):
            return []
        return ItemHelpers.input_to_new_input_list(self._given)

    async def _stream(self) -> AsyncIterator[StreamEvent]:
        events = cast("Any", self._events())
        left = True
        try:
            async for event in events:
                yield event
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
