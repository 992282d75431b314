"""The three ways in of the plain-loop adapter: `run_bounded`, `bounded` and `guarded`.

The loops of the latter two are written out as a user would write them.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

from budgetguard_core import BudgetExceeded, Guard
from budgetguard_core.testing import (
    MODEL,
    MODES,
    Driver,
    Message,
    Ran,
    Scenario,
    arguments_value,
    hang,
    run_in_loop,
)
from budgetguard_loop import (
    SyntheticMessage,
    ToolRefused,
    bounded,
    current_guard,
    guarded,
    run_bounded,
    run_bounded_async,
    run_bounded_stream,
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
    response = {"model": MODEL, "choices": [{"message": message}]}
    if reply.usage is not None:
        response["usage"] = usage_of(reply)
    return response


def usage_of(reply):
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
        yield {"model": MODEL, "choices": [{"delta": delta}]}
    if reply.usage is not None:
        yield {"model": MODEL, "choices": [], "usage": usage_of(reply)}


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


class Model:
    """The scripted model as the client of a provider."""

    def __init__(self, script):
        self._script = script

    def _next(self, messages):
        reply = self._script.next(json.dumps(messages, ensure_ascii=False))
        if reply.error is not None:
            raise reply.error
        return reply

    def complete(self, messages):
        return completion(self._next(messages))

    async def complete_async(self, messages):
        reply = self._next(messages)
        if reply.hang:
            await hang()
        return completion(reply)

    async def stream(self, messages):
        reply = self._next(messages)
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
            result = scenario.start(tool, value)
            return result if tool.agent is None else run_agent(tool.agent, value)

        async def call_async(value=""):
            result = scenario.start(tool, value)
            if tool.hang:
                await hang()
            await asyncio.sleep(0)
            return result if tool.agent is None else await run_agent(tool.agent, value)

        return call if scenario.mode == "sync" else call_async

    return {tool.name: function(tool) for tool in tools}


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


def ran(outcome, *, raised=None, chunks=(), leaked=()):
    """Report a run that ended with an outcome, or raised."""
    if outcome is None and isinstance(raised, BudgetExceeded):
        outcome = raised.outcome
    return Ran(
        history=normal(() if outcome is None else outcome.messages),
        outcome=outcome,
        raised=raised,
        chunks=chunks,
        leaked=leaked,
        session=outcome,
    )


def plain_loop(scenario):
    """Run the same loop without the adapter."""
    model = Model(scenario.script)
    messages = [{"role": "user", "content": scenario.user_input}]
    tools = functions(scenario, scenario.tools, None)
    chunks = []

    async def ask():
        if scenario.mode == "async":
            return (await model.complete_async(messages))["choices"][0]["message"]
        mine = [chunk async for chunk in model.stream(messages)]
        chunks.extend(mine)
        return whole(mine)

    async def loop():
        while True:
            messages.append(await ask())
            if not (calls := messages[-1].get("tool_calls")):
                return
            for call in calls:
                arguments = json.loads(call["function"]["arguments"])
                text = await tools[call["function"]["name"]](**arguments)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def loop_sync():
        while True:
            messages.append(model.complete(messages)["choices"][0]["message"])
            if not (calls := messages[-1].get("tool_calls")):
                return
            for call in calls:
                arguments = json.loads(call["function"]["arguments"])
                text = tools[call["function"]["name"]](**arguments)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    if scenario.mode == "sync":
        loop_sync()
    else:
        run_in_loop(loop())
    return Ran(history=normal(messages), chunks=chunks)


class RunBounded(Driver):
    adapter = "budgetguard_loop"
    name = "run_bounded"
    modes = MODES

    def run(self, scenario: Scenario) -> Ran:
        if scenario.guard is None:
            return plain_loop(scenario)
        chunks = []
        leaked = ()
        try:
            if scenario.mode == "sync":
                outcome = self._bounded(run_bounded, scenario)
            elif scenario.mode == "async":
                outcome, leaked = run_in_loop(self._bounded(run_bounded_async, scenario))
            else:
                outcome, leaked = run_in_loop(self._read(scenario, chunks))
        except Exception as error:
            return ran(None, raised=error)
        return ran(outcome, chunks=chunks, leaked=leaked)

    async def _read(self, scenario, chunks):
        stream = self._bounded(run_bounded_stream, scenario)
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == scenario.break_after:
                return None
        return stream.outcome

    def _bounded(self, entry, scenario):
        step = Model(scenario.script).step(scenario.mode)
        tools = functions(scenario, scenario.tools, self._agent(scenario))
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
            retries=scenario.retries,
            on_trip=scenario.on_trip,
            store=scenario.store,
            resume=None if scenario.after is None else scenario.after.session,
        )

    def _agent(self, scenario):
        def run_agent(agent, value):
            entry = run_bounded if scenario.mode == "sync" else run_bounded_async
            model = Model(agent.script)
            return entry(
                model.complete if scenario.mode == "sync" else model.complete_async,
                agent.budget,
                messages=value or "Go.",
                tools=functions(scenario, agent.tools, run_agent),
                model=MODEL,
            )

        return run_agent


class Handwritten(Driver):
    """A loop of the user's own in a `bounded` block."""

    adapter = "budgetguard_loop"

    def run(self, scenario: Scenario) -> Ran:
        if scenario.guard is None:
            return plain_loop(scenario)
        chunks = []
        leaked = ()
        try:
            if scenario.mode == "sync":
                outcome = self._block(scenario)
            else:
                outcome, leaked = run_in_loop(self._block_async(scenario, chunks))
        except Exception as error:
            return ran(None, raised=error)
        return ran(outcome, chunks=chunks, leaked=leaked)

    def _opened(self, scenario):
        text = scenario.user_input
        return bounded(
            scenario.guard,
            messages=[] if text is None else [{"role": "user", "content": text}],
            on_trip=scenario.on_trip,
            store=scenario.store,
            resume=None if scenario.after is None else scenario.after.session,
        )

    def _block(self, scenario):
        tools = functions(scenario, scenario.tools, self._agent(scenario))
        with self._opened(scenario) as run:
            self.loop(run, Model(scenario.script), tools, scenario)
        return run.outcome

    async def _block_async(self, scenario, chunks):
        tools = functions(scenario, scenario.tools, self._agent(scenario))
        left = False
        async with self._opened(scenario) as run:
            left = await self.loop_async(run, Model(scenario.script), tools, scenario, chunks)
        if run.outcome.status == "terminated" and not left:
            chunks.append(run.messages[-1])
        return run.outcome

    def _agent(self, scenario):
        def run_agent(agent, value):
            model, tools = Model(agent.script), functions(scenario, agent.tools, run_agent)
            guard = current_guard().child(agent.budget)
            messages = [{"role": "user", "content": value or "Go."}]
            with bounded(guard, messages=messages) as run:
                self.loop(run, model, tools, scenario)
            return run.outcome.final

        async def run_agent_async(agent, value):
            model, tools = Model(agent.script), functions(scenario, agent.tools, run_agent_async)
            messages = [{"role": "user", "content": value or "Go."}]
            async with bounded(agent.budget, messages=messages) as run:
                await self.loop_async(run, model, tools, scenario, [])
            return run.outcome.final

        return run_agent if scenario.mode == "sync" else run_agent_async


class Explicit(Handwritten):
    name = "bounded"
    modes = MODES

    def loop(self, run, model, tools, scenario):
        complete = model.complete
        if scenario.twice:
            complete = guarded(run.guard, kind="model")(complete)
            tools = {name: guarded(run.guard, name=name)(tool) for name, tool in tools.items()}
        while True:
            message = self._ask(run, complete, scenario.retries)
            run.messages.append(message)
            if not message.get("tool_calls"):
                return
            for call in run.tool_calls(message["tool_calls"]):
                text = call.refusal
                if text is None:
                    try:
                        with call:
                            text = tools[call.name](**call.arguments)
                            call.settle(text)
                    except ValueError as error:
                        text = f"Error: {error}"
                run.messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

    def _ask(self, run, complete, retries):
        for attempt in range(retries + 1):
            try:
                with run.model_call(MODEL, retry=attempt > 0) as call:
                    response = complete(call.messages)
                    call.settle(response)
                    return response["choices"][0]["message"]
            except BudgetExceeded:
                raise
            except Exception:
                if attempt == retries:
                    raise
        raise AssertionError

    async def loop_async(self, run, model, tools, scenario, chunks):
        step = model.step(scenario.mode)
        if scenario.twice:
            step = guarded(run.guard, kind="model")(step)
            tools = {name: guarded(run.guard, name=name)(tool) for name, tool in tools.items()}

        async def run_tool(call):
            text = call.refusal
            if text is None:
                try:
                    with call:
                        text = await tools[call.name](**call.arguments)
                        call.settle(text)
                except ValueError as error:
                    text = f"Error: {error}"
            run.messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

        while True:
            message = await self._ask_async(run, step, scenario, chunks)
            if message is None:
                return True
            run.messages.append(message)
            if not message.get("tool_calls"):
                return False
            await asyncio.gather(*map(run_tool, run.tool_calls(message["tool_calls"])))

    async def _ask_async(self, run, step, scenario, chunks):
        for attempt in range(scenario.retries + 1):
            try:
                with run.model_call(MODEL, retry=attempt > 0) as call:
                    if scenario.mode == "async":
                        response = await step(call.messages)
                        call.settle(response)
                        return response["choices"][0]["message"]
                    mine = []
                    async with aclosing(step(call.messages)) as stream:
                        async for chunk in stream:
                            mine.append(chunk)
                            chunks.append(chunk)
                            if len(chunks) == scenario.break_after:
                                return None
                    message = whole(mine)
                    call.settle({"usage": mine[-1].get("usage"), **message})
                    return message
            except BudgetExceeded:
                raise
            except Exception:
                if attempt == scenario.retries:
                    raise
        raise AssertionError


class Guarded(Handwritten):
    name = "guarded"
    modes = MODES
    deviations = {  # noqa: RUF012 - data, read once
        17: "A decorated function cannot tell another attempt from another turn, so each call is "
        "an iteration; `run.model_call(retry=True)` says which it is."
    }

    def loop(self, run, model, tools, scenario):
        @guarded(kind="model", model=MODEL)
        def ask(messages, *, nudge=None):
            return model.complete(told(messages, nudge))

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
                return
            for call in message["tool_calls"]:
                function = call["function"]
                try:
                    text = tools[function["name"]](
                        arguments_value(json.loads(function["arguments"]))
                    )
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

    async def loop_async(self, run, model, tools, scenario, chunks):
        ask = self._asking(model, scenario)
        if scenario.twice:
            ask = guarded(run.guard, kind="model")(ask)
        tools = self._tools(tools, scenario)

        async def run_tool(call):
            function = call["function"]
            try:
                text = await tools[function["name"]](
                    arguments_value(json.loads(function["arguments"]))
                )
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
                return False
            results = await asyncio.gather(
                *map(run_tool, message["tool_calls"]), return_exceptions=True
            )
            for result in results:
                if result is not None:
                    raise result

    def _asking(self, model, scenario):
        if scenario.mode == "async":

            @guarded(kind="model", model=MODEL)
            async def ask(messages, *, nudge=None):
                return await model.complete_async(told(messages, nudge))

        else:

            @guarded(kind="model", model=MODEL)
            async def ask(messages, *, nudge=None):
                async with aclosing(model.stream(told(messages, nudge))) as stream:
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
