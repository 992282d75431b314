"""OpenAI's legacy completions, which gateways and local servers have as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from budgetguard_http.protocols.openai_chat import OpenAIChat
from budgetguard_http.protocols.protocol import Body, Event, Prompted


class Completions(OpenAIChat):
    """`/completions`: a prompt and a text, and no conversation."""

    name = "openai_completions"
    bound_field = "max_tokens"
    is_conversation = False
    can_refuse = False

    def prompt(self, body: Body) -> Prompted:
        """Return the prompt."""
        return Prompted(body.get("prompt"))

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return a completion whose usage is zero."""
        made = super().synthetic(body, model, text, mark)
        for choice in made["choices"]:
            choice["text"] = choice.pop("message")["content"]
        return {**made, "object": "text_completion"}

    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return it as the only chunk, and the end."""
        done = super().synthetic_stream(body, model, text, mark)[-1]
        return [("", self.synthetic(body, model, text, mark)), done]
