"""What a model call is going to use, and what the SDK says it has used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agents import Agent, ModelResponse, RunConfig, Usage
from agents.models import get_default_model

from budgetguard_core import TokenUsage, estimate_tokens

# What names things or says how they stand, and content that is not billed by its length as text.
_NOT_TEXT = frozenset(
    {
        "audio",
        "call_id",
        "data",
        "encrypted_content",
        "file_data",
        "id",
        "image_url",
        "logprobs",
        "provider_data",
        "result",
        "status",
        "type",
    }
)
_ROUTERS = frozenset({"any-llm", "litellm"})


def token_usage(usage: Usage) -> TokenUsage | None:
    """Convert the SDK's record of one call; None when the provider reported nothing."""
    inputs, outputs = usage.input_tokens, usage.output_tokens
    if not inputs and not outputs:
        return None
    details: Any = usage.input_tokens_details
    read = min(_count(details, "cached_tokens"), inputs)
    return TokenUsage(
        inputs,
        outputs,
        cache_read_tokens=read,
        # A provider whose buckets overlap must not make the call free.
        cache_write_tokens=min(_count(details, "cache_write_tokens"), inputs - read),
        reasoning_tokens=min(_count(usage.output_tokens_details, "reasoning_tokens"), outputs),
    )


def estimated_usage(input_tokens: int, response: ModelResponse) -> TokenUsage:
    """Estimate what a response used whose provider reported nothing."""
    return TokenUsage(input_tokens, max(text_tokens(response.output), 1), estimated=True)


def model_of(agent: Agent[Any], run_config: RunConfig | None) -> tuple[str | None, str | None]:
    """Find the model that an agent's next call goes to, and the provider where it is named."""
    model: object = agent.model
    if run_config is not None and run_config.model is not None:
        model = run_config.model
    if model is None:
        model = get_default_model()
    name = model if isinstance(model, str) else getattr(model, "model", None)
    if not isinstance(name, str):
        return None, None
    parts = name.split("/")
    if len(parts) > 1 and parts[0] in _ROUTERS:
        del parts[0]
    return parts[-1], parts[0] if len(parts) > 1 else None


class PromptSize:
    """Projects the prompt of a conversation's next call at a cost that does not grow with it.

    The last prompt was measured by the provider; only what came after it has to be estimated.
    """

    __slots__ = ("_items", "_server_side", "_tokens")

    def __init__(self, *, server_side: bool) -> None:
        # The server adds the history by itself, so each prompt holds only what is new.
        self._server_side = server_side
        self._items = 0
        self._tokens = 0

    def project(self, system_prompt: str | None, items: Sequence[Any]) -> int:
        """Estimate the tokens of the prompt that is about to be sent."""
        if self._server_side:
            return self._tokens + text_tokens([system_prompt, items])
        if self._tokens and len(items) >= self._items:
            return self._tokens + text_tokens(items[self._items :])
        return text_tokens([system_prompt, items])

    def measured(self, items: int, usage: TokenUsage) -> None:
        """Take in what the provider measured for a prompt of that many items."""
        self._items = items
        self._tokens = usage.input_tokens
        if self._server_side:
            self._tokens += usage.output_tokens


def text_tokens(value: object) -> int:
    """Estimate the tokens of all text in a message, or in any structure of them."""
    total = 0
    waiting: list[object] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            total += estimate_tokens(one)
        elif isinstance(one, Mapping):
            fields = cast("Mapping[object, object]", one)
            waiting.extend(part for name, part in fields.items() if name not in _NOT_TEXT)
        elif isinstance(one, list | tuple):
            waiting.extend(cast("Sequence[object]", one))
        elif hasattr(one, "__dict__"):
            waiting.append(vars(one))
    return total


def _count(details: object, name: str) -> int:
    count = getattr(details, name, None)
    return count if type(count) is int and count > 0 else 0
