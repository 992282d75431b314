"""The patches of the ambient way in: the clients of httpx, httpx2 and boto3."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from budgetguard_http._seam import Exchange, Seam
from budgetguard_http.bedrock import SERVICE, Hooks, is_hooked

_MODULES: Final = ("httpx", "httpx2")
_GENAI: Final = "google.genai._api_client"
_AIOHTTP: Final = "has_aiohttp"


class Patches:
    """The patches of one process, in place while somebody holds them."""

    def __init__(self, seam: Seam, hooks: Hooks) -> None:
        self._seam = seam
        self._hooks = hooks
        self._lock = threading.Lock()
        self._holders = 0
        self._undo: list[Callable[[], object]] = []

    @property
    def are_installed(self) -> bool:
        """True if somebody holds them."""
        return self._holders > 0

    def hold(self) -> None:
        """Put the patches in place, if they are not yet."""
        with self._lock:
            self._holders += 1
            if self._holders > 1:
                return
            for name in _MODULES:
                with suppress(ModuleNotFoundError):
                    self._patch(importlib.import_module(name))
            with suppress(ModuleNotFoundError):
                self._hook(importlib.import_module("botocore.client").BaseClient)
            genai: Any = sys.modules.get(_GENAI)
            if getattr(genai, _AIOHTTP, False):
                # google-genai 3.4: its asynchronous half prefers aiohttp, below which there is no
                # seam, unless this flag is off. A public setting would let this go.
                setattr(genai, _AIOHTTP, False)
                self._undo.append(lambda: setattr(genai, _AIOHTTP, True))

    def release(self) -> None:
        """Take back what is in place, if nobody else holds it."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                while self._undo:
                    self._undo.pop()()

    def _patch(self, mod: Any) -> None:
        for owner in (mod.Client, mod.AsyncClient):
            own = owner.send
            if getattr(own, "budgetguard", None) is self:
                continue  # one module under two names
            patched = self._sending(own, is_async=owner is mod.AsyncClient)
            patched.budgetguard = self
            self._put(owner, "send", patched)

    def _put(self, owner: Any, name: str, patched: Any) -> None:
        own = getattr(owner, name)
        setattr(owner, name, patched)

        def undo() -> None:
            if getattr(owner, name) is patched:  # and not by somebody else since
                setattr(owner, name, own)

        self._undo.append(undo)

    def _hook(self, owner: Any) -> None:
        """Hook each client of Bedrock when it is first used."""
        # botocore 1.44: handlers of its own for every client (`BUILTIN_HANDLERS`) reach those
        # only that are made afterwards; this method, not public, is what others patch as well.
        own = owner._make_api_call  # noqa: SLF001

        @functools.wraps(own)
        def call(client: Any, operation_name: str, api_params: Any) -> Any:
            is_ours = self._holders and client.meta.service_model.service_name == SERVICE
            if is_ours and not is_hooked(client):
                self._hooks.register(client)
            return own(client, operation_name, api_params)

        self._put(owner, "_make_api_call", call)
        self._undo.append(self._hooks.unregister_all)

    def _sending(self, own: Any, *, is_async: bool) -> Any:
        @functools.wraps(own)
        def send(client: Any, request: Any, *, stream: bool = False, **options: Any) -> Any:
            def through(outgoing: Any) -> Any:
                return own(client, outgoing, stream=stream, **options)

            if not self._holders:
                # Somebody else has patched the patch, and keeps it.
                return through(request)
            return self._seam.send(Exchange(request, through, is_async, stream, of_client=True))

        return send
