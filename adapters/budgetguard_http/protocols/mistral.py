"""Mistral's chat completions: OpenAI's in another dialect."""

from __future__ import annotations

from budgetguard_http.protocols.openai_chat import OpenAIChat
from budgetguard_http.protocols.protocol import Body


class Mistral(OpenAIChat):
    """`/chat/completions` and `/agents/completions` of Mistral, which refuses fields of others."""

    name = "mistral"
    provider = "mistral"
    bound_field = "max_tokens"
    can_refuse = False

    def ask_for_usage(self, body: Body) -> bool:
        """Ask for nothing: it comes with every stream."""
        del body
        return False
