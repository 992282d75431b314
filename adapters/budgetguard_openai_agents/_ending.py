"""The end of every run: the SDK's result, also where the run was stopped."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import agents
from agents.run import CallModelData, ModelInputData

from budgetguard_core import Trip, kit
from budgetguard_openai_agents import _seams, _sessions
from budgetguard_openai_agents._frame import RunFrame, RunStopped, approval
from budgetguard_openai_agents._history import (
    SyntheticMessage,
    Turn,
    closing_items,
    history_of,
    synthetic_message,
    turn_items,
)
from budgetguard_openai_agents._model import extra_bounds, model_of, set_bound, usage_of
from budgetguard_openai_agents._run import Recorder

_RESUME = (
    "Run the agent again under a fresh budget, with the same session or conversation, with "
    "result.to_input_list(), or with result.to_state()."
)
_ANSWER = "Answer with result.to_state(), and give that to the runner with a budget."


class Ending:
    """The end of one run, of which its input, its options and the streamed result are known."""

    def __init__(
        self,
        recorder: Recorder,
        given: Any,
        options: dict[str, Any],
        streamed: agents.RunResultStreaming | None = None,
    ) -> None:
        self._recorder = recorder
        self._given = given
        self._options = options
        self._streamed: Any = streamed

    async def of(self, work: asyncio.Task[Any]) -> Any:
        """Wait for what the SDK runs, and return the result.

        Raises:
            RunStopped: The caller wants it so, or the stop is that of a run around this one.
        """
        recorder, streamed = self._recorder, self._streamed
        known: Any = streamed
        result = cast("Any", None)
        try:
            trip = await recorder.supervised(work)
            if trip is None or (work.done() and not work.cancelled()):
                answer = work.result()
                trip, result = None, streamed or answer
                if streamed is not None and not streamed.interruptions:
                    _seams.raise_tripwire(streamed)
            else:
                recorder.leave()
                recorder.withhold()
                result = streamed if recorder.withheld is None else None
        except BaseException as raised:
            work.cancel()  # whoever cancels the run may do it before anybody waits for its work
            error = await self._known_better(raised, work)
            trip = recorder.stop_of(error)
            if trip is None:
                await self._fail(error)
                raise
            recorder.leave()
            known = streamed or getattr(error, "run_data", None)
        trip = trip or recorder.stopping or recorder.run.stopped_by
        if result is None or not result.interruptions:
            if trip is None and streamed is not None and _seams.is_cancelled(streamed):
                await self._fail(asyncio.CancelledError("the stream was cancelled"))
                return streamed
            if trip is not None and not (result and self._is_answered(result)):
                data = known or result
                result = await self._closed(trip, data or self._facts())
                await self._store(result, rebuilt=not data)
            elif trip is not None and recorder.is_completed_by_a_call(trip):
                # Nothing that the refused calls of the batch would have brought was waited for.
                trip = recorder.run.trip = None
        if result is not None and recorder.question is not None:
            result.interruptions = [approval(recorder.agent, recorder.question)]
        await self._finish(result, trip)
        return result

    async def _known_better(self, error: BaseException, work: asyncio.Task[Any]) -> BaseException:
        """Return the failure of an input guardrail, for which the SDK cancels a streamed run."""
        streamed, task = self._streamed, asyncio.current_task()
        if streamed is None or not isinstance(error, asyncio.CancelledError):
            return error
        if self._recorder.run.stopped_by is None:
            return error
        await asyncio.wait({work}, timeout=0)
        failed = _seams.take_failed_guardrail(streamed)
        if failed is not None and task is not None:
            task.uncancel()
        return failed or error

    def _is_answered(self, result: Any) -> bool:
        """Return whether a run that was stopped has an answer all the same.

        It has one where the SDK ended the run by itself and had all that its answer needs: neither
        a judge nor the call whose result is the answer was refused. Or the user's handler gave it.
        """
        recorder = self._recorder
        if recorder.is_handled:
            return True
        if recorder.run.trip is None or result.final_output is None:
            return False
        refused = [
            one.open_call.answer
            for turn in recorder.turns[-1:]
            for one in turn.requested
            if one.partial is not None or one.open_call.refusal is not None
        ]
        return result.final_output not in refused

    # The result of a run that was stopped

    def _facts(self) -> agents.RunErrorDetails:
        """Rebuild what a cancelled run takes with it from what its hooks saw."""
        recorder, given = self._recorder, self._given
        context = self._options.get("context")
        return agents.RunErrorDetails(
            input=_seams.input_of(given) if _seams.is_state(given) else given,
            new_items=list(recorder.earlier),
            raw_responses=[],
            last_agent=recorder.agent,
            context_wrapper=recorder.context or agents.RunContextWrapper(context=context),
            input_guardrail_results=[],
            output_guardrail_results=[],
        )

    def _whole(self, data: Any) -> tuple[list[agents.RunItem], list[agents.RunItem], list[Any]]:
        """Return the items of a run, those that are missing, and all its responses."""
        recorder, responses = self._recorder, list(data.raw_responses)
        items: list[agents.RunItem] = [
            one
            for one in data.new_items
            if one.type != "tool_approval_item" and not recorder.is_withheld(one)
        ]
        closing = closing_items(recorder.turns, items, responses, recorder.resumed)
        held = () if recorder.withheld is None else (recorder.withheld,)
        for made in (*(turn.response for turn in recorder.turns), *held):
            if not any(made is response for response in responses):
                responses.append(made)
        return items, closing, responses

    async def _closed(self, trip: Trip, data: Any) -> Any:
        """Give a stopped run its closed history and its last message; `data` is what is known."""
        recorder, streamed = self._recorder, self._streamed
        recorder.withhold()
        kept, closing, responses = self._whole(data)
        final: Any = None
        if recorder.question is None:
            final = await self._ended(trip, data, [*kept, *closing], closing, responses)
        if streamed is not None:
            streamed.raw_responses = responses
            _seams.extend_streamed(streamed, kept, closing)
            streamed.final_output = final
            streamed.is_complete = True
            recorder.closing = closing
            return streamed
        result = agents.RunResult(
            input=data.input,
            new_items=[*kept, *closing],
            raw_responses=responses,
            final_output=final,
            input_guardrail_results=data.input_guardrail_results,
            output_guardrail_results=data.output_guardrail_results,
            # Older releases do not report these of a run that failed.
            tool_input_guardrail_results=getattr(data, "tool_input_guardrail_results", []),
            tool_output_guardrail_results=getattr(data, "tool_output_guardrail_results", []),
            context_wrapper=data.context_wrapper,
            _last_agent=data.last_agent,
            max_turns=self._options.get("max_turns"),
        )
        kept_by = _seams.kept_by_server(self._given, self._options)
        _seams.complete_result(result, kept_by, self._given, recorder.run_config)
        return result

    async def _ended(
        self,
        trip: Trip,
        data: Any,
        whole: list[agents.RunItem],
        closing: list[agents.RunItem],
        responses: Sequence[Any],
    ) -> Any:
        """Add the last message to a closed history, and return the final output."""
        recorder, run = self._recorder, self._recorder.run
        if recorder.cut and whole and isinstance(whole[-1], agents.MessageOutputItem):
            # Behind an answer that was cut short there is no other message.
            return None if _is_typed(recorder.agent) else _text_of(whole[-1])

        async def history() -> list[Any]:
            items = history_of(data.input, whole)
            return [*await _sessions.before(self._options.get("session"), items), *items]

        context = getattr(recorder.context or data.context_wrapper, "context", None)
        answer, output = await _last_answer(recorder, trip, context, history)
        if answer is None and recorder.handler is not None and _is_typed(recorder.agent):
            answer, output = await self._handled(trip, data, whole, responses)
        text = answer or kit.synthetic_text(run.guard)
        if answer is None and run.parent is not None and run.parent.run is not None:
            # A run around also gets what its sub-agent had said so far.
            written = agents.ItemHelpers.text_message_outputs(whole[len(recorder.earlier) :])
            text = f"{written}\n\n{text}" if written else text
        metadata = kit.synthetic_metadata(run.guard, trip, finalized=run.finalized)
        closing.append(synthetic_message(data.last_agent, text, metadata))
        return output if _is_typed(recorder.agent) else text

    async def _handled(self, trip: Trip, data: Any, whole: Any, responses: Any) -> Any:
        """Ask the user's handler of `max_turns`, once, for an output of the agent's type."""
        recorder = self._recorder
        handler, recorder.handler = recorder.handler, None
        try:
            return await _seams.handled(
                handler,
                agents.MaxTurnsExceeded(trip.detail),
                recorder.context or data.context_wrapper,
                recorder.agent,
                input=data.input,
                new_items=list(whole),
                raw_responses=list(responses),
            )
        except Exception as error:
            recorder.run.guard.tree.report("error_handlers", error)
            return None, None

    async def _store(self, result: Any, *, rebuilt: bool) -> None:
        """Add to the user's session what the run was stopped before adding.

        What was rebuilt of the model's answers holds what the filter of a handoff took away; it is
        taken out where the session lacks it.
        """
        session = self._options.get("session")
        if session is None:
            return
        new = [item.to_input_item() for item in result.new_items]
        # It was in no session yet, though one may have ended with the same words before.
        ends = any(isinstance(one, SyntheticMessage) for one in result.new_items[-1:])
        written = [new.pop()] if ends else []
        try:
            stored = await _sessions.read(session)
            held = self._recorder.withheld
            for item in reversed(held.to_input_items() if held else ()):
                # The SDK may have stored it before it asked its judges.
                if _sessions.ends_with(stored, item):
                    await _sessions.patiently(session.pop_item())
                    stored.pop()
            if _seams.is_state(self._given):
                history = result.to_input_list()
                compared = _sessions.compare(stored, history[: len(history) - len(written)])
            else:
                own = agents.ItemHelpers.input_to_new_input_list(self._given)
                compared = _sessions.compare(stored, [*own, *new])
                result.input = [*compared.before, *own]
                if rebuilt:
                    _seams.drop_items(result, {n - len(own) for n in compared.excluded})
            await _sessions.patiently(session.add_items([*compared.missing, *written]))
        except Exception as error:
            self._recorder.run.guard.tree.report("session", error)

    # The outcome

    async def _finish(self, result: Any, trip: Trip | None) -> None:
        recorder, session, run = self._recorder, self._recorder.session, self._recorder.run
        waits = bool(result.interruptions)
        if waits:
            recorder.leave({kit.part(item.raw_item, "call_id") for item in result.interruptions})
        else:
            recorder.close_batch()
            if trip is not None:
                session.stop(trip)
        recorder.location.result = result
        found = await kit.run_awaited(
            session.finish(
                result.to_input_list(),
                final=result.final_output,
                waits=waits,
                next_step=None if trip is None else "call the model",
                resume=_ANSWER if waits else _RESUME,
            )
        )
        session.attach(result)
        parent = run.parent
        if (
            found.status == "terminated"
            and isinstance(parent, RunFrame)
            and parent.requested is not None
        ):
            # The tool call that it is the body of gets what it had brought.
            final = result.final_output
            parent.requested.partial = (
                _text_of(result.new_items[-1]) if final is None else str(final)
            )
        recorder.let_go()
        if not waits and run.trip is not None and run.is_passed_on:
            raise RunStopped(run.trip, found)

    async def _fail(self, error: BaseException) -> None:
        """End a run that an exception or a cancellation left; who has its result may read it."""
        recorder = self._recorder
        recorder.close_batch(error)
        data = getattr(error, "run_data", None) or self._facts()
        kept, closing, _ = self._whole(data)
        messages = history_of(data.input, [*kept, *closing])
        end = recorder.session.finish(messages, error=error, resume=_RESUME)
        # Whoever cancels a run does not wait for its store.
        is_cancelled = isinstance(error, asyncio.CancelledError)
        _ = kit.run_blocking(end) if is_cancelled else await kit.run_awaited(end)
        if self._streamed is not None:
            recorder.session.attach(self._streamed)
        recorder.let_go()


def _text_of(item: agents.RunItem) -> str:
    return (
        agents.ItemHelpers.text_message_output(item)
        if isinstance(item, agents.MessageOutputItem)
        else ""
    )


def _is_typed(agent: agents.Agent[Any]) -> bool:
    """Return whether an agent's output is no text."""
    kind: Any = agent.output_type
    if isinstance(kind, agents.AgentOutputSchemaBase):
        return not kind.is_plain_text()
    return kind is not None and kind is not str


async def _last_answer(
    recorder: Recorder, trip: Trip, context: Any, history: Callable[[], Any]
) -> tuple[str | None, Any]:
    """Ask the model for the end of a stopped run, once and without tools.

    Returns:
        The text, and the output where that is of a type; None without an answer.
    """
    agent, config = recorder.agent, recorder.run_config
    # Nobody would judge the answer; an answer that was cut short is the last message by itself.
    judged = agent.output_guardrails or config.output_guardrails
    withheld = judged or recorder.cut or recorder.is_server_side or recorder.sent is None
    last = None if withheld else kit.last_answer(recorder.run, trip)
    if last is None:
        return None, None
    model, request = cast("Any", recorder.sent)
    try:
        sent = ModelInputData(await history(), request["system_instructions"])
        own: Any = config.call_model_input_filter
        if own is not None:
            filtered = own(CallModelData(sent, agent, context))
            sent = await filtered if inspect.isawaitable(filtered) else filtered
        groups = kit.grouped(cast("Any", sent.input))
        requested: Any = [_plain(one) for (one,) in kit.in_words(groups, kit.RESPONSES)]
    except Exception as error:
        # Code of the user's: it filters what is sent.
        recorder.run.guard.tree.report("last answer", error)
        return None, None
    name, provider = model_of(agent, config)
    tokens = kit.Prompt().project(
        requested, system=sent.instructions, output_schema=agent.output_type
    )
    outputs: list[Any] = [None]

    async def say(open_call: kit.OpenModelCall) -> kit.Answer:
        settings = replace(request["model_settings"], tool_choice=None, parallel_tool_calls=None)
        set_bound(settings, open_call.max_output_tokens, extra_bounds(settings))
        response = await model.get_response(
            system_instructions=sent.instructions,
            input=requested,
            model_settings=settings,
            tools=[],
            output_schema=request["output_schema"],
            handoffs=[],
            tracing=agents.ModelTracing.DISABLED,
            previous_response_id=None,
            conversation_id=None,
            prompt=None,
        )
        text = agents.ItemHelpers.text_message_outputs(turn_items(Turn(agent, response)))
        if _is_typed(agent):
            try:
                outputs.append(request["output_schema"].validate_json(text))
            except Exception as error:
                recorder.run.guard.tree.report("last answer", error)
                text = ""
        return kit.Answer(text=text, usage=usage_of(response))

    call = kit.ModelCall(model=name, provider=provider, input_tokens=tokens)
    return await last.ask_async(call, say), outputs[-1]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    # Of the SDK's converters, that of chats takes the words of an assistant as a text only.
    content, role = message["content"], message["role"]
    return {"role": role, "content": kit.content_text(content) if role == "assistant" else content}
