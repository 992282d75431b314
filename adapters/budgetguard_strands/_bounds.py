"""The facts of a Strands model: its name, and the completion bound of one call."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

from budgetguard_core.kit import part

_LEAST = {"OpenAIResponsesModel": 16}
"""The smallest bound that a provider takes, where it is more than one."""

# Where the settings of each model keep the bound: at the top, or in the parameters of the request.
_PLACES: dict[str, str | tuple[str, ...]] = {
    "AnthropicModel": "max_tokens",
    "BedrockModel": "max_tokens",
    "LlamaAPIModel": "max_completion_tokens",
    "MistralModel": "max_tokens",
    "OllamaModel": "max_tokens",
    "WriterModel": "max_tokens",
    "GeminiModel": ("max_output_tokens",),
    "LlamaCppModel": ("max_tokens",),
    "LiteLLMModel": ("max_tokens", "max_completion_tokens"),
    "OpenAIModel": ("max_completion_tokens", "max_tokens"),
    "OpenAIResponsesModel": ("max_output_tokens",),
}


def model_name(model: Any) -> str | None:
    """Return the name under which a model is priced, or None when its settings have none."""
    # A model of the user's own may do without settings.
    name = part(model.get_config(), "model_id") if hasattr(model, "get_config") else None
    return name if isinstance(name, str) else None


def with_bound(model: Any, tokens: int) -> Any:
    """Copy a model so that it asks for `tokens` completion tokens at most.

    What it thinks before it answers is part of its completion: a bound below the thinking budget
    in its settings would be refused, so that is the least.

    Returns:
        The copy; or the model itself, when it is bounded lower already, or is none of Strands'
        own: then nobody but its author knows where the bound goes.
    """
    config: Mapping[str, Any] = getattr(model, "get_config", dict)()
    tokens = max(tokens, _thinking(config) + 1)
    for kind in type(model).__mro__:
        name = kind.__name__
        tokens = max(tokens, _LEAST.get(name, 1))
        if name == "SageMakerAIModel":
            return _with(model, "payload_config", model.payload_config, "max_tokens", tokens)
        position = _PLACES.get(name)
        if isinstance(position, str):
            return _with(model, "config", config, position, tokens)
        if position is not None:
            params: Mapping[str, Any] = config.get("params") or {}
            key = next((one for one in position if one in params), position[0])
            if _is_lower(params.get(key), tokens):
                return model
            return _with(model, "config", config, "params", {**params, key: tokens})
    return model


def can_be_set(model: Any) -> bool:
    """Return whether the name of a model can be set: one of Strands' own, that has one."""
    kinds = (kind.__name__ for kind in type(model).__mro__)
    return model_name(model) is not None and any(kind in _PLACES for kind in kinds)


def named(model: Any, name: str) -> Any:
    """Copy a model so that its requests go to another one of its provider."""
    return _with(model, "config", model.get_config(), "model_id", name)


def give_back(copied: Any, model: Any) -> None:
    """Give a model what its copy has changed of its own state during a call."""
    own = cast("dict[str, Any]", vars(model))
    changed = cast("dict[str, Any]", vars(copied))
    for name, value in changed.items():
        if name not in ("config", "payload_config") and own.get(name) is not value:
            setattr(model, name, value)


def _thinking(config: Mapping[str, Any]) -> int:
    for position in ("params", "additional_request_fields"):
        tokens = part(part(config.get(position), "thinking"), "budget_tokens")
        if isinstance(tokens, int):
            return tokens
    return 0


def _with(model: Any, settings: str, config: Mapping[str, Any], name: str, value: Any) -> Any:
    if isinstance(value, int) and _is_lower(config.get(name), value):
        return model
    copied = copy.copy(model)
    setattr(copied, settings, {**config, name: value})
    return copied


def _is_lower(own: object, tokens: int) -> bool:
    return isinstance(own, int) and own <= tokens
