"""The drivers of the Pydantic AI adapter: a scripted `Model` in real agents, in every way in."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from pydantic import BaseModel
from pydantic_ai import Agent, Tool
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import ModelHTTPError, RetryModelRequest
from pydantic_ai.messages import (
    ModelMessagesTypeAdapter,
    ModelResponse,
    TextPart,
    ToolCallPart,
)
from pydantic_ai.models import Model, StreamedResponse
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults
from pydantic_ai.usage import RequestUsage

from budgetguard_core import AdapterError
from budgetguard_core.kit import TokenUsage
from budgetguard_core.testing import (
    MODEL,
    Driver,
    Message,
    ProviderError,
    Ran,
    Scenario,
    hang,
)
from budgetguard_pydantic_ai import BudgetCapability, outcome
from conformance.outcomes import ended_with


class Answer(BaseModel):
    """The structured output that no script ever gives."""

    text: str


class Rejected(Exception):
    """What the user's own check raises."""


class Retrying(AbstractCapability[Any]):
    """A user's capability that tries failed model calls again."""

    def __init__(self, retries: int) -> None:
        self.retries = retries

    async def on_model_request_error(self, ctx, *, request_context, error):
        if request_context.attempt > self.retries:
            raise error
        raise RetryModelRequest


class Swallowing(AbstractCapability[Any]):
    """A user's capability that hides whatever goes wrong."""

    async def wrap_model_request(self, ctx, *, request_context, handler):
        try:
            return await handler(request_context)
        except Exception:
            return ModelResponse([TextPart("Never mind.")])

    async def wrap_tool_execute(self, ctx, *, call, tool_def, args, handler):
        try:
            return await handler(args)
        except Exception:
            return "Never mind."


class Judging(AbstractCapability[Any]):
    """A user's capability that asks another agent before the run begins."""

    def __init__(self, ask) -> None:
        self.ask = ask

    async def before_run(self, ctx):
        if (answer := await self.ask()) != "yes":
            raise Rejected(answer)


class ScriptedModel(Model):
    """Answers from a script."""

    def __init__(self, script, name=MODEL) -> None:
        super().__init__()
        self.script = script
        self._model_name = name

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def system(self) -> str:
        return "test"

    async def reply(self, messages, settings, params):
        tools = [
            {"name": t.name, "description": t.description, "parameters": t.parameters_json_schema}
            for t in (*params.function_tools, *params.output_tools)
        ]
        sent = [strip(one) for one in ModelMessagesTypeAdapter.dump_python(messages, mode="json")]
        reply = self.script.next(
            json.dumps([tools, sent], ensure_ascii=False),
            request=history_of(messages),
            bound=(settings or {}).get("max_tokens"),
            model=self.model_name,
        )
        if isinstance(reply.error, ProviderError):
            raise ModelHTTPError(503, MODEL, str(reply.error)) from reply.error
        if reply.error is not None:
            raise reply.error
        return reply

    async def request(self, messages, model_settings, model_request_parameters):
        reply = await self.reply(messages, model_settings, model_request_parameters)
        if reply.hang:
            await hang()
        parts: list[Any] = [TextPart(reply.text)] if reply.text else []
        parts += [ToolCallPart(c.name, c.arguments, c.id) for c in reply.tool_calls]
        return ModelResponse(
            parts,
            usage=usage_of(reply),
            model_name=reply.model,
            finish_reason="length" if reply.cut else None,
        )

    @asynccontextmanager
    async def request_stream(
        self, messages, model_settings, model_request_parameters, run_context=None
    ):
        reply = await self.reply(messages, model_settings, model_request_parameters)
        yield ScriptedStream(model_request_parameters, _reply=reply)


@dataclass
class ScriptedStream(StreamedResponse):
    """Streams one answer."""

    _reply: Any = None
    _at: datetime = datetime(2026, 1, 1, tzinfo=UTC)

    async def _get_event_iterator(self):
        reply = self._reply
        if reply.hang:
            await hang()
        if reply.text:
            for event in self._parts_manager.handle_text_delta(
                vendor_part_id="t", content=reply.text
            ):
                yield event
        for location, call in enumerate(reply.tool_calls):
            yield self._parts_manager.handle_tool_call_part(
                vendor_part_id=location,
                tool_name=call.name,
                args=call.arguments,
                tool_call_id=call.id,
            )
        self._usage = usage_of(reply)
        if reply.cut:
            self.finish_reason = "length"

    @property
    def model_name(self):
        return self._reply.model

    @property
    def provider_name(self):
        return None

    @property
    def provider_url(self):
        return None

    @property
    def timestamp(self):
        return self._at


def usage_of(reply) -> RequestUsage:
    if reply.record is not None:
        return reply.record
    if reply.usage is None:
        return RequestUsage()
    return RequestUsage(
        input_tokens=reply.usage.input_tokens, output_tokens=reply.usage.output_tokens
    )


def strip(message: dict[str, Any]) -> dict[str, Any]:
    """Leave what a provider is sent of a message."""
    return {"kind": message["kind"], "parts": message["parts"]}


def history_of(messages) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        if message.kind == "response":
            marks = message.metadata or {}
            found.append(
                Message(
                    role="assistant",
                    text=message.text or "",
                    tool_calls=tuple((c.tool_call_id, c.tool_name) for c in message.tool_calls),
                    synthetic=marks if marks.get("synthetic") else None,
                )
            )
            continue
        words = []
        for part in message.parts:
            if part.part_kind == "tool-return":
                text = part.model_response_str(wrap_if_error=False)
                found.append(Message(role="tool", text=text, tool_call_id=part.tool_call_id))
            else:
                words.append(part.content if isinstance(part.content, str) else str(part.content))
        if words:
            found.append(Message(role="user", text="\n\n".join(words)))
    return found


class Left:
    """What to go on from."""

    def __init__(self, messages, waiting) -> None:
        self.messages = messages
        self.waiting = waiting


class Capability(Driver):
    """`agent.run(..., capabilities=[BudgetCapability(budget)])`."""

    adapter = "budgetguard_pydantic_ai"
    name = "BudgetCapability"
    lacks: ClassVar = {
        "dialogue": "a run ends with the first answer that asks for no tool",
        "own_limit": "its limits raise, and leave the run as an exception",
        "imported": "a capability is given to agents and runs; nothing holds for all of them",
        "equal_ids": "the framework itself ends a run in which two calls have the same id",
    }
    usage_records: ClassVar = (
        (
            RequestUsage(
                input_tokens=140, output_tokens=30, cache_read_tokens=100, cache_write_tokens=30
            ),
            TokenUsage(140, 30, cache_read_tokens=100, cache_write_tokens=30),
        ),
        (
            RequestUsage(input_tokens=100, output_tokens=30, details={"reasoning_tokens": 20}),
            TokenUsage(100, 30, reasoning_tokens=20),
        ),
        (
            RequestUsage(input_tokens=10, output_tokens=3, cache_read_tokens=60),
            TokenUsage(60, 3, cache_read_tokens=60),
        ),
    )

    def run_sync(self, scenario: Scenario) -> Ran:
        agent, said, options = self.opened(scenario)
        around = threading.enumerate()
        try:
            with asyncio.Runner() as runner:
                # The framework makes a loop where there is none, and leaves it open.
                asyncio.set_event_loop(runner.get_loop())
                result = agent.run_sync(said, **options)
        except Exception as error:
            return self.ran(scenario, error=error)
        finally:
            # The thread of the last tool holds its context until it ends.
            for thread in threading.enumerate():
                is_new = thread.name.startswith("AnyIO worker") and thread not in around
                if is_new and thread.ident:  # that of another run may not have started yet
                    thread.join(5)
        return self.ran(scenario, result)

    async def run_async(self, scenario: Scenario) -> Ran:
        agent, said, options = self.opened(scenario)
        chunks: list[Any] = []
        try:
            result = await self.act(scenario, agent, said, options, chunks)
        except Exception as error:
            return self.ran(scenario, error=error, chunks=chunks)
        return self.ran(scenario, result, chunks=chunks)

    async def act(self, scenario, agent, said, options, chunks):
        if scenario.mode != "streamed":
            return await agent.run(said, **options)
        async with agent.run_stream_events(said, **options) as events:
            async for event in events:
                chunks.append(event)
                if len(chunks) == scenario.break_after:
                    return None
        return chunks[-1].result

    def opened(self, scenario: Scenario):
        shared = scenario.shared
        if "agent" not in shared or scenario.location != "same object":
            shared["agent"] = self.agent(scenario, scenario.script, scenario.tools, top=True)
        options: dict[str, Any] = {}
        guard = scenario.guard
        shared["guard"] = guard
        if guard is not None:
            given = {"store": scenario.store, "on_trip": scenario.on_trip}
            given["conversation_id"] = scenario.conversation
            options["capabilities"] = [BudgetCapability(guard, **given)]
            if scenario.twice:
                options["capabilities"].append(BudgetCapability(guard))
        said = scenario.user_input
        if scenario.after is not None:
            left = scenario.after.session
            messages, waiting = left.messages, left.waiting
            if scenario.location == "new process":
                written = ModelMessagesTypeAdapter.dump_json(messages)
                messages = ModelMessagesTypeAdapter.validate_json(written)
            options["message_history"] = messages
            if scenario.answer is not None:
                said_yes = scenario.answer == "approve"
                results = DeferredToolResults(approvals=dict.fromkeys(waiting, said_yes))
                options["deferred_tool_results"] = results
        return shared["agent"], said, options

    def agent(self, scenario, script, tools, *, top=False, capabilities=()):
        own = list(capabilities)
        if top:
            if scenario.retries:
                own.append(Retrying(scenario.retries))
            if scenario.swallowing:
                own.append(Swallowing())
            if scenario.judge is not None:
                judge = scenario.judge
                own.append(Judging(lambda: self.ask(scenario, judge, "Is it fine?")))
        output: Any = Answer if top and scenario.structured else str
        if any(tool.approval for tool in tools):
            output = [output, DeferredToolRequests]
        return Agent(
            ScriptedModel(script),
            tools=[self.tool(scenario, tool) for tool in tools if not tool.reports],
            output_type=output,
            capabilities=own,
        )

    def tool(self, scenario, tool):
        is_own = tool.runs is not None and tool.runs.driver.adapter == self.adapter
        if scenario.mode == "sync" and tool.agent is None and not is_own:
            # The framework refuses a synchronous run of its own in a synchronous tool.

            def run(value: str = "") -> str:
                return scenario.call(tool, value)

        else:

            async def run(value: str = "") -> str:
                await asyncio.sleep(0)
                result = await scenario.acall(tool, value)
                return result if tool.agent is None else await self.ask(scenario, tool.agent, value)

        return Tool(
            run, name=tool.name, description=tool.description, requires_approval=tool.approval
        )

    async def ask(self, scenario, spec, value):
        """Run another agent, as the user's own code does, and read its answer."""
        own = [] if spec.budget is None else [BudgetCapability(spec.budget)]
        agent = self.agent(scenario, spec.script, spec.tools, capabilities=own)
        return scenario.read((await agent.run(value or "Go.")).output)

    def ran(self, scenario, result=None, *, error=None, chunks=()):
        found, messages, waiting = ended_with(error) if error else None, [], []
        if result is not None:
            messages = result.all_messages()
            with suppress(AdapterError):  # without a guard, or with one that is off
                found = outcome(result)
            output = result.output
            if isinstance(output, DeferredToolRequests):
                waiting = [one.tool_call_id for one in output.approvals]
        elif found is not None:
            messages = list(found.messages)
        elif scenario.guard is not None and scenario.break_after is not None:
            found = getattr(scenario.guard, "outcome", None)
        returned = None
        if scenario.stored:
            returned = history_of(messages) if error is None else None
            if found is not None and scenario.store is not None:
                kept = scenario.store.load(found.run_id)
                messages = ModelMessagesTypeAdapter.validate_python(kept.messages)
        return Ran(
            history=history_of(messages),
            returned=returned,
            outcome=found if scenario.shared.get("guard") is not None else None,
            typed=getattr(result, "output", None),
            raised=error,
            chunks=chunks,
            session=Left(messages, waiting),
        )


class Stream(Capability):
    """`agent.run_stream(...)`."""

    name = "run_stream"
    modes: ClassVar = ("streamed",)
    deviations: ClassVar = {
        22: "the stream begins with the last answer: whoever leaves it early has seen all calls",
        30: "the result of a run that ended before its first node holds no messages",
    }

    async def act(self, scenario, agent, said, options, chunks):
        async with agent.run_stream(said, **options) as result:
            async for chunk in result.stream_response(debounce_by=None):
                chunks.append(chunk)
                if len(chunks) == scenario.break_after:
                    return None
            result.output = await result.get_output()
        return result


class Nodes(Capability):
    """`agent.iter(...)`, with each node streamed by the user."""

    name = "iter, node.stream"
    modes: ClassVar = ("streamed",)

    async def act(self, scenario, agent, said, options, chunks):
        async with agent.iter(said, **options) as run:
            async for node in run:
                if Agent.is_model_request_node(node):
                    async with node.stream(run.ctx) as stream:
                        async for chunk in stream:
                            chunks.append(chunk)
                            if len(chunks) == scenario.break_after:
                                return None
        chunks.append(run.result)
        return run.result


DRIVERS = (Capability(), Stream(), Nodes())
