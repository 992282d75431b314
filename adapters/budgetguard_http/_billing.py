"""The bills of a model, and their factor: by addresses, and by the tier of service."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from budgetguard_http.protocols.fields import Body, record, text_or_none

_BILLED: Final = re.compile(
    r"/(completions|complete|responses|messages|chat|generate|embed|embeddings|rerank|ocr)$"
    r"|/(classify|classifications|summarize|interactions|batches|fine_tuning/jobs|async-invoke)$"
    r"|/images/(generations|edits|variations)$|/audio/(speech|transcriptions|translations)$"
    r"|/videos(/[^/]+/remix)?$|/threads/([^/]+/)?runs$|/evals/[^/]+/runs$|/batch/jobs$"
    r"|:(generate|streamGenerate|batchGenerate|embed|batchEmbed|asyncBatchEmbed|predict)\w*$"
    r"|(?<!/count-tokens):(streamR|r)awPredict$"
    r"|/model/.+/(invoke|converse)[^/]*$|/guardrail/.+/apply$"
)
"""The ends of addresses where a POST bills a model. What else a provider has costs nothing here:
files, vector stores, containers, threads, evals, client secrets, moderations, counts of tokens."""
_CONVERSATIONS: Final = re.compile(r"/conversations(/|$)(?!.*/cancel$)")

TIERS: Final = {
    "flex": Decimal("0.5"),
    "batch": Decimal("0.5"),
    "priority": Decimal(2),
    "in us": Decimal("1.1"),
}
"""The most that a tier of service costs, of what the default does. Any other tier has no price."""
_DEFAULT: Final = frozenset({"auto", "default", "standard", "standard_only", "on_demand"})


def bills(host: str, path: str) -> bool:
    """Return whether a POST to a provider bills a model."""
    if _BILLED.search(path) is not None:
        return not ("/threads/" in path and path.endswith("/messages"))
    # Mistral's are calls of a model; elsewhere they are where those are stored.
    return (
        host.lower().removesuffix(".").endswith("mistral.ai")
        and _CONVERSATIONS.search(path) is not None
    )


def tier_of(body: Body) -> str | None:
    """Return the tier of service that a request asks for, or an answer had; None for the default.

    Regions count as tiers, and so does a faster mode.
    """
    given = body.get("service_tier") or body.get("serviceTier")
    tier = text_or_none(given) or text_or_none(record(given).get("type"))
    if tier is None or tier in _DEFAULT:
        tier = "fast" if body.get("speed") == "fast" else None
    region = text_or_none(body.get("inference_geo"))
    return tier if tier is not None or region in (None, "global") else f"in {region}"
