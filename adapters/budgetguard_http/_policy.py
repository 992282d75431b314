"""The policy for requests: which bill a model, by what factor, and what is not understood."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from budgetguard_core import ConfigurationError
from budgetguard_core.kit import EnvelopeOptions
from budgetguard_http.protocols.fields import Body, record, text_or_none

OnUnknown: TypeAlias = Literal["admit", "pass", "refuse"]

PROVIDERS: Final = (
    "*api.openai.com",
    "*.openai.azure.com",
    "*.services.ai.azure.com",
    "*.cognitiveservices.azure.com",
    "api.anthropic.com",
    "generativelanguage.googleapis.com",
    "*aiplatform.googleapis.com",
    "api.mistral.ai",
    "codestral.mistral.ai",
    "bedrock-runtime*.amazonaws.com",
    "api.cohere.com",
    "api.cohere.ai",
    "api.deepseek.com",
    "api.fireworks.ai",
    "api.groq.com",
    "api.perplexity.ai",
    "api.together.xyz",
    "api.together.ai",
    "api.x.ai",
    "openrouter.ai",
)
"""Hosts where a request that is not understood may cost something."""
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
_PROVIDER: Final = re.compile("|".join(re.escape(one).replace(r"\*", ".*") for one in PROVIDERS))


def is_provider(host: str) -> bool:
    """Return whether a host is that of a provider of models."""
    return _PROVIDER.fullmatch(plain_host(host)) is not None


def plain_host(host: str) -> str:
    """Return a host as it is compared."""
    return host.lower().removesuffix(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of the seam for what the table of formats leaves open.

    Args:
        on_unknown: What is done with a request to a provider that is not understood and bills a
            model (batches, images, speech, background responses): `admit` it as a call with an
            estimate, `pass` it, or `refuse` it. Under a cap in dollars an admitted one needs a
            price as any other does.
        exempt: Names of models, or patterns, that cost no money: their calls and tokens count.
        ask_for_usage: Ask for the usage of a stream where its caller did not, and keep it from the
            caller. Switch it off for a server that refuses the field.

    Raises:
        ConfigurationError: A setting makes no sense.
    """

    on_unknown: OnUnknown = "admit"
    exempt: Sequence[str] = ()
    ask_for_usage: bool = True

    def __post_init__(self) -> None:
        if self.on_unknown not in get_args(OnUnknown):
            raise ConfigurationError(
                f"on_unknown must be 'admit', 'pass' or 'refuse', got {self.on_unknown!r}. "
                "Leave it out to have such a request admitted with an estimate."
            )
        if isinstance(self.exempt, str):
            raise ConfigurationError(
                f"exempt must be a list of names, got {self.exempt!r}. Put it into a list."
            )

    def is_exempt(self, model: str | None) -> bool:
        """Return whether a model costs no money."""
        return model is not None and any(fnmatchcase(model, one) for one in self.exempt)


class ClientOptions(EnvelopeOptions, total=False):
    """The options of a way in: those of `Envelope`, and those of `Policy`."""

    on_unknown: OnUnknown
    exempt: Sequence[str]
    ask_for_usage: bool


def split(options: ClientOptions) -> tuple[Policy, EnvelopeOptions]:
    """Return the policy of a way in, and the options of its envelope."""
    rest = cast("dict[str, Any]", {**options})
    names = [one.name for one in fields(Policy)]
    policy = Policy(**{name: rest.pop(name) for name in names if name in rest})
    return policy, cast("EnvelopeOptions", rest)


def bills(host: str, path: str) -> bool:
    """Return whether a POST to a provider bills a model."""
    if _BILLED.search(path) is not None:
        return not ("/threads/" in path and path.endswith("/messages"))
    # Mistral's are calls of a model; elsewhere they are where those are stored.
    is_mistral = plain_host(host).endswith("mistral.ai")
    return is_mistral and _CONVERSATIONS.search(path) is not None


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
