"""What providers, tools and callers do wrong, and a run has to live through."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import suppress

import pytest

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    LoopDetection,
    MemoryStore,
    StopReason,
)
from budgetguard_core.kit import NOT_EXECUTED, OUTCOME_UNKNOWN, SystemClock
from budgetguard_loop import (
    bounded,
    current_call,
    guarded,
    run_bounded,
    run_bounded_async,
    run_bounded_stream,
)


def asks(*calls):
    """An assistant message that asks for tools: (name, arguments), without ids."""
    made = [{"function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": None, "tool_calls": made}


def once(*replies, final="Done."):
    """A step that gives these replies and then the final one."""
    rest = iter(replies)
    return lambda messages: next(rest, final)


def texts(outcome):
    return [m["content"] for m in outcome.messages if m["role"] == "tool"]


# Ids


def test_calls_without_ids_get_ids_of_their_own():
    keys = []

    def send(to):
        keys.append(current_call().idempotency_key)
        return f"sent to {to}"

    step = once(asks(("send", '{"to": "a"}')), asks(("send", '{"to": "a"}')))
    outcome = run_bounded(step, Budget(), messages="Go", tools={"send": send})
    assert texts(outcome) == ["sent to a", "sent to a"]
    assert len(set(keys)) == 2
    assert len({m["tool_call_id"] for m in outcome.messages if m["role"] == "tool"}) == 2


async def test_streamed_calls_without_ids_get_ids_of_their_own():
    replies = iter(
        [
            [
                {
                    "choices": [
                        {
                            "delta": {
                                "tool_calls": [
                                    {"index": place, "function": {"name": "f", "arguments": "{}"}}
                                    for place in range(2)
                                ]
                            }
                        }
                    ]
                }
            ],
            ["Done."],
        ]
    )

    async def step(messages):
        for chunk in next(replies):
            yield chunk

    stream = run_bounded_stream(step, Budget(), messages="Go", tools={"f": lambda: "x"})
    async for _ in stream:
        pass
    ids = [call["id"] for call in stream.outcome.messages[1]["tool_calls"]]
    assert all(ids)
    assert len(set(ids)) == 2
    assert [m["tool_call_id"] for m in stream.outcome.messages if m["role"] == "tool"] == ids


def test_a_call_with_the_id_of_one_that_was_interrupted_before_runs():
    store = MemoryStore()
    ran = []

    def same_id(number):
        message = asks(("f", f'{{"number": {number}}}'))
        message["tool_calls"][0]["id"] = "same"
        return message

    def f(number):
        ran.append(number)
        if number == 1:
            raise KeyboardInterrupt
        return str(number)

    guard = Guard(Budget(), run_id="run")
    with pytest.raises(KeyboardInterrupt):
        run_bounded(once(same_id(1)), guard, messages="Go", tools={"f": f}, store=store)
    outcome = run_bounded(
        once(same_id(2)), Budget(), messages="Again", tools={"f": f}, store=store, resume="run"
    )
    assert ran == [1, 2]
    assert texts(outcome) == [OUTCOME_UNKNOWN, "2"]


# Tools


class Mute(Exception):
    """Neither its text nor its repr can be had."""

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def test_what_cannot_be_written_as_text_does_not_end_the_run():
    def fails():
        raise Mute

    step = once(asks(("fails", "{}"), ("returns", "{}")))
    tools = {"fails": fails, "returns": Mute}
    outcome = run_bounded(step, Budget(), messages="Go", tools=tools)
    assert outcome.status == "completed"
    assert [record.status for record in outcome.tool_calls] == ["failed", "completed"]
    assert texts(outcome)[0].startswith("Error: Mute")


def test_a_tool_that_changes_its_arguments_does_not_change_the_history():
    step = once(asks(("f", {"items": [1]})))
    outcome = run_bounded(
        step, Budget(), messages="Go", tools={"f": lambda items: str(items.clear())}
    )
    call = outcome.messages[1]["tool_calls"][0]
    assert call["function"]["arguments"] == {"items": [1]}


@pytest.mark.slow
async def test_many_parallel_calls_cost_no_more_each():
    async def f(number):
        await asyncio.sleep(0)
        return str(number)

    clock = SystemClock()

    async def time_of(count):
        calls = [("f", f'{{"number": {number}}}') for number in range(count)]
        begun = clock.monotonic_ns()
        outcome = await run_bounded_async(
            once(asks(*calls)), Budget(), messages="Go", tools={"f": f}
        )
        assert outcome.usage.tool_calls == count
        return clock.monotonic_ns() - begun

    few = min([await time_of(200) for _ in range(3)])
    assert await time_of(4_000) < 20 * few * 4


def test_what_was_asked_for_and_not_started_when_the_run_was_interrupted_says_so():
    class Interrupted(MemoryStore):
        saves = 0

        def save(self, snapshot):
            super().save(snapshot)
            self.saves += 1
            if self.saves == 2:  # the reply is there, and its calls have not been admitted
                raise KeyboardInterrupt

    store = Interrupted()
    ran = []
    with pytest.raises(KeyboardInterrupt):
        run_bounded(
            once(asks(("a", "{}"))),
            Guard(Budget(), run_id="run"),
            messages="Go",
            tools={"a": lambda: ran.append("a")},
            store=store,
        )
    assert not ran
    assert store.load("run").messages[-1]["content"] == NOT_EXECUTED


# Replies


@pytest.mark.parametrize("calls", ["abc", [None], [3], {"a": 1}])
def test_calls_that_cannot_be_read_are_one_error(calls):
    guard = Guard(Budget())
    with pytest.raises(AdapterError, match="a step must return"):
        run_bounded(
            once({"choices": [{"message": {"content": None, "tool_calls": calls}}]}),
            guard,
            messages="Go",
        )
    assert guard.usage.failed_calls == 1


# Runs that share a guard


async def test_runs_that_share_a_guard_look_for_loops_each_by_itself():
    guard = Guard(Budget(max_iterations=100))

    async def run(number):
        return await run_bounded_async(
            once(asks(("schema", "{}"))),
            guard,
            messages=f"Question {number}",
            tools={"schema": lambda: "the same for all"},
        )

    outcomes = await asyncio.gather(*(run(number) for number in range(10)))
    assert {outcome.stop_reason for outcome in outcomes} == {StopReason.COMPLETED}
    assert len({outcome.run_id for outcome in outcomes}) == 10
    assert guard.usage.iterations == 20


async def test_a_loop_in_a_run_beside_another_ends_that_run_alone():
    guard = Guard(Budget(max_iterations=100, loop_detection=LoopDetection(stop_after=3)))
    with bounded(guard) as healthy:
        looping = run_bounded(
            lambda messages: asks(("f", "{}")), guard, messages="Go", tools={"f": lambda: "x"}
        )
        healthy.final = "Done."
    assert looping.stop_reason is StopReason.NO_PROGRESS
    assert looping.violations[0].limit == 3
    assert guard.trip is None
    assert healthy.outcome.status == "completed"
    assert guard.usage.iterations == looping.usage.iterations == 4


def test_runs_one_after_another_on_a_guard_forget_at_the_user_turn():
    guard = Guard(Budget(max_iterations=100))
    for number in range(8):
        outcome = run_bounded(
            once(asks(("account", "{}"))),
            guard,
            messages=f"Question {number}",
            tools={"account": lambda: "the same every time"},
        )
        assert outcome.status == "completed"
        assert outcome.run_id == guard.run_id
    assert guard.usage.iterations == 16


def test_a_function_guarded_by_a_guard_is_charged_to_the_sub_agent_that_calls_it():
    guard = Guard(Budget(max_tool_calls=10))
    search = guarded(guard)(lambda query: f"found {query}")
    child = guard.child(Budget(max_tool_calls=2))
    with bounded(child) as run:
        for number in range(5):
            search(number)
    assert run.outcome.stop_reason is StopReason.MAX_TOOL_CALLS
    assert guard.tool_counts == child.tool_counts == {"<lambda>": 2}
    assert search("once more") == "found once more"
    assert guard.usage.tool_calls == 3


def test_concurrent_runs_on_one_guard_have_checkpoints_of_their_own():
    store = MemoryStore()
    guard = Guard(Budget())
    barrier = threading.Barrier(2, timeout=60)
    ended = []

    def step(messages):
        barrier.wait()
        return f"answer to {messages[0]['content']}"

    def run(text):
        ended.append(run_bounded(step, guard, messages=text, store=store))

    threads = [threading.Thread(target=run, args=(text,)) for text in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in ended:
        saved = store.load(outcome.run_id)
        assert saved.messages[-1]["content"] == outcome.final


def test_a_run_that_spent_anothers_budget_does_not_go_on_without_one():
    store, ended = MemoryStore(), []
    guard = Guard(Budget(max_iterations=3))

    def killed(messages):
        raise KeyboardInterrupt

    with bounded(guard), pytest.raises(KeyboardInterrupt):
        run_bounded(killed, guard, messages="Go", store=store, on_outcome=ended.append)
    run_id = ended[0].run_id
    assert run_id != guard.run_id
    with pytest.raises(ConfigurationError, match="needs a budget to go on alone, got None"):
        run_bounded(once(), store=store, resume=run_id)
    outcome = run_bounded(once(), Budget(max_iterations=1), store=store, resume=run_id)
    assert outcome.final == "Done."


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"step": None}, "step must be a function that takes the messages, got NoneType."),
        ({"tools": [print]}, "tools must map names to functions, got list."),
        ({"tools": {"search": "x"}}, "tools must map names to functions, got str for 'search'."),
        ({"messages": None}, "messages must be a text or a list of messages, got NoneType."),
        ({"messages": 5}, "messages must be a text or a list of messages, got int."),
    ],
)
def test_what_a_loop_is_given_wrong_is_said_before_it_runs(wrong, said):
    given = {"step": lambda messages: "hi", "messages": "x", **wrong}
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        run_bounded(given.pop("step"), Budget(), **given)


async def test_a_step_that_is_left_behind_in_a_thread_keeps_to_the_caps():
    began, is_over, done = (threading.Event() for _ in range(3))
    made = []

    def asked(messages):
        made.append(1)
        return "More."

    def step(messages):
        began.set()
        is_over.wait(30)
        for _ in range(5):
            with suppress(BudgetExceeded):
                run_bounded(asked, messages="Go on.")
        done.set()
        return "Done."

    task = asyncio.create_task(run_bounded_async(step, Budget(max_model_calls=3)))
    assert await asyncio.to_thread(began.wait, 30)
    task.cancel()
    await asyncio.wait({task})
    is_over.set()
    assert await asyncio.to_thread(done.wait, 30)
    assert len(made) == 2
