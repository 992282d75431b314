"""The answers of a scripted model of a real framework in a user's own test."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.usage import TokenUsage

Answer: TypeAlias = "str | Mapping[str, Any] | Sequence[tuple[str, Mapping[str, Any]]] | Exception"
"""One answer of a model: a text that ends the run; tool calls as `{"search": {"query": "x"}}` or,
for several of one tool, as `[("search", {"query": "x"}), ...]`; or what the call fails with."""

_USAGE = TokenUsage(input_tokens=100, output_tokens=20)


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """A tool call in an answer; its id is unique."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer as an adapter's scripted model gives it."""

    text: str
    calls: tuple[ScriptedCall, ...]
    usage: TokenUsage


@dataclass
class Answers:
    """The answers of a scripted model, in order; the last one again and again, as a runaway does.

    Args:
        answers: The answers.
        usage: What each call reports.
        model: The model's name.

    Attributes:
        calls: How often the model was really called: a count apart from the guard's.
    """

    answers: Sequence[Answer]
    usage: TokenUsage = _USAGE
    model: str = "gpt-4o"
    calls: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.answers:
            raise ConfigurationError(
                "a scripted model needs at least one answer, got none. Give it a text: 'Done.'"
            )

    def next(self) -> Turn:
        """Take the next answer.

        Raises:
            Exception: The answer is this one.
        """
        with self._lock:
            number = self.calls
            self.calls += 1
        answer = self.answers[min(number, len(self.answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            return Turn(answer, (), self.usage)
        requested = [*answer.items()] if isinstance(answer, Mapping) else [*answer]
        calls = tuple(
            ScriptedCall(f"call_{number}_{index}", name, dict(arguments))
            for index, (name, arguments) in enumerate(requested)
        )
        return Turn("", calls, self.usage)
