"""What the seam covers and what it does not, as data: for the README and for whoever reports it."""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple

from budgetguard_http.ambient import is_installed
from budgetguard_http.audit import uncovered_hosts


class Way(NamedTuple):
    """A way by which calls of a model leave a process."""

    name: str
    """What a user knows it by."""
    packages: tuple[str, ...]
    """The distributions that it needs; none where it needs nothing that could be looked for."""
    reason: str
    """How it is covered, or why it is not and what to do."""


COVERED: Final = (
    Way("httpx", ("httpx",), "`send` of its clients, or a transport."),
    Way("httpx2", ("httpx2",), "`send` of its clients, or a transport."),
    Way("Bedrock by boto3", ("boto3",), "The public events of its client, or `BudgetHooks`."),
)
"""What a call above a cap does not leave by."""

UNCOVERED: Final = (
    Way(
        "websockets",
        ("websockets",),
        "Realtime, Gemini Live and the Responses of some agents: use the HTTP call instead.",
    ),
    Way("gRPC", ("grpcio",), "Clients of its own, as Vertex's older SDK: use google-genai."),
    Way("aiohttp", ("aiohttp",), "Called by hand: use httpx. Google-genai's is switched to httpx."),
    Way("requests", ("requests",), "Called by hand: use httpx."),
    Way("aiobotocore", ("aiobotocore",), "Bedrock on an event loop: use boto3 in a thread."),
    Way("urllib, sockets and native code", (), "Called by hand: use httpx."),
    Way("subprocesses", (), "Each process has a seam of its own: bound it there."),
)
"""What it may leave by, unseen; `uncovered_hosts` counts the first look-ups of most."""

_GENAI: Final = "google.genai._api_client"


def gaps() -> list[str]:
    """Return what is open in this process now, one sentence each; none where nothing is known.

    What could be open by the installed packages alone is in `UNCOVERED`.
    """
    found: list[str] = []
    if not is_installed():
        found.append("The seam is not in place: call install(), or use a bounded_clients block.")
    genai: Any = sys.modules.get(_GENAI)
    if is_installed() and getattr(genai, "has_aiohttp", False):
        found.append("google-genai was imported after the seam, and its asynchronous half is open.")
    for host, count in sorted(uncovered_hosts().items()):
        found.append(f"{count} connections to {host} went past the seam.")
    return found
