"""A runaway in each framework, built the way its users build an agent.

The budget, and the check against the server, are the demonstration's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection
from importlib.util import find_spec
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

from budgetguard_core import Guard, Outcome

PROMPT = "Find out why the deployment failed."

ReadFile: TypeAlias = Callable[[str], str]
"""The agent's one tool."""
Runaway: TypeAlias = Callable[[str, Guard, ReadFile], "Outcome | None"]
"""Runs an agent until the guard stops it, against a server that speaks the OpenAI format."""


@dataclass(frozen=True, slots=True)
class Agent:
    """One adapter in the demonstration.

    Attributes:
        adapter: The import package that binds the framework.
        use: How it is put around an agent of one's own, in one line.
        needs: The framework's import package, and that of the client which the agent uses.
    """

    adapter: str
    title: str
    run: Runaway
    use: str = ""
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.adapter.removeprefix("budgetguard_").replace("_", "-")

    def is_installed(self) -> bool:
        """Return whether the adapter and its framework can be imported."""
        return all(find_spec(name) is not None for name in (self.adapter, *self.needs))


def complete(base_url: str, body: dict[str, Any], *, seconds: float | None = 30) -> dict[str, Any]:
    """Request a chat completion with the standard library.

    Raises:
        OSError: The server cannot be reached or is silent.
    """
    url = urlsplit(base_url)
    # Not urllib: it would send a loopback request through a proxy.
    connection = HTTPConnection(url.hostname or "", url.port, timeout=seconds)
    try:
        connection.request("POST", f"{url.path}/chat/completions", json.dumps(body))
        reply: dict[str, Any] = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return reply


def _client(base_url: str) -> Any:
    """Return the official client: no retries, and no proxy that the environment names."""
    import openai

    return openai.AsyncOpenAI(
        base_url=base_url,
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


def _plain_loop(base_url: str, guard: Guard, read_file: ReadFile) -> Outcome:
    from budgetguard_loop import run_bounded

    path = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = [{"type": "function", "function": {"name": "read_file", "parameters": path}}]

    def ask(
        messages: list[dict[str, Any]], *, max_output_tokens: int | None, seconds: float | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "gpt-4o", "messages": messages, "tools": tools}
        if max_output_tokens is not None:
            body["max_completion_tokens"] = max_output_tokens
        return complete(base_url, body, seconds=seconds)

    return run_bounded(ask, guard, messages=PROMPT, tools={"read_file": read_file}, model="gpt-4o")


def _langgraph(base_url: str, guard: Guard, read_file: ReadFile) -> Outcome | None:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import convert_to_messages, convert_to_openai_messages
    from langchain_core.outputs import ChatGeneration, ChatResult
    from langchain_core.tools import StructuredTool
    from langchain_core.utils.function_calling import convert_to_openai_tool
    from langgraph.graph import (  # pyright: ignore[reportMissingTypeStubs]
        END,
        START,
        MessagesState,
        StateGraph,
    )
    from langgraph.prebuilt import ToolNode, tools_condition

    from budgetguard_langgraph import bounded

    tool = StructuredTool.from_function(read_file, name="read_file", description="Read a file.")
    tools = [convert_to_openai_tool(tool)]

    class HttpChat(BaseChatModel):
        """The requests and answers of `langchain_openai.ChatOpenAI`, without that dependency."""

        model_name: str = "gpt-4o"

        @property
        def _llm_type(self) -> str:
            return "openai-http"

        def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
            convert: Any = convert_to_openai_messages
            sent: Any = convert(messages)
            body: dict[str, Any] = {"model": self.model_name, "messages": sent, "tools": tools}
            reply = complete(base_url, body)
            (message,) = convert_to_messages([reply["choices"][0]["message"]])
            usage = reply["usage"]
            used = {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
            }
            answered = message.model_copy(update={"usage_metadata": used})
            return ChatResult(generations=[ChatGeneration(message=answered)])

    model = HttpChat()

    def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode([tool]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition, ["tools", END])
    graph.add_edge("tools", "agent")
    bounded(graph.compile(), guard).invoke({"messages": [("user", PROMPT)]})
    return guard.outcome


def _openai_agents(base_url: str, guard: Guard, read_file: ReadFile) -> Outcome:
    import agents

    from budgetguard_openai_agents import bounded_run, outcome

    def _read(path: str) -> str:
        return read_file(path)

    tool = agents.function_tool(
        _read,
        name_override="read_file",
        description_override="Read a file.",
        strict_mode=False,
    )

    async def main() -> Outcome:
        async with _client(base_url) as client:
            model = agents.OpenAIChatCompletionsModel("gpt-4o", client)
            agent = agents.Agent(name="operator", model=model, tools=[tool])
            config = agents.RunConfig(tracing_disabled=True)
            return outcome(await bounded_run(agent, PROMPT, budget=guard, run_config=config))

    return asyncio.run(main())


def _pydantic_ai(base_url: str, guard: Guard, read_file: ReadFile) -> Outcome | None:
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    from budgetguard_pydantic_ai import BudgetCapability

    agent = pydantic_ai.Agent(
        OpenAIChatModel("gpt-4o", provider=OpenAIProvider(openai_client=_client(base_url))),
        capabilities=[BudgetCapability(guard)],
    )

    @agent.tool_plain(name="read_file")
    def _read(path: str) -> str:
        return read_file(path)

    agent.run_sync(PROMPT)
    return guard.outcome


def _strands(base_url: str, guard: Guard, read_file: ReadFile) -> Outcome | None:
    import strands
    from strands.models.openai import OpenAIModel

    from budgetguard_strands import BudgetHookProvider

    provider = BudgetHookProvider(guard)
    make = cast("Any", strands).tool
    tool = make(name="read_file", description="Read a file.")
    agent = strands.Agent(
        model=OpenAIModel(client=_client(base_url), model_id="gpt-4o"),
        tools=[tool(read_file)],
        hooks=[provider],
        callback_handler=None,
    )
    agent(PROMPT)
    return provider.outcome(agent)


AGENTS = (
    Agent(
        "budgetguard_langgraph",
        "A LangGraph graph",
        _langgraph,
        "graph = bg.bounded(graph, budget)",
        ("langgraph",),
    ),
    Agent(
        "budgetguard_loop",
        "A plain Python loop",
        _plain_loop,
        "with bg.bounded(budget) as run:",
    ),
    Agent(
        "budgetguard_openai_agents",
        "OpenAI Agents SDK",
        _openai_agents,
        "hooks = bg.BudgetHooks(budget)",
        ("agents",),
    ),
    Agent(
        "budgetguard_pydantic_ai",
        "Pydantic AI",
        _pydantic_ai,
        "caps = [bg.BudgetCapability(budget)]",
        ("pydantic_ai", "openai"),
    ),
    Agent(
        "budgetguard_strands",
        "Strands Agents",
        _strands,
        "hooks = [bg.BudgetHookProvider(budget)]",
        ("strands", "openai"),
    ),
)
