"""The Strands adapter's drivers: a scripted `Model` in real agents, swarms and graphs."""

from __future__ import annotations

import asyncio
import atexit
import json
import shutil
import tempfile
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel
from strands import Agent, ModelRetryStrategy, tool
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    HookRegistry,
)
from strands.models.anthropic import AnthropicModel
from strands.multiagent import GraphBuilder, Swarm
from strands.session import FileSessionManager
from strands.types.content import Message as StrandsMessage
from strands.types.exceptions import ModelThrottledException

import budgetguard_strands
from budgetguard_core.kit import TokenUsage
from budgetguard_core.testing import (
    MODEL,
    Driver,
    Message,
    ProviderError,
    Ran,
    Reply,
    Scenario,
    Script,
    hang,
)
from budgetguard_core.testing import Agent as SubAgent
from budgetguard_core.testing import Tool as ScriptedTool
from budgetguard_strands import BudgetHookProvider
from conformance.outcomes import ended_with

# Older releases hand a message's metadata to the model as well, whose formatters leave it out.
STRIPS_METADATA = "metadata" in StrandsMessage.__annotations__


class ScriptedModel(AnthropicModel):
    """Answers from a script, in the chunks of a real provider's stream.

    It is one of Strands' own models, so that it is known where its settings keep the bound.
    """

    def __init__(self, script: Script, *, ask_as: dict[str, str] | None = None) -> None:
        self.script = script
        self.ask_as = ask_as or {}
        self.config = {"model_id": MODEL}

    def update_config(self, **model_config: Any) -> None:
        self.config.update(model_config)

    def get_config(self) -> Any:
        return self.config

    def structured_output(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the legacy way is not scripted")

    async def stream(self, messages, tool_specs=None, system_prompt=None, **kwargs):
        sent = messages
        if not STRIPS_METADATA:
            sent = [{"role": m["role"], "content": m["content"]} for m in messages]
        reply = self.script.next(
            json.dumps([system_prompt, tool_specs, sent], default=str),
            request=history_of(messages),
            bound=self.config.get("max_tokens"),
            model=self.config["model_id"],
        )
        if isinstance(reply.error, ProviderError):
            # The one that Strands' own retry strategy tries again.
            raise ModelThrottledException(str(reply.error)) from reply.error
        if reply.error is not None:
            raise reply.error
        for chunk in chunks_of(reply, self.ask_as):
            yield chunk
            if reply.hang:
                await hang()


def chunks_of(reply: Reply, ask_as: dict[str, str]):
    yield {"messageStart": {"role": "assistant"}}
    if reply.hang:
        return
    if reply.text:
        yield {"contentBlockStart": {"start": {}}}
        yield {"contentBlockDelta": {"delta": {"text": reply.text}}}
        yield {"contentBlockStop": {}}
    uses = [
        (call.id, call.name, call.fields or {ask_as.get(call.name, "value"): call.value})
        for call in reply.tool_calls
    ]
    if reply.handoff is not None:
        arguments = {"agent_name": reply.handoff, "message": "Please go on."}
        uses.append((f"handoff_{id(reply):x}", "handoff_to_agent", arguments))
    for id_, name, arguments in uses:
        yield {"contentBlockStart": {"start": {"toolUse": {"name": name, "toolUseId": id_}}}}
        yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(arguments)}}}}
        yield {"contentBlockStop": {}}
    reason = "tool_use" if uses else "end_turn"
    yield {"messageStop": {"stopReason": "max_tokens" if reply.cut else reason}}
    usage = reply.record
    if usage is None and reply.usage is not None:
        usage = {
            "inputTokens": reply.usage.input_tokens,
            "outputTokens": reply.usage.output_tokens,
            "totalTokens": reply.usage.total_tokens,
        }
    if usage is not None:
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}


def usage_record(given, answered, total, **cache):
    return {"inputTokens": given, "outputTokens": answered, "totalTokens": total, **cache}


CACHE = {"cacheReadInputTokens": 60, "cacheWriteInputTokens": 30}
# Bedrock and Anthropic count the cache on top, OpenAI inside.
USAGE_RECORDS = (
    (
        usage_record(10, 30, 130, **CACHE),
        TokenUsage(100, 30, cache_read_tokens=60, cache_write_tokens=30),
    ),
    (
        usage_record(10, 30, 40, **CACHE),
        TokenUsage(100, 30, cache_read_tokens=60, cache_write_tokens=30),
    ),
    (
        usage_record(100, 30, 130, cacheReadInputTokens=60),
        TokenUsage(100, 30, cache_read_tokens=60),
    ),
    # The total knows of more than the answer says.
    (usage_record(100, 0, 150), TokenUsage(100, 50)),
)


class Answer(BaseModel):
    """The structured output that no script ever gives."""

    text: str


class Swallowing:
    """A user's hooks: they try again whatever failed, and resume the agent whenever it ends."""

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(AfterModelCallEvent, self.after_model)
        registry.add_callback(AfterToolCallEvent, self.after_tool)
        registry.add_callback(AfterInvocationEvent, self.after_run)

    def after_model(self, event: AfterModelCallEvent) -> None:
        if event.exception is not None:
            event.retry = True

    def after_tool(self, event: AfterToolCallEvent) -> None:
        if event.result["status"] == "error":
            event.result = {**event.result, "status": "success"}

    def after_run(self, event: AfterInvocationEvent) -> None:
        event.resume = "Go on."


class Rejected(Exception):
    """What the user's own check raises."""


class StrandsDriver(Driver):
    adapter = "budgetguard_strands"
    deviations: ClassVar = {}
    usage_records: ClassVar = USAGE_RECORDS

    def agent(self, scenario: Scenario, hooks: list[Any]) -> Agent:
        tools, ask_as = self.tools(scenario, scenario.tools)
        asking = {tool.name for tool in scenario.tools if tool.approval}
        if asking:
            hooks = [*hooks, Approval(asking)]
        if scenario.judge is not None:
            hooks = [*hooks, Check(self, scenario, scenario.judge)]
        if scenario.swallowing:
            hooks = [*hooks, Swallowing()]
        session = None
        if asking or scenario.stored:
            if "folder" not in scenario.shared:
                scenario.shared["folder"] = folder()
            session = FileSessionManager("main", storage_dir=scenario.shared["folder"])
        return Agent(
            name="main",
            model=ScriptedModel(scenario.script, ask_as=ask_as),
            tools=tools,
            hooks=hooks,
            structured_output_model=Answer if scenario.structured else None,
            retry_strategy=ModelRetryStrategy(max_attempts=scenario.retries + 1, initial_delay=0),
            callback_handler=None,
            session_manager=session,
        )

    def sub_agent(self, scenario: Scenario, spec: SubAgent, hooks: list[Any]) -> Agent:
        tools, ask_as = self.tools(scenario, spec.tools)
        own = [] if spec.budget is None else [BudgetHookProvider(spec.budget)]
        return Agent(
            name=spec.name,
            description=spec.name,
            model=ScriptedModel(spec.script, ask_as=ask_as),
            tools=tools,
            hooks=own + hooks,
            callback_handler=None,
        )

    def tools(self, scenario: Scenario, specs: Any) -> tuple[list[Any], dict[str, str]]:
        made = {
            spec.name: self.scripted_tool(scenario, spec)
            if spec.agent is None
            else self.agent_tool(scenario, spec, spec.agent)
            for spec in specs
            if not spec.reports  # the provider offers that one
        }
        return list(made.values()), {
            name: next(iter(one.tool_spec["inputSchema"]["json"]["properties"]))
            for name, one in made.items()
        }

    def scripted_tool(self, scenario: Scenario, spec: ScriptedTool) -> Any:
        if spec.reports:
            return budgetguard_strands.report_progress
        if scenario.mode == "async" or spec.hang or (spec.runs and scenario.mode != "sync"):

            async def run(value: str = "") -> str:
                await asyncio.sleep(0)
                return await scenario.acall(spec, value)

        else:

            def run(value: str = "") -> str:
                return scenario.call(spec, value)

        return tool(name=spec.name, description=spec.description)(run)

    def agent_tool(self, scenario: Scenario, spec: ScriptedTool, sub_agent: SubAgent) -> Any:
        """An agent made inside a tool, which is given the provider."""

        async def ask(value: str = "") -> str:
            scenario.start(spec)
            return await self.ask(scenario, sub_agent, value)

        return tool(name=spec.name, description=spec.description)(ask)

    async def ask(self, scenario: Scenario, spec: SubAgent, value: str) -> str:
        """Run an agent where the user's own code does, and read its answer."""
        provider = scenario.shared.get("provider")
        child = self.sub_agent(scenario, spec, [])
        if provider is not None and spec.budget is None:
            provider.attach(child)
        return scenario.read(str(await child.invoke_async(value)).rstrip("\n"))

    def provider(self, scenario: Scenario) -> BudgetHookProvider | None:
        if scenario.guard is None:
            return None
        options = {"on_trip": scenario.on_trip, "store": scenario.store}
        options["conversation_id"] = scenario.conversation
        return BudgetHookProvider(scenario.guard, **options)

    def input_of(self, scenario: Scenario) -> Any:
        said = scenario.user_input
        if scenario.answer is None or scenario.after is None:
            return said
        return [
            {"interruptResponse": {"interruptId": one.id, "response": scenario.answer}}
            for one in scenario.after.session.interrupts
        ]

    def target(self, scenario: Scenario) -> tuple[Any, Agent]:
        """Make the agent, swarm or graph to call, and name the agent whose history it is."""
        raise NotImplementedError

    def opened(self, scenario: Scenario) -> tuple[Any, Agent, dict[str, Any]]:
        """Find or make what is called, and how it is called."""
        shared = scenario.shared
        if "runner" not in shared or scenario.location != "same object":
            shared.update(provider=self.provider(scenario), turn=threading.Lock())
            shared["runner"] = self.target(scenario)
            return *shared["runner"], self.options(scenario)
        runner, agent = shared["runner"]
        if scenario.after is not None:
            runner = scenario.after.session.runner
        # The agent may be one that several budgets share.
        return runner, agent, {"invocation_state": {"budgetguard": scenario.guard}}

    def options(self, scenario: Scenario) -> dict[str, Any]:
        return {} if scenario.own_limit is None else {"limits": {"turns": scenario.own_limit}}

    def run_sync(self, scenario: Scenario) -> Ran:
        runner, agent, options = self.opened(scenario)
        # Strands refuses a second run while one is on the way, so its callers queue.
        with scenario.shared["turn"]:
            try:
                result = runner(self.input_of(scenario), **options)
            except Exception as error:
                return self.ran(scenario, runner, agent, None, [], error)
            return self.ran(scenario, runner, agent, result, [])

    async def run_async(self, scenario: Scenario) -> Ran:
        runner, agent, options = self.opened(scenario)
        chunks: list[Any] = []
        with scenario.shared["turn"]:
            try:
                result = await self.act(scenario, runner, chunks, options)
            except Exception as error:
                return self.ran(scenario, runner, agent, None, chunks, error)
            return self.ran(scenario, runner, agent, result, chunks)

    async def act(
        self, scenario: Scenario, runner: Any, chunks: list[Any], options: dict[str, Any]
    ) -> Any:
        if scenario.mode == "async":
            return await runner.invoke_async(self.input_of(scenario), **options)
        stream = runner.stream_async(self.input_of(scenario), **options)
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == scenario.break_after:
                await stream.aclose()
                return None
        return chunks[-1]["result"]

    def ran(
        self,
        scenario: Scenario,
        runner: Any,
        agent: Agent,
        result: Any,
        chunks: list[Any],
        raised: Exception | None = None,
    ) -> Ran:
        provider: BudgetHookProvider | None = scenario.shared["provider"]
        outcome = ended_with(raised)
        if raised is None and provider is not None:
            outcome = provider.outcome(runner)
        history = returned = history_of(agent.messages)
        if scenario.stored:
            session = FileSessionManager("main", storage_dir=scenario.shared["folder"])
            kept = session.list_messages("main", agent.agent_id)
            history = history_of([one.to_message() for one in kept])
        return Ran(
            history=history,
            returned=returned if scenario.stored and raised is None else None,
            outcome=outcome,
            typed=getattr(result, "structured_output", None),
            raised=raised,
            chunks=chunks,
            session=Left(runner, list(getattr(result, "interrupts", None) or ())),
        )


@dataclass
class Left:
    """What to go on from."""

    runner: Any
    interrupts: list[Any]


class Approval:
    """The user's hook that has a person approve calls."""

    def __init__(self, asking: set[str]) -> None:
        self.asking = asking

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeToolCallEvent, self.before_tool)

    def before_tool(self, event: BeforeToolCallEvent) -> None:
        name = event.tool_use["name"]
        if name in self.asking and event.interrupt(f"approve-{name}", reason=name) != "approve":
            event.cancel_tool = "The person said no."


class Check:
    """The user's hook that asks an agent before the first model call."""

    def __init__(self, driver: StrandsDriver, scenario: Scenario, judge: SubAgent) -> None:
        self.driver, self.scenario, self.judge = driver, scenario, judge
        self.asked = False

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, self.before_model)

    async def before_model(self, event: BeforeModelCallEvent) -> None:
        if not self.asked:
            self.asked = True
            answer = await self.driver.ask(self.scenario, self.judge, "Is it fine?")
            if answer != "yes":
                raise Rejected(answer)


def folder() -> str:
    """Make a folder for sessions, which goes when the tests end."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


class Hooks(StrandsDriver):
    """`Agent(hooks=[BudgetHookProvider(budget)])`, with agents as tools."""

    name = "BudgetHookProvider"

    lacks: ClassVar = {
        "dialogue": "an agent ends with its first answer that asks for no tool; graphs go round",
    }

    def target(self, scenario: Scenario) -> tuple[Any, Agent]:
        provider = scenario.shared["provider"]
        hooks = [] if provider is None else [provider]
        if scenario.twice:
            hooks.append(self.provider(scenario))
        agent = self.agent(scenario, hooks)
        return agent, agent

    def agent_tool(self, scenario: Scenario, spec: ScriptedTool, sub_agent: SubAgent) -> Any:
        child = self.sub_agent(scenario, sub_agent, [])
        child.hooks.add_callback(BeforeInvocationEvent, lambda event: scenario.start(spec))
        return child.as_tool(name=spec.name)


class Attached(StrandsDriver):
    """`provider.attach(...)`: agents, swarms, graphs, and agents made inside a tool."""

    name = "attach"
    subagents: ClassVar = frozenset({"tool", "handoff", "graph"})

    def target(self, scenario: Scenario) -> tuple[Any, Agent]:
        agent = last = self.agent(scenario, [])
        runner: Any = agent
        if scenario.handoffs:
            others = [self.sub_agent(scenario, spec, []) for spec in scenario.handoffs]
            last = others[0]
            runner = Swarm([agent, *others], entry_point=agent)
        elif scenario.graph is not None:
            last = self.sub_agent(scenario, scenario.graph, [])
            builder = GraphBuilder()
            builder.add_node(last, "part")
            builder.add_node(agent, "main")
            builder.add_edge("part", "main")
            builder.set_entry_point("part")
            builder.set_max_node_executions(10)
            runner = builder.build()
        elif scenario.dialogue is not None:
            builder = GraphBuilder()
            builder.add_node(agent, "main")
            builder.add_node(self.sub_agent(scenario, scenario.dialogue, []), "other")
            builder.add_edge("main", "other")
            builder.add_edge("other", "main")
            builder.set_entry_point("main")
            builder.set_max_node_executions(50)
            runner = builder.build()
        provider = scenario.shared["provider"]
        if provider is not None:
            provider.attach(runner)
            if scenario.twice:
                self.provider(scenario).attach(runner)
        return runner, last


def history_of(messages: Any) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        # A session keeps the mark of an earlier stop; only the last message is this run's.
        metadata = (message.get("metadata") or {}) if message is messages[-1] else {}
        text = "".join(block["text"] for block in message["content"] if "text" in block)
        results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
        found += [
            Message(
                role="tool",
                text="".join(part.get("text", "") for part in result["content"]),
                tool_call_id=result["toolUseId"],
            )
            for result in results
        ]
        if text or not results:
            found.append(
                Message(
                    role=message["role"],
                    text=text,
                    tool_calls=tuple(
                        (block["toolUse"]["toolUseId"], block["toolUse"]["name"])
                        for block in message["content"]
                        if "toolUse" in block
                    ),
                    synthetic=metadata if metadata.get("synthetic") else None,
                )
            )
    return found


DRIVERS = (Hooks(), Attached())
