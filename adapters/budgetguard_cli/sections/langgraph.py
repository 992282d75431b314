"""A graph as people build it by hand, with a chat model over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import UsageMetadata
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

from budgetguard_cli.sections import PROMPT
from budgetguard_core import Guard, Outcome
from budgetguard_langgraph import bounded


class _HttpChat(BaseChatModel):
    """Stands in for `langchain_openai.ChatOpenAI`, which is not a dependency."""

    base_url: str
    tools: list[dict[str, Any]]
    model_name: str = "gpt-4o"

    @property
    def _llm_type(self) -> str:
        return "openai-http"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> ChatResult:
        url = urlsplit(self.base_url)
        body = {
            "model": self.model_name,
            "messages": convert_to_openai_messages(messages),
            "tools": self.tools,
        }
        # Not urllib: it would send a loopback request through a proxy.
        connection = HTTPConnection(url.hostname or "", url.port, timeout=30)
        try:
            connection.request(
                "POST",
                f"{url.path}/chat/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            msg = f"the server answered {answer.status}: {text[:200]!r}"
            raise ConnectionError(msg)
        return _result(json.loads(text))


def _result(reply: dict[str, Any]) -> ChatResult:
    message: dict[str, Any] = reply["choices"][0]["message"]
    usage: dict[str, Any] = reply["usage"]
    answered = AIMessage(
        message.get("content") or "",
        tool_calls=[
            {
                "name": call["function"]["name"],
                "args": json.loads(call["function"]["arguments"]),
                "id": call["id"],
            }
            for call in message.get("tool_calls") or ()
        ],
        usage_metadata=UsageMetadata(
            input_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
            total_tokens=usage["total_tokens"],
        ),
        response_metadata={"model_name": reply.get("model", "")},
    )
    return ChatResult(generations=[ChatGeneration(message=answered)])


def run(base_url: str, guard: Guard, read_file: Callable[[str], str]) -> Outcome:
    """Run a model node and a tool node in a circle until the guard stops them."""

    def read(path: str) -> str:
        return read_file(path)

    tool = StructuredTool.from_function(read, name="read_file", description="Read a file.")
    model = _HttpChat(base_url=base_url, tools=[convert_to_openai_tool(tool)])

    def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode([tool]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition, ["tools", END])
    graph.add_edge("tools", "agent")
    bounded(graph.compile(), guard).invoke({"messages": [("user", PROMPT)]})
    outcome = guard.outcome
    if outcome is None:
        msg = "the graph ended without an outcome"
        raise RuntimeError(msg)
    return outcome
