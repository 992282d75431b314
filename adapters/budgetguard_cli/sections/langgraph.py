"""A graph as people build it by hand, with a chat model over real HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    BaseMessage,
    convert_to_messages,
    convert_to_openai_messages,
)
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
from budgetguard_cli.sections.chat import complete
from budgetguard_core import Guard, Outcome
from budgetguard_langgraph import bounded


class _HttpChat(BaseChatModel):
    """What `langchain_openai.ChatOpenAI` sends and reads, without that dependency."""

    base_url: str
    tools: list[dict[str, Any]]
    model_name: str = "gpt-4o"

    @property
    def _llm_type(self) -> str:
        return "openai-http"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> ChatResult:
        body = {
            "model": self.model_name,
            "messages": convert_to_openai_messages(messages),
            "tools": self.tools,
        }
        reply = complete(self.base_url, body)
        (message,) = convert_to_messages([reply["choices"][0]["message"]])
        usage = reply["usage"]
        answered = message.model_copy(
            update={
                "usage_metadata": UsageMetadata(
                    input_tokens=usage["prompt_tokens"],
                    output_tokens=usage["completion_tokens"],
                    total_tokens=usage["total_tokens"],
                )
            }
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
