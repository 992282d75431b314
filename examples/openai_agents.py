"""OpenAI Agents SDK with a scripted model: a runaway that is stopped, and how it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from agents import Agent, Model, ModelResponse, Runner, Usage, function_tool
from agents.memory import SQLiteSession
from agents.tracing import set_tracing_disabled
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from budgetguard_core import Budget, Guard
from budgetguard_openai_agents import BudgetHooks, bounded_run, outcome


class Scripted(Model):
    """Stands in for a provider: always wants to search, until the user asks it not to."""

    model = "gpt-4o"

    def __init__(self) -> None:
        self.calls = 0

    async def get_response(
        self,
        system_instructions: str | None,
        input: str | list[Any],  # noqa: A002
        *args: Any,
        **kwargs: Any,
    ) -> ModelResponse:
        self.calls += 1
        output: Any = ResponseFunctionToolCall(
            type="function_call",
            call_id=f"call_{id(self)}_{self.calls}",
            name="search",
            arguments='{"input": "France"}',
        )
        if "without searching" in str(input[-1]):
            text = ResponseOutputText(
                type="output_text", text="Paris, I believe.", annotations=[], logprobs=[]
            )
            output = ResponseOutputMessage(
                id=f"msg_{self.calls}",
                type="message",
                role="assistant",
                status="completed",
                content=[text],
            )
        usage = Usage(requests=1, input_tokens=400, output_tokens=30, total_tokens=430)
        return ModelResponse(output=[output], usage=usage, response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


pages = iter(range(1, 1000))


@function_tool
def search() -> str:
    """Search the web."""
    return f"page {next(pages)} of many"


async def main() -> None:
    set_tracing_disabled(True)
    model = Scripted()
    agent = Agent(name="researcher", model=model, tools=[search])
    session = SQLiteSession("conversation")

    # The runner you have, with hooks: it returns a normal result.
    result = await Runner.run(
        agent,
        "What is the capital of France?",
        session=session,
        hooks=BudgetHooks(Budget(max_iterations=5, max_cost_usd=1)),
    )
    ended = outcome(result)
    print(f"{ended.status}: {ended.detail}, ${ended.usage.cost_usd}")
    print(result.final_output)

    # The same session goes on under a fresh budget.
    result = await bounded_run(
        agent, "Say it without searching.", budget=Budget(max_iterations=5), session=session
    )
    print(f"{outcome(result).status}: {result.final_output}")

    session.close()

    # Agents as tools spend the budget of the run that calls them.
    chief = Agent(
        name="chief",
        model=Scripted(),
        tools=[agent.as_tool(tool_name="search", tool_description="Ask the researcher.")],
    )
    guard = Guard(Budget(max_model_calls=8))
    model.calls = 0
    result = await bounded_run(chief, "Find out.", budget=guard)
    print(f"{outcome(result).stop_reason}: {guard.usage.model_calls} model calls in all")


asyncio.run(main())
