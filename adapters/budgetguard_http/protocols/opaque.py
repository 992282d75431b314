"""Requests to a provider whose format is not understood: counted and estimated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from budgetguard_http.protocols.protocol import (
    Answer,
    ApiProtocol,
    Body,
    Event,
    Prompted,
    Result,
    text_or_none,
    usage_in,
)


class Opaque(ApiProtocol):
    """Whatever costs something and is in no other row of the table."""

    name = "opaque"
    is_conversation = False

    def is_streamed(self, path: str, body: Body) -> bool:
        """Return whether the answer is streamed: it is passed on as it is."""
        del path
        return bool(body.get("stream"))

    def bound(self, body: Body) -> int | None:
        """Return none: which field it would be is not known."""
        del body
        return None

    def set_bound(self, body: Body, tokens: int) -> None:
        """Leave the request as it is."""

    def prompt(self, body: Body) -> Prompted:
        """Return all of it."""
        return Prompted([body])

    def turns(self, body: Body) -> list[Any]:
        """Return none: it is no conversation."""
        del body
        return []

    def results(self, body: Body) -> list[Result]:
        """Return none."""
        del body
        return []

    def reply_mark(self, turn: Any) -> tuple[str | None, ...] | None:
        """Return none."""
        del turn
        return None

    def user_text(self, turn: Any) -> str | None:
        """Return none."""
        del turn
        return None

    def add_nudge(self, body: Body, text: str) -> None:
        """Leave the request as it is."""

    def read(self, body: Body, answer: Answer) -> None:
        """Read the usage, where it has one of the usual forms."""
        answer.usage, answer.model = usage_in(body), text_or_none(body.get("model"))

    def reader(self, answer: Answer, *, body: Body, hides_usage: bool) -> None:
        """Return none."""
        del answer, body, hides_usage

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> None:
        """Return none: its answer cannot be made up."""
        del body, model, text, mark

    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return none."""
        del body, model, text, mark
        return []
