"""The frozen envelope of caps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypedDict, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from budgetguard_core.errors import ConfigurationError, shown
from budgetguard_core.loop_detection import LoopDetection
from budgetguard_core.reserve import FinalizeReserve
from budgetguard_core.settings import (
    BulkheadConfig,
    Cap,
    CircuitBreakerConfig,
    Dollars,
    Frozen,
    OptionalShare,
    ProgressReports,
    RateLimit,
    Settings,
    Share,
    ToolMix,
    VelocityLimits,
    Words,
    is_whole,
    number,
)
from budgetguard_core.stop import Condition, as_condition

if TYPE_CHECKING:  # its place is pydantic's own affair
    from pydantic._internal._model_construction import ModelMetaclass as _OwnNames
else:

    class _OwnNames(type(BaseModel)):
        """Leaves what pydantic brings out of `dir` and `help`, so that they fit on a page."""

        def __dir__(cls) -> list[str]:
            public = {name for name in super().__dir__() if not name.startswith("_")}
            return sorted(public - {*dir(BaseModel)})


DIMENSIONS = (
    "max_iterations",
    "max_model_calls",
    "max_tool_calls",
    "max_total_tokens",
    "max_seconds",
    "max_cost_usd",
)
"""The caps of a run, by field name, in the order in which they are shown."""

TOKEN_PARTS = ("max_input_tokens", "max_output_tokens")
"""Caps on the parts of `max_total_tokens`; few runs have them."""

BREAKERS = (
    "progress",
    "velocity",
    "tool_mix",
    "rate_limits",
    "bulkheads",
    "circuit_breaker",
)
"""The breakers of a run, by field name; each is off where it is left out."""

WRAP_UP = (
    "Please finish now: begin nothing new, and give the best answer you can with what you have. "
    "Say what is still open."
)
"""The words of `wrap_up_at`."""

_METERED = ("max_total_tokens", "max_cost_usd", *TOKEN_PARTS)
_MOST_SECONDS = 10**12

# As a Decimal writes itself. Longer exponents are no amounts, and too long for a Decimal.
_AMOUNT = re.compile(r"[0-9]+(\.[0-9]+)?(E[+-]?[0-9]{1,9})?", re.ASCII)

# Far above any run, and far below what nanoseconds overflow.
_Seconds = Annotated[
    float | None,
    number(
        f"a number of seconds > 0 and <= {_MOST_SECONDS}",
        0,
        _MOST_SECONDS,
        "Use None for no cap.",
        exclusive=True,
        optional=True,
    ),
]


class ProfileId(BaseModel):
    """Which profile a budget was made from."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    name: str
    """The profile's name."""
    version: str
    """Its version, as the file says it."""
    overlay: str | None = None
    """The overlay that was chosen, the environment; None without one."""


class Budget(Settings, metaclass=_OwnNames):
    """The most that one run may use. Every cap is optional, and none is implied.

    A budget cannot be changed; a running guard's caps are raised only by `Guard.extend`. A bool,
    0, a negative number, a number in a string, NaN, infinity and an unknown field are refused.

    Args:
        max_iterations: Turns of the loop: model calls that are not retries. Exactly this many
            start.
        max_model_calls: Model calls that start, retries and failed ones included.
        max_tool_calls: Tool bodies that start. In a parallel batch those that fit start, in the
            model's order.
        max_total_tokens: Tokens, prompt (cache reads and writes included) plus completion, of all
            calls. Checked before each model call and each batch of tool calls: stops when it is
            reached, or when the next call is projected to exceed it. One answer of unknown length
            can exceed it, and is billed; beside other calls it reserves 1,024 tokens, or as many
            as the longest answer so far.
        max_input_tokens: Of them, those of prompts.
        max_output_tokens: Of them, those of completions; an answer is clamped to what is left.
        max_seconds: Wall-clock seconds from the first admission, or from `Guard.start()`.
        max_cost_usd: US dollars, exact: three calls of 0.10 fit in 0.30. Checked as
            `max_total_tokens` is.
        tool_quotas: Tool bodies that may start, by tool name or pattern (`search_web`,
            `mutating/*`, `*`). A call must pass every quota that matches its name, with or without
            its namespace (`web.search`), or its `class/name`. The excess call is refused with an
            error result, and the run goes on.
        tool_classes: The class of the tools that match a pattern: `{"delete_*": "mutating"}`. The
            first wins.
        max_output_tokens_per_call: Completion tokens of one call. Clamped to what is left;
            reserved before the call.
        finalize_reserve: What is kept back of the caps for one last answer without tools, when a
            limit stops the run. Never for a run that was aborted, and not in OBSERVE.
        warn_at: The share of a cap at which a warning is given, once per cap and run: 0.8. A
            sub-agent's budget that leaves it out has its parent's.
        wrap_up_at: The share of a cap from which on the model is asked, once a run and in one
            request alone, to finish with what it has: 0.8. Off. Not in OBSERVE.
        wrap_up_message: The words for it. They should name no budget and no figure: a model that
            reads of limits works worse.
        fallback_at: The share of a cap on tokens or dollars from which on requests go to
            `fallback_model`, those of sub-agents too: 0.8. Off. Not in OBSERVE.
        fallback_model: The cheaper model, by its name at the same provider. Where an adapter cannot
            set the model of a request, the run keeps its own and its outcome's `errors` say so.
        stop_when: Conditions of your own, asked before each step.
        on_unpriced: What `max_cost_usd`, or the tenant's ceiling in dollars, does with a model of
            unknown price: "stop" the run, which is the default, or "count_zero".
        loop_detection: How repetition and oscillation are found. On; None turns it off. A
            sub-agent's budget that leaves it out has its parent's.
        progress: Ask the model how far it is, and stop a run that does not move (`stalled`). Off,
            as are those that follow.
        velocity: Tokens, dollars and tool calls a minute: delay calls, then stop the run
            (`velocity`).
        tool_mix: Tell once when the run's tools are unlike a recorded baseline. Stops nothing.
        rate_limits: How often tools may be called, by name or pattern as `tool_quotas`: waits,
            then refuses.
        bulkheads: How many calls of tools may run at once, likewise.
        circuit_breaker: Leave a tool that keeps failing alone for a while; one breaker for each
            tool. A run whose every call meets an open one is stopped (`circuit_open`).
        per: Whose counters they are: of each "run", the default, or over the runs of one thread or
            session, of the "conversation".
        profile: The profile that the caps come from, for the records; set by `Profile.under`. A
            sub-agent's budget that leaves it out has its parent's.

    Raises:
        ConfigurationError: A field makes no sense, or is none: rule, value, way out.
    """

    max_iterations: Cap = None
    max_model_calls: Cap = None
    max_tool_calls: Cap = None
    max_total_tokens: Cap = None
    max_input_tokens: Cap = None
    max_output_tokens: Cap = None
    max_seconds: _Seconds = None
    max_cost_usd: Dollars = None
    tool_quotas: Mapping[str, int] = Field(default_factory=dict)
    tool_classes: Mapping[str, str] = Field(default_factory=dict)
    max_output_tokens_per_call: Cap = None
    finalize_reserve: FinalizeReserve | None = None
    warn_at: Share = 0.8
    wrap_up_at: OptionalShare = None
    wrap_up_message: Words = WRAP_UP
    fallback_at: OptionalShare = None
    fallback_model: str | None = Field(default=None, validate_default=True)
    stop_when: Sequence[Callable[..., str | bool | None]] = ()
    on_unpriced: Literal["stop", "count_zero"] = "stop"
    loop_detection: LoopDetection | None = Field(default_factory=LoopDetection)
    progress: ProgressReports | None = None
    velocity: VelocityLimits | None = None
    tool_mix: ToolMix | None = None
    rate_limits: Mapping[str, RateLimit] = Field(default_factory=dict)
    bulkheads: Mapping[str, BulkheadConfig] = Field(default_factory=dict)
    circuit_breaker: CircuitBreakerConfig | None = None
    per: Literal["run", "conversation"] = "run"
    profile: ProfileId | None = None

    @classmethod
    def nearest(cls, name: str) -> str | None:
        """Return the field that a name is another word for, or nearly is."""
        for field, words in _SYNONYMS.items():
            if name in words:
                return field
        return super().nearest(name)

    @field_validator("stop_when", mode="after")
    @classmethod
    def _is_blocking(cls, conditions: Sequence[Condition]) -> tuple[Condition, ...]:
        for condition in conditions:
            as_condition(condition)
        return tuple(conditions)

    @field_validator("fallback_model")
    @classmethod
    def _has_a_share(cls, model: str | None, info: Any) -> str | None:
        at = info.data.get("fallback_at")
        if (at is None) != (not model) and "fallback_at" in info.data:
            raise ValueError(
                f"must be given together with fallback_at, got {shown(model)} and {shown(at)}. "
                'Use fallback_at=0.8, fallback_model="gpt-5-mini".'
            )
        if model and not any(info.data.get(name) for name in _METERED):
            raise ValueError(
                f"needs a cap on tokens or dollars, got {shown(model)} and none. "
                "Add max_cost_usd=5."
            )
        return model

    @field_validator("tool_quotas", mode="before")
    @classmethod
    def _check_quotas(cls, value: Any) -> dict[str, int]:
        if not isinstance(value, Mapping):
            raise ValueError(  # noqa: TRY004 - pydantic turns only these into its report
                f"must map tool names to whole numbers, got {shown(value)}."
            )
        quotas = dict(cast("Mapping[Any, Any]", value))
        for pattern, quota in quotas.items():
            if not isinstance(pattern, str) or not pattern:
                raise ValueError(f"must have tool names as keys, got {shown(pattern)}.")
            if not is_whole(quota):
                raise ValueError(
                    f"must be whole numbers >= 1, got {shown(quota)} for {shown(pattern)}. "
                    "Leave the tool out for no quota."
                )
        return quotas

    @field_validator("tool_quotas", "tool_classes", "rate_limits", "bulkheads")
    @classmethod
    def _freeze(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        return Frozen(value)

    @field_validator("finalize_reserve")
    @classmethod
    def _leaves_some(cls, reserve: FinalizeReserve | None, info: Any) -> FinalizeReserve | None:
        for name, amount in ({} if reserve is None else reserve.of_caps()).items():
            cap = info.data.get(name)
            if amount is not None and cap is not None and amount >= cap:
                raise ValueError(f"must be less than {name}={cap}, got {amount}. Raise the cap.")
        return reserve

    def caps(self) -> dict[str, int | float | Decimal]:
        """Return the caps that are set, by field name."""
        caps = {name: getattr(self, name) for name in (*DIMENSIONS, *TOKEN_PARTS)}
        return {name: cap for name, cap in caps.items() if cap is not None}

    def breakers(self) -> bool:
        """Return whether any breaker is set."""
        return any(getattr(self, name) for name in BREAKERS)

    def needs_usage(self) -> bool:
        """Return whether tokens or dollars are capped, so that each call's have to be known."""
        return any(getattr(self, name) is not None for name in _METERED)

    def uncapped(self) -> tuple[str, ...]:
        """Name the dimensions without a cap: whatever grows there is not bounded.

        Where tokens or dollars are capped and a completion is not, `max_output_tokens_per_call` is
        named, too: calls at the same time can exceed the cap before they are counted.
        """
        names = tuple(name for name in DIMENSIONS if getattr(self, name) is None)
        if self.needs_usage() and self.max_output_tokens_per_call is None:
            names += ("max_output_tokens_per_call",)
        return names

    def raised(self, caps: Mapping[str, Any]) -> Self:
        """Copy the budget with caps raised.

        Raises:
            ConfigurationError: A cap is not one of the budget's, or would not be raised.
        """
        budget = self.model_copy(update=caps)
        for name in caps:
            old, new = getattr(self, name), getattr(budget, name)
            if name not in (*DIMENSIONS, *TOKEN_PARTS) or old is None or new is None or new <= old:
                raise ConfigurationError(
                    f"{name} must be raised above {old}, got {new}. "
                    f"Extend only the caps of the run: {', '.join(self.caps())}."
                )
        return budget

    def inheriting(self, exclusive: Budget) -> Self:
        """Copy the budget of a sub-agent, with what it leaves open set as in the one above.

        That is `warn_at`, `loop_detection` and `profile`, where they were not given. Caps are not
        among it: every one above holds by itself.
        """
        open_ = {"warn_at", "loop_detection", "profile"} - self.model_fields_set
        update = {name: getattr(exclusive, name) for name in open_}
        same = all(getattr(self, name) == value for name, value in update.items())
        return self if same else self.model_copy(update=update)

    def to_json(self) -> dict[str, Any]:
        """Return the budget as plain data. Stop conditions are code and are left out."""
        data = self.model_dump(mode="json", exclude={"stop_when"})
        # Left out where they are off: every log begins with this.
        optional = (*BREAKERS, "fallback_at", "fallback_model", "finalize_reserve", "profile")
        return {name: value for name, value in data.items() if value or name not in optional}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Build a budget from plain data: what `to_json` returned, or a table read from TOML.

        It takes what the constructor takes, and nothing else. As neither format has decimals, an
        amount of US dollars may be written as text, too: `"0.50"` is fifty cents.

        Raises:
            ConfigurationError: A field makes no sense: rule, value, way out.
        """
        if not isinstance(cast("object", data), Mapping):
            raise ConfigurationError(
                f"a budget's data must be a mapping, got {type(data).__name__}. "
                "Read text with json.loads first."
            )
        fields = _with_dollars(data, "max_cost_usd")
        velocity = fields.get("velocity")
        if isinstance(velocity, Mapping):
            limits = cast("Mapping[str, Any]", velocity)
            fields["velocity"] = _with_dollars(limits, "max_cost_usd_per_minute")
        reserve = fields.get("finalize_reserve")
        if isinstance(reserve, Mapping):
            amounts = cast("Mapping[str, Any]", reserve)
            fields["finalize_reserve"] = _with_dollars(amounts, "cost_usd")
        return cls(**fields)


class Caps(TypedDict, total=False):
    """The caps that `Guard.extend` raises."""

    max_iterations: int
    max_model_calls: int
    max_tool_calls: int
    max_total_tokens: int
    max_input_tokens: int
    max_output_tokens: int
    max_seconds: float
    max_cost_usd: Decimal | float


Budget.__signature__ = Signature(
    [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=... if one.default_factory else one.default,
            annotation=one.annotation,
        )
        for name, one in Budget.model_fields.items()
    ]
)


def _with_dollars(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    fields, amount = dict(data), data.get(name)
    if isinstance(amount, str) and _AMOUNT.fullmatch(amount):
        fields[name] = Decimal(amount)
    return fields


# What other libraries call it.
_SYNONYMS = {
    "max_iterations": ("max_turns", "max_steps", "recursion_limit", "max_loops", "turns", "steps"),
    "max_model_calls": ("max_requests", "request_limit", "max_llm_calls", "max_calls", "run_limit"),
    "max_tool_calls": ("max_tools", "tool_calls_limit", "max_actions"),
    "max_total_tokens": ("max_tokens", "total_tokens", "total_tokens_limit", "token_limit"),
    "max_input_tokens": ("max_prompt_tokens", "input_tokens_limit"),
    "max_output_tokens": ("max_completion_tokens", "output_tokens_limit"),
    "max_seconds": ("timeout", "max_time", "deadline", "max_duration", "max_execution_time"),
    "max_cost_usd": ("max_usd", "max_cost", "max_dollars", "cost_limit", "budget_usd"),
}
