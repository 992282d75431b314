"""Read what a model call used from what the common SDKs return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from budgetguard_core import TokenUsage, estimate_tokens


def part(record: Any, name: str) -> Any:
    """Read a field of a mapping or an attribute of an object; None where there is none."""
    if isinstance(record, Mapping):
        return cast("Mapping[str, Any]", record).get(name)
    return getattr(record, name, None)


def extract_usage(response: Any) -> TokenUsage | None:
    """Read the usage of a response of OpenAI (chat completions, Responses) or Anthropic.

    Args:
        response: The response, a chunk of a stream, or their usage record; as an object or as
            plain data. A `TokenUsage` is returned as it is.

    Returns:
        None when it reports nothing, or zero tokens throughout, which no real call uses.
    """
    if isinstance(response, TokenUsage):
        return response
    record = part(response, "usage")
    if record is None:
        # The first event of a stream of Anthropic's, and the last one of the Responses API.
        record = part(part(response, "message"), "usage") or part(
            part(response, "response"), "usage"
        )
    record = response if record is None else record
    if isinstance(record, TokenUsage):
        return record
    if part(record, "prompt_tokens") is not None:
        usage = _openai(record, "prompt_tokens", "completion_tokens")
    elif part(record, "input_tokens") is None and part(record, "output_tokens") is None:
        return None
    elif _is_anthropic(record):
        usage = _anthropic(record)
    else:
        usage = _openai(record, "input_tokens", "output_tokens")
    return usage if usage.total_tokens else None


def merge_usage(earlier: TokenUsage | None, later: TokenUsage | None) -> TokenUsage | None:
    """Join the figures of two chunks of one stream: each is a total so far, or a part's own."""
    if earlier is None or later is None:
        return later or earlier
    return TokenUsage(
        input_tokens=max(earlier.input_tokens, later.input_tokens),
        output_tokens=max(earlier.output_tokens, later.output_tokens),
        cache_read_tokens=max(earlier.cache_read_tokens, later.cache_read_tokens),
        cache_write_tokens=max(earlier.cache_write_tokens, later.cache_write_tokens),
        cache_write_1h_tokens=max(earlier.cache_write_1h_tokens, later.cache_write_1h_tokens),
        reasoning_tokens=max(earlier.reasoning_tokens, later.reasoning_tokens),
    )


def estimated(prompt_tokens: int, reply: str) -> TokenUsage:
    """Estimate what an unreported call used."""
    return TokenUsage(prompt_tokens, estimate_tokens(reply), estimated=True)


def _is_anthropic(record: Any) -> bool:
    names = ("cache_creation_input_tokens", "cache_read_input_tokens")
    if isinstance(record, Mapping):
        return any(name in record for name in names)
    return any(hasattr(record, name) for name in names)


def _openai(record: Any, prompt: str, completion: str) -> TokenUsage:
    inputs, outputs = _count(record, prompt), _count(record, completion)
    details = part(record, f"{prompt}_details")
    read = min(_count(details, "cached_tokens"), inputs)
    return TokenUsage(
        input_tokens=inputs,
        output_tokens=outputs,
        cache_read_tokens=read,
        cache_write_tokens=min(_count(details, "cache_write_tokens"), inputs - read),
        reasoning_tokens=min(
            _count(part(record, f"{completion}_details"), "reasoning_tokens"), outputs
        ),
    )


def _anthropic(record: Any) -> TokenUsage:
    # Anthropic's input_tokens leave out what was read from and written to the cache.
    read = _count(record, "cache_read_input_tokens")
    write = _count(record, "cache_creation_input_tokens")
    return TokenUsage(
        input_tokens=_count(record, "input_tokens") + read + write,
        output_tokens=_count(record, "output_tokens"),
        cache_read_tokens=read,
        cache_write_tokens=write,
        cache_write_1h_tokens=min(
            _count(part(record, "cache_creation"), "ephemeral_1h_input_tokens"), write
        ),
    )


def _count(record: Any, name: str) -> int:
    value = part(record, name)
    return value if type(value) is int and value > 0 else 0
