"""The request of a model and its answer, in the words of LangChain's packages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import reduce
from typing import Any, Final, NamedTuple, TypeGuard, cast

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import LLMResult

from budgetguard_core.kit import (
    OpenModelCall,
    TokenUsage,
    ToolCall,
    merge_usage,
    reported_cost,
    token_usage,
)
from budgetguard_langgraph._seams import options_of, parameters_of

_BOUNDS: Final = (
    "max_completion_tokens",
    "max_tokens",
    "max_output_tokens",
    "max_tokens_to_sample",
    "num_predict",
)
_ANY_BOUND: Final = frozenset(_BOUNDS)
# Elsewhere langchain-core makes the provider's name up from the name of the model's class.
_NAMES: Final = """
    amazon_bedrock anthropic azure azure_openai bedrock bedrock_converse cerebras cohere
    deepseek fireworks google_genai google_vertexai groq huggingface llamacpp mistral mistralai
    moonshot novita nvidia ollama openai openrouter perplexity together togetherai vllm xai
"""
_PROVIDERS: Final = frozenset(_NAMES.split())
_CUT: Final = frozenset({"length", "max_tokens", "max_output_tokens", "model_length"})
_REFUSED: Final = frozenset({"refusal", "content_filter", "SAFETY"})
_FINISHES: Final = ("finish_reason", "stop_reason", "done_reason")
# What providers run by themselves; `server_tool_call` is LangChain's own word for all of it.
_HOSTED: Final = frozenset({"server_tool_call", "server_tool_use", "mcp_tool_use", "mcp_call"})
_HOSTED_CALLS: Final = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
)


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a record of the framework's has named fields."""
    return isinstance(value, Mapping)


def totals_in(reported: Sequence[Mapping[str, Any]]) -> TokenUsage | None:
    """Return the usage of a stream whose chunks have totals so far; None where they are shares.

    LangChain adds up what chunks report. Totals never fall, and each of them has the prompt again,
    or the prompt comes first and the completion grows with each chunk.
    """
    if len(reported) < 2:
        return None
    parts = [token_usage(one) for one in reported]
    given = [(one.input_tokens, one.output_tokens) for one in parts if one is not None]
    answered = [output for _, output in given]
    if len(given) < 2 or answered != sorted(answered):
        return None
    prompts = [prompt for prompt, _ in given]
    is_total = 0 not in prompts and prompts == sorted(prompts)
    later = answered[1:]
    is_one_sided = answered[0] == 0 and not any(prompts[1:]) and len(set(later)) == len(later) > 1
    return reduce(merge_usage, parts) if is_total or is_one_sided else None


def figures_of(
    response: LLMResult, answer: BaseMessage | None, reported: Sequence[Mapping[str, Any]]
) -> tuple[TokenUsage | None, Decimal | None]:
    """Return what a call has used, and what its provider says that it cost."""
    if answer is None:
        return token_usage(response), reported_cost(response)
    # LangChain's own record first: nearly all answers have one, and nothing else is looked at.
    own: Any = getattr(answer, "usage_metadata", None)
    used = totals_in(reported) or token_usage(own) or token_usage(answer)
    cost = reported_cost(own)
    return used, reported_cost(answer.response_metadata) if cost is None else cost


def answer_of(response: LLMResult) -> BaseMessage | None:
    """Return the message that a model call answered with; None for a text model."""
    for generations in response.generations:
        for generation in generations:
            message = getattr(generation, "message", None)
            return message if isinstance(message, BaseMessage) else None
    return None


def written(response: LLMResult) -> str:
    """Return all that the model wrote: its text, and the arguments of its tool calls."""
    for generations in response.generations:
        for generation in generations:
            calls = getattr(getattr(generation, "message", None), "tool_calls", None) or ()
            return generation.text + "".join(f"{call['name']}{call['args']}" for call in calls)
    return ""


def model_of(response: LLMResult, message: BaseMessage | None) -> str | None:
    """Return the name of the model that was really called, if the provider says so."""
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
    options = parameters.get("options")
    bound = _count(metadata.get("ls_max_tokens")) or _bound_in(parameters)
    if bound is None and options is not None and is_mapping(options):
        bound = _bound_in(options)
    return (
        model if isinstance(model, str) else None,
        provider if provider in _PROVIDERS else None,
        bound,
    )


def _bound_in(parameters: Mapping[str, Any]) -> int | None:
    if _ANY_BOUND.isdisjoint(parameters):
        return None
    return next((found for name in _BOUNDS if (found := _count(parameters.get(name)))), None)


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def own_bound(model: object) -> int | None:
    """Return the completion bound of a model that tells it nowhere but on itself, as ChatOllama."""
    return next((found for name in _BOUNDS if (found := _count(getattr(model, name, None)))), None)


def was_cut(message: BaseMessage | None) -> bool:
    """Return whether an answer ended because it may not be longer."""
    metadata: dict[str, Any] = getattr(message, "response_metadata", None) or {}
    return any(name in metadata and str(metadata[name]).lower() in _CUT for name in _FINISHES)


def unusable_in(message: BaseMessage | None) -> list[tuple[ToolCall, str, str]]:
    """List what an answer has that nobody can use, each with its text and kind.

    That is a tool call that nobody can read, and a refusal.
    """
    if not isinstance(message, AIMessage):
        return []
    found = [
        (
            ToolCall(name=call["name"] or "unknown", arguments=call["args"], id=call["id"]),
            str(call["error"]),
            "invalid tool call",
        )
        for call in message.invalid_tool_calls or ()
    ]
    ended, refused = message.response_metadata, "refusal" in message.additional_kwargs
    refused = refused and bool(message.additional_kwargs["refusal"])
    for name in _FINISHES:
        refused = refused or (name in ended and str(ended[name]) in _REFUSED)
    if refused:
        found.append((ToolCall(name="answer", kind="output"), "refused", "refusal"))
    return found


def tool_call(call: Any) -> ToolCall:
    """Return a tool call of an answer, in the kit's words."""
    return ToolCall(name=call["name"], arguments=call["args"], id=call["id"])


def calls_of(message: BaseMessage | None) -> tuple[list[ToolCall], list[ToolCall]]:
    """List the tool calls of an answer: those that are to run, and those the provider ran."""
    if not isinstance(message, AIMessage):
        return [], []
    requested = [tool_call(call) for call in message.tool_calls]
    return requested, [] if isinstance(message.content, str) else list(_hosted(message))


def _hosted(message: AIMessage) -> Sequence[ToolCall]:
    calls: list[ToolCall] = []
    for block in cast("Sequence[object]", message.content):
        if not is_mapping(block):
            continue
        kind = block.get("type")
        if kind in _HOSTED_CALLS:
            name = str(kind).removesuffix("_call")
        elif kind in _HOSTED:
            name = str(block.get("name") or kind)
        else:
            continue
        arguments = block.get("input") or block.get("args") or block.get("action")
        id_ = block.get("id")
        calls.append(
            ToolCall(
                name=name,
                arguments=dict(arguments) if is_mapping(arguments) else None,
                id=id_ if isinstance(id_, str) else None,
                kind="hosted",
            )
        )
    return calls


_LOG: Final = logging.getLogger("budgetguard_langgraph")


class _Words(NamedTuple):
    tokens: str
    timeout: str | None = None
    options: str | None = None
    """The setting that holds it, together with all of the model's own options."""
    model: str | None = "model"
    """The setting of the model's name."""


# Packages whose models take these settings with a call, whatever class of them is used. A model
# of any other package is left alone unless it names the setting itself: one that it does not know
# would break the call.
_PACKAGES: Final[Mapping[str, _Words]] = {
    "langchain_anthropic": _Words("max_tokens", "timeout"),
    "langchain_deepseek": _Words("max_tokens", "timeout"),
    "langchain_fireworks": _Words("max_tokens"),
    "langchain_google_genai": _Words("max_output_tokens", model=None),
    "langchain_google_vertexai": _Words("max_output_tokens", model=None),
    "langchain_groq": _Words("max_tokens", "timeout"),
    "langchain_mistralai": _Words("max_tokens"),
    "langchain_ollama": _Words("num_predict", options="options"),
    "langchain_openai": _Words("max_tokens", "timeout"),
    "langchain_together": _Words("max_tokens", "timeout"),
    "langchain_xai": _Words("max_tokens", "timeout"),
}
_KNOWN: dict[type, _Words | None] = {}
_REPORTED: set[str] = set()


def bind(
    model: Any,
    settings: dict[str, Any],
    tokens: int | None,
    open_call: OpenModelCall,
    parameters: Mapping[str, Any] | None = None,
) -> bool:
    """Put bounds into the settings of one request; tell whether that of the tokens is in it."""
    words = words_of(model)
    if words is None:
        if tokens is not None:
            notify(model)
        return False
    if open_call.fallback_model is not None and words.model is not None:
        settings[words.model] = open_call.fallback_model
    if tokens is not None:
        held = settings
        if words.options is not None:
            # A request that has options has no others.
            held = dict(
                settings.get(words.options) or options_of(model, (parameters or {}).get("stop"))
            )
            settings[words.options] = held
        given: Any = held.get(words.tokens)
        held[words.tokens] = min(given, tokens) if type(given) is int and given > 0 else tokens
    if words.timeout is not None and (seconds := open_call.seconds) is not None:
        limit: Any = settings.get(words.timeout)
        known = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        settings[words.timeout] = min(seconds, limit) if known else seconds
    return tokens is not None


def words_of(model: object) -> _Words | None:
    """Return the words of a model; None where a bound cannot be given to it."""
    kind = type(model)
    if kind not in _KNOWN:
        packages = [one.__module__.partition(".")[0] for one in kind.__mro__]
        words = next((_PACKAGES[name] for name in packages if name in _PACKAGES), None)
        if words is not None and words.options is not None and options_of(model) is None:
            words = None
        if words is None and "max_tokens" in parameters_of(kind):
            words = _Words("max_tokens", model="model" if "model" in parameters_of(kind) else None)
        _KNOWN[kind] = words
    return _KNOWN[kind]


def notify(model: Any) -> None:
    """Warn once for each class that takes no completion bound."""
    kind = type(model).__name__
    if kind not in _REPORTED:
        _REPORTED.add(kind)
        _LOG.warning(
            "The completion bound cannot be given to %s with a call; what it may write is "
            "reserved instead. Set the bound on the model itself.",
            kind,
        )
