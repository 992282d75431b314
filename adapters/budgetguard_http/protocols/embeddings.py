"""OpenAI's embeddings, which Azure, Mistral and compatible servers have, Gemini's and Ollama's."""

from __future__ import annotations

import re

from budgetguard_http.protocols.protocol import (
    ApiProtocol,
    Body,
    Prompted,
    Reader,
    records,
)


class EmbeddingsReader(Reader):
    """The usage of embeddings."""

    def whole(self, body: Body) -> None:
        """Take it as measured: there is no completion that could be missing."""
        super().whole(body)
        if self.answer.usage is not None:
            self.answer.usage = self.answer.usage._replace(estimated=False)


class Embeddings(ApiProtocol):
    """`/embeddings`, `/api/embed` and `/api/embeddings`: no turn of a loop, with no text."""

    name = "embeddings"
    is_turn = False
    reader_type = EmbeddingsReader

    def prompt(self, body: Body) -> Prompted:
        """Return the texts."""
        return Prompted(body.get("input") or body.get("prompt"))


class GeminiEmbeddings(Embeddings):
    """`:embedContent` and `:batchEmbedContents`; their usage is estimated where none is told."""

    provider = "google"
    model_in_path = re.compile(r"([^/:]+):\w+$")

    def prompt(self, body: Body) -> Prompted:
        """Return the contents."""
        contents = [one.get("content") for one in records(body.get("requests"))]
        return Prompted(contents or [body.get("content")])
