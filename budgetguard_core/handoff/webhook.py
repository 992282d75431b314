"""A webhook as the place for runs: signed, tried again, and within a time."""

from __future__ import annotations

import hmac
import json
import threading
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.parse import SplitResult, urlsplit

from budgetguard_core.clock import SystemClock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.handoff.record import HandedOver

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PREFIX = "whsec_"
_LEAST_KEY = 24


class Webhook:
    """Posts each run as JSON, signed as Standard Webhooks are; its libraries check the signature.

    Tried again after a network error, 429 and 5xx, with the same `webhook-id`, half a second later
    and then twice as late each time. A redirection is refused, because the run would
    go to somebody else.

    Args:
        url: Where to: `https`, or `http` on this machine.
        secret: What both sides know: `whsec_` and 24 to 64 random bytes in base64.
        seconds: The time-out of each step of an attempt: to connect, and to hear something more.
        retries: How often it is tried again.
        pause: Waits for so many seconds between two attempts; blocking.

    Raises:
        ConfigurationError: An argument makes no sense.
    """

    def __init__(
        self,
        url: str,
        secret: str,
        *,
        seconds: float = 10.0,
        retries: int = 3,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        found = urlsplit(url)
        # Those that urllib refuses, with the URL in its error; and what it takes for a host.
        strange = any(not "!" <= one < "\x7f" for one in url)
        if strange or "@" in found.netloc:
            raise ConfigurationError(
                "url must be ASCII without spaces and without a user, got other characters. Quote "
                "them, and check the sender by its signature."
            )
        local = found.scheme == "http" and found.hostname in _LOOPBACK
        if not (found.hostname and (found.scheme == "https" or local)):
            # Not what it is: a URL may hold a password.
            raise ConfigurationError(
                f"url must be https, or http on this machine, got {found.scheme or 'none'}. "
                'Use "https://example.com/runs".'
            )
        if not _is_port(found):
            raise ConfigurationError("url must have a port up to 65535, got another. Check it.")
        if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
            raise ConfigurationError(
                f"seconds must be a number > 0, got {seconds!r}. Use seconds=10."
            )
        if type(retries) is not int or retries < 0:
            raise ConfigurationError(
                f"retries must be a whole number >= 0, got {retries!r}. Use 0 for one attempt."
            )
        self._url = url
        self._secret = _key(secret)
        self._seconds = seconds
        self._retries = retries
        self._pause = pause or threading.Event().wait
        # What goes to this machine is not encrypted, so no proxy of the environment gets it.
        proxies = urllib.request.ProxyHandler({} if local else None)
        self._opener = urllib.request.build_opener(proxies, _NoRedirect)

    def __call__(self, handed: HandedOver) -> None:
        """Post a run.

        Raises:
            urllib.error.URLError: It was refused, or the last attempt failed.
            http.client.HTTPException: What answered the last attempt speaks no HTTP.
        """
        body = json.dumps(handed.to_json(), ensure_ascii=True).encode()
        for attempt in range(self._retries + 1):
            if attempt:
                self._pause(0.5 * 2 ** (attempt - 1))
            try:
                self._post(body, handed.id)
            except (OSError, HTTPException) as error:
                code = getattr(error, "code", None)
                if attempt == self._retries or not (code is None or code == 429 or code >= 500):
                    raise
            else:
                return

    def _post(self, body: bytes, delivery: str) -> None:
        at = str(SystemClock.wall_ns() // 10**9)
        signed = hmac.digest(self._secret, f"{delivery}.{at}.".encode() + body, "sha256")
        headers = {
            "Content-Type": "application/json",
            "webhook-id": delivery,
            "webhook-timestamp": at,
            "webhook-signature": f"v1,{b64encode(signed).decode()}",
        }
        request = urllib.request.Request(self._url, body, headers, method="POST")  # noqa: S310 - checked
        with self._opener.open(request, timeout=self._seconds):
            pass


def _key(secret: str) -> bytes:
    try:
        key = b64decode(secret.removeprefix(_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not (secret.startswith(_PREFIX) and len(key) >= _LEAST_KEY):
        raise ConfigurationError(
            f"secret must be {_PREFIX} and {_LEAST_KEY} or more bytes in base64, got another. Make "
            f'one with "{_PREFIX}" + base64.b64encode(secrets.token_bytes(32)).decode().'
        )
    return key


def _is_port(url: SplitResult) -> bool:
    try:
        return url.port is None or url.port > 0
    except ValueError:
        return False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None
