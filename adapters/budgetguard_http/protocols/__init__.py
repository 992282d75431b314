"""The table of the protocols: by what a request is recognised, and who speaks which."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from budgetguard_http.protocols.anthropic_messages import AnthropicMessages
from budgetguard_http.protocols.bedrock_converse import BedrockConverse
from budgetguard_http.protocols.fields import Body
from budgetguard_http.protocols.gemini import Gemini, GeminiEmbeddings
from budgetguard_http.protocols.ollama import Ollama
from budgetguard_http.protocols.openai_chat import Completions, Embeddings, Mistral, OpenAIChat
from budgetguard_http.protocols.openai_responses import OpenAIResponses
from budgetguard_http.protocols.protocol import ApiProtocol

__all__ = ["CHAT", "MISTRAL", "OPAQUE", "TABLE", "is_path_of_a_model", "protocol_of"]


MISTRAL: Final = Mistral()
OPAQUE: Final = ApiProtocol()
CHAT: Final = OpenAIChat()
_ANTHROPIC: Final = AnthropicMessages()
# Without an input it goes on from what the provider keeps.
_OF_RESPONSES: Final = ("input", "previous_response_id", "conversation", "prompt")
TABLE: Final = tuple(
    (re.compile(path + "$"), fields, protocol)
    for path, fields, protocol in (
        # That of agents is Mistral's.
        (r"/(chat|agents)/completions", ("messages",), CHAT),
        # With `background`, unless streamed, the answer and its usage come by another request.
        (r"/responses", _OF_RESPONSES, OpenAIResponses()),
        (r"/messages", ("messages",), _ANTHROPIC),
        # Bedrock and Vertex; of other makers' models the body has another form.
        (r"/model/.+/invoke(-with-response-stream)?", ("anthropic_version",), _ANTHROPIC),
        (r"/model/.+/converse(-stream)?", ("messages",), BedrockConverse()),
        # Under one name Vertex counts tokens there, which is free.
        (r"(?<!/count-tokens):(streamR|r)awPredict", ("anthropic_version",), _ANTHROPIC),
        (r":(streamG|g)enerateContent", ("contents",), Gemini()),
        (r"(/embeddings|/api/embed)", ("input", "prompt"), Embeddings()),
        (r":(embedContent|batchEmbedContents)", ("content", "requests"), GeminiEmbeddings()),
        # Those of chat, too, end like this.
        (r"(?<!/chat|gents)/completions", ("prompt",), Completions()),
        (r"/api/(chat|generate)", ("model",), Ollama()),
    )
)
"""By the end of the address, not by the host: gateways and local servers are understood as well.
Of the fields the body has to hold one: a path alone is not enough to tell."""


@lru_cache(maxsize=256)
def _rows_of(path: str) -> tuple[tuple[tuple[str, ...], ApiProtocol], ...]:
    return tuple((fields, protocol) for end, fields, protocol in TABLE if end.search(path))


def is_path_of_a_model(path: str) -> bool:
    """Return whether an address ends as one of the table's."""
    return bool(_rows_of(path))


def protocol_of(path: str, body: Body) -> ApiProtocol | None:
    """Return the format of a request; None where it is none that is understood."""
    for fields, protocol in _rows_of(path):
        if not body.keys().isdisjoint(fields):
            by_another = body.get("background") and not body.get("stream")
            return None if by_another else protocol
    return None
