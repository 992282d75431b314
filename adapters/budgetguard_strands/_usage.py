"""Strands' records of a model call, in the engine's inclusive buckets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from budgetguard_core import TokenUsage, estimate_tokens


def token_usage(reported: Mapping[str, Any] | None) -> TokenUsage | None:
    """Convert the `usage` of a stream's metadata; None when it says nothing.

    Providers disagree on whether `inputTokens` includes the cache. Strands' own rule tells them
    apart: where input plus output is the total, the cache is inside, otherwise it comes on top.
    """
    if not reported:
        return None
    inputs, outputs, total, read, write = (
        _count(reported, name)
        for name in (
            "inputTokens",
            "outputTokens",
            "totalTokens",
            "cacheReadInputTokens",
            "cacheWriteInputTokens",
        )
    )
    # Strands fills in zeros for a provider that reported nothing, and no real call is all zeros.
    if not inputs + outputs + total + read + write:
        return None
    if inputs + outputs != total or read + write > inputs:
        inputs += read + write
    return TokenUsage(inputs, outputs, cache_read_tokens=read, cache_write_tokens=write)


def estimated_usage(messages: Iterable[Any], written: str, projected: int) -> TokenUsage:
    """Estimate a call that reported nothing, from what was sent and what came back."""
    inputs = projected or estimate_tokens(json.dumps(list(messages), default=str))
    return TokenUsage(inputs, estimate_tokens(written), estimated=True)


def model_name(model: Any) -> str | None:
    """Return the name under which a model is priced, or None when its settings have none."""
    config = model.get_config()
    name = config.get("model_id") if isinstance(config, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return name if isinstance(name, str) else None


def _count(reported: Mapping[str, Any], name: str) -> int:
    value = reported.get(name)
    return value if type(value) is int and value > 0 else 0
