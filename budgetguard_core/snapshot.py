"""The state of a guard, and the conversation that it was given, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from budgetguard_core.budget import Budget
from budgetguard_core.counters import COUNTERS, RESERVED
from budgetguard_core.decision import Admit, ModelCall, ToolCall
from budgetguard_core.errors import CheckpointError, ConfigurationError
from budgetguard_core.outcome import Outcome
from budgetguard_core.pricing import Rates, from_usd, to_usd
from budgetguard_core.records import dump
from budgetguard_core.stop import Trip, Violation
from budgetguard_core.usage import Usage

FORMAT_VERSION = 1
"""The version of the format."""


_Mode: TypeAlias = Literal["enforce", "observe", "off"]


class OpenCall(BaseModel):
    """A call that was in flight when the snapshot was taken: it may have taken effect."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    call_id: NonNegativeInt
    """The number of the call within its tree of guards."""
    call: ModelCall | ToolCall
    """The call; of a tool call's arguments, the fingerprint alone."""
    reserved_tokens: NonNegativeInt = 0
    """Tokens that are set aside for it until it is settled."""
    reserved_cost: NonNegativeInt = 0
    """Money that is set aside for it, in femto-dollars (1E-15 US dollars)."""
    reserved_input: NonNegativeInt = 0
    """Those of the tokens that are of its prompt."""
    occurrence: NonNegativeInt = 0
    """The number of tool calls with this id, name and arguments that came before it."""
    expected: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)
    """The part of its reservation that is a guess at the completion: tokens, and money likewise."""

    @classmethod
    def of(cls, ticket: Admit) -> Self:
        """Describe a ticket."""
        call = ticket.call
        plain = replace(call, arguments=None) if isinstance(call, ToolCall) else replace(call)
        kept = {name: getattr(ticket, name) for name in cls.model_fields if name != "call"}
        return cls(call=plain, **kept)

    def ticket(self, guard: Any, number: int, rates: Rates | None) -> Admit:
        """Make the ticket again, under another number, so that its call can still be settled."""
        ticket = Admit(guard, replace(self.call), number)
        ticket.rates = rates
        for name in (*RESERVED, "expected", "occurrence"):
            setattr(ticket, name, getattr(self, name))
        return ticket


class Snapshot(BaseModel):
    """Everything that a guard knows, and the conversation that it was given, as plain data."""

    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", ser_json_inf_nan="strings"
    )

    format_version: int = FORMAT_VERSION
    """The version of this format."""
    run_id: str
    """The run's name."""
    parent_run_id: str | None = None
    """The run that it is a part of, or None."""
    mode: _Mode = "enforce"
    """The mode of the run's guard."""
    budget: dict[str, Any] | None = None
    """The caps, as `Budget.to_json` writes them; None where they are not known, so that the run
    needs a fresh budget to go on."""
    stop_conditions: int = 0
    """The number of the user's own conditions in the budget. They are code and not in here."""
    tenant: tuple[str, ...] = ()
    """Whom the run was charged to in a ledger. The ledger is a connection and not in here."""
    counters: dict[str, NonNegativeInt]
    """The running totals, sub-agents included; money in femto-dollars (1E-15 US dollars)."""
    quotas: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """Tool bodies that were started under each quota, by its pattern."""
    tool_counts: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """Tool bodies that were started, by name (the first 1,024 names)."""
    records: tuple[tuple[str | None, str, str], ...]
    """The last 256 tool calls that ended: id, name, status."""
    completed_tool_calls: NonNegativeInt | None = None
    """Tool calls of the run itself that were completed; None where only `records` tell."""
    elapsed_ns: NonNegativeInt | None = None
    """Nanoseconds of run time, pauses excluded; None before the first admission."""
    pauses: NonNegativeInt = 0
    """The number of runs on this guard that waited for a person."""
    trip: Trip | None = None
    """Why the run was stopped, or None."""
    observed: Trip | None = None
    """In OBSERVE: the trip that ENFORCE would have made, or None."""
    aborted: str | None = None
    """Why somebody asked for the end of the run, or None."""
    held: tuple[Violation, ...] = ()
    """Limits that are not the engine's own and stand against the next step."""
    warned: tuple[str, ...] = ()
    """The dimensions that have reached their warning share, in order."""
    wraps_up: bool = True
    """True if the model may still be asked to finish (`wrap_up_at`)."""
    detector: dict[str, Any] | None = None
    """The state of the loop detector, as fingerprints; None where it is turned off."""
    occurrences: dict[str, Any] | None = None
    """The number of tool calls with the same id, name and arguments, by digest."""
    largest_output: NonNegativeInt = 0
    """Tokens of the largest completion."""
    open_calls: tuple[OpenCall, ...] = ()
    """The calls that were in flight."""
    earlier: Usage = Field(default_factory=Usage)
    """The usage of earlier attempts, where the run was resumed under a fresh budget."""
    seq: NonNegativeInt = 0
    """The number of the last event of its tree of guards."""
    call_id: NonNegativeInt = 0
    """The number of the last call of its tree of guards."""
    price_book: str = ""
    """The version of the prices."""
    messages: tuple[Any, ...] = ()
    """The conversation, in any form that JSON can hold."""

    @classmethod
    def of_outcome(cls, outcome: Outcome) -> Self:
        """Describe a run that ended, so that it can go on under a fresh budget.

        For `Guard.restore` with a budget: what the run used becomes `Guard.earlier_usage`. An
        outcome knows neither the caps nor what was in flight, so a run that has to go on under
        its own counters (a paused one) needs the snapshot of its guard instead.
        """
        usage = outcome.usage
        used = usage.model_dump() | {
            "tokens": usage.total_tokens,
            "cost": from_usd(usage.cost_usd),
            **dict.fromkeys(RESERVED, 0),
        }
        # It keeps no arguments: no call from now on has the number of an earlier one.
        floor = usage.tool_calls + outcome.earlier_usage.tool_calls
        return cls(
            run_id=outcome.run_id,
            counters={name: used[name] for name in COUNTERS},
            records=tuple((call.id, call.name, call.status) for call in outcome.tool_calls),
            elapsed_ns=round(usage.seconds * 1_000_000_000),
            earlier=outcome.earlier_usage,
            occurrences={"floor": floor, "counts": {}},
            messages=outcome.messages,
        )

    def completed(self) -> int:
        """Return how many tool calls of the run itself were completed, as far as it is known."""
        if self.completed_tool_calls is not None:
            return self.completed_tool_calls
        return sum(status == "completed" for _, _, status in self.records)

    def check_resumable(
        self, budget: Budget | None, stop_when: Sequence[Callable[..., Any]]
    ) -> None:
        """Check that the caps are known under which the run is to go on."""
        if self.mode not in get_args(_Mode):
            raise self.misfit(ValueError(f"its mode is {self.mode!r}"))
        if budget is not None:
            if stop_when:
                raise ConfigurationError(
                    "stop_when must not be given beside a budget, got both. "
                    "Pass Budget(stop_when=...) in it."
                )
            return
        if self.budget is None:
            raise ConfigurationError(
                "a run whose caps are not known needs a budget, got None. Pass a fresh Budget."
            )
        if self.stop_conditions and not stop_when:
            raise CheckpointError(
                "a run with stop conditions needs them again, got none: conditions are code "
                "and not in a snapshot. Pass stop_when=, or a fresh budget= that has them."
            )

    def check_paid(self, payers: Collection[str]) -> None:
        """Check that whoever the run was charged to goes on to pay for it."""
        missing = [name for name in self.tenant if name not in payers]
        if missing and self.mode != "off":
            names = ", ".join(map(repr, missing))
            raise CheckpointError(
                f"a run that a tenant pays for needs its ledger again, got none for {names}: a "
                "ledger is a connection and not in a snapshot. Pass the ledger= and tenant= that "
                "it had, where its budget is given, or go on without from "
                'snapshot.model_copy(update={"tenant": ()}).'
            )

    def caps(self, stop_when: Sequence[Callable[..., Any]] = ()) -> Budget:
        """Return the recorded budget, with its conditions, which are no data."""
        try:
            return Budget.from_json({**(self.budget or {}), "stop_when": tuple(stop_when)})
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise self.misfit(error) from None

    def misfit(self, error: Exception) -> CheckpointError:
        """Return the error that says that the snapshot's parts do not fit together."""
        return CheckpointError(
            f"snapshot of run {self.run_id!r} does not fit together: {error}. Start the run anew."
        )

    def usage(self) -> Usage:
        """Return what the run had used, reservations aside."""
        totals = {name: n for name, n in self.counters.items() if name in Usage.model_fields}
        return Usage(
            **totals,  # type: ignore[arg-type]
            total_tokens=self.counters["tokens"],
            cost_usd=to_usd(self.counters["cost"]),
            seconds=(self.elapsed_ns or 0) / 1_000_000_000,
        ).model_copy(update={"reserved_tokens": 0})

    def to_json(self) -> str:
        """Return the snapshot as one JSON object.

        Raises:
            CheckpointError: The conversation holds what JSON cannot.
        """
        try:
            return dump(self)
        except ValueError as error:
            raise _not_json(error) from None

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a snapshot.

        Raises:
            CheckpointError: It is damaged, or of a newer format.
        """
        try:
            version = _Version.model_validate_json(text).format_version
            if version > FORMAT_VERSION:
                raise CheckpointError(
                    f"snapshot format must be <= {FORMAT_VERSION}, got {version}. "
                    "Upgrade BudgetGuard, or start the run anew."
                )
            return cls.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in problem["loc"]) or "the whole"
            raise CheckpointError(
                f"snapshot is damaged ({field}: {problem['msg']}). "
                "Restore an earlier one, or start the run anew."
            ) from None

    def to_parts(self) -> tuple[str, list[str]]:
        """Return the snapshot without its messages as one JSON object, and each message as JSON."""
        return dump(self, exclude={"messages"}), [_item(message) for message in self.messages]

    @classmethod
    def from_parts(cls, state: str, messages: Sequence[str]) -> Self:
        """Read the parts that `to_parts` returned."""
        return cls.from_json(f'{{"messages":[{",".join(messages)}],{state[1:]}')


class _Item(BaseModel):
    model_config = ConfigDict(defer_build=True, ser_json_inf_nan="strings")

    item: Any


def _item(item: Any) -> str:
    try:
        return dump(_Item(item=item)).removeprefix('{"item":')[:-1]
    except ValueError as error:
        raise _not_json(error) from None


def _not_json(error: ValueError) -> CheckpointError:
    return CheckpointError(
        f"messages must be what JSON can hold, got {error}. Turn them into dictionaries first."
    )


class _Version(BaseModel):
    model_config = ConfigDict(defer_build=True)

    format_version: int
