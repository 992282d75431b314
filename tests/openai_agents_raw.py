"""A model that answers with given output items, so that every kind of tool can be called."""

from __future__ import annotations

from itertools import count
from typing import Any

from agents import Model, ModelResponse, Usage
from agents.mcp import MCPServer
from mcp.types import CallToolResult, TextContent
from mcp.types import Tool as McpTool
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseUsage,
)
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

NUMBERS = count()


class RawModel(Model):
    """Gives these responses in order, the last one again and again."""

    model = "raw-model"

    def __init__(self, *responses: list[Any], usage: tuple[Any, Any] = (10, 5)) -> None:
        self.responses = responses
        self.usage = usage
        self.calls = 0
        self.sent: list[Any] = []

    def _next(self, given: Any) -> list[Any]:
        output = self.responses[min(self.calls, len(self.responses) - 1)]
        self.calls += 1
        self.sent.append(list(given))
        return output

    async def get_response(self, system_instructions, input, *args, **kwargs):  # noqa: A002
        output = self._next(input)
        inputs, outputs = self.usage
        usage = Usage(
            requests=1, input_tokens=inputs, output_tokens=outputs, total_tokens=inputs + outputs
        )
        return ModelResponse(output=output, usage=usage, response_id=None)

    async def stream_response(self, system_instructions, input, *args, **kwargs):  # noqa: A002
        output = self._next(input)
        inputs, outputs = self.usage
        response = Response.model_construct(
            id=f"resp_{next(NUMBERS)}",
            created_at=0,
            model=self.model,
            object="response",
            output=output,
            tool_choice="auto",
            tools=[],
            parallel_tool_calls=True,
            usage=ResponseUsage.model_construct(
                input_tokens=inputs,
                output_tokens=outputs,
                total_tokens=inputs + outputs,
                input_tokens_details=InputTokensDetails.model_construct(
                    cached_tokens=0, cache_write_tokens=0
                ),
                output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            ),
        )
        yield ResponseCompletedEvent.model_construct(
            type="response.completed", response=response, sequence_number=0
        )


def text_item(text: str) -> ResponseOutputMessage:
    """Make a message of the model's."""
    content = [ResponseOutputText(text=text, type="output_text", annotations=[], logprobs=[])]
    return ResponseOutputMessage(
        id=f"msg_{next(NUMBERS)}",
        type="message",
        role="assistant",
        status="completed",
        content=content,
    )


class OneToolServer(MCPServer):
    """A real MCP server object of the SDK, without a process behind it."""

    def __init__(self, bodies: list[str]) -> None:
        super().__init__()
        self.bodies = bodies

    name = "local"

    async def connect(self) -> None: ...

    async def cleanup(self) -> None: ...

    async def list_tools(self, run_context=None, agent=None):
        return [McpTool(name="fetch", inputSchema={"type": "object", "properties": {}})]

    async def call_tool(self, tool_name, arguments, meta=None):
        self.bodies.append(tool_name)
        return CallToolResult(content=[TextContent(type="text", text=f"page {len(self.bodies)}")])

    async def list_prompts(self): ...

    async def get_prompt(self, name, arguments=None): ...
