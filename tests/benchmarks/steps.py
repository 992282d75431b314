"""The steps that are measured: the same work bare, and with what the library does around it."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.arms import Arms, Row, Step
from budgetguard_core import Budget, Guard, JsonLinesSink, SqliteStore
from budgetguard_core.breakers import (
    BulkheadConfig,
    CircuitBreakerConfig,
    ProgressReports,
    RateLimit,
    ToolMix,
    ToolMixBaseline,
    VelocityLimits,
)
from budgetguard_core.kit import Envelope, ModelCall, TokenUsage, ToolCall
from budgetguard_loop import bounded, run_bounded

CAPS: dict[str, Any] = {
    "max_iterations": 10**9,
    "max_model_calls": 10**9,
    "max_tool_calls": 10**9,
    "max_total_tokens": 10**15,
    "max_seconds": 10**6,
    "max_cost_usd": 10**9,
    "tool_quotas": {"read_*": 10**9, "*": 10**9},
    "max_output_tokens_per_call": 4096,
}
EVERYTHING = Budget(**CAPS)

BREAKERS: dict[str, dict[str, Any]] = {
    "progress": {"progress": ProgressReports(every_iterations=10**6)},
    "velocity": {
        "velocity": VelocityLimits(
            max_tokens_per_minute=10**15,
            max_cost_usd_per_minute=10**9,
            max_tool_calls_per_minute=10**12,
        )
    },
    "tool mix": {
        "tool_mix": ToolMix(baseline=ToolMixBaseline.of([{"read_file": 30, "search": 10}] * 20))
    },
    "rate limits": {"rate_limits": {"*": RateLimit(rate=1_000_000, burst=1_000_000)}},
    "bulkheads": {"bulkheads": {"*": BulkheadConfig(max_concurrent_calls=10)}},
    "circuit breaker": {"circuit_breaker": CircuitBreakerConfig()},
}


class Call:
    __slots__ = ("arguments", "id", "name")

    def __init__(self, id_, name, arguments):
        self.id = id_
        self.name = name
        self.arguments = arguments


class Response:
    __slots__ = ("id", "model", "text", "tool_calls", "usage")

    def __init__(self, id_, model, text, tool_calls, usage):
        self.id = id_
        self.model = model
        self.text = text
        self.tool_calls = tool_calls
        self.usage = usage


def flat(number: int) -> dict[str, Any]:
    return {"path": "/srv/data/file.txt", "limit": number}


def nested(number: int) -> dict[str, Any]:
    return {
        "query": {"text": "annual report", "fields": ["title", "body"], "exact": True},
        "page": {"offset": number, "limit": 20},
        "threshold": 0.75,
        "cursor": None,
    }


class Steps:
    """A model call and a tool call; never the same one twice."""

    def __init__(
        self,
        guard: Guard | None = None,
        *,
        arguments: Callable[[int], dict[str, Any]] = flat,
        filler: str = " of the file",
        names: int = 1,
    ) -> None:
        self.number = 0
        self.guard = guard or Guard(EVERYTHING, sinks=None)
        self.arguments = arguments
        self.filler = filler
        self.names = [f"read_{number}" for number in range(names)]

    def bare(self):
        self.number = number = self.number + 1
        arguments = self.arguments(number)
        call = Call("call_1", self.names[number % len(self.names)], arguments)
        response = Response("resp_1", "gpt-4o", "", [call], TokenUsage(1200, 85, 1000))
        return response, call, f"line {number}{self.filler}"

    def guarded(self):
        guard = self.guard
        ticket = guard.admit_model_call(ModelCall(model="gpt-4o", input_tokens=1200))
        response, call, result = self.bare()
        guard.settle_model_call(ticket, response.usage)
        tools = guard.admit_tool_calls(
            [ToolCall(name=call.name, arguments=call.arguments, id=call.id)]
        )
        guard.settle_tool_call(tools[0], result)


def step(budget: Budget = EVERYTHING, **options: Any) -> Callable[[ExitStack], Arms]:
    """The guarded step beside the same step bare."""

    def make(_: ExitStack) -> Arms:
        steps = Steps(Guard(budget, sinks=None), **options)
        return steps.bare, steps.guarded

    return make


def beside_a_plain_one(subject: Callable[[], Step]) -> Callable[[ExitStack], Arms]:
    """A guarded step beside a guarded step that has nothing special."""
    return lambda _: (Steps().guarded, subject())


def aged(steps: int) -> Step:
    old = Steps()
    for _ in range(steps):
        old.guarded()
    return old.guarded


def below(levels: int) -> Step:
    guard = Guard(EVERYTHING, sinks=None)
    for _ in range(levels):
        guard = guard.child(EVERYTHING)
    return Steps(guard).guarded


def of_many_names() -> Step:
    steps = Steps(names=2000)
    for _ in range(2000):
        steps.guarded()
    return steps.guarded


def of_many_names_and_quotas() -> Step:
    quotas = {f"read_{number}?": 10**9 for number in range(199)} | {"*": 10**9}
    guard = Guard(Budget(**{**CAPS, "tool_quotas": quotas}), sinks=None)
    steps = Steps(guard, names=2000)
    for _ in range(2000):
        steps.guarded()
    return steps.guarded


# Sinks


def listened(_: ExitStack) -> Arms:
    steps = Steps(Guard(EVERYTHING, sinks=[lambda event: event.event]))
    return steps.bare, steps.guarded


def logged(stack: ExitStack) -> Arms:
    folder = Path(stack.enter_context(TemporaryDirectory()))
    sink = stack.enter_context(JsonLinesSink(folder / "run.jsonl"))
    steps = Steps(Guard(EVERYTHING, sinks=[sink]))
    return steps.bare, steps.guarded


def checkpointed(stack: ExitStack) -> Arms:
    """A checkpoint for each step beside a bare row of the same file system."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    store = stack.enter_context(closing(SqliteStore(folder / "store.sqlite3")))
    run = Envelope(budget=EVERYTHING, store=store).open()
    db = stack.enter_context(closing(sqlite3.connect(folder / "bare", isolation_level=None)))
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE rows(name TEXT PRIMARY KEY, text TEXT)")
    steps = Steps(run.guard)

    def bare() -> None:
        steps.guarded()
        db.execute("INSERT OR REPLACE INTO rows VALUES ('r', ?)", ("x" * 6000,))

    def saved() -> None:
        steps.guarded()
        run.save()

    return bare, saved


# Threads

THREADS, TIMES = 64, 50


class Threads:
    """Threads that do the same at the same time, again and again."""

    def __init__(self, stack: ExitStack) -> None:
        self._barrier = threading.Barrier(THREADS + 1)
        self._act: Step | None = None
        self._threads = [threading.Thread(target=self._work) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()
        stack.callback(self._end)

    def all_do(self, act: Step | None) -> None:
        self._act = act
        self._barrier.wait()
        if act is not None:
            self._barrier.wait()

    def _work(self) -> None:
        while True:
            self._barrier.wait()
            act = self._act
            if act is None:
                return
            for _ in range(TIMES):
                act()
            self._barrier.wait()

    def _end(self) -> None:
        self.all_do(None)
        for thread in self._threads:
            thread.join()


def threaded(stack: ExitStack) -> Arms:
    """A model call of a guard that 64 threads share, beside two turns at a lock they share."""
    threads = Threads(stack)
    lock, counted = threading.RLock(), [0]
    guard = Guard(EVERYTHING, sinks=None)

    def bare() -> None:
        for _ in range(2):
            with lock:
                counted[0] += 1

    def guarded() -> None:
        ticket = guard.admit_model_call(ModelCall(model="gpt-4o", input_tokens=1200))
        guard.settle_model_call(ticket, TokenUsage(1200, 85, 1000))

    return lambda: threads.all_do(bare), lambda: threads.all_do(guarded)


# The loop adapter


class Completions:
    """A chat completion with one tool call, as a client returns it, and the tool."""

    def __init__(self) -> None:
        self.number = 0

    def completion(self, last: int | None = None) -> dict[str, Any]:
        self.number = number = self.number + 1
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if number != last:
            arguments = json.dumps(flat(number))
            function = {"name": "read_file", "arguments": arguments}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {
            "id": "resp_1",
            "model": "gpt-4o",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1200, "completion_tokens": 85, "total_tokens": 1285},
        }

    @staticmethod
    def read_file(path: str, limit: int) -> str:
        return f"line {limit} of {path}"

    def step(self) -> str:
        response = self.completion()
        result = ""
        for call in response["choices"][0]["message"]["tool_calls"]:
            result = self.read_file(**json.loads(call["function"]["arguments"]))
        return result


def in_a_block(stack: ExitStack) -> Arms:
    work = Completions()
    run = stack.enter_context(bounded(EVERYTHING))

    def guarded() -> str:
        with run.model_call("gpt-4o", input_tokens=1200) as call:
            response = work.completion()
            call.settle(response)
        result = ""
        for tool in run.tool_calls(response["choices"][0]["message"]["tool_calls"]):
            result = tool.run(work.read_file)
        return result

    return work.step, guarded


LOOP_STEPS = 50


def in_the_loop(_: ExitStack) -> Arms:
    def bare() -> None:
        work = Completions()
        messages: list[Any] = [{"role": "user", "content": "read all of it"}]
        while True:
            message = work.completion(LOOP_STEPS)["choices"][0]["message"]
            messages.append(message)
            if "tool_calls" not in message:
                return
            for call in message["tool_calls"]:
                result = work.read_file(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def looped() -> None:
        work = Completions()
        run_bounded(
            lambda _: work.completion(LOOP_STEPS),
            EVERYTHING,
            messages="read all of it",
            tools={"read_file": work.read_file},
            model="gpt-4o",
        )

    return bare, looped


def all_of_them() -> dict[str, Any]:
    return {name: value for fields in BREAKERS.values() for name, value in fields.items()}


ROWS = (
    Row("step, flat arguments", step(), 8),
    Row("step, nested arguments", step(arguments=nested), 10),
    Row("step, result of 200 bytes", step(filler="x" * 200)),
    Row("step, result of 20 KB", step(filler="x" * 20_000)),
    Row("step, iterations capped only", step(Budget(max_iterations=10**9, loop_detection=None))),
    Row("step 10,000 beside step 1", beside_a_plain_one(lambda: aged(10_000)), 1.1),
    Row("step 100,000 beside step 1", beside_a_plain_one(lambda: aged(100_000)), 1.1),
    *(Row(name, step(Budget(**CAPS, **fields)), 20) for name, fields in BREAKERS.items()),
    Row("every breaker", step(Budget(**CAPS, **all_of_them())), 20),
    Row("listener", listened, 20),
    Row("JSON Lines", logged, 25),
    Row("SQLite store beside a bare row", checkpointed, counted=False),
    # At least 15 % of a bare lock's rate.
    Row(
        "64 threads beside a bare lock",
        threaded,
        1 / 0.15,
        steps=THREADS * TIMES,
        counted=False,
    ),
    Row("bounded", in_a_block, 20),
    Row("run_bounded", in_the_loop, 40, unit="us", steps=LOOP_STEPS),
    # A level costs at most a third of a run of its own: three more levels, one more run.
    Row("3 children deep beside a run", beside_a_plain_one(lambda: below(3)), 2),
    Row("2,000 tools beside one", beside_a_plain_one(of_many_names), 2),
    Row("and 200 quotas", beside_a_plain_one(of_many_names_and_quotas), 2),
)
