"""The calls of a run, from LangChain's start hooks to their ends, in the verbs of the kit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from itertools import takewhile
from typing import Any, Final, cast

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import LLMResult
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.types import Command

from budgetguard_core import StopReason, Trip
from budgetguard_core.kit import (
    FRAME,
    Flow,
    OpenToolCall,
    Request,
    Stop,
    ToolCall,
    Violation,
    ask_model,
    current,
    entered,
    is_stop,
)
from budgetguard_langgraph._models import (
    answer_of,
    bind,
    calls_of,
    figures_of,
    model_of,
    own_bound,
    request_of,
    unusable_in,
    was_cut,
    words_of,
    written,
)
from budgetguard_langgraph._run import (
    GraphRun,
    ModelCallInFlight,
    RunId,
    Stretch,
    when_task_ends,
)
from budgetguard_langgraph._seams import HANDOFF, CurrentRequest, enclosing_tool_node, refusal
from budgetguard_langgraph.interrupts import is_stop_below

_NOTHING: Final[Mapping[str, Any]] = {}


def start_model_call(
    graph_run: GraphRun,
    run_id: RunId,
    parent_run_id: RunId | None,
    prompts: Any,
    requested: CurrentRequest,
    metadata: Mapping[str, Any] | None,
    batch_size: int,
) -> Flow[Trip | None]:
    """Ask for a model call and begin it; return why the run has to end instead."""
    prompt: Any = prompts[0] if prompts and isinstance(prompts[0], list) else prompts
    metadata, parameters = metadata or _NOTHING, requested.parameters
    model, provider, bound = request_of(metadata, parameters)
    words = None if requested.settings is None else words_of(requested.model)
    can_not_be_bound = requested.settings is not None and words is None
    if bound is None and (can_not_be_bound or (words is not None and words.options is not None)):
        bound = own_bound(requested.model)  # it is known by the model alone
    node = metadata.get("langgraph_checkpoint_ns")
    branch, location = graph_run.branch(node), node or parent_run_id or run_id
    # The graph's own agents, and not those that its tools run.
    if "|" not in str(node) or graph_run.last_model[0] is None:
        system = [*takewhile(lambda one: isinstance(one, SystemMessage), prompt)]
        graph_run.last_model, graph_run.model_name = (requested.model, system), model
    with graph_run.lock:
        branch.look_at(prompt, graph_run.handoffs)
    sent = requested.messages if graph_run.run.envelope.prune is not None else None
    request = Request(
        messages=prompt if sent is None else sent,
        prunes=sent is not None,
        tools=parameters.get("tools"),
        schema=parameters.get("response_format") or parameters.get("response_schema"),
        model=model,
        provider=provider,
        retry=location in graph_run.failed,
        bound=bound,
        is_fixed=can_not_be_bound and bound is not None,
        may_fall_back=words is not None and words.model is not None,
    )
    with _apart(graph_run, run_id, parent_run_id):
        turn = yield from ask_model(graph_run.run, branch.prompt, request)
    if isinstance(turn, Stop):
        if batch_size > 1:
            _take_back_siblings(graph_run)
        graph_run.next_step = f"call the model {model or ''}".strip()
        return turn.trip
    if requested.messages is not None:
        # In the request alone: the graph's state stays what it is.
        if turn.is_pruned:
            requested.messages[:] = prompt = [*turn.messages]
        if turn.nudge is not None:
            requested.messages.append(HumanMessage(turn.nudge))
    is_bounded = False
    if requested.settings is not None:
        most = turn.call.max_output_tokens
        tokens = None if most == bound else most
        is_bounded = bind(requested.model, requested.settings, tokens, turn.call, parameters)
    flight = ModelCallInFlight(
        turn, branch, location, prompt, metadata.get("langgraph_node"), is_bounded
    )
    record = Stretch(graph_run, run_id, turn.call, flight)
    FRAME.set(record)
    graph_run.save_counters()
    record.forget = when_task_ends(partial(fail_model_call, record, asyncio.CancelledError()))
    return None


def _apart(graph_run: GraphRun, run_id: RunId, parent: RunId | None) -> Any:
    """Leave the call of a stream that is read between its chunks; this one is another."""
    frame = current()
    if type(frame) is Stretch and frame.call is not None and frame.run_id not in (parent, run_id):
        return entered(graph_run.run.frame())
    return nullcontext()


def _take_back_siblings(graph_run: GraphRun) -> None:
    """Take back the other prompts of a `generate`: all of them start before the first is sent."""
    while type(frame := current()) is Stretch and frame.graph_run is graph_run:
        flight = frame.landed(ModelCallInFlight)
        if flight is None:
            break
        flight.turn.take_back()


def measure_token(record: Stretch, text: str, chunk: Any) -> Trip | None:
    """Measure a stream; return why it has to end now."""
    flight = record.flight
    if not isinstance(flight, ModelCallInFlight):
        return None
    flight.turn.piece(text)
    usage = getattr(getattr(chunk, "message", None), "usage_metadata", None)
    if usage:
        flight.reported.append(usage)
    run = record.graph_run.run
    return run.check() if run.aborted or run.time_left() == 0 else None


def end_model_call(record: Stretch, response: LLMResult) -> None:
    """Charge a model call that answered, and keep what it asked for."""
    flying, graph_run = record.landed(ModelCallInFlight), record.graph_run
    if flying is None:
        return
    run, turn, branch = graph_run.run, flying.turn, flying.branch
    graph_run.failed.pop(flying.location, None)
    answer = answer_of(response)
    requested, hosted = calls_of(answer)
    used, cost_usd = figures_of(response, answer, flying.reported)
    if not turn.is_pruned and [len(one) for one in response.generations] == [1]:
        # The usage of several candidates is that of all.
        branch.prompt.measured(used, reply=answer)
    text, unusable = written(response), unusable_in(answer)
    run.answered(
        turn.call,
        used,
        text=text or "".join(turn.pieces),
        model=model_of(response, answer),
        cost_usd=cost_usd,
        speaker=flying.speaker,
        final=not requested and not unusable and graph_run.is_in_turn(text, flying.prompt),
    )
    if flying.bounded and not requested and was_cut(answer):
        run.cut_short(turn.call)
    for call in run.batch(hosted) if hosted else ():
        run.start(call)
        run.finished(call, "reported")
    with graph_run.lock:
        for lost, wrong, kind in unusable:
            branch.without_body(lost, wrong, kind)
        if requested:
            branch.put(requested)
    graph_run.sent, graph_run.last_reply = flying.prompt, answer
    graph_run.save_counters()


def fail_model_call(record: Stretch, error: BaseException) -> None:
    """Charge a model call that failed or was cancelled."""
    flying = record.landed(ModelCallInFlight)
    if flying is not None:
        record.graph_run.has_failed(flying.location)
        flying.turn.failed(error)
        record.graph_run.save_counters()


# Tools


def start_tool_call(
    graph_run: GraphRun,
    run_id: RunId,
    name: str,
    arguments: Any,
    id_: str | None,
    metadata: Mapping[str, Any],
) -> Flow[Exception | Trip | None]:
    """Ask for a tool call, together with the others of its batch, and begin its body.

    Returns:
        None where it may begin; what its node turns into an error result; or, where nothing answers
        a refused call, why the run has to end.
    """
    handoff = HANDOFF in metadata or name in graph_run.handoffs
    call = ToolCall(
        name=name,
        arguments=_plain(arguments, id_),
        id=id_,
        kind="handoff" if handoff else "function",
    )
    open_call: OpenToolCall | None = None
    node = enclosing_tool_node()
    if handoff:
        _is_handoff(graph_run, name)
        open_call = graph_run.run.tool_call(call)
    else:
        branch = graph_run.branch(metadata.get("langgraph_checkpoint_ns"))
        with graph_run.lock:
            is_offered = branch.offer(id_, name, node)
        open_call = None if is_offered or id_ is None else _admitted_below(graph_run, id_, name)
        if open_call is None:
            open_call = yield from branch.calls.taken(call)
    yield from graph_run.run.waited(open_call)
    refused = graph_run.run.start(open_call)
    if refused is not None:
        graph_run.next_step = f"run the tool {name}"
        return refusal(node, refused) or _trip_of(graph_run, open_call)
    record = Stretch(graph_run, run_id, open_call, open_call)
    FRAME.set(record)
    graph_run.save_counters()
    record.forget = when_task_ends(partial(_cancelled, record))
    return None


def _admitted_below(graph_run: GraphRun, id_: str, name: str) -> OpenToolCall | None:
    """Return a call that was admitted with the answer of a client in a node, by its id."""
    guard = graph_run.run.guard
    with graph_run.lock:
        ours = [ticket for one in graph_run.tools for ticket in one.tickets]
        ours += graph_run.open_before
    with guard.tree.lock:
        tickets = list(guard.tree.open.values())
    for ticket in tickets:
        call = ticket.call
        is_same = isinstance(call, ToolCall) and (call.id, call.name) == (id_, name)
        if is_same and ticket not in ours and guard in ticket.guard.ancestry:
            return OpenToolCall(call, (ticket,))
    return None


def _plain(arguments: Any, id_: str | None) -> Any:
    """Leave out the call's own id, which some tools are handed: it makes each call look new."""
    if not isinstance(arguments, dict) or id_ is None:
        return arguments  # pyright: ignore[reportUnknownVariableType]
    given: dict[str, Any] = arguments  # pyright: ignore[reportUnknownVariableType]
    # Of anything but a text, a comparison may be more than a yes or no.
    if any(isinstance(value, str) and value == id_ for value in given.values()):
        return {
            name: value
            for name, value in given.items()
            if not (isinstance(value, str) and value == id_)
        }
    return given


def _trip_of(graph_run: GraphRun, refused: OpenToolCall) -> Trip:
    """Stop a run in which nobody can answer the model for a refused call."""
    if refused.trip is not None:
        return refused.trip
    run = graph_run.run
    reason = refused.reason or StopReason.TOOL_QUOTA
    detail = refused.detail or f"a call of {refused.call.name} was refused"
    violation = Violation(reason=reason, detail=detail)
    run.guard.hold(violation)
    return run.check() or Trip(reason=reason, violations=(violation,), run_id=run.guard.run_id)


def _cancelled(record: Stretch) -> None:
    """Note that the task of a tool call ended before it: its outcome is unknown."""
    call, graph_run = record.landed(OpenToolCall), record.graph_run
    if call is not None:
        graph_run.interrupted.append(call)
        if graph_run.run.ended or graph_run.root is None:
            graph_run.settle_interrupted()


def end_tool_call(record: Stretch, output: Any) -> None:
    """Settle a tool call that returned."""
    call, graph_run = record.landed(OpenToolCall), record.graph_run
    if call is None:
        return
    run = graph_run.run
    if isinstance(output, Command) and output.graph is not None:
        _was_handoff(graph_run, call)
    message = _message_in(output)
    if message is None:
        run.finished(call, _result(cast("object", output)))
    else:
        content = message.content
        run.finished(call, content, error=str(content) if message.status == "error" else None)
        if message.tool_call_id == call.call.id:
            call.result = message  # a node may lose it with its siblings
    graph_run.save_counters()


def fail_tool_call(record: Stretch, error: BaseException) -> Trip | None:
    """Settle a tool call that failed; one that a stop or a person interrupted stays open.

    Returns:
        The stop of a run of another adapter in the tool, by a limit of this one: as our own it
        ends the graph in good order.
    """
    call, graph_run = record.landed(OpenToolCall), record.graph_run
    if call is None:
        return None
    run = graph_run.run
    if is_stop(error):
        graph_run.interrupted.append(call)
        return None if isinstance(error, GraphBubbleUp) else run.stopped_by
    if isinstance(error, GraphInterrupt) and call.call.id is not None:
        if is_stop_below(error):
            graph_run.interrupted.append(call)
        # Else its body runs again with the answer, and is the same call.
        return None
    if isinstance(error, GraphBubbleUp):
        command = error.args[0] if error.args else None
        _was_handoff(graph_run, call)
        run.finished(call, _result(command))
    elif isinstance(error, Exception):
        run.finished(call, str(error), error=error)
    else:
        graph_run.interrupted.append(call)
    graph_run.save_counters()
    return None


def _was_handoff(graph_run: GraphRun, call: OpenToolCall) -> None:
    """A tool that leaves its graph hands over: it is no tool call, and is known from now on."""
    name = call.call.name
    if call.call.kind == "function":
        _is_handoff(graph_run, name)
        for ticket in call.tickets:
            ticket.guard.withdraw(ticket)


def _is_handoff(graph_run: GraphRun, name: str) -> None:
    if len(graph_run.handoffs) < 256:
        graph_run.handoffs.add(name)


def _message_in(output: Any) -> ToolMessage | None:
    """Return the result that the model gets to see."""
    if isinstance(output, ToolMessage):
        return output
    if isinstance(output, Command):
        update: Any = cast("Any", output).update
        found: Any = cast("Any", update).get("messages", ()) if isinstance(update, dict) else ()
        listed: list[Any] = cast("list[Any]", found) if isinstance(found, list) else [found]
        return next((one for one in reversed(listed) if isinstance(one, ToolMessage)), None)
    return None


def _result(output: object) -> object:
    """Return a result that can be compared: of a command what it changes, without ids."""
    if not isinstance(output, Command):
        return output
    command = cast("Any", output)
    return {"goto": str(command.goto), "update": _text(command.update)}


def _text(value: Any) -> str:
    if isinstance(value, BaseMessage):
        return str(value.content)
    if isinstance(value, dict):
        named = cast("dict[str, Any]", value)
        return str({name: _text(one) for name, one in named.items()})
    if isinstance(value, list):
        return str([_text(one) for one in cast("list[Any]", value)])
    return str(value)
