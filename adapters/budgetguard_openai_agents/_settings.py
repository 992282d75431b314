"""The settings and the input of a run's model calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, cast

from agents import Agent, ModelRetrySettings, ModelSettings, RunConfig
from agents.run import CallModelData, ModelInputData
from pydantic.dataclasses import dataclass

from budgetguard_core.kit import part
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._calls import around

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
            return await self._bounds.admit(agent, sent, own)
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
