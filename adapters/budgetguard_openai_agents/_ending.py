"""The SDK's result of a run that was stopped; and the end of every run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from agents import (
    ItemHelpers,
    MaxTurnsExceeded,
    MessageOutputItem,
    ModelResponse,
    ModelTracing,
    OpenAIResponsesModel,
    RunContextWrapper,
    RunErrorDetails,
    RunItem,
    RunResult,
    RunResultStreaming,
    RunState,
    TResponseInputItem,
)
from agents.run import CallModelData, ModelInputData

from budgetguard_core import Outcome, Trip
from budgetguard_core.kit import (
    ANSWER_NOW,
    RESPONSES,
    Answer,
    ModelCall,
    OpenModelCall,
    Prompt,
    content_text,
    grouped,
    in_words,
    last_answer,
    part,
    remember,
    synthetic_metadata,
    synthetic_text,
)
from budgetguard_openai_agents import _history, _seams
from budgetguard_openai_agents._frame import RunFrame, RunStopped
from budgetguard_openai_agents._history import (
    SyntheticMessage,
    closing_items,
    history_of,
    synthetic_message,
)
from budgetguard_openai_agents._model import model_of, set_bound, usage_of
from budgetguard_openai_agents._run import Recorder
from budgetguard_openai_agents.questions import approval

_RESUME = (
    "Run the agent again under a fresh budget, with the same session or conversation, with "
    "result.to_input_list(), or with result.to_state()."
)
_ANSWER = "Answer with result.to_state(), and give that to the runner with a budget."


async def ended(
    recorder: Recorder,
    work: asyncio.Task[Any],
    given: Any,
    options: dict[str, Any],
    streamed: RunResultStreaming | None = None,
) -> Any:
    """Wait for a run's work, and give the run its end: a result, also where it was stopped.

    Args:
        recorder: The hooks of the run.
        work: What the SDK runs.
        given: The input of the run.
        options: Its options.
        streamed: The result of a streamed run.

    Raises:
        RunStopped: The caller wants it so, or the stop is that of a run around this one.
    """
    run = recorder.run
    known: Any = streamed
    result: Any = None
    try:
        trip = await recorder.supervised(work)
        if trip is None or (work.done() and not work.cancelled()):
            answer = work.result()
            trip, result = None, streamed or answer
            if streamed is not None and not streamed.interruptions:
                _seams.raise_tripwire(streamed)
        else:
            recorder.cut_off()
            is_judged = streamed is not None and recorder.is_judged()
            result = cast("Any", streamed if is_judged else None)
    except BaseException as raised:
        error = raised
        work.cancel()  # whoever cancels the run may do it before anybody waits for its work
        if streamed is not None and isinstance(error, asyncio.CancelledError) and run.stopped_by:
            # The SDK cancels a streamed run whose input guardrail failed.
            await asyncio.wait({work}, timeout=0)
            failed = _seams.take_failed_guardrail(streamed)
            if failed is not None:
                cast("asyncio.Task[Any]", asyncio.current_task()).uncancel()
                error = failed
        trip = recorder.left_by(error)
        if trip is None:
            await fail(recorder, error, given, streamed)
            raise
        recorder.cut_off(error)
        known = streamed or getattr(error, "run_data", None)
    waits = result is not None and bool(result.interruptions)
    trip = trip or recorder.stopping or run.stopped_by
    if trip is None and streamed is not None and _seams.is_cancelled(streamed) and not waits:
        left = asyncio.CancelledError("the stream was cancelled")
        await fail(recorder, left, given, streamed)
        return streamed
    if trip is not None and not waits and not (result and is_answered(recorder, result)):
        data = known or result
        result = await _closed(recorder, trip, data, given, options, streamed)
        await store_in_session(recorder, options.get("session"), given, result, rebuilt=not data)
    elif trip is not None and not waits and recorder.is_completed_by_a_call(trip):
        # Nothing that the refused calls of the same batch would have brought was waited for.
        trip = run.trip = None
    if recorder.question is not None:
        trip = None
        result.interruptions = [approval(recorder.agent, recorder.question)]
    await conclude(recorder, trip, cast("RunResult", result))
    return result


async def _closed(
    recorder: Recorder,
    trip: Trip,
    data: Any,
    given: Any,
    options: dict[str, Any],
    streamed: RunResultStreaming | None,
) -> Any:
    """Give a stopped run its closed history and its last message; `data` is what the SDK knows."""
    data = data or _data_from(recorder, given, options)
    recorder.withhold()
    kept, closing, responses = _whole(recorder, data.new_items, data.raw_responses)
    whole = [*kept, *closing]
    last = LastWords()
    if recorder.question is None:
        last = await last_words(recorder, trip, data, whole, responses, options.get("session"))
    # Behind an answer that was cut short there is none: its text is the last message.
    if recorder.question is None and not (
        recorder.cut and isinstance(whole[-1] if whole else None, MessageOutputItem)
    ):
        closing.append(_last(recorder, trip, data.last_agent, whole, responses, last))
    final = last.final if last.is_typed or recorder.question else _text_of([*kept, *closing][-1])
    if streamed is not None:
        streamed.raw_responses = responses
        _seams.extend_streamed(streamed, kept, closing)
        streamed.final_output = final
        streamed.is_complete = True
        recorder.closing = closing
        return streamed
    result = RunResult(
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
        max_turns=options.get("max_turns"),
    )
    kept_by = _seams.kept_by_server(given, options)
    _seams.complete_result(result, kept_by, given, recorder.run_config)
    return result


def _last(
    recorder: Recorder,
    trip: Trip,
    agent: Any,
    items: Sequence[RunItem],
    responses: Sequence[Any],
    last: LastWords,
) -> SyntheticMessage:
    """Make the synthetic message; a run above also gets what its sub-agent had said so far."""
    run = recorder.run
    text = last.text or synthetic_text(run.guard)
    if last.text is None and run.above is not None and run.above.run is not None:
        said = ItemHelpers.text_message_outputs(list(items[len(recorder.earlier) :]))
        text = f"{said}\n\n{text}" if said else text
    metadata = synthetic_metadata(run.guard, trip, finalized=run.finalized)
    return synthetic_message(agent, text, metadata, responses)


def is_answered(recorder: Recorder, result: Any) -> bool:
    """Return whether a run that was stopped has an answer all the same.

    It has one where the SDK ended the run by itself and had all that its answer needs: neither a
    judge nor the call whose result is the answer was refused. Or the user's own handler gave it.
    """
    if recorder.is_handled:
        return True
    if recorder.run.trip is None or result.final_output is None:
        return False
    refused = [
        one.shown()
        for turn in recorder.turns[-1:]
        for one in turn.asked
        if one.partial is not None or (one.opened is not None and one.opened.refusal is not None)
    ]
    return result.final_output not in refused


async def store_in_session(
    recorder: Recorder,
    session: Any,
    given: Any,
    result: RunResult | RunResultStreaming,
    *,
    rebuilt: bool = False,
) -> None:
    """Add to the user's session what the run was stopped before adding.

    Args:
        recorder: The hooks of the run.
        session: The user's session.
        given: The input of the run.
        result: Its result.
        rebuilt: It was made of the model's answers: what the filter of a handoff took away is in
            it, and is taken out where the session lacks it.
    """
    if session is None:
        return
    new = [item.to_input_item() for item in result.new_items]
    # It was in no session yet, though one may have ended with the same words before.
    ends = any(isinstance(one, SyntheticMessage) for one in result.new_items[-1:])
    said = [new.pop()] if ends else []
    try:
        stored = await _history.read(session)
        for item in recorder.withheld():
            # The SDK may have stored it before it asked its judges.
            if _history.ends_with(stored, item):
                await _history.drop_last(session)
                stored.pop()
        if isinstance(given, RunState):
            history = result.to_input_list()
            compared = _history.compare(stored, history[: len(history) - len(said)])
        else:
            own = ItemHelpers.input_to_new_input_list(given)
            compared = _history.compare(stored, [*own, *new])
            result.input = [*compared.before, *own]
            if rebuilt:
                _seams.drop_items(result, {n - len(own) for n in compared.left_out})
        await _history.add(session, [*compared.missing, *said])
    except Exception as error:
        recorder.run.guard.tree.report("session", error)


async def conclude(
    recorder: Recorder, trip: Trip | None, result: RunResult | RunResultStreaming
) -> None:
    """End the run, and put the outcome where `outcome` finds it.

    Raises:
        RunStopped: The caller wants it so, or the stop is that of a run around this one.
    """
    run = recorder.run
    waits = bool(result.interruptions)
    if waits:
        recorder.leave({part(item.raw_item, "call_id") for item in result.interruptions})
    else:
        recorder.close_batch()
    messages = result.to_input_list()

    def end() -> Outcome:
        if waits:
            return run.pause(messages, resume=_ANSWER)
        return run.end(
            messages,
            result.final_output,
            trip=trip,
            next_step=None if trip is None else "call the model",
            resume=_RESUME,
        )

    found = await run.in_thread(end)
    if waits:
        _seams.keep(result, run.guard.snapshot().model_dump_json())
    remember(result, found)
    if found.status == "terminated":
        _hand_over(recorder, result)
    recorder.let_go()
    stop = run.trip
    if stop is not None and not waits and (run.is_to_raise or run.is_of_the_run_around(stop)):
        raise RunStopped(stop, found)


def _hand_over(recorder: Recorder, result: RunResult | RunResultStreaming) -> None:
    """Leave what a stopped run had brought with the tool call that it is the body of."""
    above = recorder.run.above
    if isinstance(above, RunFrame) and above.asked is not None:
        final = result.final_output
        above.asked.partial = _text_of(result.new_items[-1]) if final is None else str(final)


async def fail(
    recorder: Recorder,
    error: BaseException,
    given: Any,
    result: RunResultStreaming | None = None,
) -> None:
    """End a run that an exception or a cancellation left; who has its result may read it there."""
    recorder.close(error)
    known: RunErrorDetails | None = getattr(error, "run_data", None)
    data = known or _data_from(recorder, given, {})
    kept, closing, _ = _whole(recorder, data.new_items, data.raw_responses)
    messages = history_of(data.input, [*kept, *closing])
    end: Callable[[], Outcome] = lambda: recorder.run.fail(error, messages, resume=_RESUME)  # noqa: E731
    # Whoever cancels a run does not wait for its store.
    cancelled = isinstance(error, asyncio.CancelledError)
    found = end() if cancelled else await recorder.run.in_thread(end)
    if result is not None:
        remember(result, found)
    recorder.let_go()


def _whole(
    recorder: Recorder, new_items: Sequence[RunItem], raw_responses: Sequence[Any]
) -> tuple[list[RunItem], list[RunItem], list[Any]]:
    """Return the items of a run, those that are missing, and all its responses."""
    items: list[RunItem] = [
        one
        for one in new_items
        if one.type != "tool_approval_item" and not recorder.is_withheld(one)
    ]
    closing = closing_items(recorder.turns, items, raw_responses, recorder.resumed)
    responses = list(raw_responses)
    for turn in recorder.turns:
        if not any(turn.response is response for response in responses):
            responses.append(turn.response)
    return items, closing, responses


def _data_from(recorder: Recorder, given: Any, options: dict[str, Any]) -> RunErrorDetails:
    """Rebuild what a cancelled run takes with it from what its hooks saw."""
    resumed = isinstance(given, RunState)
    sent: list[TResponseInputItem] | str = _seams.input_of(given) if resumed else given
    return RunErrorDetails(
        input=sent,
        new_items=list(recorder.earlier),
        raw_responses=[],
        last_agent=recorder.agent,
        context_wrapper=recorder.context or RunContextWrapper(context=options.get("context")),
        input_guardrail_results=[],
        output_guardrail_results=[],
    )


def _text_of(item: RunItem) -> str:
    return ItemHelpers.text_message_output(item) if isinstance(item, MessageOutputItem) else ""


# The last answer


class LastWords(NamedTuple):
    """How a stopped run ends."""

    text: str | None = None
    """The text of its last message; None for the synthetic one."""
    is_typed: bool = False
    """The program asked for an output of a type."""
    final: Any = None
    """That output; None where nobody gave one."""


async def last_words(
    recorder: Recorder,
    trip: Trip,
    data: Any,
    items: Sequence[RunItem],
    responses: Sequence[ModelResponse],
    session: Any,
) -> LastWords:
    """Ask for the end of a stopped run: the model, where the run has a reserve for it.

    For an output of a type, the user's own handler of `max_turns` is asked where there is none.

    Args:
        recorder: The hooks of the run.
        trip: Why it was stopped.
        data: What the SDK knows of it.
        items: Its items, closed.
        responses: The model's responses.
        session: The user's session, if any.
    """
    agent = recorder.agent
    schema = _seams.schema_of(agent)
    is_typed = schema is not None and not schema.is_plain_text()
    found: list[Any] = []

    def parsed(text: str) -> str:
        if schema is None or not is_typed:
            return text
        try:
            found.append(schema.validate_json(text))
        except Exception as error:
            recorder.run.guard.tree.report("last answer", error)
            return ""
        return text

    answer = await _answer(recorder, trip, history_of(data.input, items), data, session, parsed)
    if answer is not None or not is_typed:
        return LastWords(answer, is_typed, *found)
    handler = recorder.take_handler()
    if handler is None:
        return LastWords(is_typed=True)
    facts = {"input": data.input, "new_items": list(items), "raw_responses": list(responses)}
    context = recorder.context or data.context_wrapper
    error = MaxTurnsExceeded(trip.detail)
    try:
        text, final = await _seams.handled(handler, error, context, agent, facts)
    except Exception as raised:
        recorder.run.guard.tree.report("error_handlers", raised)
        return LastWords(is_typed=True)
    return LastWords(text, is_typed=True, final=final)


async def _answer(
    recorder: Recorder,
    trip: Trip,
    history: list[Any],
    data: Any,
    session: Any,
    parsed: Callable[[str], str],
) -> str | None:
    agent, config = recorder.agent, recorder.run_config
    # Nobody would judge the answer; an answer that was cut short is the last message by itself.
    judged = agent.output_guardrails or config.output_guardrails
    withheld = judged or recorder.cut or recorder.is_server_side
    last = None if withheld else last_answer(recorder.run, trip)
    if last is None or recorder.sent is None:
        return None
    try:
        sent = await _request(recorder, history, data, session)
    except Exception as error:
        # Code of the user's: it filters what is sent.
        recorder.run.guard.tree.report("last answer", error)
        return None
    model, request = recorder.sent
    name, provider = model_of(agent, config)
    system = sent.instructions
    tokens = Prompt().project(sent.input, system=system, output_schema=agent.output_type)
    call = ModelCall(model=name, provider=provider, input_tokens=tokens)

    async def say(opened: OpenModelCall) -> Answer:
        own = request["model_settings"]
        settings = replace(own, tool_choice=None, parallel_tool_calls=None)
        set_bound(settings, opened.max_output_tokens)
        response = await model.get_response(
            system_instructions=system,
            input=sent.input,
            model_settings=settings,
            tools=[],
            output_schema=request["output_schema"],
            handoffs=[],
            tracing=ModelTracing.DISABLED,
            previous_response_id=None,
            conversation_id=None,
            prompt=None,
        )
        return Answer(text=parsed(_text(response.output)), usage=usage_of(response))

    return await last.ask_async(call, say)


async def _request(
    recorder: Recorder, history: list[Any], data: Any, session: Any
) -> ModelInputData:
    items = history
    if session is not None:
        stored = await _history.read(session)
        items = [*_history.compare(stored, items).before, *items]
    model, request = recorder.sent
    sent = ModelInputData(input=items, instructions=request["system_instructions"])
    own = recorder.run_config.call_model_input_filter
    if own is not None:
        context = getattr(recorder.context or data.context_wrapper, "context", None)
        filtered: Any = own(CallModelData(sent, recorder.agent, context))
        sent = await filtered if inspect.isawaitable(filtered) else filtered
    asked: Any = [*sent.input, {"role": "user", "content": ANSWER_NOW}]
    if not isinstance(model, OpenAIResponsesModel):
        # Anthropic and Bedrock, through LiteLLM and its like, take no calls without their tools.
        said = in_words(grouped(cast("Any", sent.input)), RESPONSES)
        asked = [{"role": one["role"], "content": _words(one)} for (one,) in said]
    return ModelInputData(input=asked, instructions=sent.instructions)


def _words(message: dict[str, Any]) -> Any:
    # Of the SDK's converters, that of chats takes the words of an assistant as a text only.
    content = message["content"]
    return content_text(content) if message["role"] == "assistant" else content


def _text(output: list[Any]) -> str:
    said = (part(item, "content") for item in output if part(item, "type") == "message")
    return "".join(part(piece, "text") or "" for content in said for piece in content or ())
