"""The breakers of a candidate budget, from a file."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from budgetguard_cli.recordings import Unreadable, opened
from budgetguard_cli.terminal import printable
from budgetguard_core import ConfigurationError
from budgetguard_core.budget import BREAKERS

_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


def read_breakers(file: str) -> dict[str, Any]:
    """Read the breakers of a budget: a JSON object with its fields.

    Raises:
        Unreadable: The file cannot be read, or holds no JSON object.
        ConfigurationError: A field is none of a breaker's.
    """
    with opened(file) as raw:
        try:
            fields = _OBJECT.validate_json(raw.read())
        except (OSError, ValidationError):
            msg = f"{printable(file)}: it holds no JSON object. Write the fields of a budget."
            raise Unreadable(msg) from None
    if "progress" in fields:
        raise ConfigurationError(
            "breakers must not have progress, because the recorded model was not asked to report, "
            "got it. Leave it out."
        )
    unknown = next((name for name in fields if name not in BREAKERS), None)
    if unknown is not None:
        raise ConfigurationError(
            f"breakers must be among {', '.join(BREAKERS)}, got {printable(unknown)!r}. "
            "Other caps have options of their own."
        )
    return fields
