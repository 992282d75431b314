"""Explicit admission, for hand-written loops around any provider's SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import ExitStack
from decimal import Decimal
from types import TracebackType
from typing import Any, Literal, Self

from budgetguard_core import (
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    AdapterError,
    Admit,
    Budget,
    BudgetExceeded,
    CheckpointStore,
    Guard,
    ModelCall,
    Nudge,
    Outcome,
    Stop,
    TokenUsage,
    ToolCall,
    ToolDecision,
    Trip,
    end_run,
)
from budgetguard_loop import _history as history
from budgetguard_loop._ambient import Layer, Watch, cut_short, entered, seconds_of, taking_part
from budgetguard_loop._history import Message, RequestedCall
from budgetguard_loop._reply import read_reply
from budgetguard_loop._resume import Resume, begin
from budgetguard_loop._usage import estimated, extract_usage
from budgetguard_loop.run import check_on_trip


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
        budget: A `Budget`, for a fresh guard, or a `Guard`, shared by reference.
        messages: The history in the format of chat completions; messages of the SDK's may be
            appended as they are. It is closed in place when the block is stopped. Leave it out for
            any other format, and close it yourself.
        on_trip: Leave the block (`return`), or `raise` `BudgetExceeded` with the outcome.
        store: Where the checkpoint goes when the block ends, and when `save` is called.
        resume: An earlier run to go on with, as for `run_bounded`; its history is put before what
            `messages` holds.

    Attributes:
        guard: The run's guard.
        messages: The history.
        final: The final answer. Set it when the run is done; without it the last assistant message
            is taken.
    """

    def __init__(
        self,
        budget: Budget | Guard | None = None,
        *,
        messages: list[Message] | None = None,
        on_trip: Literal["return", "raise"] = "return",
        store: CheckpointStore | None = None,
        resume: Resume | None = None,
    ) -> None:
        self._budget = budget
        self._given = messages
        check_on_trip(on_trip)
        self._on_trip = on_trip
        self._store = store
        self._resume = resume
        self._stack = ExitStack()
        self._watch: Watch | None = None
        self._counted = 0
        self._tidied = 0
        self._prompt_tokens = 0
        self.guard: Guard = Guard()
        self.messages: list[Message] = []
        self.final: Any = None
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        """The outcome, once the block has ended.

        Raises:
            AdapterError: It has not, or an exception that was not ours went through it.
        """
        if self._outcome is None:
            raise AdapterError("a block has an outcome when it has ended. Ask after the block.")
        return self._outcome

    def model_call(
        self,
        model: str | None = None,
        *,
        provider: str | None = None,
        retry: bool = False,
        input_tokens: int | None = None,
        max_output_tokens: int | None = None,
        seconds: float | None = None,
    ) -> AdmittedModelCall:
        """Ask for one model call: `with run.model_call("gpt-5") as call:`.

        Args:
            model: The model's name, for its price. Needed with `max_cost_usd`.
            provider: The provider's id where several have a model of this name.
            retry: Another attempt at the same turn: charged, but no iteration.
            input_tokens: The prompt's tokens, where you know them better than an estimate.
            max_output_tokens: The bound that you would ask for.
            seconds: The call's own time limit.
        """
        if input_tokens is None:
            input_tokens = self._projected()
        call = ModelCall(
            model=model,
            provider=provider,
            retry=retry,
            input_tokens=input_tokens,
            max_output_tokens=max_output_tokens,
            seconds=seconds,
        )
        return AdmittedModelCall(self, call)

    def tool_calls(self, calls: Iterable[Any]) -> list[AdmittedToolCall]:
        """Ask for all tool calls of one reply, in the model's order.

        Args:
            calls: Tool calls as OpenAI's or Anthropic's SDK returns them, or `ToolCall`s.

        Returns:
            One for each call. Those with a `refusal` must not start: it is their result.
        """
        asked: list[tuple[RequestedCall, ToolCall]] = []
        for place, call in enumerate(calls):
            if isinstance(call, ToolCall):
                wanted = RequestedCall(call.id or f"call_{place}", call.name, call.arguments)
                asked.append((wanted, call))
            else:
                wanted = history.read_call(call, place)
                asked.append(
                    (
                        wanted,
                        ToolCall(name=wanted.name, arguments=wanted.arguments, id=wanted.id),
                    )
                )
        decisions = self.guard.admit_tool_calls([call for _, call in asked])
        return [
            AdmittedToolCall(wanted, decision, self.save)
            for (wanted, _), decision in zip(asked, decisions, strict=True)
        ]

    def save(self) -> None:
        """Save a checkpoint now; blocking. On an event loop: `await asyncio.to_thread(run.save)`.

        Right after an admission it makes sure that a killed process loses no count.
        """
        if self._store is not None:
            try:
                self._tidy()
                self._store.save(self.guard.snapshot(history.to_plain(self.messages)))
            except Exception as error:
                self.guard.report(f"checkpoint: {type(error).__name__}: {error}")

    def measured(self, usage: TokenUsage) -> None:
        """Take what the provider counted as the projection of the next prompt."""
        self._counted = len(self.messages)
        self._prompt_tokens = usage.input_tokens + usage.output_tokens - usage.reasoning_tokens

    def __enter__(self) -> Self:
        self._begin()
        return self._attach()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        ended, trip = self._detach(kind, error, trace)
        self._end(trip) if ended else self._interrupt()
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
        ended, trip = self._detach(kind, error, trace)
        if ended:
            await asyncio.to_thread(self._end, trip)
        else:
            await asyncio.to_thread(self._interrupt)
        return self._swallowed(ended, error)

    def _begin(self) -> None:
        run = begin(
            self._budget,
            messages=self._given or (),
            tools={},
            store=self._store,
            resume=self._resume,
        )
        self.guard = run.guard
        self.messages = [] if self._given is None else self._given
        # In place: the list is the caller's own.
        self.messages[:] = run.messages

    def _attach(self) -> Self:
        self.guard = self._stack.enter_context(taking_part(self.guard, self.messages))
        self._stack.enter_context(entered(Layer(self.guard, save=self.save)))
        self._watch = self._stack.enter_context(cut_short(self.guard))
        return self

    def _detach(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> tuple[bool, Trip | None]:
        """Say whether the run has ended, by itself or by a trip, and not by something else."""
        cut = bool(self._stack.__exit__(kind, error, trace)) and self._watch is not None
        if cut or (isinstance(error, BudgetExceeded) and self.guard.trip is not None):
            return True, self.guard.trip
        if error is not None:
            return False, None
        self._tidy()
        return True, None if self._is_over() else self.guard.trip

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
        trip = self.guard.trip
        stopped = self.outcome.status == "terminated"
        if stopped and trip is not None and self._on_trip == "raise":
            raise BudgetExceeded(trip, self.outcome) from None
        return error is not None

    def _close(self) -> None:
        self._tidy()
        # A function that is guarded by itself knows its name and not the call's id.
        flying = [t.call.id or t.call.name for t in self.guard.open_tool_calls()]
        for call in history.open_batch(self.messages)[1]:
            known = next((name for name in (call.id, call.name) if name in flying), None)
            if known is not None:
                flying.remove(known)
            text = NOT_EXECUTED if known is None else OUTCOME_UNKNOWN
            self.messages.append(history.tool_message(call.id, text))

    def _end(self, trip: Trip | None) -> None:
        if self._given is not None or self._resume is not None:
            self._close()
        final = self.final
        if trip is not None:
            end = history.end_message(self.guard, trip)
            self.messages.append(end)
            final = end["content"]
        elif final is None and self.messages:
            final = history.message_text(self.messages[-1])
        self._outcome = end_run(
            self.guard,
            trip=trip,
            messages=self.messages,
            saved_messages=history.to_plain(self.messages),
            final=final,
            store=self._store,
            resume=None if trip is None else "bounded(..., resume=outcome), and a fresh Budget",
        )

    def _interrupt(self) -> None:
        self._close()
        self.save()
        self.guard.flush()

    def _projected(self) -> int:
        self._tidy()
        if self._counted > len(self.messages):
            self._counted = self._prompt_tokens = 0
        added = self.messages[self._counted :]
        self._prompt_tokens += sum(map(history.message_tokens, added))
        self._counted = len(self.messages)
        return self._prompt_tokens


class AdmittedModelCall:
    """One model call in a `with` block; admitted when the block is entered.

    Attributes:
        ticket: The guard's answer.
        nudge: What the model should be told before this call, or None.
        max_output_tokens: Completion tokens that the request may ask for, or None for no bound.
        seconds: Time that the call may take, or None for no limit.

    Raises:
        BudgetExceeded: On entering, when a limit holds.
    """

    def __init__(self, run: bounded, call: ModelCall) -> None:
        self._run = run
        self._call = call
        self._stack = ExitStack()
        self._settled = False
        self.ticket = Admit(run.guard, call, 0)
        self.nudge: str | None = None
        self.max_output_tokens: int | None = None
        self.seconds: float | None = None

    @property
    def messages(self) -> list[Message]:
        """The history to send, the nudge at its end where there is one."""
        messages = list(self._run.messages)
        if self.nudge is not None:
            messages.append({"role": "user", "content": self.nudge})
        return messages

    def settle(
        self,
        response: Any = None,
        *,
        model: str | None = None,
        cost_usd: Decimal | None = None,
    ) -> None:
        """Charge the call.

        Args:
            response: The response, its usage record, or a `TokenUsage`. Where it reports nothing,
                the tokens are estimated from its text and marked so.
            model: The model that was really called.
            cost_usd: What the provider says it cost.
        """
        usage = extract_usage(response)
        if usage is None and response is not None:
            usage = estimated(self._call.input_tokens, _text(response))
        self._settled = True
        self._run.guard.settle_model_call(self.ticket, usage, model=model, cost_usd=cost_usd)
        if usage is not None and not usage.estimated:
            self._run.measured(usage)

    def __enter__(self) -> Self:
        guard = self._run.guard
        decision = guard.admit_model_call(self._call)
        if isinstance(decision, Stop):
            raise BudgetExceeded(decision.trip)
        self.ticket = decision
        self.nudge = decision.message if isinstance(decision, Nudge) else None
        self.max_output_tokens = decision.max_output_tokens
        self.seconds = decision.seconds
        self._stack.enter_context(entered(Layer(guard, ticket=decision, save=self._run.save)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        if not self._settled:
            self._run.guard.settle_model_call(self.ticket, error=error)


class AdmittedToolCall:
    """One tool call of a batch, admitted or refused.

    Use it as a `with` block around the tool, so that what is guarded inside belongs to the call.

    Attributes:
        id: The call's id in the history.
        name: The tool's name.
        refusal: The call's result when it must not start, else None.
        ticket: The guard's answer, None for a refused call.
    """

    def __init__(self, wanted: RequestedCall, decision: ToolDecision, save: Any) -> None:
        self._wanted = wanted
        self._save = save
        self._stack = ExitStack()
        self.id = wanted.id
        self.name = wanted.name
        self.ticket = decision if isinstance(decision, Admit) else None
        self.refusal = None if isinstance(decision, Admit) else decision.message

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments as keywords.

        Raises:
            ValueError: The model wrote no JSON object.
        """
        return self._wanted.parsed()

    @property
    def seconds(self) -> float | None:
        """Time that is left for the call, or None for no limit."""
        return None if self.ticket is None else seconds_of(self.ticket)

    def settle(self, result: object = None, *, error: BaseException | str | None = None) -> None:
        """Report how the call ended; nothing for a refused one."""
        if self.ticket is not None:
            self.ticket.guard.settle_tool_call(self.ticket, result, error=error)

    def __enter__(self) -> Self:
        if self.ticket is None:
            raise AdapterError(
                f"a refused call must not start, got {self.name}. Give the model its refusal."
            )
        layer = Layer(self.ticket.guard, ticket=self.ticket, save=self._save)
        self._stack.enter_context(entered(layer))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        # What ends a tool from outside leaves its outcome unknown: the call stays open.
        if isinstance(error, Exception):
            self.settle(error=error)


def _text(response: Any) -> str:
    try:
        reply = read_reply(response)
    except AdapterError:
        return history.result_text(response)
    return history.message_text(reply.message) + str(reply.message.get("tool_calls") or "")
