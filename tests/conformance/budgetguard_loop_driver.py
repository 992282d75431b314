"""The three ways in of the plain-loop adapter: `run_bounded`, `bounded` and `guarded`.

The loops of the latter two are written out as a user would write them.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, suppress
from functools import wraps
from typing import ClassVar

from budgetguard_core import BudgetExceeded, Guard, Outcome
from budgetguard_core.kit import TokenUsage
from budgetguard_core.testing import (
    MODEL,
    MODES,
    Driver,
    Message,
    ProviderError,
    Ran,
    Scenario,
    hang,
)
from budgetguard_loop import (
    SyntheticMessage,
    ToolRefused,
    bounded,
    current_guard,
    guarded,
    report_progress,
    run_bounded,
    run_bounded_async,
    run_bounded_stream,
)
from conformance.outcomes import ended_with

# Chat completions, with and without details; the Responses API; Anthropic's and Gemini's.
USAGE_RECORDS = (
    (
        {
            "prompt_tokens": 100,
            "completion_tokens": 30,
            "total_tokens": 130,
            "prompt_tokens_details": {"cached_tokens": 60},
            "completion_tokens_details": {"reasoning_tokens": 10},
        },
        TokenUsage(100, 30, cache_read_tokens=60, reasoning_tokens=10),
    ),
    (
        {
            "input_tokens": 100,
            "output_tokens": 30,
            "total_tokens": 130,
            "input_tokens_details": {"cached_tokens": 60},
            "output_tokens_details": {"reasoning_tokens": 10},
        },
        TokenUsage(100, 30, cache_read_tokens=60, reasoning_tokens=10),
    ),
    (
        {
            "input_tokens": 10,
            "output_tokens": 30,
            "cache_read_input_tokens": 60,
            "cache_creation_input_tokens": 30,
        },
        TokenUsage(100, 30, cache_read_tokens=60, cache_write_tokens=30),
    ),
    # Gemini's candidates leave the thoughts out.
    (
        {
            "prompt_token_count": 100,
            "candidates_token_count": 20,
            "thoughts_token_count": 10,
            "cached_content_token_count": 60,
            "total_token_count": 130,
        },
        TokenUsage(100, 30, cache_read_tokens=60, reasoning_tokens=10),
    ),
    # The total knows of more than the completion says.
    (
        {"prompt_tokens": 100, "completion_tokens": 0, "total_tokens": 150},
        TokenUsage(100, 50),
    ),
    (
        {
            "prompt_tokens": 100,
            "completion_tokens": 10,
            "total_tokens": 150,
            "completion_tokens_details": {"reasoning_tokens": 40},
        },
        TokenUsage(100, 50, reasoning_tokens=40),
    ),
)


def completion(reply):
    """Write a scripted reply as a response of chat completions."""
    message = {"role": "assistant", "content": reply.text or None}
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in reply.tool_calls
        ]
    choice = {"message": message, "finish_reason": "length" if reply.cut else "stop"}
    response = {"model": reply.model, "choices": [choice]}
    if (usage := usage_of(reply)) is not None:
        response["usage"] = usage
    return response


def usage_of(reply):
    if reply.record is not None:
        return reply.record
    if reply.usage is None:
        return None
    return {
        "prompt_tokens": reply.usage.input_tokens,
        "completion_tokens": reply.usage.output_tokens,
    }


def chunks_of(reply):
    """Write a scripted reply as the chunks of a stream."""
    deltas = [{"content": word} for word in reply.text.split(" ")] if reply.text else []
    deltas = [{"content": d["content"] + (" " if d is not deltas[-1] else "")} for d in deltas]
    for index, call in enumerate(reply.tool_calls):
        start = {"name": call.name, "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, "id": call.id, "function": start}]})
        rest = {"arguments": json.dumps(call.arguments)}
        deltas.append({"tool_calls": [{"index": index, "function": rest}]})
    for delta in deltas:
        yield {"model": reply.model, "choices": [{"delta": delta}]}
    if reply.cut:
        yield {"model": reply.model, "choices": [{"delta": {}, "finish_reason": "length"}]}
    if (usage := usage_of(reply)) is not None:
        yield {"model": reply.model, "choices": [], "usage": usage}


def whole(chunks):
    """Put chunks together again, as a user without the adapter would."""
    message = {"role": "assistant", "content": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if "content" in delta:
                message["content"] = (message["content"] or "") + delta["content"]
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if len(calls) <= piece["index"]:
                    function = {"name": piece["function"]["name"], "arguments": ""}
                    calls.append({"id": piece["id"], "type": "function", "function": function})
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message


class AtOnce:
    """The response of a provider that lets a client try again without waiting."""

    headers = {"retry-after": "0"}  # noqa: RUF012 - never changed


class Model:
    """The scripted model as the client of a provider."""

    def __init__(self, script, tools=()):
        self._script = script
        # As users do: the functions' descriptions are in each request of theirs.
        self.tools = [
            {"type": "function", "function": {"name": t.name, "description": t.description}}
            for t in tools
        ]

    def _next(self, messages, bound, without_tools=False, model=None):
        tools = [] if without_tools else self.tools
        sent = json.dumps([messages, tools], ensure_ascii=False)
        facts = {"request": normal(messages), "bound": bound, "model": model or MODEL}
        reply = self._script.next(sent, **facts)
        if reply.error is not None:
            reply.error.response = AtOnce
            raise reply.error
        return reply

    def complete(self, messages, *, max_output_tokens=None, without_tools=False, model=None):
        return completion(self._next(messages, max_output_tokens, without_tools, model))

    async def complete_async(
        self, messages, *, max_output_tokens=None, without_tools=False, model=None
    ):
        reply = self._next(messages, max_output_tokens, without_tools, model)
        if reply.hang:
            await hang()
        return completion(reply)

    async def stream(self, messages, *, max_output_tokens=None, without_tools=False, model=None):
        reply = self._next(messages, max_output_tokens, without_tools, model)
        if reply.hang:
            await hang()
        for chunk in chunks_of(reply):
            await asyncio.sleep(0)
            yield chunk

    def step(self, mode):
        return {
            "sync": self.complete,
            "async": self.complete_async,
            "streamed": self.stream,
        }[mode]


def functions(scenario, tools, run_agent):
    """Make the tools' functions; `run_agent` runs a sub-agent, and may be async."""

    def function(tool):
        def call(value=""):
            result = scenario.call(tool, value)
            if tool.agent is None:
                return result
            return scenario.read(str(answer_of(run_agent(tool.agent, value))))

        async def call_async(value=""):
            result = await scenario.acall(tool, value)
            await asyncio.sleep(0)
            if tool.agent is None:
                return result
            return scenario.read(str(answer_of(await run_agent(tool.agent, value))))

        call.__doc__ = call_async.__doc__ = tool.description
        return call if scenario.mode == "sync" else call_async

    async def report_async(**report):
        return report_progress(**report)

    report = report_progress if scenario.mode == "sync" else report_async
    return {tool.name: report if tool.reports else function(tool) for tool in tools}


def trying(step, scenario):
    """Try again as users do, with a library of their own around a guarded step."""

    def call(*args, **kwargs):
        for _ in range(scenario.retries):
            with suppress(ProviderError):
                return step(*args, **kwargs)
        return step(*args, **kwargs)

    async def call_async(*args, **kwargs):
        for _ in range(scenario.retries):
            with suppress(ProviderError):
                return await step(*args, **kwargs)
        return await step(*args, **kwargs)

    async def call_stream(*args, **kwargs):
        for _ in range(scenario.retries):
            with suppress(ProviderError):
                async for chunk in step(*args, **kwargs):
                    yield chunk
                return
        async for chunk in step(*args, **kwargs):
            yield chunk

    return wraps(step)({"sync": call, "async": call_async, "streamed": call_stream}[scenario.mode])


def answer_of(ended):
    return ended.final if isinstance(ended, Outcome) else ended


def swallowing(function, mode):
    """Wrap a function as careless users do: every exception is an answer."""

    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            return f"Something went wrong ({type(error).__name__}), never mind."

    async def call_async(*args, **kwargs):
        try:
            return await function(*args, **kwargs)
        except Exception as error:
            return f"Something went wrong ({type(error).__name__}), never mind."

    async def call_stream(*args, **kwargs):
        try:
            async for chunk in function(*args, **kwargs):
                yield chunk
        except Exception as error:
            yield f"Something went wrong ({type(error).__name__}), never mind."

    return {"sync": call, "async": call_async, "streamed": call_stream}[mode]


def normal(messages):
    """Write a history in the suite's words."""
    return [
        Message(
            role=message["role"],
            text=message.get("content") or "",
            tool_calls=tuple(
                (call["id"], call["function"]["name"]) for call in message.get("tool_calls") or ()
            ),
            tool_call_id=message.get("tool_call_id"),
            synthetic=message.metadata if isinstance(message, SyntheticMessage) else None,
        )
        for message in messages
    ]


def ran(scenario, outcome, *, raised=None, chunks=()):
    """Report a run that ended with an outcome, or raised."""
    if outcome is None:
        outcome = ended_with(raised)
    history = returned = normal(() if outcome is None else outcome.messages)
    session = outcome
    if scenario.stored and outcome is not None:
        session = scenario.store.load(outcome.run_id)
        history = normal(session.messages)
    return Ran(
        history=history,
        returned=returned if scenario.stored and raised is None else None,
        outcome=outcome,
        raised=raised,
        chunks=chunks,
        session=session,
    )


class PlainLoop:
    """The same loop without the adapter."""

    def __init__(self, scenario):
        self.scenario = scenario
        self.model = Model(scenario.script, scenario.tools)
        before = [] if scenario.after is None else scenario.after.session
        self.messages = [*before, {"role": "user", "content": scenario.user_input}]
        self.tools = functions(scenario, scenario.tools, None)
        self.chunks = []

    def run(self):
        while True:
            self.messages.append(self.model.complete(self.messages)["choices"][0]["message"])
            if not (calls := self.messages[-1].get("tool_calls")):
                return self.ran()
            for call in calls:
                self.answer(call, self.tools[call["function"]["name"]](**self.arguments(call)))

    async def run_async(self):
        while True:
            self.messages.append(await self.ask())
            if not (calls := self.messages[-1].get("tool_calls")):
                return self.ran()
            for call in calls:
                text = await self.tools[call["function"]["name"]](**self.arguments(call))
                self.answer(call, text)

    async def ask(self):
        if self.scenario.mode == "async":
            return (await self.model.complete_async(self.messages))["choices"][0]["message"]
        mine = [chunk async for chunk in self.model.stream(self.messages)]
        self.chunks.extend(mine)
        return whole(mine)

    def arguments(self, call):
        return json.loads(call["function"]["arguments"])

    def answer(self, call, text):
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def ran(self):
        messages = self.messages
        return Ran(history=normal(messages), chunks=self.chunks, session=messages)


def no_person(adapter):
    return (
        f"{adapter} has no state in which a run waits for a person: a loop of one's own waits in a "
        "tool, or ends and is called again with the answer."
    )


class LoopDriver(Driver):
    adapter = "budgetguard_loop"
    modes = MODES
    lacks: ClassVar = {
        "approval": no_person("a plain loop"),
        "new_process": no_person("a plain loop"),
        "structured": "a plain loop has no structured output of its own.",
        "own_limit": "a plain loop has no limit but the budget's.",
        "imported": "a plain loop is the user's own code: without `guarded` nothing sees it.",
    }
    usage_records: ClassVar = USAGE_RECORDS


class RunBounded(LoopDriver):
    name = "run_bounded"
    lacks: ClassVar = {
        **LoopDriver.lacks,
        "dialogue": "`run_bounded` ends with the first reply that asks for no tool.",
        "judge": "`run_bounded` has no place for a check before its first model call.",
    }

    def run_sync(self, scenario: Scenario) -> Ran:
        if scenario.guard is None:
            return PlainLoop(scenario).run()
        try:
            return ran(scenario, self._bounded(run_bounded, scenario))
        except Exception as error:
            return ran(scenario, None, raised=error)

    async def run_async(self, scenario: Scenario) -> Ran:
        if scenario.guard is None:
            return await PlainLoop(scenario).run_async()
        chunks = []
        try:
            if scenario.mode == "async":
                return ran(scenario, await self._bounded(run_bounded_async, scenario))
            return ran(scenario, await self._read(scenario, chunks), chunks=chunks)
        except Exception as error:
            return ran(scenario, None, raised=error)

    async def _read(self, scenario, chunks):
        stream = self._bounded(run_bounded_stream, scenario)
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == scenario.break_after:
                return None
        return stream.outcome

    def _bounded(self, entry, scenario):
        step = Model(scenario.script, scenario.tools).step(scenario.mode)
        tools = functions(scenario, scenario.tools, self._agent(scenario))
        if scenario.retries:
            step = trying(guarded(kind="model")(step), scenario)
        if scenario.twice or scenario.swallowing:
            guard = scenario.guard if isinstance(scenario.guard, Guard) else None
            step = guarded(guard, kind="model")(step)
            tools = {name: guarded(guard, name=name)(tool) for name, tool in tools.items()}
        if scenario.swallowing:
            step = swallowing(step, scenario.mode)
            mode = "sync" if scenario.mode == "sync" else "async"
            tools = {name: swallowing(tool, mode) for name, tool in tools.items()}
        return entry(
            step,
            scenario.guard,
            messages=scenario.user_input or (),
            tools=tools,
            model=MODEL,
            on_trip=scenario.on_trip,
            store=scenario.store,
            conversation_id=scenario.conversation,
            resume=None if scenario.after is None else scenario.after.session,
        )

    def _agent(self, scenario):
        def run_agent(agent, value):
            entry = run_bounded if scenario.mode == "sync" else run_bounded_async
            model = Model(agent.script, agent.tools)
            return entry(
                model.complete if scenario.mode == "sync" else model.complete_async,
                agent.budget,
                messages=value or "Go.",
                tools=functions(scenario, agent.tools, run_agent),
                model=MODEL,
            )

        return run_agent


class Rejected(Exception):
    """What the user's own check raises."""


class Alone:
    dialogue = None


class Voices:
    """Whose turn it is to answer: the agent's, or that of the one it talks to."""

    def __init__(self, model, scenario):
        self.model = model
        other = scenario.dialogue
        self.other = None if other is None else Model(other.script, other.tools)

    def turn(self, messages):
        """Hand a reply without tool calls to the other; False where there is none."""
        if self.other is None:
            return False
        messages.append({"role": "user", "content": messages[-1]["content"]})
        self.model, self.other = self.other, self.model
        return True


class Handwritten(LoopDriver):
    """A loop of the user's own in a `bounded` block."""

    def run_sync(self, scenario: Scenario) -> Ran:
        if scenario.guard is None:
            return PlainLoop(scenario).run()
        try:
            return ran(scenario, self._block(scenario))
        except Exception as error:
            return ran(scenario, None, raised=error)

    async def run_async(self, scenario: Scenario) -> Ran:
        if scenario.guard is None:
            return await PlainLoop(scenario).run_async()
        chunks = []
        try:
            return ran(scenario, await self._block_async(scenario, chunks), chunks=chunks)
        except Exception as error:
            return ran(scenario, None, raised=error)

    def _opened(self, scenario):
        text = scenario.user_input
        return bounded(
            scenario.guard,
            messages=[] if text is None else [{"role": "user", "content": text}],
            step=Model(scenario.script, scenario.tools).step(scenario.mode),
            model=MODEL,
            on_trip=scenario.on_trip,
            store=scenario.store,
            conversation_id=scenario.conversation,
            resume=None if scenario.after is None else scenario.after.session,
        )

    def _block(self, scenario):
        tools = functions(scenario, scenario.tools, self._agent(scenario))
        with self._opened(scenario) as run:
            if scenario.judge is not None:
                self._judged(scenario, self._agent(scenario)(scenario.judge, "Is it fine?"))
            self.loop(
                run, Voices(Model(scenario.script, scenario.tools), scenario), tools, scenario
            )
        return run.outcome

    def _judged(self, scenario, answer):
        if scenario.read(answer) != "yes":
            raise Rejected(answer)

    async def _block_async(self, scenario, chunks):
        tools = functions(scenario, scenario.tools, self._agent(scenario))
        left = False
        async with self._opened(scenario) as run:
            if scenario.judge is not None:
                answer = await self._agent(scenario)(scenario.judge, "Is it fine?")
                self._judged(scenario, answer)
            voices = Voices(Model(scenario.script, scenario.tools), scenario)
            left = await self.loop_async(run, voices, tools, scenario, chunks)
        if run.outcome.status == "terminated" and not left:
            chunks.append(run.messages[-1])
        return run.outcome

    def _agent(self, scenario):
        def run_agent(agent, value):
            model = Voices(Model(agent.script, agent.tools), Alone)
            tools = functions(scenario, agent.tools, run_agent)
            guard = current_guard().child(agent.budget)
            messages = [{"role": "user", "content": value or "Go."}]
            with bounded(guard, messages=messages) as run:
                self.loop(run, model, tools, scenario)
            return run.outcome.final

        async def run_agent_async(agent, value):
            model = Voices(Model(agent.script, agent.tools), Alone)
            tools = functions(scenario, agent.tools, run_agent_async)
            messages = [{"role": "user", "content": value or "Go."}]
            async with bounded(agent.budget, messages=messages) as run:
                await self.loop_async(run, model, tools, scenario, [])
            return run.outcome.final

        return run_agent if scenario.mode == "sync" else run_agent_async


class Explicit(Handwritten):
    name = "bounded"

    def loop(self, run, voices, tools, scenario):
        if scenario.twice:
            tools = {name: guarded(run.guard, name=name)(tool) for name, tool in tools.items()}
        failures = 0
        while True:
            try:
                message = self._ask(run, voices.model, scenario)
            except Exception:
                failures += 1
                if scenario.swallowing and failures < 3:
                    continue
                raise
            run.messages.append(message)
            if not message.get("tool_calls"):
                if voices.turn(run.messages):
                    continue
                return
            for call in run.tool_calls(message["tool_calls"]):
                text = call.refusal
                if text is None:
                    try:
                        with call:
                            text = tools[call.name](**call.arguments)
                            call.settle(text)
                    except Exception as error:
                        if not (scenario.swallowing or isinstance(error, ValueError)):
                            raise
                        text = f"Error: {error}"
                run.messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

    def _ask(self, run, model, scenario):
        tools, complete = model.tools, model.complete
        if scenario.twice:
            complete = guarded(run.guard, kind="model")(complete)
        for attempt in range(scenario.retries + 1):
            try:
                with run.model_call(MODEL, retry=attempt > 0, tools=tools) as call:
                    given = {"max_output_tokens": call.max_output_tokens, "model": call.model}
                    response = complete(call.messages, **given)
                    call.settle(response)
                    return response["choices"][0]["message"]
            except BudgetExceeded:
                raise
            except Exception:
                if attempt == scenario.retries:
                    raise
        raise AssertionError

    async def loop_async(self, run, voices, tools, scenario, chunks):
        if scenario.twice:
            tools = {name: guarded(run.guard, name=name)(tool) for name, tool in tools.items()}

        async def run_tool(call):
            text = call.refusal
            if text is None:
                try:
                    async with call:
                        text = await tools[call.name](**call.arguments)
                        call.settle(text)
                except Exception as error:
                    if not (scenario.swallowing or isinstance(error, ValueError)):
                        raise
                    text = f"Error: {error}"
            run.messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

        failures = 0
        while True:
            try:
                message = await self._ask_async(run, voices.model, scenario, chunks)
            except Exception:
                failures += 1
                if scenario.swallowing and failures < 3:
                    continue
                raise
            if message is None:
                return True
            run.messages.append(message)
            if not message.get("tool_calls"):
                if voices.turn(run.messages):
                    continue
                return False
            await asyncio.gather(*map(run_tool, run.tool_calls(message["tool_calls"])))

    async def _ask_async(self, run, model, scenario, chunks):
        tools, step = model.tools, model.step(scenario.mode)
        if scenario.twice:
            step = guarded(run.guard, kind="model")(step)
        for attempt in range(scenario.retries + 1):
            try:
                async with run.model_call(MODEL, retry=attempt > 0, tools=tools) as call:
                    bound = {"max_output_tokens": call.max_output_tokens, "model": call.model}
                    if scenario.mode == "async":
                        response = await step(call.messages, **bound)
                        call.settle(response)
                        return response["choices"][0]["message"]
                    mine = []
                    async with aclosing(step(call.messages, **bound)) as stream:
                        async for chunk in stream:
                            mine.append(chunk)
                            chunks.append(chunk)
                            if len(chunks) == scenario.break_after:
                                return None
                    call.settle(settled(mine))
                    return whole(mine)
            except BudgetExceeded:
                raise
            except Exception:
                if attempt == scenario.retries:
                    raise
        raise AssertionError


def settled(chunks):
    """Put a stream together as the response that it would have been."""
    reasons = [c.get("finish_reason") for chunk in chunks for c in chunk["choices"]]
    choice = {"message": whole(chunks), "finish_reason": next(filter(None, reasons), "stop")}
    return {"model": chunks[0]["model"], "choices": [choice], "usage": chunks[-1].get("usage")}


class Guarded(Handwritten):
    name = "guarded"
    deviations = {  # noqa: RUF012 - data, read once
        17: "A decorated function cannot tell another attempt from another turn, so each call is "
        "an iteration; `run.model_call(retry=True)` says which it is."
    }

    def loop(self, run, voices, tools, scenario):
        @guarded(kind="model", model=MODEL, tools=voices.model.tools)
        def ask(messages, *, nudge=None, max_output_tokens=None, model=None):
            bound = {"max_output_tokens": max_output_tokens, "model": model}
            return voices.model.complete(told(messages, nudge), **bound)

        if scenario.twice:
            ask = guarded(run.guard, kind="model")(ask)
        tools = self._tools(tools, scenario)
        failures = 0
        while True:
            try:
                message = self._ask(ask, run, scenario.retries)
            except Exception:
                failures += 1
                if scenario.swallowing and failures < 3:
                    continue
                raise
            run.messages.append(message)
            if not message.get("tool_calls"):
                if voices.turn(run.messages):
                    continue
                return
            for call in message["tool_calls"]:
                function = call["function"]
                try:
                    text = tools[function["name"]](**json.loads(function["arguments"]))
                except ToolRefused as refused:
                    text = str(refused)
                except ValueError as error:
                    text = f"Error: {error}"
                run.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def _ask(self, ask, run, retries):
        for attempt in range(retries + 1):
            try:
                return ask(run.messages)["choices"][0]["message"]
            except BudgetExceeded:
                raise
            except Exception:
                if attempt == retries:
                    raise
        raise AssertionError

    async def loop_async(self, run, voices, tools, scenario, chunks):
        ask = self._asking(voices, scenario)
        if scenario.twice:
            ask = guarded(run.guard, kind="model")(ask)
        tools = self._tools(tools, scenario)

        async def run_tool(call):
            function = call["function"]
            try:
                text = await tools[function["name"]](**json.loads(function["arguments"]))
            except ToolRefused as refused:
                text = str(refused)
            except ValueError as error:
                text = f"Error: {error}"
            run.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

        failures = 0
        while True:
            try:
                message = await self._ask_async(ask, run, scenario, chunks)
            except Exception:
                failures += 1
                if scenario.swallowing and failures < 3:
                    continue
                raise
            if message is None:
                return True
            run.messages.append(message)
            if not message.get("tool_calls"):
                if voices.turn(run.messages):
                    continue
                return False
            results = await asyncio.gather(
                *map(run_tool, message["tool_calls"]), return_exceptions=True
            )
            for result in results:
                if result is not None:
                    raise result

    def _asking(self, voices, scenario):
        if scenario.mode == "async":

            @guarded(kind="model", model=MODEL, tools=voices.model.tools)
            async def ask(messages, *, nudge=None, max_output_tokens=None, model=None):
                bound = {"max_output_tokens": max_output_tokens, "model": model}
                return await voices.model.complete_async(told(messages, nudge), **bound)

        else:

            @guarded(kind="model", model=MODEL, tools=voices.model.tools)
            async def ask(messages, *, nudge=None, max_output_tokens=None, model=None):
                bound = {"max_output_tokens": max_output_tokens, "model": model}
                async with aclosing(voices.model.stream(told(messages, nudge), **bound)) as stream:
                    async for chunk in stream:
                        yield chunk

        return ask

    async def _ask_async(self, ask, run, scenario, chunks):
        for attempt in range(scenario.retries + 1):
            try:
                if scenario.mode == "async":
                    return (await ask(run.messages))["choices"][0]["message"]
                mine = []
                async with aclosing(ask(run.messages)) as stream:
                    async for chunk in stream:
                        mine.append(chunk)
                        chunks.append(chunk)
                        if len(chunks) == scenario.break_after:
                            return None
                return whole(mine)
            except BudgetExceeded:
                raise
            except Exception:
                if attempt == scenario.retries:
                    raise
        raise AssertionError

    def _tools(self, tools, scenario):
        tools = {name: guarded(name=name)(tool) for name, tool in tools.items()}
        if scenario.twice:
            tools = {name: guarded(name=name)(tool) for name, tool in tools.items()}
        if scenario.swallowing:
            mode = "sync" if scenario.mode == "sync" else "async"
            tools = {name: swallowing(tool, mode) for name, tool in tools.items()}
        return tools


def told(messages, nudge):
    return messages if nudge is None else [*messages, {"role": "user", "content": nudge}]


DRIVERS = (RunBounded(), Explicit(), Guarded())
