"""A message of any framework's history, in common words, and what a provider takes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


class NonConformance(AssertionError):
    """A clause does not hold through a driver."""


class DriverError(Exception):
    """A driver does not do what a scenario says, so that the suite cannot tell anything."""


def expect(condition: object, message: str) -> None:
    """Raise `NonConformance` unless the condition holds."""
    if not condition:
        raise NonConformance(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a framework's history, in common words."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()
    """Id and name of each tool call of an assistant message, handoffs left out."""
    tool_call_id: str | None = None
    """The call that a tool message answers."""
    synthetic: Mapping[str, Any] | None = None
    """The metadata of a synthetic message, None for any other."""


def check_history(history: Sequence[Message]) -> None:
    """Check that a provider would take a history as it is: clause 11.

    Every tool call has exactly one result, right after the message that asked; no result without
    a call; no two assistant or two user messages in a row.
    """
    open_calls: list[str] = []
    before: str | None = None
    for location, message in enumerate(history):
        where = f"message {location} ({message.role})"
        if message.role == "tool":
            expect(
                message.tool_call_id in open_calls,
                f"{where} answers {message.tool_call_id!r}, which is not open",
            )
            open_calls.remove(str(message.tool_call_id))
        else:
            expect(not open_calls, f"{where} comes before the results of {open_calls}")
            expect(
                message.role == "system" or message.role != before, f"{where} follows another one"
            )
        open_calls += [id_ for id_, _ in message.tool_calls]
        before = message.role
    expect(not open_calls, f"no result for {open_calls}")


def check_request(request: Sequence[Message]) -> None:
    """Check that a strict provider would answer a request: a history that waits for an answer.

    Besides what `check_history` asks for: it begins with the system's or the user's words and ends
    with the user's or with results, nobody says nothing, and no id is given to two calls.
    """
    expect(request, "the request is empty, or the driver does not report it")
    check_history(request)
    words = [message for message in request if message.role != "system"]
    expect(words[0].role == "user", f"the request begins with the {words[0].role}'s words")
    expect(words[-1].role in ("user", "tool"), "the request ends with the assistant's words")
    for message in words:
        has_content = message.text or message.tool_calls or message.role == "tool"
        expect(has_content, f"a message of the {message.role} is empty")
    ids = [id_ for message in request for id_, _ in message.tool_calls]
    expect(len(set(ids)) == len(ids), f"calls with the same id: {ids}")
