"""The completion bound of one model call, in the settings of Strands' own models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

from budgetguard_core.kit import part

_LEAST = {"OpenAIResponsesModel": 16}
"""The smallest bound that a provider takes, where it is more than one."""

# Where each model's settings keep the bound: at the top, or in the parameters of the request.
_AT_THE_TOP = {
    "AnthropicModel": "max_tokens",
    "BedrockModel": "max_tokens",
    "LlamaAPIModel": "max_completion_tokens",
    "MistralModel": "max_tokens",
    "OllamaModel": "max_tokens",
    "WriterModel": "max_tokens",
}
_IN_PARAMS = {
    "GeminiModel": ("max_output_tokens",),
    "LlamaCppModel": ("max_tokens",),
    "LiteLLMModel": ("max_tokens", "max_completion_tokens"),
    "OpenAIModel": ("max_completion_tokens", "max_tokens"),
    "OpenAIResponsesModel": ("max_output_tokens",),
}


def bounded(model: Any, tokens: int) -> Any:
    """Copy a model so that it asks for `tokens` completion tokens at most.

    What it thinks before it answers is part of its completion: a bound below the thinking budget
    in its settings would be refused, so that is the least.

    Returns:
        The copy; or the model itself, when it is bounded lower already, or is none of Strands'
        own: then nobody but its author knows where the bound goes.
    """
    config: Mapping[str, Any] = model.get_config()
    tokens = max(tokens, _thinking(config) + 1)
    for kind in type(model).__mro__:
        tokens = max(tokens, _LEAST.get(kind.__name__, 1))
        if kind.__name__ == "SageMakerAIModel":
            return _with(model, model.payload_config, "max_tokens", tokens, "payload_config")
        if kind.__name__ in _AT_THE_TOP:
            return _with(model, config, _AT_THE_TOP[kind.__name__], tokens)
        if kind.__name__ in _IN_PARAMS:
            params: Mapping[str, Any] = config.get("params") or {}
            names = _IN_PARAMS[kind.__name__]
            name = next((name for name in names if name in params), names[0])
            if _is_lower(params.get(name), tokens):
                return model
            return _with(model, config, "params", {**params, name: tokens})
    return model


def is_bounded_by(model: Any, tokens: int) -> bool:
    """Tell whether a model's own settings bound its completion to `tokens` or fewer."""
    return bounded(model, tokens) is model


def give_back(copied: Any, model: Any) -> None:
    """Give a model what its copy has changed of its own state during a call."""
    own = cast("dict[str, Any]", vars(model))
    changed = cast("dict[str, Any]", vars(copied))
    for name, value in changed.items():
        if name not in ("config", "payload_config") and own.get(name) is not value:
            setattr(model, name, value)


def _thinking(config: Mapping[str, Any]) -> int:
    for place in ("params", "additional_request_fields"):
        tokens = part(part(config.get(place), "thinking"), "budget_tokens")
        if isinstance(tokens, int):
            return tokens
    return 0


def _with(
    model: Any, config: Mapping[str, Any], name: str, value: Any, attribute: str = "config"
) -> Any:
    if isinstance(value, int) and _is_lower(config.get(name), value):
        return model
    copied = copy.copy(model)
    setattr(copied, attribute, {**config, name: value})
    return copied


def _is_lower(own: object, tokens: int) -> bool:
    return isinstance(own, int) and own <= tokens
