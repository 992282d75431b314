"""The ways into LangGraph and LangChain, with a scripted chat model in the real frameworks."""

from __future__ import annotations

import asyncio
import json
import uuid
import warnings
from contextlib import aclosing
from typing import Any, ClassVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import RetryPolicy
from pydantic import BaseModel

from budgetguard_core import BudgetExceeded, Guard
from budgetguard_core.testing import (
    MODEL,
    Driver,
    Message,
    ProviderError,
    Ran,
    hang,
    run_in_loop,
)
from budgetguard_langgraph import BudgetCallback, aresume, bounded, outcome, resume

FAILED = "The model failed."
# LangGraph's own limit was 25 super-steps up to 1.0; only `bounded` can raise it.
HIGH = {"recursion_limit": 1000}


class ScriptedChat(BaseChatModel):
    """A chat model that answers from a script; all of its ways in are code of their own."""

    script: Any
    model_name: str = MODEL

    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **_):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **_):
        return ChatResult(generations=[ChatGeneration(message=message_of(self._next(messages)))])

    async def _agenerate(self, messages, stop=None, run_manager=None, **_):
        reply = self._next(messages)
        if reply.hang:
            await hang()
        return ChatResult(generations=[ChatGeneration(message=message_of(reply))])

    def _stream(self, messages, stop=None, run_manager=None, **_):
        yield from chunks_of(self._next(messages))

    async def _astream(self, messages, stop=None, run_manager=None, **_):
        reply = self._next(messages)
        if reply.hang:
            await hang()
        for chunk in chunks_of(reply):
            yield chunk

    def _next(self, messages):
        sent = [
            [m.type, m.content, [[c["name"], c["args"]] for c in getattr(m, "tool_calls", ())]]
            for m in messages
        ]
        reply = self.script.next(json.dumps(sent, ensure_ascii=False))
        if reply.error is not None:
            raise reply.error
        return reply


def usage_metadata(usage):
    if usage is None:
        return None
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "input_token_details": {
            "cache_read": usage.cache_read_tokens,
            "cache_creation": usage.cache_write_tokens,
        },
        "output_token_details": {"reasoning": usage.reasoning_tokens},
    }


def message_of(reply):
    return AIMessage(
        reply.text,
        tool_calls=[{"name": c.name, "args": c.arguments, "id": c.id} for c in reply.tool_calls],
        usage_metadata=usage_metadata(reply.usage),
        response_metadata={"model_name": MODEL},
    )


def chunks_of(reply):
    head, tail = reply.text[:5], reply.text[5:]
    if head:
        yield ChatGenerationChunk(message=AIMessageChunk(head))
    yield ChatGenerationChunk(
        message=AIMessageChunk(
            tail,
            tool_call_chunks=[
                {"name": c.name, "args": json.dumps(c.arguments), "id": c.id, "index": n}
                for n, c in enumerate(reply.tool_calls)
            ],
            usage_metadata=usage_metadata(reply.usage),
            response_metadata={"model_name": MODEL},
        )
    )


def message(native):
    if isinstance(native, ToolMessage):
        return Message(role="tool", text=native.content, tool_call_id=native.tool_call_id)
    if isinstance(native, AIMessage):
        marked = native.response_metadata if native.response_metadata.get("synthetic") else None
        return Message(
            role="assistant",
            text=native.content,
            tool_calls=tuple((c["id"], c["name"]) for c in native.tool_calls),
            synthetic=marked,
        )
    role = "user" if isinstance(native, HumanMessage) else "system"
    return Message(role=role, text=native.content)


class Answer(BaseModel):
    """The structured answer."""

    answer: str


class LangGraphDriver(Driver):
    adapter = "budgetguard_langgraph"
    limits: ClassVar = {
        "test_threads_without_the_context_are_out_of_reach": (
            "calls in a raw thread pool, whose threads get no copy of the context, are not seen"
        ),
    }
    subagents = frozenset({"tool", "graph"})
    checkpointed = True

    def agent(self, scenario, script, tools, *, checkpointer=None, top=False):
        """Build an agent of the kind that this driver drives."""
        raise NotImplementedError

    def attach(self, scenario, graph, config):
        """Attach the adapter to a run; give the graph and the configuration to use."""
        raise NotImplementedError

    def tools(self, scenario, tools):
        return [self.tool(scenario, tool) for tool in tools]

    def tool(self, scenario, tool):
        def run(value: str = "") -> str:
            result = scenario.start(tool, value)
            if tool.agent is None:
                return result
            return self.worker(scenario, tool.agent).invoke(user(value))["messages"][-1].content

        async def arun(value: str = "") -> str:
            result = scenario.start(tool, value)
            if tool.hang:
                await hang()
            if tool.agent is None:
                return result
            done = await self.worker(scenario, tool.agent).ainvoke(user(value))
            return done["messages"][-1].content

        # Most tools are sync, also in async graphs: there they run in a thread.
        coroutine = arun if tool.hang or tool.agent is not None else None
        return StructuredTool.from_function(
            run, coroutine=coroutine, name=tool.name, description="A tool."
        )

    def worker(self, scenario, agent):
        graph = self.agent(scenario, agent.script, self.tools(scenario, agent.tools))
        return graph if agent.budget is None else bounded(graph, agent.budget)

    def graph(self, scenario):
        shared = scenario.shared
        if "graph" not in shared:
            saver = InMemorySaver() if self.checkpointed else None
            tools = self.tools(scenario, scenario.tools)
            if scenario.graph is None:
                shared["graph"] = self.agent(
                    scenario, scenario.script, tools, checkpointer=saver, top=True
                )
            else:
                parent = StateGraph(MessagesState)
                parent.add_node("worker", self.worker(scenario, scenario.graph))
                parent.add_node("main", self.agent(scenario, scenario.script, tools, top=True))
                parent.add_edge(START, "worker")
                parent.add_edge("worker", "main")
                shared["graph"] = parent.compile(checkpointer=saver)
            shared["tools"] = tools
        return shared["graph"]

    def run(self, scenario):
        graph = self.graph(scenario)
        config = {"configurable": {"thread_id": uuid.uuid4().hex}}
        if scenario.after is not None and self.checkpointed:
            config = scenario.after.session
        if scenario.mode == "sync":
            return self.report(scenario, graph, config, *self.invoke(scenario, graph, config))
        done, leaked = run_in_loop(self.ainvoke(scenario, graph, config))
        ran = self.report(scenario, graph, config, *done)
        ran.leaked = leaked
        return ran

    def given(self, scenario):
        """The input of the run; None to go on."""
        if scenario.user_input is None:
            return None
        return user(scenario.user_input)

    def invoke(self, scenario, graph, config):
        graph, config = self.attach(scenario, graph, config)
        given = self.given(scenario)
        try:
            if given is None and self.checkpointed:
                return resume(graph, config, scenario.guard), (), None
            return graph.invoke(given, config), (), None
        except Exception as error:
            return None, (), error

    async def ainvoke(self, scenario, graph, config):
        graph, config = self.attach(scenario, graph, config)
        given = self.given(scenario)
        chunks = []
        result = None
        try:
            if given is None and self.checkpointed:
                return await aresume(graph, config, scenario.guard), (), None
            if scenario.mode == "async":
                return await graph.ainvoke(given, config), (), None
            modes = ["messages", "updates", "values"]
            async with aclosing(graph.astream(given, config, stream_mode=modes)) as stream:
                async for mode, chunk in stream:
                    chunks.append((mode, chunk))
                    if mode == "values":
                        result = chunk
                    if len(chunks) == scenario.break_after:
                        break
        except Exception as error:
            return result, chunks, error
        return result, chunks, None

    def next_turn(self, graph, config):
        """What another turn on the thread begins with; its own two messages left out."""
        guard = Guard()
        guard.abort()
        return bounded(graph, guard).invoke(user("And now?"), config)["messages"][:-2]

    def report(self, scenario, graph, config, result, chunks, error):
        native = (result or {}).get("messages", [])
        failed = error is not None and not isinstance(error, BudgetExceeded)
        if self.checkpointed and scenario.guard is not None:
            native = graph.get_state(config).values.get("messages", [])
            if failed:
                native = self.next_turn(graph, config)
        elif failed:
            # The graph raised and gave back nothing: the caller has what it had before.
            native = []
        guard = scenario.guard
        ended = outcome(result)
        if ended is None and isinstance(guard, Guard):
            ended = guard.outcome
        if isinstance(error, BudgetExceeded):
            ended = error.outcome
        if error is not None and not isinstance(error, BudgetExceeded):
            ended = None
        if scenario.break_after is not None:
            ended = None
        return Ran(
            history=[message(one) for one in native],
            outcome=ended if guard is not None else None,
            raised=error,
            chunks=chunks,
            session=config,
        )


def user(text):
    return {"messages": [HumanMessage(text)]}


def swallow(call):
    """Report any exception as an answer, after one more try."""
    for _ in range(2):
        try:
            return call()
        except Exception:
            continue
    return AIMessage(FAILED)


async def aswallow(call):
    for _ in range(2):
        try:
            return await call()
        except Exception:
            continue
    return AIMessage(FAILED)


def state_graph(scenario, script, tools, *, checkpointer=None, top=False):
    """A graph as people build it by hand: one model node, one ToolNode for all calls."""
    model = ScriptedChat(script=script)
    swallowing = scenario.swallowing and top

    def node(state):
        call = lambda: model.invoke(state["messages"])  # noqa: E731
        return {"messages": [swallow(call) if swallowing else call()]}

    async def anode(state):
        call = lambda: model.ainvoke(state["messages"])  # noqa: E731
        return {"messages": [await (aswallow(call) if swallowing else call())]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", RunnableLambda(node, anode), retry_policy=retry_policy(scenario))
    handling = {"handle_tool_errors": True} if swallowing else {}
    graph.add_node("tools", ToolNode(tools, **handling))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition, ["tools", END])
    graph.add_edge("tools", "agent")
    return graph.compile(checkpointer=checkpointer)


def retry_policy(scenario):
    if not scenario.retries:
        return None
    return RetryPolicy(
        max_attempts=scenario.retries + 1,
        initial_interval=0.001,
        jitter=False,
        retry_on=ProviderError,
    )


class CallbackDriver(LangGraphDriver):
    """The callback on a hand-built graph without a checkpointer: the caller keeps the messages."""

    name = "BudgetCallback"
    checkpointed = False
    deviations: ClassVar = {
        (6, "async"): "a callback cannot cancel a call that hangs; `bounded` does",
        (6, "streamed"): "a callback cannot cancel a call that hangs; `bounded` does",
        (7, "async"): "a callback cannot cancel a call that hangs; `bounded` does",
        (7, "streamed"): "a callback cannot cancel a call that hangs; `bounded` does",
        (12, "async"): "a callback cannot cancel a call that hangs; `bounded` does",
        (12, "streamed"): "a callback cannot cancel a call that hangs; `bounded` does",
        22: "a callback cannot write to the stream: the closed history is in the outcome",
    }

    def agent(self, scenario, script, tools, **options):
        return state_graph(scenario, script, tools, **options)

    def given(self, scenario):
        before = list(scenario.after.session) if scenario.after is not None else []
        if scenario.user_input is None:
            return {"messages": before[:-1]}
        return {"messages": [*before, HumanMessage(scenario.user_input)]}

    async def ainvoke(self, scenario, graph, config):
        # Where it cannot end a hung call, it is not to take the suite's whole patience.
        async with asyncio.timeout(3):
            return await super().ainvoke(scenario, graph, config)

    def attach(self, scenario, graph, config):
        if scenario.guard is None:
            return graph, {}
        callbacks = [
            BudgetCallback(scenario.guard, on_trip=scenario.on_trip, store=scenario.store)
            for _ in range(2 if scenario.twice else 1)
        ]
        scenario.shared["callback"] = callbacks[0]
        return graph, {**HIGH, "callbacks": callbacks}

    def report(self, scenario, graph, config, result, chunks, error):
        ran = super().report(scenario, graph, config, result, chunks, error)
        if ran.outcome is not None:
            ran.history = [message(one) for one in ran.outcome.messages]
            ran.session = ran.outcome.messages
        return ran


class BoundedDriver(LangGraphDriver):
    """`bounded` on an agent of LangChain's `create_agent`."""

    name = "bounded"

    def agent(self, scenario, script, tools, *, checkpointer=None, top=False):
        return create_agent_graph(scenario, script, tools, checkpointer=checkpointer, top=top)

    def attach(self, scenario, graph, config):
        if scenario.guard is None:
            return graph, config
        if scenario.twice:
            config = {**config, "callbacks": [BudgetCallback(scenario.guard)]}
        return bounded(
            graph, scenario.guard, on_trip=scenario.on_trip, store=scenario.store
        ), config


class BoundedReactDriver(BoundedDriver):
    """`bounded` on LangGraph's older prebuilt agent."""

    name = "bounded (create_react_agent)"

    def agent(self, scenario, script, tools, *, checkpointer=None, top=False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = create_react_agent(
                ScriptedChat(script=script),
                ToolNode(tools, handle_tool_errors=True) if scenario.swallowing else tools,
                checkpointer=checkpointer,
                response_format=Answer if scenario.structured and top else None,
            )
        policy = retry_policy(scenario)
        if policy is not None:
            graph.retry_policy = (policy,)
        return graph


def create_agent_graph(scenario, script, tools, *, checkpointer=None, top=False, inner=()):
    from langchain.agents import create_agent
    from langchain.agents.middleware import AgentMiddleware
    from langchain.agents.structured_output import ToolStrategy

    class Retrying(AgentMiddleware):
        """As `ModelRetryMiddleware`, which LangChain has since 1.1."""

        def wrap_model_call(self, request, handler):
            for _ in range(scenario.retries):
                try:
                    return handler(request)
                except ProviderError:
                    continue
            return handler(request)

        async def awrap_model_call(self, request, handler):
            for _ in range(scenario.retries):
                try:
                    return await handler(request)
                except ProviderError:
                    continue
            return await handler(request)

    class Swallowing(AgentMiddleware):
        def wrap_model_call(self, request, handler):
            return swallow(lambda: handler(request))

        async def awrap_model_call(self, request, handler):
            return await aswallow(lambda: handler(request))

        def wrap_tool_call(self, request, handler):
            try:
                return handler(request)
            except Exception:
                return ToolMessage("The tool failed.", tool_call_id=request.tool_call["id"])

        async def awrap_tool_call(self, request, handler):
            try:
                return await handler(request)
            except Exception:
                return ToolMessage("The tool failed.", tool_call_id=request.tool_call["id"])

    outer = []
    if scenario.swallowing and top:
        outer.append(Swallowing())
    if scenario.retries:
        outer.append(Retrying())
    return create_agent(
        ScriptedChat(script=script),
        tools,
        middleware=[*outer, *inner],
        response_format=ToolStrategy(Answer) if scenario.structured and top else None,
        checkpointer=checkpointer,
    )


class MiddlewareDriver(LangGraphDriver):
    """The middleware of `create_agent`; sub-agents in its tools have none of their own."""

    name = "BudgetMiddleware"
    subagents = frozenset({"tool"})
    checkpointed = False
    deviations: ClassVar = {
        (1, "streamed"): "the steps that begin and end the middleware's run are in the stream",
    }

    def agent(self, scenario, script, tools, *, checkpointer=None, top=False):
        from budgetguard_langgraph import BudgetMiddleware

        inner = []
        if top and scenario.guard is not None:
            budget = None if "active" in scenario.shared else scenario.guard
            inner = [BudgetMiddleware(budget, on_trip=scenario.on_trip, store=scenario.store)]
        return create_agent_graph(scenario, script, tools, top=top, inner=inner)

    def worker(self, scenario, agent):
        from budgetguard_langgraph import BudgetMiddleware

        tools = self.tools(scenario, agent.tools)
        inner = [] if agent.budget is None else [BudgetMiddleware(agent.budget)]
        return create_agent_graph(scenario, agent.script, tools, inner=inner)

    def given(self, scenario):
        before = list(scenario.after.session) if scenario.after is not None else []
        if scenario.user_input is None:
            return {"messages": before[:-1]}
        return {"messages": [*before, HumanMessage(scenario.user_input)]}

    def run(self, scenario):
        if not isinstance(scenario.guard, Guard) or scenario.store is not None:
            return super().run(scenario)
        # The agent may be one that several guards share: it takes the guard that is active.
        scenario.shared["active"] = True
        with scenario.guard.activate():
            return super().run(scenario)

    def attach(self, scenario, graph, config):
        if scenario.twice:
            return graph, {**HIGH, "callbacks": [BudgetCallback(scenario.guard)]}
        return graph, HIGH

    def report(self, scenario, graph, config, result, chunks, error):
        ran = super().report(scenario, graph, config, result, chunks, error)
        ran.session = (result or {}).get("messages", [])
        return ran


DRIVERS = (CallbackDriver(), BoundedDriver(), BoundedReactDriver(), MiddlewareDriver())
