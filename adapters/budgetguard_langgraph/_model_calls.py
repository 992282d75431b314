"""A model call, from LangChain's start hook to its end, in the verbs of the kit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.outputs import LLMResult

from budgetguard_core import Mode, ModelCall, Stop, Trip
from budgetguard_core.kit import current, entered, project, reported_cost, token_usage
from budgetguard_langgraph._bounds import bind, can_be_bound
from budgetguard_langgraph._run import (
    OWNERS,
    GraphRun,
    ModelCallInFlight,
    Step,
    when_task_ends,
)
from budgetguard_langgraph._seams import close_pending_hooks, request_around
from budgetguard_langgraph._usage import (
    answer_of,
    calls_of,
    is_mapping,
    model_of,
    request_of,
    schema_of,
    was_cut,
    written,
)


def namespace_of(metadata: Mapping[str, Any] | None) -> str:
    """Return where in its graph a call is made."""
    return str((metadata or {}).get("langgraph_checkpoint_ns") or "")


def graph_of(namespace: str) -> str:
    """Return the namespace of the graph around a node: tasks have their own below it."""
    return namespace.rpartition("|")[0]


def start(
    graph_run: GraphRun,
    run_id: UUID,
    parent_run_id: UUID | None,
    metadata: Mapping[str, Any] | None,
    facts: Mapping[str, Any],
    prompt: Sequence[Any],
) -> Trip | None:
    """Admit a model call; return why the run has to end instead."""
    if run_id in graph_run.models:
        return None
    run = graph_run.run
    parameters = facts.get("invocation_params")
    parameters = parameters if is_mapping(parameters) else None
    model, provider, bound = request_of(metadata, parameters)
    node = namespace_of(metadata)
    namespace, place = graph_of(node), node or parent_run_id or run_id
    call = ModelCall(
        model=model,
        provider=provider,
        retry=place in graph_run.failed,
        max_output_tokens=bound,
    )
    if graph_run.is_capped:
        call.input_tokens = graph_run.prompt_of(namespace).project(
            list(prompt), tools=(parameters or {}).get("tools"), output_schema=schema_of(parameters)
        )
    nudge = None if run.guard.mode is not Mode.ENFORCE else run.nudge()
    requested, settings, sent = None, None, None
    if nudge is not None or _is_bounded(graph_run):
        requested, settings, sent = request_around()
    if settings is not None and bound is not None and not can_be_bound(requested):
        # What the model may write, by its own bound, is what it may cost.
        call.output_is_fixed = True
    opened = _asked(graph_run, call, parent_run_id, run_id)
    if isinstance(opened, Stop):
        graph_run.next_step = f"call the model {model or ''}".strip()
        _unmade_siblings(graph_run, facts)
        close_pending_hooks()
        return opened.trip
    if nudge is not None and sent is not None:
        # Into the request alone: the history stays what it is.
        sent.append(HumanMessage(nudge))
    bounded = settings is not None and bind(
        requested,
        settings,
        None if opened.max_output_tokens == bound else opened.max_output_tokens,
        opened.seconds,
    )
    step = Step(graph_run, opened, run_id)
    opened.frame = step
    flying = ModelCallInFlight(
        opened,
        step,
        prompt,
        parameters,
        namespace,
        place,
        (metadata or {}).get("langgraph_node"),
        bounded,
    )
    flying.forget = when_task_ends(lambda: fail(graph_run, run_id, asyncio.CancelledError()))
    graph_run.models[run_id] = flying
    graph_run.ids.add(run_id)
    OWNERS[run_id] = graph_run
    step.enter()
    if run.is_saved:
        run.save()
    return None


def _asked(graph_run: GraphRun, call: ModelCall, parent: UUID | None, run_id: UUID) -> Any:
    frame = current()
    if (
        isinstance(frame, Step)
        and frame.run_id is not None
        and frame.run_id not in (parent, run_id)
    ):
        # The call of a stream that is read between its chunks; this one is another.
        with entered(graph_run.run.frame()):
            return graph_run.run.model_call(call)
    return graph_run.run.model_call(call)


def _is_bounded(graph_run: GraphRun) -> bool:
    return graph_run.is_capped or any(
        one.budget.max_output_tokens_per_call is not None or one.budget.max_seconds is not None
        for guard in graph_run.run.guards
        for one in guard.lineage
    )


def _unmade_siblings(graph_run: GraphRun, facts: Mapping[str, Any]) -> None:
    """Take back the other prompts of a `generate`: all of them start before the first is sent."""
    if facts.get("batch_size", 1) <= 1:
        return
    frame = current()
    while isinstance(frame, Step) and frame.run_id in graph_run.models:
        run_id = cast("UUID", frame.run_id)
        flying = graph_run.models.pop(run_id)
        OWNERS.pop(run_id, None)
        flying.forget()
        graph_run.run.unmade(flying.call)
        flying.step.leave()
        frame = current()


def token(graph_run: GraphRun, run_id: UUID, text: str) -> Trip | None:
    """Measure a stream; return why it has to end now."""
    flying = graph_run.models.get(run_id)
    if flying is None:
        return None
    flying.streamed.append(text)
    run = graph_run.run
    return run.check() if run.aborted or run.time_left() == 0 else None


def _taken(graph_run: GraphRun, run_id: UUID) -> ModelCallInFlight | None:
    with graph_run.lock:
        flying = graph_run.models.pop(run_id, None)
        graph_run.ids.discard(run_id)
    OWNERS.pop(run_id, None)
    if flying is not None:
        flying.forget()
        flying.step.leave()
    return flying


def end(graph_run: GraphRun, run_id: UUID, response: LLMResult) -> None:
    """Charge a model call that answered, and keep what it asked for."""
    flying = _taken(graph_run, run_id)
    if flying is None:
        return
    run = graph_run.run
    graph_run.failed.pop(flying.place, None)
    answer = answer_of(response)
    asked, hosted = calls_of(answer)
    record: Any = response if answer is None else answer
    used = token_usage(record)
    if used is None or used.estimated or not used.input_tokens:
        _project(flying)
    text = written(response)
    run.answered(
        flying.call,
        used,
        text=text or "".join(flying.streamed),
        model=model_of(response),
        cost_usd=reported_cost(record),
        speaker=flying.speaker,
        final=not asked and graph_run.is_said_in_turn(text, flying.prompt),
    )
    if flying.bounded and not asked and was_cut(answer):
        run.cut_short(flying.call)
    if hosted:
        for call in run.batch(hosted):
            run.start(call)
            run.finished(call, "reported")
    if asked:
        graph_run.ask(flying.namespace, asked)
    messages = [one for one in flying.prompt if isinstance(one, BaseMessage)]
    graph_run.conversation = [*messages, answer] if answer is not None else messages
    if run.is_saved:
        run.save()


def fail(graph_run: GraphRun, run_id: UUID, error: BaseException) -> None:
    """Charge a model call that failed or was cancelled."""
    flying = _taken(graph_run, run_id)
    if flying is None:
        return
    graph_run.has_failed(flying.place)
    _project(flying)
    graph_run.run.failed(flying.call, error, written="".join(flying.streamed))
    if graph_run.run.is_saved:
        graph_run.run.save()


def _project(flying: ModelCallInFlight) -> None:
    """Estimate a prompt after all, where no cap asked for it before."""
    call = flying.call.call
    if not call.input_tokens:
        parameters = flying.parameters or {}
        call.input_tokens = project(
            list(flying.prompt),
            tools=parameters.get("tools"),
            output_schema=schema_of(parameters),
        )
