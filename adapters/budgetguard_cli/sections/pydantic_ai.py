"""An agent of Pydantic AI, with the official client."""

from __future__ import annotations

from collections.abc import Callable

import openai
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from budgetguard_cli.sections import PROMPT
from budgetguard_core import Guard, Outcome
from budgetguard_pydantic_ai import BudgetCapability


def run(base_url: str, guard: Guard, read_file: Callable[[str], str]) -> Outcome:
    """Run an agent until the guard stops it."""
    client = openai.AsyncOpenAI(
        base_url=base_url,
        api_key="none",
        max_retries=0,
        # A proxy that the environment names must not get a loopback request.
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )
    agent = Agent(
        OpenAIChatModel("gpt-4o", provider=OpenAIProvider(openai_client=client)),
        capabilities=[BudgetCapability(guard)],
    )

    @agent.tool_plain(name="read_file")
    def _read(path: str) -> str:
        return read_file(path)

    agent.run_sync(PROMPT)
    outcome = guard.outcome
    if outcome is None:
        msg = "the agent ended without an outcome"
        raise RuntimeError(msg)
    return outcome
