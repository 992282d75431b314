"""The OpenAI Agents SDK's runner, through the contract."""

# ruff: noqa: A002 - the SDK calls it `input`

from __future__ import annotations

import asyncio
import atexit
import json
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from contextvars import ContextVar
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from agents import (
    Agent,
    FunctionTool,
    GuardrailFunctionOutput,
    InputGuardrail,
    ModelResponse,
    ModelRetrySettings,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    RunHooks,
    Runner,
    RunState,
    Usage,
    set_tracing_disabled,
)
from agents.handoffs import Handoff
from agents.memory import SQLiteSession
from openai import AsyncOpenAI
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseIncompleteEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseUsage,
)
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel

from budgetguard_core import AdapterError
from budgetguard_core.kit import TokenUsage
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
from conformance.outcomes import ended_with

set_tracing_disabled(True)

NUMBERS = count()
CURRENT: ContextVar[Scenario] = ContextVar("scenario")


@contextmanager
def current(scenario: Scenario) -> Iterator[None]:
    """Tell the tools of an agent, which outlives a scenario, what they belong to."""
    token = CURRENT.set(scenario)
    try:
        yield
    finally:
        CURRENT.reset(token)


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


class ScriptedModel(OpenAIResponsesModel):
    """The real runner's model, answered by a script; works with every SDK version."""

    def __init__(self, script: Script) -> None:
        super().__init__(MODEL, AsyncOpenAI(api_key="none"))
        self.script = script

    async def _next(self, system_instructions, input, settings, tools, handoffs):
        shown = [
            system_instructions,
            input,
            [[t.name, getattr(t, "description", "")] for t in tools],
        ]
        items = [{"role": "user", "content": input}] if isinstance(input, str) else input
        reply = self.script.next(
            json.dumps(shown, default=str),
            request=messages(items, {one.tool_name for one in handoffs}, None),
            bound=settings.max_tokens,
            model=(settings.extra_body or {}).get("model", self.model),
        )
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
                    status="incomplete" if reply.cut else "completed",
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
        self,
        system_instructions,
        input,
        model_settings,
        tools,
        output_schema,
        handoffs,
        *args,
        **kwargs,
    ):
        reply, output = await self._next(
            system_instructions, input, model_settings, tools, handoffs
        )
        usage = Usage(requests=1)
        if (record := record_of(reply)) is not None:
            usage = Usage(
                requests=1,
                input_tokens=record.input_tokens,
                output_tokens=record.output_tokens,
                total_tokens=record.total_tokens,
                input_tokens_details=record.input_tokens_details,
                output_tokens_details=record.output_tokens_details,
            )
        return ModelResponse(output=output, usage=usage, response_id=None)

    async def stream_response(
        self,
        system_instructions,
        input,
        model_settings,
        tools,
        output_schema,
        handoffs,
        *args,
        **kwargs,
    ):
        reply, output = await self._next(
            system_instructions, input, model_settings, tools, handoffs
        )
        response = Response(
            id=f"resp_{next(NUMBERS)}",
            created_at=0,
            model=reply.model,
            object="response",
            output=output,
            tool_choice="auto",
            tools=[],
            parallel_tool_calls=True,
            status="incomplete" if reply.cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if reply.cut else None,
            usage=record_of(reply),
        )
        if reply.cut:
            yield ResponseIncompleteEvent(
                type="response.incomplete", response=response, sequence_number=0
            )
            return
        yield ResponseCompletedEvent(
            type="response.completed", response=response, sequence_number=0
        )


def usage_record(given, answered, total, *, read=0, write=0, reasoning=0):
    """Make the usage of the Responses API."""
    return ResponseUsage.model_construct(
        input_tokens=given,
        output_tokens=answered,
        total_tokens=total,
        input_tokens_details=InputTokensDetails.model_construct(
            cached_tokens=read, cache_write_tokens=write
        ),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
    )


def record_of(reply):
    if reply.record is not None:
        return reply.record
    usage = reply.usage
    if usage is None:
        return None
    return usage_record(usage.input_tokens, usage.output_tokens, usage.total_tokens)


def refuses_equal_ids():
    """Tell whether this release ends a run in which the model gives one id to two calls."""
    spec = find_spec("agents.run_internal")
    if spec is None:
        return False
    planning = Path(spec.submodule_search_locations[0]) / "tool_planning.py"
    return planning.is_file() and "reused a tool call ID" in planning.read_text()


EQUAL_IDS = {"equal_ids": "the SDK itself ends a run in which a call has the id of another one"}
USAGE_RECORDS = (
    (
        usage_record(100, 30, 130, read=60, write=30, reasoning=10),
        TokenUsage(100, 30, cache_read_tokens=60, cache_write_tokens=30, reasoning_tokens=10),
    ),
    # The total knows of more than the answer says.
    (usage_record(100, 0, 150), TokenUsage(100, 50)),
    (usage_record(100, 10, 150, reasoning=40), TokenUsage(100, 50, reasoning_tokens=40)),
)


def build_tool(tool: Tool) -> FunctionTool:
    agent = None if tool.agent is None else build_agent(tool.agent)

    async def invoke(context: Any, arguments: str) -> str:
        scenario = CURRENT.get()
        value = arguments_value(json.loads(arguments or "{}"))
        if scenario.mode == "sync":
            # As the SDK runs functions that are not async.
            result = await asyncio.to_thread(scenario.call, tool, value)
        else:
            result = await scenario.acall(tool, value)
        if agent is None:
            return result
        options: dict[str, Any] = {}
        if tool.agent is not None and tool.agent.budget is not None:
            options["hooks"] = BudgetHooks(tool.agent.budget)
        if scenario.mode == "streamed":
            streamed = Runner.run_streamed(agent, value, **options)
            async for _ in streamed.stream_events():
                pass
            return scenario.read(str(streamed.final_output))
        ran = await Runner.run(agent, value, **options)
        return scenario.read(str(ran.final_output))

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
        description=tool.description,
        params_json_schema={
            "type": "object",
            "properties": {"value": {"type": "string"}},
            "required": [],
            "additionalProperties": False,
        },
        on_invoke_tool=invoke_either,
        strict_json_schema=False,
        needs_approval=tool.approval,
    )


def guardrail(judge: ScriptedAgent) -> InputGuardrail[Any]:
    """The user's own check of the input, which asks an agent."""
    agent = build_agent(judge)

    async def check(context: Any, of: Any, given: Any) -> GuardrailFunctionOutput:
        scenario = CURRENT.get()
        if judge.budget is None:
            result = await Runner.run(agent, "Is it fine?")
        else:
            result = await Runner.run(agent, "Is it fine?", hooks=BudgetHooks(judge.budget))
        answer = scenario.read(str(result.final_output))
        return GuardrailFunctionOutput(output_info=answer, tripwire_triggered=answer != "yes")

    return InputGuardrail(guardrail_function=check, run_in_parallel=False)


def build_agent(agent: ScriptedAgent, **options: Any) -> Agent[Any]:
    return Agent(
        name=agent.name,
        instructions="You are an assistant.",
        model=ScriptedModel(agent.script),
        # A run that asks for reports brings the tool for them.
        tools=[build_tool(tool) for tool in agent.tools if not tool.reports],
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

    for location, item in enumerate(items):
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
            if location == len(items) - 1 and synthetic is not None:
                found.append(Message(role="assistant", text=text, synthetic=synthetic))
            elif item["role"] == "assistant":
                assistant(text)
            else:
                found.append(Message(role=item["role"], text=text))
    return found


class OpenAIAgentsDriver(Driver):
    adapter = "budgetguard_openai_agents"
    subagents = frozenset({"tool", "handoff"})
    usage_records: ClassVar = USAGE_RECORDS
    lacks: ClassVar = {
        "dialogue": "a run ends with the first reply without a call; agents talk by handoffs, "
        "which are calls",
        **(EQUAL_IDS if refuses_equal_ids() else {}),
    }
    with_session = False

    def run_sync(self, scenario: Scenario) -> Ran:
        with current(scenario):
            agent = self.agent(scenario)
            session = self.session_of(scenario)
            given = asyncio.run(self.input_of(scenario, agent))
            try:
                with own_loop():
                    result = self.start_sync(scenario, agent, given, session)
            except Exception as error:
                return asyncio.run(self.ran(scenario, agent, None, session, error))
            return asyncio.run(self.ran(scenario, agent, result, session))

    async def run_async(self, scenario: Scenario) -> Ran:
        with current(scenario):
            agent = self.agent(scenario)
            session = self.session_of(scenario)
            given = await self.input_of(scenario, agent)
            if scenario.mode == "streamed":
                return await self.read(scenario, agent, given, session)
            try:
                result = await self.start(scenario, agent, given, session)
            except Exception as error:
                return await self.ran(scenario, agent, None, session, error)
            return await self.ran(scenario, agent, result, session)

    def agent(self, scenario: Scenario) -> Agent[Any]:
        agent = scenario.shared.get("agent")
        if agent is None or scenario.location != "same object":
            agent = scenario.shared["agent"] = self.build(scenario)
        return agent

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
            input_guardrails=[] if scenario.judge is None else [guardrail(scenario.judge)],
        )

    def session_of(self, scenario: Scenario) -> Any:
        if not (self.with_session or scenario.stored):
            return None
        return scenario.after.session[0] if scenario.after else MemorySession("conversation")

    async def input_of(self, scenario: Scenario, agent: Agent[Any]) -> Any:
        after, new = scenario.after, scenario.user_input
        if after is not None and scenario.answer is not None:
            state = after.session[1]
            if scenario.location != "same object":
                state = await RunState.from_string(agent, state.to_string())
            for waiting in state.get_interruptions():
                if scenario.answer == "approve":
                    state.approve(waiting)
                else:
                    state.reject(waiting)
            return state
        if self.with_session or scenario.stored or after is None:
            return [] if new is None else new
        said = [] if new is None else [{"role": "user", "content": new}]
        return [*after.session[0], *said]

    def hooks_of(self, scenario: Scenario) -> RunHooks[Any] | None:
        inner = SwallowingHooks() if scenario.swallowing else None
        if scenario.guard is None:
            return inner
        options = {"on_trip": scenario.on_trip, "store": scenario.store}
        options["conversation_id"] = scenario.conversation
        hooks = BudgetHooks(scenario.guard, inner, **options)
        return BudgetHooks(scenario.guard, hooks) if scenario.twice else hooks

    def options_of(self, scenario: Scenario, session: Any) -> dict[str, Any]:
        options: dict[str, Any] = {"session": session, "run_config": RunConfig()}
        if scenario.own_limit is not None:
            options["max_turns"] = scenario.own_limit
        if scenario.swallowing or scenario.own_limit is not None:
            options["error_handlers"] = {"max_turns": lambda _: "never mind"}
        return options

    async def read(self, scenario: Scenario, agent: Agent[Any], given: Any, session: Any) -> Ran:
        chunks: list[object] = []
        result = self.start_streamed(scenario, agent, given, session)
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

    def start_sync(self, scenario: Scenario, agent: Agent[Any], given: Any, session: Any) -> Any:
        raise NotImplementedError

    async def start(self, scenario: Scenario, agent: Agent[Any], given: Any, session: Any) -> Any:
        raise NotImplementedError

    def start_streamed(
        self, scenario: Scenario, agent: Agent[Any], given: Any, session: Any
    ) -> Any:
        raise NotImplementedError

    async def ran(
        self,
        scenario: Scenario,
        agent: Agent[Any],
        result: Any,
        session: Any,
        error: Exception | None = None,
    ) -> Ran:
        returned: list[Any] = [] if result is None else result.to_input_list()
        items = returned if session is None else list(await session.get_items())
        synthetic = None
        if result is not None and result.new_items:
            last = result.new_items[-1]
            synthetic = last.metadata if isinstance(last, SyntheticMessage) else None
        handoffs = {
            Handoff.default_tool_name(one) for one in agent.handoffs if isinstance(one, Agent)
        }
        found = ended_with(error)
        if result is not None and error is None and scenario.guard is not None:
            with suppress(AdapterError):  # a stream that was left is not over yet
                found = outcome(result)
        waits = error is None and result is not None and result.interruptions
        whole = scenario.stored and error is None and scenario.break_after is None
        return Ran(
            history=messages(items, handoffs, synthetic),
            returned=messages(returned, handoffs, synthetic) if whole else None,
            outcome=found,
            typed=None if result is None else result.final_output,
            raised=error,
            session=(items if session is None else session, result.to_state() if waits else None),
        )


class HooksDriver(OpenAIAgentsDriver):
    """`Runner.run(..., hooks=BudgetHooks(...))`, with a session."""

    name = "BudgetHooks"
    with_session = True

    def start_sync(self, scenario, agent, given, session):
        return Runner.run_sync(
            agent,
            given,
            hooks=self.hooks_of(scenario),
            **self.options_of(scenario, session),
        )

    async def start(self, scenario, agent, given, session):
        return await Runner.run(
            agent,
            given,
            hooks=self.hooks_of(scenario),
            **self.options_of(scenario, session),
        )

    def start_streamed(self, scenario, agent, given, session):
        return Runner.run_streamed(
            agent,
            given,
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

    def start_sync(self, scenario, agent, given, session):
        if scenario.guard is None:
            return Runner.run_sync(agent, given)
        return bounded_run_sync(agent, given, **self.arguments(scenario, session))

    async def start(self, scenario, agent, given, session):
        if scenario.guard is None:
            return await Runner.run(agent, given)
        return await bounded_run(agent, given, **self.arguments(scenario, session))

    def start_streamed(self, scenario, agent, given, session):
        if scenario.guard is None:
            return Runner.run_streamed(agent, given)
        return bounded_run_streamed(agent, given, **self.arguments(scenario, session))


DRIVERS = (HooksDriver(), BoundedRunDriver())
