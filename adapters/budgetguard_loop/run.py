"""`run_bounded` and its async and streamed forms: three thin shells around one loop."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, Literal, TypeAlias, cast

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    CheckpointStore,
    Guard,
    Outcome,
    Trip,
)
from budgetguard_loop._ambient import Layer, Watch, entered, settings_for, settings_of
from budgetguard_loop._reply import ModelReply, StreamedReply, read_reply
from budgetguard_loop._resume import Resume, begin
from budgetguard_loop._run import (
    CallModel,
    Command,
    Cut,
    Finish,
    NextTool,
    Run,
    Save,
    StartTools,
    Steps,
    ToolEnd,
    ToolJob,
)

GRACE = 1.0
"""Seconds that cancelled work in flight has to end."""

Step: TypeAlias = Callable[..., Any]
Tools: TypeAlias = Mapping[str, Callable[..., Any]]
OnTrip: TypeAlias = Literal["return", "raise"]
_END = object()


def run_bounded(
    step: Step,
    budget: Budget | Guard | None = None,
    *,
    messages: str | Iterable[Any] = (),
    tools: Tools | None = None,
    model: str | None = None,
    provider: str | None = None,
    retries: int = 0,
    on_trip: OnTrip = "return",
    store: CheckpointStore | None = None,
    resume: Resume | None = None,
) -> Outcome:
    """Run the classic agent loop, model, tools, model, until the model is done or a limit holds.

    Each model call and each batch of tool calls is admitted before it starts. The history is a
    list of messages in the format of OpenAI's chat completions. Inside another guarded run, a
    `Budget` is an envelope within that run's.

    Args:
        step: Makes one model call: takes the messages, returns a chat completion, an assistant
            message, a text or a `ModelReply`. It is also given `max_output_tokens` and `seconds`,
            the bounds of this call, where it has keywords of these names. Turn off the retries of
            your client: they cannot be counted. Use `retries`.
        budget: A `Budget`, for a fresh guard, or a `Guard`, shared by reference. A run that begins
            while another is on the same guard is a child of it: the same caps, exact together,
            with a run id, a checkpoint and a loop memory of its own.
        messages: The conversation to begin with, or the user's text. With `resume`: what the user
            says now; leave it out to go on where the run stopped.
        tools: The functions that the model may call, by name. They get the arguments as keywords;
            what they raise goes to the model as the call's result.
        model: The model's name, for its price. Needed with `max_cost_usd`.
        provider: The provider's id where several have a model of this name.
        retries: How often a model call that raised is tried again at once. Each attempt is charged
            as a model call, none as an iteration.
        on_trip: `return` the partial result when the run is stopped, or `raise` `BudgetExceeded`,
            which carries it.
        store: Where checkpoints go: before each call starts and after it has ended, so that a
            killed process loses nothing.
        resume: An earlier run to go on with: its id in `store`, its `Snapshot` or its `Outcome`.
            No completed tool call runs again; one that was in flight when the process was killed
            is reported to the model as of unknown outcome. Under a fresh `Budget` the caps count
            from zero; without one (not from an `Outcome`, nor for a part of another run that goes
            on alone) everything is as it was. For sinks and
            handlers pass `Guard.restore(snapshot, ...)` as the budget and the snapshot here.

    Raises:
        BudgetExceeded: The run was stopped and `on_trip` is `raise`.
        Exception: What `step` raised at its last attempt, after the checkpoint was saved.
    """
    check_on_trip(on_trip)
    tools = tools or {}
    for name, function in {"step": step, **tools}.items():
        if _is_async(function):
            raise AdapterError(
                f"run_bounded needs functions that are not async, got {name}. "
                "Use run_bounded_async."
            )
    run = begin(
        budget,
        messages=messages,
        tools=tools,
        step=step,
        model=model,
        provider=provider,
        retries=retries,
        store=store,
        resume=resume,
    )
    shell = _SyncShell(run, step)
    steps = run.steps()
    moved = _advance(steps)
    while isinstance(moved, _Todo):
        try:
            answer = shell.act(moved.command)
        except BaseException as error:
            moved = _advance(steps, error=error)
        else:
            moved = _advance(steps, answer)
    return _ended(moved, run, on_trip)


async def run_bounded_async(
    step: Step,
    budget: Budget | Guard | None = None,
    *,
    messages: str | Iterable[Any] = (),
    tools: Tools | None = None,
    model: str | None = None,
    provider: str | None = None,
    retries: int = 0,
    on_trip: OnTrip = "return",
    store: CheckpointStore | None = None,
    resume: Resume | None = None,
) -> Outcome:
    """Run the loop of `run_bounded` on an event loop.

    Step and tools may be async; those that are not run in threads. The tool calls of one reply run
    at the same time. The deadline and an abort cancel what is in flight; a thread cannot be
    cancelled and is left behind. Checkpoints are saved in a thread. Arguments and errors are those
    of `run_bounded`.
    """
    check_on_trip(on_trip)
    run = await asyncio.to_thread(
        begin,
        budget,
        messages=messages,
        tools=tools or {},
        step=step,
        model=model,
        provider=provider,
        retries=retries,
        store=store,
        resume=resume,
    )
    shell = _AsyncShell(run, step)
    steps = run.steps()
    moved = _advance(steps)
    while isinstance(moved, _Todo):
        try:
            answer = await shell.act(moved.command)
        except BaseException as error:
            await shell.close()
            moved = _advance(steps, error=error)
        else:
            moved = _advance(steps, answer)
    return _ended(moved, run, on_trip)


class BoundedStream:
    """A run whose chunks are read with `async for`; made by `run_bounded_stream`."""

    def __init__(self, chunks: Callable[[BoundedStream], AsyncIterator[Any]]) -> None:
        self._outcome: Outcome | None = None
        self._chunks: Callable[[BoundedStream], AsyncIterator[Any]] | None = chunks

    @property
    def outcome(self) -> Outcome:
        """The outcome, once the stream has been read to its end.

        Raises:
            AdapterError: It has not: the stream still runs, was left early, or failed.
        """
        if self._outcome is None:
            raise AdapterError(
                "a stream has an outcome when it was read to its end. Read it first."
            )
        return self._outcome

    def end(self, outcome: Outcome) -> None:
        """Keep the outcome; called once, when the run has ended."""
        self._outcome = outcome

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._chunks is None:
            raise AdapterError("a stream can be read once, got a second reader. Start another run.")
        chunks, self._chunks = self._chunks, None
        # Not kept here, so that leaving the loop closes it.
        return chunks(self)


def run_bounded_stream(
    step: Step,
    budget: Budget | Guard | None = None,
    *,
    messages: str | Iterable[Any] = (),
    tools: Tools | None = None,
    model: str | None = None,
    provider: str | None = None,
    retries: int = 0,
    on_trip: OnTrip = "return",
    store: CheckpointStore | None = None,
    resume: Resume | None = None,
) -> BoundedStream:
    """Run the loop of `run_bounded_async` and hand the chunks of the model's replies on.

    `step` returns, or is, an async iterator of the chunks of a chat completion, or of pieces of
    text. Ask the provider for usage (`stream_options={"include_usage": True}`); without it the
    tokens are estimated. A stopped run's last chunk is its synthetic message. A call that has
    already handed on a chunk is not tried again. Leaving the loop early closes the provider's
    stream and saves the checkpoint; use `contextlib.aclosing(aiter(stream))` to wait for that.
    Arguments and errors are those of `run_bounded`.
    """
    check_on_trip(on_trip)

    async def chunks(stream: BoundedStream) -> AsyncIterator[Any]:
        run = await asyncio.to_thread(
            begin,
            budget,
            messages=messages,
            tools=tools or {},
            step=step,
            model=model,
            provider=provider,
            retries=retries,
            store=store,
            resume=resume,
        )
        shell = _AsyncShell(run, step)
        steps = run.steps()
        moved = _advance(steps)
        while isinstance(moved, _Todo):
            try:
                if isinstance(moved.command, CallModel):
                    reader = _Reader(shell, moved.command)
                    try:
                        async for chunk in reader.chunks():
                            yield chunk
                        answer: Any = reader.answer()
                    finally:
                        await reader.close()
                else:
                    answer = await shell.act(moved.command)
            except BaseException as error:
                await shell.close()
                moved = _advance(steps, error=error)
            else:
                moved = _advance(steps, answer)
        stream.end(moved)
        if moved.status == "terminated":
            yield moved.messages[-1]
        _ended(moved, run, on_trip)

    return BoundedStream(chunks)


class _Todo:
    __slots__ = ("command",)

    def __init__(self, command: Command) -> None:
        self.command = command


def _advance(
    steps: Steps, answer: Any = None, *, error: BaseException | None = None
) -> _Todo | Outcome:
    """Tell the loop what came of its last command, and take the next one, or the outcome."""
    try:
        return _Todo(steps.send(answer) if error is None else steps.throw(error))
    except StopIteration as end:
        return cast("Outcome", end.value)


def _ended(outcome: Outcome, run: Run, on_trip: OnTrip) -> Outcome:
    trip = run.guard.trip
    if on_trip == "raise" and outcome.status == "terminated" and trip is not None:
        raise BudgetExceeded(trip, outcome)
    return outcome


def check_on_trip(on_trip: str) -> None:
    """Refuse what `on_trip` cannot be."""
    if on_trip not in ("return", "raise"):
        raise AdapterError(f"on_trip must be 'return' or 'raise', got {on_trip!r}.")


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - asks how it is called, not whether
    )


class _SyncShell:
    def __init__(self, run: Run, step: Step) -> None:
        self._run = run
        self._step = step
        self._settings = settings_of(step)
        self._jobs: deque[ToolJob] = deque()

    def act(self, command: Command) -> Any:
        match command:
            case CallModel():
                settings = settings_for(command.ticket, self._settings)
                with entered(command.layer):
                    return read_reply(self._step(command.messages, **settings))
            case StartTools():
                self._jobs.extend(command.jobs)
                return None
            case NextTool():
                return self._run_tool(self._jobs.popleft())
            case Save():
                return self._run.save(command)
            case Finish():
                return self._run.finish(command)

    def _run_tool(self, job: ToolJob) -> ToolEnd:
        guard = self._run.guard
        if (guard.cancellation.cancelled or guard.time_left() == 0) and guard.check() is not None:
            return ToolEnd(job, started=False)
        with entered(job.layer):
            try:
                return ToolEnd(job, job.function(**job.arguments))
            except Exception as error:
                return ToolEnd(job, error=error)


class _AsyncShell:
    def __init__(self, run: Run, step: Step) -> None:
        self.run = run
        self._step = step
        self._settings = settings_of(step)
        self._flight: _Flight | None = None
        self._jobs: dict[asyncio.Task[Any], ToolJob] = {}

    async def act(self, command: Command) -> Any:
        match command:
            case CallModel():
                return await self._call_model(command)
            case StartTools():
                self._flight = _Flight(self.run.guard)
                self._jobs = {
                    self._flight.start(_called(job.layer, job.function, **job.arguments)): job
                    for job in command.jobs
                }
            case NextTool():
                return await self._next_tool()
            case Save():
                if command.flush or self.run.is_saved:
                    await asyncio.to_thread(self.run.save, command)
            case Finish():
                return await asyncio.to_thread(self.run.finish, command)
        return None

    def call_step(self, command: CallModel) -> Coroutine[Any, Any, Any]:
        settings = settings_for(command.ticket, self._settings)
        return _called(command.layer, self._step, command.messages, **settings)

    async def _call_model(self, command: CallModel) -> ModelReply | Cut:
        async with _Flight(self.run.guard) as flight:
            flight.start(self.call_step(command))
            task = await flight.next()
            if task is not None:
                try:
                    return read_reply(task.result())
                except BaseException:
                    if flight.trip is None:
                        raise
            return Cut(flight.stopped())

    async def _next_tool(self) -> ToolEnd | Cut:
        flight = cast("_Flight", self._flight)
        end = None
        while end is None and (task := await flight.next()) is not None:
            end = self._end_of(flight, task)
        if end is None or not flight.waiting:
            await flight.close()
        return Cut(flight.stopped()) if end is None else end

    def _end_of(self, flight: _Flight, task: asyncio.Task[Any]) -> ToolEnd | None:
        """Say how a tool call ended; None for one that was cut."""
        job = self._jobs.pop(task)
        try:
            return ToolEnd(job, task.result())
        except asyncio.CancelledError as error:
            if flight.trip is None:
                # A tool that was cancelled from its own side has failed; its run goes on.
                return ToolEnd(job, error=RuntimeError(f"cancelled {error}".strip()))
            return None
        except Exception as error:
            return ToolEnd(job, error=error)

    async def close(self) -> None:
        """Cancel the tools that still run."""
        if self._flight is not None:
            await self._flight.close()


class _Flight:
    """Work in flight, cancelled together when the run's deadline passes or it is aborted."""

    def __init__(self, guard: Guard) -> None:
        self._loop = asyncio.get_running_loop()
        self.waiting: set[asyncio.Task[Any]] = set()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._ended: deque[asyncio.Task[Any]] = deque()
        self._cancelled: deque[asyncio.Task[Any]] = deque()
        self._news = asyncio.Event()
        self._patience: asyncio.TimerHandle | None = None
        self._watch = Watch(guard, self._cut)

    @property
    def trip(self) -> Trip | None:
        return self._watch.trip

    def stopped(self) -> Trip:
        return cast("Trip", self._watch.trip)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
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

    async def __aenter__(self) -> _Flight:
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


class _Reader:
    """Reads one streamed reply in a task of its own, at the pace of the consumer.

    One task, because a provider's stream may hold timeouts that are bound to the task they began
    in.
    """

    def __init__(self, shell: _AsyncShell, command: CallModel) -> None:
        self._command = command
        self._reply = StreamedReply()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._room = asyncio.Semaphore(1)
        self._flight = _Flight(shell.run.guard)
        self._task = self._flight.start(self._read(shell))
        self._task.add_done_callback(self._end)
        self._flight.over.add_done_callback(self._end)

    async def chunks(self) -> AsyncIterator[Any]:
        while (chunk := await self._queue.get()) is not _END:
            self._reply.add(chunk)
            self._command.partial = self._reply.text
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

    async def _read(self, shell: _AsyncShell) -> None:
        stream = await shell.call_step(self._command)
        with entered(self._command.layer):
            if not hasattr(stream, "__aiter__"):
                self._queue.put_nowait(stream)
                return
            try:
                async for chunk in stream:
                    await self._room.acquire()
                    self._queue.put_nowait(chunk)
            finally:
                close = getattr(stream, "aclose", None) or getattr(stream, "close", None)
                if close is not None:
                    await _awaited(close())

    def _end(self, _: object) -> None:
        self._queue.put_nowait(_END)


async def _called(layer: Layer, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function on the event loop if it is async, in a thread if it is not."""
    with entered(layer):
        if _is_async(function) or inspect.isasyncgenfunction(function):
            return await _awaited(function(*args, **kwargs))
        return await _awaited(await asyncio.to_thread(function, *args, **kwargs))


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
