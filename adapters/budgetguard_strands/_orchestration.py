"""The hooks of a swarm or graph: its nodes are parts of one run, and a stop leaves them open."""

from __future__ import annotations

import sys
from typing import Any, cast

from strands import Agent, hooks
from strands.multiagent import Swarm
from strands.multiagent.base import Status
from strands.multiagent.graph import Graph

from budgetguard_core import RunFencedError, kit
from budgetguard_strands import _seams
from budgetguard_strands._agents import attach as attach_agent
from budgetguard_strands._agents import offer_reports
from budgetguard_strands._messages import text_of
from budgetguard_strands._opening import (
    JOINING,
    NODES,
    OPENERS,
    OUTCOMES,
    TRIPS,
    ByIdentity,
    OpenedRun,
    Opener,
    entry,
    is_of_a_stop,
    note,
    note_end,
)
from budgetguard_strands._run import LIMIT
from budgetguard_strands._seams import FIRST, LAST

_RESUME = (
    "Build it anew with its session, or call it again: what has finished is not done again. "
    "Without a session it begins anew."
)
_ANSWER = "Answer the interrupts: call it with the answers."


def is_a(target: object, *kinds: type[Any]) -> bool:
    """Return whether an object is an instance by its own type; a mock only claims to be one."""
    return issubclass(type(target), kinds)


class OrchestratorRun:
    """One run of a swarm or graph.

    Attributes:
        session, inside, node: As in `Opened`.
        correction: The correction for the next node.
        calls: The nodes that are at work.
        error: A node that a hook of the user's cancelled.
    """

    def __init__(self, opening: OpenedRun) -> None:
        self.session, self.inside, _, self.node = opening
        self.run = self.session.run
        self.correction = ""
        self.calls: dict[str, kit.OpenToolCall] = {}
        self.error: BaseException | None = None

    def is_over(self) -> bool:
        """Return whether no node may start any more."""
        run = self.run
        if run.stopped_by is None and run.has_to_end:
            run.check()
        return run.stopped_by is not None

    def ask_before_nodes(self, state: Any) -> None:
        """Put the question whether nodes may follow, which the state answers, to the budget first.

        Neither a swarm nor a graph has a hook that ends it between two nodes.
        """
        own = state.__class__.should_continue

        def should_continue(*args: Any, **kwargs: Any) -> Any:
            over = self.is_over()
            return (False, "the run was stopped") if over else own(state, *args, **kwargs)

        state.should_continue = should_continue


_runs: ByIdentity[OrchestratorRun] = ByIdentity()


def attach(orchestrator: Graph | Swarm, opener: Opener) -> None:
    """Bound a swarm or graph and all its nodes; a second time changes nothing.

    A node with a provider of its own keeps it; an agent without one joins by itself.

    Raises:
        ConfigurationError: Another provider bounds it already.
    """
    is_new = opener.take(orchestrator)
    for node in orchestrator.nodes.values():
        executor: Any = node.executor
        if is_a(executor, Agent):
            if OPENERS.get(executor) is None:
                attach_agent(executor, JOINING)
            if opener.envelope.may_ask_for_progress:
                offer_reports(executor)
        elif is_a(executor, Graph, Swarm) and OPENERS.get(executor) in (None, opener):
            attach(executor, opener)
    if is_new:
        _seams.probe(orchestrator)
        add: Any = orchestrator.hooks.add_callback
        add(hooks.BeforeMultiAgentInvocationEvent, _before, order=FIRST)
        add(hooks.BeforeNodeCallEvent, _before_node, order=LAST)
        add(hooks.AfterNodeCallEvent, _after_node, order=FIRST)
        add(hooks.AfterMultiAgentInvocationEvent, _before_kept, order=FIRST)
        add(hooks.AfterMultiAgentInvocationEvent, _after, order=LAST)
        if isinstance(orchestrator, Swarm):
            _keep_unfinished(orchestrator)


def _keep_unfinished(swarm: Swarm) -> None:
    """Keep the node to go on with in the session of a stopped swarm.

    Strands 1.62 and before name none for a swarm that failed, and begin anew.
    """
    own = swarm.serialize_state

    def serialize_state() -> dict[str, Any]:
        state, at, node = own(), _runs.get(swarm), swarm.state.current_node
        if node is not None and at is not None and at.run.stopped_by is not None:
            state["next_nodes_to_execute"] = [node.node_id]
        return state

    owner: Any = swarm
    owner.serialize_state = serialize_state


# The hooks


async def _before(event: hooks.BeforeMultiAgentInvocationEvent) -> None:
    source: Any = event.source
    before = _runs.get(source)
    _runs.pop(source)
    opener = OPENERS.get(source)
    if opener is None:
        return
    attach(source, opener)  # it may have got other nodes
    kept = None
    answered = _seams.is_interrupted(source)
    if answered:
        kept = _seams.kept_with_interrupts(source)
    elif before is not None and before.run.stopped_by is not None:
        _runs.set(source, before)
        if source.session_manager is not None:
            # It goes on in this very object, as in a new one.
            source.deserialize_state(source.serialize_state())
    opening = await opener.open(source, event.invocation_state, kept, user_spoke=not answered)
    _runs.set(source, OrchestratorRun(opening))


async def _before_node(event: hooks.BeforeNodeCallEvent) -> None:
    source: Any = event.source
    at = _runs.get(source)
    if at is None:
        return  # the budget came while it ran, and begins with the next run
    at.ask_before_nodes(source.state)
    if event.cancel_node:
        at.error = RuntimeError(f"node {event.node_id!r} was cancelled: {event.cancel_node}")
        return
    executor = source.nodes[event.node_id].executor
    if is_a(executor, Agent, Graph, Swarm):
        NODES.set(executor, at)
    if isinstance(source, Graph):
        # A graph's nodes have a task each: nothing of this shows in the caller's context.
        kit.FRAME.set(at.run.frame())
    handoff = kit.ToolCall(name=event.node_id, id=event.node_id, kind="handoff")
    call = await kit.run_awaited(at.session.calls.begin(handoff))
    if call.refusal is None:
        at.calls[event.node_id] = call
    elif call.trip is not None and isinstance(source, Swarm):
        event.cancel_node = call.refusal
    # A graph raises for a cancelled node. An agent that is one stops before its first model
    # call, and no nodes follow.


def _after_node(event: hooks.AfterNodeCallEvent) -> None:
    source: Any = event.source
    at = _runs.get(source)
    if at is None:
        return
    executor = source.nodes[event.node_id].executor
    NODES.pop(executor)
    outcome, trip = OUTCOMES.get(executor), TRIPS.get(executor)
    result = source.state.results.get(event.node_id)
    handed_on = getattr(source.state, "handoff_node", None) is not None
    has_own = OPENERS.get(executor) not in (JOINING, OPENERS.get(source))
    if trip is not None and not (has_own or handed_on or at.is_over()):
        # What the detector stopped in a node without a budget of its own is stopped as a whole,
        # unless a swarm has somebody to go on with.
        at.session.stop(trip)
    is_cut = outcome is not None and outcome.status == "terminated"
    if at.is_over() and (is_cut or is_of_a_stop(getattr(result, "result", None))):
        not_finished(source, event.node_id)
    call = at.calls.pop(event.node_id, None)
    if call is None:
        return
    messages = getattr(executor, "messages", None)
    at.session.calls.finished(call, text_of(messages[-1]) if messages else None)
    at.correction = at.run.nudge() or at.correction


async def _before_kept(event: hooks.AfterMultiAgentInvocationEvent) -> None:
    """Pause, or give a stopped run its one status, before the session manager looks."""
    source: Any = event.source
    at = _runs.get(source)
    if at is None:
        return
    # The state may live on in the next run.
    cast("dict[str, Any]", vars(source.state)).pop("should_continue", None)
    for node in source.nodes.values():
        NODES.pop(node.executor)
    run = at.run
    if not _seams.is_interrupted(source):
        if run.stopped_by is not None:
            # The status that Strands' own limits give one.
            name = "status" if isinstance(source, Graph) else "completion_status"
            setattr(source.state, name, Status.FAILED)
        return
    if not (run.ended or has_failed(source)):
        paused = at.session.finish(waits=True, resume=_ANSWER)
        note(source, await kit.run_awaited(paused))
    # Also of one that failed after the answer: it can be answered again.
    kept = entry("paused", run.guard.snapshot())
    _seams.kept_with_interrupts(source).update(kept)


async def _after(event: hooks.AfterMultiAgentInvocationEvent) -> None:
    source: Any = event.source
    at = _runs.get(source)
    if at is None or at.run.ended:
        return
    run, results = at.run, [one.result for one in source.state.results.values()]
    leaving = sys.exception()  # on its way through the `finally` that this runs in
    # A swarm makes a result of it that a run was resumed elsewhere.
    fenced = (one for one in results if isinstance(one, RunFencedError))
    error = failed = leaving or next(fenced, None)
    trip = run.stopped_by
    if error is None and trip is None and has_failed(source):
        raised = (one for one in reversed(results) if isinstance(one, Exception))
        failed = at.error or next(raised, None)
        if failed is None and getattr(source.state, "failed_nodes", None):
            failed = RuntimeError("a node failed")
        if failed is None:
            trip = run.framework_limit(f"{LIMIT}: the status is FAILED")
            _runs.pop(source)  # it begins anew, as without a guard
    if trip is not None:
        at.session.stop(trip)
        failed = None if is_of_a_stop(failed) else failed
    step = None if trip is None else "model call"
    ended = at.session.finish(error=failed, next_step=step, resume=_RESUME)
    outcome = await kit.run_awaited(ended)
    if error is not None and leaving is None:
        note(source, outcome)
        raise error
    note_end(source, at, outcome)


def has_failed(source: Any) -> bool:
    """Return whether a swarm or graph has failed."""
    state = source.state
    status = state.status if isinstance(source, Graph) else state.completion_status
    return bool(status == Status.FAILED)


def not_finished(source: Any, node_id: str) -> None:
    """Take back that a node has finished: its agent was stopped before it had."""
    node, state = source.nodes[node_id], source.state
    result = state.results.get(node_id)
    if result is not None:
        result.status = Status.FAILED
    if isinstance(source, Graph):
        state.completed_nodes.discard(node)
        state.failed_nodes.discard(node)
        if node in state.execution_order[-1:]:
            state.execution_order.pop()
        # As one in flight: it is done again after a reload, and what waits for it still waits.
        node.execution_status = Status.EXECUTING
        if state.status == Status.EXECUTING:
            state.status = Status.FAILED
    elif state.handoff_node is None and node in state.node_history[-1:]:
        state.node_history.pop()
