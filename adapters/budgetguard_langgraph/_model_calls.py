"""A model call, from LangChain's start hook to its end, in the verbs of the kit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.outputs import LLMResult

from budgetguard_core import Guard, Trip
from budgetguard_core.kit import FRAME, ModelCall, OpenModelCall, Stop, current, entered
from budgetguard_langgraph._bounds import bind, tell, words_of
from budgetguard_langgraph._run import (
    OWNERS,
    GraphRun,
    ModelCallInFlight,
    RunId,
    Step,
)
from budgetguard_langgraph._seams import close_pending_hooks, request_around
from budgetguard_langgraph._usage import (
    answer_of,
    calls_of,
    is_mapping,
    model_of,
    own_bound,
    request_of,
    schema_of,
    totals_in,
    unusable_in,
    used_by,
    was_cut,
    written,
)

_NOTHING: Final[Mapping[str, Any]] = {}


def graph_of(node: str) -> str:
    """Return the namespace of the graph around a node: tasks have their own below it."""
    return node.rpartition("|")[0]


def ask(
    graph_run: GraphRun,
    run_id: RunId,
    parent_run_id: RunId | None,
    prompts: Any,
    facts: Mapping[str, Any],
) -> ModelCallInFlight | None:
    """Ask for a model call; None where it was told of before.

    Args:
        graph_run: The run.
        run_id: The id of the call.
        parent_run_id: The id of the chain around it.
        prompts: What the start hook is given: of a chat model conversations, of a text model texts.
        facts: What else the hook is told.
    """
    if run_id in graph_run.models:
        return None
    prompt = prompts[0] if prompts and isinstance(prompts[0], list) else prompts
    given = facts.get("invocation_params")
    parameters = given if is_mapping(given) else None
    metadata: Mapping[str, Any] | None = facts.get("metadata")
    model, provider, bound = request_of(metadata, parameters)
    if graph_run.run.envelope.prune is not None:
        _, _, sent = request_around()
        kept = None if sent is None else graph_run.run.pruned(sent, model, provider)
        if sent is not None and kept is not None:
            # In the request alone: the graph's state stays what it is.
            sent[:] = prompt = kept
    node = str((metadata or _NOTHING).get("langgraph_checkpoint_ns") or "")
    namespace = graph_of(node) if "|" in node else ""
    place = node or parent_run_id or run_id
    call = ModelCall(
        model=model,
        provider=provider,
        retry=place in graph_run.failed,
        max_output_tokens=bound,
    )
    capped, limits, reserves = _needs_of(graph_run.run.guards)
    if capped:
        call.input_tokens = _projected(graph_run, namespace, prompt, parameters)
    requested, settings, fixed, may_fall_back = None, None, False, False
    if limits or reserves:
        requested, settings, _ = request_around()
    # The graph's own agents, and not those that its tools run.
    if reserves and (not namespace or graph_run.asked_model[0] is None):
        told = [one for one in prompt if isinstance(one, SystemMessage)]
        graph_run.asked_model, graph_run.model_name = (requested, told), model
    if limits and settings is not None:
        words = words_of(requested)
        if bound is None and (words is None or words.options is not None):
            # It is known by the model alone.
            bound = call.max_output_tokens = own_bound(requested)
        fixed = words is None and bound is not None
        may_fall_back = words is not None and words.model is not None
    if fixed:
        # What the model may write, by its own bound, is what it may cost.
        call.output_is_fixed = True
        bounds = [one.max_output_tokens_per_call for one in graph_run.budgets]
        if any(most is not None and most < (bound or 0) for most in bounds):
            tell(requested)
    graph_run.asked.answered(namespace, prompt, graph_run.handoffs)
    opened = _asked(graph_run, call, parent_run_id, run_id, may_fall_back)
    return ModelCallInFlight(
        run_id, facts, parameters, prompt, namespace, place, requested, settings, call, opened
    )


def begin(
    graph_run: GraphRun, flying: ModelCallInFlight, opened: OpenModelCall | Stop
) -> Trip | None:
    """Begin a model call; return why the run has to end instead."""
    run_id = flying.run_id
    if isinstance(opened, Stop):
        graph_run.next_step = f"call the model {flying.asked.model or ''}".strip()
        _unmade_siblings(graph_run, flying.facts)
        close_pending_hooks()
        return opened.trip
    if opened.nudge is not None:
        _, _, sent = request_around()
        if sent is not None:
            # Into the request alone: the history stays what it is.
            sent.append(HumanMessage(opened.nudge))
    if flying.settings is not None:
        most = opened.max_output_tokens
        added = None if most == flying.asked.max_output_tokens else most
        flying.bounded = bind(flying.model, flying.settings, added, opened, flying.parameters)
    flying.call = opened
    flying.step = step = Step(graph_run, opened, run_id)
    graph_run.models[run_id] = flying
    OWNERS[run_id] = graph_run
    FRAME.set(step)
    if graph_run.is_saved:
        graph_run.save()
    return None


def _projected(
    graph_run: GraphRun,
    namespace: str,
    prompt: Sequence[Any],
    parameters: Mapping[str, Any] | None,
) -> int:
    return graph_run.prompt_of(namespace).project(
        prompt, tools=(parameters or {}).get("tools"), output_schema=schema_of(parameters)
    )


def _asked(
    graph_run: GraphRun, call: ModelCall, parent: RunId | None, run_id: RunId, may_fall_back: bool
) -> OpenModelCall | Stop:
    frame = FRAME.get()
    frame = frame if type(frame) is not Step or frame.call is None else current()
    if type(frame) is Step and frame.call is not None and frame.run_id not in (parent, run_id):
        # The call of a stream that is read between its chunks; this one is another.
        with entered(graph_run.run.frame()):
            return graph_run.run.model_call(call, may_fall_back=may_fall_back)
    return graph_run.run.model_call(call, may_fall_back=may_fall_back)


def _needs_of(guards: Sequence[Guard]) -> tuple[bool, bool, bool]:
    """Record the facts of a request before it is sent.

    Returns:
        Whether the size of its prompt matters, whether a bound has to reach it, and whether its
        model may be asked for a last answer.
    """
    capped = limits = reserves = False
    for guard in guards:
        for one in guard.lineage:
            budget = one.budget
            if budget.needs_usage():
                capped = limits = True
            elif budget.max_output_tokens_per_call is not None or budget.max_seconds is not None:
                limits = True
            if budget.finalize_reserve is not None:
                reserves = True
    return capped, limits, reserves


def _unmade_siblings(graph_run: GraphRun, facts: Mapping[str, Any]) -> None:
    """Take back the other prompts of a `generate`: all of them start before the first is sent."""
    if facts.get("batch_size", 1) <= 1:
        return
    frame = current()
    while isinstance(frame, Step) and frame.run_id in graph_run.models:
        run_id = cast("RunId", frame.run_id)
        flying = graph_run.models.pop(run_id)
        OWNERS.pop(run_id, None)
        if flying.forget is not None:
            flying.forget()
        graph_run.run.take_back(flying.call)
        flying.step.leave()
        frame = current()


def token(graph_run: GraphRun, run_id: RunId, text: str, chunk: Any) -> Trip | None:
    """Measure a stream; return why it has to end now."""
    flying = graph_run.models.get(run_id)
    if flying is None:
        return None
    flying.streamed.append(text)
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
        if flying.forget is not None:
            flying.forget()
        flying.step.leave()
    return flying


def end(graph_run: GraphRun, run_id: RunId, response: LLMResult) -> None:
    """Charge a model call that answered, and keep what it asked for."""
    flying = _taken(graph_run, run_id)
    if flying is None:
        return
    run = graph_run.run
    if graph_run.failed:
        graph_run.failed.pop(flying.place, None)
    answer = answer_of(response)
    asked, hosted = calls_of(answer)
    record: Any = response if answer is None else answer
    used, cost = used_by(record)
    if flying.reported:
        used = totals_in(flying.reported) or used
    if used is None or used.estimated or not used.input_tokens:
        _project(graph_run, flying)
    told = used is not None and not used.estimated and used.output_tokens > 0
    if used is not None and told and [len(one) for one in response.generations] == [1]:
        # The usage of several candidates is that of all.
        graph_run.prompt_of(flying.namespace).replied(answer, used)
    # With figures and tool calls nobody reads it.
    text = "" if asked and told else written(response)
    unusable = unusable_in(answer)
    run.answered(
        flying.call,
        used,
        text=text or "".join(flying.streamed),
        model=model_of(response, answer),
        cost_usd=cost,
        speaker=(flying.facts.get("metadata") or _NOTHING).get("langgraph_node"),
        final=not asked and not unusable and graph_run.is_said_in_turn(text, flying.prompt),
    )
    if flying.bounded and not asked and was_cut(answer):
        run.cut_short(flying.call)
    if hosted:
        for call in run.batch(hosted):
            run.start(call)
            run.finished(call, "reported")
    for lost, wrong, kind in unusable:
        graph_run.asked.without_body(lost, wrong, kind)
    if asked:
        graph_run.asked.put(flying.namespace, asked)
    graph_run.sent, graph_run.said = flying.prompt, answer
    if graph_run.is_saved:
        graph_run.save()


def fail(graph_run: GraphRun, run_id: RunId, error: BaseException) -> None:
    """Charge a model call that failed or was cancelled."""
    flying = _taken(graph_run, run_id)
    if flying is None:
        return
    graph_run.has_failed(flying.place)
    _project(graph_run, flying)
    graph_run.run.failed(flying.call, error, written="".join(flying.streamed))
    if graph_run.is_saved:
        graph_run.save()


def cancelled(graph_run: GraphRun, run_id: RunId) -> None:
    """Charge a model call whose task ended before it."""
    fail(graph_run, run_id, asyncio.CancelledError())


def _project(graph_run: GraphRun, flying: ModelCallInFlight) -> None:
    """Estimate a prompt after all, where no cap asked for it before."""
    call = flying.call.call
    if not call.input_tokens:
        call.input_tokens = _projected(
            graph_run, flying.namespace, flying.prompt, flying.parameters
        )
