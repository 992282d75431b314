"""The adapter of the toy framework: all that an author writes on the kit."""

from __future__ import annotations

import budgetguard_core as core
from budgetguard_core.kit import PROGRESS_TOOL, Prompt, cut_short, envelope_of, remember
from conformance.toy_framework import Agent, Middleware, Tool

report_progress = Tool(PROGRESS_TOOL.name, PROGRESS_TOOL.report, PROGRESS_TOOL.description)


class Stopped(BaseException):
    """Ends the framework's loop; no `except Exception` on the way catches it."""


class Counting(Middleware):
    """Tells a run what the framework does."""

    def __init__(self, run):
        self.run, self.guard, self.prompt, self.calls = run, run.guard, Prompt(), run.batch(())

    async def model(self, request, proceed):
        size = self.prompt.project(request.messages, tools=request.tools)
        asked = core.ModelCall(model=request.model, retry=request.attempt > 0, input_tokens=size)
        if isinstance(call := await self.run.wait_async(self.run.model_call(asked)), core.Stop):
            raise Stopped
        if call.nudge is not None:
            request.messages.append({"role": "user", "text": call.nudge})
        request.max_tokens = call.max_output_tokens
        try:
            with self.run.entered(call):
                reply = await proceed(request)
        except BaseException as error:
            self.run.failed(call, error)
            raise
        text, wanted = reply.message["text"], reply.message.get("calls", "")
        self.run.answered(call, reply.usage, text=text + str(wanted), final=not wanted)
        if reply.finish_reason == "length":
            self.run.cut_short(call)
        self.calls = self.run.batch(())
        return reply

    def batch(self, calls):
        self.calls = self.run.batch(
            core.ToolCall(name=c["name"], arguments={"value": c["value"]}, id=c["id"])
            for c in calls
        )

    async def tool(self, call, proceed):
        opened = self.calls.take(call["id"], call["name"])
        if (refusal := self.run.start(await self.run.wait_async(opened))) is not None:
            return refusal
        try:
            with self.run.entered(opened):
                result = await proceed(call)
        except core.BudgetExceeded:
            return core.OUTCOME_UNKNOWN  # A run inside was stopped by a limit of this one.
        except Exception as error:
            self.run.finished(opened, f"Error: {error}", error=error)
            raise
        self.run.finished(opened, result)
        return result

    def close(self, messages):
        """Give every call a result."""
        asked = next((n for n, m in enumerate(reversed(messages)) if m.get("calls")), 0)
        results = [call.answer for call in self.calls]
        for place, call in list(enumerate(messages[-1 - asked].get("calls", ())))[asked:]:
            text = results[place] if place < len(results) else core.NOT_EXECUTED
            messages.append({"role": "tool", "id": call["id"], "text": text})


class Bounded(Agent):
    """The same agent, within a budget: `outcome_of(conversation)` says how a run ended."""

    def __init__(self, agent, budget, **options):
        self.agent, self.envelope = agent, envelope_of(budget, **options)

    async def stream(self, conversation, text=None, *, answer=None, middleware=()):
        # Attached twice under one guard: this layer sees every call as well, and counts instead.
        middleware = [m for m in middleware if getattr(m, "guard", m) is not self.envelope.budget]
        messages, kept = conversation.messages, conversation.data.pop("budget", None)
        if text is None and answer is None and messages[-1].get("meta"):
            messages.pop()  # It goes on where it was stopped.
        resume = None if kept is None else core.Snapshot.from_json(kept)
        run = self.envelope.open(user_spoke=text is not None, resume=resume)
        counting = Counting(run)
        layers = (*middleware, counting)
        steps = self.agent.stream(conversation, text, answer=answer, middleware=layers)
        try:
            message = True
            while message is not None:
                message = None
                with run.entered(), cut_short(run):
                    message = await anext(steps, None)
                if message is not None:
                    yield message
        except BaseException as error:
            if not (isinstance(error, Stopped | core.BudgetExceeded) and run.stopped_by):
                await steps.aclose()
                counting.close(messages)
                await run.in_thread(lambda error=error: run.fail(error, messages))
                raise
        if conversation.waiting:
            remember(conversation, await run.in_thread(lambda: run.pause(messages)))
            conversation.data["budget"] = run.guard.snapshot().to_json()
            return
        counting.close(messages)
        if (trip := run.stopped_by) is not None:
            end = {"role": "assistant", "text": core.synthetic_text(run.guard)}
            if messages[-1]["role"] == "assistant":
                end["text"] = f"{messages.pop()['text']}\n\n{end['text']}"
            messages.append({**end, "meta": core.synthetic_metadata(run.guard, trip)})
        outcome = await run.in_thread(lambda: run.end(messages, messages[-1]["text"]))
        remember(conversation, outcome)
        if trip is not None:
            yield messages[-1]
            if run.is_to_raise or run.is_of_the_run_around(trip):
                raise core.BudgetExceeded(trip, outcome)
