"""What Strands says of a model and of its failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

# The provider turned the call away before it did any work; Strands' models drop the status.
_REFUSALS = {ContextWindowOverflowException: 400, ModelThrottledException: 429}


def model_name(model: Any) -> str | None:
    """Return the name under which a model is priced, or None when its settings have none."""
    config: Any = model.get_config()
    # Nearly always a dictionary, and to ask for any mapping takes longer.
    name = config.get("model_id") if isinstance(config, (dict, Mapping)) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return name if isinstance(name, str) else None


def with_status(error: BaseException | str) -> BaseException | str:
    """Give a refusal of Strands' own the status that it stands for, and return it."""
    for kind, status in _REFUSALS.items():
        if isinstance(error, kind) and not hasattr(error, "status_code"):
            setattr(error, "status_code", status)  # noqa: B010 - the class declares none
    return error
