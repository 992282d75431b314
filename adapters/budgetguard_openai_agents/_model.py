"""The model calls of a run: their model, settings, text, usage and end."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, cast

from agents import (
    Agent,
    FunctionTool,
    Handoff,
    ModelResponse,
    ModelRetrySettings,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Tool,
)
from agents.models import get_default_model
from agents.run import CallModelData, ModelInputData
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic.dataclasses import dataclass

from budgetguard_core.kit import TokenUsage, estimate, part, token_usage
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._calls import around
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


def can_be_set(agent: Agent[Any], run_config: RunConfig) -> bool:
    """Return whether the next request can name another model: it is one of OpenAI's own classes."""
    model = _model(agent, run_config)
    if isinstance(model, str):
        return model.partition("/")[0] not in _ROUTERS
    return isinstance(model, OpenAIChatCompletionsModel | OpenAIResponsesModel)


def set_model(settings: ModelSettings, name: str | None) -> None:
    """Set the model of a request beside the one of its class: both APIs take the later one."""
    if name is not None:
        body: Any = settings.extra_body
        settings.extra_body = {**(body or {}), "model": name}


def _is_a_chat(model: object) -> bool:
    return isinstance(model, OpenAIChatCompletionsModel) or "litellm" in type(model).__module__


def _model(agent: Agent[Any], run_config: RunConfig) -> object:
    if run_config.model is not None:
        return run_config.model
    if agent.model is None and agent.prompt is not None:
        return None  # the prompt names a model that is known to its provider alone
    return get_default_model() if agent.model is None else agent.model


# What providers call the bound of a completion.
_BOUNDS = ("max_output_tokens", "max_completion_tokens", "max_tokens")


def own_bound(settings: ModelSettings) -> int | None:
    """Return the completion tokens that settings ask for, beside their own name for it too."""
    places = _bounds_beside(settings)
    return max(own for _, _, own in places) if places else settings.max_tokens


def set_bound(settings: ModelSettings, bound: int | None) -> None:
    """Set the completion tokens that settings ask for, under the name that the user gave them.

    A name is given beside the settings because the model takes no other.
    """
    places = () if bound is None else _bounds_beside(settings)
    for place, name, _ in places:
        setattr(settings, place, {**getattr(settings, place), name: bound})
    settings.max_tokens = None if places else bound


def _bounds_beside(settings: ModelSettings) -> list[tuple[str, str, int]]:
    if settings.extra_args is None and settings.extra_body is None:
        return []
    return [
        (place, name, own)
        for place in ("extra_args", "extra_body")
        for name in _BOUNDS
        if isinstance(own := part(getattr(settings, place), name), int)
    ]


@dataclass
class _CallSettings(ModelSettings):
    """The settings of one call. The SDK may have copied them before the call was admitted."""

    def __post_init__(self) -> None:
        calls = around()
        if calls is not None:
            calls.settings = self


def asking(resolve: Callable[..., ModelSettings]) -> Callable[..., ModelSettings]:
    """Wrap the method of settings that makes those of a call, so that they ask the run around.

    The run's configuration does not carry them: the SDK would evaluate all its annotations anew
    for each run.
    """

    @wraps(resolve)
    def resolved(self: ModelSettings, override: Any) -> ModelSettings:
        made = resolve(self, override)
        calls = around()
        if calls is None or calls.bounds is None or calls.run.ended:
            return made
        bounds = calls.bounds
        settings = object.__new__(_CallSettings)
        found = settings.__dict__
        found.update(made.__dict__)
        if made.include_usage is None:
            # Streams are asked for their usage; some providers report it nowhere else.
            found["include_usage"] = True
        set_bound(settings, bounds.output_bound(own_bound(made)))
        set_model(settings, bounds.fallback_model)
        if made.retry is not None:
            found["retry"] = _admitted(made.retry, bounds)
        calls.settings = settings
        return settings

    return resolved


class _Filter:
    """The filter that sees the input of each model call last, before the call is made."""

    def __init__(
        self,
        base: Callable[[CallModelData[Any]], Any] | None,
        settings: ModelSettings | None,
        bounds: Any,
    ) -> None:
        self.base = base
        self._bound = None if settings is None else own_bound(settings)
        self._bounds = bounds

    async def __call__(self, data: CallModelData[Any]) -> ModelInputData:
        sent: Any = data.model_data
        if self.base is not None:
            sent = self.base(data)
            if inspect.isawaitable(sent):
                sent = await sent
        if isinstance(sent, ModelInputData):
            agent = data.agent
            own = own_bound(agent.model_settings) if self._bound is None else self._bound
            return cast("ModelInputData", await self._bounds.admit(agent, sent, own))
        # The SDK refuses what is none.
        return cast("ModelInputData", sent)


def bounded_config(
    config: RunConfig | dict[str, Any] | None, bounds: Any
) -> RunConfig | dict[str, Any]:
    """Return the user's configuration of a run, asking the budget before each call."""
    own = config_of(config)
    asks = _Filter(own.call_model_input_filter, own.model_settings, bounds)
    if isinstance(config, dict) or (config is None and _seams.TAKES_MAPPING):
        return {**(config or {}), "call_model_input_filter": asks}
    return _with_filter(own, asks)


def config_of(config: RunConfig | dict[str, Any] | None) -> RunConfig:
    """Return a configuration as the user gave it.

    A sub-agent inherits the one of the run above, whose bounds are not its own.
    """
    given = RunConfig(**config) if isinstance(config, dict) else config or RunConfig()
    filter_ = given.call_model_input_filter
    return _with_filter(given, filter_.base) if isinstance(filter_, _Filter) else given


def _with_filter(config: RunConfig, filter_: Callable[..., Any] | None) -> RunConfig:
    # Nothing of it is to be checked again.
    made = copy.copy(config)
    made.call_model_input_filter = filter_
    return made


def plain_settings(agent: Agent[Any], config: RunConfig) -> ModelSettings:
    """Return an agent's settings under a run's, without the bounds of any run around."""
    settings: ModelSettings = inspect.unwrap(ModelSettings.resolve)(
        agent.model_settings, config.model_settings
    )
    return settings


def _admitted(retry: ModelRetrySettings, bounds: Any) -> ModelRetrySettings:
    """Return retries of which each is admitted before it is made."""
    policy = retry.policy
    if policy is None:
        return retry

    @wraps(policy)
    async def admit(context: Any) -> Any:
        decision = policy(context)
        if inspect.isawaitable(decision):
            decision = await decision
        wanted = decision if isinstance(decision, bool) else decision.retry
        if not wanted or await bounds.admit_retry(getattr(context, "error", None)):
            return decision
        return False

    return replace(retry, policy=admit)
