"""A model call, from LangChain's start hook to its end, in the verbs of the kit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.outputs import LLMResult

from budgetguard_core import Trip
from budgetguard_core.kit import (
    FRAME,
    Flow,
    Request,
    Stop,
    ask_model,
    current,
    entered,
    reported_cost,
    token_usage,
)
from budgetguard_langgraph._bounds import bind, words_of
from budgetguard_langgraph._run import (
    OWNERS,
    GraphRun,
    ModelCallInFlight,
    RunId,
    Stretch,
    when_task_ends,
)
from budgetguard_langgraph._seams import Asked
from budgetguard_langgraph._usage import (
    answer_of,
    calls_of,
    is_mapping,
    model_of,
    own_bound,
    request_of,
    totals_in,
    unusable_in,
    was_cut,
    written,
)

_NOTHING: Final[Mapping[str, Any]] = {}


def start(
    graph_run: GraphRun,
    run_id: RunId,
    parent_run_id: RunId | None,
    prompts: Any,
    asked: Asked,
    facts: Mapping[str, Any],
) -> Flow[Trip | None]:
    """Ask for a model call and begin it; return why the run has to end instead.

    Args:
        graph_run: The run.
        run_id: The id of the call.
        parent_run_id: The id of the chain around it.
        prompts: What the start hook is given: of a chat model conversations, of a text model texts.
        asked: The request, as the model's own code has it.
        facts: What else the hook is told.
    """
    if run_id in graph_run.models:
        return None
    prompt: Any = prompts[0] if prompts and isinstance(prompts[0], list) else prompts
    given = facts.get("invocation_params")
    parameters = given if is_mapping(given) else _NOTHING
    metadata: Mapping[str, Any] = facts.get("metadata") or _NOTHING
    model, provider, bound = request_of(metadata, parameters)
    words = None if asked.settings is None else words_of(asked.model)
    can_not_be_bound = asked.settings is not None and words is None
    if bound is None and (can_not_be_bound or (words is not None and words.options is not None)):
        bound = own_bound(asked.model)  # it is known by the model alone
    node = metadata.get("langgraph_checkpoint_ns")
    branch, place = graph_run.branch(node), node or parent_run_id or run_id
    # The graph's own agents, and not those that its tools run.
    if "|" not in str(node) or graph_run.asked_model[0] is None:
        told = [one for one in prompt if isinstance(one, SystemMessage)]
        graph_run.asked_model, graph_run.model_name = (asked.model, told), model
    with graph_run.lock:
        branch.look_at(prompt, graph_run.handoffs)
    sent = asked.messages if graph_run.run.envelope.prune is not None else None
    request = Request(
        messages=prompt if sent is None else sent,
        prunes=sent is not None,
        tools=parameters.get("tools"),
        schema=parameters.get("response_format") or parameters.get("response_schema"),
        model=model,
        provider=provider,
        retry=place in graph_run.failed,
        bound=bound,
        is_fixed=can_not_be_bound and bound is not None,
        may_fall_back=words is not None and words.model is not None,
    )
    with _apart(graph_run, run_id, parent_run_id):
        turn = yield from ask_model(graph_run.run, branch.prompt, request)
    if isinstance(turn, Stop):
        if facts.get("batch_size", 1) > 1:
            _take_back_siblings(graph_run)
        graph_run.next_step = f"call the model {model or ''}".strip()
        return turn.trip
    if asked.messages is not None:
        # In the request alone: the graph's state stays what it is.
        if turn.is_pruned:
            asked.messages[:] = prompt = [*turn.messages]
        if turn.nudge is not None:
            asked.messages.append(HumanMessage(turn.nudge))
    is_bounded = False
    if asked.settings is not None:
        most = turn.call.max_output_tokens
        tokens = None if most == bound else most
        is_bounded = bind(asked.model, asked.settings, tokens, turn.call, parameters)
    flying = ModelCallInFlight(
        run_id,
        Stretch(graph_run, turn.call, run_id),
        turn,
        branch,
        place,
        prompt,
        metadata.get("langgraph_node"),
        is_bounded,
    )
    graph_run.models[run_id] = flying
    OWNERS[run_id] = graph_run
    FRAME.set(flying.step)
    graph_run.save()
    flying.forget = when_task_ends(partial(fail, graph_run, run_id, asyncio.CancelledError()))
    return None


def _apart(graph_run: GraphRun, run_id: RunId, parent: RunId | None) -> Any:
    """Leave the call of a stream that is read between its chunks; this one is another."""
    frame = current()
    if type(frame) is Stretch and frame.call is not None and frame.run_id not in (parent, run_id):
        return entered(graph_run.run.frame())
    return nullcontext()


def _take_back_siblings(graph_run: GraphRun) -> None:
    """Take back the other prompts of a `generate`: all of them start before the first is sent."""
    while isinstance(frame := current(), Stretch) and frame.run_id is not None:
        flying = _taken(graph_run, frame.run_id)
        if flying is None:
            break
        flying.turn.take_back()


def token(graph_run: GraphRun, run_id: RunId, text: str, chunk: Any) -> Trip | None:
    """Measure a stream; return why it has to end now."""
    flying = graph_run.models.get(run_id)
    if flying is None:
        return None
    flying.turn.piece(text)
    usage = getattr(getattr(chunk, "message", None), "usage_metadata", None)
    if usage:
        flying.reported.append(usage)
    run = graph_run.run
    return run.check() if run.aborted or run.time_left() == 0 else None


def _taken(graph_run: GraphRun, run_id: RunId) -> ModelCallInFlight | None:
    with graph_run.lock:
        flying = graph_run.models.pop(run_id, None)
    OWNERS.pop(run_id, None)
    if flying is not None:
        flying.forget()
        flying.step.leave()
    return flying


def end(graph_run: GraphRun, run_id: RunId, response: LLMResult) -> None:
    """Charge a model call that answered, and keep what it asked for."""
    flying = _taken(graph_run, run_id)
    if flying is None:
        return
    run, turn, branch = graph_run.run, flying.turn, flying.branch
    graph_run.failed.pop(flying.place, None)
    answer = answer_of(response)
    asked, hosted = calls_of(answer)
    record: Any = response if answer is None else answer
    used = totals_in(flying.reported) or token_usage(record)
    if used is not None and not used.estimated and [len(o) for o in response.generations] == [1]:
        # The usage of several candidates is that of all.
        branch.prompt.replied(answer, used)
    text, unusable = written(response), unusable_in(answer)
    run.answered(
        turn.call,
        used,
        text=text or "".join(turn.pieces),
        model=model_of(response, answer),
        cost_usd=reported_cost(record),
        speaker=flying.speaker,
        final=not asked and not unusable and graph_run.is_said_in_turn(text, flying.prompt),
    )
    if flying.bounded and not asked and was_cut(answer):
        run.cut_short(turn.call)
    for call in run.batch(hosted) if hosted else ():
        run.start(call)
        run.finished(call, "reported")
    with graph_run.lock:
        for lost, wrong, kind in unusable:
            branch.without_body(lost, wrong, kind)
        if asked and branch.put(asked):
            graph_run.results.clear()
    graph_run.sent, graph_run.said = flying.prompt, answer
    graph_run.save()


def fail(graph_run: GraphRun, run_id: RunId, error: BaseException) -> None:
    """Charge a model call that failed or was cancelled."""
    flying = _taken(graph_run, run_id)
    if flying is None:
        return
    graph_run.has_failed(flying.place)
    flying.turn.failed(error)
    graph_run.save()
