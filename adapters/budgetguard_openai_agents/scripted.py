"""A model with scripted answers, for tests of users' own agents."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from agents import Model, ModelResponse, Usage
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from budgetguard_core.testing.scripted import Answers


class ScriptedModel(Model):
    """Gives scripted answers to `Runner.run` and `run_sync`; streams are not scripted."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.model = answers.model

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        """Give the next answer."""
        del args, kwargs
        turn = self.answers.next()
        output: list[Any] = [
            ResponseFunctionToolCall(
                type="function_call",
                call_id=call.id,
                name=call.name,
                arguments=json.dumps(call.arguments),
            )
            for call in turn.calls
        ]
        if turn.text:
            text = ResponseOutputText(text=turn.text, type="output_text", annotations=[])
            output.append(
                ResponseOutputMessage(
                    id=f"msg_{self.answers.calls}",
                    type="message",
                    role="assistant",
                    status="completed",
                    content=[text],
                )
            )
        usage = Usage(
            requests=1,
            input_tokens=turn.usage.input_tokens,
            output_tokens=turn.usage.output_tokens,
            total_tokens=turn.usage.total_tokens,
        )
        return ModelResponse(output=output, usage=usage, response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Refuse: use `Runner.run`, or the SDK's own `agents.testing`."""
        raise NotImplementedError("a scripted model does not stream. Use Runner.run.")


def scripted_model(answers: Answers) -> ScriptedModel:
    """Make a model that gives these answers."""
    return ScriptedModel(answers)
