"""Bedrock through boto3: the calls of a client, bounded by botocore's public events."""

from __future__ import annotations

import importlib
import io
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeVar, Unpack
from urllib.parse import unquote, urlsplit

from budgetguard_core import AdapterError, Budget, Guard
from budgetguard_core.kit import Envelope, Run, Stop
from budgetguard_http import audit
from budgetguard_http._call import AnsweredWith, Call, admitted
from budgetguard_http._flight import Flight
from budgetguard_http._frames import EVENT_STREAM, Chunks, Frames, frames_at
from budgetguard_http._payload import RETRIES, may_be_read
from budgetguard_http._policy import ClientOptions, Policy
from budgetguard_http._refusal import Made
from budgetguard_http._runs import is_off
from budgetguard_http._stream import Passing, Stream, passed
from budgetguard_http.transport import Blocking

SERVICE: Final = "bedrock-runtime"
_Client = TypeVar("_Client")
# A request to this service costs something, wherever `endpoint_url` sends it.
_HOST: Final = "bedrock-runtime.us-east-1.amazonaws.com"
_EXCHANGE: Final = "budgetguard-exchange"
_HOOKED: weakref.WeakKeyDictionary[Any, Hooks] = weakref.WeakKeyDictionary()
"""The hooks of each client: it has one at a time, so that no attempt is counted twice."""


class _Exchange:
    """One attempt, from its admission to its answer."""

    def __init__(self, call: Call, host: str) -> None:
        self.call = call
        self.flight = Flight(call.run)
        self._open = ExitStack()
        self._open.enter_context(audit.expected(host))
        self._is_open = True

    def close(self) -> None:
        """Close it: its answer has begun, or there is none."""
        self._is_open = False
        self._open.close()

    def __del__(self) -> None:
        # What leaves a client past its events, as KeyboardInterrupt does, comes by here.
        if self._is_open:
            self.close()
            self.flight.close()
            self.call.cancelled()


class Hooks:
    """The handlers of clients' events; for boto3 what `Seam` is, of the same arguments."""

    def __init__(self, here: Callable[[], Run | None], policy_of: Callable[[Run], Policy]) -> None:
        self._here = here
        self._policy_of = policy_of
        # Between two events of one attempt, which one thread emits, there is no other way in
        # every release of botocore: the request that is sent is not the one that was made.
        self._next = threading.local()

    def register(self, client: Any) -> None:
        """Register the handlers, in the place of others'; a second time changes nothing."""
        before = _HOOKED.get(client)
        if before is not None:
            before.unregister(client)
        _HOOKED[client] = self
        for name, handler in self._handlers():
            # First: before the request is signed.
            client.meta.events.register_first(f"{name}.{SERVICE}", handler)

    def unregister(self, client: Any) -> None:
        """Take them back, if they are there."""
        if _HOOKED.get(client) is self:
            del _HOOKED[client]
            for name, handler in self._handlers():
                client.meta.events.unregister(f"{name}.{SERVICE}", handler)

    def unregister_all(self) -> None:
        """Take back those of every client."""
        for client in [*_HOOKED]:
            self.unregister(client)

    def _handlers(self) -> Sequence[tuple[str, Callable[..., Any]]]:
        return (
            ("request-created", self._created),
            ("before-send", self._sending),
            ("response-received", self._received),
        )

    def _created(self, request: Any, **_: Any) -> None:
        """Ask for an attempt before it is signed."""
        self._next.answer = None
        run = self._here() if request.method == "POST" else None
        if run is None or is_off(run):
            return
        policy = self._policy_of(run)
        address = urlsplit(str(request.url))
        path = unquote(address.path)
        if not may_be_read(_HOST, path, policy):
            return
        data = request.data
        raw = data.encode() if isinstance(data, str) else bytes(data or b"")
        attempt = request.context.get("retries", {}).get("attempt", 1)
        headers = {RETRIES: str(attempt - 1)}
        call = admitted(run, policy, _HOST, path, headers, raw)
        if isinstance(call, Call):
            held = call.run.wait(call.open_call)
            if isinstance(held, Stop):
                call = call.refusal(held.trip)
        if not isinstance(call, Call):
            self._next.answer = call
            return
        content = call.content()
        if content is not None:
            request.data = content
        request.context[_EXCHANGE] = _Exchange(call, address.hostname or "")

    def _sending(self, request: Any, **_: Any) -> Any:
        """Answer an attempt that may not start."""
        answer: Made | None = getattr(self._next, "answer", None)
        if answer is None:
            return None
        self._next.answer = None
        made = _botocore("awsrequest")
        status, headers, content = answer
        # The name by which boto3 tells an error.
        named = {**headers, "x-amzn-errortype": "CallRefused"} if status != 200 else headers
        return made.AWSResponse(request.url, status, made.HeadersDict(named), _Raw(content))

    def _received(
        self, response_dict: Any, parsed_response: Any, context: Any, exception: Any, **_: Any
    ) -> None:
        """Settle an attempt with its answer, or begin to read that."""
        exchange: _Exchange | None = context.pop(_EXCHANGE, None)
        if exchange is None:
            return
        exchange.close()
        call, flight = exchange.call, exchange.flight
        is_kept = False
        try:
            if exception is not None or response_dict is None:
                call.failed(exception or "no answer")
            elif response_dict["status_code"] >= 300:
                call.failed(AnsweredWith(response_dict["status_code"]))
            else:
                is_kept = _answered(parsed_response, response_dict, call, flight)
        except BaseException as error:
            call.failed(error)
            raise
        finally:
            if not is_kept:
                flight.close()


def is_hooked(client: Any) -> bool:
    """Return whether a client has hooks."""
    return client in _HOOKED


class BedrockHooks(Blocking):
    """Bounds the calls of boto3's Bedrock clients: `hooks.register(boto3.client(...))`.

    By botocore's events alone: nothing is patched. Each attempt is admitted before it is signed,
    so that the bound and a correction get into it; a retry of the client is charged as a retry. An
    attempt that may not start is answered with a normal, synthetic reply. Calls from any thread
    count.

    Args:
        budget: As `BudgetTransport` takes it. One run from the first call to `close`.
        options: As `BudgetTransport` takes them. With `on_trip="raise"`, `CallRefused` leaves the
            call of the client, which is no `Exception`.

    Attributes:
        run: The run of the calls that are part of no other run.
        outcome: How that run ended.

    Raises:
        ConfigurationError: The budget or an option makes no sense.
    """

    def __init__(
        self,
        budget: Budget | Guard | Envelope | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(budget, **options)
        self._hooks = Hooks(self._runs.here, self._policy_of)

    def register(self, client: _Client) -> _Client:
        """Bound a client from now on, and return it.

        Args:
            client: `boto3.client("bedrock-runtime")`, or one of botocore's own.

        Raises:
            AdapterError: It is a client of another service.
        """
        name = getattr(getattr(client, "meta", None), "service_model", None)
        if getattr(name, "service_name", None) != SERVICE:
            raise AdapterError(
                f"client must be boto3's for {SERVICE!r}, got {type(client).__name__}. "
                f"Use boto3.client({SERVICE!r})."
            )
        self._hooks.register(client)
        return client


class _Raw(io.BytesIO):
    """The bytes of an answer that no connection has brought."""

    def stream(self, amt: int = 65_536, **_: Any) -> Any:
        while piece := self.read(amt):
            yield piece


def _answered(parsed: dict[str, Any], response: Any, call: Call, flight: Flight) -> bool:
    """Take an answer; tell whether it is still being read."""
    field = "stream" if "stream" in parsed else "body"
    if field not in parsed:
        call.parsed(parsed)
        return False
    if not call.payload.is_streamed and frames_at(call.payload.path)[1] != EVENT_STREAM:
        content = parsed[field].read()
        call.whole(content)
        body = _botocore("response").StreamingBody
        parsed[field] = body(io.BytesIO(content), len(content))
        return False
    # urllib3 2.3 and later
    flight.shut = getattr(response["body"], "shutdown", None)
    frames, path = Frames() if field == "stream" else Chunks(), call.payload.path
    passing = Passing(call, frames, lambda: _read_timeout(path))
    stream = parsed[field]
    parsed[field] = Stream(stream, call, flight, passed(stream, passing, flight))
    return True


def _read_timeout(path: str) -> Exception:
    """Return botocore's own error for an answer that did not come in time."""
    made: Exception = _botocore("exceptions").ReadTimeoutError(
        endpoint_url=path, error="the run has ended"
    )
    return made


def _botocore(name: str) -> Any:
    return importlib.import_module(f"botocore.{name}")  # it brings no types
