"""A chat completion over real HTTP with the standard library, for sections without a client."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit


def complete(base_url: str, body: dict[str, Any], *, seconds: float | None = 30) -> dict[str, Any]:
    """Post a request and return the reply.

    Args:
        base_url: Of a server that speaks the OpenAI chat-completions format.
        body: The request.
        seconds: After how long a silent server fails it; None for never.

    Raises:
        ConnectionError: The server answered with an error.
        OSError: The server cannot be reached or is silent.
    """
    url = urlsplit(base_url)
    # Not urllib: it would send a loopback request through a proxy.
    connection = HTTPConnection(url.hostname or "", url.port, timeout=seconds)
    try:
        connection.request(
            "POST",
            f"{url.path}/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        msg = f"the server answered {answer.status}: {text[:200]!r}"
        raise ConnectionError(msg)
    reply: dict[str, Any] = json.loads(text)
    return reply
