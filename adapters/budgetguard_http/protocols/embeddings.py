"""OpenAI's embeddings, which Azure, Mistral and compatible servers have, Gemini's and Ollama's."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from budgetguard_http.protocols.protocol import (
    ApiProtocol,
    Body,
    Prompted,
    Reader,
    records,
)

PRICES: Final = {
    "text-embedding-3-small": Decimal("0.02"),
    "text-embedding-3-large": Decimal("0.13"),
    "text-embedding-ada-002": Decimal("0.10"),
}
"""US dollars for a million tokens, as genai-prices has them in November 2026.

It finds these by the provider's name only, and a model without a price ends a run with a cap in
dollars. Mistral's it finds by themselves.
"""
_MILLION: Final = 1_000_000


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


def embedding_cost(model: str | None, tokens: int) -> Decimal | None:
    """Return what an embedding costs; None where the price book is asked."""
    price = PRICES.get(model or "")
    return None if price is None else price * tokens / _MILLION
