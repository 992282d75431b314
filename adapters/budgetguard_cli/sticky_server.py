"""A model that never changes its mind, over real HTTP on the loopback interface.

It speaks the OpenAI chat-completions format, whole and streamed, and answers everything with the
same tool call. That is the model behind real incidents: a tool result that should change the next
step, and does not.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self, cast

MODEL = "gpt-4o"
TOOL = "read_file"
ARGUMENTS = {"path": "deploy.log"}

_CHARACTERS_PER_TOKEN = 4
# An adapter that fails to stop its loop must fail, not hang.
_MOST_REQUESTS = 200
_LARGEST_BODY = 2**22


class StickyServer:
    """The server, running while its `with` block does.

    Args:
        thinks_s: Seconds before each answer, for people who watch.

    Attributes:
        base_url: What an OpenAI client takes as its base URL.
        requests: How many chat completions were asked for; counted here, by nobody else.
    """

    def __init__(self, *, thinks_s: float = 0.0) -> None:
        self.requests = 0
        self._thinks_s = thinks_s
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        server = self

        class Handler(_Handler):
            sticky = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self.base_url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def begin(self) -> None:
        """Begin another runaway: the count of `requests` starts at 0."""
        with self._lock:
            self.requests = 0

    def answer(self, size: int) -> dict[str, Any]:
        """Count a request of so many bytes, and answer it."""
        with self._lock:
            self.requests += 1
            number = self.requests
        self._stopping.wait(self._thinks_s)
        message: dict[str, Any]
        if number > _MOST_REQUESTS:
            message = {"role": "assistant", "content": "I give up: nobody stopped me."}
        else:
            call = {
                "id": f"call_{number:04}",
                "type": "function",
                "function": {"name": TOOL, "arguments": json.dumps(ARGUMENTS)},
            }
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        prompt = size // _CHARACTERS_PER_TOKEN + 1
        completion = len(json.dumps(message)) // _CHARACTERS_PER_TOKEN + 1
        return {
            "id": f"chatcmpl-{number:04}",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
                }
            ],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
        }


class _Handler(BaseHTTPRequestHandler):
    sticky: StickyServer
    protocol_version = "HTTP/1.1"
    # Head and body are two writes: the second would wait for the first to be acknowledged.
    disable_nagle_algorithm = True
    timeout = 30

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or int(size) > _LARGEST_BODY:
            self.close_connection = True
            self._send(413, b'{"error": {"message": "a body of at most 4 MiB, please"}}')
            return
        body = self.rfile.read(int(size))
        if self.path != "/v1/chat/completions":
            self._send(404, b'{"error": {"message": "only /v1/chat/completions"}}')
            return
        try:
            request = json.loads(body)
            stream = bool(request.get("stream"))
        except (ValueError, AttributeError):
            self._send(400, b'{"error": {"message": "not a JSON object"}}')
            return
        answer = self.sticky.answer(len(body))
        if stream:
            events = "".join(f"data: {chunk}\n\n" for chunk in _chunks(answer))
            self._send(200, events.encode(), "text/event-stream")
        else:
            self._send(200, json.dumps(answer).encode())

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is inherited
        """Keep quiet: the demonstration shows its own count."""


def _chunks(answer: dict[str, Any]) -> Iterator[str]:
    choice = answer["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": place, **call}
            for place, call in enumerate(cast("list[dict[str, Any]]", delta["tool_calls"]))
        ]
    common = {**answer, "object": "chat.completion.chunk", "usage": None}
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {"choices": [], "usage": answer["usage"]},
    ]
    for part in parts:
        yield json.dumps({**common, **part})
    yield "[DONE]"
