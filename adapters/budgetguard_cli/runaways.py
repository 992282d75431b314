"""A runaway in each framework, built the way its users build an agent, with a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, TypeAlias, cast

from budgetguard_core import Guard, Outcome
from budgetguard_core.kit import TokenUsage
from budgetguard_core.testing.scripted import Answers, Turn

PROMPT: Final = "Find out why the deployment failed."
CALL: Final = {"read_file": {"path": "deploy.log"}}
_CHARACTERS_PER_TOKEN: Final = 4
# An adapter that fails to stop its loop must fail, not hang.
_MOST_CALLS: Final = 200

Tool: TypeAlias = Callable[[str], str]
Runaway: TypeAlias = Callable[[Any, Guard, Tool], "Outcome | None"]
"""Runs an agent with this model and this tool until the guard stops it."""


class StickyAnswers(Answers):
    """Answers everything with the same tool call, and counts the tokens of its growing prompt."""

    def __init__(self, tool: Tool) -> None:
        super().__init__([CALL])
        self._tool = tool
        self._size = len(PROMPT)

    def read_file(self, path: str) -> str:
        """Read a file."""
        text = self._tool(path)
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


@dataclass(frozen=True, slots=True)
class Agent:
    """One adapter in the demonstration.

    Attributes:
        adapter: The import package that binds the framework.
        needs: The framework's import package.
    """

    adapter: str
    title: str
    run: Runaway
    needs: str = "budgetguard_core"

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.adapter.removeprefix("budgetguard_").replace("_", "-")

    def is_installed(self) -> bool:
        """Return whether the adapter and its framework can be imported."""
        return all(find_spec(name) is not None for name in (self.adapter, self.needs))

    def run_away(self, answers: StickyAnswers, guard: Guard) -> Outcome | None:
        """Run it with the adapter's scripted model."""
        model = import_module(f"{self.adapter}.scripted").scripted_model(answers)
        return self.run(model, guard, answers.read_file)


def _plain_loop(model: Any, guard: Guard, read_file: Tool) -> Outcome:
    from budgetguard_loop import run_bounded

    return run_bounded(
        model, guard, messages=PROMPT, tools={"read_file": read_file}, model="gpt-4o"
    )


def _langgraph(model: Any, guard: Guard, read_file: Tool) -> Outcome | None:
    import langchain.agents

    from budgetguard_langgraph import bounded

    agent = cast("Any", langchain.agents).create_agent(model, tools=[read_file])
    bounded(agent, guard).invoke({"messages": [("user", PROMPT)]})
    return guard.outcome


def _openai_agents(model: Any, guard: Guard, read_file: Tool) -> Outcome:
    import agents

    from budgetguard_openai_agents import bounded_run, outcome

    def read(path: str) -> str:
        return read_file(path)

    tool = agents.function_tool(read, name_override="read_file")
    agent = agents.Agent(name="operator", model=model, tools=[tool])
    config = agents.RunConfig(tracing_disabled=True)
    return outcome(asyncio.run(bounded_run(agent, PROMPT, budget=guard, run_config=config)))


def _pydantic_ai(model: Any, guard: Guard, read_file: Tool) -> Outcome | None:
    import pydantic_ai

    from budgetguard_pydantic_ai import BudgetCapability

    tool = pydantic_ai.Tool(read_file, takes_ctx=False, name="read_file")
    pydantic_ai.Agent(model, tools=[tool], capabilities=[BudgetCapability(guard)]).run_sync(PROMPT)
    return guard.outcome


def _strands(model: Any, guard: Guard, read_file: Tool) -> Outcome | None:
    import strands

    from budgetguard_strands import BudgetHookProvider

    def read(path: str) -> str:
        return read_file(path)

    provider = BudgetHookProvider(guard)
    tool = cast("Any", strands).tool(name="read_file", description="Read a file.")(read)
    agent = strands.Agent(model=model, tools=[tool], hooks=[provider], callback_handler=None)
    agent(PROMPT)
    return provider.outcome(agent)


AGENTS: Final = (
    Agent("budgetguard_langgraph", "A LangGraph graph", _langgraph, "langchain"),
    Agent("budgetguard_loop", "A plain Python loop", _plain_loop),
    Agent("budgetguard_openai_agents", "OpenAI Agents SDK", _openai_agents, "agents"),
    Agent("budgetguard_pydantic_ai", "Pydantic AI", _pydantic_ai, "pydantic_ai"),
    Agent("budgetguard_strands", "Strands Agents", _strands, "strands"),
)
