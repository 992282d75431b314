"""A provider on loopback that counts, follows a script, and refuses what the real ones refuse.

It speaks chat completions, Responses, Anthropic's messages, Gemini, Bedrock's Converse and
embeddings. Its model asks for the first tool of the request for ever, if there is one. Each answer
reports 100 tokens of prompt, 20 of them cached, and 10 of completion, 3 of them reasoning.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from budgetguard_http._frames import EventStream

ARGUMENTS = {"path": "deploy.log"}
DONE = "All done."
TOKENS = 110
_CHAT_USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 10,
    "total_tokens": TOKENS,
    "prompt_tokens_details": {"cached_tokens": 20},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


class ProviderServer:
    """The server.

    Args:
        script: What becomes of each POST, in order; "ok" after the last: a status, "drop" (the
            connection ends without an answer), "cut" (it ends in the middle), "end" (so it does in
            good order), "hang" (no answer), "hang_mid" (none after the first events). The three in
            the middle also with the number of events before, as `("cut", 5)`.
        calls: Tool calls in each answer that asks for tools.
        turns: Answers that ask for tools, before the final one; None for every one.
        encoding: "gzip" for compressed answers.
        wait: The Retry-After of an answer by a status; about nothing if left out.

    Attributes:
        posts: Every POST: path, headers, body and what was answered.
    """

    def __init__(self, script=(), *, calls=1, turns=None, encoding=None, text=DONE, wait=None):
        self.script, self.calls, self.turns, self.encoding = list(script), calls, turns, encoding
        self.text, self.wait = text, wait
        self.barrier = None
        self.posts = []
        self.connections = set()
        self.asked = threading.Event()
        self.hung = threading.Event()
        self.released = threading.Event()
        self.lock = threading.Lock()
        handler = type("Bound", (_Handler,), {"server_": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler, bind_and_activate=False)
        self._http.request_queue_size = 512
        self._http.daemon_threads = True
        self._http.server_bind()
        self._http.server_activate()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def hits(self):
        return len(self.posts)

    @property
    def answered(self):
        return sum(post["status"] == 200 for post in self.posts)

    def once_hung(self, act):
        """Call back, in a thread of its own, when an answer has begun to hang."""

        def wait():
            if self.hung.wait(60):
                act()

        threading.Thread(target=wait, daemon=True).start()

    def __enter__(self):
        serve = self._http.serve_forever
        threading.Thread(target=serve, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.released.set()
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are two writes: the second would wait for the first to be acknowledged.
    disable_nagle_algorithm = True
    server_ = None

    def log_message(self, *args):
        pass

    def handle(self):
        self.server_.connections.add(self.client_address)
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle()

    def do_GET(self):
        self._send(200, b'{"object": "list", "data": []}')

    def do_POST(self):
        raw = self._read()
        server = self.server_
        path = self.path.split("?")[0]
        try:
            body = json.loads(raw)
        except ValueError:
            body = {}
        headers = dict(self.headers)
        post = {"path": path, "headers": headers, "body": body, "raw": raw, "status": 0}
        with server.lock:
            server.posts.append(post)
            number = len(server.posts)
            step = server.script.pop(0) if server.script else "ok"
        server.asked.set()
        if server.barrier is not None:
            server.barrier.wait(10)
        if path.startswith("/redirect"):
            post["status"] = 307
            self.send_response(307)
            self.send_header("location", server.url + path.removeprefix("/redirect"))
            self.send_header("content-length", "0")
            self.end_headers()
            return
        if step == "hang":
            server.hung.set()
            server.released.wait(60)
            self.close_connection = True
            return
        if step == "drop":
            self._drop()
            return
        if isinstance(step, int):
            post["status"] = step
            error = {"message": "scripted", "type": "scripted"}
            self._send(step, json.dumps({"type": "error", "error": error}).encode())
            return
        problem = _problem(path, body)
        if problem is not None:
            post["status"] = 400
            self._send(400, json.dumps({"error": {"message": problem}}).encode())
            return
        post["status"] = 200
        self._answer(path, body, number, step)

    def _read(self):
        if self.headers.get("transfer-encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        raw = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            raw += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return raw

    def _answer(self, path, body, number, step):
        server = self.server_
        asks = server.turns is None or number <= server.turns
        calls = server.calls if asks else 0
        if path.endswith("/chat/completions"):
            whole, events = _chat(body, number, calls, server.text)
            stream = body.get("stream")
        elif path.endswith("/responses"):
            whole, events = _responses(body, number, calls, server.text)
            stream = body.get("stream")
        elif path.endswith(("/messages", "/invoke", "awPredict", "response-stream")):
            whole, events = _messages(body, number, calls, server.text)
            stream = body.get("stream") or path.endswith(("streamRawPredict", "response-stream"))
        elif path.endswith("enerateContent"):
            whole, events = _gemini(body, number, calls, server.text)
            stream = "stream" in path.rpartition(":")[2]
        elif path.endswith(("/converse", "/converse-stream")):
            whole, events = _converse(body, number, calls, server.text)
            stream = path.endswith("stream")
        elif path.endswith("/embeddings"):
            one = {"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}
            usage = {"prompt_tokens": 5, "total_tokens": 5}
            whole = {"object": "list", "model": body["model"], "data": [one], "usage": usage}
            events, stream = [], False
        else:
            whole, events, stream = {"object": "job", "id": "job_1"}, [], False
        if not stream:
            self._send(200, json.dumps(whole).encode())
            return
        if path.endswith(("response-stream", "converse-stream")):
            frames = EventStream(wrapped=path.endswith("response-stream"))
            pieces = [frames.write(event) for event in events]
            self._stream(pieces, step, "application/vnd.amazon.eventstream")
        else:
            self._stream([_sse(event) for event in events], step, "text/event-stream")

    def _send(self, status, body):
        self.send_response(status)
        self.send_header("content-type", "application/json")
        if status != 200 and self.server_.wait is not None:
            self.send_header("retry-after", self.server_.wait)
        elif status != 200:
            self.send_header("retry-after-ms", "1")
            self.send_header("retry-after", "0")
        elif self.server_.encoding == "gzip":
            body = gzip.compress(body)
            self.send_header("content-encoding", "gzip")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, pieces, step, content_type):
        packer = zlib.compressobj(wbits=31) if self.server_.encoding == "gzip" else None
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.send_header("transfer-encoding", "chunked")
        if packer:
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        how, last = step if isinstance(step, tuple) else (step, 3)
        for place, piece in enumerate(pieces):
            if how == "hang_mid" and place == last:
                self.server_.hung.set()
                self.server_.released.wait(60)
                self.close_connection = True
                return
            if how == "cut" and place == last:
                self._drop()
                return
            if how == "end" and place == last:
                break
            self._chunk(
                packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH) if packer else piece
            )
        if packer:
            self._chunk(packer.flush())
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data):
        if data:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    def _drop(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def _sse(event):
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def _problem(path, body):
    """Refuse calls without results, as the real ones do."""
    if path.endswith("/chat/completions"):
        waiting = set()
        for message in body.get("messages", ()):
            if waiting and message["role"] != "tool":
                return f"no result for {sorted(waiting)}"
            if message["role"] == "tool":
                if message["tool_call_id"] not in waiting:
                    return f"no call {message['tool_call_id']}"
                waiting.discard(message["tool_call_id"])
            waiting |= {call["id"] for call in message.get("tool_calls") or ()}
        return f"no result for {sorted(waiting)}" if waiting else None
    if path.endswith("/messages") and not body.get("thread"):
        waiting = set()
        for message in body.get("messages", ()):
            blocks = message["content"] if isinstance(message["content"], list) else []
            results = {one["tool_use_id"] for one in blocks if one["type"] == "tool_result"}
            if waiting != results:
                return f"calls {sorted(waiting)}, results {sorted(results)}"
            waiting = {one["id"] for one in blocks if one["type"] == "tool_use"}
    return None


def _chat(body, number, calls, text):
    tools = body.get("tools")
    model = body.get("model", "gpt-4o")
    base = {"id": f"chatcmpl-{number}", "created": 1, "model": model}
    asked = []
    if tools:
        name = tools[0]["function"]["name"]
        function = {"name": name, "arguments": json.dumps(ARGUMENTS)}
        asked = [
            {"id": f"call_{number}_{n}", "type": "function", "function": function}
            for n in range(calls)
        ]
    form = (body.get("response_format") or {}).get("type")
    said = '{"x": 1}' if form == "json_schema" else text
    message = {"role": "assistant", "content": None if asked else said, "refusal": None}
    if asked:
        message["tool_calls"] = asked
    finish = "tool_calls" if asked else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    whole = {**base, "object": "chat.completion", "choices": [choice], "usage": _CHAT_USAGE}

    def chunk(delta, finish=None):
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
        return "", {**base, "object": "chat.completion.chunk", "choices": choices}

    events = [chunk({"role": "assistant", "content": None if asked else ""})]
    for place, call in enumerate(asked):
        head = {"name": call["function"]["name"], "arguments": ""}
        start = {"index": place, "id": call["id"], "type": "function", "function": head}
        arguments = call["function"]["arguments"]
        if "mistral" in model:
            start["function"] = {**head, "arguments": arguments}
            events.append(chunk({"tool_calls": [start]}))
            continue
        events.append(chunk({"tool_calls": [start]}))
        for piece in (arguments[:5], arguments[5:]):
            part = {"index": place, "function": {"arguments": piece}}
            events.append(chunk({"tool_calls": [part]}))
    if not asked:
        events += [chunk({"content": piece}) for piece in (said[:3], said[3:])]
    events.append(chunk({}, finish))
    if (body.get("stream_options") or {}).get("include_usage") or "mistral" in model:
        usage = {**base, "object": "chat.completion.chunk", "choices": [], "usage": _CHAT_USAGE}
        events.append(("", usage))
    return whole, [*events, ("", "[DONE]")]


def _responses(body, number, calls, text):
    tools = body.get("tools")
    if tools and calls:
        output = [
            {
                "type": "function_call",
                "id": f"fc_{number}_{n}",
                "call_id": f"call_{number}_{n}",
                "name": tools[0]["name"],
                "arguments": json.dumps(ARGUMENTS),
                "status": "completed",
            }
            for n in range(calls)
        ]
    else:
        part = {"type": "output_text", "text": text, "annotations": []}
        message = {"type": "message", "id": f"msg_{number}", "role": "assistant"}
        output = [{**message, "status": "completed", "content": [part]}]
    whole = {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": body.get("model", "gpt-4o"),
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "temperature": 1.0,
        "top_p": 1.0,
        "usage": {
            "input_tokens": 100,
            "input_tokens_details": {"cached_tokens": 20},
            "output_tokens": 10,
            "output_tokens_details": {"reasoning_tokens": 3},
            "total_tokens": TOKENS,
        },
    }
    events = []

    def add(kind, **data):
        events.append((kind, {"type": kind, "sequence_number": len(events), **data}))

    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    add("response.created", response=begun)
    for place, item in enumerate(output):
        if item["type"] == "function_call":
            at = {"item_id": item["id"], "output_index": place}
            empty = {**item, "status": "in_progress", "arguments": ""}
            add("response.output_item.added", output_index=place, item=empty)
            add("response.function_call_arguments.delta", delta=item["arguments"], **at)
            done = {"arguments": item["arguments"], "name": item["name"]}
            add("response.function_call_arguments.done", **done, **at)
        else:
            at = {"item_id": item["id"], "output_index": place, "content_index": 0}
            empty = {**item, "status": "in_progress", "content": []}
            add("response.output_item.added", output_index=place, item=empty)
            add("response.content_part.added", part={**item["content"][0], "text": ""}, **at)
            add("response.output_text.delta", delta=text, logprobs=[], **at)
            add("response.output_text.done", text=text, logprobs=[], **at)
            add("response.content_part.done", part=item["content"][0], **at)
        add("response.output_item.done", output_index=place, item=item)
    add("response.completed", response=whole)
    return whole, events


def _messages(body, number, calls, text):
    tools = body.get("tools") or (body.get("thread") and [{"name": "read_file"}])
    if tools and calls:
        content = [
            {
                "type": "tool_use",
                "id": f"toolu_{number}_{n}",
                "name": tools[0]["name"],
                "input": ARGUMENTS,
            }
            for n in range(calls)
        ]
    else:
        content = [{"type": "text", "text": text}]
    asks = content[0]["type"] == "tool_use"
    usage = {"input_tokens": 80, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 0}
    whole = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model", "claude-sonnet-5"),
        "content": content,
        "stop_reason": "tool_use" if asks else "end_turn",
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 10},
    }
    events = []

    def add(kind, **data):
        events.append((kind, {"type": kind, **data}))

    begun = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    add("message_start", message=begun)
    for place, block in enumerate(content):
        if asks:
            add("content_block_start", index=place, content_block={**block, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": json.dumps(ARGUMENTS)}
            add("content_block_delta", index=place, delta=delta)
        else:
            add("content_block_start", index=place, content_block={"type": "text", "text": ""})
            for piece in (text[:3], text[3:]):
                delta = {"type": "text_delta", "text": piece}
                add("content_block_delta", index=place, delta=delta)
        add("content_block_stop", index=place)
    delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    add("message_delta", delta=delta, usage={"output_tokens": 10})
    add("message_stop")
    return whole, events


def _gemini(body, number, calls, text):
    tools = body.get("tools")
    if tools and calls:
        declared = tools[0].get("functionDeclarations") or tools[0].get("function_declarations")
        call = {"functionCall": {"name": declared[0]["name"], "args": ARGUMENTS}}
        parts = [call] * calls
    else:
        parts = [{"text": text}]
    content = {"role": "model", "parts": parts}
    whole = {
        "candidates": [{"content": content, "finishReason": "STOP", "index": 0}],
        "usageMetadata": {
            "promptTokenCount": 100,
            "candidatesTokenCount": 7,
            "thoughtsTokenCount": 3,
            "cachedContentTokenCount": 20,
            "totalTokenCount": TOKENS,
        },
        "modelVersion": "gemini-2.5-flash",
        "responseId": f"r{number}",
    }
    return whole, [("", whole)]


def _converse(body, number, calls, text):
    tools = (body.get("toolConfig") or {}).get("tools")
    if tools and calls:
        name = tools[0]["toolSpec"]["name"]
        content = [
            {"toolUse": {"toolUseId": f"tu_{number}_{n}", "name": name, "input": ARGUMENTS}}
            for n in range(calls)
        ]
    else:
        content = [{"text": text}]
    asks = "toolUse" in content[0]
    usage = {
        "inputTokens": 80,
        "cacheReadInputTokens": 20,
        "outputTokens": 10,
        "totalTokens": TOKENS,
    }
    stop = "tool_use" if asks else "end_turn"
    message = {"role": "assistant", "content": content}
    whole = {"output": {"message": message}, "stopReason": stop, "usage": usage}
    whole["metrics"] = {"latencyMs": 1}
    events = [("messageStart", {"role": "assistant"})]
    for place, block in enumerate(content):
        at = {"contentBlockIndex": place}
        if asks:
            use = block["toolUse"]
            start = {"toolUse": {"toolUseId": use["toolUseId"], "name": use["name"]}}
            events.append(("contentBlockStart", {"start": start, **at}))
            delta = {"toolUse": {"input": json.dumps(ARGUMENTS)}}
        else:
            delta = {"text": text}
        events += [("contentBlockDelta", {"delta": delta, **at}), ("contentBlockStop", at)]
    events.append(("messageStop", {"stopReason": stop}))
    events.append(("metadata", {"usage": usage, "metrics": {"latencyMs": 1}}))
    return whole, events
