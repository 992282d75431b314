"""Streaming chat in FastAPI: a budget for each request, and a daily ceiling for each user.

The text goes to the browser as it is written, as server-sent events, with what it has cost so far.
The model is scripted, and the requests come from this process, so the example runs offline; put
`uvicorn.run(app)` in the place of `main` to serve.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

from fastapi import FastAPI, Header
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from pydantic import BaseModel

from budgetguard_core import Budget, Guard
from budgetguard_core.ledger import Ledger
from budgetguard_loop import run_bounded_stream

PER_REQUEST = Budget(max_iterations=5, max_seconds=60, max_output_tokens_per_call=500)
PER_USER = Decimal("0.01")


async def model(messages: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Stand in for `await client.chat.completions.create(..., stream=True)`."""
    for word in ("Budgets ", "are ", "good."):
        yield {"choices": [{"delta": {"content": word}}]}
    yield {"choices": [], "usage": {"prompt_tokens": 400, "completion_tokens": 300}}


class Question(BaseModel):
    """What a browser sends."""

    text: str


def build(ledger: Ledger) -> FastAPI:
    app = FastAPI()

    @app.post("/chat")
    # In a real service the name comes from the session, never from the browser.
    async def chat(question: Question, x_user: str = Header()) -> StreamingResponse:
        guard = Guard(PER_REQUEST, ledger=ledger, tenant=x_user)

        async def events() -> AsyncIterator[str]:
            stream = run_bounded_stream(model, guard, messages=question.text, model="gpt-4o")
            async for chunk in stream:
                # The last chunk of a stopped run is its synthetic message.
                for choice in chunk.get("choices", ()):
                    yield event("text", choice["delta"]["content"])
            # Who closes the page closes the stream, and with it the provider's.
            outcome = stream.outcome
            told = {"reason": outcome.stop_reason, "usd": str(outcome.usage.cost_usd)}
            if outcome.status == "terminated":
                told["message"] = outcome.final
            yield event("end", told)

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def event(kind: str, data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


def main() -> None:
    logging.getLogger("budgetguard").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        # With several servers it is `redis://...` or `postgresql://...`: one ceiling for all.
        url = f"sqlite:///{folder}/ledger.sqlite3"
        with Ledger(url, daily_usd=PER_USER) as ledger, TestClient(build(ledger)) as browser:
            for user in ("ada", "ada", "ada", "grace"):
                answer = browser.post("/chat", json={"text": "Why?"}, headers={"x-user": user})
                lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
                *words, end = [json.loads(line.removeprefix("data: ")) for line in lines]
                print(f"{user}: {''.join(words) or '-'} {end['reason']} ${end['usd']}")


if __name__ == "__main__":
    main()
