"""A model with scripted answers, for tests of users' own agents."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from pydantic_ai import messages as chat
from pydantic_ai.models.function import DeltaToolCall, FunctionModel
from pydantic_ai.usage import RequestUsage
from pydantic_core import to_json

from budgetguard_core.testing.scripted import Answers


class ScriptedModel(FunctionModel):
    """Gives scripted answers, whole or in a stream; the framework estimates a stream's usage."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        super().__init__(self._answer, stream_function=self._stream, model_name=answers.model)

    def _answer(self, *_: Any) -> chat.ModelResponse:
        turn = self.answers.next()
        parts: list[Any] = [chat.TextPart(turn.text)] if turn.text else []
        parts += [chat.ToolCallPart(call.name, call.arguments, call.id) for call in turn.calls]
        usage = RequestUsage(
            input_tokens=turn.usage.input_tokens, output_tokens=turn.usage.output_tokens
        )
        return chat.ModelResponse(parts, usage=usage, model_name=self.answers.model)

    async def _stream(self, *_: Any) -> AsyncGenerator[Any]:
        turn = self.answers.next()
        if turn.text or not turn.calls:
            yield turn.text
        for position, call in enumerate(turn.calls):
            arguments = to_json(call.arguments).decode()
            yield {position: DeltaToolCall(call.name, arguments, tool_call_id=call.id)}


def scripted_model(answers: Answers) -> ScriptedModel:
    """Make a model that gives these answers."""
    return ScriptedModel(answers)
