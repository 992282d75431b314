"""Settings that belong to the user, task groups, and calls one by one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from budgetguard_core import AdapterError, Budget, BudgetExceeded, Guard, StopReason
from budgetguard_core.kit import ToolCall
from budgetguard_loop import bounded, guarded, run_bounded, run_bounded_async, run_bounded_stream
from budgetguard_loop._reply import facts_of

# Settings


def test_a_guarded_tool_keeps_parameters_of_the_same_name():
    seen = []

    @guarded(Budget(max_seconds=50), kind="tool")
    def wait(seconds, max_output_tokens=7):
        seen.append((seconds, max_output_tokens))
        return "waited"

    wait(3)
    wait(seconds=4, max_output_tokens=5)
    wait(120, None)
    assert seen == [(3, 7), (4, 5), (120, None)]


def test_a_step_keeps_its_defaults_where_they_are_lower():
    seen = []

    def step(messages, seconds=5, max_output_tokens=9):
        seen.append((seconds, max_output_tokens))
        return "done"

    run_bounded(step, Budget(), messages="Go")
    run_bounded(step, Budget(max_output_tokens_per_call=100), messages="Go")
    run_bounded(step, Budget(max_output_tokens_per_call=3), messages="Go")
    assert seen == [(5, 9), (5, 9), (5, 3)]


# Task groups


async def in_a_group(call):
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(call())


async def test_a_task_group_in_a_block_ends_as_the_stop():
    async with bounded(Budget(max_model_calls=1)) as run:

        async def call():
            with run.model_call(input_tokens=1) as opened:
                opened.settle({"usage": {"prompt_tokens": 1, "completion_tokens": 1}})

        await in_a_group(call)
    assert run.outcome.status == "terminated"
    assert run.outcome.stop_reason is StopReason.MAX_MODEL_CALLS


async def test_a_task_group_in_a_step_ends_as_the_stop():
    @guarded(kind="tool")
    async def look():
        return "seen"

    async def step(messages):
        await in_a_group(look)
        return "done"

    outcome = await run_bounded_async(step, Budget(max_tool_calls=1), messages="Go")
    assert outcome.status == "terminated"
    assert outcome.stop_reason is StopReason.MAX_TOOL_CALLS


# Calls one by one


def test_calls_settle_when_their_block_is_left():
    with bounded(Budget(max_tool_calls=2)) as run:
        calls = [ToolCall(name="look", id=id_) for id_ in "abc"]
        with run.tool_calls(calls) as admitted:
            admitted[0].settle("seen")
            assert admitted[2].refusal is not None
        assert run.guard.open_tool_calls() == ()
    assert [call.status for call in run.outcome.tool_calls if call.id in "ab"] == ["completed"] * 2


def test_calls_stay_open_when_their_block_is_left_by_an_exception():
    with (
        pytest.raises(OSError, match="down"),
        bounded(Budget()) as run,
        run.tool_calls([ToolCall(name="look", id="a")]),
    ):
        raise OSError("down")
    assert [call.status for call in run.outcome.tool_calls] == ["interrupted"]


def test_a_call_runs_a_function():
    def divide(a, b):
        return a / b

    with bounded(Budget(max_tool_calls=3)) as run:
        first, second, third, fourth = run.tool_calls(
            ToolCall(name="divide", id=id_, arguments={"a": 1, "b": b})
            for id_, b in (("a", 2), ("b", 0), ("c", 4), ("d", 1))
        )
        assert first.run(divide) == "0.5"
        assert second.run(divide).startswith("Error: ZeroDivisionError")
        assert third.run(divide) == "0.25"
        assert fourth.run(divide) == fourth.refusal
    statuses = {call.id: call.status for call in run.outcome.tool_calls}
    assert statuses == {"a": "completed", "b": "failed", "c": "completed", "d": "refused"}


class Looks:
    async def __call__(self, value=""):
        await asyncio.sleep(0)
        return f"found {value}"


async def test_an_object_that_is_called_asynchronously_is_awaited():
    with bounded(Budget(max_tool_calls=3)) as run:
        assert await guarded(name="look")(Looks())(0) == "found 0"
        asked = [ToolCall(name="look", arguments={"value": n}, id=str(n)) for n in range(1, 4)]
        texts = [await call.run(Looks()) for call in run.tool_calls(asked)]
    assert texts[:2] == ["found 1", "found 2"]
    assert texts[2].startswith("Not executed")
    assert run.guard.usage.tool_calls == 3


CALLS = {
    "chat completions": {"id": "c", "function": {"name": "look", "arguments": '{"value": 1}'}},
    "Responses": {
        "type": "function_call",
        "call_id": "c",
        "name": "look",
        "arguments": '{"value":1}',
    },
    "Anthropic": {"type": "tool_use", "id": "c", "name": "look", "input": {"value": 1}},
    "Bedrock": {"toolUse": {"toolUseId": "c", "name": "look", "input": {"value": 1}}},
    "LangChain": {"name": "look", "args": {"value": 1}, "id": "c", "type": "tool_call"},
}


def check_read(asked):
    with bounded(Budget(max_tool_calls=1)) as run:
        (call,) = run.tool_calls([asked, {"text": "Let me look."}])
        assert (call.id, call.name, call.arguments) == ("c", "look", {"value": 1})
        (refused,) = run.tool_calls([asked])
        assert refused.refusal is not None


@pytest.mark.parametrize("sdk", CALLS)
def test_a_call_of_each_sdk_is_read_in_full(sdk):
    check_read(CALLS[sdk])


@pytest.mark.slow
def test_a_call_of_gemini_is_read_in_full():
    pytest.importorskip("google.genai", reason="comes with the dependency group `sdks`")
    from google.genai.types import Part

    told = {"functionCall": {"id": "c", "name": "look", "args": {"value": 1}}}
    part = Part.model_validate(told)
    check_read(part)
    check_read(part.function_call)


async def test_a_stream_whose_content_is_in_parts_is_read():
    """As Mistral's models send it that think first."""

    async def step(messages):
        for content in (
            [{"type": "thinking", "thinking": []}],
            [{"type": "text", "text": "It is"}],
        ):
            yield {"choices": [{"delta": {"content": content}}]}
        yield {"choices": [{"delta": {"content": " so."}}]}

    stream = run_bounded_stream(step, Budget(max_iterations=2), messages="Is it?")
    assert len([chunk async for chunk in stream]) == 3
    assert (stream.outcome.status, stream.outcome.final) == ("completed", "It is so.")

    @guarded(Budget(max_iterations=2), kind="model")
    async def model(messages):
        async for chunk in step(messages):
            yield chunk

    assert [chunk async for chunk in model([])]


def test_blocks_that_are_no_calls_are_left_out():
    content = [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {}},
        SimpleNamespace(type="thinking", thinking="hm"),
    ]
    with bounded(Budget()) as run:
        assert [call.name for call in run.tool_calls(content)] == ["look"]


def test_a_response_without_choices_says_nothing_and_is_charged():
    response = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 0}}
    assert facts_of(response).text == ""
    with bounded(Budget()) as run, run.model_call(input_tokens=1) as call:
        call.settle(response)
    assert run.outcome.usage.total_tokens == 5


def test_a_stop_that_a_tool_raises_is_no_error_text():
    def ask():
        raise BudgetExceeded(run.guard.check())

    with bounded(Budget(max_tool_calls=1)) as run:
        (call,) = run.tool_calls([ToolCall(name="ask", id="a")])
        run.guard.abort()
        call.run(ask)
    assert run.outcome.stop_reason is StopReason.ABORTED


class Attributed(dict):
    """A response as DashScope's and AgentScope's SDKs give it."""

    __getattr__ = dict.__getitem__


def test_a_dictionary_with_attributes_is_a_response():
    usage = Attributed(prompt_tokens=7, completion_tokens=3)
    message = Attributed(role="assistant", content="Hello.")
    response = Attributed(choices=[Attributed(message=message)], usage=usage)
    with bounded(Budget(max_total_tokens=100)) as run, run.model_call("gpt-4o") as call:
        call.settle(response)
    assert run.outcome.usage.total_tokens == 10
    assert run_bounded(lambda messages: response, Budget(), messages="Hi").final == "Hello."


@pytest.mark.parametrize("choices", [{"A": "yes", "B": "no"}, 4, "A or B"])
def test_an_answer_in_a_shape_of_ones_own_may_have_choices(choices):
    guard = Guard(Budget())

    @guarded(guard, kind="model")
    def ask():
        return {"question": "Is it?", "choices": choices}

    @guarded(guard, kind="model")
    def stream():
        yield {"choices": choices}

    assert ask()["choices"] == choices
    assert list(stream()) == [{"choices": choices}]
    assert guard.usage.failed_calls == 0
    with pytest.raises(AdapterError, match="ModelReply"):
        run_bounded(lambda messages: {"choices": choices}, Budget(), messages="Hi")


@pytest.mark.parametrize("mode", ["enforce", "observe", "off"])
def test_a_tool_that_another_guard_guards_is_one_call_of_the_run(mode):
    other, around = Guard(Budget(), mode=mode), Guard(Budget())
    ask = {"id": "a", "type": "function", "function": {"name": "search", "arguments": "{}"}}

    def step(messages):
        done = messages[-1]["role"] == "tool"
        return "Done." if done else {"role": "assistant", "content": None, "tool_calls": [ask]}

    search = guarded(other)(lambda: "found")
    with around.activate():
        outcome = run_bounded(step, Budget(), messages="Go", tools={"search": search})
    assert outcome.status == "completed"
    assert (outcome.usage.tool_calls, around.usage.tool_calls) == (1, 1)
    assert other.usage.tool_calls == (mode != "off")
