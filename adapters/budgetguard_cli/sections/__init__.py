"""The sections of the demonstration: one for each adapter, shown where it is installed.

A section is a module `budgetguard_cli.sections.<name>` with a function `run` that is a `Runaway`.
It builds an agent the way its framework's users do, and nothing else: the budget, the meter on the
screen and the check against the server are the demonstration's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

from budgetguard_core import Guard, Outcome

PROMPT = "Find out why the deployment failed."


class Runaway(Protocol):
    """A run that does not end by itself."""

    def __call__(self, base_url: str, guard: Guard, read_file: Callable[[str], str]) -> Outcome:
        """Run an agent until the guard stops it.

        Args:
            base_url: Of a server that speaks the OpenAI chat-completions format; any key will do.
            guard: What bounds the run, to be passed to the adapter.
            read_file: The agent's one tool, `read_file(path)`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Section:
    """One adapter in the demonstration."""

    adapter: str
    """The import package that binds the framework."""
    title: str
    framework: str | None = None
    """The framework's import package; None where there is no framework."""
    client: str | None = None
    """The import package that the section's agent speaks HTTP with."""
    use: str = ""
    """How it is put around an agent of one's own, in one line."""

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        return self.adapter.removeprefix("budgetguard_").replace("_", "-")

    @property
    def lines(self) -> tuple[str, str]:
        """The two lines that a user pastes."""
        return f"import {self.adapter} as bg", self.use

    def is_installed(self) -> bool:
        """Tell whether the adapter and its framework can be imported."""
        names = (self.adapter, self.framework, self.client)
        return all(find_spec(name) is not None for name in names if name is not None)

    def load(self) -> Runaway:
        """Import the section; only here is the framework imported."""
        module = import_module(f"{__name__}.{self.adapter.removeprefix('budgetguard_')}")
        return cast("Runaway", module.run)


SECTIONS = (
    Section(
        "budgetguard_langgraph",
        "A LangGraph graph",
        "langgraph",
        use="graph = bg.bounded(graph, budget)",
    ),
    Section("budgetguard_loop", "A plain Python loop", use="with bg.bounded(budget) as run:"),
    Section(
        "budgetguard_openai_agents",
        "OpenAI Agents SDK",
        "agents",
        use="hooks = bg.BudgetHooks(budget)",
    ),
    Section(
        "budgetguard_pydantic_ai",
        "Pydantic AI",
        "pydantic_ai",
        "openai",
        use="caps = [bg.BudgetCapability(budget)]",
    ),
    Section(
        "budgetguard_strands",
        "Strands Agents",
        "strands",
        "openai",
        use="hooks = [bg.BudgetHookProvider(budget)]",
    ),
)
