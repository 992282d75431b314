"""A request that is about to be sent, as far as the seam understands it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from budgetguard_http._billing import bills, tier_of
from budgetguard_http._policy import Policy, is_provider
from budgetguard_http.protocols import CHAT, MISTRAL, OPAQUE, is_path_of_a_model, protocol_of
from budgetguard_http.protocols.fields import Body, parsed
from budgetguard_http.protocols.protocol import ApiProtocol

_SIGNED: Final = "AWS4"
_SLASHES: Final = re.compile("/+(?=/|$)")
_MODEL_OF_A_FORM: Final = re.compile(rb'name="model"\r\n\r\n([^\r\n]+)\r\n')
_LONGEST_HEAD: Final = 4096
# The price book finds these by the name of their provider only.
_NAMED_BY_PROVIDER: Final = "text-embedding-"
_MISTRAL: Final = "mistral"


@dataclass(slots=True, repr=False)  # what is posted is in no log
class Posted:
    """A request that is a call of a model.

    Attributes:
        protocol: Its format.
        path: The address without host and query.
        body: What is posted.
        raw: The same as it came.
        model: The model's name.
        provider: Whose price it has; None for whoever has the model.
        is_streamed: The answer comes as a stream.
        is_signed: A signature covers the body: it must go out as it is.
        is_unwanted: It is not understood, and such requests are refused.
        is_retry: Its client says that it tries again.
        tier: The tier of service that it asks for; None for the default.
    """

    protocol: ApiProtocol
    path: str
    body: Body
    raw: bytes
    model: str | None
    provider: str | None
    is_streamed: bool
    is_signed: bool
    is_unwanted: bool
    is_retry: bool
    tier: str | None


def _model_of_a_form(raw: bytes) -> str | None:
    """Return the model that an upload in parts names, as a transcription does."""
    ends = raw if len(raw) < 2 * _LONGEST_HEAD else raw[:_LONGEST_HEAD] + raw[-_LONGEST_HEAD:]
    named = _MODEL_OF_A_FORM.search(ends)
    return None if named is None else named[1].decode("utf-8", "replace")


def plain_path(path: str) -> str:
    """Return an address without the slashes that gateways look past: doubled, or at its end."""
    return _SLASHES.sub("", path) if path[-1:] == "/" or "//" in path else path


def may_be_posted(url: Any, path: str, policy: Policy) -> bool:
    """Return whether a POST is worth reading, by its address."""
    if is_path_of_a_model(path):
        return True
    return policy.on_unknown != "pass" and is_provider(url.host) and bills(url.host, path)


def read_posted(
    host: str, path: str, headers: Mapping[str, str], raw: bytes, policy: Policy
) -> Posted | None:
    """Read a POST; None for what is no call of a model."""
    body = parsed(raw) or {}
    protocol = protocol_of(path, body)
    if protocol is CHAT and (_MISTRAL in host or _MISTRAL in headers.get("user-agent", "")):
        protocol = MISTRAL
    if protocol is None:
        known = is_provider(host) and bills(host, path)
        unknown = known or ("model" in body and is_path_of_a_model(path))
        if not unknown or policy.on_unknown == "pass":
            return None
        protocol = OPAQUE
    model = protocol.model(path, body) or _model_of_a_form(raw)
    is_openais = (model or "").startswith(_NAMED_BY_PROVIDER)
    return Posted(
        protocol=protocol,
        path=path,
        body=body,
        raw=raw,
        model=model,
        provider="openai" if is_openais else protocol.provider,
        tier=tier_of(body),
        is_streamed=protocol.is_streamed(path, body),
        is_signed=headers.get("authorization", "").startswith(_SIGNED),
        is_unwanted=protocol is OPAQUE and policy.on_unknown == "refuse",
        is_retry=headers.get("x-stainless-retry-count", "0") not in ("0", ""),
    )
