"""An agent of the OpenAI Agents SDK, with the official client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, function_tool
from openai import AsyncOpenAI

from budgetguard_cli.sections import PROMPT
from budgetguard_core import Guard, Outcome
from budgetguard_openai_agents import bounded_run, outcome


def run(base_url: str, guard: Guard, read_file: Callable[[str], str]) -> Outcome:
    """Run the agent until the guard stops it."""

    async def main() -> Outcome:
        # Retries inside the client are seen by no hook.
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            agent = Agent(
                name="operator",
                model=OpenAIChatCompletionsModel("gpt-4o", client),
                tools=[function_tool(_read_file)],
            )
            result = await bounded_run(
                agent, PROMPT, budget=guard, run_config=RunConfig(tracing_disabled=True)
            )
            return outcome(result)

    def _read_file(path: str) -> str:
        return read_file(path)

    _read_file.__name__ = "read_file"
    _read_file.__doc__ = "Read a file."
    return asyncio.run(main())
