"""Explicit admission, for hand-written loops around any provider's SDK."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, Unpack

from budgetguard_core import (
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    AdapterError,
    Budget,
    BudgetExceeded,
    Guard,
    ModelCall,
    Outcome,
    Trip,
)
from budgetguard_core.kit import (
    Envelope,
    EnvelopeOptions,
    Prompt,
    Run,
    Watch,
    cut_short,
    envelope_of,
    is_stop,
)
from budgetguard_loop import _history as history
from budgetguard_loop._calls import AdmittedModelCall, ToolCalls
from budgetguard_loop._history import Message
from budgetguard_loop._last import LastStep
from budgetguard_loop._resume import Resume, begin
from budgetguard_loop._settings import Settings

_RESUME = "bounded(..., resume=outcome), and a fresh Budget"


class bounded:
    """Bound a block of code: it ends when a limit holds, and `outcome` tells how.

    Inside, every model call is made in `model_call` and every batch of tool calls is asked for with
    `tool_calls`; when a limit holds they raise `BudgetExceeded`, which the block swallows. On an
    event loop the deadline and an abort also cancel what the block awaits. Everything guarded
    inside, such as `run_bounded(..., Budget(...))`, spends the same budget.

        with bounded(Budget(max_iterations=20), messages=messages) as run:
            ...
        print(run.outcome.stop_reason)

    Use `async with` where the store or a sink would block the event loop.

    Args:
        budget: A `Budget`, for a fresh guard, a `Guard`, shared by reference, or an `Envelope`.
        messages: The history in the format of chat completions; messages of the SDK's may be
            appended as they are. It is closed in place when the block is stopped. Leave it out for
            any other format, and close it yourself.
        resume: An earlier run to go on with, as for `run_bounded`; its history is put before what
            `messages` holds.
        step: Gives a last answer where the budget has a `finalize_reserve` and a limit stops the
            run: as the step of `run_bounded`, given `messages`. On an event loop it may be async.
        model: The name of the step's model, for its price.
        provider: The provider's id where several have a model of this name.
        **options: The options of `Envelope`: `mode`, `sinks`, `on_warning`, `on_outcome`,
            `price_book`, `clock`, `store` (where the checkpoint goes when the block ends, and when
            `save` is called), `on_trip` (leave the block, or raise `BudgetExceeded`).

    Attributes:
        guard: The run's guard.
        messages: The history.
        final: The final answer. Set it when the run is done; without it the last assistant message
            is taken.
    """

    def __init__(
        self,
        budget: Budget | Guard | Envelope | None = None,
        *,
        messages: list[Message] | None = None,
        resume: Resume | None = None,
        step: Callable[..., Any] | None = None,
        model: str | None = None,
        provider: str | None = None,
        **options: Unpack[EnvelopeOptions],
    ) -> None:
        # Wrong options are said where they are given, and not when the block begins.
        envelope_of(budget, default=Budget(), **options)
        self._budget = budget
        self._options = options
        self._given = messages
        self._resume = resume
        self._step = step
        self._model = model, provider
        self._stack = ExitStack()
        self._watch: Watch | None = None
        self._tidied = 0
        self._prompt = Prompt()
        self._run: Run | None = None
        self.guard: Guard = Guard(sinks=None)
        self.messages: list[Message] = []
        self.final: Any = None

    @property
    def run(self) -> Run:
        """The run of the block, once it has been entered.

        Raises:
            AdapterError: It has not.
        """
        if self._run is None:
            raise AdapterError("a block has a run when it was entered. Use it in `with`.")
        return self._run

    @property
    def outcome(self) -> Outcome:
        """The outcome, once the block has ended, be it by an exception.

        Raises:
            AdapterError: It has not.
        """
        ended = None if self._run is None else self._run.outcome
        if ended is None:
            raise AdapterError("a block has an outcome when it has ended. Ask after the block.")
        return ended

    def model_call(
        self,
        model: str | None = None,
        *,
        provider: str | None = None,
        retry: bool = False,
        input_tokens: int | None = None,
        max_output_tokens: int | None = None,
        seconds: float | None = None,
        tools: Iterable[Any] = (),
    ) -> AdmittedModelCall:
        """Ask for one model call: `with run.model_call("gpt-5") as call:`.

        Args:
            model: The model's name, for its price. Needed with `max_cost_usd`.
            provider: The provider's id where several have a model of this name.
            retry: Another attempt at the same turn: charged, but no iteration.
            input_tokens: The prompt's tokens, where you know them better than an estimate.
            max_output_tokens: The bound that you would ask for.
            seconds: The call's own time limit.
            tools: The tool schemas that the request carries, for the estimate of the prompt.
        """
        if input_tokens is None:
            input_tokens = self._projected(tools, model, provider)
        call = ModelCall(
            model=model,
            provider=provider,
            retry=retry,
            input_tokens=input_tokens,
            max_output_tokens=max_output_tokens,
            seconds=seconds,
        )
        return AdmittedModelCall(self.run, call, self.messages, self._prompt)

    def tool_calls(self, calls: Iterable[Any]) -> ToolCalls:
        """Ask for all tool calls of one reply, in the model's order.

        Args:
            calls: Tool calls as the SDK of OpenAI, Anthropic, Gemini, Ollama or Bedrock (Converse)
                returns them, or `ToolCall`s. The whole content of a reply will do: what is no call
                is left out.

        Returns:
            One for each call. Those with a `refusal` must not start: it is their result.
        """
        return ToolCalls(self.run, calls)

    def save(self) -> None:
        """Save a checkpoint now; blocking. On an event loop: `await asyncio.to_thread(run.save)`.

        Right after an admission it makes sure that a killed process loses no count. It costs what
        is new; a change to a message that was saved before is saved when the block ends.

        Raises:
            RunFencedError: The run was resumed elsewhere, so it must not go on here.
        """
        try:
            self._tidy()
        except Exception as error:
            self.guard.report("checkpoint", error)
        else:
            self.run.save(self.messages, to_plain=history.to_plain)

    def to_send(self) -> list[Message]:
        """Return the messages for the next request: `messages`, or what `prune` keeps of them."""
        self._tidy()
        return self.run.pruned(self.messages) or list(self.messages)

    def __enter__(self) -> Self:
        self._begin()
        return self._attach()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        trip, ended = self._detach(kind, error, trace)
        if ended:
            self._end(trip, self._asked(trip))
        else:
            self._fail(error)
        return self._swallowed(ended, error)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._begin)
        return self._attach()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        trip, ended = self._detach(kind, error, trace)
        if ended:
            answer = await self._asked_async(trip)
            await self.run.in_thread(lambda: self._end(trip, answer))
        else:
            await self.run.in_thread(lambda: self._fail(error))
        return self._swallowed(ended, error)

    def _begin(self) -> None:
        beginning = begin(
            self._budget, self._options, messages=self._given or (), resume=self._resume
        )
        self._run = beginning.run
        self.guard = beginning.run.guard
        self.messages = [] if self._given is None else self._given
        # In place: the list is the caller's own.
        self.messages[:] = beginning.messages

    def _attach(self) -> Self:
        self.run.thread = threading.get_ident()
        self._stack.enter_context(self.run.entered())
        self._watch = self._stack.enter_context(cut_short(self.run))
        return self

    def _detach(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> tuple[Trip | None, bool]:
        """Say why the run was stopped, and whether it has ended by that or by itself."""
        cut = bool(self._stack.__exit__(kind, error, trace)) and self._watch is not None
        trip = self.run.stopped_by or self.guard.trip
        if cut or (is_stop(error) and trip is not None):
            return trip, True
        if error is not None:
            return None, False
        self._tidy()
        return self.run.stopped_by if self._is_over() else trip, True

    def _tidy(self) -> None:
        """Turn the SDK's own messages, which hand-written loops append, into plain data."""
        for place in range(min(self._tidied, len(self.messages)), len(self.messages)):
            self.messages[place] = history.as_message(self.messages[place])
        self._tidied = len(self.messages)

    def _is_over(self) -> bool:
        last = self.messages[-1] if self.messages else {}
        return self.final is not None or (
            last.get("role") == "assistant" and not last.get("tool_calls")
        )

    def _swallowed(self, ended: bool, error: BaseException | None) -> bool:
        if not ended:
            return False
        trip = self.run.trip
        if trip is not None and self.run.is_passed_on:
            raise BudgetExceeded(trip, self.outcome) from None
        return error is not None

    def _close(self) -> None:
        self._tidy()
        # A function that is guarded by itself knows its name and not the call's id.
        flying = [t.call.id or t.call.name for t in self.guard.open_tool_calls()]
        for call in history.open_calls(self.messages):
            known = next((name for name in (call.id, call.name) if name in flying), None)
            if known is not None:
                flying.remove(known)
            text = NOT_EXECUTED if known is None else OUTCOME_UNKNOWN
            self.messages.append(history.tool_message(call.id, text))

    def _asked(self, trip: Trip | None) -> str | None:
        found = self._may_ask(trip)
        return None if found is None else found[0].ask(*found[1:])

    async def _asked_async(self, trip: Trip | None) -> str | None:
        found = self._may_ask(trip)
        return None if found is None else await found[0].ask_async(*found[1:])

    def _may_ask(self, trip: Trip | None) -> tuple[LastStep, Callable[..., Any], Settings] | None:
        """Return what a stopped run may be asked at last; it has to know its messages."""
        self._close_known()
        if self._step is None or not self.messages:
            return None
        last = LastStep.of(self.run, trip, self.messages, *self._model)
        return None if last is None else (last, self._step, Settings(self._step))

    def _close_known(self) -> None:
        if self._given is not None or self._resume is not None:
            self._close()

    def _end(self, trip: Trip | None, answer: str | None) -> Outcome:
        final = self.final
        if trip is not None:
            # Not two of the assistant's in a row: an answer that is there goes into the last one.
            said = history.take_answer(self.messages)
            end = history.end_message(self.guard, trip, said, answer)
            self.messages.append(end)
            final = end["content"]
        elif final is None and self.messages:
            final = history.message_text(self.messages[-1])
        return self.run.end(
            self.messages,
            final,
            trip=trip,
            saved_messages=history.to_plain(self.messages),
            resume=_RESUME,
        )

    def _fail(self, error: BaseException | None) -> Outcome:
        self._close()
        return self.run.fail(
            error or RuntimeError("the block was left"),
            self.messages,
            saved_messages=history.to_plain(self.messages),
            resume=_RESUME,
        )

    def _projected(self, tools: Iterable[Any], model: str | None, provider: str | None) -> int:
        self._tidy()
        kept = self.run.pruned(self.messages, model, provider)
        if kept is not None:
            return Prompt().project(kept, tools=tuple(tools))
        return self._prompt.project(self.messages, tools=tuple(tools))
