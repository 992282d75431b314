"""The reserve of a run for a last answer when a limit stops it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from pydantic import Field, model_validator

from budgetguard_core.settings import Cap, Dollars, Seconds, Settings


class FinalizeReserve(Settings):
    """The part of a run's caps that is reserved for one last answer: time, tokens, dollars.

    A run that a limit stops then asks the model once more, without tools, to answer with what it
    knows. That call is no iteration and bound by nothing but this reserve and the whole of the
    run's caps on tokens, dollars and seconds; it is charged to the run, and to all around it.
    """

    tokens: Cap = None
    """Tokens, prompt included, taken off each cap on tokens until the run is stopped."""
    cost_usd: Dollars = None
    """US dollars, taken off `max_cost_usd` until the run is stopped."""
    seconds: Seconds = Field(default=30.0)
    """Seconds that the last answer may take, taken off `max_seconds` until the run is stopped: at
    most half of it, and no more than is left."""

    def of_caps(self) -> dict[str, int | float | Decimal | None]:
        """Return what is taken off each cap, by the cap's name."""
        caps = dict.fromkeys(
            ("max_total_tokens", "max_input_tokens", "max_output_tokens"), self.tokens
        )
        return {**caps, "max_cost_usd": self.cost_usd}

    @model_validator(mode="after")
    def _has_an_amount(self) -> Any:
        if self.tokens is None and self.cost_usd is None:
            raise ValueError(
                "tokens or cost_usd must be given, got neither. Use FinalizeReserve(tokens=4000)."
            )
        return self
