"""The table of the protocols: by what a request is recognised, and who speaks which."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from budgetguard_http.protocols.anthropic_messages import AnthropicMessages
from budgetguard_http.protocols.bedrock_converse import BedrockConverse
from budgetguard_http.protocols.completions import Completions
from budgetguard_http.protocols.embeddings import Embeddings, GeminiEmbeddings, OllamaEmbeddings
from budgetguard_http.protocols.gemini import Gemini
from budgetguard_http.protocols.mistral import Mistral
from budgetguard_http.protocols.ollama import Ollama
from budgetguard_http.protocols.opaque import Opaque
from budgetguard_http.protocols.openai_chat import OpenAIChat
from budgetguard_http.protocols.openai_responses import OpenAIResponses
from budgetguard_http.protocols.protocol import ApiProtocol, Body

__all__ = ["CHAT", "EMBEDDINGS", "MISTRAL", "OPAQUE", "TABLE", "is_path_of_a_model", "protocol_of"]


class _Row(NamedTuple):
    path: re.Pattern[str]
    field: str
    """What the body has to hold: a path alone is not enough to tell."""
    protocol: ApiProtocol


MISTRAL: Final = Mistral()
EMBEDDINGS: Final = Embeddings()
OPAQUE: Final = Opaque()
CHAT: Final = OpenAIChat()
_ANTHROPIC: Final = AnthropicMessages()
_INVOKE: Final = re.compile(r"/model/.+/invoke(-with-response-stream)?$")
_OF_GEMINI: Final = GeminiEmbeddings()
_OLLAMA: Final = Ollama()
_RESPONSES: Final = OpenAIResponses()
# Without an input it goes on from what the provider keeps.
_OF_RESPONSES: Final = ("input", "previous_response_id", "conversation", "prompt")
TABLE: Final = (
    # That of agents is Mistral's.
    _Row(re.compile(r"/(chat|agents)/completions$"), "messages", CHAT),
    # With `background`, unless streamed, the answer and its usage come by another request.
    *(_Row(re.compile(r"/responses$"), one, _RESPONSES) for one in _OF_RESPONSES),
    _Row(re.compile(r"/messages$"), "messages", _ANTHROPIC),
    # Bedrock and Vertex; of other makers' models the body has another form.
    _Row(_INVOKE, "anthropic_version", _ANTHROPIC),
    _Row(re.compile(r"/model/.+/converse(-stream)?$"), "messages", BedrockConverse()),
    # Under one name Vertex counts tokens there, which is free.
    _Row(re.compile(r"(?<!/count-tokens):(streamR|r)awPredict$"), "anthropic_version", _ANTHROPIC),
    _Row(re.compile(r":(streamG|g)enerateContent$"), "contents", Gemini()),
    _Row(re.compile(r"/embeddings$"), "input", EMBEDDINGS),
    _Row(re.compile(r":embedContent$"), "content", _OF_GEMINI),
    _Row(re.compile(r":batchEmbedContents$"), "requests", _OF_GEMINI),
    # Those of chat, too, end like this.
    _Row(re.compile(r"(?<!/chat|gents)/completions$"), "prompt", Completions()),
    _Row(re.compile(r"/api/chat$"), "model", _OLLAMA),
    _Row(re.compile(r"/api/generate$"), "model", _OLLAMA),
    _Row(re.compile(r"/api/embed$"), "input", OllamaEmbeddings()),
    _Row(re.compile(r"/api/embeddings$"), "prompt", OllamaEmbeddings()),
)
"""By the end of the address, not by the host: gateways and local servers are understood as well."""


@lru_cache(maxsize=256)
def _rows_of(path: str) -> tuple[_Row, ...]:
    return tuple(row for row in TABLE if row.path.search(path))


def is_path_of_a_model(path: str) -> bool:
    """Return whether an address ends as one of the table's."""
    return bool(_rows_of(path))


def protocol_of(path: str, body: Body) -> ApiProtocol | None:
    """Return the format of a request; None where it is none that is understood.

    Args:
        path: The address without host and query.
        body: What is posted.
    """
    for row in _rows_of(path):
        if row.field in body:
            by_another = body.get("background") and not body.get("stream")
            return None if by_another else row.protocol
    return None
