"""Model settings that bound each call by what is left of the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from typing import Any, Protocol

import agents.run
from agents import Agent, ModelRetrySettings, ModelSettings, RunConfig

# From 0.24 on the runner closes the model provider that it made for a run without a
# configuration; it still knows one of a mapping as its own.
_TAKES_MAPPING = hasattr(agents.run, "_normalize_run_config_for_runner")
_OWN = ("max_tokens", "retry", "timeout")


class Bounds(Protocol):
    """What the settings ask the run that they belong to."""

    agent: Agent[Any]

    def output_bound(self, own: int | None) -> int | None:
        """Return the completion tokens that the next call may ask for."""
        ...

    def seconds_left(self) -> float | None:
        """Return the time that the next call may take."""
        ...

    def admit_retry(self, error: BaseException | None) -> bool:
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
        object.__setattr__(self, "_bounds", bounds)

    @property
    def _run(self) -> Bounds:
        bounds: Bounds = self.__dict__["_bounds"]
        return bounds

    def _given(self, name: str) -> Any:
        """Return what the run or the agent says, None where this SDK has no such setting."""
        own = getattr(self.base, name, None)
        return getattr(self._run.agent.model_settings, name, None) if own is None else own

    @property
    def max_tokens(self) -> int | None:  # type: ignore[override]
        """Completion tokens of the next call."""
        return self._run.output_bound(self._given("max_tokens"))

    @property
    def timeout(self) -> float | None:  # type: ignore[override]
        """Seconds of the next call: its own limit, or the time left."""
        own: float | None = self._given("timeout")
        left = self._run.seconds_left()
        if left is None or own is None:
            return own if left is None else left
        return min(own, left)

    @property
    def retry(self) -> ModelRetrySettings | None:  # type: ignore[override]
        """The user's retries, each of them admitted before it is made."""
        for given in (self.base.retry, self._run.agent.model_settings.retry):
            if given is not None and given.policy is not None:
                merged = self.base.retry or given
                return replace(merged, policy=_admitted(given.policy, self._run))
        return self.base.retry


def bounded_config(
    config: RunConfig | dict[str, Any] | None, bounds: Bounds
) -> RunConfig | dict[str, Any]:
    """Return the user's configuration of a run with settings that bound each call."""
    given = config_of(config)
    base = (given.model_settings if given else None) or ModelSettings()
    if isinstance(base, BoundedSettings):
        # A sub-agent inherits the configuration of the run above, whose bounds are not its own.
        base = base.base
    settings = BoundedSettings(base, bounds)
    if config is None and _TAKES_MAPPING:
        return {"model_settings": settings}
    if isinstance(config, dict):
        return {**config, "model_settings": settings}
    return replace(given or RunConfig(), model_settings=settings)


def config_of(config: RunConfig | dict[str, Any] | None) -> RunConfig | None:
    """Return a configuration as the object that it stands for."""
    return RunConfig(**config) if isinstance(config, dict) else config


def _admitted(policy: Callable[[Any], Any], bounds: Bounds) -> Callable[[Any], Any]:
    @wraps(policy)
    async def admit(context: Any) -> Any:
        decision = policy(context)
        if inspect.isawaitable(decision):
            decision = await decision
        wanted = decision if isinstance(decision, bool) else decision.retry
        if not wanted or bounds.admit_retry(getattr(context, "error", None)):
            return decision
        return False

    return admit
