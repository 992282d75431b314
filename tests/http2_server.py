"""A provider that speaks HTTP/2 alone, in clear text, and counts its requests and connections."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import h2.config
import h2.connection
import h2.events

from provider_server import _chat, _sse


class Http2Server:
    """Answers chat completions, whole and streamed; each stream is answered when it is asked.

    Args:
        together: Answers begin when so many requests are open at the same time.

    Attributes:
        hits: Requests so far.
        connections: Connections so far.
        most_at_once: The most streams of one connection that were open at the same time.
    """

    def __init__(self, *, together=1):
        self.together = together
        self.hits = self.connections = self.most_at_once = 0
        self._sockets = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error):
        self._listener.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._sockets.append(connection)
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, raw):
        config = h2.config.H2Configuration(client_side=False)
        http, bodies, waiting = h2.connection.H2Connection(config), {}, []
        http.initiate_connection()
        with raw, contextlib.suppress(OSError):
            raw.sendall(http.data_to_send())
            while data := raw.recv(65_536):
                for event in http.receive_data(data):
                    if isinstance(event, h2.events.RequestReceived):
                        bodies[event.stream_id] = b""
                        self.most_at_once = max(self.most_at_once, len(bodies))
                    elif isinstance(event, h2.events.DataReceived):
                        bodies[event.stream_id] += event.data
                        size = event.flow_controlled_length
                        http.acknowledge_received_data(size, event.stream_id)
                    elif isinstance(event, h2.events.StreamEnded):
                        waiting.append(event.stream_id)
                if len(waiting) >= self.together:
                    for stream in waiting:
                        self._answer(http, stream, json.loads(bodies.pop(stream)))
                    waiting.clear()
                raw.sendall(http.data_to_send())

    def _answer(self, http, stream, body):
        with self._lock:
            self.hits += 1
            whole, events = _chat(body, self.hits, 1, "All done.")
        kind = "text/event-stream" if body.get("stream") else "application/json"
        http.send_headers(stream, [(":status", "200"), ("content-type", kind)])
        pieces = map(_sse, events) if body.get("stream") else [json.dumps(whole).encode()]
        for piece in pieces:
            http.send_data(stream, piece)
        http.end_stream(stream)
