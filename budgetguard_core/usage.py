"""The usage of one model call, and of a run so far."""

import string
from decimal import Decimal
from typing import Final, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict

from budgetguard_core.errors import ConfigurationError, shown

MOST_TOKENS: Final = 10**18
"""Far above any run: a number without end overflows what it is compared with."""


class TokenUsage(NamedTuple):
    """Tokens of one model call, in inclusive buckets as in the OpenTelemetry GenAI conventions.

    The numbers are checked when a call is settled: whole, not negative, no part above its whole.
    """

    input_tokens: int = 0
    """Prompt tokens, including those read from and written to the provider's cache."""
    output_tokens: int = 0
    """Completion tokens, including reasoning."""
    cache_read_tokens: int = 0
    """The part of `input_tokens` that was read from the cache."""
    cache_write_tokens: int = 0
    """The part of `input_tokens` that was written to the cache, whatever its lifetime."""
    cache_write_1h_tokens: int = 0
    """The part of `cache_write_tokens` that was written with a lifetime of one hour."""
    reasoning_tokens: int = 0
    """The part of `output_tokens` that was reasoning."""
    estimated: bool = False
    """True when the provider reported nothing and the figures were estimated from the text."""

    @property
    def total_tokens(self) -> int:
        """Prompt plus completion; no bucket is counted twice."""
        return self.input_tokens + self.output_tokens


Counts: TypeAlias = tuple[int, int, int, int, int, int, bool]
"""The figures of a `TokenUsage`, in their order. Python unpacks a named tuple through an iterator,
and a plain one, of which each step has several, in one go."""


def check_token_usage(usage: TokenUsage) -> Counts:
    """Return the figures of a call, if a call can have them.

    Raises:
        ConfigurationError: A count is not a whole number >= 0, or a part is above its whole.
    """
    try:
        counts = usage[:]
        inputs, outputs, read, write, write_1h, reasoning, estimated = counts
    except (TypeError, ValueError, LookupError):
        raise ConfigurationError(
            f"usage must be a TokenUsage, got {type(usage).__name__}. "
            "Pass None when the provider reported nothing."
        ) from None
    try:
        if (
            type(inputs + outputs + read + write + write_1h + reasoning) is int
            and type(estimated) is bool
            and inputs <= MOST_TOKENS
            and outputs <= MOST_TOKENS
            and read >= 0
            and write_1h >= 0
            and write_1h <= write
            and read + write <= inputs
            and reasoning >= 0
            and reasoning <= outputs
        ):
            return counts
    except TypeError:
        pass
    raise ConfigurationError(_problem(TokenUsage._make(usage)))


def out_of_range(least: int, value: object) -> str:
    """Describe the range in which a figure makes sense, and what was given; few exceed it."""
    end = f" and <= {MOST_TOKENS}" if isinstance(value, int) and value > MOST_TOKENS else ""
    return f">= {least}{end}, got {shown(value)}"


def _problem(usage: TokenUsage) -> str:
    for name, value in zip(TokenUsage._fields[:-1], usage, strict=False):
        if type(value) is not int or not 0 <= value <= MOST_TOKENS:
            return (
                f"{name} must be a whole number {out_of_range(0, value)}. "
                "Pass usage=None when the provider reported nothing."
            )
    if type(usage.estimated) is not bool:
        return f"estimated must be True or False, got {shown(usage.estimated)}. Leave it out."
    if usage.cache_write_1h_tokens > usage.cache_write_tokens:
        return (
            "cache_write_tokens must include cache_write_1h_tokens, got "
            f"{usage.cache_write_tokens} < {usage.cache_write_1h_tokens}. Add the one-hour writes."
        )
    if usage.reasoning_tokens > usage.output_tokens:
        return (
            "output_tokens must include reasoning_tokens, got "
            f"{usage.output_tokens} < {usage.reasoning_tokens}. Add reasoning to output_tokens."
        )
    return (
        "input_tokens must include cache reads and writes, got "
        f"input_tokens={usage.input_tokens}, cache_read_tokens={usage.cache_read_tokens}, "
        f"cache_write_tokens={usage.cache_write_tokens}. Add the cache buckets to input_tokens."
    )


_HUNDREDTHS: Final = (
    (string.ascii_lowercase.encode(), 27),
    (b" ", 0),
    (string.punctuation.encode(), 52),
    (string.digits.encode(), 80),
    (string.ascii_uppercase.encode(), 40),
    (bytes([*range(0x20), 0x7F]), 110),
    (bytes(range(0x80, 0xC0)), 0),
    (bytes(range(0xC0, 0xE0)), 40),
    (bytes(range(0xE0, 0xF0)), 90),
    (bytes(range(0xF0, 0x100)), 200),
)
"""Hundredths of a token that a byte adds, by the kind of text that it is a part of.

Other scripts are told by the first byte of a character. Fitted to o200k, the encoding of OpenAI's
models since GPT-4o: English prose, Markdown, Python and JSON come out at 1.0 to 1.26 times their
real size, fourteen other languages at 0.88 (Hungarian) to 1.34 times (Russian).
"""


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text by the letters, digits and signs that it is made of.

    It errs on the side of counting too much: English prose, code and JSON by up to a quarter, with
    the tokenizer of OpenAI's models. Base64 that is sent as text is the exception: it takes two
    thirds more. Never 0, so that an unreported call is never free.
    """
    rest = text.encode("utf-8", "replace")
    hundredths = 0
    for kind, weight in _HUNDREDTHS:
        if not rest:
            break
        other = rest.translate(None, kind)
        hundredths += (len(rest) - len(other)) * weight
        rest = other
    return hundredths // 100 + 1


class Usage(BaseModel):
    """The usage of a run, all of its sub-agents included."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    iterations: int = 0
    """Turns of the loop: model calls that were not retries."""
    model_calls: int = 0
    """Attempts that were started, retries and failed ones included."""
    tool_calls: int = 0
    """Tool bodies that were started; handoffs and structured output are not among them."""
    total_tokens: int = 0
    """`input_tokens` plus `output_tokens` of every settled call."""
    input_tokens: int = 0
    """Prompt tokens, including cache reads and writes."""
    output_tokens: int = 0
    """Completion tokens, including reasoning."""
    cache_read_tokens: int = 0
    """The part of `input_tokens` that came from the provider's cache."""
    cache_write_tokens: int = 0
    """The part of `input_tokens` that was written to the cache."""
    cache_write_1h_tokens: int = 0
    """The part of `cache_write_tokens` with a lifetime of one hour."""
    reasoning_tokens: int = 0
    """The part of `output_tokens` that was reasoning."""
    cost_usd: Decimal = Decimal(0)
    """US dollars of every priced call, exact. `unpriced_calls` says how many are missing."""
    seconds: float = 0.0
    """Wall-clock seconds since the first admission (monotonic clock)."""
    reserved_tokens: int = 0
    """Tokens set aside for calls that are in flight or never reported."""
    reserved_usd: Decimal = Decimal(0)
    """US dollars set aside for calls that are in flight or never reported."""
    unpriced_calls: int = 0
    """Settled calls whose model has no known price; they are not in `cost_usd`."""
    estimated_calls: int = 0
    """Settled calls whose tokens were estimated because the provider reported none."""
    failed_calls: int = 0
    """Model calls that ended in an error; what they used is included above."""

    def __add__(self, other: "Usage") -> "Usage":
        """Add two attempts of a run, field by field."""
        return Usage(
            **{name: getattr(self, name) + getattr(other, name) for name in Usage.model_fields}
        )
