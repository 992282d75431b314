"""A request that is about to be sent, as far as the seam understands it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from budgetguard_http._policy import Policy, bills, is_provider, tier_of
from budgetguard_http.protocols import CHAT, MISTRAL, OPAQUE, is_path_of_a_model, protocol_of
from budgetguard_http.protocols.fields import Body, parsed
from budgetguard_http.protocols.protocol import ApiProtocol

RETRIES: Final = "x-stainless-retry-count"
"""The header by which a client says that it tries again."""
_SIGNED: Final = "AWS4"
_SLASHES: Final = re.compile("/+(?=/|$)")
_MODEL_OF_A_FORM: Final = re.compile(rb'name="model"\r\n\r\n([^\r\n]+)\r\n')
_LONGEST_HEAD: Final = 4096
# The price book finds these by the name of their provider only.
_NAMED_BY_PROVIDER: Final = "text-embedding-"
_MISTRAL: Final = "mistral"


@dataclass(slots=True, repr=False)  # what is posted is in no log
class Payload:
    """A request that is a call of a model.

    Attributes:
        path: The address without host and query.
        raw: The body as it came.
        provider: Whose price it has; None for whoever has the model.
        is_signed: A signature covers the body: it must go out as it is.
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
    policy: Policy
    is_retry: bool
    tier: str | None


def _model_of_a_form(raw: bytes) -> str | None:
    """Return the model that an upload in parts names, as a transcription does."""
    named = _MODEL_OF_A_FORM.search(raw[:_LONGEST_HEAD] + raw[-_LONGEST_HEAD:])
    return None if named is None else named[1].decode("utf-8", "replace")


def plain_path(path: str) -> str:
    """Return an address without the slashes that gateways look past: doubled, or at its end."""
    return _SLASHES.sub("", path) if path[-1:] == "/" or "//" in path else path


def may_be_read(host: str, path: str, policy: Policy) -> bool:
    """Return whether a POST is worth reading, by its address."""
    if is_path_of_a_model(path):
        return True
    return policy.on_unknown != "pass" and is_provider(host) and bills(host, path)


def read_payload(
    host: str, path: str, headers: Mapping[str, str], raw: bytes, policy: Policy
) -> Payload | None:
    """Read a POST; None for what is no call of a model."""
    body = parsed(raw) or {}
    protocol = protocol_of(path, body)
    if protocol is CHAT and (_MISTRAL in host or _MISTRAL in headers.get("user-agent", "")):
        protocol = MISTRAL
    if protocol is None:
        is_billed = is_provider(host) and bills(host, path)
        is_billed |= "model" in body and is_path_of_a_model(path)
        if not is_billed or policy.on_unknown == "pass":
            return None
        protocol = OPAQUE
    model = protocol.model(path, body) or _model_of_a_form(raw)
    is_openais = (model or "").startswith(_NAMED_BY_PROVIDER)
    return Payload(
        protocol=protocol,
        path=path,
        body=body,
        raw=raw,
        model=model,
        provider="openai" if is_openais else protocol.provider,
        tier=tier_of(body),
        is_streamed=protocol.is_streamed(path, body),
        is_signed=headers.get("authorization", "").startswith(_SIGNED),
        policy=policy,
        is_retry=headers.get(RETRIES, "0") not in ("0", ""),
    )
