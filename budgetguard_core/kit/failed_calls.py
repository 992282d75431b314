"""The charge for a model call that failed: one rule for every provider and framework."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final

from budgetguard_core.kit.figures import larger
from budgetguard_core.kit.records import part
from budgetguard_core.usage import TokenUsage, estimate_tokens

_STATUSES: Final = range(100, 600)
_CLIENT_ERRORS: Final = range(400, 500)
# The request timed out, the model failed at it (Bedrock), the client shut the connection: the model
# may have been at work.
_AT_WORK: Final = frozenset({408, 424, 499})
_GRPC_TURNED_AWAY: Final = frozenset(
    {
        "ALREADY_EXISTS",
        "FAILED_PRECONDITION",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "OUT_OF_RANGE",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "UNAUTHENTICATED",
        "UNIMPLEMENTED",
    }
)
_NEVER_CONNECTED: Final = (ConnectionRefusedError, socket.gaierror)
_LONGEST_CHAIN: Final = 8


def turned_away(error: BaseException | str | None) -> bool:
    """Return whether a provider turned a call away before it did any work for it.

    The HTTP status decides, from wherever the SDKs keep it: 400 to 499 (bad request, context
    overflow, no access, rate limit and their like), without 408, 424 and 499, after which the model
    may have been at work; so do gRPC's codes of the same meaning. A connection that was refused,
    or a host without an address, is turned away too. The text of an error is never read.

    Args:
        error: What ended the call; what it was raised from is looked at where it says nothing.
    """
    return any(_verdicts(error))


def failed_usage(
    error: BaseException | str | None,
    *,
    projected_input: int,
    written: str = "",
    reported: TokenUsage | None = None,
) -> TokenUsage | None:
    """Return what a call that failed is charged.

    Args:
        error: What ended the call.
        projected_input: Tokens of the prompt as projected; 0 where nothing was projected.
        written: All that had been streamed.
        reported: What the chunks that came had reported.

    Returns:
        No tokens, for a call that was turned away before anything came; otherwise the prompt and
        what was streamed, marked as estimated. None when nothing of that is known: then
        `Guard.settle_model_call` charges the call's reservation.
    """
    if not written and reported is None and turned_away(error):
        return TokenUsage()
    used = reported or TokenUsage()
    if not used.input_tokens:
        used = larger(used, TokenUsage(max(projected_input, 0)))
    if written:
        used = larger(used, TokenUsage(0, estimate_tokens(written)))
    return used._replace(estimated=True) if used.total_tokens else None


def _verdicts(error: BaseException | str | None) -> Iterator[bool]:
    """Ask an error and what it was raised from, until one of them knows."""
    for _ in range(_LONGEST_CHAIN):
        if not isinstance(error, BaseException):
            return
        verdict = _verdict(error)
        if verdict is not None:
            yield verdict
            return
        error = error.__cause__


def _verdict(error: BaseException) -> bool | None:
    if part(error, "is_pre_first_chunk") is False:
        return False  # LiteLLM gives what broke its stream the status of the error behind it
    status = _status(error)
    if status is not None:
        return status in _CLIENT_ERRORS and status not in _AT_WORK
    name = _grpc_code(error)
    if name is not None:
        return name in _GRPC_TURNED_AWAY
    return True if isinstance(error, _NEVER_CONNECTED) else None


def _status(error: BaseException) -> int | None:
    response = part(error, "response")
    places = (
        part(error, "status_code"),
        part(response, "status_code"),
        part(part(response, "ResponseMetadata"), "HTTPStatusCode"),
        part(error, "code"),
        part(error, "status"),
    )
    for status in places:
        if isinstance(status, int) and status in _STATUSES:
            return int(status)
    return None


def _grpc_code(error: BaseException) -> str | None:
    code = part(error, "code")
    if not callable(code):
        return None
    try:
        name = part(code(), "name")
    except Exception:  # not gRPC's: the error's own code runs here
        return None
    return name if isinstance(name, str) else None
