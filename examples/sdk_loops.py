"""A loop of one's own, with tools, on the SDKs of OpenAI and Anthropic.

The clients are the real ones. What they speak to is a server on this machine that asks for the same
tool again and again; leave `base_url` out to speak to the provider.
"""

from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anthropic
import openai

from budgetguard_core import Budget
from budgetguard_loop import bounded

BUDGET = Budget(max_iterations=6, max_tool_calls=4, max_cost_usd=0.10)
SCHEMA = {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]}


def read_page(page: int) -> str:
    return f"page {page}: see the next page"


def with_openai(url: str) -> Any:
    # Retries inside the client are seen by nobody.
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    function = {"name": "read_page", "description": "Read a page.", "parameters": SCHEMA}
    tools: Any = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": "What does the report say?"}]
    with client, bounded(BUDGET, messages=messages) as run:
        while True:
            with run.model_call("gpt-4o", tools=tools) as call:
                reply = client.chat.completions.create(
                    model="gpt-4o", messages=messages, tools=tools
                )
                call.settle(reply)
            answer = reply.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            if not answer.tool_calls:
                break
            for asked in run.tool_calls(answer.tool_calls):
                result = asked.run(read_page)
                messages.append({"role": "tool", "tool_call_id": asked.id, "content": result})
    return run.outcome


def with_anthropic(url: str) -> Any:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools: Any = [{"name": "read_page", "description": "Read a page.", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": "What does the report say?"}]
    with client, bounded(BUDGET, messages=messages) as run:
        while True:
            with run.model_call("claude-sonnet-4-6", tools=tools) as call:
                reply = client.messages.create(
                    model="claude-sonnet-4-6", max_tokens=500, messages=messages, tools=tools
                )
                call.settle(reply)
            content = [block.model_dump(exclude_none=True) for block in reply.content]
            messages.append({"role": "assistant", "content": content})
            if reply.stop_reason != "tool_use":
                break
            results = [
                {"type": "tool_result", "tool_use_id": asked.id, "content": asked.run(read_page)}
                for asked in run.tool_calls(reply.content)
            ]
            messages.append({"role": "user", "content": results})
    return run.outcome


class Provider(BaseHTTPRequestHandler):
    """Both providers' formats; its model asks for the next page for ever."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number = len(asked["messages"])
        page = {"page": number}
        if self.path == "/v1/messages":
            block = {"type": "tool_use", "id": f"t{number}", "name": "read_page", "input": page}
            body: Any = {
                "id": "m",
                "type": "message",
                "role": "assistant",
                "model": asked["model"],
                "content": [block],
                "stop_reason": "tool_use",
                "stop_sequence": None,
                "usage": {"input_tokens": 300 * number, "output_tokens": 30},
            }
        else:
            function = {"name": "read_page", "arguments": json.dumps(page)}
            call = {"id": f"c{number}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            body = {
                "id": "m",
                "object": "chat.completion",
                "created": 0,
                "model": asked["model"],
                "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}],
                "usage": {
                    "prompt_tokens": 300 * number,
                    "completion_tokens": 30,
                    "total_tokens": 300 * number + 30,
                },
            }
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def main() -> None:
    logging.getLogger("budgetguard").setLevel(logging.ERROR)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    for name, loop in (("openai", with_openai), ("anthropic", with_anthropic)):
        outcome = loop(url)
        used = outcome.usage
        print(
            f"{name}: {outcome.stop_reason}, {used.model_calls} model calls, "
            f"{used.tool_calls} tool calls, ${used.cost_usd}"
        )
        print(f"  {outcome.final}")
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()
