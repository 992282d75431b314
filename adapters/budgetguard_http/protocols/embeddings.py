"""OpenAI's embeddings, which Azure, Mistral and compatible servers have, Gemini's and Ollama's."""

from __future__ import annotations

import re

from budgetguard_http.protocols.fields import Body, records
from budgetguard_http.protocols.protocol import ApiProtocol


class Embeddings(ApiProtocol):
    """`/embeddings`, `/api/embed` and `/api/embeddings`: no turn of a loop, with no text."""

    is_turn = False

    def prompt(self, body: Body) -> Body:
        """Return the texts."""
        return {"messages": body.get("input") or body.get("prompt")}


class GeminiEmbeddings(Embeddings):
    """`:embedContent` and `:batchEmbedContents`; their usage is estimated where none is told."""

    provider = "google"
    model_in_path = re.compile(r"([^/:]+):\w+$")

    def prompt(self, body: Body) -> Body:
        """Return the contents."""
        contents = [one.get("content") for one in records(body.get("requests"))]
        return {"messages": contents or [body.get("content")]}
