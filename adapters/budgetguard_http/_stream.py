"""The bytes of a streamed answer on their way: read, and ended in good order when cut."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from budgetguard_core.kit import Watch, synthetic_text
from budgetguard_http._call import Call
from budgetguard_http._flight import Flight
from budgetguard_http._frames import Frames, ServerSentEvents, may_be_events
from budgetguard_http.protocols.protocol import Reader

_IDENTITY: Final = "identity"


@functools.cache
def _encodings(mod: Any) -> frozenset[str]:
    """List the encodings that a client of httpx or httpx2 reads, as it tells a server."""
    with mod.Client(transport=mod.BaseTransport()) as client:
        return frozenset(client.headers["accept-encoding"].split(", "))


def reads(mod: Any, encoding: str) -> bool:
    """Return whether a client of httpx or httpx2 decompresses what is encoded like this."""
    parts = {part.strip() for part in encoding.lower().split(",")}
    return parts <= _encodings(mod) | {_IDENTITY}


class Passing:
    """One streamed answer.

    Args:
        call: The call that it answers.
        frames: How its events are written; None where nobody can read it: it is passed on as it
            is, and estimated.
        encoding: How it is compressed, where its client would decompress it.
        is_assumed: Its server says that it is something else: it may be no events.
    """

    def __init__(
        self, call: Call, frames: Frames | None, encoding: str, *, is_assumed: bool = False
    ) -> None:
        self.call = call
        self._frames: Frames = frames or ServerSentEvents()
        self._reader: Reader | None = None if frames is None else call.reader()
        self._encoding = encoding
        self._began = False
        self._is_assumed = is_assumed and type(frames) is ServerSentEvents

    def plain(self, mod: Any, inner: Any) -> Any:
        """Return a stream of the answer's bytes, decompressed as its client would have done it."""
        if not self._encoding:
            return inner
        packed = mod.Response(200, headers={"content-encoding": self._encoding}, stream=inner)
        return (
            packed.iter_bytes() if isinstance(inner, mod.SyncByteStream) else packed.aiter_bytes()
        )

    def feed(self, data: bytes) -> bytes:
        """Take bytes; return those that the reader gets."""
        reader, frames = self._reader, self._frames
        if self._is_assumed and data.strip():
            self._is_assumed = False
            if not may_be_events(data):
                reader = self._reader = None
        if reader is None:
            return data
        if frames.are_lines(data):
            if not reader.needs(data):
                # Nearly all of a long answer.
                self._began = True
                reader.skim(data)
                return data
            if data.count(b"\n") == 2:
                return self._taken(reader, data)
        return b"".join(map(self._passed, frames.feed(data)))

    def _passed(self, event: bytes) -> bytes:
        reader = self._reader
        if reader is None:
            return event
        if event.count(b"data:") < 2 and not reader.needs(event):  # else maybe spread over lines
            self._began = True
            reader.skim(event)
            return event
        return self._taken(reader, event)

    def _taken(self, reader: Reader, event: bytes) -> bytes:
        parsed = self._frames.parse(event)
        if parsed is None:
            return event
        name, data = parsed
        if data == "[DONE]":
            reader.end()
            self.call.over()
            return event
        self._began = True
        self.call.priced(data)
        is_hidden = reader.take(name, data)
        if reader.is_settled:
            # A client may stop reading here, and never close.
            self.call.over()
        return b"" if is_hidden else event

    def _written(self, events: Any) -> bytes:
        return b"".join(map(self._frames.write, events))

    def last(self) -> bytes:
        """Take the end of the stream; return what is left for the reader."""
        reader = self._reader
        rest = self._frames.rest()
        out = b""
        if reader is not None:
            if rest.strip():
                out += self._passed(rest)
            reader.end()
        self.call.over()
        return out

    def cut(self) -> bytes | None:
        """End the stream as its provider would have; None where nobody can.

        The run's time is over, or it was aborted.
        """
        call = self.call
        was_settled = call.is_settled
        call.failed("cut short")
        reader, posted = self._reader, call.posted
        if was_settled:
            return b""
        if reader is None or reader.has_calls or posted.protocol.form(posted.body) != "text":
            return None
        text = synthetic_text(call.run.guard)
        if not self._began:
            return self._written(
                posted.protocol.synthetic_stream(posted.body, posted.model or "", text, {})
            )
        return self._written(reader.closing(text))


def _passed(mod: Any, inner: Any, passing: Passing, flight: Flight) -> Iterator[bytes]:
    """Pass the bytes of a blocking stream on."""

    def cut(error: Exception | None) -> bytes:
        if not passing.call.is_settled and (error is None or flight.is_late()):
            end = passing.cut()
            if end is not None:
                return end
            raise mod.ReadTimeout("the run has ended") from error
        if error is None:
            return b""
        passing.call.failed(error)
        raise error

    try:
        for data in inner:
            if out := passing.feed(data):
                yield out
            if flight.trip is not None and not passing.call.is_settled:
                yield cut(None)
                return
        if out := passing.last():
            yield out
    except Exception as error:
        yield cut(error)
    finally:
        flight.close()
        passing.call.left()


class BlockingStream:
    """The streamed answer that a client reads, in a thread."""

    def __init__(self, mod: Any, inner: Any, passing: Passing, flight: Flight) -> None:
        self._inner = inner
        self._passing = passing
        self._flight = flight
        # One for all readers: newer SDKs read on after the end of the answer, to give the
        # connection back. It does not refer to this object, which would outlive its reader.
        self._passed = _passed(mod, passing.plain(mod, inner), passing, flight)

    def __iter__(self) -> Iterator[bytes]:
        return self._passed

    def close(self) -> None:
        self._flight.close()
        self._inner.close()
        self._passing.call.left()

    def __del__(self) -> None:
        # Never read, and never closed.
        self._flight.close()
        self._passing.call.left()


@functools.cache
def sync_stream(mod: Any) -> Any:
    """Return the class of a byte stream of httpx or httpx2 that passes an answer on."""
    return type("BudgetStream", (BlockingStream, mod.SyncByteStream), {})


class Reading:
    """The reads of one stream on an event loop, cut when the run ends.

    Args:
        call: The call that is answered.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._reader: asyncio.Task[Any] | None = None
        self._watch = Watch(call.run, self._interrupt)

    @property
    def was_cut(self) -> bool:
        """True if the run has ended before the answer."""
        return self._watch.trip is not None and not self._call.is_settled

    async def next(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        """Return the next bytes; None at the end, and when the run ends."""
        if self.was_cut:
            return None
        task = asyncio.current_task()
        earlier = 0 if task is None else task.cancelling()
        self._reader = task
        try:
            return await anext(chunks, None)
        except asyncio.CancelledError:
            if task is None or not self.was_cut or task.uncancel() > earlier:
                raise
            return None
        finally:
            self._reader = None

    def close(self) -> None:
        """Stop watching; safe to call again."""
        self._watch.close()

    def _interrupt(self) -> None:
        if self._reader is not None:
            self._reader.cancel()


async def _passed_async(
    mod: Any, inner: Any, passing: Passing, reading: Reading | None
) -> AsyncIterator[bytes]:
    """Pass the bytes of a stream on an event loop on."""
    chunks = aiter(inner)
    try:
        while True:
            data = await (anext(chunks, None) if reading is None else reading.next(chunks))
            if data is None:
                break
            if out := passing.feed(data):
                yield out
        if reading is not None and reading.was_cut:
            end = passing.cut()
            if end is None:
                raise mod.ReadTimeout("the run has ended")  # noqa: TRY301 - as any error of a read
            yield end
        elif out := passing.last():
            yield out
    except Exception as error:
        passing.call.failed(error)
        raise
    finally:
        if reading is not None:
            reading.close()
        passing.call.left()


class LoopStream:
    """The streamed answer that a client reads, on an event loop."""

    def __init__(self, mod: Any, inner: Any, passing: Passing) -> None:
        self._inner = inner
        self._passing = passing
        # An adapter above cuts its own calls.
        mine = passing.call.opened.above is None and _has_loop()
        self._reading = Reading(passing.call) if mine else None
        self._passed = _passed_async(mod, passing.plain(mod, inner), passing, self._reading)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._passed

    async def aclose(self) -> None:
        self._close()
        await self._inner.aclose()
        self._passing.call.left()

    def _close(self) -> None:
        if self._reading is not None:
            self._reading.close()

    def __del__(self) -> None:
        self._close()
        self._passing.call.left()


@functools.cache
def async_stream(mod: Any) -> Any:
    """Return the same for an event loop."""
    return type("AsyncBudgetStream", (LoopStream, mod.AsyncByteStream), {})


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
