"""The requests of an adapter to a guard, and the guard's decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import blake2b
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import ConfigDict

from budgetguard_core.errors import ConfigurationError, shown
from budgetguard_core.pricing import Rates, from_usd
from budgetguard_core.stop import StopReason, Trip
from budgetguard_core.usage import MOST_TOKENS, TokenUsage, out_of_range

NOT_EXECUTED = "Not executed: the run was stopped before this call started."
"""The result that a tool call gets when the run ends before it starts."""
OUTCOME_UNKNOWN = "Interrupted: this call was started, its outcome is unknown."
"""The result that a tool call gets when the run ends while it is in flight."""
NOT_AVAILABLE = (
    "Not executed: this tool cannot be used any more in this task. Go on without it, "
    "or report what is missing."
)
"""The result that a tool call gets when its quota is used up; the run goes on."""

_NO_GUESS: tuple[int, int] = (0, 0)
_ALIKE_KEPT = 64
_MOST_USD = Decimal(10**15)
_LEAST_USD = Decimal("1E-15")

ToolKind: TypeAlias = Literal["function", "handoff", "output", "hosted", "reported"]
"""The kind of a tool call: a body that starts, a handoff, the framework's own output, a tool of
the provider's, or one that its caller runs without asking."""
_KINDS: tuple[ToolKind, ...] = get_args(ToolKind)
COUNTED = frozenset[ToolKind]({"function", "hosted", "reported"})
"""The kinds that are counted as tool calls."""


@dataclass(slots=True, kw_only=True)
class ModelCall:
    """One attempt to call a model, described before it goes out. Everything is optional.

    The figures are checked when the call is to be admitted.
    """

    # In an event the call is a record like all others.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    model: str | None = None
    """The model's name as the provider knows it; needed for a price."""
    provider: str | None = None
    """The provider's id where the same name exists at several (`openai`, `anthropic`)."""
    retry: bool = False
    """True for another attempt at the same turn: a model call, but no iteration."""
    input_tokens: int = 0
    """Projected prompt tokens, reserved until the call is settled; 0 when they are not known."""
    max_output_tokens: int | None = None
    """The completion bound that the request carries already, if any."""
    output_is_fixed: bool = False
    """True where the bound cannot be lowered any more: the call fits with it, or it is refused."""
    min_output_tokens: int = 1
    """The least completion bound that the provider takes (16 in OpenAI's Responses API, more than
    the thinking budget in Anthropic's): a call that fits only with less is not admitted."""
    seconds: float | None = None
    """The call's own time limit; the answer carries the lesser of it and the time left."""
    cost_usd: Decimal | None = None
    """The most that the call can cost, where the caller knows better than the price book."""


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """One tool call that the model asked for."""

    name: str
    """The tool's name, as the model gave it."""
    arguments: Any = None
    """The arguments: an object, or its JSON text. They are fingerprinted, not kept."""
    id: str | None = None
    """The call's id in the framework's history."""
    kind: ToolKind = "function"
    """`function`: counted. `handoff` to another agent: only fingerprinted. `output`, the
    framework's structured-output tool: only fingerprinted and never refused. `hosted`: the
    provider ran it already; counted when reported, and never refused. `reported`: its caller has
    it already; as hosted, but its result is still to come."""
    fingerprint: str | None = field(default=None, repr=False)
    """The fingerprint of the arguments: given where it is known (replay), else that of the
    arguments when the call was admitted, so that a tool that changes them changes nothing here."""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigurationError(
                f"kind must be one of {', '.join(_KINDS)}, got {shown(self.kind)}. "
                "Leave it out for a function."
            )


class Occurrences:
    """Numbers that keep apart the tool calls of one run with the same id, name and arguments.

    Two calls never get the same number, however long ago the first one was: what is forgotten
    raises the number with which everything else begins. A call that was not made after all, or
    was left open by a process that is gone, gives its number back to the same call.
    """

    def __init__(self, floor: int = 0, counts: Mapping[str, int] | None = None) -> None:
        self._floor = int(floor)
        self._counts = {str(alike): int(count) for alike, count in (counts or {}).items()}
        self._free: dict[str, list[int]] = {}

    def state(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        return {"floor": self._floor, "counts": dict(self._counts)}

    def count(self, call: ToolCall) -> int:
        """Return how many calls like this one came before it."""
        alike = _alike(call)
        free = self._free.pop(alike, None)
        if free:
            if free[1:]:
                self._free[alike] = free[1:]
            return free[0]
        counts = self._counts
        number = counts.pop(alike, self._floor)
        counts[alike] = number + 1
        if len(counts) > _ALIKE_KEPT:
            self._floor = max(self._floor, counts.pop(next(iter(counts))))
        return number

    def give_back(self, call: ToolCall, number: int) -> None:
        """Free the number of this call for the next one like it."""
        if len(self._free) < _ALIKE_KEPT:
            self._free.setdefault(_alike(call), []).append(number)


def _alike(call: ToolCall) -> str:
    return _digest((call.id, call.name, call.fingerprint or ""), 8)


def _digest(facts: tuple[object, ...], size: int) -> str:
    # ascii, so that the id "5" is not the number 5, and nothing in an id can fail to encode.
    return blake2b(ascii(facts).encode(), digest_size=size).hexdigest()


class Admit:
    """The call may start. The answer is also its ticket: settle it with the result.

    Attributes:
        guard: The `Guard` that admitted it.
        call: The request that was admitted.
        call_id: The number of the call within its tree of guards.
        max_output_tokens: Completion tokens that the request may ask for, or None for no bound.
        clamped_by: The cap that `max_output_tokens` was lowered for; None where it was not.
        rates: The price of the model, where it is known.
        reserved_tokens: Tokens set aside until the call is settled.
        reserved_cost: Money set aside until the call is settled, in the unit of `pricing`.
        reserved_input: Those of the tokens that are of its prompt.
        occurrence: How many calls of the run with this id, name and arguments came before it.
        expected: What of the reservation is a guess at the completion: tokens, and money likewise.
        charged: Of how many links of its chain the call has been charged.
        holds: What the plugs of the run, and of those above it, hold for the call.
    """

    max_output_tokens: int | None = None
    clamped_by: StopReason | None = None
    rates: Rates | None = None
    reserved_tokens = 0
    reserved_cost = 0
    reserved_input = 0
    holds: tuple[Any, ...] = ()
    charged = 0
    occurrence = 0
    expected: tuple[int, int] = _NO_GUESS

    def __init__(self, guard: Any, call: Any, call_id: int) -> None:
        self.guard = guard
        self.call = call
        self.call_id = call_id

    @property
    def breakers(self) -> Any:
        """The breakers that may hold the call back before it starts; None where there are none."""
        for hold in self.holds:
            if hold.delays:
                return hold
        return None

    @property
    def seconds(self) -> float | None:
        """Seconds that a model call may take from now on: its own limit, or the time left."""
        own: float | None = self.call.seconds
        remaining: float | None = self.guard.time_left()
        if remaining is None or own is None:
            return own if remaining is None else remaining
        return min(own, remaining)

    def started(self) -> None:
        """Note that the body of a tool call begins now, for how long it takes. Not needed."""
        if self.breakers is not None:
            self.breakers.put_off(self.guard.tree.clock.monotonic_ns())

    def estimate(self) -> TokenUsage:
        """Return what a model call is charged that reported nothing: its projection."""
        given = self.call.input_tokens
        bound = self.reserved_tokens - self.expected[0] - given
        return TokenUsage(given, bound, estimated=True)

    @property
    def idempotency_key(self) -> str:
        """A key for the provider of a mutating call: the same for the same call after a resume.

        Of the run, the tool, its arguments, the call's id, and which of the calls that agree in
        all of these it is: some providers give the same id to several calls of one run.
        """
        call = self.call
        facts: tuple[object, ...] = (self.guard.run_id, self.call_id)
        if isinstance(call, ToolCall) and call.id:
            facts = (self.guard.run_id, call.id, call.name, call.fingerprint, self.occurrence)
        return _digest(facts, 16)


class Nudge(Admit):
    """The call may start, and the model should get `message` first (about the work only)."""

    def __init__(self, guard: Any, call: Any, call_id: int, message: str) -> None:
        super().__init__(guard, call, call_id)
        self.message = message


@dataclass(frozen=True, slots=True)
class Refuse:
    """This tool call may not start; the run goes on. The model gets `message` as its result."""

    reason: StopReason
    detail: str
    message: str = NOT_AVAILABLE


@dataclass(frozen=True, slots=True)
class Stop:
    """The run ends. A tool call that gets this answer has `message` as its result."""

    trip: Trip
    message: str = NOT_EXECUTED

    @property
    def reason(self) -> StopReason:
        """Why the run ends."""
        return self.trip.reason


ModelDecision: TypeAlias = Admit | Nudge | Stop
"""The answer to whether a model call may start."""
ToolDecision: TypeAlias = Admit | Refuse | Stop
"""The answer to whether a tool call may start."""


def check_projection(call: ModelCall) -> None:
    """Refuse a projection that no call can have: it would be in every sum from then on."""
    bound = call.max_output_tokens
    for name, value, least, way_out in (
        ("input_tokens", call.input_tokens, 0, "Use 0 where it is not known."),
        ("min_output_tokens", call.min_output_tokens, 1, "Leave it out for none."),
        ("max_output_tokens", 1 if bound is None else bound, 1, "Use None for no bound."),
    ):
        if type(value) is not int or not least <= value <= MOST_TOKENS:
            raise ConfigurationError(
                f"{name} must be a whole number {out_of_range(least, value)}. {way_out}"
            )


def projected_cost(call: ModelCall, rates: Rates | None, bound: int | None) -> int:
    """Return what a call costs at most, in the unit of `pricing`; 0 where nothing is known."""
    if call.cost_usd is not None:
        return given_cost(call.cost_usd)
    if rates is None or not (call.input_tokens or bound):
        return 0
    return rates.projected_cost(call.input_tokens, bound or 0)


def given_cost(cost_usd: Decimal) -> int:
    """Turn an amount that the caller gave into the unit of `pricing`."""
    if type(cost_usd) is not Decimal or not (cost_usd.is_finite() and 0 <= cost_usd < _MOST_USD):
        raise ConfigurationError(
            f"cost_usd must be a Decimal >= 0, got {shown(cost_usd)}. "
            "Use None where it is not known."
        )
    # A long exponent would take all memory as an exact integer; what is that small is rounded up.
    return from_usd(max(cost_usd, _LEAST_USD)) if cost_usd else 0
