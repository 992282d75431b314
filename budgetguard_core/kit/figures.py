"""The figures of one usage record, under the names that each provider gives them.

From the providers' references and the types of their SDKs:

| record | prompt | of it cached | completion | of it reasoning |
|---|---|---|---|---|
| OpenAI chat completions, LiteLLM, Mistral, compatible servers | `prompt_tokens` | inside | `completion_tokens` | inside; beside it at xAI |
| OpenAI Responses, OpenAI Agents SDK | `input_tokens` | inside | `output_tokens` | inside |
| Anthropic | `input_tokens` | beside it | `output_tokens` | inside |
| Bedrock Converse, Strands | `inputTokens` | beside it, or as the total says | `outputTokens` | inside |
| Gemini | `prompt_token_count`, `tool_use_prompt_token_count` | inside | `candidates_token_count` | beside it |
| LangChain | `input_tokens` | inside | `output_tokens` | inside |
| DeepSeek | `prompt_tokens` | inside | `completion_tokens` | inside |
| Cohere | `tokens.input_tokens` | inside | `tokens.output_tokens` | not told |
| Ollama | `prompt_eval_count` | not told | `eval_count` | inside |
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeGuard, cast

from budgetguard_core.kit.records import fields_of, kind_of, part
from budgetguard_core.usage import TokenUsage

# No call of any model has more: what is above it is no count, and would not fit every store.
_MOST_TOKENS: Final = 10**12
_PLAIN: Final = ("inputTokens", "outputTokens", "totalTokens")
"""All that Bedrock and Strands say of a call that used no cache."""
_LONGEST_NUMBER: Final = 32
_WHOLE: Final = {int}


class _Figure:
    # Plain numbers: the hash of an enum's member is a call of its own.
    PROMPT = 1
    PROMPT_EXTRA = 2
    NOT_CACHED = 3
    OUTPUT = 4
    OUTPUT_EXTRA = 5
    TOTAL = 6
    READ = 7
    WRITE = 8
    WRITE_5M = 9
    WRITE_1H = 10
    REASONING = 11


_OF_OPENAI: Final = frozenset(
    {_Figure.PROMPT, _Figure.OUTPUT, _Figure.TOTAL, _Figure.READ, _Figure.REASONING}
)
_OF_CHAT: Final = frozenset(
    {
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
        "completion_tokens_details",
    }
)
_UNCOUNTED: Final = frozenset(
    {
        "accepted_prediction_tokens",
        "audio_tokens",
        "image_tokens",
        "rejected_prediction_tokens",
        "text_tokens",
    }
)
"""Details of a prompt or a completion that are told beside what counts."""
_OF_PROMPT: Final = _UNCOUNTED | {"cached_tokens"}
_OF_OUTPUT: Final = _UNCOUNTED | {"reasoning_tokens"}
_NAMES: Final = {
    "input_tokens": _Figure.PROMPT,
    "prompt_tokens": _Figure.PROMPT,
    "inputTokens": _Figure.PROMPT,
    "inputTokenCount": _Figure.PROMPT,
    "prompt_token_count": _Figure.PROMPT,
    "promptTokenCount": _Figure.PROMPT,
    "prompt_eval_count": _Figure.PROMPT,
    "tool_use_prompt_token_count": _Figure.PROMPT_EXTRA,
    "toolUsePromptTokenCount": _Figure.PROMPT_EXTRA,
    "prompt_cache_miss_tokens": _Figure.NOT_CACHED,
    "output_tokens": _Figure.OUTPUT,
    "completion_tokens": _Figure.OUTPUT,
    "outputTokens": _Figure.OUTPUT,
    "outputTokenCount": _Figure.OUTPUT,
    "candidates_token_count": _Figure.OUTPUT,
    "candidatesTokenCount": _Figure.OUTPUT,
    "response_token_count": _Figure.OUTPUT,
    "responseTokenCount": _Figure.OUTPUT,
    "eval_count": _Figure.OUTPUT,
    "thoughts_token_count": _Figure.OUTPUT_EXTRA,
    "thoughtsTokenCount": _Figure.OUTPUT_EXTRA,
    "total_tokens": _Figure.TOTAL,
    "totalTokens": _Figure.TOTAL,
    "total_token_count": _Figure.TOTAL,
    "totalTokenCount": _Figure.TOTAL,
    "cached_tokens": _Figure.READ,
    "cache_read_tokens": _Figure.READ,
    "cache_read_input_tokens": _Figure.READ,
    "cacheReadInputTokens": _Figure.READ,
    "cacheReadInputTokenCount": _Figure.READ,
    "cached_content_token_count": _Figure.READ,
    "cachedContentTokenCount": _Figure.READ,
    "cached_prompt_text_tokens": _Figure.READ,
    "prompt_cache_hit_tokens": _Figure.READ,
    "cache_write_tokens": _Figure.WRITE,
    "cache_creation_input_tokens": _Figure.WRITE,
    "cacheWriteInputTokens": _Figure.WRITE,
    "cacheWriteInputTokenCount": _Figure.WRITE,
    "cache_write_1h_tokens": _Figure.WRITE_1H,
    "reasoning_tokens": _Figure.REASONING,
    "output_reasoning_tokens": _Figure.REASONING,
}
_NAMES_IN_DETAILS: Final = {
    "cached_tokens": _Figure.READ,
    "cache_read": _Figure.READ,
    "cache_write_tokens": _Figure.WRITE,
    "cache_creation_tokens": _Figure.WRITE,
    "cache_creation": _Figure.WRITE,
    "ephemeral_5m_input_tokens": _Figure.WRITE_5M,
    "ephemeral_1h_input_tokens": _Figure.WRITE_1H,
    "reasoning_tokens": _Figure.REASONING,
    "thinking_tokens": _Figure.REASONING,
    "reasoning": _Figure.REASONING,
}
# LangChain puts one of OpenAI's service tiers in front, and does not count these elsewhere.
_OF_A_TIER: Final = {
    "_cache_read": _Figure.READ,
    "_cache_creation": _Figure.WRITE,
    "_reasoning": _Figure.REASONING,
}
_DETAILS: Final = frozenset(
    {
        "cache_creation",
        "cache_creation_token_details",
        "completion_tokens_details",
        "details",
        "input_token_details",
        "input_tokens_details",
        "output_token_details",
        "output_tokens_details",
        "prompt_tokens_details",
    }
)
_COHERE: Final = frozenset({"billed_units", "tokens"})
_NESTED: Final = _DETAILS | _COHERE
_TELLING: Final = frozenset(_NAMES) | _NESTED | {"cacheDetails"}
_ANTHROPIC_CACHE: Final = frozenset({"cache_creation_input_tokens", "cache_read_input_tokens"})
_BEDROCK_PROMPT: Final = frozenset({"inputTokenCount", "inputTokens"})


class _Tally:
    """The largest of the figures that a record gives under names for the same thing."""

    __slots__ = ("_of_tiers", "largest", "legible")

    def __init__(self) -> None:
        self.largest: dict[int, int] = {}
        self._of_tiers: dict[int, int] = {}
        self.legible = True

    def figures(self) -> dict[int, int]:
        """Return the figures, those of a service tier added to the rest."""
        found = self.largest
        for figure, count in self._of_tiers.items():
            found[figure] = found.get(figure, 0) + count
        return found

    def take(self, fields: Mapping[Any, Any], names: Mapping[str, int], depth: int = 2) -> None:
        """Note all figures of a record and of the parts that belong to it."""
        largest = self.largest
        for name, value in fields.items():
            figure = names.get(name)
            if figure is not None and type(value) is int and 0 <= value <= _MOST_TOKENS:
                if figure not in largest or value > largest[figure]:
                    largest[figure] = value
                continue
            if value is None or not isinstance(name, str):
                continue
            inner = fields_of(value) if name in _NESTED else None
            if inner is not None:
                if depth:
                    of_cohere = name in _COHERE
                    self.take(inner, _NAMES if of_cohere else _NAMES_IN_DETAILS, depth - 1)
            elif figure is not None:
                self._note(figure, value)
            elif name == "cacheDetails":
                self._note_lifetimes(value)
            elif names is _NAMES_IN_DETAILS:
                self._note_tier(name, value)

    def _note(self, figure: int, value: object) -> None:
        count = count_of(value)
        if count is None:
            self.legible = False
        elif count >= self.largest.get(figure, 0):
            self.largest[figure] = count

    def _note_tier(self, name: str, value: object) -> None:
        for ending, figure in _OF_A_TIER.items():
            if name.endswith(ending):
                self._of_tiers[figure] = self._of_tiers.get(figure, 0) + (count_of(value) or 0)

    def _note_lifetimes(self, writes: object) -> None:
        for write in cast("list[object]", writes) if isinstance(writes, list) else ():
            if part(write, "ttl") == "1h":
                self._note(_Figure.WRITE_1H, part(write, "inputTokens"))


def count_of(value: object) -> int | None:
    """Read a number of tokens: whole, as a float, or in digits; None for what is none."""
    if isinstance(value, str):
        if not (value.isascii() and value.isdecimal() and len(value) <= _LONGEST_NUMBER):
            return None
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # NaN is in no range.
    return math.ceil(value) if 0 <= value <= _MOST_TOKENS else None


def read_figures(record: object, *, steps: bool = True) -> TokenUsage | None:
    """Read one usage record.

    Args:
        record: An object of an SDK, or plain data.
        steps: Look at the steps that Anthropic lists: what compaction and an advisor used is in
            them alone.

    Returns:
        None when it has no figures, or zero throughout. Zeros beside a `total_cost` of 0 are how
        LangChain marks an answer from its own cache, which used nothing: `TokenUsage()`.
    """
    if isinstance(record, TokenUsage):
        return fitted(record)
    fields = fields_of(record)
    if not fields:
        # Messages of protobuf (xAI's SDK, Vertex AI's) have properties only.
        fields = {name: part(record, name) for name in _NAMES}
    if len(fields) == len(_PLAIN):
        plain: Iterable[Any] = map(fields.get, _PLAIN)
        given, answered, total = plain
        if (
            type(given) is type(answered) is int
            and given > 0 < answered
            and given + answered == total <= _MOST_TOKENS
        ):
            # Nearly every call through Bedrock or Strands: nothing went through a cache.
            return TokenUsage(given, answered)
    if _TELLING.isdisjoint(fields):
        return None
    if (usage := _of_chat(fields)) is not None:
        return usage
    if _is_free(fields):
        return TokenUsage()
    tally = _Tally()
    tally.take(fields, _NAMES)
    figures = tally.figures()
    if not figures:
        return None
    usage = _add_up(figures, fields, legible=tally.legible)
    listed = fields.get("iterations")
    if steps and isinstance(listed, list):
        used = [read_figures(step, steps=False) for step in cast("list[object]", listed)]
        usage = larger(usage, _sum(one for one in used if one is not None))
    return usage if usage.total_tokens else None


def _of_chat(fields: Mapping[Any, Any]) -> TokenUsage | None:
    """Read what most servers of chat completions send; None where there is more to look at."""
    if not _OF_CHAT.issuperset(fields):
        return None
    prompt: Any = fields.get("prompt_tokens")
    output: Any = fields.get("completion_tokens")
    if not (
        type(prompt) is type(output) is int
        and prompt > 0 < output
        and prompt + output == fields.get("total_tokens")
        and prompt + output <= _MOST_TOKENS
    ):
        return None
    read = _detail(fields.get("prompt_tokens_details"), "cached_tokens", _OF_PROMPT)
    reasoning = _detail(fields.get("completion_tokens_details"), "reasoning_tokens", _OF_OUTPUT)
    if 0 <= read <= prompt and 0 <= reasoning <= output:
        return TokenUsage(prompt, output, read, 0, 0, reasoning)
    return None


def _detail(details: Any, name: str, known: frozenset[str]) -> int:
    """Return the one figure that counts among the details; -1 where there may be others."""
    if details is None:
        return 0
    if kind_of(details) is not dict or not known.issuperset(details):
        return -1
    figure = details.get(name, 0)
    return figure if type(figure) is int else -1


def is_free(record: object) -> bool:
    """Return whether a record says that the answer used nothing, as LangChain's own cache does."""
    if isinstance(record, TokenUsage):
        return fitted(record) == TokenUsage()
    return _is_free(fields_of(record) or {})


def _is_free(fields: Mapping[Any, Any]) -> bool:
    return (
        "total_cost" in fields and "input_tokens" in fields and count_of(fields["total_cost"]) == 0
    )


def fitted(usage: TokenUsage) -> TokenUsage:
    """Return figures of which no part is above its whole: the whole is raised.

    What is no count is 0, and the usage then marked as estimated.
    """
    prompt, output, read, write, write_1h, reasoning, estimated = usage
    if (
        set(map(type, usage[:-1])) == _WHOLE
        and read >= 0
        and 0 <= write_1h <= write
        and read + write <= prompt
        and 0 <= reasoning <= output
        and estimated is (estimated is True)
    ):
        return usage
    counts = [value if _is_count(value) else count_of(value) for value in usage[:-1]]
    prompt, output, read, write, write_1h, reasoning = (count or 0 for count in counts)
    write = max(write, write_1h)
    return TokenUsage(
        max(prompt, read + write),
        max(output, reasoning),
        read,
        write,
        write_1h,
        reasoning,
        estimated=usage.estimated is True or None in counts,
    )


def _is_count(value: object) -> TypeGuard[int]:
    # Sums may be above what one figure can be.
    return type(value) is int and value >= 0


def larger(one: TokenUsage, other: TokenUsage) -> TokenUsage:
    """Return the larger of each figure of two; estimated where the first is."""
    counts = map(max, one[:-1], other[:-1])
    return fitted(TokenUsage._make((*counts, one.estimated)))


def _sum(usages: Iterable[TokenUsage]) -> TokenUsage:
    counts = [sum(column) for column in zip(*usages, strict=True)]
    return TokenUsage._make((*counts[:-1], False)) if counts else TokenUsage()


def _is_separate(fields: Mapping[Any, Any]) -> bool:
    """Return whether a record may count its prompt without what went through the cache."""
    if "input_tokens" in fields:
        return not _ANTHROPIC_CACHE.isdisjoint(fields)
    return not _BEDROCK_PROMPT.isdisjoint(fields)


def _add_up(figures: Mapping[int, int], fields: Mapping[Any, Any], *, legible: bool) -> TokenUsage:
    amount = figures.get
    prompt, output, total = (
        amount(_Figure.PROMPT, 0),
        amount(_Figure.OUTPUT, 0),
        amount(_Figure.TOTAL, 0),
    )
    if prompt and output and sum(figures.values()) == prompt + output + total:
        # Nothing went through a cache, and nobody reasoned.
        return TokenUsage(prompt, max(output, total - prompt), estimated=not legible)
    read, reasoning = amount(_Figure.READ, 0), amount(_Figure.REASONING, 0)
    if (
        prompt
        and output
        and prompt + output == total
        and _OF_OPENAI.issuperset(figures)
        and read <= prompt
        and reasoning <= output
    ):
        # What was cached, and what was reasoning, is inside.
        return TokenUsage(prompt, output, read, 0, 0, reasoning, estimated=not legible)
    write_1h = amount(_Figure.WRITE_1H, 0)
    write = max(amount(_Figure.WRITE, 0), write_1h + amount(_Figure.WRITE_5M, 0))
    cached = read + write
    # Strands fills in the same record for providers that count the cache inside.
    if _is_separate(fields) and (total != prompt + output or cached > prompt):
        prompt += cached
    prompt = max(prompt, cached, read + amount(_Figure.NOT_CACHED, 0))
    prompt += amount(_Figure.PROMPT_EXTRA, 0)
    if reasoning > output:
        output += reasoning
    extra = amount(_Figure.OUTPUT_EXTRA, 0)
    output += extra
    reasoning += extra

    has_prompt, has_output = _Figure.PROMPT in figures, _Figure.OUTPUT in figures
    if has_output and not has_prompt and total >= prompt + output > 0:
        prompt, has_prompt = total - output, True
    elif has_prompt and not has_output and total >= prompt + output > 0:
        has_output = True
    return TokenUsage(
        prompt,
        max(output, total - prompt),
        read,
        write,
        write_1h,
        reasoning,
        estimated=not (legible and has_prompt and has_output),
    )
