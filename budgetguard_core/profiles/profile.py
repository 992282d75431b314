"""A named envelope, and where each of its values comes from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from budgetguard_core.budget import DIMENSIONS, TOKEN_PARTS, Budget, ProfileId
from budgetguard_core.errors import ConfigurationError

PROFILE = "BUDGETGUARD_PROFILE"
OVERLAY = "BUDGETGUARD_OVERLAY"
CAPS = {
    f"BUDGETGUARD_{name.upper()}": name
    for name in (*DIMENSIONS, *TOKEN_PARTS, "max_output_tokens_per_call")
}
"""The environment variables that set a cap of whatever profile is used, and the cap."""

LIFTED = "none"
"""The word for no cap in a file or a variable, because neither knows None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A named envelope of a file, with the overlay that was chosen.

    Args:
        id: Name, version and overlay, as they are in every record.
        budget: The caps of the profile, changed by the overlay.
        source: The file.
    """

    id: ProfileId
    budget: Budget
    source: str = field(compare=False)

    @property
    def name(self) -> str:
        """The profile's name."""
        return self.id.name

    @property
    def version(self) -> str:
        """The profile's version."""
        return self.id.version

    def under(self, code: Budget, environment: Mapping[str, str] | None = None) -> Budget:
        """Return the budget of a run: what code sets wins over variables, and they over the file.

        Args:
            code: What the program gives. Each field that was given wins, a None included.
            environment: The variables; those of the process if left out.

        Raises:
            ConfigurationError: A variable holds no cap.
        """
        fields = {name: getattr(code, name) for name in code.model_fields_set}
        return self.budget.model_copy(
            update={**from_environment(environment), **fields, "profile": self.id}
        )


def from_environment(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the caps that environment variables set, by field name."""
    variables = os.environ if environment is None else environment
    caps: dict[str, Any] = {}
    for variable, name in CAPS.items():
        text = variables.get(variable, "").strip()
        if not text:
            continue
        caps[name] = None if text.lower() == LIFTED else _number(text)
        try:
            Budget(**{name: caps[name]})
        except ConfigurationError as error:
            problem = str(error).removeprefix(f"{name} ").replace("Use None", f"Use {LIFTED!r}")
            raise ConfigurationError(f"{variable} {problem}") from None
    return caps


def _number(text: str) -> object:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        amount = Decimal(text)
    except InvalidOperation:
        return text
    # Seconds are a float; a dollar amount is read from its digits either way.
    return float(amount) if amount.is_finite() else text
