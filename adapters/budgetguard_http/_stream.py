"""A streamed answer on its way: read, and ended in good order when cut."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from typing import Any

from budgetguard_core.kit import Scope, synthetic_text
from budgetguard_http._call import Call
from budgetguard_http._flight import Flight
from budgetguard_http._frames import Frames


class Passing:
    """One streamed answer.

    Args:
        call: The call that it answers.
        frames: How its events are written; None: nobody can read it, it passes and is estimated.
        timed_out: Makes the client's own error for an answer that did not come in time.
    """

    def __init__(
        self, call: Call, frames: Frames | None, timed_out: Callable[[], Exception]
    ) -> None:
        self.call = call
        self._frames = frames or Frames()
        self._reader = None if frames is None else call.answer
        self._began = False
        self._timed_out = timed_out

    def feed(self, data: Any) -> list[Any]:
        """Take what has come; return what of it the client gets."""
        reader, frames = self._reader, self._frames
        if reader is None:
            return [data]
        kept = [event for event in frames.feed(data) if not self._take(event)]
        return [data] if frames.passes_all else kept

    def _take(self, event: Any) -> bool | None:
        """Take an event; True where its client does not get it."""
        reader, frames = self._reader, self._frames
        if reader is None:
            return False
        read = frames.parse(event)
        if read is None:
            return False
        name, data = read
        if data == "[DONE]":
            self.call.over()
            return False
        self._began = True
        self.call.priced(data)
        is_hidden = reader.take(name, data)
        if reader.is_settled:
            # A client may stop reading here, and never close.
            self.call.over()
        return is_hidden

    def last(self) -> list[Any]:
        """Take the end of the stream; return what is left for the client."""
        rest = self._frames.rest()
        is_hidden = self._take(rest) if rest.strip() else None
        self.call.over()
        return [rest] if rest and not (is_hidden or self._frames.passes_all) else []

    def cut(self, error: Exception | None = None) -> list[Any]:
        """Return the events that end the stream as its provider would have.

        The run's time is over, or it was aborted.

        Raises:
            Exception: The client's own time-out, where there is no good end.
        """
        call = self.call
        was_settled = call.is_settled
        call.failed("cut short")
        reader, payload = self._reader, call.payload
        if was_settled:
            return []
        events, is_text = None, payload.protocol.form(payload.body) == "text"
        if reader is not None and not reader.has_calls and is_text:
            text, model = synthetic_text(call.run.guard), payload.model or ""
            events = payload.protocol.synthetic_stream(payload.body, model, text, {})
            if self._began:
                events = reader.closing(text)
        if events is None:
            raise self._timed_out() from error
        return [self._frames.write(event) for event in events]


def passed(inner: Any, passing: Passing, flight: Flight) -> Iterator[Any]:
    """Pass a blocking stream on."""
    call = passing.call
    try:
        for data in inner:
            yield from passing.feed(data)
            if flight.trip is not None and not call.is_settled:
                break
        # A connection that was shut down is taken for the end by some.
        is_late = not call.is_settled and flight.is_late()
        yield from passing.cut() if is_late else passing.last()
    except Exception as error:
        if call.is_settled or not flight.is_late():
            call.failed(error)
            raise
        yield from passing.cut(error)
    finally:
        flight.close()
        call.cancelled()


async def passed_async(inner: Any, passing: Passing, scope: Scope | None) -> AsyncIterator[Any]:
    """Pass a stream on an event loop on; the scope cuts a read when the run ends."""
    chunks, call = aiter(inner), passing.call
    try:
        while True:
            data = None
            with nullcontext() if scope is None or call.is_settled else scope:
                data = await anext(chunks, None)
            if data is None:
                break
            for piece in passing.feed(data):
                yield piece
        is_cut = scope is not None and scope.trip is not None and not call.is_settled
        for piece in passing.cut() if is_cut else passing.last():
            yield piece
    except Exception as error:
        call.failed(error)
        raise
    finally:
        if scope is not None:
            scope.close()
        call.cancelled()


class Stream:
    """The streamed answer that a client reads.

    Args:
        inner: The stream that it passes on.
        call: The call that is answered.
        watch: Ends the wait when the run ends.
        chunks: The generator that passes it on: one for all readers, as newer SDKs read on after
            the answer. It does not refer to this object, which would outlive its reader.
    """

    def __init__(self, inner: Any, call: Call, watch: Flight | Scope | None, chunks: Any) -> None:
        self._inner = inner
        self._call = call
        self._watch = watch
        self._chunks = chunks

    def __iter__(self) -> Any:
        return self._chunks

    def __aiter__(self) -> Any:
        return self._chunks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        """Close the connection."""
        self._stop()
        self._inner.close()

    async def aclose(self) -> None:
        """Close the connection of an event loop's."""
        self._stop()
        await self._inner.aclose()

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._call.cancelled()

    def __del__(self) -> None:
        # Never read, and never closed.
        self._stop()


@functools.cache
def stream_of(mod: Any) -> Any:
    """Return the class of a byte stream of httpx or httpx2 that passes an answer on."""
    return type("BudgetStream", (Stream, mod.SyncByteStream, mod.AsyncByteStream), {})
