"""What only the plain-loop adapter has; the contract itself is in tests/conformance."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import re
import threading
from contextlib import aclosing
from itertools import zip_longest
from types import SimpleNamespace

import pytest

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    MemoryStore,
    StopReason,
)
from budgetguard_core.kit import (
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    CheckpointError,
    TokenUsage,
    ToolCall,
)
from budgetguard_core.testing import ManualClock, check_history
from budgetguard_loop import (
    ModelReply,
    SyntheticMessage,
    ToolRefused,
    bounded,
    current_call,
    current_guard,
    guarded,
    run_bounded,
    run_bounded_async,
    run_bounded_stream,
)
from conformance.budgetguard_loop_driver import normal


def asks(*calls, usage=(100, 20)):
    """A completion that asks for tools: names, or (name, arguments) or (name, arguments, id)."""
    made = []
    for place, call in enumerate(calls):
        name, arguments, *id_ = (call, "{}") if isinstance(call, str) else call
        made.append(
            {
                "id": id_[0] if id_ else f"call_{next(NUMBERS)}_{place}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
    return completion({"role": "assistant", "content": None, "tool_calls": made}, usage)


def says(text, usage=(100, 20)):
    return completion({"role": "assistant", "content": text}, usage)


def completion(message, usage):
    response = {"choices": [{"message": message}], "model": "gpt-4o"}
    if usage is not None:
        response["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return response


NUMBERS = iter(range(10**9))


def scripted(*replies):
    """A step that gives these replies, the last one for ever; exceptions are raised."""
    sent = []

    def step(messages):
        sent.append(json.loads(json.dumps(messages)))
        reply = replies[min(len(sent) - 1, len(replies) - 1)]
        if isinstance(reply, Exception):
            raise reply
        return reply() if callable(reply) else reply

    step.sent = sent
    return step


def sticky(name="search"):
    return scripted(lambda: asks(name))


def results(outcome):
    return [m["content"] for m in outcome.messages if m["role"] == "tool"]


# What a model writes wrong


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("serch", "Error: there is no tool 'serch'. The tools are: search."),
        (("search", "{not json"), "Write the arguments as a JSON object."),
        (("search", "[1, 2]"), "the arguments are not a JSON object"),
        (("search", '{"wrong": 1}'), "Error: TypeError"),
        (("search", '{"query": "boom"}'), "Error: ValueError: boom"),
    ],
)
def test_a_call_that_cannot_be_made_is_an_error_result(call, result):
    def search(query=""):
        raise ValueError(query)

    step = scripted(asks(call), says("Sorry."))
    outcome = run_bounded(step, Budget(max_iterations=5), messages="Go", tools={"search": search})
    assert (outcome.status, outcome.final) == ("completed", "Sorry.")
    assert result in results(outcome)[0]
    assert step.sent[1][-1]["content"] == results(outcome)[0]
    assert [record.status for record in outcome.tool_calls] == ["failed"]


def test_a_call_without_a_body_is_no_tool_call_and_still_seen_as_a_loop():
    outcome = run_bounded(sticky("no_such_tool"), Budget(), messages="Go")
    assert outcome.stop_reason is StopReason.NO_PROGRESS
    assert outcome.usage.tool_calls == 0


def test_a_batch_ends_with_the_run_that_one_of_its_tools_aborts():
    guard = Guard(Budget())
    started = []
    tools = {"a": guard.abort, "b": lambda: started.append("b")}
    outcome = run_bounded(scripted(asks("a", "b")), guard, messages="Go", tools=tools)
    assert (outcome.stop_reason, started) == (StopReason.ABORTED, [])
    assert results(outcome) == ["null", NOT_EXECUTED]


def test_a_step_that_is_refused_by_its_own_layer_ends_the_run():
    guard = Guard(Budget(max_model_calls=2))

    @guarded(guard, kind="model")
    def ask(messages):
        return says("Not good enough.")

    def step(messages):
        while True:
            ask(messages)

    outcome = run_bounded(step, guard, messages="Go")
    assert outcome.stop_reason is StopReason.MAX_MODEL_CALLS
    assert outcome.usage.model_calls == 2


def test_an_interrupt_from_the_keyboard_is_saved_and_goes_on():
    store = MemoryStore()

    def interrupted():
        raise KeyboardInterrupt

    step = scripted(asks("a"))
    with pytest.raises(KeyboardInterrupt):
        run_bounded(
            step,
            Guard(Budget(), run_id="run"),
            messages="Go",
            tools={"a": interrupted},
            store=store,
        )
    saved = store.load("run")
    assert saved is not None
    assert tool_texts(saved.messages) == [OUTCOME_UNKNOWN]


def test_a_tool_may_return_anything():
    returned = {"text": "x", "data": {"a": [1]}, "none": None, "object": object()}
    step = scripted(asks(*returned), says("Done."))
    tools = {name: (lambda value=value: value) for name, value in returned.items()}
    outcome = run_bounded(step, Budget(), messages="Go", tools=tools)
    assert results(outcome)[:3] == ["x", '{"a": [1]}', "null"]
    assert outcome.status == "completed"


# What a step may return


class Dumped:
    """As the objects of the official clients."""

    def __init__(self, **fields):
        self.__dict__ |= fields

    def model_dump(self, *, mode="python", exclude_none=False):
        return {
            name: value.model_dump() if isinstance(value, Dumped) else value
            for name, value in vars(self).items()
            if value is not None or not exclude_none
        }


@pytest.mark.parametrize(
    "answer",
    [
        "Hello.",
        {"role": "assistant", "content": "Hello."},
        {"content": "Hello.", "refusal": None, "annotations": []},
        ModelReply(message={"content": "Hello."}, usage=TokenUsage(10, 5), model="gpt-4o"),
        says("Hello."),
        SimpleNamespace(
            choices=[
                SimpleNamespace(message=Dumped(role="assistant", content="Hello.", audio=None))
            ],
            usage=SimpleNamespace(prompt_tokens=10, completion_tokens=5),
            model="gpt-4o",
        ),
    ],
)
def test_a_step_may_return(answer):
    outcome = run_bounded(lambda messages: answer, Budget(), messages="Hi")
    assert outcome.messages == (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
    )
    assert outcome.usage.total_tokens > 0


@pytest.mark.parametrize("answer", [None, 7, {"type": "message", "content": []}])
def test_a_step_may_not_return(answer):
    guard = Guard(Budget())
    with pytest.raises(AdapterError, match="ModelReply"):
        run_bounded(lambda messages: answer, guard, messages="Hi")
    assert guard.usage.model_calls == 1


def test_a_reply_that_a_filter_has_emptied_is_an_empty_answer():
    usage = {"prompt_tokens": 30, "completion_tokens": 0, "total_tokens": 30}
    outcome = run_bounded(lambda messages: {"choices": [], "usage": usage}, messages="Hi")
    assert (outcome.status, outcome.final) == ("completed", "")
    assert outcome.usage.input_tokens == 30


def test_zero_usage_counts_as_missing():
    outcome = run_bounded(scripted(says("Hello.", usage=(0, 0))), Budget(), messages="Hi")
    assert outcome.usage.total_tokens > 0
    assert outcome.usage.estimated_calls == 1


# What a step is given


def test_a_step_gets_the_bounds_that_it_has_keywords_for():
    given = []

    def step(messages, *, max_output_tokens, seconds, temperature=0):
        given.append((max_output_tokens, seconds, temperature))
        return says("Done.")

    clock = ManualClock()
    guard = Guard(Budget(max_output_tokens_per_call=500, max_seconds=30), clock=clock)
    guard.start()
    clock.advance(10)
    run_bounded(step, guard, messages="Go")
    assert given == [(500, 20.0, 0)]


def test_a_tool_may_name_its_arguments_as_it_likes():
    step = scripted(asks(("grab", '{"frame": 1, "function": 2, "self": 3}')), says("Done."))
    tools = {"grab": lambda **given: given}

    outcome = run_bounded(step, Budget(), messages="Go", tools=tools)

    assert json.loads(outcome.messages[2]["content"]) == {"frame": 1, "function": 2, "self": 3}


def test_a_nudge_is_for_one_call_and_not_in_the_history():
    step = sticky()
    outcome = run_bounded(step, Budget(), messages="Go", tools={"search": lambda: "nothing"})
    nudged = [sent[-1]["content"] for sent in step.sent if sent[-1]["role"] == "user"]
    assert len(nudged) == 2
    assert "try another approach" in nudged[1]
    assert all(nudged[1] != message.get("content") for message in outcome.messages)


def test_a_tool_finds_its_call():
    found = []

    def search():
        call = current_call()
        found.append((call.call.name, call.idempotency_key, current_guard() is guard))
        return "x"

    guard = Guard(Budget())
    run_bounded(
        scripted(asks("search"), says("Done.")), guard, messages="Go", tools={"search": search}
    )
    ((name, key, same),) = found
    assert (name, len(key), same) == ("search", 32, True)
    assert current_call() is current_guard() is None


def test_the_callers_messages_are_left_alone():
    messages = [{"role": "user", "content": "Go"}]
    run_bounded(scripted(says("Done.")), Budget(), messages=messages)
    assert messages == [{"role": "user", "content": "Go"}]


def test_the_prompt_is_projected_from_what_the_provider_counted():
    # 100 + 20 were counted, so the second call is projected above 220 at the latest.
    outcome = run_bounded(
        sticky(), Budget(max_total_tokens=239), messages="Go", tools={"search": lambda: "x"}
    )
    assert outcome.stop_reason is StopReason.MAX_TOTAL_TOKENS
    assert outcome.usage.total_tokens == 120


# Errors and retries


def test_an_exception_of_the_step_comes_out_after_the_checkpoint():
    store = MemoryStore()
    guard = Guard(Budget(max_iterations=5), run_id="run")
    step = scripted(asks("search"), ConnectionError("down"))
    tools = {"search": lambda: "found"}
    with pytest.raises(ConnectionError, match="down"):
        run_bounded(step, guard, messages="Go", tools=tools, store=store)
    saved = store.load("run")
    assert saved is not None
    check_history(normal(saved.messages))
    assert saved.counters["failed_calls"] == 1
    started = []
    outcome = run_bounded(
        scripted(says("Done.")),
        messages=(),
        tools={"search": lambda: started.append("search")},
        store=store,
        resume="run",
    )
    assert (outcome.status, outcome.usage.model_calls, started) == ("completed", 3, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "tools", "sentence"),
    [
        (print, [print], "tools must map names to functions, got list."),
        (print, {"search": "search"}, "tools must map names to functions, got str for 'search'."),
        ("gpt-5", None, "step must be a function that takes the messages, got str."),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_run(step, tools, sentence):
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        run_bounded(step, Budget(), messages="Go.", tools=tools)


def test_other_arguments_that_make_no_sense():
    step = scripted(says("x"))
    with pytest.raises(ConfigurationError, match="on_trip must be"):
        run_bounded(step, Budget(), messages="Go", on_trip="ignore")
    with pytest.raises(ConfigurationError, match="budget must be a Budget, a Guard or an Envelope"):
        run_bounded(step, {"max_iterations": 3}, messages="Go")
    with pytest.raises(ConfigurationError, match="Pass the store"):
        run_bounded(step, Budget(), resume="run")
    with pytest.raises(CheckpointError, match="the store has no run 'run'"):
        run_bounded(step, Budget(), resume="run", store=MemoryStore())
    outcome = run_bounded(step, Budget(), messages="Go")
    with pytest.raises(ConfigurationError, match="needs a budget"):
        run_bounded(step, resume=outcome)

    async def search():
        return "x"

    with pytest.raises(AdapterError, match="got search"):
        run_bounded(step, Budget(), messages="Go", tools={"search": search})


# Resume


class Crashing(MemoryStore):
    """Keeps every snapshot, with what had been started when it was taken."""

    def __init__(self, work):
        super().__init__()
        self.work = work
        self.kept = []

    def save(self, snapshot):
        super().save(snapshot)
        self.kept.append((snapshot, list(self.work)))


def test_a_process_killed_between_any_two_saves_loses_nothing():
    work = []

    def tool(name):
        def call():
            work.append(name)
            return f"{name} is done"

        return call

    tools = {name: tool(name) for name in ("a", "b", "c")}
    replies = [asks("a", "b"), asks("c"), says("Done.")]

    def step(messages):
        work.append("model")
        return replies[sum(m["role"] == "assistant" for m in messages)]

    store = Crashing(work)
    run_bounded(step, Guard(Budget(), run_id="run"), messages="Go", tools=tools, store=store)
    whole = list(work)
    assert whole == ["model", "a", "b", "model", "c", "model"]
    # Every result is safe before anything else starts.
    assert {len(tool_texts(snapshot.messages)) for snapshot, _ in store.kept} == {0, 1, 2, 3}
    ends = [done for _, done in store.kept[1:]] + [whole]
    for (snapshot, _), started in zip(store.kept, ends, strict=True):
        # Killed just before the next save: everything in `started` may have happened.
        counters = snapshot.counters
        assert counters["model_calls"] >= started.count("model")
        assert counters["tool_calls"] >= len(started) - started.count("model")
        completed = {text.split()[0] for text in tool_texts(snapshot.messages)}
        work.clear()
        outcome = run_bounded(step, resume=snapshot, tools=tools)
        assert outcome.status == "completed"
        assert not completed & set(work)
        # What was in flight may have taken effect, so it does not run again by itself.
        flying = {one.call.name for one in snapshot.open_calls if isinstance(one.call, ToolCall)}
        assert not flying & set(work)
        assert results(outcome).count(OUTCOME_UNKNOWN) == len(flying)
        assert outcome.usage.model_calls >= 3
        assert outcome.usage.iterations == 3
        check_history(normal(outcome.messages))


def tool_texts(messages):
    return [m["content"] for m in messages if m["role"] == "tool"]


def test_calls_that_were_asked_for_and_never_started_run_after_a_resume():
    store = Crashing([])
    step = scripted(asks("a"), says("Done."))
    guard = Guard(Budget(), run_id="run")
    run_bounded(step, guard, messages="Go", tools={"a": lambda: "x"}, store=store)
    (asked,) = [
        snapshot
        for snapshot, _ in store.kept
        if snapshot.messages[-1].get("tool_calls") and not snapshot.open_calls
    ]
    started = []
    tools = {"a": lambda: started.append("a")}
    run_bounded(scripted(says("Done.")), resume=asked, tools=tools)
    assert started == ["a"]


def test_a_resume_without_a_budget_has_the_same_counters_and_trip():
    store = MemoryStore()
    facts = {"tools": {"search": lambda: str(next(NUMBERS))}, "store": store}
    first = run_bounded(sticky(), Budget(max_iterations=2), messages="Go", **facts)
    again = run_bounded(sticky(), resume=first.run_id, **facts)
    assert (again.stop_reason, again.usage.iterations) == (StopReason.MAX_ITERATIONS, 2)
    assert sum(isinstance(message, SyntheticMessage) for message in again.messages) == 1
    fresh = run_bounded(sticky(), Budget(max_iterations=3), resume=first.run_id, **facts)
    assert (fresh.usage.iterations, fresh.earlier_usage.iterations) == (3, 2)
    assert fresh.run_id == first.run_id


def test_a_resume_from_an_outcome_keeps_what_was_used():
    tools = {"search": lambda: str(next(NUMBERS))}
    first = run_bounded(sticky(), Budget(max_iterations=2), messages="Go", tools=tools)
    second = run_bounded(
        scripted(says("Done.")), Budget(max_iterations=2), messages="And now?", resume=first
    )
    assert second.status == "completed"
    assert second.usage.iterations == 1
    assert second.earlier_usage.total_tokens == first.usage.total_tokens
    assert [m["role"] for m in second.messages[-3:]] == ["assistant", "user", "assistant"]


def test_a_finished_run_is_not_run_again():
    store = MemoryStore()
    first = run_bounded(scripted(says("Done.")), Budget(), messages="Go", store=store)
    step = scripted(says("Again?"))
    again = run_bounded(step, Budget(), resume=first.run_id, store=store)
    assert (again.final, step.sent) == ("Done.", [])


def test_new_input_closes_what_was_open():
    store = Crashing([])
    guard = Guard(Budget(), run_id="run")
    step = scripted(asks("a", "b"), says("Done."))
    tools = {"a": lambda: "from a", "b": lambda: "from b"}
    run_bounded(step, guard, messages="Go", tools=tools, store=store)
    for snapshot, _ in store.kept[1:]:
        step = scripted(says("Yes?"))
        outcome = run_bounded(step, Budget(), messages="Stop.", resume=snapshot)
        assert outcome.status == "completed"
        check_history(normal(outcome.messages))


def test_the_marker_survives_the_store_and_is_never_sent():
    store = MemoryStore()
    tools = {"search": lambda: str(next(NUMBERS))}
    first = run_bounded(sticky(), Budget(max_iterations=1), messages="Go", tools=tools, store=store)
    step = scripted(says("Fine."))
    second = run_bounded(
        step, Budget(), messages="Well?", resume=first.run_id, store=store, tools=tools
    )
    (end,) = [m for m in second.messages if isinstance(m, SyntheticMessage)]
    assert end.metadata["stop_reason"] == "max_iterations"
    assert set(end) == {"role", "content"}
    assert all(set(m) <= {"role", "content", "tool_calls", "tool_call_id"} for m in step.sent[0])


# Runs inside runs


def test_a_trip_raised_in_a_tool_tells_the_model_nothing_of_the_budget():
    def research():
        budget = Budget(max_iterations=1)
        run_bounded(sticky(), budget, messages="Look", tools=tools, on_trip="raise")

    tools = {"search": lambda: "x", "research": research}
    step = scripted(asks("research"), says("Done."))
    run_bounded(step, Budget(), messages="Go", tools=tools)
    assert "max_iterations" not in json.dumps(step.sent[1])


def test_the_work_of_a_run_inside_is_in_the_checkpoint_of_the_run_around_it():
    work = []
    store = Crashing(work)

    def search():
        work.append("tool")
        return str(next(NUMBERS))

    def inner(messages):
        work.append("model")
        return asks("search")

    def research():
        return run_bounded(inner, Budget(max_iterations=2), messages="Look", tools=tools)

    tools = {"search": search, "research": research}
    guard = Guard(Budget(), run_id="run")
    step = scripted(asks("research"), says("Done."))
    run_bounded(step, guard, messages="Go", tools=tools, store=store)
    ends = [done for _, done in store.kept[1:]] + [list(work)]
    for (snapshot, _), started in zip(store.kept, ends, strict=True):
        assert snapshot.counters["model_calls"] >= started.count("model")
        assert snapshot.counters["tool_calls"] >= started.count("tool")


# Async


async def test_the_tools_of_one_reply_run_at_the_same_time_and_sync_ones_in_threads():
    met = threading.Barrier(3)
    loop_thread = threading.get_ident()
    threads = []

    def blocking():
        threads.append(threading.get_ident())
        met.wait(60)
        return "x"

    async def waiting():
        await asyncio.to_thread(met.wait, 60)
        return "y"

    outcome = await run_bounded_async(
        scripted(asks("blocking", "waiting", "blocking"), says("Done.")),
        Budget(),
        messages="Go",
        tools={"blocking": blocking, "waiting": waiting},
    )
    assert results(outcome) == ["x", "y", "x"]
    assert loop_thread not in threads


async def test_cancelling_the_task_closes_the_run_and_leaves_nothing():
    store = MemoryStore()
    started = asyncio.Event()
    ended = []

    async def search():
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("search")

    guard = Guard(Budget(), run_id="run")
    before = asyncio.all_tasks()
    task = asyncio.create_task(
        run_bounded_async(
            scripted(asks("search", "search")),
            guard,
            messages="Go",
            tools={"search": search},
            store=store,
        )
    )
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["search", "search"]
    assert asyncio.all_tasks() == before
    saved = store.load("run")
    assert saved is not None
    assert tool_texts(saved.messages) == [OUTCOME_UNKNOWN, OUTCOME_UNKNOWN]


async def test_work_that_does_not_listen_is_left_behind_after_the_grace(monkeypatch):
    monkeypatch.setattr("budgetguard_core.kit.cancel.UNCANCELLABLE", 0.1)
    free = asyncio.Event()

    async def deaf(*_):
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue
        return "x"

    for step, tools in ((deaf, {}), (scripted(asks("deaf")), {"deaf": deaf})):
        outcome = await run_bounded_async(step, Budget(max_seconds=1), messages="Go", tools=tools)
        assert outcome.stop_reason is StopReason.MAX_SECONDS
        check_history(normal(outcome.messages))
    free.set()
    await asyncio.sleep(0)


async def test_a_result_that_comes_while_the_run_is_cut_is_kept():
    async def stubborn():
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return "saved at the last moment"

    outcome = await run_bounded_async(
        scripted(asks("stubborn", "stubborn")),
        Budget(max_seconds=1),
        messages="Go",
        tools={"stubborn": stubborn},
    )
    assert outcome.stop_reason is StopReason.MAX_SECONDS
    assert results(outcome) == ["saved at the last moment"] * 2


async def test_a_tool_that_is_cancelled_from_its_own_side_has_failed():
    async def search():
        raise asyncio.CancelledError

    outcome = await run_bounded_async(
        scripted(asks("search"), says("Done.")), Budget(), messages="Go", tools={"search": search}
    )
    assert (outcome.status, results(outcome)) == ("completed", ["Error: RuntimeError: cancelled"])


async def test_a_deadline_that_is_extended_in_time_cuts_nothing():
    guard = Guard(
        Budget(max_seconds=0.3), on_warning=lambda guard, event: guard.extend(max_seconds=60)
    )

    async def search():
        await asyncio.sleep(0.25)
        return "late"

    step = scripted(asks("search"), asks("search"), says("Done."))
    outcome = await run_bounded_async(step, guard, messages="Go", tools={"search": search})
    assert (outcome.status, results(outcome)) == ("completed", ["late", "late"])


async def test_64_parallel_calls_and_a_large_result():
    tools = {"big": lambda: "x" * 5_000_000, "small": lambda: "y"}
    step = scripted(asks("big", *["small"] * 63), says("Done."))
    outcome = await run_bounded_async(step, Budget(max_tool_calls=60), messages="Go", tools=tools)
    assert outcome.stop_reason is StopReason.MAX_TOOL_CALLS
    assert results(outcome)[60:] == [NOT_EXECUTED] * 4
    assert len(results(outcome)[0]) == 5_000_000


# Streams


def chunk(**delta):
    return {"choices": [{"delta": delta}], "model": "gpt-4o"}


def streaming(*replies, closed=None):
    """An async step that streams these lists of chunks, the last one for ever."""
    sent = []

    async def step(messages):
        sent.append(messages)
        try:
            for item in replies[min(len(sent), len(replies)) - 1]:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    await asyncio.get_running_loop().create_future()
                await asyncio.sleep(0)
                yield item
        finally:
            if closed is not None:
                closed.append(len(sent))

    step.sent = sent
    return step


async def read(stream, limit=None):
    chunks = []
    async for item in stream:
        chunks.append(item)
        if len(chunks) == limit:
            break
    return chunks


async def test_a_streamed_reply_is_put_together():
    def piece(index, arguments, **start):
        return chunk(tool_calls=[{"index": index, "function": {"arguments": arguments}, **start}])

    first = [
        chunk(role="assistant", content=""),
        {
            "choices": [
                {"delta": {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "add"}}]}}
            ]
        },
        piece(0, '{"a": 1,'),
        piece(0, ' "b": 2}'),
        {"choices": [], "usage": {"prompt_tokens": 50, "completion_tokens": 9}},
    ]
    step = streaming(first, [chunk(content="It is "), chunk(content="3."), "!"])
    stream = run_bounded_stream(
        step, Budget(), messages="1 + 2?", tools={"add": lambda a, b: a + b}
    )
    assert len(await read(stream)) == 8
    assert stream.outcome.final == "It is 3.!"
    assert results(stream.outcome) == ["3"]
    assert stream.outcome.usage.estimated_calls == 1


async def bodies_of(calls):
    bodies = []
    stream = run_bounded_stream(
        streaming(calls, ["Done."]),
        Budget(max_tool_calls=2),
        messages="Hi",
        tools={"f": lambda a: bodies.append(a)},
    )
    await read(stream)
    return bodies, stream.outcome


async def test_pieces_of_one_call_are_one_call_though_each_has_an_id_of_its_own():
    """As some servers make them up for each chunk."""
    pieces = [{"name": "f", "arguments": '{"a"'}, {"arguments": ": "}, {"arguments": "7}"}]
    called = [
        chunk(tool_calls=[{"index": 0, "id": f"c{place}", "function": piece}])
        for place, piece in enumerate(pieces)
    ]
    bodies, outcome = await bodies_of(called)
    assert (bodies, outcome.status) == ([7], "completed")


async def test_streamed_calls_with_one_index_are_told_apart_by_their_ids():
    """As servers send them that translate other formats."""
    calls = [
        chunk(
            tool_calls=[{"index": 0, "id": f"c{n}", "function": {"name": "f", "arguments": part}}]
        )
        for n in range(3)
        for part in ('{"a": ', f"{n}}}")
    ]
    for call in calls[1::2]:
        call["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] = None
    bodies, outcome = await bodies_of(calls)
    assert bodies == [0, 1]
    assert outcome.stop_reason is StopReason.MAX_TOOL_CALLS


class Piece(str):
    """A piece of text that knows how much text it was added to, if it was."""

    __slots__ = ()
    behind = 0

    def __radd__(self, text):
        Piece.behind += len(text)
        return str(text) + str(self)


async def test_what_a_stream_has_said_is_not_copied_at_every_chunk(monkeypatch):
    monkeypatch.setattr(Piece, "behind", 0)
    pieces = [Piece("word ")] * 100
    stream = run_bounded_stream(streaming(pieces), Budget(), messages="Hi")
    await read(stream)
    assert stream.outcome.final == "word " * 100
    for kind in ("model", "tool"):
        assert [*guarded(Guard(Budget()), kind=kind)(lambda: (yield from pieces))()] == pieces
    arguments = [Piece(text) for text in ('{"a": "', *["word "] * 100, '"}')]
    called = [
        chunk(tool_calls=[{"index": 0, "id": "c1", "function": {"name": name, "arguments": piece}}])
        for name, piece in zip_longest(["note"], arguments, fillvalue="")
    ]
    stream = run_bounded_stream(
        streaming(called, ["Done."]), Budget(), messages="Hi", tools={"note": len_of}
    )
    await read(stream)
    assert results(stream.outcome) == ["500"]
    assert Piece.behind == 0


def len_of(a):
    return len(a)


async def test_a_stream_can_be_read_once():
    stream = run_bounded_stream(streaming(["Hi."]), Budget(), messages="Hi")
    assert await read(stream) == ["Hi."]
    with pytest.raises(AdapterError, match="can be read once"):
        await read(stream)


async def test_a_stream_that_hangs_in_the_middle_keeps_what_was_said():
    closed = []
    stream = run_bounded_stream(
        streaming(["The answer ", "may be ", None], closed=closed),
        Budget(max_seconds=1),
        messages="Hi",
    )
    chunks = await read(stream)
    assert stream.outcome.stop_reason is StopReason.MAX_SECONDS
    assert stream.outcome.final.startswith("The answer may be \n\nThis run was stopped")
    assert chunks[-1] is stream.outcome.messages[-1]
    assert closed == [1]
    assert stream.outcome.usage.output_tokens > 0


async def test_leaving_a_stream_closes_the_providers_and_saves_the_run():
    closed = []
    store = MemoryStore()
    guard = Guard(Budget(), run_id="run")
    stream = run_bounded_stream(
        streaming(["a ", "b ", "c"], closed=closed), guard, messages="Hi", store=store
    )
    async with aclosing(aiter(stream)) as chunks:
        async for item in chunks:
            assert item == "a "
            break
    assert closed == [1]
    assert guard.open_calls() == ()
    assert stream.outcome.status == "failed"
    saved = store.load("run")
    assert saved is not None
    assert saved.counters["failed_calls"] == 1
    assert saved.counters["tokens"] > 0


async def test_a_step_that_does_not_stream_is_one_chunk():
    reply = says("Hi.")
    stream = run_bounded_stream(scripted(reply), Budget(), messages="Hi")
    assert await read(stream) == [reply]
    assert stream.outcome.final == "Hi."


async def test_a_stopped_stream_raises_where_that_was_asked_for():
    stream = run_bounded_stream(
        streaming([asks("a")]), Budget(max_tool_calls=1), messages="Hi", on_trip="raise",
        tools={"a": lambda: str(next(NUMBERS))},
    )  # fmt: skip
    with pytest.raises(BudgetExceeded) as caught:
        await read(stream)
    assert caught.value.outcome is stream.outcome


# `bounded`


def test_a_block_ends_with_what_it_was_given():
    messages = [{"role": "user", "content": "Go"}]
    with bounded(Budget(max_iterations=2), messages=messages) as run:
        while True:
            with run.model_call("gpt-4o") as call:
                reply = asks("search")
                call.settle(reply)
            messages.append(reply["choices"][0]["message"])
            for wanted in run.tool_calls(messages[-1]["tool_calls"]):
                with wanted:
                    wanted.settle("x")
                messages.append(
                    {"role": "tool", "tool_call_id": wanted.id, "content": str(next(NUMBERS))}
                )
    assert run.outcome.stop_reason is StopReason.MAX_ITERATIONS
    assert run.messages is messages
    assert messages[-1]["content"] == run.outcome.final
    assert run.outcome.usage.total_tokens == 240


def test_a_block_that_fails_is_saved_and_fails():
    store = MemoryStore()
    guard = Guard(Budget(), run_id="run")
    messages = [{"role": "user", "content": "Go"}]
    block = bounded(guard, messages=messages, store=store)

    def fail():
        with block as run:
            messages.append(asks("a", "b")["choices"][0]["message"])
            first, _ = run.tool_calls(messages[-1]["tool_calls"])
            with first:
                raise KeyError("a")

    with pytest.raises(KeyError):
        fail()
    saved = store.load("run")
    assert saved is not None
    assert len(tool_texts(saved.messages)) == 2
    assert block.outcome.status == "failed"
    assert [r.status for r in guard.tool_calls] == ["failed", "interrupted"]


def test_a_block_swallows_its_own_trip_only():
    inner = bounded(Guard(Budget(max_iterations=1)), on_trip="raise")

    def nested():
        with bounded(Budget(max_iterations=5)), inner:
            for _ in range(2):
                with inner.model_call():
                    pass

    with pytest.raises(BudgetExceeded):
        nested()
    assert inner.outcome.stop_reason is StopReason.MAX_ITERATIONS


def test_a_block_that_ended_by_itself_is_completed():
    with bounded(Budget(max_iterations=5)) as run:
        with run.model_call(input_tokens=10) as call:
            call.settle(TokenUsage(10, 5))
        run.final = {"answer": 42}
    assert (run.outcome.status, run.outcome.final) == ("completed", {"answer": 42})


def test_a_call_that_is_not_settled_keeps_its_reservation():
    with bounded(Budget(max_output_tokens_per_call=50)) as run, run.model_call(input_tokens=100):
        pass
    assert run.outcome.usage.total_tokens == 150
    assert run.outcome.usage.estimated_calls == 1


def test_a_refused_call_cannot_be_entered():
    with bounded(Budget(tool_quotas={"search": 1})) as run:
        allowed, refused = run.tool_calls(
            [
                {"type": "tool_use", "id": "1", "name": "search", "input": {"q": "x"}},
                {"type": "tool_use", "id": "2", "name": "search", "input": {"q": "y"}},
            ]
        )
        assert (allowed.arguments, allowed.refusal) == ({"q": "x"}, None)
        assert refused.refusal
        with pytest.raises(AdapterError, match="a refused call must not start"), refused:
            pass


async def test_a_block_is_cut_on_the_event_loop_and_foreign_cancellation_is_left_alone():
    forever = asyncio.get_running_loop().create_future()
    with bounded(Budget(max_seconds=1)) as run:
        run.guard.start()
        with run.model_call():
            await forever
    assert run.outcome.stop_reason is StopReason.MAX_SECONDS
    assert asyncio.current_task().cancelling() == 0

    async def inside():
        with bounded(Budget(max_seconds=60)) as run, run.model_call():
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(inside())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_from_outside_wins_over_the_blocks_own():
    guard = Guard(Budget())

    async def inside():
        with bounded(guard) as run, run.model_call():
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(inside())
    await asyncio.sleep(0)
    guard.abort()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_messages_of_the_sdk_may_be_appended_as_they_are():
    messages = [Dumped(role="user", content="Go", name=None)]
    with bounded(Budget(max_iterations=1), messages=messages) as run:
        for _ in range(2):
            with run.model_call() as call:
                assert all(type(message) is dict for message in call.messages)
            messages.append(Dumped(**asks("a", "b")["choices"][0]["message"]))
            run.tool_calls(messages[-1].tool_calls)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    with pytest.raises(ConfigurationError, match="messages must be mappings"):
        run_bounded(scripted(says("x")), Budget(), messages=[7])


# `guarded`


def test_each_call_of_a_guarded_function_is_admitted():
    guard = Guard(Budget(max_tool_calls=3, tool_quotas={"once": 1}))
    search = guarded(guard)(lambda query: f"found {query}")
    once = guarded(guard, name="once")(lambda: "x")
    assert (search("a"), once()) == ("found a", "x")
    with pytest.raises(ToolRefused, match="cannot be used any more") as caught:
        once()
    assert caught.value.trip.reason is StopReason.TOOL_QUOTA
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.trip) == (str(caught.value), caught.value.trip)
    assert search("b") == "found b"
    with pytest.raises(BudgetExceeded) as caught:
        search("c")
    assert caught.value.trip.reason is StopReason.MAX_TOOL_CALLS
    assert [record.status for record in guard.tool_calls][:2] == ["completed", "completed"]


def test_a_guarded_function_without_a_budget_belongs_to_the_run_around_it():
    @guarded()
    def search(query):
        """Search."""
        return query

    assert (search.__name__, search.__doc__) == ("search", "Search.")
    with pytest.raises(AdapterError, match="search is guarded by the run that calls it"):
        search("x")
    with bounded(Budget()) as run:
        search("x")
    assert run.outcome.usage.tool_calls == 1


def test_a_guarded_function_with_a_budget_has_it_within_each_run():
    search = guarded(Budget(max_tool_calls=1))(lambda: "x")
    for _ in range(2):
        with bounded(Budget()) as run:
            search()
            with pytest.raises(BudgetExceeded):
                search()
        assert run.outcome.status == "completed"
        assert run.outcome.usage.tool_calls == 1
    search()
    with pytest.raises(BudgetExceeded):
        search()


@pytest.mark.parametrize("caps", [{"max_tool_calls": 2}, {"tool_quotas": {"t": 2}}])
@pytest.mark.parametrize("make", [Budget, lambda **caps: Guard(Budget(**caps))])
def test_a_guarded_tool_of_a_run_keeps_to_its_own_budget(make, caps):
    started = []
    tool = guarded(make(**caps), name="t")(lambda x: started.append(x) or f"result {x}")
    step = scripted(*(asks(("t", {"x": number})) for number in range(5)), says("done"))
    outcome = run_bounded(step, Budget(), messages="Hi", tools={"t": tool})
    assert (outcome.status, started) == ("completed", [0, 1])
    refused = "This sub-task was stopped before it finished."
    assert results(outcome) == ["result 0", "result 1", refused, refused, refused]
    # A call that one of its budgets refuses has no place in the others either.
    assert outcome.usage.tool_calls == 2


def test_what_a_tool_did_before_its_guarded_part_was_refused_is_counted():
    inner = guarded(Budget(max_tool_calls=1), name="t")(lambda x: f"result {x}")
    started = []

    def tool(x):
        started.append(x)
        return inner(x)

    step = scripted(*(asks(("t", {"x": number})) for number in range(9)), says("done"))
    outcome = run_bounded(step, Budget(max_tool_calls=3), messages="Hi", tools={"t": tool})
    assert (outcome.stop_reason, started) == (StopReason.MAX_TOOL_CALLS, [0, 1, 2])


def test_a_guarded_step_keeps_to_its_own_budget():
    step = scripted(*(asks(("t", {"x": number})) for number in range(5)), says("done"))
    guard = Guard(Budget())
    own = guarded(Budget(max_model_calls=2), kind="model")(step)
    with pytest.raises(BudgetExceeded, match="max_model_calls=2"):
        run_bounded(own, guard, messages="Hi", tools={"t": lambda x: x})
    assert len(step.sent) == 2


def test_a_guarded_function_of_a_run_is_in_the_log_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("BUDGETGUARD_LOG", str(tmp_path))
    ask = guarded(Budget(max_model_calls=5), kind="model")(lambda: says("x"))
    with bounded(Budget(loop_detection=None)):
        for _ in range(5):
            ask()
        with pytest.raises(BudgetExceeded):
            ask()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_guarded_model_is_charged_from_its_response_or_an_estimate():
    guard = Guard(Budget())
    guarded(guard, kind="model")(lambda: says("x", usage=(40, 2)))()
    assert guard.usage.total_tokens == 42
    guarded(guard, kind="model")(lambda prompt: "y" * 30)("z" * 300)
    assert guard.usage.input_tokens >= 120
    assert guard.usage.estimated_calls == 1
    with pytest.raises(ValueError, match="down"):
        guarded(guard, kind="model")(failing)()
    assert guard.usage.failed_calls == 1
    assert guard.open_calls() == ()


def failing():
    raise ValueError("down")


async def test_guarded_generators_are_one_call_each():
    guard = Guard(Budget())

    @guarded(guard, kind="model")
    def pieces(*, max_output_tokens):
        yield "a"
        assert current_call() is not None
        yield {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}

    @guarded(guard, kind="model")
    async def pieces_async():
        yield "a"
        yield "b"

    assert len(list(pieces())) == 2
    assert guard.usage.total_tokens == 10
    assert [piece async for piece in pieces_async()] == ["a", "b"]
    assert guard.usage.estimated_calls == 1
    for piece in pieces():
        assert piece == "a"
        break
    gc.collect()
    async with aclosing(pieces_async()) as left:
        assert await anext(left) == "a"
    assert guard.open_calls() == ()
    assert guard.usage.model_calls == 4
    assert current_call() is None


async def test_a_guarded_coroutine_is_cut():
    guard = Guard(Budget(max_seconds=1))

    @guarded(guard)
    async def search():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(BudgetExceeded) as caught:
        await search()
    assert caught.value.trip.reason is StopReason.MAX_SECONDS
    assert [record.status for record in guard.tool_calls] == ["interrupted"]


def test_a_step_that_tries_again_by_itself_is_charged_for_each_attempt():
    attempts = []

    @guarded(kind="model")
    def ask(messages):
        attempts.append(1)
        if len(attempts) == 1:
            raise ConnectionError
        return says("Done.")

    def step(messages):
        try:
            return ask(messages)
        except ConnectionError:
            return ask(messages)

    outcome = run_bounded(step, Budget(), messages="Go")
    assert (outcome.usage.model_calls, outcome.usage.iterations) == (2, 1)


def test_two_loops_on_one_guard_that_repeat_each_others_words_are_one_row():
    guard = Guard(Budget(max_iterations=200))
    texts = (
        "Please look at the figures once more and tell me whether they are right.",
        "I have looked at the figures once more, please tell me what to do next.",
    )
    said, calls = "Begin.", 0
    for number in range(100):
        answer = {"role": "assistant", "content": texts[number % 2]}
        calls += 1
        outcome = run_bounded(lambda _, reply=answer: reply, guard, messages=said)
        if outcome.status == "terminated":
            break
        said = outcome.final
    assert (outcome.stop_reason, calls) == ("oscillation", 7)
    # What the user asks again is no repetition.
    guard = Guard(Budget(max_iterations=200))
    for _ in range(20):
        outcome = run_bounded(lambda _: answer, guard, messages="And the next one?")
        assert outcome.status == "completed"


def test_one_word_about_one_document_after_the_other_is_no_repetition():
    answer = {"role": "assistant", "content": "yes"}

    @guarded(Guard(Budget(max_model_calls=50)), kind="model")
    def ask(messages):
        return answer

    for number in range(30):
        ask([{"role": "user", "content": f"Is document {number} about money?"}])
    with bounded(Budget(max_model_calls=50)) as run:
        for _ in range(30):
            with run.model_call(input_tokens=9) as call:
                call.settle(answer)
    assert run.outcome.status == "completed"


def test_one_word_again_and_again_in_a_conversation_is_a_repetition():
    messages = [{"role": "user", "content": "Go on."}]

    @guarded(Guard(Budget(max_model_calls=50)), kind="model")
    def ask(messages):
        return {"role": "assistant", "content": "yes"}

    def talk():
        for _ in range(50):
            messages.append(ask(messages))

    with pytest.raises(BudgetExceeded, match="no_progress"):
        talk()
