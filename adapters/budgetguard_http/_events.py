"""The events of a stream of boto3's on their way: read, and ended in good order."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any, cast

from budgetguard_core.kit import synthetic_text
from budgetguard_http._call import Call
from budgetguard_http._flight import Flight
from budgetguard_http.protocols.protocol import Event, parsed, record


def read_timeout(path: str) -> Exception:
    """Return botocore's own error for an answer that did not come in time."""
    errors: Any = importlib.import_module("botocore.exceptions")  # it brings no types
    made: Exception = errors.ReadTimeoutError(endpoint_url=path, error="the run has ended")
    return made


class Plain:
    """Events as `converse_stream` has them: one record with the event's name as its only key."""

    def read(self, event: Any) -> Event | None:
        """Return name and data; None for what is no such event."""
        fields = record(event)
        if len(fields) != 1:
            return None
        ((name, data),) = fields.items()
        return (name, record(cast("Any", data))) if isinstance(data, dict) else None

    def write(self, event: Event) -> Any:
        """Return it as boto3 gives it."""
        name, data = event
        return {name: data}


class Wrapped:
    """Events as `invoke_model_with_response_stream` has them: JSON in bytes."""

    def read(self, event: Any) -> Event | None:
        """Return the type and the JSON; None for what holds none."""
        fields = parsed(record(record(event).get("chunk")).get("bytes") or b"")
        return None if fields is None else (str(fields.get("type") or ""), fields)

    def write(self, event: Event) -> Any:
        """Return it as boto3 gives it."""
        return {"chunk": {"bytes": json.dumps(event[1]).encode()}}


class BoundedEvents:
    """The streamed answer that a caller of boto3 reads.

    Args:
        inner: botocore's `EventStream`.
        call: The call that it answers.
        flight: Shuts the connection down when the run ends.
        form: How its events are written.
    """

    def __init__(self, inner: Any, call: Call, flight: Flight, form: Plain | Wrapped) -> None:
        self._inner = inner
        self._call = call
        self._flight = flight
        # It does not refer to this object, which would outlive its reader.
        self._passed = _passed(inner, call, flight, form)

    def __iter__(self) -> Iterator[Any]:
        return self._passed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        """Close the connection."""
        self._flight.close()
        self._inner.close()
        self._call.left()

    def __del__(self) -> None:
        # Never read to its end, and never closed.
        self._flight.close()
        self._call.left()


def _passed(inner: Any, call: Call, flight: Flight, form: Plain | Wrapped) -> Iterator[Any]:
    reader = call.reader()
    began = False

    def cut(error: Exception | None) -> list[Any]:
        if call.is_settled and error is None:
            return []
        if call.is_settled or not (error is None or flight.is_late()):
            call.failed(cast("Exception", error))
            raise cast("Exception", error)
        call.failed("cut short")
        posted, text = call.posted, synthetic_text(call.run.guard)
        if reader is None or reader.has_calls or posted.protocol.form(posted.body) != "text":
            raise read_timeout(posted.path) from error
        if began:
            return list(map(form.write, reader.closing(text)))
        made = posted.protocol.synthetic_stream(posted.body, posted.model or "", text, {})
        return list(map(form.write, made))

    try:
        for event in inner:
            read = None if reader is None else form.read(event)
            if reader is not None and read is not None:
                began = True
                call.priced(read[1])
                reader.take(*read)
                if reader.is_settled:
                    call.over()
            yield event
            if not call.is_settled and flight.is_late():
                yield from cut(None)
                return
        if not call.is_settled and flight.is_late():
            # The connection was shut down, which some releases of urllib3 take for the end.
            yield from cut(None)
            return
        if reader is not None:
            reader.end()
        call.over()
    except Exception as error:
        yield from cut(error)
    finally:
        flight.close()
        call.left()
