"""The driver of the toy adapter: how an author has the suite act on an adapter."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import ClassVar

from budgetguard_core import Budget
from budgetguard_core.kit import TokenUsage, outcome_of
from budgetguard_core.testing import Driver, Message, Ran, Scenario, hang
from conformance.outcomes import ended_with
from conformance.toy_adapter import Bounded, report_progress
from conformance.toy_framework import Agent, Conversation, Middleware, Reply, Tool


class Rejected(Exception):
    """What the user's own check raises."""


class Swallowing(Middleware):
    """A user's middleware that hides whatever goes wrong."""

    async def model(self, request, proceed):
        try:
            return await proceed(request)
        except Exception:
            return Reply({"role": "assistant", "text": "Never mind."})

    async def tool(self, call, proceed):
        try:
            return await proceed(call)
        except Exception:
            return "Never mind."


class Toy(Driver):
    """`Bounded(agent, budget)`."""

    adapter = "toy_adapter"
    name = "Bounded"
    lacks: ClassVar = {
        "at_last": "the toy ends a run without its model",
        "fallback": "the toy's requests name no model",
        "dialogue": "a run ends with the first reply without a call",
        "own_limit": "the toy has no limit of its own",
        "imported": "the toy has no place that holds for every agent: agents are wrapped",
        "structured": "the toy has no structured output",
    }
    usage_records: ClassVar = (
        (
            {"input_tokens": 100, "output_tokens": 30, "cache_read_input_tokens": 0},
            TokenUsage(100, 30),
        ),
        (
            {"prompt_tokens": 100, "completion_tokens": 0, "total_tokens": 150},
            TokenUsage(100, 50),
        ),
    )

    def run_sync(self, scenario: Scenario) -> Ran:
        conversation, agent, options = self.opened(scenario)
        try:
            agent.run(conversation, scenario.user_input, **options)
        except Exception as error:
            return self.ran(scenario, conversation, error)
        return self.ran(scenario, conversation)

    async def run_async(self, scenario: Scenario) -> Ran:
        conversation, agent, options = self.opened(scenario)
        chunks = []
        try:
            if scenario.mode == "async":
                await agent.run_async(conversation, scenario.user_input, **options)
                return self.ran(scenario, conversation)
            stream = agent.stream(conversation, scenario.user_input, **options)
            try:
                async for chunk in stream:
                    chunks.append(chunk)
                    if len(chunks) == scenario.break_after:
                        break
            finally:
                await stream.aclose()
        except Exception as error:
            return self.ran(scenario, conversation, error)
        return self.ran(scenario, conversation, chunks=chunks)

    def opened(self, scenario):
        """Make what is called: the conversation, the agent, and how it is called."""
        conversation = Conversation()
        if scenario.after is not None:
            conversation = scenario.after.session
            if scenario.location == "new process":
                conversation = Conversation(**json.loads(json.dumps(asdict(conversation))))
        shared = scenario.shared
        if "agent" not in shared or scenario.location != "same object":
            shared["agent"] = self.agent(scenario, scenario.script, scenario.tools, top=True)
        agent = shared["agent"]
        if scenario.guard is not None:
            options = {"store": scenario.store, "on_trip": scenario.on_trip}
            options["conversation_id"] = scenario.conversation
            agent = Bounded(agent, scenario.guard, **options)
            if scenario.twice:
                agent = Bounded(agent, scenario.guard)
        options = {}
        if scenario.answer is not None:
            options["answer"] = scenario.answer == "approve"
        return conversation, agent, options

    def agent(self, scenario, script, tools, *, top=False):
        return Agent(
            model(script),
            [self.tool(scenario, tool) for tool in tools],
            middleware=[Swallowing()] if top and scenario.swallowing else [],
            retries=scenario.retries if top else 0,
            check=self.check(scenario) if top and scenario.judge is not None else None,
        )

    def tool(self, scenario, tool):
        if tool.reports:
            return report_progress

        def run(value):
            return scenario.call(tool, value)

        async def run_async(value):
            result = await scenario.acall(tool, value)
            return result if tool.agent is None else await self.ask(scenario, tool.agent, value)

        is_sync = scenario.mode == "sync" and tool.agent is None
        function = run if is_sync else run_async
        return Tool(tool.name, function, tool.description, tool.approval)

    def check(self, scenario):
        async def check(_):
            if (answer := await self.ask(scenario, scenario.judge, "Is it fine?")) != "yes":
                raise Rejected(answer)

        return check

    async def ask(self, scenario, spec, value):
        """Run another agent, as the user's own code does, and read its answer."""
        agent = self.agent(scenario, spec.script, spec.tools)
        if scenario.guard is not None:
            agent = Bounded(agent, spec.budget or Budget())
        return scenario.read(await agent.run_async(Conversation(), value or "Go."))

    def ran(self, scenario, conversation, error=None, chunks=()):
        history = [message(one) for one in conversation.messages]
        if error is None:
            outcome = outcome_of(
                conversation,
                messages=conversation.messages,
                final=conversation.messages[-1].get("text"),
            )
        else:
            outcome = ended_with(error)
        return Ran(
            history=history,
            returned=history if scenario.stored and error is None else None,
            outcome=outcome,
            raised=error,
            chunks=chunks,
            session=conversation,
        )


def model(script):
    """A scripted model of the toy framework."""

    async def ask(request):
        told = json.dumps([request.messages, request.tools], ensure_ascii=False)
        user_input = [message(one) for one in request.messages]
        reply = script.next(told, request=user_input, bound=request.max_tokens)
        if reply.hang:
            await hang()
        if reply.error is not None:
            raise reply.error
        answer = {"role": "assistant", "text": reply.text}
        if reply.tool_calls:
            answer["calls"] = [
                {"id": call.id, "name": call.name, "value": call.value} for call in reply.tool_calls
            ]
        usage = reply.usage if reply.record is None else reply.record
        return Reply(answer, usage, "length" if reply.cut else "stop")

    return ask


def message(native):
    return Message(
        role=native["role"],
        text=native["text"],
        tool_calls=tuple((call["id"], call["name"]) for call in native.get("calls", ())),
        tool_call_id=native.get("id"),
        synthetic=native.get("meta"),
    )
