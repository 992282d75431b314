"""One runaway for each adapter: a scripted model that asks for the same kind of work for ever."""

from __future__ import annotations

import asyncio
import json
from itertools import count

from budgetguard_core import Outcome

INPUT_TOKENS, OUTPUT_TOKENS = 900, 20
MODEL = "gpt-4o"


def langgraph(*args, **options) -> Outcome:
    from langchain_core.language_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.tools import tool
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    from budgetguard_langgraph import bounded, outcome

    @tool
    def read_page(number: int) -> str:
        """Read a page."""
        return f"page {number}"

    usage = {
        "input_tokens": INPUT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "total_tokens": INPUT_TOKENS + OUTPUT_TOKENS,
    }
    model = GenericFakeChatModel(
        messages=(
            AIMessage(
                "",
                tool_calls=[{"name": "read_page", "args": {"number": n}, "id": f"call_{n}"}],
                usage_metadata=usage,
                response_metadata={"model_name": MODEL},
            )
            for n in count()
        )
    )
    builder = StateGraph(MessagesState)
    builder.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode([read_page]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    graph = bounded(builder.compile(), *args, **options)
    return outcome(graph.invoke({"messages": [("user", "Read.")]}))


def loop(*args, **options) -> Outcome:
    from budgetguard_loop import run_bounded

    numbers = count()

    def model(messages):
        n = next(numbers)
        arguments = json.dumps({"number": n})
        call = {"id": f"call_{n}", "function": {"name": "read_page", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        usage = {"prompt_tokens": INPUT_TOKENS, "completion_tokens": OUTPUT_TOKENS}
        return {"choices": [{"message": message}], "usage": usage}

    def read_page(number):
        return f"page {number}"

    return run_bounded(
        model,
        *args,
        messages="Read.",
        tools={"read_page": read_page},
        model=MODEL,
        **options,
    )


def openai_agents(*args, **options) -> Outcome:
    from agents import Agent, Model, ModelResponse, Runner, Usage, function_tool
    from agents.run import RunConfig
    from openai.types.responses import ResponseFunctionToolCall

    from budgetguard_openai_agents import BudgetHooks, outcome

    numbers = count()

    class Sticky(Model):
        model = MODEL

        async def get_response(self, *args, **kwargs):
            n = next(numbers)
            call = ResponseFunctionToolCall(
                type="function_call",
                call_id=f"call_{n}",
                name="read_page",
                arguments=json.dumps({"number": n}),
            )
            usage = Usage(
                requests=1,
                input_tokens=INPUT_TOKENS,
                output_tokens=OUTPUT_TOKENS,
                total_tokens=INPUT_TOKENS + OUTPUT_TOKENS,
            )
            return ModelResponse(output=[call], usage=usage, response_id=None)

        def stream_response(self, *args, **kwargs):
            raise NotImplementedError

    @function_tool
    def read_page(number: int) -> str:
        """Read a page."""
        return f"page {number}"

    agent = Agent(name="reader", model=Sticky(), tools=[read_page])
    hooks = BudgetHooks(*args, **options)
    run = Runner.run(agent, "Read.", hooks=hooks, run_config=RunConfig(tracing_disabled=True))
    return outcome(asyncio.run(run))


def pydantic_ai(*args, **options) -> Outcome:
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelResponse, ToolCallPart
    from pydantic_ai.models.function import FunctionModel
    from pydantic_ai.usage import RequestUsage

    from budgetguard_pydantic_ai import BudgetCapability, outcome

    numbers = count()

    def reply(messages, info):
        n = next(numbers)
        usage = RequestUsage(input_tokens=INPUT_TOKENS, output_tokens=OUTPUT_TOKENS)
        call = ToolCallPart("read_page", {"number": n}, f"call_{n}")
        return ModelResponse([call], usage=usage, model_name=MODEL)

    def read_page(number: int) -> str:
        """Read a page."""
        return f"page {number}"

    agent = Agent(FunctionModel(reply, model_name=MODEL), tools=[read_page])
    run = agent.run("Read.", capabilities=[BudgetCapability(*args, **options)])
    return outcome(asyncio.run(run))


def strands(*args, **options) -> Outcome:
    from strands import Agent, tool
    from strands.models import Model

    from budgetguard_strands import BudgetHookProvider

    numbers = count()

    class Sticky(Model):
        def get_config(self):
            return {"model_id": MODEL}

        def update_config(self, **model_config): ...

        def structured_output(self, *args, **kwargs): ...

        async def stream(self, messages, *args, **kwargs):
            n = next(numbers)
            use = {"name": "read_page", "toolUseId": f"call_{n}"}
            delta = {"toolUse": {"input": json.dumps({"number": n})}}
            yield {"messageStart": {"role": "assistant"}}
            yield {"contentBlockStart": {"start": {"toolUse": use}}}
            yield {"contentBlockDelta": {"delta": delta}}
            yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "tool_use"}}
            usage = {
                "inputTokens": INPUT_TOKENS,
                "outputTokens": OUTPUT_TOKENS,
                "totalTokens": INPUT_TOKENS + OUTPUT_TOKENS,
            }
            yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}

    @tool
    def read_page(number: int) -> str:
        """Read a page."""
        return f"page {number}"

    provider = BudgetHookProvider(*args, **options)
    agent = Agent(model=Sticky(), tools=[read_page], hooks=[provider], callback_handler=None)
    agent("Read.")
    return provider.outcome(agent)


def http(*args, **options) -> Outcome:
    """A loop over a client that bounds its calls; the server counts what comes through."""
    import openai

    import http_loops
    from budgetguard_http import bounded_clients
    from provider_server import ProviderServer

    with ProviderServer() as server, bounded_clients(*args, **options) as block:
        client = openai.OpenAI(api_key="key", base_url=server.url + "/v1")
        http_loops.chat(client, http_loops.Loop(result="page"))
        client.close()
        calls = server.hits
    assert calls == block.outcome.usage.model_calls
    return block.outcome


RUNS = {
    "budgetguard_langgraph": langgraph,
    "budgetguard_loop": loop,
    "budgetguard_openai_agents": openai_agents,
    "budgetguard_pydantic_ai": pydantic_ai,
    "budgetguard_strands": strands,
}
NEEDS = {
    "budgetguard_langgraph": "langgraph",
    "budgetguard_loop": "budgetguard_loop",
    "budgetguard_openai_agents": "agents",
    "budgetguard_pydantic_ai": "pydantic_ai",
    "budgetguard_strands": "strands",
}
# With the one that bounds the calls of any client and has no loop of its own.
EVERY = {**RUNS, "budgetguard_http": http}
EVERY_NEEDS = {**NEEDS, "budgetguard_http": "openai"}
