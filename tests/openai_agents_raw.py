"""A model that answers with given output items, so that every kind of tool can be called."""

from __future__ import annotations

from itertools import count
from typing import Any

from agents import (
    ApplyPatchTool,
    AsyncComputer,
    ComputerTool,
    CustomTool,
    LocalShellTool,
    Model,
    ModelResponse,
    ShellTool,
    Usage,
    function_tool,
)
from agents.editor import ApplyPatchResult
from agents.mcp import MCPServer
from mcp.types import CallToolResult, TextContent
from mcp.types import Tool as McpTool
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseComputerToolCall,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseUsage,
)
from openai.types.responses.response_output_item import LocalShellCall
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


KINDS = ("function", "mcp", "custom", "shell", "local_shell", "apply_patch", "computer")


class Editor:
    def __init__(self, bodies: list[str]) -> None:
        self.bodies = bodies

    def create_file(self, operation: Any) -> ApplyPatchResult:
        self.bodies.append(operation.path)
        return ApplyPatchResult(status="completed", output="patched")

    update_file = delete_file = create_file


class Screen(AsyncComputer):
    environment = "browser"
    dimensions = (100, 100)

    def __init__(self, bodies: list[str]) -> None:
        self.bodies = bodies

    async def screenshot(self) -> str:
        return "aW1hZ2U="

    async def type(self, text: str) -> None:
        self.bodies.append(text)

    async def wait(self) -> None: ...
    async def click(self, *args: Any) -> None: ...
    async def double_click(self, *args: Any) -> None: ...
    async def scroll(self, *args: Any) -> None: ...
    async def move(self, *args: Any) -> None: ...
    async def keypress(self, *args: Any) -> None: ...
    async def drag(self, *args: Any) -> None: ...


def toolbox(bodies: list[str]) -> dict[str, Any]:
    """Make one tool of each kind; each writes the id of its call into `bodies`."""

    async def custom(context: Any, given: str) -> str:
        bodies.append(given)
        return f"row {given}"

    def shell(request: Any) -> str:
        bodies.append(request.data.action.commands[0])
        return "ran"

    def local(request: Any) -> str:
        bodies.append(request.data.action.command[0])
        return "ran"

    async def act(id: str) -> str:  # noqa: A002
        bodies.append(id)
        return f"acted {id}"

    class Server(OneToolServer):
        async def call_tool(self, tool_name: str, arguments: Any, meta: Any = None) -> Any:
            result = await super().call_tool(tool_name, arguments, meta)
            bodies[-1] = arguments["id"]
            return result

    server = Server(bodies)
    return {
        "function": function_tool(act),
        "mcp": server,
        "custom": CustomTool(name="sql", description="Query.", on_invoke_tool=custom),
        "shell": ShellTool(executor=shell),
        "local_shell": LocalShellTool(executor=local),
        "apply_patch": ApplyPatchTool(editor=Editor(bodies)),
        "computer": ComputerTool(computer=Screen(bodies)),
    }


def call_of(kind: str, number: Any) -> Any:
    name = str(number)
    if kind in ("function", "mcp"):
        return ResponseFunctionToolCall(
            call_id=f"c{name}",
            name="act" if kind == "function" else "fetch",
            arguments=f'{{"id": "{name}"}}',
            type="function_call",
        )
    if kind == "custom":
        return ResponseCustomToolCall(
            call_id=f"c{name}", name="sql", input=name, type="custom_tool_call"
        )
    if kind == "shell":
        return {
            "type": "shell_call",
            "id": f"s{name}",
            "call_id": f"c{name}",
            "status": "completed",
            "action": {"commands": [name], "timeout_ms": 1000},
        }
    if kind == "local_shell":
        return LocalShellCall.model_validate(
            {
                "type": "local_shell_call",
                "id": f"l{name}",
                "call_id": f"c{name}",
                "status": "completed",
                "action": {"type": "exec", "command": [name], "env": {}},
            }
        )
    if kind == "apply_patch":
        return {
            "type": "apply_patch_call",
            "id": f"p{name}",
            "call_id": f"c{name}",
            "status": "completed",
            "operation": {"type": "create_file", "path": name, "diff": "+x"},
        }
    return ResponseComputerToolCall.model_validate(
        {
            "type": "computer_call",
            "id": f"u{name}",
            "call_id": f"c{name}",
            "action": {"type": "type", "text": name},
            "pending_safety_checks": [],
            "status": "completed",
        }
    )
