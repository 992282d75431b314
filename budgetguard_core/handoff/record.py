"""The record of a run that is handed over, as plain data."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_jsonable_python

from budgetguard_core.errors import text_of
from budgetguard_core.outcome import Outcome

VERSION = 1


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A run that goes on elsewhere.

    Attributes:
        outcome: How it ended, with its messages in the framework's own types.
        id: The name of this handoff, the same at every attempt to deliver it.
    """

    outcome: Outcome
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data: the outcome, and its messages as their framework dumps them."""
        outcome = self.outcome.model_dump(mode="json", exclude={"final", "messages"})
        return {
            "version": VERSION,
            "id": self.id,
            **outcome,
            "final": _plain(self.outcome.final),
            "messages": [_plain(message) for message in self.outcome.messages],
        }


def _plain(value: Any) -> Any:
    """Return what JSON knows; one message that holds itself does not keep back the others."""
    try:
        return to_jsonable_python(
            value, fallback=text_of, bytes_mode="base64", inf_nan_mode="null", by_alias=False
        )
    except Exception:  # the message's own code runs here
        return text_of(value)
