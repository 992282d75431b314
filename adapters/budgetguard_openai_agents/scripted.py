"""A model with scripted answers, for tests of users' own agents."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from agents import Model, ModelResponse, Usage
from agents.items import TResponseStreamEvent
from openai.types.responses import Response, ResponseCompletedEvent, ResponseTextDeltaEvent

from budgetguard_core.testing.scripted import Answers


class ScriptedModel(Model):
    """Gives scripted answers to `Runner.run`, `run_sync` and `run_streamed`.

    Args:
        answers: The answers.

    Attributes:
        answers: The answers.
        model: The name that prices and events go by.
    """

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.model = answers.model
        self._numbers = count(1)

    async def _next(self) -> Response:
        await asyncio.sleep(0)  # others go out beside it, as on the wire
        turn = self.answers.next()
        output: list[dict[str, Any]] = [
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "call_id": call.id,
                "name": call.name,
                "arguments": json.dumps(call.arguments),
            }
            for call in turn.calls
        ]
        if turn.text:
            content: Any = {
                "type": "output_text",
                "text": turn.text,
                "annotations": [],
                "logprobs": [],
            }
            output.append(
                {
                    "type": "message",
                    "id": f"msg_{next(self._numbers)}",
                    "role": "assistant",
                    "status": "completed",
                    "content": [content],
                }
            )
        return Response.model_validate(
            {
                "id": f"resp_{next(self._numbers)}",
                "object": "response",
                "created_at": 0,
                "model": self.model,
                "output": output,
                "status": "completed",
                "tool_choice": "auto",
                "tools": [],
                "parallel_tool_calls": True,
                "usage": {
                    "input_tokens": turn.usage.input_tokens,
                    "output_tokens": turn.usage.output_tokens,
                    "total_tokens": turn.usage.total_tokens,
                    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                    "output_tokens_details": {"reasoning_tokens": 0},
                },
            }
        )

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        """Give the next answer."""
        del args, kwargs
        made = await self._next()
        used: Any = made.usage
        usage = Usage(
            requests=1,
            input_tokens=used.input_tokens,
            output_tokens=used.output_tokens,
            total_tokens=used.total_tokens,
        )
        return ModelResponse(output=made.output, usage=usage, response_id=None)

    async def stream_response(
        self, *args: Any, **kwargs: Any
    ) -> AsyncIterator[TResponseStreamEvent]:
        """Give the next answer in a stream: a text comes word by word."""
        del args, kwargs
        response, numbers = await self._next(), count()
        for position, item in enumerate(response.output):
            # The text is its deltas in a row, so that every word brings what stands before it.
            item_of: Any = item
            text = item_of.content[0].text if item.type == "message" else ""
            for word in re.findall(r"\s*\S+|\s+", text):
                yield ResponseTextDeltaEvent(
                    type="response.output_text.delta",
                    delta=word,
                    logprobs=[],
                    item_id=item.id or "",
                    output_index=position,
                    content_index=0,
                    sequence_number=next(numbers),
                )
        yield ResponseCompletedEvent(
            type="response.completed", response=response, sequence_number=next(numbers)
        )


def scripted_model(answers: Answers) -> ScriptedModel:
    """Make a model that gives these answers."""
    return ScriptedModel(answers)
