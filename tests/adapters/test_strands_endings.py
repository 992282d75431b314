"""How runs end that are cut off: by their own bound, a failure, Strands' limit or the clock."""

from __future__ import annotations

import pytest
from pydantic import BaseModel
from strands import tool
from strands.hooks import AfterToolCallEvent, MessageAddedEvent
from strands.models.bedrock import BedrockModel
from strands.multiagent import GraphBuilder
from strands.tools.executors import SequentialToolExecutor

from budgetguard_core import Budget, Guard, MemoryStore
from budgetguard_core.kit import NOT_EXECUTED, outcome_of
from budgetguard_core.testing import ManualClock, Reply, Script, calls, says
from budgetguard_strands import MAX_ITERATIONS, BudgetHookProvider
from budgetguard_strands._bounds import with_bound
from conformance.budgetguard_strands_driver import ScriptedModel
from strands_agents import Counter, check_request, made, results, run, sticky, strict

WAYS = ("sync", "async", "stream")
GO_ON = {"role": "user", "content": [{"text": "And now?"}]}


@pytest.fixture
def counter():
    return Counter()


# Our own completion bound


def bedrock(**options):
    import boto3

    session = boto3.Session("id", "secret", region_name="us-east-1")
    return BedrockModel(boto_session=session, model_id="m", **options)


def test_the_bound_of_bedrock_is_never_below_its_thinking_budget():
    pytest.importorskip("boto3")
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    model = bedrock(max_tokens=4000, additional_request_fields=thinking)
    assert with_bound(model, 100).get_config()["max_tokens"] == 1025
    assert with_bound(model, 3000).get_config()["max_tokens"] == 3000
    assert with_bound(bedrock(), 100).get_config()["max_tokens"] == 100
    assert model.get_config()["max_tokens"] == 4000


def test_the_bound_of_openai_responses_is_never_below_its_minimum():
    responses = pytest.importorskip("strands.models.openai_responses")
    model = responses.OpenAIResponsesModel(client_args={"api_key": "x"}, model_id="m")
    assert with_bound(model, 5).get_config()["params"]["max_output_tokens"] == 16


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("LlamaAPIModel", ("config", "max_completion_tokens")),
        ("WriterModel", ("config", "max_tokens")),
        ("LlamaCppModel", ("config", "params", "max_tokens")),
        ("SageMakerAIModel", ("payload_config", "max_tokens")),
    ],
)
@pytest.mark.parametrize("own", [None, 50, 500])
def test_each_model_of_strands_own_has_a_completion_bound(name, place, own):
    # By their names alone, because their packages are not all installed.
    class Named:
        def get_config(self):
            return self.config

    Named.__name__ = name
    model = Named()
    model.config, model.payload_config = {"model_id": "m"}, {"stream": True}
    *path, last = place
    settings = vars(model)
    for key in path:
        settings = settings.setdefault(key, {})
    if own is not None:
        settings[last] = own
    settings = vars(with_bound(model, 100))
    for key in path:
        settings = settings[key]
    assert settings[last] == (50 if own == 50 else 100)


# Failures


def test_a_result_without_a_status_is_a_result(counter):
    def drop(event):
        event.result = {key: event.result[key] for key in ("toolUseId", "content")}

    agent = made(Script([calls("search"), says("Done.")]), counter.tool)
    agent.hooks.add_callback(AfterToolCallEvent, drop)
    provider = BudgetHookProvider(Budget(max_iterations=3))
    provider.attach(agent)
    assert agent("Go.").stop_reason == "end_turn"
    assert provider.outcome(agent).tool_calls[0].status == "completed"


class Shape(BaseModel):
    name: str


class Structured(ScriptedModel):
    async def structured_output(self, output_model, prompt, system_prompt=None, **kwargs):
        yield {"output": output_model(name="x")}


def test_the_deprecated_structured_output_concludes_once_after_a_stop(counter):
    outcomes = []
    guard = Guard(Budget(max_iterations=1))
    provider = BudgetHookProvider(guard, on_outcome=outcomes.append)
    agent = made(sticky(), counter.tool, hooks=[provider])
    agent.model = Structured(agent.model.script)
    assert agent("Go.").stop_reason == "max_iterations"
    before = len(outcomes)
    with pytest.warns(DeprecationWarning, match="structured_output"):
        agent.structured_output(Shape, "Shape it.")
    assert len(outcomes) == before + 1
    assert provider.outcome(agent) is outcomes[-1]
    assert agent("Again.").stop_reason == "max_iterations"


def test_a_store_that_fails_at_the_stop_is_reported(counter):
    class Full(MemoryStore):
        def save(self, *args, **kwargs):
            raise OSError("the disk is full")

        append = claim = save

    provider = BudgetHookProvider(Budget(max_iterations=1), store=Full())
    agent = made(sticky(), counter.tool, hooks=[provider])
    assert agent("Go.").stop_reason == "max_iterations"
    assert any("the disk is full" in error for error in provider.outcome(agent).errors)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("limits", [{"turns": 1}, {"total_tokens": 1}, {"output_tokens": 1}])
def test_strands_own_limits_leave_a_closed_history(way, limits, counter):
    provider = BudgetHookProvider(Budget(max_iterations=9))
    agent = strict(sticky(), counter.tool, hooks=[provider])
    result, _ = run(agent, "Go.", way, limits=limits)
    assert str(result.stop_reason).startswith("limit_")
    check_request([*agent.messages, GO_ON])
    run(agent, "And now?", way, limits=limits)
    check_request([*agent.messages, GO_ON])


# The clock


class Endless(ScriptedModel):
    """Streams on and on and never yields to the loop; the clock goes on with each piece."""

    def __init__(self, clock, pieces, delta, start):
        super().__init__(Script([says("never")]))
        self.clock, self.pieces, self.sent = clock, pieces, 0
        self.delta, self.start = delta, start

    async def stream(self, messages, *args, **kwargs):
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": self.start}}
        for _ in range(self.pieces):
            self.sent += 1
            self.clock.advance(0.1)
            yield {"contentBlockDelta": {"delta": self.delta}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn"}}


@pytest.mark.parametrize(
    ("delta", "start"),
    [
        ({"text": "x word "}, {}),
        ({"reasoningContent": {"text": "x word "}}, {}),
        ({"toolUse": {"input": "x word "}}, {"toolUse": {"toolUseId": "1", "name": "count"}}),
    ],
    ids=["text", "reasoning", "arguments"],
)
@pytest.mark.parametrize("way", WAYS)
def test_the_deadline_in_a_stream_that_never_yields_to_the_loop(way, delta, start):
    clock = ManualClock()
    provider = BudgetHookProvider(Budget(max_seconds=10), clock=clock)
    agent = made(Script([says("never")]), hooks=[provider])
    agent.model = Endless(clock, 5000, delta, start)
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_seconds"
    assert agent.model.sent < 300
    # What was written until then is paid for, text or not.
    assert provider.outcome(agent).usage.output_tokens > agent.model.sent
    check_request([*agent.messages, GO_ON])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", ["deadline", "abort"])
def test_a_tool_that_streams_and_never_yields_to_the_loop_is_left_in_time(cut, way):
    clock = ManualClock()
    guard = Guard(Budget(max_seconds=30), clock=clock)
    parts = []

    @tool
    async def count():
        """Counts."""
        for number in range(1_000):
            parts.append(number)
            if number == 100:
                clock.advance(60) if cut == "deadline" else guard.abort("enough")
            yield str(number)

    executor = SequentialToolExecutor()
    agent = strict(
        Script([calls("count")]), count, hooks=[BudgetHookProvider(guard)], tool_executor=executor
    )
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == ("max_seconds" if cut == "deadline" else "aborted")
    assert len(parts) < 300
    check_request([*agent.messages, GO_ON])


@pytest.mark.parametrize("way", WAYS)
def test_a_refused_call_says_so_whatever_the_run_was_stopped_for(way, counter):
    guard = Guard(Budget(max_iterations=9))

    @tool
    async def leave() -> str:
        """Aborts the run."""
        guard.abort("stop")
        return "left"

    agent = strict(
        Script([calls("leave", "search")]),
        counter.tool,
        leave,
        hooks=[BudgetHookProvider(guard)],
        tool_executor=SequentialToolExecutor(),
    )
    assert run(agent, "Go.", way)[0].stop_reason == "aborted"
    assert results(agent) == ["left", NOT_EXECUTED]


def test_reasoning_without_usage_is_estimated():
    guard = Guard(Budget(max_total_tokens=50_000))
    agent = made(Script([says("never")]), hooks=[BudgetHookProvider(guard)])
    agent.model = Endless(ManualClock(), 500, {"reasoningContent": {"text": "x word "}}, start={})
    assert agent("Go.").stop_reason == "end_turn"
    assert guard.usage.output_tokens > 500


# What is sent


def test_the_bytes_of_an_image_do_not_inflate_the_estimate():
    sizes = []
    for size in (1_000, 1_000_000):
        image = {"image": {"format": "png", "source": {"bytes": b"x" * size}}}
        guard = Guard(Budget(max_total_tokens=50_000))
        agent = made(Script([Reply(text="A cat.", usage=None)]), hooks=[BudgetHookProvider(guard)])
        agent([{"text": "What is it?"}, image])
        sizes.append(guard.usage.input_tokens)
    assert abs(sizes[0] - sizes[1]) < 10
    assert sizes[1] < 10_000


def test_the_stop_reason_has_a_name(counter):
    agent = made(sticky(), counter.tool, hooks=[BudgetHookProvider(Budget(max_iterations=2))])
    assert agent("Go.").stop_reason == MAX_ITERATIONS


# An exception that leaves a run which a limit has stopped


class BreaksAtTheStop:
    """Raises where the stopped batch reaches the history."""

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(MessageAddedEvent, self.added)

    def added(self, event):
        if any("toolResult" in block for block in event.message["content"]):
            raise LookupError("the hook is broken")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["agent", "graph"])
def test_an_exception_after_the_stop_carries_the_outcome_of_the_stop(way, kind, counter):
    outcomes = []
    provider = BudgetHookProvider(Budget(max_tool_calls=1), on_outcome=outcomes.append)
    agent = strict(Script([calls("search", "search")]), counter.tool, hooks=[BreaksAtTheStop()])
    target = agent
    if kind == "graph":
        builder = GraphBuilder().set_max_node_executions(9)
        builder.add_node(agent, "a")
        target = builder.build()
    provider.attach(target)
    with pytest.raises(Exception, match="the hook is broken") as left:
        run(target, "Go.", way)
    found = outcome_of(left.value)
    assert found is not None
    assert (found.status, found.stop_reason) == ("terminated", "max_tool_calls")
    assert "the hook is broken" in str(found.error)
    assert provider.outcome(target) == found
    assert len(outcomes) == 1
    assert len(counter.started) == 1
