"""A tool call, from LangChain's start hook to its end, in the verbs of the kit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from langchain_core.messages import BaseMessage, ToolMessage
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.types import Command

from budgetguard_core import StopReason, Trip
from budgetguard_core.kit import FRAME, Flow, OpenToolCall, ToolCall, Violation, is_stop
from budgetguard_langgraph._run import (
    OWNERS,
    GraphRun,
    RunId,
    Stretch,
    ToolCallInFlight,
    when_task_ends,
)
from budgetguard_langgraph._seams import (
    HANDOFF,
    enclosing_tool_node,
    refusal,
)
from budgetguard_langgraph.interrupts import is_budget_interrupt


def start(
    graph_run: GraphRun,
    run_id: RunId,
    serialized: Mapping[str, Any] | None,
    given: str,
    facts: Mapping[str, Any],
) -> Flow[Exception | Trip | None]:
    """Ask for a tool call, together with the others of its batch, and begin its body.

    Args:
        graph_run: The run.
        run_id: The id of the call.
        serialized: The tool, as the start hook is given it.
        given: Its input as text.
        facts: What else the hook is told.

    Returns:
        None where it may begin; what its node turns into an error result; or, where nothing answers
        a refused call, why the run has to end.
    """
    if run_id in graph_run.tools:
        return None
    name, inputs = str((serialized or {}).get("name", "")), facts.get("inputs")
    id_ = facts.get("tool_call_id")
    metadata: Mapping[str, Any] = facts.get("metadata") or {}
    handoff = HANDOFF in metadata or name in graph_run.handoffs
    call = ToolCall(
        name=name,
        arguments=_plain(given if inputs is None else inputs, id_),
        id=id_,
        kind="handoff" if handoff else "function",
    )
    opened: OpenToolCall | None = None
    node = enclosing_tool_node()
    if handoff:
        _is_handoff(graph_run, name)
        opened = graph_run.run.tool_call(call)
    else:
        branch = graph_run.branch(metadata.get("langgraph_checkpoint_ns"))
        with graph_run.lock:
            is_offered = branch.offer(id_, name, node)
        opened = None if is_offered or id_ is None else _admitted_below(graph_run, id_, name)
        if opened is None:
            opened = yield from branch.calls.taken(call)
    yield from graph_run.run.waited(opened)
    refused = graph_run.run.start(opened)
    if refused is not None:
        graph_run.next_step = f"run the tool {name}"
        return refusal(node, refused) or _trip_of(graph_run, opened)
    flying = ToolCallInFlight(run_id, Stretch(graph_run, opened, run_id), opened)
    graph_run.tools[run_id] = flying
    OWNERS[run_id] = graph_run
    FRAME.set(flying.step)
    graph_run.save()
    flying.forget = when_task_ends(partial(_cancelled, graph_run, run_id))
    return None


def _admitted_below(graph_run: GraphRun, id_: str, name: str) -> OpenToolCall | None:
    """Return a call that was admitted with the answer of a client in a node, by its id."""
    guard = graph_run.run.guard
    with graph_run.lock:
        ours = [ticket for one in graph_run.tools.values() for ticket in one.call.tickets]
        ours += graph_run.open_before
    with guard.tree.lock:
        tickets = list(guard.tree.open.values())
    for ticket in tickets:
        call = ticket.call
        is_same = isinstance(call, ToolCall) and (call.id, call.name) == (id_, name)
        if is_same and ticket not in ours and guard in ticket.guard.lineage:
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


def _taken(graph_run: GraphRun, run_id: RunId) -> ToolCallInFlight | None:
    OWNERS.pop(run_id, None)
    with graph_run.settled:
        flying = graph_run.tools.pop(run_id, None)
        graph_run.settled.notify_all()
    if flying is not None:
        flying.forget()
        flying.step.leave()
    return flying


def _cancelled(graph_run: GraphRun, run_id: RunId) -> None:
    """Note that the task of a tool call ended before it: its outcome is unknown."""
    flying = _taken(graph_run, run_id)
    if flying is not None:
        graph_run.interrupted.append(flying.call)
        if graph_run.run.ended or graph_run.root is None:
            graph_run.settle_interrupted()


def end(graph_run: GraphRun, run_id: RunId, output: Any) -> None:
    """Settle a tool call that returned."""
    flying = _taken(graph_run, run_id)
    if flying is None:
        return
    run, call = graph_run.run, flying.call
    if isinstance(output, Command) and output.graph is not None:
        _was_handoff(graph_run, call)
    message = _message_in(output)
    if message is None:
        run.finished(call, _result(cast("object", output)))
    else:
        content = message.content
        run.finished(call, content, error=str(content) if message.status == "error" else None)
        with graph_run.lock:
            graph_run.results.setdefault(message.tool_call_id, []).append(message)
    graph_run.save()


def fail(graph_run: GraphRun, run_id: RunId, error: BaseException) -> Trip | None:
    """Settle a tool call that failed; one that a stop or a person interrupted stays open.

    Returns:
        The stop of a run of another adapter in the tool, by a limit of this one: as our own it
        ends the graph in good order.
    """
    flying = _taken(graph_run, run_id)
    if flying is None:
        return None
    run, call = graph_run.run, flying.call
    if is_stop(error):
        graph_run.interrupted.append(call)
        return None if isinstance(error, GraphBubbleUp) else run.stopped_by
    if isinstance(error, GraphInterrupt) and call.call.id is not None:
        asked: Any = error.args[0] if error.args else ()
        if all(is_budget_interrupt(one) for one in asked):
            # A graph in its body was stopped, and LangGraph has made an interrupt of its own of it.
            graph_run.interrupted.append(call)
        # Else its body runs again with the answer, and is the same call.
        return None
    if isinstance(error, GraphBubbleUp):
        command = error.args[0] if error.args else None
        _was_handoff(graph_run, call)
        run.finished(call, _result(command))
    elif isinstance(error, Exception):
        run.finished(call, error=error)
    else:
        graph_run.interrupted.append(call)
    graph_run.save()
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
    """Make something of a result that can be compared: what a command changes, not its ids."""
    if isinstance(output, Command):
        command = cast("Any", output)
        update: Any = command.update
        known = isinstance(update, dict)
        changes: dict[str, Any] = dict(cast("dict[str, Any]", update)) if known else {"": update}
        return {
            "goto": str(command.goto),
            "update": {str(name): _text(value) for name, value in changes.items()},
        }
    return output


def _text(value: Any) -> str:
    if isinstance(value, BaseMessage):
        return str(value.content)
    if isinstance(value, list):
        return str([_text(one) for one in cast("list[Any]", value)])
    return str(value)
