"""The policy for requests to providers that are not understood, and for models that are free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from budgetguard_core import ConfigurationError
from budgetguard_core.kit import EnvelopeOptions

OnUnknown: TypeAlias = Literal["admit", "pass", "refuse"]

PROVIDERS: Final = (
    "api.openai.com",
    "*.api.openai.com",
    "*.openai.azure.com",
    "*.services.ai.azure.com",
    "*.cognitiveservices.azure.com",
    "api.anthropic.com",
    "generativelanguage.googleapis.com",
    "aiplatform.googleapis.com",
    "*-aiplatform.googleapis.com",
    "api.mistral.ai",
    "codestral.mistral.ai",
    "bedrock-runtime.*.amazonaws.com",
    "bedrock-runtime-fips.*.amazonaws.com",
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
_PROVIDER: Final = re.compile("|".join(re.escape(one).replace(r"\*", ".*") for one in PROVIDERS))


def is_provider(host: str) -> bool:
    """Return whether a host is that of a provider of models."""
    return _PROVIDER.fullmatch(plain_host(host)) is not None


def plain_host(host: str) -> str:
    """Return a host as it is compared."""
    return host.lower().removesuffix(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the seam treats what the table of formats does not tell.

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
        return (
            bool(self.exempt)
            and model is not None
            and any(fnmatchcase(model, one) for one in self.exempt)
        )


class ClientOptions(EnvelopeOptions, total=False):
    """The options of a way in: those of `Envelope`, and those of `Policy`."""

    on_unknown: OnUnknown
    exempt: Sequence[str]
    ask_for_usage: bool


def split(options: ClientOptions) -> tuple[Policy, EnvelopeOptions]:
    """Return the policy of a way in, and the options of its envelope.

    Raises:
        ConfigurationError: A setting makes no sense.
    """
    rest = cast("dict[str, Any]", {**options})
    names = [one.name for one in fields(Policy)]
    policy = Policy(**{name: rest.pop(name) for name in names if name in rest})
    return policy, cast("EnvelopeOptions", rest)
