"""The calls of a hand-written loop, admitted one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, Self

from budgetguard_core import AdapterError, BudgetExceeded, Trip, kit
from budgetguard_loop import _history as history
from budgetguard_loop._history import Message
from budgetguard_loop._reply import facts_of, is_in_turn
from budgetguard_loop._settings import is_async


class ToolRefused(BudgetExceeded):
    """This call of a tool may not start, and the run goes on.

    A quota is used up, or a breaker holds it. Its text is the result for the model, and says
    nothing of the budget; `trip` does.
    """

    def __init__(self, trip: Trip, message: str) -> None:
        super().__init__(trip)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.trip, self.message)


def refusal_of(run: kit.Run, call: kit.OpenToolCall) -> BudgetExceeded | None:
    """Start a tool call that has waited; return what to raise where it may not start."""
    refusal = run.start(call)
    if call.trip is not None or refusal is None or call.reason is None:
        return None if call.trip is None else BudgetExceeded(call.trip)
    violation = kit.Violation(reason=call.reason, detail=call.detail)
    trip = Trip(reason=call.reason, violations=(violation,), run_id=run.guard.run_id)
    return ToolRefused(trip, refusal)


class AdmittedModelCall:
    """One model call in a `with` block; admitted when the block is entered.

    Where the budget's breakers hold it back, entering waits: `async with` on an event loop.

    Attributes:
        nudge: What the model should be told before this call, or None.
        max_output_tokens: Completion tokens that the request may ask for, or None for no bound.
        model: The model to send it to: what was given, or the budget's `fallback_model`.

    Raises:
        BudgetExceeded: On entering, when a limit holds.
    """

    def __init__(
        self, run: kit.Run, call: kit.ModelCall, messages: list[Message], prompt: kit.Prompt
    ) -> None:
        self._run = run
        self._call = call
        self._messages = messages
        self._prompt = prompt
        self._open: kit.OpenModelCall | None = None
        self.nudge: str | None = None
        self.max_output_tokens: int | None = None
        self.model: str | None = call.model

    @property
    def messages(self) -> list[Message]:
        """The history to send, the nudge at its end where there is one."""
        messages = list(self._messages)
        if self.nudge is not None:
            messages.append({"role": "user", "content": self.nudge})
        return messages

    @property
    def seconds(self) -> float | None:
        """Time that the call may take from now on, or None for no limit."""
        return None if self._open is None else self._open.seconds

    def settle(
        self, response: Any = None, *, model: str | None = None, cost_usd: Decimal | None = None
    ) -> None:
        """Charge the call.

        An answer that the budget's own completion bound cut short ends the run at its next step,
        or with the block.

        Args:
            response: The response, its usage record, or a `TokenUsage`. Where it reports nothing,
                the tokens are estimated from its text and marked so.
            model: The model that was really called.
            cost_usd: What the provider says it cost; read from the response if left out.
        """
        open_call = self._open_call()
        usage = kit.token_usage(response)
        reply = facts_of(response, usage)
        self._run.answered(
            open_call,
            usage,
            text=reply.text,
            # Who does not send it to the fallback model pays for the model that answered.
            model=model or (kit.part(response, "model") if open_call.fallback_model else None),
            cost_usd=cost_usd or kit.reported_cost(response),
            final=reply.is_final and is_in_turn(self._run, reply.text, self._messages),
        )
        self._prompt.measured(usage)
        if reply.is_cut:
            self._run.cut_short(open_call)

    def _open_call(self) -> kit.OpenModelCall:
        if self._open is None:
            raise AdapterError("a model call is settled inside its block. Use it in `with`.")
        return self._open

    def __enter__(self) -> Self:
        return self._begin(self._run.wait(self._ask()))

    async def __aenter__(self) -> Self:
        found = await kit.run_awaited(self._run.ask(self._ask))
        return self._begin(await self._run.wait_async(found))

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)

    def _ask(self) -> kit.OpenModelCall | kit.Stop:
        return self._run.model_call(self._call, may_fall_back=True)

    def _begin(self, answer: kit.OpenModelCall | kit.Stop) -> Self:
        if isinstance(answer, kit.Stop):
            raise BudgetExceeded(answer.trip)
        self._open = answer
        self.nudge = answer.nudge
        self.max_output_tokens = answer.max_output_tokens
        self.model = answer.call.model
        self._inside = self._run.entered(answer)
        self._inside.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._inside.__exit__()
        if error is None:
            self._run.charge_reserved(self._open_call())
        else:
            self._run.failed(self._open_call(), error)


class AdmittedToolCall:
    """One tool call of a batch, admitted or refused.

    Call `run` with the tool's function; or use it as a `with` block around the tool, so that what
    is guarded inside belongs to the call, and give the block its result with `settle`. Both wait
    where the budget's breakers hold the call back: on an event loop, with an async function and
    with `async with`.

    Attributes:
        id: The call's id in the history; empty where the provider gave none.
        name: The tool's name.
    """

    def __init__(self, run: kit.Run, call: kit.OpenToolCall) -> None:
        self._run = run
        self._call = call
        self.id = call.call.id or ""
        self.name = call.call.name

    @property
    def refusal(self) -> str | None:
        """The call's result when it must not start, else None."""
        return self._call.refusal

    @property
    def ticket(self) -> kit.Admit | None:
        """The guard's answer, with the call's `idempotency_key`; None for a refused call."""
        return self._call.ticket

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments as keywords.

        Raises:
            ValueError: The model wrote no JSON object.
        """
        return history.parsed(self._call.call.arguments)

    @property
    def seconds(self) -> float | None:
        """Time that is left for the call, or None for no limit."""
        return None if self.refusal is not None else self._run.time_left()

    def run(self, function: Callable[..., Any]) -> Any:
        """Call the tool with its arguments, and return the text of its result for the model.

        A refused call returns its refusal; what the tool raises, and arguments that are no JSON
        object, become an error text. For an async function the answer is to be awaited.
        """
        if is_async(function):
            return self._await(function)
        if self.refusal is not None:
            return self.refusal
        try:
            with self:
                text = history.result_text(function(**self.arguments))
                self.settle(text)
        except Exception as error:
            return self._failed(error)
        return text

    async def _await(self, function: Callable[..., Any]) -> str:
        if self.refusal is not None:
            return self.refusal
        try:
            async with self:
                text = history.result_text(await function(**self.arguments))
                self.settle(text)
        except Exception as error:
            return self._failed(error)
        return text

    def _failed(self, error: Exception) -> str:
        if isinstance(error, ToolRefused) and self.refusal is not None:
            return self.refusal
        if self._run.stopped_by is not None and isinstance(error, BudgetExceeded):
            raise error
        return history.error_text(error)

    def settle(self, result: object = None, *, error: BaseException | str | None = None) -> None:
        """Report how the call ended; nothing for a refused one."""
        self._run.finished(self._call, result, error=error)

    def __enter__(self) -> Self:
        self._check()
        return self._begin(self._run.wait(self._call))

    async def __aenter__(self) -> Self:
        self._check()
        return self._begin(await self._run.wait_async(self._call))

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)

    def _check(self) -> None:
        if self.refusal is not None:
            raise AdapterError(
                f"a refused call must not start, got {self.name}. Give the model its refusal."
            )

    def _begin(self, call: kit.OpenToolCall) -> Self:
        refused = refusal_of(self._run, call)
        if refused is not None:
            raise refused
        self._inside = self._run.entered(self._call)
        self._inside.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._inside.__exit__()
        # What ends a tool from outside leaves its outcome unknown: the call stays open.
        if error is None:
            self.settle()
        elif isinstance(error, Exception):
            self.settle(error=error)


class ToolCalls(list[AdmittedToolCall]):
    """The tool calls of one reply, in the model's order, each admitted or refused.

    In a `with` block they all settle when it is left in good order: those that nobody settled as
    done, those that nobody started not at all.
    """

    def __init__(self, run: kit.Run, calls: Iterable[Any]) -> None:
        self._run = run
        self._batch = run.batch([found for call in calls if (found := _wanted(call)) is not None])
        super().__init__(AdmittedToolCall(run, call) for call in self._batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            for call in self._batch:
                self._run.finished(call)


def _wanted(call: Any) -> kit.ToolCall | None:
    """Read a tool call; None for the other blocks of a reply's content."""
    if isinstance(call, kit.ToolCall):
        return call
    read = kit.read_call(call)
    if not read.name:
        return None
    return kit.ToolCall(name=read.name, arguments=read.arguments, id=read.id or None)
