"""What a model call used, out of LangChain's records, and what it may use, out of its request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from operator import is_
from typing import Any, TypeGuard, cast

from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from budgetguard_core import TokenUsage, estimate_tokens

_IMAGE_TOKENS = 1_600
_OUTPUT_BOUNDS = (
    "max_completion_tokens",
    "max_tokens",
    "max_output_tokens",
    "max_tokens_to_sample",
)
# Elsewhere langchain-core makes the provider's name up from the name of the model's class.
_PROVIDERS = frozenset(
    [
        "amazon_bedrock",
        "anthropic",
        "azure",
        "azure_openai",
        "bedrock",
        "bedrock_converse",
        "cerebras",
        "cohere",
        "deepseek",
        "fireworks",
        "google_genai",
        "google_vertexai",
        "groq",
        "huggingface",
        "llamacpp",
        "mistral",
        "mistralai",
        "moonshot",
        "novita",
        "nvidia",
        "ollama",
        "openai",
        "openrouter",
        "perplexity",
        "together",
        "togetherai",
        "vllm",
        "xai",
    ]
)
_CACHE_READ = re.compile(r"(?:^|_)cache_read$")
_CACHE_WRITE = re.compile(r"(?:^|_)cache_creation$")
_CACHE_WRITE_BY_LIFETIME = re.compile(r"^ephemeral_\w+_input_tokens$")
_REASONING = re.compile(r"(?:^|_)reasoning$")


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Tell whether a record of the framework's has named fields."""
    return isinstance(value, Mapping)


def answer_of(response: LLMResult) -> BaseMessage | None:
    """Return the message that a model call answered with; None for a text model."""
    for generations in response.generations:
        for generation in generations:
            message = getattr(generation, "message", None)
            return message if isinstance(message, BaseMessage) else None
    return None


def text_of(response: LLMResult) -> str:
    """Return the text of the first answer."""
    for generations in response.generations:
        for generation in generations:
            return generation.text
    return ""


def usage_of(response: LLMResult) -> tuple[TokenUsage | None, Decimal | None]:
    """Read what a call used, and its price where the framework knows it.

    The buckets are inclusive on both sides. Where Anthropic's writes are told by lifetime,
    `cache_creation` is zero; OpenAI's service tiers put their name in front of each bucket.

    Returns:
        None where nothing was reported: a zero of a stream without usage is no report. An answer
        from LangChain's own cache used nothing and costs nothing.
    """
    message = answer_of(response)
    usage = getattr(message, "usage_metadata", None)
    if is_mapping(usage):
        if usage.get("total_cost") == 0:
            return TokenUsage(), Decimal(0)
        return _usage(usage), None
    if message is None and is_mapping(response.llm_output):
        reported = response.llm_output.get("token_usage")
        if is_mapping(reported):
            given, answered = (
                _count(reported, "prompt_tokens"),
                _count(reported, "completion_tokens"),
            )
            return _unless_empty(TokenUsage(given, answered)), None
    return None, None


def _usage(usage: Mapping[str, Any]) -> TokenUsage | None:
    inputs = _details(usage, "input_token_details")
    outputs = _details(usage, "output_token_details")
    read = _sum(inputs, _CACHE_READ)
    # Written by lifetime, and as a whole: that is zero in newer versions, and the same in older.
    write = max(_sum(inputs, _CACHE_WRITE), _sum(inputs, _CACHE_WRITE_BY_LIFETIME))
    reasoning = _sum(outputs, _REASONING)
    return _unless_empty(
        TokenUsage(
            # A part above its whole is a provider's slip; the larger figure is charged.
            max(_count(usage, "input_tokens"), read + write),
            max(_count(usage, "output_tokens"), reasoning),
            cache_read_tokens=read,
            cache_write_tokens=write,
            cache_write_1h_tokens=_count(inputs, "ephemeral_1h_input_tokens"),
            reasoning_tokens=reasoning,
        )
    )


def _unless_empty(usage: TokenUsage) -> TokenUsage | None:
    return usage if usage.input_tokens or usage.output_tokens else None


def _details(usage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    details = usage.get(name)
    return details if is_mapping(details) else {}


def _sum(details: Mapping[str, Any], name: re.Pattern[str]) -> int:
    return sum(_count(details, key) for key in details if name.search(key))


def _count(details: Mapping[str, Any], name: str) -> int:
    value = details.get(name)
    return value if type(value) is int and value > 0 else 0


def model_of(response: LLMResult) -> str | None:
    """Return the name of the model that was really called, if the provider says so."""
    message = answer_of(response)
    for record in (getattr(message, "response_metadata", None), response.llm_output):
        if is_mapping(record):
            name = record.get("model_name") or record.get("model")
            if isinstance(name, str):
                return name
    return None


def request_of(
    metadata: Mapping[str, Any] | None, parameters: Mapping[str, Any] | None
) -> tuple[str | None, str | None, int | None]:
    """Return model, provider and completion bound of a call that is about to go out."""
    metadata = metadata or {}
    parameters = parameters or {}
    model = metadata.get("ls_model_name") or parameters.get("model") or parameters.get("model_name")
    provider = metadata.get("ls_provider")
    bounds = [metadata.get("ls_max_tokens"), *(parameters.get(name) for name in _OUTPUT_BOUNDS)]
    bound = next((bound for bound in bounds if type(bound) is int and bound > 0), None)
    return (
        model if isinstance(model, str) else None,
        provider if provider in _PROVIDERS else None,
        bound,
    )


class PromptEstimator:
    """Estimates the prompts of one conversation, each message once."""

    __slots__ = ("_last", "_tools")

    def __init__(self) -> None:
        # One attribute each, so that calls at the same time never see halves of two prompts.
        self._last: tuple[tuple[Any, ...], int] = ((), 0)
        self._tools = (0, 0)

    def estimate(self, prompt: Sequence[Any], parameters: Mapping[str, Any] | None) -> int:
        """Estimate the tokens of a prompt that mostly repeats the one before."""
        before, tokens = self._last
        known = len(before)
        if known > len(prompt) or not all(map(is_, before, prompt)):
            known = tokens = 0
        tokens += sum(_estimate(part) for part in prompt[known:])
        self._last = (tuple(prompt), tokens)
        tools: Any = (parameters or {}).get("tools") or ()
        count, tool_tokens = self._tools
        if len(tools) != count:
            tool_tokens = estimate_tokens(repr(tools))
            self._tools = (len(tools), tool_tokens)
        return tokens + tool_tokens


def estimate_prompt(
    prompt: Sequence[BaseMessage] | Sequence[str], parameters: Mapping[str, Any] | None
) -> int:
    """Estimate the tokens of a prompt and of the tools that go with it."""
    tools = (parameters or {}).get("tools")
    return sum(_estimate(part) for part in prompt) + (estimate_tokens(repr(tools)) if tools else 0)


def _estimate(part: BaseMessage | str) -> int:
    if isinstance(part, str):
        return estimate_tokens(part)
    content = cast("object", part.content)
    if isinstance(content, str):
        tokens = estimate_tokens(content)
    else:
        tokens = sum(_block(block) for block in cast("Iterable[object]", content))
    asked = getattr(part, "tool_calls", None)
    return tokens + (estimate_tokens(repr(asked)) if asked else 0)


def _block(block: object) -> int:
    if isinstance(block, str):
        return estimate_tokens(block)
    if is_mapping(block):
        text = block.get("text") or block.get("thinking") or block.get("reasoning")
        if isinstance(text, str):
            return estimate_tokens(text)
    return _IMAGE_TOKENS
