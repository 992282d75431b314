"""The bytes of a stream: server-sent events and AWS's event stream, cut into events and written."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from budgetguard_http.protocols.protocol import Event, parsed

_END: Final = re.compile(rb"\n\n|\r\n\r\n|\r\r")
# Of data, event, id, retry, a comment, and the mark of an order of bytes.
_BEGINNINGS: Final = frozenset({b"d", b"e", b"i", b"r", b":", b"\xef"})
_LONGEST_END: Final = 4
_PRELUDE: Final = struct.Struct(">III")
_CRC: Final = struct.Struct(">I")
_SMALLEST_FRAME: Final = 16
_TEXT_HEADER: Final = 7
# The bytes of a header's value by its type: two booleans, byte, short, integer, long; a length and
# bytes or text; a time and a UUID.
_HEADER_SIZES: Final = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}


class ServerSentEvents:
    """`text/event-stream`."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self._tail = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Cut after each empty line; a long event, which comes in many pieces, is searched once."""
        if self._waiting:
            edge = self._tail + data
            if _END.search(edge) is None:
                self._waiting.append(data)
                self._tail = edge[-_LONGEST_END:]
                return []
            data = self.rest() + data
        if data.endswith(b"\n\n") and data.count(b"\n\n") == 1 and b"\r" not in data:
            return [data]  # as most servers send them
        events, rest = self.split(data)
        if rest:
            self._waiting, self._tail = [rest], rest[-_LONGEST_END:]
        return events

    def are_lines(self, data: bytes) -> bool:
        """Judge by the ends of lines: none stands alone."""
        return (
            not self._waiting
            and data[-2:] == b"\n\n"
            and b"\r" not in data
            and data.count(b"\n") == 2 * data.count(b"\n\n")
        )

    def rest(self) -> bytes:
        """Take out what no empty line has ended yet."""
        rest, self._waiting = b"".join(self._waiting), []
        return rest

    def split(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Cut after each empty line."""
        events: list[bytes] = []
        begin = 0
        for found in _END.finditer(data):
            end = found.end()
            events.append(data[begin:end])
            begin = end
        return events, data[begin:]

    def parse(self, event: bytes) -> Event | None:
        """Join the data lines of an event."""
        name, data = "", b""
        for line in event.splitlines():
            if line.startswith(b"data:"):
                data += line[5:].strip()
            elif line.startswith(b"event:"):
                name = line[6:].strip().decode("utf-8", "replace")
        if not data or data == b"[DONE]":
            return ("", "[DONE]") if data else None
        body = parsed(data)
        return None if body is None else (name, body)

    def write(self, event: Event) -> bytes:
        """Write name and data."""
        name, data = event
        text = data if isinstance(data, str) else json.dumps(data)
        head = f"event: {name}\n" if name else ""
        return f"{head}data: {text}\n\n".encode()


class EventStream:
    """`application/vnd.amazon.eventstream`, of Bedrock.

    Args:
        wrapped: The JSON of an event is Base64 in the field `bytes`, as `invoke` has it.
    """

    def __init__(self, *, wrapped: bool) -> None:
        self._wrapped = wrapped
        self._waiting: list[bytes] = []
        self._size = 0
        self._needed = _SMALLEST_FRAME

    def feed(self, data: bytes) -> list[bytes]:
        """Cut where the frame that has begun is whole."""
        self._waiting.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return []
        events, rest = self.split(self.rest())
        self._waiting, self._size = [rest], len(rest)
        if len(rest) >= _SMALLEST_FRAME:
            self._needed = max(_PRELUDE.unpack_from(rest)[0], _SMALLEST_FRAME)
        return events

    def are_lines(self, data: bytes) -> bool:
        """Return False: its messages are no lines."""
        del data
        return False

    def rest(self) -> bytes:
        """Take out what is left of a frame."""
        rest = b"".join(self._waiting)
        self._waiting, self._size, self._needed = [], 0, _SMALLEST_FRAME
        return rest

    def split(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Cut by the lengths that the frames begin with."""
        events: list[bytes] = []
        while len(data) >= _SMALLEST_FRAME:
            length = _PRELUDE.unpack_from(data)[0]
            if length < _SMALLEST_FRAME or len(data) < length:
                break
            events.append(data[:length])
            data = data[length:]
        return events, data

    def parse(self, event: bytes) -> Event | None:
        """Return the event's type and its JSON."""
        length, headers_length, _ = _PRELUDE.unpack_from(event)
        headers = _read_headers(event[12 : 12 + headers_length])
        payload = event[12 + headers_length : length - 4]
        body = parsed(payload)
        if body is not None and self._wrapped:
            try:
                body = parsed(base64.b64decode(body.get("bytes") or b""))
            except ValueError:
                return None
        return None if body is None else (headers.get(":event-type", ""), body)

    def write(self, event: Event) -> bytes:
        """Write a frame."""
        name, data = event
        text = json.dumps(data).encode()
        if self._wrapped:
            name, text = "chunk", json.dumps({"bytes": base64.b64encode(text).decode()}).encode()
        headers = b"".join(
            _text_header(key, value)
            for key, value in (
                (":event-type", name),
                (":content-type", "application/json"),
                (":message-type", "event"),
            )
        )
        length = _SMALLEST_FRAME + len(headers) + len(text)
        prelude = struct.pack(">II", length, len(headers))
        prelude += _CRC.pack(zlib.crc32(prelude))
        frame = prelude + headers + text
        return frame + _CRC.pack(zlib.crc32(frame))


class Lines(ServerSentEvents):
    """`application/x-ndjson`, of Ollama: an event is a line."""

    def feed(self, data: bytes) -> list[bytes]:
        """Cut after each line."""
        *lines, rest = (self.rest() + data).split(b"\n")
        self._waiting = [rest] if rest else []
        return [line + b"\n" for line in lines]

    def are_lines(self, data: bytes) -> bool:
        """Return False: none is read together with others."""
        del data
        return False

    def parse(self, event: bytes) -> Event | None:
        """Return a line's JSON."""
        body = parsed(event)
        return None if body is None else ("", body)

    def write(self, event: Event) -> bytes:
        """Write a line."""
        return json.dumps(event[1]).encode() + b"\n"


Frames: TypeAlias = ServerSentEvents | EventStream
"""How the events of one stream are written as bytes."""
LINES: Final = "application/x-ndjson"
EVENT_STREAM: Final = "application/vnd.amazon.eventstream"


def event_stream_at(path: str) -> EventStream | None:
    """Return how the stream of one of Bedrock's addresses is written; None for another's."""
    if path.endswith("/converse-stream"):
        return EventStream(wrapped=False)
    return EventStream(wrapped=True) if path.endswith("response-stream") else None


def frames_at(path: str) -> tuple[Frames, str]:
    """Return how the stream of an address is written, and the type of its content."""
    frames = event_stream_at(path)
    if frames is not None:
        return frames, EVENT_STREAM
    if path.endswith(("/api/chat", "/api/generate")):
        return Lines(), LINES
    return ServerSentEvents(), "text/event-stream"


def may_be_events(data: bytes) -> bool:
    """Return whether a text may be of events, by its first character: a field, or a comment."""
    return data.lstrip()[:1] in _BEGINNINGS


def frames_of(content_type: str, path: str, *, is_asked_for: bool) -> Frames | None:
    """Return how a stream is written; None for what is no stream.

    Args:
        content_type: What its server says that it is.
        path: Where it was asked for.
        is_asked_for: The request wants a stream. Clients read one, whatever its server says.
    """
    if content_type.startswith(EVENT_STREAM):
        return event_stream_at(path) or EventStream(wrapped=True)
    if content_type.startswith("text/event-stream"):
        return ServerSentEvents()
    return frames_at(path)[0] if is_asked_for else None


def _text_header(name: str, value: str) -> bytes:
    key, text = name.encode(), value.encode()
    return struct.pack(">B", len(key)) + key + struct.pack(">BH", _TEXT_HEADER, len(text)) + text


def _read_headers(data: bytes) -> Mapping[str, str]:
    found: dict[str, Any] = {}
    at = 0
    while at < len(data):
        size = data[at]
        name = data[at + 1 : at + 1 + size].decode("utf-8", "replace")
        at += 1 + size
        kind = data[at]
        at += 1
        if kind in _HEADER_SIZES:
            at += _HEADER_SIZES[kind]
            continue
        length = int.from_bytes(data[at : at + 2], "big")
        if kind == _TEXT_HEADER:
            found[name] = data[at + 2 : at + 2 + length].decode("utf-8", "replace")
        at += 2 + length
    return found
