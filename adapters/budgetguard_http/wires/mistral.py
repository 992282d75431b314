"""Mistral's chat completions: OpenAI's in another dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from budgetguard_http.wires.openai_chat import OpenAIChat
from budgetguard_http.wires.wire import Body


class Mistral(OpenAIChat):
    """`/chat/completions` and `/agents/completions` of Mistral, which refuses fields of others."""

    name = "mistral"
    provider = "mistral"
    bound_field = "max_tokens"

    def ask_for_usage(self, body: Body) -> bool:
        """Ask for nothing: it comes with every stream."""
        del body
        return False

    def synthetic(self, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return a completion; its SDK's type has to have a usage, which is zero."""
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return {**super().synthetic(model, text, mark), "usage": usage}
