"""The ways into LangGraph and LangChain, with a scripted chat model in the real frameworks."""

from __future__ import annotations

import copy
import itertools
import json
import uuid
from contextlib import aclosing, nullcontext
from typing import Any, ClassVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import StructuredTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Command, RetryPolicy, interrupt
from pydantic import BaseModel

from budgetguard_core import AdapterError, BudgetExceeded, Guard
from budgetguard_core.kit import TokenUsage
from budgetguard_core.testing import (
    MODEL,
    Driver,
    Message,
    ProviderError,
    Ran,
    hang,
)
from budgetguard_langgraph import (
    BudgetCallback,
    aresume,
    bounded,
    outcome,
    report_progress,
    resume,
)
from conformance.outcomes import ended_with

FAILED = "The model failed."
REFUSED = "The person said no."


def options_of(scenario):
    return {
        "on_trip": scenario.on_trip,
        "store": scenario.store,
        "conversation_id": scenario.conversation,
    }


class ScriptedChat(BaseChatModel):
    """A chat model that answers from a script; all of its ways in are code of their own."""

    script: Any
    model_name: str = MODEL

    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **settings):
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **settings)

    def _generate(self, messages, stop=None, run_manager=None, max_tokens=None, model=None, **sent):
        reply = self._next(messages, sent, max_tokens, model)
        return ChatResult(generations=[ChatGeneration(message=message_of(reply))])

    async def _agenerate(
        self, messages, stop=None, run_manager=None, max_tokens=None, model=None, **sent
    ):
        reply = self._next(messages, sent, max_tokens, model)
        if reply.hang:
            await hang()
        return ChatResult(generations=[ChatGeneration(message=message_of(reply))])

    def _stream(self, messages, stop=None, run_manager=None, max_tokens=None, model=None, **sent):
        yield from chunks_of(self._next(messages, sent, max_tokens, model))

    async def _astream(
        self, messages, stop=None, run_manager=None, max_tokens=None, model=None, **sent
    ):
        reply = self._next(messages, sent, max_tokens, model)
        if reply.hang:
            await hang()
        for chunk in chunks_of(reply):
            yield chunk

    def _next(self, messages, sent=(), bound=None, model=None):
        said = [
            [m.type, m.content, [[c["name"], c["args"]] for c in getattr(m, "tool_calls", ())]]
            for m in messages
        ]
        reply = self.script.next(
            json.dumps([said, dict(sent).get("tools")], ensure_ascii=False),
            request=[message(one) for one in messages],
            bound=bound,
            model=model or self.model_name,
        )
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


def facts_of(reply):
    """What a message says besides its text and calls."""
    metadata = {"model_name": reply.model, **({"finish_reason": "length"} if reply.cut else {})}
    record = reply.record
    if record is not None:
        return {"usage_metadata": record, "response_metadata": metadata}
    return {"usage_metadata": usage_metadata(reply.usage), "response_metadata": metadata}


def message_of(reply):
    return AIMessage(
        reply.text,
        tool_calls=[{"name": c.name, "args": c.arguments, "id": c.id} for c in reply.tool_calls],
        **facts_of(reply),
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
            **facts_of(reply),
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


class Rejected(Exception):
    """What the user's own check raises."""


# What LangChain's integrations make of OpenAI's, Anthropic's and Gemini's records.
USAGE_RECORDS = (
    (
        {
            "input_tokens": 100,
            "output_tokens": 30,
            "total_tokens": 130,
            "input_token_details": {"cache_read": 60, "cache_creation": 30},
            "output_token_details": {"reasoning": 10},
        },
        TokenUsage(100, 30, cache_read_tokens=60, cache_write_tokens=30, reasoning_tokens=10),
    ),
    (
        {
            "input_tokens": 100,
            "output_tokens": 30,
            "total_tokens": 130,
            "input_token_details": {
                "cache_read": 60,
                "cache_creation": 0,
                "ephemeral_5m_input_tokens": 20,
                "ephemeral_1h_input_tokens": 10,
            },
        },
        TokenUsage(100, 30, cache_read_tokens=60, cache_write_tokens=30, cache_write_1h_tokens=10),
    ),
    (
        {
            "input_tokens": 100,
            "output_tokens": 30,
            "total_tokens": 130,
            "input_token_details": {"priority_cache_read": 60},
            "output_token_details": {"priority_reasoning": 10},
        },
        TokenUsage(100, 30, cache_read_tokens=60, reasoning_tokens=10),
    ),
    # The total knows of more than the answer says.
    ({"input_tokens": 100, "output_tokens": 0, "total_tokens": 150}, TokenUsage(100, 50)),
    (
        {
            "input_tokens": 100,
            "output_tokens": 10,
            "total_tokens": 150,
            "output_token_details": {"reasoning": 40},
        },
        TokenUsage(100, 50, reasoning_tokens=40),
    ),
)


class LangGraphDriver(Driver):
    adapter = "budgetguard_langgraph"
    subagents = frozenset({"tool", "graph"})
    usage_records: ClassVar = USAGE_RECORDS
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
        if tool.reports:
            return report_progress

        def run(value: str = "") -> str:
            result = scenario.call(tool, value)
            if tool.agent is None:
                return result
            done = self.worker(scenario, tool.agent).invoke(user(value))
            return scenario.read(done["messages"][-1].content)

        async def arun(value: str = "") -> str:
            result = await scenario.acall(tool, value)
            if tool.agent is None:
                return result
            done = await self.worker(scenario, tool.agent).ainvoke(user(value))
            return scenario.read(done["messages"][-1].content)

        # Most tools are sync, also in async graphs: there they run in a thread.
        is_async = tool.hang or tool.agent is not None or tool.runs is not None
        return StructuredTool.from_function(
            run,
            coroutine=arun if is_async and scenario.mode != "sync" else None,
            name=tool.name,
            description=tool.description,
        )

    def worker(self, scenario, agent):
        graph = self.agent(scenario, agent.script, self.tools(scenario, agent.tools))
        return graph if agent.budget is None else bounded(graph, agent.budget)

    def graph(self, scenario):
        shared = scenario.shared
        if scenario.location != "same object":
            shared.pop("graph", None)
        if scenario.location == "new process":
            shared["saver"] = reopened(shared["saver"])
        if "graph" not in shared:
            keeps = scenario.stored or any(tool.approval for tool in scenario.tools)
            if "saver" not in shared:
                shared["saver"] = InMemorySaver() if self.checkpointed or keeps else None
            shared["graph"] = self.build(scenario, shared["saver"])
        return shared["graph"]

    def build(self, scenario, saver):
        tools = self.tools(scenario, scenario.tools)
        if scenario.graph is None and scenario.dialogue is None and scenario.judge is None:
            return self.agent(scenario, scenario.script, tools, checkpointer=saver, top=True)
        parent = StateGraph(MessagesState)
        parent.add_node("main", self.agent(scenario, scenario.script, tools, top=True))
        if scenario.judge is not None:
            parent.add_conditional_edges(START, self.condition(scenario), ["main"])
        elif scenario.graph is not None:
            parent.add_node("worker", self.worker(scenario, scenario.graph))
            parent.add_edge(START, "worker")
            parent.add_edge("worker", "main")
        else:
            parent.add_edge(START, "main")
        if scenario.dialogue is not None:
            parent.add_node("other", self.worker(scenario, scenario.dialogue))
            parent.add_node("to other", said_to)
            parent.add_node("to main", said_to)
            for one, next_ in itertools.pairwise(["main", "to other", "other", "to main", "main"]):
                parent.add_edge(one, next_)
        return parent.compile(checkpointer=saver)

    def condition(self, scenario):
        """An edge that asks an agent which way to go."""

        def go(answer):
            if scenario.read(answer) != "yes":
                raise Rejected(answer)
            return "main"

        def ask(_):
            done = self.worker(scenario, scenario.judge).invoke(user("Is it fine?"))
            return go(done["messages"][-1].content)

        async def aask(_):
            done = await self.worker(scenario, scenario.judge).ainvoke(user("Is it fine?"))
            return go(done["messages"][-1].content)

        return RunnableLambda(ask, aask)

    def run_sync(self, scenario):
        graph, config = self.opened(scenario)
        return self.report(scenario, graph, config, *self.invoke(scenario, graph, config))

    async def run_async(self, scenario):
        graph, config = self.opened(scenario)
        done = await self.ainvoke(scenario, graph, config)
        return self.report(scenario, graph, config, *done)

    def opened(self, scenario):
        graph = self.graph(scenario)
        if scenario.after is not None and self.is_checkpointed(scenario):
            return graph, scenario.after.session
        return graph, {"configurable": {"thread_id": uuid.uuid4().hex}}

    def is_checkpointed(self, scenario):
        return scenario.shared["saver"] is not None

    def given(self, scenario):
        """The input of the run; None to go on."""
        said = scenario.user_input
        if scenario.answer is not None:
            return Command(resume=self.answer(scenario.answer))
        return None if said is None else user(said)

    def answer(self, answer):
        """What the person says, in the form that the graph waits for."""
        return answer

    def invoke(self, scenario, graph, config):
        graph, config = self.attach(scenario, graph, config)
        given = self.given(scenario)
        try:
            if given is None:
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
            if given is None:
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

    def outcome_of(self, result):
        """What the adapter says of a result; None where it says that it knows of no run."""
        try:
            return outcome(result)
        except AdapterError:
            return None

    def next_turn(self, graph, config):
        """What another turn on the thread begins with; its own two messages left out."""
        guard = Guard()
        guard.abort()
        return bounded(graph, guard).invoke(user("And now?"), config)["messages"][:-2]

    def report(self, scenario, graph, config, result, chunks, error):
        native = returned = (result or {}).get("messages", [])
        failed = error is not None and not isinstance(error, BudgetExceeded)
        stored = self.is_checkpointed(scenario) and scenario.guard is not None
        if stored:
            native = graph.get_state(config).values.get("messages", [])
            if failed and not scenario.stored:
                native = self.next_turn(graph, config)
        elif failed:
            # The graph raised and gave back nothing: the caller has what it had before.
            native = []
        guard = scenario.guard
        ended = self.outcome_of(result)
        if ended is None and isinstance(guard, Guard):
            ended = guard.outcome
        if error is not None:
            ended = ended_with(error)
        if scenario.break_after is not None:
            ended = None
        whole = stored and error is None and scenario.break_after is None
        return Ran(
            history=[message(one) for one in native],
            returned=[message(one) for one in returned] if whole else None,
            outcome=ended if guard is not None else None,
            typed=(result or {}).get("structured_response"),
            raised=error,
            chunks=chunks,
            session=config if self.is_checkpointed(scenario) else native,
        )


def reopened(saver):
    """Open a checkpointer in another process: only its bytes have come along."""
    again = InMemorySaver()
    for thread, namespaces in saver.storage.items():
        for namespace, checkpoints in namespaces.items():
            again.storage[thread][namespace].update(copy.deepcopy(checkpoints))
    for key, writes in saver.writes.items():
        again.writes[key].update(copy.deepcopy(writes))
    again.blobs.update(copy.deepcopy(saver.blobs))
    return again


def said_to(state):
    """Hand one agent's answer to the other as what a user says."""
    return {"messages": [HumanMessage(state["messages"][-1].content)]}


def approval(scenario, tools):
    """A node that waits for a person before the tools that need it."""
    asking = {tool.name for tool in scenario.tools if tool.approval}

    def node(state):
        calls = getattr(state["messages"][-1], "tool_calls", ())
        waiting = [call for call in calls if call["name"] in asking]
        if not waiting or interrupt([call["name"] for call in waiting]) == "approve":
            return {}
        return {"messages": [ToolMessage(REFUSED, tool_call_id=c["id"]) for c in waiting]}

    return node


def unanswered(state):
    """Go to the tools where a call has no result yet, and back to the model otherwise."""
    answered = {m.tool_call_id for m in state["messages"] if isinstance(m, ToolMessage)}
    asked = next(m for m in reversed(state["messages"]) if isinstance(m, AIMessage))
    if not asked.tool_calls:
        return END
    return "tools" if any(c["id"] not in answered for c in asked.tool_calls) else "agent"


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

    model = model.bind_tools(tools) if tools else model

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
    if top and any(tool.approval for tool in scenario.tools):
        graph.add_node("approval", approval(scenario, tools))
        graph.add_edge("agent", "approval")
        graph.add_conditional_edges("approval", unanswered, ["tools", "agent", END])
    else:
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


OWN_QUESTION = (
    "a node of the user's own asks by `interrupt()` (langgraph/types.py) before its calls reach a "
    "ToolNode; `HumanInTheLoopMiddleware` asks for no call that is refused"
)

OWN_REFUSAL = (
    "a node of the user's own writes a refusal as a plain `ToolMessage`, as one that runs tools by "
    'itself writes a result; with `status="error"` (langchain_core/messages/tool.py) it is seen'
)


class CallbackDriver(LangGraphDriver):
    """The callback on a hand-built graph without a checkpointer: the caller keeps the messages."""

    name = "BudgetCallback"
    checkpointed = False
    lacks: ClassVar = {
        "at_last": "a callback cannot write to the graph's state: an answer would reach nobody; "
        "`bounded` does",
        "structured": "a graph of one's own has no structured output",
        "own_limit": "the recursion limit of a graph of one's own leaves it as an exception",
    }
    deviations: ClassVar = {
        (6, "async"): "a callback cannot cancel a call that hangs; `bounded` does",
        (6, "streamed"): "a callback cannot cancel a call that hangs; `bounded` does",
        (7, "async"): "a callback cannot cancel a call that hangs; `bounded` does",
        (7, "streamed"): "a callback cannot cancel a call that hangs; `bounded` does",
        (12, "async"): "a callback cannot cancel a call that hangs; `bounded` does",
        (12, "streamed"): "a callback cannot cancel a call that hangs; `bounded` does",
        22: "a callback cannot write to the stream: the closed history is in the outcome",
        36: "a callback cannot write to the thread: the closed history is in the outcome",
        37: OWN_REFUSAL,
        44: OWN_QUESTION,
    }

    def agent(self, scenario, script, tools, **options):
        return state_graph(scenario, script, tools, **options)

    def given(self, scenario):
        return given_with_history(scenario, super().given)

    def attach(self, scenario, graph, config):
        if scenario.guard is None:
            return graph, config
        callbacks = [
            BudgetCallback(scenario.guard, **options_of(scenario))
            for _ in range(2 if scenario.twice else 1)
        ]
        scenario.shared["callback"] = callbacks[0]
        return graph, {**config, "callbacks": callbacks}

    def report(self, scenario, graph, config, result, chunks, error):
        ran = super().report(scenario, graph, config, result, chunks, error)
        if ran.outcome is not None and not self.is_checkpointed(scenario):
            ran.history = [message(one) for one in ran.outcome.messages]
            ran.session = ran.outcome.messages
        return ran


def given_with_history(scenario, given):
    """The input where the caller keeps the messages."""
    if scenario.answer is not None or scenario.stored:
        return given(scenario)
    before = list(scenario.after.session) if scenario.after is not None else []
    if scenario.user_input is None:
        return {"messages": before[:-1]}
    return {"messages": [*before, HumanMessage(scenario.user_input)]}


class BoundedDriver(LangGraphDriver):
    """`bounded` on an agent of LangChain's `create_agent`."""

    name = "bounded"

    def agent(self, scenario, script, tools, *, checkpointer=None, top=False):
        return create_agent_graph(scenario, script, tools, checkpointer=checkpointer, top=top)

    def answer(self, answer):
        return decision(answer)

    def attach(self, scenario, graph, config):
        if scenario.guard is None:
            return graph, config
        if scenario.twice:
            config = {**config, "callbacks": [BudgetCallback(scenario.guard)]}
        return bounded(graph, scenario.guard, **options_of(scenario)), config


class BoundedReactDriver(BoundedDriver):
    """`bounded` on LangGraph's older prebuilt agent."""

    name = "bounded (create_react_agent)"
    lacks: ClassVar = {"own_limit": "the recursion limit of LangGraph leaves it as an exception"}
    deviations: ClassVar = {37: OWN_REFUSAL, 44: OWN_QUESTION}

    def agent(self, scenario, script, tools, *, checkpointer=None, top=False):
        waits = any(tool.approval for tool in scenario.tools)
        graph = create_react_agent(
            ScriptedChat(script=script),
            ToolNode(tools, handle_tool_errors=True) if scenario.swallowing else tools,
            checkpointer=checkpointer,
            response_format=Answer if scenario.structured and top else None,
            post_model_hook=approval(scenario, tools) if waits and top else None,
        )
        policy = retry_policy(scenario)
        if policy is not None:
            graph.retry_policy = (policy,)
        return graph

    def answer(self, answer):
        return answer


def decision(answer):
    """A person's answer to `HumanInTheLoopMiddleware`."""
    if answer == "approve":
        return {"decisions": [{"type": "approve"}]}
    return {"decisions": [{"type": "reject", "message": REFUSED}]}


def create_agent_graph(scenario, script, tools, *, checkpointer=None, top=False, inner=()):
    from langchain.agents import create_agent
    from langchain.agents.middleware import (
        AgentMiddleware,
        HumanInTheLoopMiddleware,
        ModelCallLimitMiddleware,
        ModelRetryMiddleware,
    )
    from langchain.agents.structured_output import ToolStrategy

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
    asking = {tool.name: True for tool in scenario.tools if tool.approval}
    if asking and top:
        outer.append(HumanInTheLoopMiddleware(asking))
    if scenario.swallowing and top:
        outer.append(Swallowing())
    if scenario.retries:
        retries = ModelRetryMiddleware(
            max_retries=scenario.retries,
            retry_on=(ProviderError,),
            on_failure="error",
            initial_delay=0,
            jitter=False,
        )
        outer.append(retries)
    if scenario.own_limit is not None and top:
        limit = ModelCallLimitMiddleware(run_limit=scenario.own_limit, exit_behavior="end")
        outer.append(limit)
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

    lacks: ClassVar = {
        "dialogue": "an agent ends with its first answer that asks for no tool",
    }

    def agent(self, scenario, script, tools, *, checkpointer=None, top=False):
        from budgetguard_langgraph import BudgetMiddleware

        inner = []
        if top and scenario.guard is not None:
            budget = None if "active" in scenario.shared else scenario.guard
            inner = [BudgetMiddleware(budget, **options_of(scenario))]
        if top and scenario.judge is not None:
            inner.append(self.guardrail(scenario))
        return create_agent_graph(
            scenario, script, tools, checkpointer=checkpointer, top=top, inner=inner
        )

    def graph(self, scenario):
        # An agent has its budget in it: under another one it is another agent.
        if scenario.shared.setdefault("guard", scenario.guard) != scenario.guard:
            scenario.shared.pop("graph", None)
            scenario.shared["guard"] = scenario.guard
        return super().graph(scenario)

    def build(self, scenario, saver):
        tools = self.tools(scenario, scenario.tools)
        return self.agent(scenario, scenario.script, tools, checkpointer=saver, top=True)

    def guardrail(self, scenario):
        from langchain.agents.middleware import AgentMiddleware

        condition = self.condition(scenario)

        class Guardrail(AgentMiddleware):
            def before_agent(self, state, runtime):
                condition.func(state)

            async def abefore_agent(self, state, runtime):
                await condition.afunc(state)

        return Guardrail()

    def worker(self, scenario, agent):
        from budgetguard_langgraph import BudgetMiddleware

        tools = self.tools(scenario, agent.tools)
        inner = [] if agent.budget is None else [BudgetMiddleware(agent.budget)]
        return create_agent_graph(scenario, agent.script, tools, inner=inner)

    def given(self, scenario):
        return given_with_history(scenario, super().given)

    def answer(self, answer):
        return decision(answer)

    def active(self, scenario):
        """The agent may be one that several guards share: it takes the guard that is active."""
        if not isinstance(scenario.guard, Guard) or scenario.store is not None:
            return nullcontext()
        scenario.shared["active"] = True
        return scenario.guard.activate()

    def run_sync(self, scenario):
        with self.active(scenario):
            return super().run_sync(scenario)

    async def run_async(self, scenario):
        with self.active(scenario):
            return await super().run_async(scenario)

    def attach(self, scenario, graph, config):
        if scenario.twice:
            return graph, {**config, "callbacks": [BudgetCallback(scenario.guard)]}
        return graph, config

    def report(self, scenario, graph, config, result, chunks, error):
        ran = super().report(scenario, graph, config, result, chunks, error)
        if not self.is_checkpointed(scenario):
            ran.session = (result or {}).get("messages", [])
        return ran


DRIVERS = (CallbackDriver(), BoundedDriver(), BoundedReactDriver(), MiddlewareDriver())
