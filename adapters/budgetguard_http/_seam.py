"""The seam: every request of a client of httpx or httpx2 passes here, blocking or on a loop."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from budgetguard_core.kit import (
    FRAME,
    Flow,
    Run,
    Scope,
    Step,
    Stop,
    cut_short,
    run_awaited,
    run_blocking,
)
from budgetguard_http import audit
from budgetguard_http._call import AnsweredWith, Call, admitted
from budgetguard_http._flight import Flight, ended
from budgetguard_http._frames import frames_of
from budgetguard_http._payload import may_be_read, plain_path
from budgetguard_http._policy import Policy
from budgetguard_http._refusal import REFUSED, Made, respond
from budgetguard_http._runs import is_off
from budgetguard_http._stream import Passing, passed, passed_async, stream_of
from budgetguard_http.protocols import OPAQUE

_FIRST_PATH = "budgetguard_first_path"
_IDENTITY = "identity"
_WAITS = (("retry-after-ms", 1000), ("retry-after", 1))
_PHASES = ("connect", "read", "write", "pool")
_KEYS = ("authorization", "key", "token", "cookie", "secret")
_SHORTEST_KEY = 6
_LONGEST_CHAIN = 16
_Found: TypeAlias = tuple[Run, Policy, str]
# What a whole answer that was read here brings along that its content does not fit to any more.
_OF_THE_BYTES = frozenset({b"content-length", b"content-encoding", b"transfer-encoding"})


class Seam:
    """The seam that a request passes.

    Args:
        here: Returns the run that a call from the running code is a part of; None for nobody's.
        policy_of: Returns what is done with what is not understood, in a run.
    """

    def __init__(self, here: Callable[[], Run | None], policy_of: Callable[[Run], Policy]) -> None:
        self._here = here
        self._policy_of = policy_of

    def send(self, exchange: Exchange) -> Any:
        """Send a request, or answer it; on an event loop, return what is to be awaited."""
        found = self._found(exchange.request)
        if found is None and not audit.is_on():
            return exchange.send(exchange.request)
        flow = self._sent(exchange, found)
        return run_awaited(flow) if exchange.is_async else run_blocking(flow)

    def _sent(self, exchange: Exchange, found: _Found | None) -> Flow[Any]:
        host = exchange.request.url.host
        with audit.expected(host) if audit.is_on() else nullcontext():
            response = yield from self._answered(exchange, found)
        if not (exchange.stream or getattr(response, "is_closed", True)):
            yield Step(response.read, response.aread)  # it was made here
        return response

    def _answered(self, exchange: Exchange, found: _Found | None) -> Flow[Any]:
        request = exchange.request
        if found is None:
            return (yield exchange.sending(request))
        run, policy, path = found
        yield Step(request.read, request.aread)
        host, mod = request.url.host, module_of(request)
        call = admitted(run, policy, host, path, request.headers, request.content)
        if call is None:
            return (yield exchange.sending(request))
        if isinstance(call, Made):
            return respond(mod, request, call)
        try:
            held = yield from call.run.waited(call.open_call)
            if isinstance(held, Stop):
                return respond(mod, request, call.refusal(held.trip))
            exchange.flight = None if exchange.is_async else Flight(run)
            # An adapter above cuts its own calls, but for those that block.
            is_mine = exchange.is_async and call.open_call.parent is None
            made: Any = None
            with cut_short(run) if is_mine else nullcontext() as watch:
                made = yield from exchange.answer(mod, call)
            if made is not None or watch is None:
                return made
            call.failed("cut short")
            trip = watch.trip or run.stopped_by
        except BaseException as error:
            _hide(error, request)
            call.failed(error)
            if not isinstance(error, mod.TransportError | TimeoutError):
                raise
            # It may be nothing but the end of the run.
            trip = ended(run, None if exchange.flight is None else exchange.flight.trip)
            if trip is None:
                raise
        finally:
            if exchange.flight is not None and not exchange.is_kept:
                exchange.flight.close()
        return respond(mod, request, call.refusal(trip))

    def _found(self, request: Any) -> _Found | None:
        """Return the run that a request may be a call of, its policy, and the request's path."""
        run = self._here() if request.method == "POST" else None
        if run is None:
            return None
        policy = self._policy_of(run)
        # Where it went first: that tells its format.
        path = plain_path(request.extensions.get(_FIRST_PATH) or request.url.path)
        if not may_be_read(request.url.host, path, policy) or is_off(run):
            return None
        return run, policy, path


@dataclass(slots=True)
class Exchange:
    """One request of httpx or httpx2 and its answer, blocking or on an event loop.

    Attributes:
        stream: Its caller reads the body.
        of_client: The response is a client's, with its history and its time.
        flight: Ends it where it blocks.
        is_kept: The answer is a stream that its caller reads.
    """

    request: Any
    send: Callable[[Any], Any]
    is_async: bool = False
    stream: bool = True
    of_client: bool = False
    flight: Flight | None = None
    is_kept: bool = False

    def sending(self, request: Any) -> Step:
        """Return the step of sending a request."""
        return Step(lambda: self.send(request), lambda: self.send(request))

    def answer(self, mod: Any, call: Call) -> Flow[Any]:
        """Send a call that was admitted, and return its answer."""
        request, flight = self.request, self.flight
        own, token = request.extensions, FRAME.set(call.open_call.frame)
        try:
            response = yield self.sending(_outgoing(mod, request, call, flight))
        finally:
            FRAME.reset(token)
            request.extensions = own
        if response.has_redirect_location:
            # Its client takes the extensions along.
            request.extensions = {**own, _FIRST_PATH: call.payload.path}
        if flight is not None:
            flight.answered(response)
        if not _is_an_answer(response, call):
            return response
        passing = _passing(mod, response, call)
        if passing is None:
            content = yield Step(response.read, response.aread)
            call.whole(content)
            return _remade(mod, response, content, self.of_client) if self.stream else response
        if response.is_closed or (self.of_client and not self.stream):
            # It was read whole, and decompressed, before it came here.
            content = b"".join([*passing.feed(response.content), *passing.last()])
            return _remade(mod, response, content, self.of_client)
        self.is_kept = True
        stream, kind = response.stream, stream_of(mod)
        if flight is not None:
            chunks: Any = passed(stream, passing, flight)
            response.stream = kind(stream, call, flight, chunks)
            return response
        # An adapter above cuts its own calls.
        scope = Scope(call.run) if call.open_call.parent is None else None
        response.stream = kind(stream, call, scope, passed_async(stream, passing, scope))
        return response


def module_of(request: Any) -> Any:
    """Return the package of a request: httpx or httpx2."""
    return sys.modules[type(request).__module__.partition(".")[0]]


def _outgoing(mod: Any, request: Any, call: Call, flight: Flight | None) -> Any:
    """Return the request as it goes out: with the bound, a nudge, and the time that is left."""
    extensions = dict(request.extensions)
    if flight is not None:
        flight.trace(extensions)
    rest = call.open_call.seconds if flight is None or call.open_call.parent else flight.rest
    if rest is not None:
        own: dict[str, Any] = extensions.get("timeout") or {}
        # As a rule the client's own time-outs are far shorter.
        extensions["timeout"] = {phase: min(own.get(phase) or rest, rest) for phase in _PHASES}
    content = call.content()
    if content is not None:
        headers = request.headers.copy()
        headers.pop("transfer-encoding", None)  # a request has one of the two
        headers["content-length"] = str(len(content))
        request = mod.Request(request.method, request.url, stream=mod.ByteStream(content))
        request.headers = headers
        request.read()
    if call.payload.is_streamed and not call.payload.is_signed:
        # Compressed events would have to be decompressed on their way.
        request.headers["accept-encoding"] = _IDENTITY
    request.extensions = extensions
    return request


def _is_an_answer(response: Any, call: Call) -> bool:
    """Settle what is no answer of a model: a redirect, an error, a refusal by a seam below."""
    status = response.status_code
    if REFUSED in response.extensions or status in range(300, 400):
        call.take_back()
        return False
    if status < 300:
        return True
    call.failed(AnsweredWith(status))
    _shorten(response, 0 if call.run.aborted else call.run.time_left())
    return False


def _shorten(response: Any, rest: float | None) -> None:
    """Shorten the wait that a client is asked for to the end of its run, where it is refused.

    Nobody but the client itself could end that wait, and some wait a day if they are told to.
    """
    for name, parts in _WAITS:
        header = response.headers.get(name)
        if header is not None and rest is not None:
            with suppress(ValueError):  # a date
                if float(header) / parts <= rest:
                    continue
            # Zero would be taken for nothing told.
            response.headers[name] = str(max(math.ceil(rest * parts), 1))


def _passing(mod: Any, response: Any, call: Call) -> Passing | None:
    """Return what passes a streamed answer on; None for one that comes whole."""
    headers, payload = response.headers, call.payload
    kind = headers.get("content-type", "")
    if kind.startswith("application/json"):
        return None
    frames = frames_of(kind, payload.path, is_requested=payload.is_streamed)
    # Speech, an image: nobody reads it, and its client may play it as it comes.
    is_media = payload.protocol is OPAQUE and kind and not kind.startswith("text/")
    if frames is None and not (payload.is_streamed or is_media):
        return None
    if headers.get("content-encoding", _IDENTITY) != _IDENTITY:
        frames = None
    if frames is not None:
        headers.pop("content-length", None)
    return Passing(call, frames, lambda: mod.ReadTimeout("the run has ended"))


def _remade(mod: Any, response: Any, content: bytes, of_client: bool) -> Any:
    """Return an answer anew, because its reader may want the bytes."""
    made = mod.Response(
        response.status_code,
        headers=[
            *(one for one in response.headers.raw if one[0].lower() not in _OF_THE_BYTES),
            (b"content-length", b"%d" % len(content)),
        ],
        stream=mod.ByteStream(content),
        extensions=response.extensions,
    )
    if of_client:
        made.request = response.request
        made.history = response.history
        with suppress(RuntimeError):  # a transport that gives whole responses measures no time
            made.elapsed = response.elapsed
    return made


def _hide(error: BaseException, request: Any) -> None:
    """Take the keys of a request out of the texts of an error, and of those that led to it.

    h11 and h2 quote a header whose value is no valid one, as that of a key with a line's end is.
    Such a text would be in the outcome's `error`, and in the log of whoever writes that down.
    """
    secrets = [
        part
        for name, value in [*request.headers.multi_items(), *request.url.params.multi_items()]
        if any(one in name.lower() for one in _KEYS)
        for part in value.split()
        if len(part) >= _SHORTEST_KEY
    ]
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return
        link.args = tuple(_hidden(one, secrets) for one in link.args)
        link = link.__cause__ or link.__context__


def _hidden(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "[hidden]")
    return value
