"""The SDK's record of a model call: its model, its text, its end."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    Handoff,
    ModelResponse,
    OpenAIChatCompletionsModel,
    RunConfig,
    Tool,
)
from agents.models import get_default_model
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from budgetguard_core import TokenUsage
from budgetguard_core.kit import estimate, part, token_usage
from budgetguard_openai_agents._tools import original

# A figure above it is looked at closely: it may be none.
_PLAIN = 10**9
_ROUTERS = frozenset({"any-llm", "litellm"})
_WRITTEN = ("text", "arguments", "input", "refusal")


def model_of(agent: Agent[Any], run_config: RunConfig) -> tuple[str | None, str | None]:
    """Find the model that an agent's next call goes to, and the provider where it is named."""
    model = _model(agent, run_config)
    name = model if isinstance(model, str) else getattr(model, "model", None)
    return _named(name) if isinstance(name, str) else (None, None)


@lru_cache(maxsize=64)
def _named(name: str) -> tuple[str, str | None]:
    parts = name.split("/")
    if len(parts) > 1 and parts[0] in _ROUTERS:
        del parts[0]
    return parts[-1], parts[0] if len(parts) > 1 else None


def schemas_of(agent: Agent[Any], tools: Iterable[Tool]) -> list[object]:
    """List what the model is told of an agent's tools and handoffs: equal from turn to turn."""
    schemas: list[object] = []
    for tool in tools:
        if isinstance(tool, FunctionTool):
            # A server of tools makes each of them anew for every turn.
            schemas.append((tool.name, tool.description, tool.params_json_schema))
        else:
            schemas.append(original(tool))
    for to in agent.handoffs:
        if isinstance(to, Handoff):
            schemas.append((to.tool_name, to.tool_description, to.input_json_schema))
        else:
            # The rest of an agent is not sent.
            about = Handoff.default_tool_description(to)
            schemas.append((Handoff.default_tool_name(to), about))
    return schemas


def usage_of(response: ModelResponse) -> TokenUsage | None:
    """Return what one call used; None when the provider reported nothing."""
    usage = response.usage
    inputs, outputs = usage.input_tokens, usage.output_tokens
    if not (inputs or outputs):
        return None
    before, after = usage.input_tokens_details, usage.output_tokens_details
    if type(before) is InputTokensDetails and type(after) is OutputTokensDetails:
        # Nearly every record: figures that add up, under the names that the SDK gives them.
        told = TokenUsage(
            inputs,
            outputs,
            cache_read_tokens=vars(before).get("cached_tokens", 0),
            cache_write_tokens=vars(before).get("cache_write_tokens", 0),
            reasoning_tokens=vars(after).get("reasoning_tokens", 0),
        )
        adds_up = token_usage(told) is told and usage.total_tokens == told.total_tokens
        has_more = before.model_extra or after.model_extra or not (inputs and outputs)
        if adds_up and not has_more and told.total_tokens < _PLAIN:
            return told
    return token_usage(usage)


def written(items: Iterable[Any]) -> str:
    """Return all that a model wrote: texts, reasoning, and the arguments of its calls."""
    texts: list[str] = []
    waiting = list(items)[::-1]
    while waiting:
        item = waiting.pop()
        texts += [text for name in _WRITTEN if isinstance(text := part(item, name), str)]
        for name in ("content", "summary"):
            inner = part(item, name)
            if isinstance(inner, list):
                waiting += inner[::-1]
    return "\n".join(texts)


def ended_at_its_bound(
    response: ModelResponse, bound: int | None, agent: Agent[Any], run_config: RunConfig
) -> bool:
    """Return whether an answer was cut at its completion bound.

    The SDK keeps the reason of the Responses API only, as the status of the items; of chat
    completions the bound itself has to tell.
    """
    if bound is None:
        return False
    if any(part(item, "status") == "incomplete" for item in response.output):
        return True
    if not _is_a_chat(_model(agent, run_config)):
        return False
    used = response.usage.output_tokens or estimate(response.output)
    return used >= bound


def _is_a_chat(model: object) -> bool:
    return isinstance(model, OpenAIChatCompletionsModel) or "litellm" in type(model).__module__


def _model(agent: Agent[Any], run_config: RunConfig) -> object:
    if run_config.model is not None:
        return run_config.model
    if agent.model is None and agent.prompt is not None:
        return None  # the prompt names a model that is known to its provider alone
    return get_default_model() if agent.model is None else agent.model
