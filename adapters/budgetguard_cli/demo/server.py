"""A model that never changes its mind, over real HTTP on the loopback interface.

It speaks the OpenAI chat-completions format, whole and streamed, and answers everything with the
same tool call. That is the model behind real incidents: a tool result that should change the next
step, and does not.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

MODEL = "gpt-4o"
ARGUMENTS = {"path": "deploy.log"}

_CHARACTERS_PER_TOKEN = 4
# An adapter that fails to stop its loop must fail, not hang.
_MOST_REQUESTS = 200


class StickyServer:
    """The server, running while its `with` block does.

    Attributes:
        base_url: What an OpenAI client takes as its base URL.
        requests: How many chat completions were requested; counted here, by nobody else.
    """

    def __init__(self) -> None:
        self.requests = 0
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"sticky": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self.base_url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, size: int) -> dict[str, Any]:
        """Count a request of so many bytes, and answer it."""
        with self._lock:
            self.requests += 1
            number = self.requests
        message: dict[str, Any] = {"role": "assistant", "content": None}
        if number > _MOST_REQUESTS:
            message["content"] = "I give up: nobody stopped me."
        else:
            function = {"name": "read_file", "arguments": json.dumps(ARGUMENTS)}
            call = {"id": f"call_{number:04}", "type": "function", "function": function}
            message["tool_calls"] = [call]
        prompt = size // _CHARACTERS_PER_TOKEN + 1
        completion = len(json.dumps(message)) // _CHARACTERS_PER_TOKEN + 1
        reason = "tool_calls" if "tool_calls" in message else "stop"
        return {
            "id": f"chatcmpl-{number:04}",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
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
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.sticky.answer(len(body))
        kind = "application/json"
        text = json.dumps(answer)
        if json.loads(body).get("stream"):
            kind = "text/event-stream"
            text = "".join(f"data: {chunk}\n\n" for chunk in (*_chunks(answer), "[DONE]"))
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is inherited
        """Write nothing: the demonstration shows its own count."""


def _chunks(answer: dict[str, Any]) -> list[str]:
    """Return an answer as the events of a stream."""
    choice = answer["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": 0, **delta["tool_calls"][0]}]
    common = {**answer, "object": "chat.completion.chunk", "usage": None}
    ends: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [ends]},
        {"choices": [], "usage": answer["usage"]},
    ]
    return [json.dumps({**common, **part}) for part in parts]
