"""Each breaker in each framework, with its own client over real HTTP on loopback.

The server's log is an independent count of model calls, and its requests are what a model reads.
"""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from werkzeug import Response

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.breakers import (
    CircuitBreakerConfig,
    ProgressReports,
    RateLimit,
    ToolMix,
    ToolMixBaseline,
    VelocityLimits,
)
from budgetguard_core.events import CircuitBreakerChanged, ProgressReported, ToolMixUnusual
from budgetguard_core.kit import report_progress
from budgetguard_core.testing import ManualClock
from layout import adapters

MODEL = "gpt-4o"
REQUEST = "Before you go on, call report_progress"
USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}


class Provider:
    """A chat completions server; `ask` gets each request's messages and says what to answer.

    The answer is a text, or a list of tool calls: names, with arguments where there are any.
    """

    def __init__(self, httpserver):
        self.ask = None
        self.asked = []
        self.lock = threading.Lock()
        httpserver.expect_request("/v1/chat/completions").respond_with_handler(self)
        self.url = httpserver.url_for("/v1")

    def __call__(self, request):
        body = request.get_json()
        with self.lock:
            number = len(self.asked)
            self.asked.append(body["messages"])
        message = self.message(number, self.ask(number, body["messages"]))
        reason = "tool_calls" if "tool_calls" in message else "stop"
        head = {"id": f"c{number}", "created": 0, "model": MODEL}
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": reason, "message": message}
            answer = {**head, "object": "chat.completion", "choices": [choice], "usage": USAGE}
            return Response(json.dumps(answer), mimetype="application/json")
        head["object"] = "chat.completion.chunk"
        choices = [
            {"index": 0, "delta": message, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": reason},
        ]
        chunks = [{**head, "choices": [choice]} for choice in choices]
        chunks.append({**head, "choices": [], "usage": USAGE})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return Response([*lines, "data: [DONE]\n\n"], mimetype="text/event-stream")

    @staticmethod
    def message(number, what):
        message = {"role": "assistant", "content": what if isinstance(what, str) else ""}
        if not isinstance(what, str):
            calls = [(one, {}) if isinstance(one, str) else one for one in what]
            message["tool_calls"] = [
                {
                    "index": place,
                    "id": f"call_{number}_{place}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for place, (name, arguments) in enumerate(calls)
            ]
        return message


@pytest.fixture
def provider(httpserver):
    return Provider(httpserver)


def loop(provider, guard, tools):
    from openai import OpenAI

    from budgetguard_loop import run_bounded

    client = OpenAI(base_url=provider.url, api_key="none", max_retries=0)
    with client:
        return run_bounded(
            lambda messages: client.chat.completions.create(model=MODEL, messages=messages),
            guard,
            messages="Go.",
            tools={tool.__name__: tool for tool in tools},
        )


def langgraph(provider, guard, tools):
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    from budgetguard_langgraph import bounded, outcome

    model = ChatOpenAI(model=MODEL, base_url=provider.url, api_key="none", max_retries=0)
    agent = bounded(create_agent(model, list(tools)), guard)
    return outcome(agent.invoke({"messages": [{"role": "user", "content": "Go."}]}))


def openai_agents(provider, guard, tools):
    from agents import Agent, OpenAIChatCompletionsModel, function_tool
    from openai import AsyncOpenAI

    from budgetguard_openai_agents import bounded_run, outcome

    async def run():
        async with AsyncOpenAI(base_url=provider.url, api_key="none", max_retries=0) as client:
            agent = Agent(
                name="main",
                model=OpenAIChatCompletionsModel(MODEL, client),
                tools=[function_tool(tool, strict_mode=False) for tool in tools],
            )
            return outcome(await bounded_run(agent, "Go.", budget=guard))

    return asyncio.run(run())


def pydantic_ai(provider, guard, tools):
    from openai import AsyncOpenAI
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    from budgetguard_pydantic_ai import BudgetCapability, outcome

    # The framework has no tool of the user's own under the name of the budget's.
    own = [tool for tool in tools if tool is not report_progress]

    async def run():
        async with AsyncOpenAI(base_url=provider.url, api_key="none", max_retries=0) as client:
            model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
            agent = Agent(model, tools=own, capabilities=[BudgetCapability(guard)])
            return outcome(await agent.run("Go."))

    return asyncio.run(run())


def strands(provider, guard, tools):
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    from budgetguard_strands import BudgetHookProvider

    model = OpenAIModel(
        client_args={"base_url": provider.url, "api_key": "none", "max_retries": 0}, model_id=MODEL
    )
    hooks = BudgetHookProvider(guard)
    agent = Agent(
        model=model, tools=[tool(one) for one in tools], hooks=[hooks], callback_handler=None
    )
    agent("Go.")
    return hooks.outcome(agent)


RUNS = {
    "budgetguard_loop": (loop, "openai"),
    "budgetguard_langgraph": (langgraph, "langchain_openai"),
    "budgetguard_openai_agents": (openai_agents, "agents"),
    "budgetguard_pydantic_ai": (pydantic_ai, "pydantic_ai"),
    "budgetguard_strands": (strands, "strands"),
}


@pytest.fixture(params=RUNS)
def run(request):
    function, framework = RUNS[request.param]
    pytest.importorskip(framework, reason="it comes with an extra")
    return function


class Bench:
    """A guard with a log and a clock, and tools that write down when they start."""

    def __init__(self, clock=None, **fields):
        self.events = []
        self.started = []
        self.clock = clock
        # Loops would be seen before: the breakers are to be seen at work.
        budget = Budget(loop_detection=None, **fields)
        self.guard = Guard(budget, sinks=[self.events.append], clock=clock)

    def tool(self, name, result=None):
        def body(value: str = "") -> str:
            """Do it."""
            del value
            self.started.append(name)
            return f"{name} {len(self.started)}" if result is None else result()

        body.__name__ = name
        return body

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def results(messages):
    """The results that a request carries; Pydantic AI sends one that failed below "error"."""
    texts = [str(one["content"]) for one in messages if one["role"] == "tool"]
    return [json.loads(text)["error"] if text.startswith('{"error":"{') else text for text in texts]


def test_every_adapter_is_here():
    framework_free = {"budgetguard_cli", "budgetguard_http"}
    assert set(adapters()) - framework_free == set(RUNS)


@pytest.mark.sample(4)
def test_a_tool_that_flaps_is_left_alone_until_it_works_again(run, provider):
    clock = ManualClock()
    bench = Bench(
        clock,
        circuit_breaker=CircuitBreakerConfig(
            sliding_window_size=4,
            minimum_number_of_calls=2,
            wait_duration_in_open_state=20,
            permitted_number_of_calls_in_half_open_state=1,
            record_result=lambda result: "is down" in str(result),
            stop_after_open_rounds=9,
        ),
    )

    def ask(_, messages):
        clock.advance(5)
        # What was refused says when to try again; it never says "fetched".
        return "Done." if any("fetched" in text for text in results(messages)) else ["fetch"]

    provider.ask = ask
    down = lambda: "the server is down" if clock.monotonic_ns() < 30e9 else "fetched"  # noqa: E731
    outcome = run(provider, bench.guard, [bench.tool("fetch", down)])
    assert outcome.status == "completed"
    # Two failures, three turns in which it is left alone, and the trial call that finds it back.
    assert len(bench.started) == 3
    assert len(provider.asked) == 7
    changes = [event.to_state for event in bench.of(CircuitBreakerChanged)]
    assert changes == ["open", "half_open", "closed"]
    refused = [json.loads(text) for text in results(provider.asked[-1]) if "retry_after" in text]
    assert [one["error"] for one in refused] == ["tool_unavailable"] * 3
    assert [one["retry_after_seconds"] for one in refused] == [15, 10, 5]


@pytest.mark.sample(4)
def test_a_tool_that_stays_down_ends_the_run(run, provider):
    config = CircuitBreakerConfig(
        sliding_window_size=4,
        minimum_number_of_calls=2,
        record_result=lambda result: "is down" in str(result),
    )
    bench = Bench(circuit_breaker=config)
    provider.ask = lambda *_: ["fetch"]
    outcome = run(provider, bench.guard, [bench.tool("fetch", lambda: "the server is down")])
    assert outcome.stop_reason == StopReason.CIRCUIT_OPEN
    assert len(bench.started) == 2
    assert len(provider.asked) == 5


@pytest.mark.sample(4)
def test_a_burst_of_200_calls_is_cut_at_the_ceiling(run, provider):
    limits = VelocityLimits(max_tool_calls_per_minute=50, throttle_at=0.99)
    bench = Bench(velocity=limits)
    provider.ask = lambda *_: ["search"] * 200
    outcome = run(provider, bench.guard, [bench.tool("search")])
    assert outcome.stop_reason == StopReason.VELOCITY
    assert len(bench.started) == 50
    assert outcome.usage.tool_calls == 50
    assert len(provider.asked) == 1


@pytest.mark.sample(4)
def test_a_burst_beyond_a_rate_limit_is_answered_with_when_to_try_again(run, provider):
    bench = Bench(rate_limits={"sea*": RateLimit(rate=0.01, burst=20)})
    provider.ask = lambda number, _: ["search"] * 200 if number == 0 else "Done."
    outcome = run(provider, bench.guard, [bench.tool("search")])
    assert outcome.status == "completed"
    assert len(bench.started) == 20
    refused = [text for text in results(provider.asked[1]) if "rate_limited" in text]
    assert len(refused) == 180
    assert {json.loads(text)["error"] for text in refused} == {"rate_limited"}
    assert all(1 <= json.loads(text)["retry_after_seconds"] <= 100 for text in refused)


@pytest.mark.sample(4)
def test_a_planner_that_wanders_is_corrected_then_stopped(run, provider):
    bench = Bench(progress=ProgressReports(every_iterations=3), max_tool_calls=60)

    asked = [0]

    def ask(number, messages):
        # Some adapters keep a request in the history, some send it once.
        asked.append(json.dumps(messages).count(REQUEST))
        if asked[-1] > asked[-2]:
            report = {
                "claims_so_far": [f"looked at place {number}"],
                "next_subgoal": "Find the cause.",
                "estimated_remaining_steps": 10,
            }
            return [("report_progress", report)]
        return [("search", {"value": f"place {number}"})]

    provider.ask = ask
    outcome = run(provider, bench.guard, [bench.tool("search"), report_progress])
    assert outcome.stop_reason == StopReason.STALLED
    assert len(bench.of(ProgressReported)) >= 4
    told = [messages for messages in provider.asked if "same next subgoal" in json.dumps(messages)]
    assert told
    # Each call was a new one, and the reports cost no place.
    assert outcome.usage.tool_calls == len(bench.started) < 30


@pytest.mark.sample(4)
def test_200_files_are_read_and_nothing_is_searched(run, provider):
    baseline = ToolMixBaseline.of(
        [{"search": 6, "read_file": 5}, {"search": 9, "read_file": 8}] * 40
    )
    bench = Bench(tool_mix=ToolMix(baseline=baseline))
    provider.ask = lambda number, _: ["read_file"] * 20 if number < 10 else "Done."
    outcome = run(provider, bench.guard, [bench.tool("read_file"), bench.tool("search")])
    assert outcome.status == "completed"
    assert len(bench.started) == 200
    (told,) = bench.of(ToolMixUnusual)
    assert told.calls == 20
    assert "read_file 100 % instead of 46 %" in told.detail
