"""The loop itself, without I/O: a generator that says what to do and is told what came of it.

`run_bounded` and its async and streamed forms are thin shells that act out the same commands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from budgetguard_core import (
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    AdapterError,
    Admit,
    BudgetExceeded,
    CheckpointStore,
    Guard,
    ModelCall,
    Nudge,
    Outcome,
    Stop,
    TokenUsage,
    ToolCall,
    Trip,
    end_run,
    estimate_tokens,
)
from budgetguard_loop import _history as history
from budgetguard_loop._ambient import LAYER, Layer, taking_part
from budgetguard_loop._history import Message, RequestedCall
from budgetguard_loop._reply import ModelReply
from budgetguard_loop._usage import estimated

ToolFunction: TypeAlias = Callable[..., Any]


@dataclass(slots=True)
class CallModel:
    """Call the model. Answer with a `ModelReply` or a `Cut`; what the step raises is thrown."""

    ticket: Admit
    messages: list[Message]
    layer: Layer
    partial: str = ""
    """What a stream has said so far; the shell keeps it up to date."""
    shown: bool = False
    """The consumer of a stream has got a part of this reply: it cannot be tried again."""


@dataclass(frozen=True, slots=True)
class ToolJob:
    """A tool call that was admitted."""

    place: int
    ticket: Admit
    function: ToolFunction
    arguments: dict[str, Any]
    layer: Layer


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


@dataclass(frozen=True, slots=True)
class Save:
    """Save the run, blocking."""

    flush: bool = False
    """Have the sinks make safe what they took, too: the run ends with an exception."""


class Finish:
    """End the run, blocking; answer with the `Outcome`."""

    __slots__ = ("final", "next_step", "trip")

    def __init__(self, trip: Trip | None, final: str, next_step: str | None = None) -> None:
        self.trip = trip
        self.final = final
        self.next_step = next_step


@dataclass(frozen=True, slots=True)
class Cut:
    """The work in flight was ended by the deadline or an abort."""

    trip: Trip


Command: TypeAlias = CallModel | StartTools | NextTool | Save | Finish
Steps: TypeAlias = Generator[Command, Any, Outcome]


class _Tripped(Exception):
    def __init__(self, trip: Trip, next_step: str, partial: str = "") -> None:
        self.trip = trip
        self.next_step = next_step
        self.partial = partial


@dataclass(slots=True)
class Run:
    """One run of the loop."""

    guard: Guard
    messages: list[Message]
    tools: Mapping[str, ToolFunction]
    step: object
    model: str | None
    provider: str | None
    retries: int
    store: CheckpointStore | None
    interrupted: frozenset[str] = frozenset()
    """Ids of the tool calls that were in flight when the process of an earlier leg ended."""
    retry: bool = False
    """The first model call is another attempt at a turn that was counted already."""
    _results: dict[int, Message] = field(default_factory=dict[int, Message])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _above: Layer | None = field(default_factory=LAYER.get)
    _prompt_tokens: int = 0

    def steps(self) -> Steps:
        """Run the loop to its end."""
        with taking_part(self.guard, self.messages) as self.guard:
            self._prompt_tokens = sum(map(history.message_tokens, self.messages))
            try:
                while True:
                    _, waiting = history.open_batch(self.messages)
                    if waiting:
                        yield from self._run_tools(waiting)
                    elif self._is_over():
                        final = history.message_text(self.messages[-1])
                        outcome: Outcome = yield Finish(None, final)
                        return outcome
                    yield from self._call_model()
            except _Tripped as stop:
                self._settle_history(NOT_EXECUTED)
                end = history.end_message(self.guard, stop.trip, stop.partial)
                self.messages.append(end)
                outcome = yield Finish(stop.trip, end["content"], stop.next_step)
                return outcome
            except BaseException:
                started = bool(self.guard.open_tool_calls())
                self._settle_history(OUTCOME_UNKNOWN if started else NOT_EXECUTED)
                yield Save(flush=True)
                raise

    def save(self, command: Save = Save()) -> None:
        """Save a snapshot of this run and of those that it is a part of; blocking."""
        if self.store is not None:
            # Under a lock, so that no older snapshot overwrites a newer one.
            with self._lock:
                try:
                    self.store.save(self.guard.snapshot(history.to_plain(self._so_far())))
                except Exception as error:
                    self.guard.report(f"checkpoint: {type(error).__name__}: {error}")
        if self._above is not None and self._above.save is not None:
            self._above.save()
        if command.flush:
            self.guard.flush()

    @property
    def is_saved(self) -> bool:
        """Whether `save` has anything to do."""
        return self.store is not None or (self._above is not None and self._above.save is not None)

    def finish(self, command: Finish) -> Outcome:
        """End the run; blocking."""
        resume = "resume=outcome, and a fresh Budget"
        if self.store is not None:
            resume = f"resume={self.guard.run_id!r} with the same store, and a fresh Budget"
        return end_run(
            self.guard,
            trip=command.trip,
            messages=self.messages,
            saved_messages=history.to_plain(self.messages),
            final=command.final,
            store=self.store,
            next_step=command.next_step,
            resume=None if command.trip is None else f"run_bounded(step, ..., {resume})",
        )

    def _is_over(self) -> bool:
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant"

    # The model

    def _call_model(self) -> Generator[Command, Any, None]:
        for attempt in range(self.retries + 1):
            command = self._admit_model_call(retry=attempt > 0 or self.retry)
            self.retry = False
            yield Save()
            try:
                answer = yield command
            except Exception as error:
                self._fail(command, error)
                if isinstance(error, BudgetExceeded) and self.guard.trip is not None:
                    raise _Tripped(self.guard.trip, "call the model") from None
                if attempt == self.retries or command.shown or isinstance(error, AdapterError):
                    raise
                yield Save()
            except BaseException as error:
                self._fail(command, error)
                raise
            else:
                if isinstance(answer, Cut):
                    self._fail(command, "cut short")
                    raise _Tripped(answer.trip, "call the model", command.partial)
                self._take(command, answer)
                yield Save()
                return

    def _admit_model_call(self, *, retry: bool) -> CallModel:
        decision = self.guard.admit_model_call(
            ModelCall(
                model=self.model,
                provider=self.provider,
                retry=retry,
                input_tokens=self._prompt_tokens,
            )
        )
        if isinstance(decision, Stop):
            raise _Tripped(decision.trip, "call the model")
        messages = list(self.messages)
        if isinstance(decision, Nudge):
            # For this call alone: a later turn has nothing to learn from it.
            messages.append({"role": "user", "content": decision.message})
        layer = Layer(self.guard, ticket=decision, function=self.step, save=self.save)
        return CallModel(decision, messages, layer)

    def _take(self, command: CallModel, reply: ModelReply) -> None:
        message = dict(reply.message)
        text = history.message_text(message)
        usage = reply.usage
        if usage is None:
            said = text + str(message.get("tool_calls") or "")
            usage = estimated(command.ticket.call.input_tokens, said)
        self.guard.settle_model_call(
            command.ticket, usage, model=reply.model, cost_usd=reply.cost_usd
        )
        self.messages.append(message)
        # What the provider counted is the best projection of the next prompt.
        self._prompt_tokens = usage.input_tokens + usage.output_tokens - usage.reasoning_tokens

    def _fail(self, command: CallModel, error: BaseException | str) -> None:
        usage = None
        if command.partial:
            written = estimate_tokens(command.partial)
            usage = TokenUsage(command.ticket.call.input_tokens, written, estimated=True)
        self.guard.settle_model_call(command.ticket, usage, error=error)

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
        decisions = self.guard.admit_tool_calls([request for _, _, request, _ in fresh])
        for (place, call, request, arguments), decision in zip(fresh, decisions, strict=True):
            if not isinstance(decision, Admit):
                self._results[place] = history.tool_message(call.id, decision.message)
                trip = decision.trip if isinstance(decision, Stop) else trip
            elif request.kind == "output":
                self.guard.settle_tool_call(decision, error=str(arguments["error"]))
                self._results[place] = history.tool_message(call.id, arguments["error"])
            else:
                function = self.tools[call.name]
                layer = Layer(self.guard, ticket=decision, function=function, save=self.save)
                jobs.append(ToolJob(place, decision, function, arguments, layer))
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
            ticket = end.job.ticket
            if not end.started:
                text = NOT_EXECUTED
                self.guard.settle_tool_call(ticket, error=text)
            elif end.error is None:
                text = history.result_text(end.result)
                self.guard.settle_tool_call(ticket, text)
            else:
                text = history.error_text(end.error)
                self.guard.settle_tool_call(ticket, error=end.error)
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

    def _so_far(self) -> list[Message]:
        return [*self.messages, *(message for _, message in sorted(self._results.items()))]

    def _settle_history(self, text: str) -> None:
        """Put the results that are there into the history, in order; the others get `text`."""
        _, waiting = history.open_batch(self.messages)
        added = [
            self._results.get(place, history.tool_message(call.id, text))
            for place, call in enumerate(waiting)
        ]
        self._results = {}
        self.messages.extend(added)
        self._prompt_tokens += sum(map(history.message_tokens, added))
