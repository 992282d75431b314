"""The loop itself, without I/O: a generator that says what to do and is told what came of it.

`run_bounded` and its async and streamed forms are thin shells that act out the same commands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
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
from budgetguard_core.kit import (
    OpenModelCall,
    OpenToolCall,
    Prompt,
    Run,
    is_stop,
)
from budgetguard_loop import _history as history
from budgetguard_loop._backoff import delay_after
from budgetguard_loop._history import Message, RequestedCall
from budgetguard_loop._last import LastStep
from budgetguard_loop._reply import ModelReply, written
from budgetguard_loop._settings import parameters_of

ToolFunction: TypeAlias = Callable[..., Any]
_Call: TypeAlias = OpenToolCall | str
"""A tool call, or the result of one that nobody has to be asked for."""


@dataclass(slots=True)
class CallModel:
    """Call the model. Answer with a `ModelReply` or a `Cut`; what the step raises is thrown."""

    call: OpenModelCall
    messages: list[Message]
    pieces: list[str] = field(default_factory=list[str])
    """What a stream has said so far; the shell adds to it."""
    shown: bool = False
    """The consumer of a stream has got a part of this reply: it cannot be tried again."""

    @property
    def partial(self) -> str:
        """The text of a reply that was broken off."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for this long, within the deadline; answer with a `Cut` when that came first."""

    seconds: float


@dataclass(slots=True)
class ToolJob:
    """A tool call that was admitted; to be started when it has waited for its turn."""

    call: OpenToolCall
    function: ToolFunction
    arguments: dict[str, Any]
    result: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class StartTools:
    """Run these, at the same time where the shell can; answer as for `NextTool`."""

    jobs: list[ToolJob]


class NextTool:
    """Answer with the next job that has ended, or with a `Cut` when the rest will not end."""


class Save:
    """Save the run, blocking."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run, blocking; answer with the `Outcome`."""

    end: Callable[[], Outcome]


@dataclass(slots=True)
class Cut:
    """The work in flight was ended by the deadline or an abort."""

    trip: Trip


Command: TypeAlias = CallModel | Wait | StartTools | NextTool | Save | Finish | LastStep
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
    _calls: list[tuple[str, _Call]] = field(default_factory=list[tuple[str, "_Call"]])
    """The calls that wait for a result, with their ids."""
    _prompt: Prompt = field(default_factory=Prompt)
    _schemas: tuple[object, ...] = ()
    _is_saved: bool = False

    def __post_init__(self) -> None:
        self._is_saved = self.run.is_saved
        # What the step sends of its tools is its own affair; this is about as much.
        self._schemas = tuple(
            {"name": name, "description": inspect.getdoc(tool), "parameters": parameters_of(tool)}
            for name, tool in self.tools.items()
        )

    def steps(self) -> Steps:
        """Run the loop to its end."""
        outcome: Outcome
        if self.messages and self.messages[-1].get("role") == "user":
            self.run.told(history.message_text(self.messages[-1]))
        try:
            waiting = history.open_calls(self.messages)
            while waiting or not self._is_over():
                if waiting:
                    yield from self._run_tools(waiting)
                waiting = yield from self._call_model()
            outcome = yield self._conclude()
        except _Tripped as stop:
            self._settle_history()
            last = LastStep.of(self.run, stop.trip, self.messages, self.model, self.provider)
            answer = None if last is None else (yield last)
            end = history.end_message(self.run.guard, stop.trip, stop.partial, answer)
            self.messages.append(end)
            outcome = yield self._finish(end["content"], stop.trip, stop.next_step)
        except BaseException as error:
            # Taken as it is, because the clause unbinds the name.
            failure = error
            self._settle_history()
            yield Finish(
                lambda: self.run.fail(
                    failure,
                    self.messages,
                    saved_messages=history.to_plain(self.messages),
                    resume=self._resume,
                )
            )
            raise
        return outcome

    def _conclude(self) -> Finish:
        # A part of the run may have been refused where nobody was told.
        if self.run.stopped_by is not None:
            raise _Tripped(self.run.stopped_by, "give the answer")
        return self._finish(history.message_text(self.messages[-1]))

    def save(self) -> None:
        """Save a checkpoint of this run and of those that it is a part of; blocking."""
        results = [
            history.tool_message(id_, _answer(call))
            for id_, call in self._calls
            if isinstance(call, str) or call.state in ("refused", "completed", "failed")
        ]
        self.run.save(self.messages, results, to_plain=history.to_plain)

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

    def _call_model(self) -> Generator[Command, Any, list[RequestedCall]]:
        attempt = 0
        while True:
            command = self._admit_model_call(retry=attempt > 0 or self.retry)
            self.retry = False
            if self._is_saved:
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
                if self._is_saved:
                    yield Save()
                cut: Cut | None = yield Wait(delay_after(error, attempt))
                if cut is not None:
                    raise _Tripped(cut.trip, "call the model") from None
                attempt += 1
            except BaseException as error:
                self.run.failed(command.call, error, written=command.partial)
                raise
            else:
                if isinstance(answer, Cut):
                    self.run.failed(command.call, "cut short", written=command.partial)
                    raise _Tripped(answer.trip, "call the model", command.partial)
                waiting = self._take(command.call, answer)
                if self._is_saved:
                    yield Save()
                return waiting

    def _admit_model_call(self, *, retry: bool) -> CallModel:
        kept = self.run.pruned(self.messages, self.model, self.provider)
        prompt = self._prompt if kept is None else Prompt()
        messages = list(self.messages) if kept is None else kept
        call = self.run.model_call(
            ModelCall(
                model=self.model,
                provider=self.provider,
                retry=retry,
                input_tokens=prompt.project(messages, tools=self._schemas),
            )
        )
        if isinstance(call, Stop):
            raise _Tripped(call.trip, "call the model")
        if call.nudge is not None:
            # For this call alone: a later turn has nothing to learn from it.
            messages.append({"role": "user", "content": call.nudge})
        return CallModel(call, messages)

    def _take(self, call: OpenModelCall, reply: ModelReply) -> list[RequestedCall]:
        message = dict(reply.message)
        waiting = history.requested_calls(message)
        text = written(message, reply.usage)
        self.run.answered(
            call,
            reply.usage,
            text=text,
            model=reply.model,
            cost_usd=reply.cost_usd,
            final=not waiting,
        )
        self._prompt.measured(reply.usage, reply=message)
        if reply.is_cut and not waiting:
            trip = self.run.cut_short(call)
            if trip is not None:
                raise _Tripped(trip, "go on with the answer", text)
        self.messages.append(message)
        return waiting

    # The tools

    def _run_tools(self, waiting: list[RequestedCall]) -> Generator[Command, Any, None]:
        gone, self.interrupted = self.interrupted, frozenset()
        fresh = waiting
        if gone:
            self._calls = [(call.id, OUTCOME_UNKNOWN) for call in waiting]
            fresh = [call for call in waiting if call.id not in gone]
        asked = [self._request(call) for call in fresh]
        batch = list(self.run.batch([request for request, _ in asked]))
        answers = iter(batch)
        self._calls = [
            (call.id, OUTCOME_UNKNOWN if call.id in gone else next(answers)) for call in waiting
        ]
        jobs: list[ToolJob] = []
        for (request, arguments), admitted in zip(asked, batch, strict=True):
            if isinstance(arguments, str):
                self.run.finished(admitted, arguments, error=arguments)
            elif admitted.refusal is None:
                admitted.function = function = self.tools[request.name]
                jobs.append(ToolJob(admitted, function, arguments))
        if self._is_saved:
            yield Save()
        trip = (yield from self._watch_tools(jobs)) if jobs else None
        self._settle_history()
        for admitted in batch:
            trip = trip or admitted.trip
        if trip is not None:
            raise _Tripped(trip, f"call the tools {', '.join(call.name for call in waiting)}")

    def _watch_tools(self, jobs: list[ToolJob]) -> Generator[Command, Any, Trip | None]:
        ended: ToolJob | Cut = yield StartTools(jobs)
        for left in range(len(jobs) - 1, -1, -1):
            if isinstance(ended, Cut):
                return ended.trip
            call, error = ended.call, ended.error
            if error is not None:
                self.run.finished(call, history.error_text(error), error=error)
            elif call.is_open:
                self.run.finished(call, history.result_text(ended.result))
            if self._is_saved:
                yield Save()
            if left:
                ended = yield NextTool()
        return None

    def _request(self, call: RequestedCall) -> tuple[ToolCall, dict[str, Any] | str]:
        """Describe a call; one that has no body to start is only fingerprinted, and says why."""
        arguments: dict[str, Any] | str
        if call.name not in self.tools:
            known = ", ".join(self.tools) or "none"
            # The model wrote the name, and would be sent it back: no more of it than it needs.
            arguments = f"Error: there is no tool {call.name[:80]!r}. The tools are: {known}."
        else:
            try:
                arguments = call.parsed()
            except (ValueError, RecursionError) as error:
                arguments = f"Error: {error}. Write the arguments as a JSON object."
        request = ToolCall(
            name=call.name,
            arguments=call.arguments,
            id=call.id,
            kind="output" if isinstance(arguments, str) else "function",
        )
        return request, arguments

    # The history

    def _settle_history(self) -> None:
        """Put what there is to say of each call that waits into the history."""
        calls, self._calls = self._calls, []
        if not calls:
            calls = [(call.id, NOT_EXECUTED) for call in history.open_calls(self.messages)]
        for id_, call in calls:
            self.messages.append(history.tool_message(id_, _answer(call)))
            if isinstance(call, OpenToolCall) and call.state == "waiting":
                self.run.withdrawn(call)


def _answer(call: _Call) -> str:
    return call if isinstance(call, str) else str(call.answer)
