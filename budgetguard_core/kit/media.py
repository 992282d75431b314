"""Allowances for what is in a prompt and is no text.

A provider bills images, sound and files by their size in pixels, seconds or pages, which nobody can
tell without decoding them; their bytes say nothing about it. So each counts as one of its kind,
until the provider has measured the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from budgetguard_core.kit.records import fields_of

IMAGE_TOKENS: Final = 1_600
"""An image as large as Anthropic takes it before it is scaled down (about 1.15 megapixels).

OpenAI's tiles come to 85 to 1,445 tokens with GPT-4o, Gemini's to 258 for each.
"""
AUDIO_TOKENS: Final = 1_920
"""One minute of sound at Gemini's 32 tokens a second; OpenAI counts about 10."""
VIDEO_TOKENS: Final = 18_000
"""One minute of video at Gemini's 300 tokens a second."""
FILE_TOKENS: Final = 3_000
"""A dense page of a document, by Anthropic's range of 1,500 to 3,000 tokens for each."""

_TYPES: Final = {
    "image": IMAGE_TOKENS,
    "image_url": IMAGE_TOKENS,
    "image-url": IMAGE_TOKENS,
    "image_file": IMAGE_TOKENS,
    "input_image": IMAGE_TOKENS,
    "computer_screenshot": IMAGE_TOKENS,
    "image_generation_call": IMAGE_TOKENS,
    "audio": AUDIO_TOKENS,
    "audio_url": AUDIO_TOKENS,
    "input_audio": AUDIO_TOKENS,
    "output_audio": AUDIO_TOKENS,
    "video": VIDEO_TOKENS,
    "video_url": VIDEO_TOKENS,
    "input_video": VIDEO_TOKENS,
    "file": FILE_TOKENS,
    "input_file": FILE_TOKENS,
    "document": FILE_TOKENS,
    "document_url": FILE_TOKENS,
    "container_upload": FILE_TOKENS,
}
"""Blocks by their `type`: OpenAI, Anthropic, Mistral, LangChain, MCP."""
_KINDS: Final = {
    "image": IMAGE_TOKENS,
    "audio": AUDIO_TOKENS,
    "video": VIDEO_TOKENS,
    "document": FILE_TOKENS,
}
"""Blocks by the only name in them (Bedrock, Strands), and the first part of a media type."""
_BLOBS: Final = frozenset({"file_data", "fileData", "inline_data", "inlineData"})
"""Parts by their name: Gemini."""
NAMED: Final = _BLOBS | _KINDS.keys() | {"images"}
"""The names of parts that `named_tokens` may have an allowance for."""
_MEDIA_TYPES: Final = ("mime_type", "mimeType", "media_type", "mediaType")
_ANY_MEDIA_TYPE: Final = frozenset(_MEDIA_TYPES)
_BYTES: Final = (bytes, bytearray, memoryview)
_DATA_URL: Final = re.compile(r"data:(\w*)[^,\s]{0,200};base64,", re.ASCII)


def block_tokens(block: Mapping[Any, Any]) -> int | None:
    """Return the allowance of a block that says what it is; None for one that is text."""
    kind = block.get("type") or block.get("kind")
    allowance = _TYPES.get(kind) if isinstance(kind, str) else None
    if allowance is None and _ANY_MEDIA_TYPE.isdisjoint(block):
        return None
    source = block.get("source")
    if source is not None:
        source = fields_of(source)
        if source is not None and source.get("type") in {"text", "content"}:
            return None
    is_text = kind == "text" or block.get("text")
    by_media_type = None if is_text else _of_media_type(block)
    if by_media_type is None and allowance is not None:
        # Cohere's documents are data, Bedrock's have no type.
        return None if fields_of(block.get("document")) else allowance
    return by_media_type


def named_tokens(name: Any, value: object) -> int | None:
    """Return the allowance of what a message or a block has under a name; None if it is text."""
    if name == "images" and isinstance(value, list | tuple):  # Ollama
        return IMAGE_TOKENS * len(cast("Sequence[object]", value))
    if name not in _BLOBS and name not in _KINDS:
        return None
    fields = fields_of(value)
    if fields is None:
        return None
    if name in _BLOBS:
        return _of_media_type(fields) or FILE_TOKENS
    source = fields_of(fields.get("source"))
    if source is None:
        # The sound of an answer of OpenAI's is sent again by its id.
        return AUDIO_TOKENS if name == "audio" else None
    return None if source.keys() & {"text", "content"} else _KINDS[name]


def data_tokens(data: object) -> int | None:
    """Return the allowance of a data URL, of bytes or of an image; None for what is neither."""
    if isinstance(data, str):
        url = _DATA_URL.match(data) if data.startswith("data:") else None
        return _KINDS.get(url[1], FILE_TOKENS) if url else None
    if isinstance(data, _BYTES):
        return FILE_TOKENS
    if type(data).__module__.partition(".")[0] == "PIL":  # Gemini's SDK takes such images
        return IMAGE_TOKENS
    return None


def _of_media_type(block: Mapping[Any, Any]) -> int | None:
    if _ANY_MEDIA_TYPE.isdisjoint(block):
        return None
    for name in _MEDIA_TYPES:
        media_type = block.get(name)
        if isinstance(media_type, str):
            return _KINDS.get(media_type.partition("/")[0], FILE_TOKENS)
    return None
