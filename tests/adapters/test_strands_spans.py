"""The spans of Strands: each that a run began is ended and exported, whatever ended the run."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("strands")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from strands import tool
from strands.multiagent import GraphBuilder
from strands.telemetry.tracer import get_tracer

from budgetguard_core import Budget, BudgetExceeded, Guard
from budgetguard_core.testing import ManualClock, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from conformance.budgetguard_strands_driver import ScriptedModel
from strands_agents import Counter, made, run, sticky

WAYS = ("sync", "async", "streamed")
DEADLINE = 0.05
"""The tests' clock passes it where they say so."""
FOR_EVER = 240
"""Seconds that nothing in these tests may ever wait."""


class Spans(InMemorySpanExporter):
    """Exported spans, and the names of those that were begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []

    def names(self) -> list[str]:
        return sorted(one.name for one in self.get_finished_spans())


class Begun(SimpleSpanProcessor):
    def __init__(self, spans: Spans) -> None:
        super().__init__(spans)
        self.spans = spans

    def on_start(self, span, parent_context=None):
        self.spans.begun.append(span.name)


@pytest.fixture
def spans(monkeypatch):
    exporter = Spans()
    provider = TracerProvider()
    provider.add_span_processor(Begun(exporter))
    monkeypatch.setattr(get_tracer(), "tracer", provider.get_tracer("strands"))
    yield exporter
    assert exporter.begun
    assert exporter.names() == sorted(exporter.begun)
    # Nothing is exported twice.
    ids = [one.context.span_id for one in exporter.get_finished_spans()]
    assert len(set(ids)) == len(ids)


@pytest.fixture
def counter():
    return Counter()


class Hangs(ScriptedModel):
    """Says a word, and then nothing more: `then` is called instead."""

    def __init__(self, then) -> None:
        super().__init__(Script([says("never")]))
        self.then = then

    async def stream(self, *args, **kwargs):
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockDelta": {"delta": {"text": "So"}}}
        self.then()
        await asyncio.sleep(FOR_EVER)


class Silent(Hangs):
    """Never says a word."""

    async def stream(self, *args, **kwargs):
        self.then()
        await asyncio.sleep(FOR_EVER)
        yield {}


class Endless(ScriptedModel):
    """Talks on and on, and gives the loop no turn."""

    def __init__(self, then) -> None:
        super().__init__(Script([says("never")]))
        self.then = then

    async def stream(self, *args, **kwargs):
        yield {"messageStart": {"role": "assistant"}}
        for number in range(100_000):
            if number == 100:
                self.then()
            yield {"contentBlockDelta": {"delta": {"text": "on "}}}


CAPS = {
    "iterations": Budget(max_iterations=2),
    "model calls": Budget(max_model_calls=2),
    "tool calls": Budget(max_tool_calls=1),
    "tokens": Budget(max_total_tokens=1),
    "no progress": Budget(max_iterations=50),
}


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("way", WAYS)
def test_after_a_cap(spans, cap, way, counter):
    search = counter.tool
    if cap == "no progress":

        @tool
        def search() -> str:
            """Finds the same."""
            return "nothing"

    provider = BudgetHookProvider(CAPS[cap])
    agent = made(sticky(), search, hooks=[provider])
    run(agent, "Go.", way)
    assert provider.outcome(agent).status == "terminated"


def test_after_a_cap_that_raises(spans, counter):
    provider = BudgetHookProvider(Budget(max_iterations=2), on_trip="raise")
    with pytest.raises(BudgetExceeded):
        made(sticky(), counter.tool, hooks=[provider])("Go.")


@pytest.mark.parametrize("model", [Hangs, Silent, Endless])
@pytest.mark.parametrize("way", WAYS)
def test_after_the_deadline_in_a_stream(spans, model, way):
    clock = ManualClock()
    provider = BudgetHookProvider(Budget(max_seconds=DEADLINE), clock=clock)
    agent = made(sticky(), hooks=[provider])
    agent.model = model(lambda: clock.advance(60))
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_seconds"


@pytest.mark.parametrize("way", WAYS)
def test_after_the_deadline_in_a_tool(spans, way):
    clock = ManualClock()

    @tool
    async def stuck() -> str:
        """Never ends."""
        clock.advance(60)
        await asyncio.sleep(FOR_EVER)
        return ""

    provider = BudgetHookProvider(Budget(max_seconds=DEADLINE), clock=clock)
    result, _ = run(made(sticky("stuck"), stuck, hooks=[provider]), "Go.", way)
    assert result.stop_reason == "max_seconds"


@pytest.mark.parametrize("model", [Hangs, Silent, Endless])
@pytest.mark.parametrize("way", WAYS)
def test_after_an_abort_from_another_thread(spans, model, way):
    guard = Guard()

    def abort() -> None:
        user = threading.Thread(target=guard.abort, args=("enough",))
        user.start()
        user.join()

    agent = made(sticky(), hooks=[BudgetHookProvider(guard)])
    agent.model = model(abort)
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "aborted"


@pytest.mark.parametrize("way", WAYS)
def test_after_a_stop_that_goes_through_agents_as_tools(spans, way, counter):
    child = made(sticky(), counter.tool, name="child")

    @tool
    async def ask() -> str:
        """Asks the child."""
        return str(await child.invoke_async("Work."))

    provider = BudgetHookProvider(Budget(max_model_calls=3))
    agent = made(sticky("ask"), ask, hooks=[provider])
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_model_calls"


@pytest.mark.parametrize("way", WAYS)
def test_after_a_stop_in_a_graph(spans, way, counter):
    builder = GraphBuilder()
    for name in "ab":
        builder.add_node(made(Script([calls("search"), says("Done.")]), counter.tool), name)
    builder.add_edge("a", "b")
    builder.set_max_node_executions(9)
    graph = builder.build()
    provider = BudgetHookProvider(Budget(max_model_calls=3))
    provider.attach(graph)
    run(graph, "Go.", way)
    assert provider.outcome(graph).status == "terminated"


@pytest.mark.parametrize("model", [Hangs, Silent])
async def test_after_a_cancellation_from_outside(spans, model):
    hangs = asyncio.Event()
    provider = BudgetHookProvider(Budget(max_seconds=60))
    agent = made(sticky(), hooks=[provider])
    agent.model = model(hangs.set)
    task = asyncio.create_task(agent.invoke_async("Go."))
    await hangs.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert provider.outcome(agent).status == "failed"
