"""The agents that `quickstart` writes, with a model that never changes its mind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, TypeAlias

from budgetguard_cli.quickstart import NEEDS, text_of
from budgetguard_core import Guard, Outcome
from budgetguard_core.kit import TokenUsage
from budgetguard_core.testing.scripted import Answers, Turn

CALL: Final = {"search": {"query": "deploy.log"}}
_CHARACTERS_PER_TOKEN: Final = 4
# An adapter that fails to stop its loop must fail, not hang.
_MOST_CALLS: Final = 200

Tool: TypeAlias = Callable[[str], str]


class StickyAnswers(Answers):
    """Answers everything with the same tool call, and counts the tokens of its growing prompt."""

    def __init__(self, tool: Tool) -> None:
        super().__init__([CALL])
        self._tool = tool
        self._size = len("Find it.")

    def search(self, query: str) -> str:
        """Search."""
        text = self._tool(query)
        self._size += len(text)
        return text

    def next(self) -> Turn:
        """Take the next answer; after 200 calls it is a text."""
        asked = len(json.dumps(CALL))
        self.usage = TokenUsage(
            self._size // _CHARACTERS_PER_TOKEN + 1, asked // _CHARACTERS_PER_TOKEN
        )
        self._size += asked
        if self.calls >= _MOST_CALLS:
            self.answers = ["I give up: nobody stopped me."]
        return super().next()


@dataclass(frozen=True)
class Agent:
    """The agent that `quickstart` writes for a framework."""

    name: str
    title: str

    def is_installed(self) -> bool:
        """Return whether its framework can be imported."""
        return find_spec(NEEDS[self.name][0]) is not None

    def run_away(self, answers: StickyAnswers, guard: Guard) -> Outcome | None:
        """Run it with this model, and its tool, until the guard stops it."""
        given = {"never_ends": answers, "budget": guard, "search": answers.search}
        text = text_of(self.name)
        text = re.sub("^(never_ends|budget) = .*", r"\1 = given['\1']", text, flags=re.MULTILINE)
        text = text.replace('f"nothing about {query}"', "given['search'](query)")
        names: dict[str, Any] = {"__name__": "agent", "given": given, "print": lambda *_: None}
        exec(text, names)  # noqa: S102 - a file of this package
        return guard.outcome


AGENTS: Final = (
    Agent("langgraph", "A LangGraph graph"),
    Agent("loop", "A plain Python loop"),
    Agent("openai-agents", "OpenAI Agents SDK"),
    Agent("pydantic-ai", "Pydantic AI"),
    Agent("strands", "Strands Agents"),
)
