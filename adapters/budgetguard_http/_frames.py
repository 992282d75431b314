"""The events of a stream: cut out of its bytes, read and written."""

from __future__ import annotations

import base64
import importlib
import json
import re
import struct
import zlib
from typing import Any, ClassVar, Final

from budgetguard_http.protocols.fields import Event, parsed, record

_LONGEST_END: Final = 4
_CRC: Final = struct.Struct(">I")
_FRAME: Final = 16
_TEXT_HEADER: Final = 7
EVENT_STREAM: Final = "application/vnd.amazon.eventstream"
_UNNAMED: Final = frozenset({"", "text/plain", "application/octet-stream"})


class Frames:
    """The framing of one stream's events; by default that of `converse_stream`.

    That is one record with the event's name as its only key.
    """

    passes_all: ClassVar[bool] = True
    """No event is kept from the reader: what comes is passed on as it comes."""

    def feed(self, data: Any) -> list[Any]:
        """Take what has come; return the events that are whole."""
        return [data]

    def rest(self) -> Any:
        """Take out what has begun and is not whole."""
        return b""

    def parse(self, event: Any) -> Event | None:
        """Return name and data; None for what is no such event."""
        fields = record(event)
        name = next(iter(fields), "")
        return (name, record(fields[name])) if len(fields) == 1 else None

    def write(self, event: Event) -> Any:
        """Write an event."""
        return {event[0]: event[1]}


class Chunks(Frames):
    """The events of `invoke_model_with_response_stream`: JSON in bytes."""

    def parse(self, event: Any) -> Event | None:
        """Return the type and the JSON; None for what holds none."""
        fields = parsed(record(record(event).get("chunk")).get("bytes") or b"")
        return None if fields is None else (str(fields.get("type") or ""), fields)

    def write(self, event: Event) -> Any:
        """Write an event as boto3 gives it."""
        return {"chunk": {"bytes": json.dumps(event[1]).encode()}}


class ServerSentEvents(Frames):
    """`text/event-stream`."""

    passes_all = False
    ends: ClassVar[re.Pattern[bytes]] = re.compile(rb"\n\n|\r\n\r\n|\r\r")

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Cut after each empty line; a long event, which comes in many pieces, is searched once."""
        known = max(len(self._rest) - _LONGEST_END, 0)
        self._rest += data
        events: list[bytes] = []
        begin = 0
        for end in [found.end() for found in self.ends.finditer(self._rest, known)]:
            events.append(bytes(self._rest[begin:end]))
            begin = end
        del self._rest[:begin]
        return events

    def rest(self) -> bytes:
        """Return what no empty line has ended yet."""
        return bytes(self._rest)

    def parse(self, event: bytes) -> Event | None:
        """Join the data lines of an event."""
        name, data = "", b""
        for line in event.splitlines():
            if line.startswith(b"data:"):
                data += line[5:].strip()
            elif line.startswith(b"event:"):
                name = line[6:].strip().decode("utf-8", "replace")
        if data == b"[DONE]":
            return "", "[DONE]"
        body = parsed(data)
        return None if body is None else (name, body)

    def write(self, event: Event) -> bytes:
        """Write name and data."""
        name, data = event
        text = data if isinstance(data, str) else json.dumps(data)
        head = f"event: {name}\n" if name else ""
        return f"{head}data: {text}\n\n".encode()


class Lines(ServerSentEvents):
    """`application/x-ndjson`, of Ollama: an event is a line."""

    ends = re.compile(rb"\n")

    def parse(self, event: bytes) -> Event | None:
        """Return a line's JSON."""
        body = parsed(event)
        return None if body is None else ("", body)

    def write(self, event: Event) -> bytes:
        """Write a line."""
        return json.dumps(event[1]).encode() + b"\n"


class EventStream(Frames):
    """`application/vnd.amazon.eventstream`, of Bedrock; read by botocore, as its clients do.

    Args:
        wrapped: The JSON of an event is Base64 in the field `bytes`, as `invoke` has it.
    """

    def __init__(self, *, wrapped: bool) -> None:
        self._wrapped = wrapped
        self._buffer: Any = None

    def feed(self, data: bytes) -> list[Any]:
        """Return botocore's messages."""
        if self._buffer is None:
            read: Any = importlib.import_module("botocore.eventstream")  # it brings no types
            self._buffer = read.EventStreamBuffer()
        self._buffer.add_data(data)
        return [*self._buffer]

    def parse(self, event: Any) -> Event | None:
        """Return the event's type and its JSON."""
        body = parsed(event.payload)
        if body is not None and self._wrapped:
            body = parsed(base64.b64decode(body.get("bytes") or b""))
        return None if body is None else (event.headers.get(":event-type", ""), body)

    def write(self, event: Event) -> bytes:
        """Write a frame."""
        name, data = event
        text = json.dumps(data).encode()
        if self._wrapped:
            name, text = "chunk", json.dumps({"bytes": base64.b64encode(text).decode()}).encode()
        headers = _text_header(":event-type", name)
        headers += _text_header(":content-type", "application/json")
        headers += _text_header(":message-type", "event")
        prelude = struct.pack(">II", _FRAME + len(headers) + len(text), len(headers))
        frame = prelude + _CRC.pack(zlib.crc32(prelude)) + headers + text
        return frame + _CRC.pack(zlib.crc32(frame))


def _text_header(name: str, value: str) -> bytes:
    key, text = name.encode(), value.encode()
    return struct.pack(">B", len(key)) + key + struct.pack(">BH", _TEXT_HEADER, len(text)) + text


def frames_at(path: str) -> tuple[Frames, str]:
    """Return how the stream of an address is written, and the type of its content."""
    if path.endswith(("/converse-stream", "response-stream")):
        return EventStream(wrapped=path.endswith("response-stream")), EVENT_STREAM
    if path.endswith(("/api/chat", "/api/generate")):
        return Lines(), "application/x-ndjson"
    return ServerSentEvents(), "text/event-stream"


def frames_of(content_type: str, path: str, *, is_requested: bool) -> Frames | None:
    """Return how a stream is written, even if its server calls it nothing; None: no stream."""
    kind = content_type.partition(";")[0].strip()
    frames, own = frames_at(path)
    if kind == own or (is_requested and kind in _UNNAMED):
        return frames
    return ServerSentEvents() if kind == "text/event-stream" else None
