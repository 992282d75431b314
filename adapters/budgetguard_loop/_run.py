"""The loop itself, without I/O: a generator that says what to do and is told what came of it.

`run_bounded` and its async and streamed forms are thin shells that act out the same commands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from budgetguard_core import (
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    AdapterError,
    ModelCall,
    Outcome,
    Stop,
    ToolCall,
    Trip,
)
from budgetguard_core.kit import OpenModelCall, OpenToolCall, Prompt, Run, is_stop
from budgetguard_loop import _history as history
from budgetguard_loop._backoff import delay_after
from budgetguard_loop._history import Message, RequestedCall
from budgetguard_loop._reply import ModelReply
from budgetguard_loop._settings import parameters_of

ToolFunction: TypeAlias = Callable[..., Any]


@dataclass(slots=True)
class CallModel:
    """Call the model. Answer with a `ModelReply` or a `Cut`; what the step raises is thrown."""

    call: OpenModelCall
    messages: list[Message]
    partial: str = ""
    """What a stream has said so far; the shell keeps it up to date."""
    shown: bool = False
    """The consumer of a stream has got a part of this reply: it cannot be tried again."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for this long, within the deadline; answer with a `Cut` when that came first."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ToolJob:
    """A tool call that was admitted."""

    place: int
    call: OpenToolCall
    function: ToolFunction
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """How a tool call ended."""

    job: ToolJob
    result: Any = None
    error: Exception | None = None
    started: bool = True
    """False when the run ended before this body could start."""


@dataclass(frozen=True, slots=True)
class StartTools:
    """Get ready to run these, at the same time where the shell can."""

    jobs: list[ToolJob]


class NextTool:
    """Answer with the `ToolEnd` of a job, or with a `Cut` when the rest will not end."""


class Save:
    """Save the run, blocking."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run, blocking; answer with the `Outcome`."""

    end: Callable[[], Outcome]


@dataclass(frozen=True, slots=True)
class Cut:
    """The work in flight was ended by the deadline or an abort."""

    trip: Trip


Command: TypeAlias = CallModel | Wait | StartTools | NextTool | Save | Finish
Steps: TypeAlias = Generator[Command, Any, Outcome]


class _Tripped(Exception):
    def __init__(self, trip: Trip, next_step: str, partial: str = "") -> None:
        self.trip = trip
        self.next_step = next_step
        self.partial = partial


@dataclass(slots=True)
class Loop:
    """One run of the loop."""

    run: Run
    messages: list[Message]
    tools: Mapping[str, ToolFunction]
    model: str | None
    provider: str | None
    retries: int
    interrupted: frozenset[str] = frozenset()
    """Ids of the tool calls that were in flight when the process of an earlier leg ended."""
    retry: bool = False
    """The first model call is another attempt at a turn that was counted already."""
    _results: dict[int, Message] = field(default_factory=dict[int, Message])
    _prompt: Prompt = field(default_factory=Prompt)
    _schemas: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        # What the step sends of its tools is its own affair; this is about as much.
        self._schemas = tuple(
            {"name": name, "description": inspect.getdoc(tool), "parameters": parameters_of(tool)}
            for name, tool in self.tools.items()
        )

    def steps(self) -> Steps:
        """Run the loop to its end."""
        outcome: Outcome
        try:
            while True:
                _, waiting = history.open_batch(self.messages)
                if waiting:
                    yield from self._run_tools(waiting)
                elif self._is_over():
                    outcome = yield from self._conclude()
                    return outcome
                yield from self._call_model()
        except _Tripped as stop:
            self._settle_history(NOT_EXECUTED)
            end = history.end_message(self.run.guard, stop.trip, stop.partial)
            self.messages.append(end)
            outcome = yield self._finish(end["content"], stop.trip, stop.next_step)
            return outcome
        except BaseException as error:
            # Taken as it is, because the clause unbinds the name.
            failure = error
            started = bool(self.run.guard.open_tool_calls())
            self._settle_history(OUTCOME_UNKNOWN if started else NOT_EXECUTED)
            yield Finish(
                lambda: self.run.fail(
                    failure,
                    self.messages,
                    saved_messages=history.to_plain(self.messages),
                    resume=self._resume,
                )
            )
            raise

    def _conclude(self) -> Steps:
        # A part of the run may have been refused where nobody was told.
        if self.run.stopped_by is not None:
            raise _Tripped(self.run.stopped_by, "give the answer")
        outcome: Outcome = yield self._finish(history.message_text(self.messages[-1]))
        return outcome

    def save(self) -> None:
        """Save a checkpoint of this run and of those that it is a part of; blocking."""
        results = [message for _, message in sorted(self._results.items())]
        self.run.save(self.messages, results, to_plain=history.to_plain)

    @property
    def is_passed_on(self) -> bool:
        """Whether the caller gets an exception for the stop: it asked for that, or is cut too."""
        trip = self.run.trip
        return self.run.is_to_raise or (trip is not None and self.run.is_of_the_run_around(trip))

    @property
    def _resume(self) -> str:
        resume = "resume=outcome, and a fresh Budget"
        if self.run.envelope.store is not None:
            resume = f"resume={self.run.guard.run_id!r} with the same store, and a fresh Budget"
        return f"run_bounded(step, ..., {resume})"

    def _finish(self, final: str, trip: Trip | None = None, next_step: str | None = None) -> Finish:
        return Finish(
            lambda: self.run.end(
                self.messages,
                final,
                trip=trip,
                saved_messages=history.to_plain(self.messages),
                next_step=next_step,
                resume=self._resume,
            )
        )

    def _is_over(self) -> bool:
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant"

    # The model

    def _call_model(self) -> Generator[Command, Any, None]:
        for attempt in range(self.retries + 1):
            command = self._admit_model_call(retry=attempt > 0 or self.retry)
            self.retry = False
            try:
                yield Save()
            except BaseException:
                self.run.unmade(command.call)
                raise
            try:
                answer = yield command
            except Exception as error:
                self.run.failed(command.call, error, written=command.partial)
                trip = self.run.stopped_by
                if is_stop(error) and trip is not None:
                    raise _Tripped(trip, "call the model") from None
                if attempt == self.retries or command.shown or isinstance(error, AdapterError):
                    raise
                yield Save()
                cut: Cut | None = yield Wait(delay_after(error, attempt))
                if cut is not None:
                    raise _Tripped(cut.trip, "call the model") from None
            except BaseException as error:
                self.run.failed(command.call, error, written=command.partial)
                raise
            else:
                if isinstance(answer, Cut):
                    self.run.failed(command.call, "cut short", written=command.partial)
                    raise _Tripped(answer.trip, "call the model", command.partial)
                self._take(command.call, answer)
                yield Save()
                return

    def _admit_model_call(self, *, retry: bool) -> CallModel:
        call = self.run.model_call(
            ModelCall(
                model=self.model,
                provider=self.provider,
                retry=retry,
                input_tokens=self._prompt.project(self.messages, tools=self._schemas),
            )
        )
        if isinstance(call, Stop):
            raise _Tripped(call.trip, "call the model")
        messages = list(self.messages)
        if call.nudge is not None:
            # For this call alone: a later turn has nothing to learn from it.
            messages.append({"role": "user", "content": call.nudge})
        return CallModel(call, messages)

    def _take(self, call: OpenModelCall, reply: ModelReply) -> None:
        message = dict(reply.message)
        text = history.message_text(message)
        calls = message.get("tool_calls")
        self.run.answered(
            call,
            reply.usage,
            text=text + str(calls or ""),
            model=reply.model,
            cost_usd=reply.cost_usd,
            final=not calls,
        )
        self._prompt.measured(reply.usage, reply=message)
        self.messages.append(message)
        if reply.is_cut and not calls:
            trip = self.run.cut_short(call)
            if trip is not None:
                self.messages.pop()
                raise _Tripped(trip, "go on with the answer", text)

    # The tools

    def _run_tools(self, waiting: Sequence[RequestedCall]) -> Generator[Command, Any, None]:
        self._results = {}
        jobs: list[ToolJob] = []
        trip: Trip | None = None
        fresh: list[tuple[int, RequestedCall, ToolCall, dict[str, Any]]] = []
        for place, call in enumerate(waiting):
            if call.id in self.interrupted:
                self._results[place] = history.tool_message(call.id, OUTCOME_UNKNOWN)
            else:
                fresh.append((place, call, *self._request(call)))
        self.interrupted = frozenset()
        batch = self.run.batch([request for _, _, request, _ in fresh])
        for (place, call, request, arguments), admitted in zip(fresh, batch, strict=True):
            refusal = self.run.start(admitted)
            if refusal is not None:
                self._results[place] = history.tool_message(call.id, refusal)
                trip = admitted.trip or trip
            elif request.kind == "output":
                self.run.finished(admitted, error=str(arguments["error"]))
                self._results[place] = history.tool_message(call.id, arguments["error"])
            else:
                admitted.function = self.tools[call.name]
                jobs.append(ToolJob(place, admitted, self.tools[call.name], arguments))
        yield Save()
        if jobs:
            trip = (yield from self._watch_tools(waiting, jobs)) or trip
        self._settle_history(OUTCOME_UNKNOWN)
        if trip is not None:
            raise _Tripped(trip, f"call the tools {', '.join(call.name for call in waiting)}")

    def _watch_tools(
        self, waiting: Sequence[RequestedCall], jobs: list[ToolJob]
    ) -> Generator[Command, Any, Trip | None]:
        yield StartTools(jobs)
        for _ in jobs:
            end: ToolEnd | Cut = yield NextTool()
            if isinstance(end, Cut):
                return end.trip
            call = end.job.call
            if not end.started:
                text = NOT_EXECUTED
                self.run.finished(call, error=text)
            elif end.error is None:
                text = history.result_text(end.result)
                self.run.finished(call, text)
            else:
                text = history.error_text(end.error)
                self.run.finished(call, text, error=end.error)
            self._results[end.job.place] = history.tool_message(waiting[end.job.place].id, text)
            yield Save()
        return None

    def _request(self, call: RequestedCall) -> tuple[ToolCall, dict[str, Any]]:
        """Describe a call; one that has no body to start is only fingerprinted."""
        problem = None
        arguments: dict[str, Any] = {}
        if call.name not in self.tools:
            known = ", ".join(self.tools) or "none"
            # The model wrote the name, and would be sent it back: no more of it than it needs.
            problem = f"Error: there is no tool {call.name[:80]!r}. The tools are: {known}."
        else:
            try:
                arguments = call.parsed()
            except (ValueError, RecursionError) as error:
                problem = f"Error: {error}. Write the arguments as a JSON object."
        request = ToolCall(
            name=call.name,
            arguments=call.arguments,
            id=call.id,
            kind="function" if problem is None else "output",
        )
        return request, arguments if problem is None else {"error": problem}

    # The history

    def _settle_history(self, text: str) -> None:
        """Put the results that are there into the history, in order; the others get `text`."""
        _, waiting = history.open_batch(self.messages)
        added = [
            self._results.get(place, history.tool_message(call.id, text))
            for place, call in enumerate(waiting)
        ]
        self._results = {}
        self.messages.extend(added)
