"""The Strands adapter's drivers: a scripted `Model` in real agents, swarms and graphs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel
from strands import Agent, ModelRetryStrategy, tool
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeInvocationEvent,
    HookRegistry,
)
from strands.models import Model
from strands.multiagent import GraphBuilder, Swarm
from strands.types.content import Message as StrandsMessage
from strands.types.exceptions import ModelThrottledException

from budgetguard_core import BudgetExceeded
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
    run_in_loop,
)
from budgetguard_core.testing import Agent as SubAgent
from budgetguard_core.testing import Tool as ScriptedTool
from budgetguard_strands import BudgetHookProvider

# Older releases hand a message's metadata to the model as well, whose formatters leave it out.
STRIPS_METADATA = "metadata" in StrandsMessage.__annotations__


class ScriptedModel(Model):
    """Answers from a script, in the chunks of a real provider's stream."""

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
        reply = self.script.next(json.dumps([system_prompt, tool_specs, sent], default=str))
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
        (call.id, call.name, {ask_as.get(call.name, "value"): call.value})
        for call in reply.tool_calls
    ]
    if reply.handoff is not None:
        arguments = {"agent_name": reply.handoff, "message": "Please go on."}
        uses.append((f"handoff_{id(reply):x}", "handoff_to_agent", arguments))
    for id_, name, arguments in uses:
        yield {"contentBlockStart": {"start": {"toolUse": {"name": name, "toolUseId": id_}}}}
        yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(arguments)}}}}
        yield {"contentBlockStop": {}}
    yield {"messageStop": {"stopReason": "tool_use" if uses else "end_turn"}}
    if reply.usage is not None:
        yield {
            "metadata": {
                "usage": {
                    "inputTokens": reply.usage.input_tokens,
                    "outputTokens": reply.usage.output_tokens,
                    "totalTokens": reply.usage.total_tokens,
                },
                "metrics": {"latencyMs": 1},
            }
        }


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


class StrandsDriver(Driver):
    adapter = "budgetguard_strands"
    deviations: ClassVar = {}

    def agent(self, scenario: Scenario, hooks: list[Any]) -> Agent:
        tools, ask_as = self.tools(scenario, scenario.tools)
        return Agent(
            name="main",
            model=ScriptedModel(scenario.script, ask_as=ask_as),
            tools=tools,
            hooks=hooks + ([Swallowing()] if scenario.swallowing else []),
            structured_output_model=Answer if scenario.structured else None,
            retry_strategy=ModelRetryStrategy(max_attempts=scenario.retries + 1, initial_delay=0),
            callback_handler=None,
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
        }
        return list(made.values()), {
            spec.name: next(iter(made[spec.name].tool_spec["inputSchema"]["json"]["properties"]))
            for spec in specs
        }

    def scripted_tool(self, scenario: Scenario, spec: ScriptedTool) -> Any:
        if spec.hang:

            async def run(value: str = "") -> str:
                scenario.start(spec, value)
                await hang()

        elif scenario.mode == "async":

            async def run(value: str = "") -> str:
                await asyncio.sleep(0)
                return scenario.start(spec, value)

        else:

            def run(value: str = "") -> str:
                return scenario.start(spec, value)

        return tool(name=spec.name, description=f"Does {spec.name}.")(run)

    def agent_tool(self, scenario: Scenario, spec: ScriptedTool, sub_agent: SubAgent) -> Any:
        """An agent made inside a tool, which is given the provider."""
        provider = scenario.shared.get("provider")

        async def ask(value: str = "") -> str:
            scenario.start(spec, value)
            child = self.sub_agent(scenario, sub_agent, [])
            if provider is not None and sub_agent.budget is None:
                provider.attach(child)
            return str(await child.invoke_async(value))

        return tool(name=spec.name, description=f"Asks {sub_agent.name}.")(ask)

    def provider(self, scenario: Scenario) -> BudgetHookProvider | None:
        if scenario.guard is None:
            return None
        return BudgetHookProvider(scenario.guard, on_trip=scenario.on_trip, store=scenario.store)

    def act(self, scenario: Scenario, runner: Any, **options: Any) -> tuple[Any, list[Any], Any]:
        """Call an agent or orchestrator: its result, the chunks, and the tasks left behind."""
        if scenario.mode == "sync":
            return runner(scenario.user_input, **options), [], ()
        chunks: list[Any] = []

        async def run() -> Any:
            if scenario.mode == "async":
                return await runner.invoke_async(scenario.user_input, **options)
            stream = runner.stream_async(scenario.user_input, **options)
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == scenario.break_after:
                    await stream.aclose()
                    return None
            return chunks[-1]["result"]

        result, leaked = run_in_loop(run())
        return result, chunks, leaked

    def ran(
        self,
        scenario: Scenario,
        runner: Any,
        agent: Callable[[], Agent],
        provider: BudgetHookProvider | None,
        **options: Any,
    ) -> Ran:
        chunks: list[Any] = []
        leaked: Any = ()
        raised: Exception | None = None
        try:
            _, chunks, leaked = self.act(scenario, runner, **options)
        except Exception as error:
            raised = error
        outcome = raised.outcome if isinstance(raised, BudgetExceeded) else None
        if raised is None and provider is not None:
            outcome = provider.outcome(runner)
        return Ran(
            history=history_of(agent().messages),
            outcome=outcome,
            raised=raised,
            chunks=chunks,
            leaked=leaked,
            session=runner,
        )

    def again(self, scenario: Scenario) -> Ran:
        """Run the same agent under another budget."""
        agent, provider = scenario.shared["agent"], scenario.shared["provider"]
        # Strands refuses a second run while one is on the way, so its callers queue.
        with scenario.shared["turn"]:
            return self.ran(
                scenario,
                agent,
                lambda: agent,
                provider,
                invocation_state={"budgetguard": scenario.guard},
            )


class Hooks(StrandsDriver):
    """`Agent(hooks=[BudgetHookProvider(budget)])`, with agents as tools."""

    name = "BudgetHookProvider"

    def run(self, scenario: Scenario) -> Ran:
        if "agent" in scenario.shared:
            return self.again(scenario)
        provider = self.provider(scenario)
        hooks = [] if provider is None else [provider]
        if scenario.twice:
            hooks.append(self.provider(scenario))
        scenario.shared.update(provider=provider, turn=threading.Lock())
        agent = scenario.shared["agent"] = self.agent(scenario, hooks)
        return self.ran(scenario, agent, lambda: agent, provider)

    def agent_tool(self, scenario: Scenario, spec: ScriptedTool, sub_agent: SubAgent) -> Any:
        if not hasattr(Agent, "as_tool"):  # the oldest releases
            return super().agent_tool(scenario, spec, sub_agent)
        child = self.sub_agent(scenario, sub_agent, [])
        child.hooks.add_callback(BeforeInvocationEvent, lambda event: scenario.start(spec) and None)
        return child.as_tool(name=spec.name)


class Attached(StrandsDriver):
    """`provider.attach(...)`: agents, swarms, graphs, and agents made inside a tool."""

    name = "attach"
    subagents: ClassVar = frozenset({"tool", "handoff", "graph"})

    def run(self, scenario: Scenario) -> Ran:
        if "agent" in scenario.shared:
            return self.again(scenario)
        provider = self.provider(scenario)
        scenario.shared.update(provider=provider, turn=threading.Lock())
        agent = scenario.shared["agent"] = self.agent(scenario, [])
        runner: Any = agent
        last = agent
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
        if provider is not None:
            provider.attach(runner)
            if scenario.twice:
                self.provider(scenario).attach(runner)
        return self.ran(scenario, runner, lambda: last, provider)


def history_of(messages: Any) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        metadata = message.get("metadata") or {}
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
