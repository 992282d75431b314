"""The usage and cost of a model call, read from whatever reports it.

The figures of each provider are in `budgetguard_core.kit.figures`; here is where they are found,
and what is charged when some of them are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Context, Decimal
from itertools import islice
from typing import Any, Final, cast

from budgetguard_core.kit.figures import fitted, is_free, larger, read_figures
from budgetguard_core.kit.records import attribute, kind_of, part, parts_of
from budgetguard_core.usage import TokenUsage, estimate_tokens

_RECORDS: Final = (
    "usage_metadata",
    "usageMetadata",
    "usage",
    "token_usage",
    "meta",
    "amazon-bedrock-invocationMetrics",
)
"""The fields in which a response keeps its usage record."""
_WRAPPERS: Final = (
    "message",
    "response",
    "metadata",
    "llm_output",
    "response_metadata",
    "delta",
    "event",
    "data",
    "chunk",
    "x_groq",
)
"""The wrappers of a response: events and chunks of streams, and those of frameworks."""
_WRAPS: Final = frozenset({*_WRAPPERS, "generations"})
_RECORD_NAMES: Final = frozenset(_RECORDS)
_HOLDS: Final = _WRAPS | _RECORD_NAMES
_COSTS: Final = frozenset({"cost", "cost_in_usd_ticks", "total_cost"})
_HIDDEN: Final = frozenset({"_hidden_params"})
_NO_USAGE: Final = TokenUsage()
_DEEPEST: Final = 4
_MOST_RECORDS: Final = 32
"""Records that are looked at in one response; stand-ins for one (mocks) have every name."""
_LONGEST_AMOUNT: Final = 40
# No call costs ten million dollars, and exact arithmetic on what is smaller would take for ever.
_MAGNITUDES: Final = range(-30, 7)
# Whatever the caller's context is; sums of such amounts have fewer digits.
_EXACT: Final = Context(prec=100)
_XAI_DECIMALS: Final = 10
# Tuples, because a union is made anew wherever it is written.
_NUMBERS: Final = (int, float, str, Decimal)
_TEXTS: Final = (str, bytes)


def token_usage(record: object) -> TokenUsage | None:
    """Read what a model call used.

    No figure lowers another: the completion is at least the total less the prompt, reasoning that
    is larger than the completion is added to it, and a prompt is at least what was read from and
    written to the cache.

    Args:
        record: A response, a message, a chunk or event of a stream, or a usage record; as an
            object of an SDK or as plain data. Figures may be floats (`100.0`) or digits (`"100"`).

    Returns:
        Figures that `check_token_usage` accepts. `estimated` is True where prompt or completion
        can not be read (left out, negative, not a number); such a figure is what the others say at
        least, and `answered_usage` estimates it. None when nothing is reported, or zero
        throughout, which no real call uses, and where the record's own code raises. Zeros that
        LangChain marks as an answer from its own cache, and a `TokenUsage` of zeros, are
        `TokenUsage()`.
    """
    if isinstance(record, TokenUsage):
        return fitted(record)
    if type(record) is str:
        # A piece of a stream, of which there are thousands.
        return None
    try:
        usage = read_figures(record)
        if usage is None:
            for held in _kept_in(record):
                usage = read_figures(held)
                if usage is not None:
                    break
    except Exception:  # the record's own code: a stand-in, one that is read when it is asked
        return None
    return usage


def merge_usage(earlier: TokenUsage | None, later: TokenUsage | None) -> TokenUsage | None:
    """Join what two chunks of one stream report.

    A chunk has totals so far, or the figures of one side (Anthropic: the prompt first, the
    completion last), so the larger of each counts. Not for chunks that each report their own
    share, as LangChain's do: their sum is the message that the framework puts together.
    """
    if earlier is None or later is None:
        return later if earlier is None else earlier
    merged = larger(earlier, later)
    whole = merged.input_tokens > 0 and merged.output_tokens > 0
    return merged._replace(estimated=earlier.estimated and later.estimated and not whole)


def answered_usage(record: object, *, projected_input: int, written: str = "") -> TokenUsage | None:
    """Return what an answered call is charged: what was reported, and the rest estimated.

    Args:
        record: What `token_usage` reads, its result, or None.
        projected_input: Tokens of the prompt as projected; 0 where nothing was projected.
        written: All that came back: text, reasoning, and the arguments of tool calls.

    Returns:
        None where nothing was reported and nothing projected: such a call is unmetered. A side
        that the record does not tell is at least its estimate, and the usage marked so.
    """
    usage = fitted(record) if isinstance(record, TokenUsage) else token_usage(record)
    if usage is None:
        if projected_input <= 0:
            return None
        return TokenUsage(projected_input, estimate_tokens(written), estimated=True)
    inputs, outputs = usage.input_tokens, usage.output_tokens
    if (inputs and outputs and not usage.estimated) or usage == _NO_USAGE:
        return usage
    if usage.estimated or not inputs:
        inputs = max(inputs, projected_input)
    if written and (usage.estimated or not outputs):
        outputs = max(outputs, estimate_tokens(written))
    field = (inputs, outputs) == usage[:2] and not usage.estimated
    return usage._replace(input_tokens=inputs, output_tokens=outputs, estimated=not field)


def reported_cost(record: object) -> Decimal | None:
    """Read what a provider or gateway says that a call cost.

    That is `usage.cost` of OpenRouter (and, for a call under a key of the user's own, what the
    provider behind it charges) and of Perplexity (its `total_cost`), `cost_in_usd_ticks` of xAI
    (10**10 to the dollar), `response_cost` of LiteLLM (computed from LiteLLM's price list, without
    the overrides of a price book), and the `total_cost` of 0 that LangChain gives an answer from
    its own cache.

    Args:
        record: What `token_usage` takes.

    Returns:
        US dollars, exact; None when no cost is told that can be read.
    """
    try:
        return _reported_cost(record)
    except Exception:  # as of `token_usage`
        return None


def _reported_cost(record: object) -> Decimal | None:
    # A dictionary has none, and to be told so takes longer than to ask what it is.
    if not _lacks(record, _HIDDEN):
        cost = _amount(part(attribute(record, "_hidden_params"), "response_cost"))
        if cost is not None:
            return cost
    cost = _cost_of(record)
    if cost is None:
        for held in _kept_in(record):
            cost = _cost_of(held)
            if cost is not None:
                break
    return cost


def _lacks(record: Any, names: frozenset[str]) -> bool:
    """Return whether a record is a dictionary with none of these names."""
    return kind_of(record) is dict and names.isdisjoint(record)


def _kept_in(record: object, depth: int = _DEEPEST) -> Iterable[object]:
    """Name what may be the usage record in a response, the likeliest first."""
    # Figures count under a name of usage only: what else is in there may be the user's own.
    if kind_of(record) is dict:
        fields = cast("dict[str, object]", record)
        found = _HOLDS.intersection(fields)
        if len(found) <= 1 and found <= _RECORD_NAMES:
            # Nearly every response.
            return [fields[name] for name in found if fields[name] is not None]
    return islice(_looked_for(record, depth), _MOST_RECORDS)


def _looked_for(record: object, depth: int) -> Iterator[object]:
    held = parts_of(record)
    for name in _RECORDS:
        kept = held(name)
        if kept is not None:
            yield kept
    if not depth or _lacks(record, _WRAPS):
        return
    for one in (_first(held("generations")), *map(held, _WRAPPERS)):
        if one is not None and not isinstance(one, _TEXTS):
            yield from _kept_in(one, depth - 1)


def _first(answers: object) -> object:
    """Return the first of LangChain's answers: a list, or a list of lists."""
    first = answers
    while isinstance(first, list) and first:
        first = cast("list[object]", first)[0]
    return cast("object", first)


def _cost_of(usage: object) -> Decimal | None:
    if _lacks(usage, _COSTS):
        return None
    field = parts_of(usage)
    ticks = _amount(field("cost_in_usd_ticks"), decimals=_XAI_DECIMALS)
    if ticks is not None:
        return ticks
    if is_free(usage):
        return Decimal(0)
    cost = field("cost")
    if cost is None:
        return None
    total = _amount(cost)
    if total is None:
        return _amount(part(cost, "total_cost"))
    if field("is_byok") is True:
        behind = _amount(part(field("cost_details"), "upstream_inference_cost"))
        return _EXACT.add(total, behind or Decimal(0))
    return total


def _amount(value: object, *, decimals: int = 0) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        return None
    text = str(value)
    try:
        amount = _EXACT.scaleb(Decimal(text), -decimals) if len(text) <= _LONGEST_AMOUNT else None
    except ArithmeticError:
        return None
    if amount is None or not amount.is_finite() or amount < 0:
        return None
    return amount if not amount or amount.adjusted() in _MAGNITUDES else None
