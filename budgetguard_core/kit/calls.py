"""The calls of a run: a model call or a tool call from its admission to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from budgetguard_core.decision import (
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    Admit,
    ModelCall,
    ToolCall,
)
from budgetguard_core.frame import Frame
from budgetguard_core.stop import StopReason, Trip
from budgetguard_core.usage import TokenUsage

ToolState: TypeAlias = Literal["waiting", "refused", "started", "completed", "failed", "withdrawn"]


class _Call:
    """A call that is open in a frame of its run.

    Attributes:
        run: The run that it is a part of.
    """

    run: Any = None
    _frame: Frame | None = None

    @property
    def frame(self) -> Frame:
        """The frame of the code that makes the call: a layer below finds the call by it.

        It is made where it is asked for, unless an adapter has given one of its own: a call that
        kept it would be kept by it, until the garbage collection looks for such circles.
        """
        run = self.run
        return self._frame or Frame(run.guard, run=run, call=self, parent=run.parent)

    @frame.setter
    def frame(self, frame: Frame) -> None:
        self._frame = frame


class OpenModelCall(_Call):
    """A model call that may go out. It is told apart from others by its identity.

    Attributes:
        call: What was asked for.
        tickets: The admissions of the guards that charge it. Empty where a layer above has
            admitted this very call, and settles it.
        nudge: What the model should be told first, about the work only; None for nothing.
        max_output_tokens: Completion tokens that the request may ask for; None for no bound.
        fallback_model: The model that the request has to go to; None for its own.
        is_open: It has not been settled yet.
        measured: What a layer below has found out about this call, for the layer that settles it.
        attempt: What the last attempt that a layer below made at this call has used, and what ended
            it, if it failed. None before one has ended.
    """

    # What most calls have in common is the class's: one is made for each step.
    seen = False
    measured: TokenUsage | None = None
    attempt: tuple[TokenUsage | None, BaseException | str | None] | None = None
    is_open = True
    fallback_model: str | None = None

    def __init__(
        self,
        call: ModelCall,
        tickets: Sequence[Admit],
        *,
        nudge: str | None,
        max_output_tokens: int | None,
        parent: OpenModelCall | None,
        run: Any = None,
    ) -> None:
        self.run = run
        self.call = call
        self.tickets = tuple(tickets)
        self.nudge = nudge
        self.max_output_tokens = max_output_tokens
        self.parent = parent

    @property
    def ticket(self) -> Admit | None:
        """The admission of the run's own guard, or of the layer above that counts the call."""
        charged = self.charged
        return charged[0] if charged else None

    @property
    def charged(self) -> tuple[Admit, ...]:
        """Every admission that stands for this call, those of the layers above included."""
        parent = () if self.parent is None else self.parent.charged
        return (*self.tickets, *parent)

    def attempted(self, used: TokenUsage | None, error: BaseException | str | None = None) -> None:
        """Take a lower layer's report of how an attempt at this call ended."""
        # Zeros would be taken for a call that its provider answered for nothing.
        self.measured = used if used is not None and used.total_tokens else None
        self.attempt = used, error

    @property
    def seconds(self) -> float | None:
        """Seconds that the call may take from now on; None without a limit."""
        if not self.tickets and self.parent is not None:
            return self.parent.seconds
        least: float | None = None
        for ticket in self.tickets:
            seconds = ticket.seconds
            if seconds is not None and (least is None or seconds < least):
                least = seconds
        return self.call.seconds if least is None else least

    def close(self) -> bool:
        """Take the right to settle the call; False when it was taken before."""
        was, self.is_open = self.is_open, False
        return was


class OpenToolCall(_Call):
    """One tool call, from its admission to its end.

    Attributes:
        call: What the model asked for.
        function: The callable that is the tool's body, where the adapter knows it: a guarded
            function finds by it that this call is its own, whatever the tool is called.
        tickets: The admissions of the guards that charge it.
        state: `waiting` to start, `refused`, `started`, `completed`, `failed` or `withdrawn`.
        refusal: The call's result where it may not start; None where it may.
        reason: Why it was refused.
        detail: The same for people, with the figures; never for the model.
        trip: The stop that refused it; None for a quota, after which the run goes on.
        result: What it returned, or the text of what it raised; None before its end.
        taken: `ToolCalls.take` has returned it.
    """

    state: ToolState = "waiting"
    refusal: str | None = None
    reason: StopReason | None = None
    detail = ""
    function: Any = None
    trip: Trip | None = None
    result: Any = None
    seen = False
    taken = False

    def __init__(self, call: ToolCall, tickets: Sequence[Admit] = (), run: Any = None) -> None:
        self.run = run
        self.call = call
        self.tickets = tuple(tickets)

    def refuse(
        self, result: str, reason: StopReason, detail: str = "", *, trip: Trip | None = None
    ) -> None:
        """Refuse the call: it may not start.

        Args:
            result: Its result, for the model.
            reason: Why.
            detail: The same for people.
            trip: The stop that refused it; None where the run goes on.
        """
        self.state = "refused"
        self.refusal = result
        self.reason = reason
        self.detail = detail
        self.trip = trip

    @property
    def is_open(self) -> bool:
        """True if the body was started and has not reported its end."""
        return self.state == "started"

    @property
    def ticket(self) -> Admit | None:
        """The run's own admission, None for a refused call. It has the `idempotency_key`."""
        return self.tickets[0] if self.tickets else None

    @property
    def answer(self) -> Any:
        """The text of the call in the history: its result, or why there is none."""
        if self.state in ("completed", "failed"):
            return self.result
        if self.state == "started":
            return OUTCOME_UNKNOWN
        return self.refusal or NOT_EXECUTED
