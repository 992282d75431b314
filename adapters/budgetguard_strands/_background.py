"""Tools that run in the background: they end with the run that they are of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from strands import Agent
from strands.middleware import ExecuteToolStage

from budgetguard_core.kit import Run, Watch
from budgetguard_strands import _seams


class Bodies:
    """The bodies of an agent's tools that run in the background."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._tasks: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = {}
        agent.add_middleware(ExecuteToolStage, self._around)

    async def _around(
        self, context: Any, proceed: Callable[[Any], AsyncGenerator[Any, None]]
    ) -> AsyncGenerator[Any, None]:
        task = asyncio.current_task()
        if task is None or not _seams.is_in_background(context):
            async with aclosing(proceed(context)) as events:
                async for event in events:
                    yield event
            return
        self._tasks[task] = asyncio.get_running_loop()
        try:
            async with aclosing(proceed(context)) as events:
                async for event in events:
                    yield event
        finally:
            del self._tasks[task]

    async def cancel(self) -> None:
        """Cancel them all; Strands would only no longer wait for those on a loop of its own."""
        running = dict(self._tasks)
        await _seams.cancel_background_tasks(self._agent)
        for task, loop in running.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

    def watch(self, run: Run) -> Callable[[], None] | None:
        """Cancel them at the deadline and at an abort, while Strands waits for them.

        With their results Strands goes on, and there the run is stopped.

        Returns:
            A function that ends the watch; None where there is nothing to wait for.
        """
        if not _seams.background_tasks(self._agent):
            return None
        cancelling: list[asyncio.Task[None]] = []
        return Watch(run, lambda: cancelling.append(asyncio.create_task(self.cancel()))).close
