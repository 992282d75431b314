"""The completion bound and the time limit of one request, in each package's own words."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from budgetguard_core.kit import OpenModelCall
from budgetguard_langgraph._seams import options_of, parameters_of

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
_TOLD: set[str] = set()


def can_be_bound(model: Any) -> bool:
    """Return whether a bound can be given to a model with a call."""
    return words_of(model) is not None


def bind(
    model: Any,
    settings: dict[str, Any],
    tokens: int | None,
    opened: OpenModelCall,
    parameters: Mapping[str, Any] | None = None,
) -> bool:
    """Put bounds into the settings of one request; tell whether that of the tokens is in it."""
    words = words_of(model)
    if words is None:
        if tokens is not None:
            tell(model)
        return False
    if opened.fallback_model is not None and words.model is not None:
        settings[words.model] = opened.fallback_model
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
    if words.timeout is not None and (seconds := opened.seconds) is not None:
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


def tell(model: Any) -> None:
    """Warn once for each class that takes no completion bound."""
    kind = type(model).__name__
    if kind not in _TOLD:
        _TOLD.add(kind)
        _LOG.warning(
            "The completion bound cannot be given to %s with a call; what it may write is "
            "reserved instead. Set the bound on the model itself.",
            kind,
        )
