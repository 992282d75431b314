"""OpenAI's embeddings, which Azure, Mistral and compatible servers have as well."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from budgetguard_http.protocols.opaque import Opaque
from budgetguard_http.protocols.protocol import (
    Answer,
    Body,
    Prompted,
    items,
    record,
    text_or_none,
    usage_in,
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


class Embeddings(Opaque):
    """`/embeddings`: a model call, but no turn of a loop, and with no answer that could be made."""

    name = "embeddings"
    is_turn = False

    def prompt(self, body: Body) -> Prompted:
        """Return the texts."""
        return Prompted(body.get("input"))

    def read(self, body: Body, answer: Answer) -> None:
        """Read the usage."""
        answer.usage, answer.model = usage_in(body), text_or_none(body.get("model"))
        if answer.usage is not None:
            # There is no completion that could be missing.
            answer.usage = answer.usage._replace(estimated=False)


class GeminiEmbeddings(Embeddings):
    """`:embedContent` and `:batchEmbedContents`; their usage is estimated where none is told."""

    provider = "google"

    def model(self, path: str, body: Body) -> str | None:
        """Return the model in the address."""
        del body
        return path.rpartition("/")[2].partition(":")[0] or None

    def prompt(self, body: Body) -> Prompted:
        """Return the contents."""
        contents = [record(one).get("content") for one in items(body.get("requests"))]
        return Prompted(contents or [body.get("content")])


class OllamaEmbeddings(Embeddings):
    """`/api/embed` and `/api/embeddings`."""

    def prompt(self, body: Body) -> Prompted:
        """Return the texts."""
        return Prompted(body.get("input") or body.get("prompt"))


def embedding_cost(model: str | None, tokens: int) -> Decimal | None:
    """Return what an embedding costs; None where the price book is asked."""
    price = PRICES.get(model or "")
    return None if price is None else price * tokens / _MILLION
