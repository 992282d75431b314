"""Settings of a run that ask its budget: model settings, and what is sent to the model."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from functools import wraps
from typing import Any, Protocol, cast

from agents import Agent, ModelRetrySettings, ModelSettings, RunConfig
from agents.run import CallModelData, ModelInputData
from pydantic.dataclasses import dataclass

from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._calls import around

_OWN = ("include_usage", "max_tokens", "retry")


class Bounds(Protocol):
    """What the settings ask the run that they belong to."""

    @property
    def agent(self) -> Agent[Any]:
        """The agent at work."""
        ...

    def pruned(self, agent: Agent[Any], sent: ModelInputData) -> ModelInputData:
        """Return what is to be sent, or what is kept of it."""
        ...

    async def admit(self, agent: Agent[Any], sent: ModelInputData, own: int | None) -> None:
        """Ask for a model call that is about to be made, or stop the run."""
        ...

    def output_bound(self, own: int | None) -> int | None:
        """Return the completion tokens that the next call may ask for."""
        ...

    async def admit_retry(self, error: BaseException | None) -> bool:
        """Tell whether a failed call may be tried again, and count the attempt if so."""
        ...


class BoundedSettings(ModelSettings):
    """The run's settings, overlaid on every agent's: the runner reads them anew for each call.

    Attributes:
        base: The settings that the user gave for the run.
    """

    base: ModelSettings

    def __init__(self, base: ModelSettings, bounds: Bounds) -> None:
        for field in fields(ModelSettings):
            if field.name not in _OWN:
                object.__setattr__(self, field.name, getattr(base, field.name))
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "_says_nothing", _says_nothing(base))
        object.__setattr__(self, "_bounds", bounds)

    @property
    def _run(self) -> Bounds:
        bounds: Bounds = self.__dict__["_bounds"]
        return bounds

    def own(self, name: str, agent: Agent[Any] | None = None) -> Any:
        """Return what the run, or else the agent, says."""
        own = getattr(self.base, name)
        return getattr((agent or self._run.agent).model_settings, name) if own is None else own

    def of_a_call(self, settings: ModelSettings) -> dict[str, Any] | None:
        """Return an agent's settings with the bounds of a call; None where more is to be merged.

        The SDK's way makes and checks every setting anew, twice a turn.
        """
        retry = self.retry
        if not self.__dict__["_says_nothing"] or settings.extra_args or retry or settings.retry:
            return None
        found = {**vars(settings), "include_usage": self.include_usage}
        bound = self.max_tokens
        if bound is not None:
            found["max_tokens"] = bound
        return found

    @property
    def max_tokens(self) -> int | None:  # type: ignore[override]
        """Completion tokens of the next call."""
        return self._run.output_bound(self.own("max_tokens"))

    @property
    def include_usage(self) -> bool | None:  # type: ignore[override]
        """Ask streams for their usage; some providers report it nowhere else."""
        own: bool | None = self.own("include_usage")
        return True if own is None else own

    @property
    def retry(self) -> ModelRetrySettings | None:  # type: ignore[override]
        """The user's retries, each of them admitted before it is made."""
        for given in (self.base.retry, self._run.agent.model_settings.retry):
            if given is not None and given.policy is not None:
                merged = self.base.retry or given
                return replace(merged, policy=_admitted(given.policy, self._run))
        return self.base.retry


@dataclass
class _CallSettings(ModelSettings):
    """The settings of one call. The SDK may have copied them before the call was admitted."""

    def __post_init__(self) -> None:
        calls = around()
        if calls is not None:
            calls.settings = self


def asking(resolve: Callable[..., ModelSettings]) -> Callable[..., ModelSettings]:
    """Wrap the method of settings that makes those of a call, so that it can be bounded."""

    @wraps(resolve)
    def resolved(self: ModelSettings, override: Any) -> ModelSettings:
        if not isinstance(override, BoundedSettings):
            return resolve(self, override)
        own = override.of_a_call(self)
        settings: Any = object.__new__(_CallSettings)
        settings.__dict__.update(vars(resolve(self, override)) if own is None else own)
        settings.__post_init__()
        return cast("ModelSettings", settings)

    return resolved


def _says_nothing(settings: ModelSettings) -> bool:
    names = (field.name for field in fields(ModelSettings) if field.name not in _OWN)
    return all(getattr(settings, name) is None for name in names)


class _Filter:
    """What sees the input of each model call last, before the call's settings are read."""

    def __init__(self, base: Callable[[CallModelData[Any]], Any] | None, settings: Any) -> None:
        self.base = base
        self._settings = settings

    async def __call__(self, data: CallModelData[Any]) -> ModelInputData:
        sent: Any = data.model_data
        if self.base is not None:
            sent = self.base(data)
            if inspect.isawaitable(sent):
                sent = await sent
        if isinstance(sent, ModelInputData):
            settings: BoundedSettings = self._settings
            own = settings.own("max_tokens", data.agent)
            bounds: Bounds = settings.__dict__["_bounds"]
            sent = bounds.pruned(data.agent, sent)
            await bounds.admit(data.agent, sent, own)
        # The SDK refuses what is none.
        return cast("ModelInputData", sent)


def bounded_config(
    config: RunConfig | dict[str, Any] | None, bounds: Bounds
) -> RunConfig | dict[str, Any]:
    """Return the user's configuration of a run, asking the budget before each call."""
    own = config_of(config)
    settings = BoundedSettings(own.model_settings or ModelSettings(), bounds)
    changes: dict[str, Any] = {
        "model_settings": settings,
        "call_model_input_filter": _Filter(own.call_model_input_filter, settings),
    }
    if config is None and _seams.TAKES_MAPPING:
        return changes
    if isinstance(config, dict):
        return {**config, **changes}
    return replace(own, **changes)


def config_of(config: RunConfig | dict[str, Any] | None) -> RunConfig:
    """Return a configuration as the user gave it.

    A sub-agent inherits the one of the run above, whose bounds are not its own.
    """
    given = RunConfig(**config) if isinstance(config, dict) else config or RunConfig()
    settings, filter_ = given.model_settings, given.call_model_input_filter
    if isinstance(settings, BoundedSettings):
        given = replace(given, model_settings=settings.base)
    if isinstance(filter_, _Filter):
        given = replace(given, call_model_input_filter=filter_.base)
    return given


def _admitted(policy: Callable[[Any], Any], bounds: Bounds) -> Callable[[Any], Awaitable[Any]]:
    @wraps(policy)
    async def admit(context: Any) -> Any:
        decision = policy(context)
        if inspect.isawaitable(decision):
            decision = await decision
        wanted = decision if isinstance(decision, bool) else decision.retry
        if not wanted or await bounds.admit_retry(getattr(context, "error", None)):
            return decision
        return False

    return admit
