"""A Strands agent with Strands' own OpenAI model, streamed, as its users run it."""

from __future__ import annotations

from collections.abc import Callable

import openai
from strands import Agent
from strands import tool as strands_tool  # pyright: ignore[reportUnknownVariableType]
from strands.models.openai import OpenAIModel

from budgetguard_cli.sections import PROMPT
from budgetguard_core import AdapterError, Guard, Outcome
from budgetguard_strands import BudgetHookProvider


def run(base_url: str, guard: Guard, read_file: Callable[[str], str]) -> Outcome:
    """Run an agent until the guard stops it."""
    client = openai.AsyncOpenAI(
        base_url=base_url,
        api_key="none",
        max_retries=0,
        # A proxy that the environment names must not get a loopback request.
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )
    provider = BudgetHookProvider(guard)
    agent = Agent(
        model=OpenAIModel(client=client, model_id="gpt-4o"),
        tools=[strands_tool(name="read_file", description="Read a file.")(read_file)],
        hooks=[provider],
        callback_handler=None,
    )
    agent(PROMPT)
    outcome = provider.outcome(agent)
    if outcome is None:
        message = "a run must have an outcome, got none. Please report this."
        raise AdapterError(message)
    return outcome
