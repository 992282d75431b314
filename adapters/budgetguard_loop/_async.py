"""The loop acted out on an event loop: tools at the same time, cut at the deadline."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, cast

from budgetguard_core import Outcome, Stop, Trip
from budgetguard_core.kit import OpenModelCall, OpenToolCall, Run, Watch, cut_short
from budgetguard_loop._last import LastStep
from budgetguard_loop._plan import Plan, advance, ended
from budgetguard_loop._reply import ModelReply, read_reply
from budgetguard_loop._run import (
    CallModel,
    Command,
    Cut,
    Finish,
    Loop,
    NextTool,
    Save,
    StartTools,
    ToolJob,
    Wait,
)
from budgetguard_loop._settings import called

GRACE = 1.0
"""Seconds that cancelled work in flight has to end."""


async def drive(plan: Plan) -> Outcome:
    """Run the loop to its end."""
    loop = await asyncio.to_thread(plan.begin)
    shell = Shell(loop, plan)
    steps = loop.steps()
    moved = advance(steps)
    while not isinstance(moved, Outcome):
        try:
            answer = await shell.act(moved)
        except BaseException as error:
            await shell.close()
            moved = advance(steps, error=error)
        else:
            moved = advance(steps, answer)
    return ended(moved, loop)


class Shell:
    """Acts out what a loop asks for, on an event loop."""

    def __init__(self, loop: Loop, plan: Plan) -> None:
        self.run = loop.run
        # It was opened in another one, because of the store.
        self.run.thread = threading.get_ident()
        self._loop = loop
        self._plan = plan
        self._flight: Flight | None = None
        self._jobs: dict[asyncio.Task[Any], ToolJob] = {}

    async def act(self, command: Command) -> Any:
        """Do what the loop asks for, and return what came of it."""
        match command:
            case CallModel():
                return await self._call_model(command)
            case Wait():
                with cut_short(self.run) as watch:
                    await asyncio.sleep(command.seconds)
                trip = None if watch is None else watch.trip
                return None if trip is None else Cut(trip)
            case StartTools():
                self._flight = Flight(self.run)
                self._jobs = {self._flight.start(self._run_tool(job)): job for job in command.jobs}
                return await self._next_tool()
            case NextTool():
                return await self._next_tool()
            case Save():
                await asyncio.to_thread(self._loop.save)
            case LastStep():
                return await command.ask_async(self._plan.step, self._plan.settings)
            case Finish():
                return await self.run.in_thread(command.end)
        return None

    def call_step(self, command: CallModel) -> Coroutine[Any, Any, Any]:
        """Call the step as a part of its model call."""
        settings = self._plan.settings.for_call(self.run, command.call)
        return _inside(self.run, command.call, self._plan.step, (command.messages,), settings)

    async def held_back(self, command: CallModel) -> Cut | None:
        """Wait until a model call may start; a `Cut` where the run ended meanwhile."""
        call = await self.run.wait_async(command.call)
        return Cut(call.trip) if isinstance(call, Stop) else None

    async def _call_model(self, command: CallModel) -> ModelReply | Cut:
        cut = await self.held_back(command)
        if cut is not None:
            return cut
        async with Flight(self.run) as flight:
            flight.start(self.call_step(command))
            task = await flight.next()
            if task is not None:
                try:
                    return read_reply(task.result())
                except BaseException:
                    if flight.trip is None:
                        raise
            return Cut(flight.stopped())

    async def _run_tool(self, job: ToolJob) -> None:
        call = await self.run.wait_async(job.call)
        if self.run.start(call) is None:
            job.result = await _inside(self.run, call, job.function, (), job.arguments)

    async def _next_tool(self) -> ToolJob | Cut:
        flight = cast("Flight", self._flight)
        ended = None
        while ended is None and (task := await flight.next()) is not None:
            ended = self._end_of(flight, task)
        if ended is None or not flight.waiting:
            await flight.close()
        return Cut(flight.stopped()) if ended is None else ended

    def _end_of(self, flight: Flight, task: asyncio.Task[None]) -> ToolJob | None:
        """Return the job of a task that ended; None for one that was cut."""
        job = self._jobs.pop(task)
        try:
            task.result()
        except asyncio.CancelledError as error:
            if flight.trip is not None:
                return None
            # A tool that was cancelled from its own side has failed; its run goes on.
            job.error = RuntimeError(f"cancelled {error}".strip())
        except Exception as error:
            job.error = error
        return job

    async def close(self) -> None:
        """Cancel the tools that still run."""
        if self._flight is not None:
            await self._flight.close()


class Flight:
    """Work in flight, cancelled together when the run's deadline passes or it is aborted."""

    def __init__(self, run: Run) -> None:
        self._loop = asyncio.get_running_loop()
        self.waiting: set[asyncio.Task[Any]] = set()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._ended: deque[asyncio.Task[Any]] = deque()
        self._cancelled: deque[asyncio.Task[Any]] = deque()
        self._news = asyncio.Event()
        self._patience: asyncio.TimerHandle | None = None
        self._watch = Watch(run, self._cut)

    @property
    def trip(self) -> Trip | None:
        """Why the work was cut, or None."""
        return self._watch.trip

    def stopped(self) -> Trip:
        """Why the work was cut, of work that was."""
        return cast("Trip", self._watch.trip)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin some work."""
        task = self._loop.create_task(work)
        self.waiting.add(task)
        task.add_done_callback(self._landed)
        return task

    async def next(self) -> asyncio.Task[Any] | None:
        """Wait for the next that ends; None when none is left, or none ends even after a cut."""
        while self.waiting and not (self._ended or self._cancelled or self.over.done()):
            self._news.clear()
            await self._news.wait()
        # Work that has brought something comes before work that was cancelled.
        landed = self._ended or self._cancelled
        if not landed:
            return None
        task = landed.popleft()
        self.waiting.discard(task)
        return task

    async def close(self) -> None:
        """Cancel and await whatever still runs."""
        self._watch.close()
        for task in self.waiting:
            task.cancel()
            task.add_done_callback(_look_at)
        if self.waiting and not self.over.done():
            await asyncio.wait(self.waiting, timeout=GRACE)
        self.waiting = set()
        self.over.cancel()
        if self._patience is not None:
            self._patience.cancel()

    async def __aenter__(self) -> Flight:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _cut(self) -> None:
        for task in self.waiting:
            task.cancel()
        self._patience = self._loop.call_later(GRACE, self._give_up)

    def _landed(self, task: asyncio.Task[Any]) -> None:
        (self._cancelled if task.cancelled() else self._ended).append(task)
        self._news.set()

    def _give_up(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
            self._news.set()


async def _inside(
    run: Run,
    call: OpenModelCall | OpenToolCall,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    with run.entered(call):
        return await called(function, args, kwargs)


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
