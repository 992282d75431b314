"""A model function with scripted answers, for tests of users' own loops."""

from __future__ import annotations

import json
from typing import Any

from budgetguard_core.testing.scripted import Answers


class ScriptedFunction:
    """Answers as a chat completion; for `run_bounded(model, ...)`."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def __call__(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Give the next answer."""
        del messages
        turn = self.answers.next()
        message: dict[str, Any] = {"role": "assistant", "content": turn.text or None}
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in turn.calls
            ]
        usage = {
            "prompt_tokens": turn.usage.input_tokens,
            "completion_tokens": turn.usage.output_tokens,
        }
        return {"model": self.answers.model, "choices": [{"message": message}], "usage": usage}


def scripted_model(answers: Answers) -> ScriptedFunction:
    """Make a model function that gives these answers."""
    return ScriptedFunction(answers)
