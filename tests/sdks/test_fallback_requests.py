"""`fallback_model` on the wire: what each framework's own model classes send, over HTTP."""

from __future__ import annotations

import anthropic
import openai
import pytest

from budgetguard_core import Budget, Guard
from budgetguard_http import bounded_clients
from budgetguard_loop import run_bounded
from provider_server import ProviderServer

BIG, SMALL = "gpt-4o", "gpt-4o-mini"
# An answer has 110 tokens: the third request is the first one beyond the share.
BUDGET = Budget(max_total_tokens=20_000, fallback_at=0.01, fallback_model=SMALL)
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
}


def read_file(path: str) -> str:
    """Read a file."""
    return f"{path}: {next(PAGES)}"


PAGES = iter(range(10**6))


@pytest.fixture
def server():
    with ProviderServer(turns=4) as found:
        yield found


def sent(server):
    return [post["body"]["model"] for post in server.posts]


def test_chat_models_of_langchain(server):
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    from budgetguard_langgraph import BudgetCallback, bounded

    facts = {"api_key": "none", "max_retries": 0}
    models = [
        ChatOpenAI(model=BIG, base_url=f"{server.url}/v1", stream_usage=True, **facts),
        ChatOpenAI(model=BIG, base_url=f"{server.url}/v1", use_responses_api=True, **facts),
        ChatAnthropic(model=BIG, base_url=server.url, **facts),
    ]
    question = {"messages": [("user", "Go.")]}
    runs = [
        lambda agent: bounded(agent, BUDGET).invoke(question),
        lambda agent: list(bounded(agent, BUDGET).stream(question, stream_mode="messages")),
        lambda agent: agent.invoke(question, {"callbacks": [BudgetCallback(BUDGET)]}),
    ]
    for model in models:
        for run in runs:
            server.posts.clear()
            run(create_agent(model, [tool(read_file)]))
            # A stream's usage may be an estimate, and the share reached a call later.
            assert set(sent(server)[:2]) == {BIG}, type(model)
            assert set(sent(server)[3:]) == {SMALL}, type(model)


@pytest.mark.parametrize("api", ["chat", "responses", "name"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_models_of_the_agents_sdk(server, api, streamed):
    import agents

    from budgetguard_openai_agents import bounded_run, bounded_run_streamed

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        model = {
            "chat": lambda: agents.OpenAIChatCompletionsModel(BIG, client),
            "responses": lambda: agents.OpenAIResponsesModel(BIG, client),
            "name": lambda: BIG,
        }[api]()
        provider = agents.OpenAIProvider(openai_client=client)
        config = agents.RunConfig(tracing_disabled=True, model_provider=provider)
        agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(read_file)])
        if streamed:
            stream = bounded_run_streamed(agent, "Go.", budget=BUDGET, run_config=config)
            async for _ in stream.stream_events():
                pass
        else:
            await bounded_run(agent, "Go.", budget=BUDGET, run_config=config)
    assert sent(server) == [BIG, BIG, SMALL, SMALL, SMALL]


def test_models_of_strands(server):
    import strands
    from strands.models.openai import OpenAIModel

    from budgetguard_strands import BudgetHookProvider

    args = {"api_key": "none", "max_retries": 0, "base_url": f"{server.url}/v1"}
    model = OpenAIModel(client_args=args, model_id=BIG)
    hooks = [BudgetHookProvider(BUDGET)]
    tools = [strands.tool(read_file)]
    strands.Agent(model=model, tools=tools, hooks=hooks, callback_handler=None)("Go.")
    assert sent(server) == [BIG, BIG, SMALL, SMALL, SMALL]
    assert model.get_config()["model_id"] == BIG  # undone


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_models_of_pydantic_ai(server, kind, streamed):
    import pydantic_ai
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    from budgetguard_pydantic_ai import BudgetCapability

    if kind == "openai":
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        model = OpenAIChatModel(BIG, provider=OpenAIProvider(openai_client=client))
    else:
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none")
        model = AnthropicModel(BIG, provider=AnthropicProvider(anthropic_client=client))
    capabilities = [BudgetCapability(BUDGET)]
    agent = pydantic_ai.Agent(model, tools=[read_file], capabilities=capabilities)
    async with client:
        if streamed:
            async with agent.iter("Go.") as run:
                async for node in run:
                    if pydantic_ai.Agent.is_model_request_node(node):
                        async with node.stream(run.ctx) as stream:
                            async for _ in stream:
                                pass
        else:
            await agent.run("Go.")
    assert sent(server) == [BIG, BIG, SMALL, SMALL, SMALL]
    assert model.model_name == BIG


def chat(client, messages, **options):
    made = client.chat.completions.create(model=BIG, messages=messages, **options)
    return list(made) if options.get("stream") else made


def responses(client, messages, **options):
    made = client.responses.create(model=BIG, input=messages, **options)
    return list(made) if options.get("stream") else made


def message(client, messages, **options):
    made = client.messages.create(model=BIG, max_tokens=90, messages=messages, **options)
    return list(made) if options.get("stream") else made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, responses, message])
def test_raw_clients(server, ask, stream):
    facts = {"api_key": "none", "max_retries": 0}
    if ask is message:
        client = anthropic.Anthropic(base_url=server.url, **facts)
    else:
        client = openai.OpenAI(base_url=f"{server.url}/v1", **facts)
    with client, bounded_clients(BUDGET) as block:
        for number in range(4):
            ask(client, [{"role": "user", "content": f"Question {number}."}], stream=stream)
    assert sent(server) == [BIG, BIG, SMALL, SMALL]
    assert block.outcome.errors == ()


def test_a_deployment_in_the_address_keeps_its_model(server):
    client = openai.AzureOpenAI(
        azure_endpoint=server.url, api_key="none", api_version="2026-01-01", max_retries=0
    )
    guard = Guard(BUDGET)
    with client, bounded_clients(guard) as block:
        for number in range(4):
            chat(client, [{"role": "user", "content": f"Question {number}."}])
    assert sent(server) == [BIG] * 4
    assert [one for one in block.outcome.errors if one.startswith("fallback_model")]


def test_a_plain_loop(server):
    schema = {"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        def step(messages, *, model=BIG):
            return client.chat.completions.create(model=model, messages=messages, tools=[schema])

        run_bounded(step, BUDGET, messages="Go.", tools={"read_file": read_file}, model=BIG)
    assert sent(server) == [BIG, BIG, SMALL, SMALL, SMALL]
