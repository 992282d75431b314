"""The loop acted out on an event loop, with the chunks of the replies handed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from budgetguard_core import AdapterError, Outcome
from budgetguard_core.kit import outcome_of
from budgetguard_loop._async import Flight, Shell
from budgetguard_loop._plan import Plan, advance, ended
from budgetguard_loop._reply import ModelReply, StreamedReply
from budgetguard_loop._run import CallModel, Cut
from budgetguard_loop._settings import close_stream

_END = object()


class BoundedStream:
    """A run whose chunks are read with `async for`; made by `run_bounded_stream`."""

    def __init__(self, plan: Plan) -> None:
        self._outcome: Outcome | None = None
        self._plan: Plan | None = plan

    @property
    def outcome(self) -> Outcome:
        """The outcome, once the stream has been read to its end, was left or has failed.

        Raises:
            AdapterError: The stream still runs.
        """
        if self._outcome is None:
            raise AdapterError(
                "a stream has an outcome when it was read to its end. Read it first."
            )
        return self._outcome

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._plan is None:
            raise AdapterError("a stream can be read once, got a second reader. Start another run.")
        plan, self._plan = self._plan, None
        # Not kept here, so that leaving the loop closes it.
        return self._chunks(plan)

    async def _chunks(self, plan: Plan) -> AsyncIterator[Any]:
        loop = await asyncio.to_thread(plan.begin)
        shell = Shell(loop, plan)
        steps = loop.steps()
        moved = advance(steps)
        try:
            while not isinstance(moved, Outcome):
                try:
                    command = moved
                    answer: Any
                    if not isinstance(command, CallModel):
                        answer = await shell.act(command)
                    elif (answer := await shell.held_back(command)) is None:
                        reader = _Reader(shell, command)
                        try:
                            async for chunk in reader.chunks():
                                yield chunk
                            answer = reader.answer()
                        finally:
                            await reader.close()
                except BaseException as error:
                    await shell.close()
                    moved = advance(steps, error=error)
                else:
                    moved = advance(steps, answer)
        except BaseException as error:
            self._outcome = outcome_of(error)
            raise
        self._outcome = moved
        if moved.status == "terminated":
            yield moved.messages[-1]
        ended(moved, loop)


class _Reader:
    """Reads one streamed reply in a task of its own, at the pace of the consumer.

    One task, because a provider's stream may hold timeouts that are bound to the task they began
    in.
    """

    def __init__(self, shell: Shell, command: CallModel) -> None:
        self._shell = shell
        self._command = command
        self._reply = StreamedReply(command.pieces)
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._room = asyncio.Semaphore(1)
        self._flight = Flight(shell.run)
        self._task = self._flight.start(self._read())
        self._task.add_done_callback(self._end)
        self._flight.over.add_done_callback(self._end)

    async def chunks(self) -> AsyncIterator[Any]:
        while (chunk := await self._queue.get()) is not _END:
            self._reply.add(chunk)
            self._command.shown = True
            yield chunk
            self._room.release()

    def answer(self) -> ModelReply | Cut:
        if self._task.done():
            try:
                self._task.result()
            except BaseException:
                if self._flight.trip is None:
                    raise
            else:
                return self._reply.reply()
        return Cut(self._flight.stopped())

    async def close(self) -> None:
        await self._flight.close()

    async def _read(self) -> None:
        stream = await self._shell.call_step(self._command)
        with self._shell.run.entered(self._command.call):
            if not hasattr(stream, "__aiter__"):
                self._queue.put_nowait(stream)
                return
            try:
                async for chunk in stream:
                    await self._room.acquire()
                    self._queue.put_nowait(chunk)
            finally:
                await close_stream(stream)

    def _end(self, _: object) -> None:
        self._queue.put_nowait(_END)
