"""The OpenAI Agents SDK's runner, through the contract."""

# ruff: noqa: A002 - the SDK calls it `input`

from __future__ import annotations

import asyncio
import atexit
import json
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, ClassVar

from agents import (
    Agent,
    FunctionTool,
    Model,
    ModelResponse,
    ModelRetrySettings,
    ModelSettings,
    RunConfig,
    RunHooks,
    Runner,
    Usage,
    set_tracing_disabled,
)
from agents.handoffs import Handoff
from agents.memory import SQLiteSession
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseUsage,
)
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel

from budgetguard_core.testing import (
    MODEL,
    Driver,
    Message,
    Ran,
    Scenario,
    Script,
    Tool,
    arguments_value,
    hang,
    run_in_loop,
)
from budgetguard_core.testing import Agent as ScriptedAgent
from budgetguard_openai_agents import (
    BudgetHooks,
    bounded_run,
    bounded_run_streamed,
    bounded_run_sync,
    outcome,
)
from budgetguard_openai_agents._history import SyntheticMessage

set_tracing_disabled(True)

NUMBERS = count()
CURRENT: ContextVar[Scenario] = ContextVar("scenario")


@contextmanager
def own_loop() -> Iterator[None]:
    """Close the loop that `run_sync` works in; the SDK leaves it to the thread."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


class Answer(BaseModel):
    value: str


class MemorySession(SQLiteSession):
    """A session that is closed at the end: Python 3.13 warns of a database that is left open."""

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id)
        atexit.register(self.close)


class ScriptedModel(Model):
    """The real runner's model, answered by a script; works with every SDK version."""

    model = MODEL

    def __init__(self, script: Script) -> None:
        self.script = script

    async def _next(self, system_instructions, input, tools):
        shown = [
            system_instructions,
            input,
            [[t.name, getattr(t, "description", "")] for t in tools],
        ]
        reply = self.script.next(json.dumps(shown, default=str))
        if reply.hang:
            await hang()
        if reply.error is not None:
            raise reply.error
        output: list[Any] = []
        if reply.text:
            text = ResponseOutputText(
                text=reply.text, type="output_text", annotations=[], logprobs=[]
            )
            output.append(
                ResponseOutputMessage(
                    id=f"msg_{next(NUMBERS)}",
                    type="message",
                    role="assistant",
                    status="completed",
                    content=[text],
                )
            )
        # An agent as a tool calls its argument `input`.
        agents = {
            tool.name
            for tool in tools
            if "input" in getattr(tool, "params_json_schema", {}).get("properties", {})
        }
        calls = [
            (
                call.id,
                call.name,
                json.dumps({"input": call.value} if call.name in agents else call.arguments),
            )
            for call in reply.tool_calls
        ]
        if reply.handoff is not None:
            calls.append((f"handoff_{next(NUMBERS)}", f"transfer_to_{reply.handoff}", "{}"))
        for call_id, name, arguments in calls:
            output.append(
                ResponseFunctionToolCall(
                    call_id=call_id, name=name, arguments=arguments, type="function_call"
                )
            )
        return reply, output

    async def get_response(
        self, system_instructions, input, model_settings, tools, *args, **kwargs
    ):
        reply, output = await self._next(system_instructions, input, tools)
        usage = Usage(requests=1)
        if reply.usage is not None:
            usage = Usage(
                requests=1,
                input_tokens=reply.usage.input_tokens,
                output_tokens=reply.usage.output_tokens,
                total_tokens=reply.usage.total_tokens,
            )
        return ModelResponse(output=output, usage=usage, response_id=None)

    async def stream_response(
        self, system_instructions, input, model_settings, tools, *args, **kwargs
    ):
        reply, output = await self._next(system_instructions, input, tools)
        usage = None
        if reply.usage is not None:
            usage = ResponseUsage.model_construct(
                input_tokens=reply.usage.input_tokens,
                output_tokens=reply.usage.output_tokens,
                total_tokens=reply.usage.total_tokens,
                input_tokens_details=InputTokensDetails.model_construct(
                    cached_tokens=0, cache_write_tokens=0
                ),
                output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            )
        response = Response(
            id=f"resp_{next(NUMBERS)}",
            created_at=0,
            model=MODEL,
            object="response",
            output=output,
            tool_choice="auto",
            tools=[],
            parallel_tool_calls=True,
            usage=usage,
        )
        yield ResponseCompletedEvent(
            type="response.completed", response=response, sequence_number=0
        )


def build_tool(tool: Tool) -> FunctionTool:
    agent = None if tool.agent is None else build_agent(tool.agent)

    async def invoke(context: Any, arguments: str) -> str:
        scenario = CURRENT.get()
        value = arguments_value(json.loads(arguments or "{}"))
        result = scenario.start(tool, value)
        if tool.hang:
            await hang()
        if agent is None:
            return result
        options: dict[str, Any] = {}
        if tool.agent is not None and tool.agent.budget is not None:
            options["hooks"] = BudgetHooks(tool.agent.budget)
        if scenario.mode == "streamed":
            streamed = Runner.run_streamed(agent, value, **options)
            async for _ in streamed.stream_events():
                pass
            return str(streamed.final_output)
        ran = await Runner.run(agent, value, **options)
        return str(ran.final_output)

    async def forgiving(context: Any, arguments: str) -> str:
        try:
            return await invoke(context, arguments)
        except Exception as error:
            return f"failed: {error}"

    async def invoke_either(context: Any, arguments: str) -> str:
        if CURRENT.get().swallowing:
            return await forgiving(context, arguments)
        try:
            return await invoke(context, arguments)
        except ValueError as error:
            # What function_tool does by default with a body that raises.
            return f"An error occurred while running the tool. Error: {error}"

    return FunctionTool(
        name=tool.name,
        description="A tool.",
        params_json_schema={
            "type": "object",
            "properties": {"value": {"type": "string"}},
            "required": [],
            "additionalProperties": False,
        },
        on_invoke_tool=invoke_either,
        strict_json_schema=False,
    )


def build_agent(agent: ScriptedAgent, **options: Any) -> Agent[Any]:
    return Agent(
        name=agent.name,
        instructions="You are an assistant.",
        model=ScriptedModel(agent.script),
        tools=[build_tool(tool) for tool in agent.tools],
        **options,
    )


class SwallowingHooks(RunHooks[Any]):
    """The user's own hooks, which hide whatever goes wrong in them."""

    async def on_llm_start(self, *args: Any) -> None:
        try:
            raise RuntimeError("the user's hooks are broken")
        except RuntimeError:
            pass


def messages(items: list[Any], handoffs: set[str], synthetic: Any) -> list[Message]:
    """Write the SDK's items as messages: calls belong to the message before them."""
    found: list[Message] = []
    transfers: set[str] = set()

    def assistant(text: str = "", calls: tuple[tuple[str, str], ...] = ()) -> None:
        last = found[-1] if found else None
        if last is not None and last.role == "assistant" and calls:
            found[-1] = Message(
                role="assistant", text=last.text, tool_calls=(*last.tool_calls, *calls)
            )
        else:
            found.append(Message(role="assistant", text=text, tool_calls=calls))

    for place, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "function_call":
            if item["name"] in handoffs:
                transfers.add(item["call_id"])
            else:
                assistant(calls=((item["call_id"], item["name"]),))
        elif kind == "function_call_output":
            if item["call_id"] not in transfers:
                found.append(
                    Message(role="tool", text=str(item["output"]), tool_call_id=item["call_id"])
                )
        elif kind == "message":
            content = item["content"]
            text = content if isinstance(content, str) else "".join(p["text"] for p in content)
            if place == len(items) - 1 and synthetic is not None:
                found.append(Message(role="assistant", text=text, synthetic=synthetic))
            elif item["role"] == "assistant":
                assistant(text)
            else:
                found.append(Message(role=item["role"], text=text))
    return found


class OpenAIAgentsDriver(Driver):
    adapter = "budgetguard_openai_agents"
    limits: ClassVar = {
        "test_mcp_tools_are_counted_and_a_batch_that_does_not_fit_is_refused_whole": (
            "a batch with calls of MCP servers, custom tools, shells, computers or patches is "
            "refused whole where one of them does not fit"
        ),
        "test_a_quota_on_an_mcp_tool_ends_the_run": (
            "a quota on such a tool ends the run instead of answering the model"
        ),
    }
    subagents = frozenset({"tool", "handoff"})
    with_session = False

    def run(self, scenario: Scenario) -> Ran:
        CURRENT.set(scenario)
        agent = scenario.shared.get("agent")
        if agent is None:
            agent = self.build(scenario)
            scenario.shared["agent"] = agent
        if scenario.mode == "sync":
            return self.run_sync(scenario, agent)
        coroutine = {"async": self.run_async, "streamed": self.run_streamed}[scenario.mode]
        ran, leaked = run_in_loop(coroutine(scenario, agent))
        ran.leaked = leaked
        return ran

    def build(self, scenario: Scenario) -> Agent[Any]:
        settings = ModelSettings()
        if scenario.retries:
            settings.retry = ModelRetrySettings(
                max_retries=scenario.retries,
                policy=lambda _: True,
                backoff={"initial_delay": 0.0, "jitter": False},
            )
        return build_agent(
            ScriptedAgent(name="main", script=scenario.script, tools=scenario.tools),
            handoffs=[build_agent(one) for one in scenario.handoffs],
            model_settings=settings,
            output_type=Answer if scenario.structured else None,
        )

    def session_of(self, scenario: Scenario) -> Any:
        if not self.with_session:
            return None
        return scenario.after.session if scenario.after else MemorySession("conversation")

    def input_of(self, scenario: Scenario) -> Any:
        if self.with_session or scenario.after is None:
            return [] if scenario.user_input is None else scenario.user_input
        new = (
            []
            if scenario.user_input is None
            else [{"role": "user", "content": scenario.user_input}]
        )
        return [*scenario.after.session, *new]

    def hooks_of(self, scenario: Scenario) -> RunHooks[Any] | None:
        inner = SwallowingHooks() if scenario.swallowing else None
        if scenario.guard is None:
            return inner
        hooks = BudgetHooks(scenario.guard, inner, on_trip=scenario.on_trip, store=scenario.store)
        return BudgetHooks(scenario.guard, hooks) if scenario.twice else hooks

    def options_of(self, scenario: Scenario, session: Any) -> dict[str, Any]:
        options: dict[str, Any] = {"session": session, "run_config": RunConfig()}
        if scenario.swallowing:
            options["error_handlers"] = {"max_turns": lambda _: "never mind"}
        return options

    def run_sync(self, scenario: Scenario, agent: Agent[Any]) -> Ran:
        session = self.session_of(scenario)
        try:
            with own_loop():
                result = self.start_sync(scenario, agent, session)
        except Exception as error:
            return asyncio.run(self.ran(scenario, agent, None, session, error))
        return asyncio.run(self.ran(scenario, agent, result, session))

    async def run_async(self, scenario: Scenario, agent: Agent[Any]) -> Ran:
        session = self.session_of(scenario)
        try:
            result = await self.start(scenario, agent, session)
        except Exception as error:
            return await self.ran(scenario, agent, None, session, error)
        return await self.ran(scenario, agent, result, session)

    async def run_streamed(self, scenario: Scenario, agent: Agent[Any]) -> Ran:
        session = self.session_of(scenario)
        chunks: list[object] = []
        result = self.start_streamed(scenario, agent, session)
        try:
            async with aclosing(result.stream_events()) as events:
                async for event in events:
                    chunks.append(event)
                    if len(chunks) == scenario.break_after:
                        break
        except Exception as error:
            return await self.ran(scenario, agent, result, session, error)
        ran = await self.ran(scenario, agent, result, session)
        ran.chunks = chunks
        return ran

    def start_sync(self, scenario: Scenario, agent: Agent[Any], session: Any) -> Any:
        raise NotImplementedError

    async def start(self, scenario: Scenario, agent: Agent[Any], session: Any) -> Any:
        raise NotImplementedError

    def start_streamed(self, scenario: Scenario, agent: Agent[Any], session: Any) -> Any:
        raise NotImplementedError

    async def ran(
        self,
        scenario: Scenario,
        agent: Agent[Any],
        result: Any,
        session: Any,
        error: Exception | None = None,
    ) -> Ran:
        items: list[Any] = []
        synthetic = None
        if session is not None:
            items = list(await session.get_items())
        elif result is not None:
            items = result.to_input_list()
        if result is not None and result.new_items:
            last = result.new_items[-1]
            synthetic = last.metadata if isinstance(last, SyntheticMessage) else None
        handoffs = {
            Handoff.default_tool_name(one) for one in agent.handoffs if isinstance(one, Agent)
        }
        found = None
        if result is not None and error is None and scenario.guard is not None:
            found = outcome(result) if "_budgetguard_outcome" in result.__dict__ else None
        return Ran(
            history=messages(items, handoffs, synthetic),
            outcome=found,
            raised=error,
            session=items if session is None else session,
        )


class HooksDriver(OpenAIAgentsDriver):
    """`Runner.run(..., hooks=BudgetHooks(...))`, with a session."""

    name = "BudgetHooks"
    with_session = True

    def start_sync(self, scenario, agent, session):
        return Runner.run_sync(
            agent,
            self.input_of(scenario),
            hooks=self.hooks_of(scenario),
            **self.options_of(scenario, session),
        )

    async def start(self, scenario, agent, session):
        return await Runner.run(
            agent,
            self.input_of(scenario),
            hooks=self.hooks_of(scenario),
            **self.options_of(scenario, session),
        )

    def start_streamed(self, scenario, agent, session):
        return Runner.run_streamed(
            agent,
            self.input_of(scenario),
            hooks=self.hooks_of(scenario),
            **self.options_of(scenario, session),
        )


class BoundedRunDriver(OpenAIAgentsDriver):
    """`bounded_run`, `bounded_run_sync` and `bounded_run_streamed`, with plain histories."""

    name = "bounded_run"

    def arguments(self, scenario: Scenario, session: Any) -> dict[str, Any]:
        return {
            "budget": scenario.guard,
            "hooks": self.hooks_of(scenario),
            **self.options_of(scenario, session),
        }

    def start_sync(self, scenario, agent, session):
        if scenario.guard is None:
            return Runner.run_sync(agent, self.input_of(scenario))
        return bounded_run_sync(agent, self.input_of(scenario), **self.arguments(scenario, session))

    async def start(self, scenario, agent, session):
        if scenario.guard is None:
            return await Runner.run(agent, self.input_of(scenario))
        return await bounded_run(
            agent, self.input_of(scenario), **self.arguments(scenario, session)
        )

    def start_streamed(self, scenario, agent, session):
        if scenario.guard is None:
            return Runner.run_streamed(agent, self.input_of(scenario))
        return bounded_run_streamed(
            agent, self.input_of(scenario), **self.arguments(scenario, session)
        )


DRIVERS = (HooksDriver(), BoundedRunDriver())
