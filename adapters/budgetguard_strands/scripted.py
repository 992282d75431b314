"""A model with scripted answers, for tests of users' own agents."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from strands.models import Model

from budgetguard_core.testing.scripted import Answers


class ScriptedModel(Model):
    """Gives scripted answers in the chunks of a real provider's stream."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.config: dict[str, Any] = {"model_id": answers.model}

    def update_config(self, **model_config: Any) -> None:
        """Keep settings, as Strands' own models do."""
        self.config.update(model_config)

    def get_config(self) -> Any:
        """Return the settings."""
        return self.config

    def structured_output(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the answers are texts and tool calls."""
        raise NotImplementedError("a scripted model has no structured output. Script its tool.")

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Give the next answer."""
        del args, kwargs
        turn = self.answers.next()
        yield {"messageStart": {"role": "assistant"}}
        if turn.text:
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": turn.text}}}
            yield {"contentBlockStop": {}}
        for call in turn.calls:
            use = {"name": call.name, "toolUseId": call.id}
            delta = {"toolUse": {"input": json.dumps(call.arguments)}}
            yield {"contentBlockStart": {"start": {"toolUse": use}}}
            yield {"contentBlockDelta": {"delta": delta}}
            yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use" if turn.calls else "end_turn"}}
        usage = {
            "inputTokens": turn.usage.input_tokens,
            "outputTokens": turn.usage.output_tokens,
            "totalTokens": turn.usage.total_tokens,
        }
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}


def scripted_model(answers: Answers) -> ScriptedModel:
    """Make a model that gives these answers."""
    return ScriptedModel(answers)
