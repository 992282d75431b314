"""The hooks of a swarm or graph: its nodes are parts of one run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from strands import Agent
from strands.hooks import (
    AfterMultiAgentInvocationEvent,
    AfterNodeCallEvent,
    BeforeMultiAgentInvocationEvent,
    BeforeNodeCallEvent,
)
from strands.multiagent import Swarm
from strands.multiagent.graph import Graph

from budgetguard_core import BudgetExceeded, ToolCall
from budgetguard_core.kit import FRAME, OpenToolCall, remember
from budgetguard_strands import _ending, _history, _nodes, _seams
from budgetguard_strands._identity import ByIdentity, is_a
from budgetguard_strands._opening import Opened, Opener
from budgetguard_strands._seams import FIRST, LAST

_RESUME = (
    "Build it anew with its session, or call it again: what has finished is not done again. "
    "Without a session it begins anew."
)
_ANSWER = "Answer the interrupts: call it with the answers."


class OrchestratorRun:
    """One run of a swarm or graph.

    Attributes:
        run: What is told what happens, and decides.
        inside: The run is a part of another one.
        of_node: It is that of a node of another swarm or graph.
        calls: The nodes that are at work.
        error: What a node failed with, or that a hook of the user's cancelled one.
        state: The swarm's or graph's state that asks the budget before its next nodes.
    """

    def __init__(self, opened: Opened) -> None:
        self.run, self.inside, _, self.of_node = opened
        self.calls: dict[str, OpenToolCall] = {}
        self.error: BaseException | None = None
        self.state: Any = None

    def is_over(self) -> bool:
        """Tell whether no node may start any more."""
        run = self.run
        if run.stopped_by is None and (run.aborted or run.time_left() == 0):
            run.check()
        return run.stopped_by is not None


class Orchestrators:
    """What one provider does on the swarms and graphs that it is attached to."""

    def __init__(self, opener: Opener, install: Callable[[Agent], None]) -> None:
        self._opener = opener
        self._install_agent = install
        self._runs: ByIdentity[OrchestratorRun] = ByIdentity()
        self._attached: ByIdentity[bool] = ByIdentity()

    def install(self, orchestrator: Graph | Swarm) -> None:
        """Bound a swarm or graph and all its nodes; a second time changes nothing."""
        for node in orchestrator.nodes.values():
            executor: Any = node.executor
            if is_a(executor, Agent):
                self._install_agent(executor)
            elif is_a(executor, Graph, Swarm):
                self.install(executor)
        if self._attached.get(orchestrator) is None:
            _seams.probe(orchestrator)
            callbacks = (
                (BeforeMultiAgentInvocationEvent, self._before, FIRST),
                (BeforeNodeCallEvent, self._before_node, LAST),
                (AfterNodeCallEvent, self._after_node, FIRST),
                (AfterMultiAgentInvocationEvent, self._before_kept, FIRST),
                (AfterMultiAgentInvocationEvent, self._after, LAST),
            )
            add: Any = orchestrator.hooks.add_callback
            for event, callback, order in callbacks:
                add(event, callback, order=order)
            if isinstance(orchestrator, Swarm):
                _nodes.keep_unfinished(orchestrator, self._is_unfinished)
            else:
                _nodes.end_normally(orchestrator, self._ends_normally)
        self._attached.set(orchestrator, True)

    def remove(self, orchestrator: Graph | Swarm) -> None:
        """Bound a swarm or graph no more, from its next run on."""
        if self._attached.get(orchestrator):
            self._attached.set(orchestrator, False)

    def _is_unfinished(self, swarm: Swarm) -> bool:
        at = self._runs.get(swarm)
        return at is not None and at.run.stopped_by is not None

    def _ends_normally(self, graph: Graph, error: BaseException) -> bool:
        at = self._runs.get(graph)
        if at is None or not _history.is_of_a_stop(error):
            return False
        trip = at.run.stopped_by
        return trip is not None and (at.of_node or not (at.inside or at.run.is_to_raise))

    def _before(self, event: BeforeMultiAgentInvocationEvent) -> None:
        source: Any = event.source
        before = self._runs.pop(source)
        if not self._attached.get(source):
            return
        self.install(source)
        kept = None
        if _seams.is_interrupted(source):
            kept = _seams.kept_with_interrupts(source)
        elif before is not None and before.run.stopped_by is not None:
            self._runs.set(source, before)
            _nodes.go_on(source)
        spoke = not _seams.is_interrupted(source)
        opened = self._opener.open(source, event.invocation_state, kept, user_spoke=spoke)
        self._runs.set(source, OrchestratorRun(opened))

    def _before_node(self, event: BeforeNodeCallEvent) -> None:
        source: Any = event.source
        at = self._runs.get(source)
        if at is None:
            return  # the budget came while it ran, and begins with the next run
        if at.state is not source.state:
            at.state = source.state
            _nodes.ask_before_nodes(source.state, at.is_over)
        if event.cancel_node:
            at.error = RuntimeError(f"node {event.node_id!r} was cancelled: {event.cancel_node}")
            return
        executor = source.nodes[event.node_id].executor
        call = at.run.tool_call(ToolCall(name=event.node_id, id=event.node_id, kind="handoff"))
        if is_a(executor, Agent, Graph, Swarm):
            self._opener.nodes.set(executor, at.run)
        if isinstance(source, Graph):
            # A graph's nodes have a task each: nothing of this shows in the caller's context.
            FRAME.set(at.run.frame())
        refusal = at.run.start(call)
        if refusal is None:
            at.calls[event.node_id] = call
        elif call.trip is not None and isinstance(source, Swarm):
            event.cancel_node = refusal
        # A graph raises for a cancelled node. An agent that is one stops before its first model
        # call, and no nodes follow.

    def _after_node(self, event: AfterNodeCallEvent) -> None:
        source: Any = event.source
        at = self._runs.get(source)
        if at is None:
            return
        executor = source.nodes[event.node_id].executor
        self._opener.nodes.pop(executor)
        outcome = self._opener.outcomes.get(executor)
        result = source.state.results.get(event.node_id)
        trip = self._opener.trips.get(executor)
        handed_on = getattr(source.state, "handoff_node", None) is not None
        if trip is not None and not handed_on and not at.is_over():
            # A node has no envelope of its own: what its detector stopped is stopped as a whole,
            # unless a swarm has somebody to go on with.
            at.run.trip = trip
        if at.is_over() and (
            (outcome is not None and outcome.status == "terminated")
            or _history.is_of_a_stop(getattr(result, "result", None))
        ):
            _nodes.not_finished(source, event.node_id)
        call = at.calls.pop(event.node_id, None)
        if call is None:
            return
        messages = getattr(executor, "messages", None)
        at.run.finished(call, _history.text_of(messages[-1]) if messages else None)
        correction = at.run.nudge()
        if correction:
            self._opener.corrections[at.run] = correction

    async def _before_kept(self, event: AfterMultiAgentInvocationEvent) -> None:
        """Pause, or give a stopped run its one status, before the session manager looks."""
        source: Any = event.source
        at = self._runs.get(source)
        if at is None:
            return
        if at.state is not None:
            _nodes.ask_no_more(at.state)
        for node in source.nodes.values():
            self._opener.nodes.pop(node.executor)
        run = at.run
        if not _seams.is_interrupted(source):
            if run.stopped_by is not None:
                _nodes.mark_failed(source)
            return
        if not (run.ended or _nodes.has_failed(source)):
            outcome = await run.in_thread(lambda: run.pause(resume=_ANSWER))
            self._opener.outcomes.set(source, outcome)
        # Also of one that failed after the answer: it can be answered again.
        kept = {"unfinished": "paused", "snapshot": run.guard.snapshot().to_json()}
        _seams.keep_with_interrupts(source, kept)

    async def _after(self, event: AfterMultiAgentInvocationEvent) -> None:
        source: Any = event.source
        at = self._runs.get(source)
        if at is None or at.run.ended:
            return
        run = at.run
        leaving = sys.exception()  # on its way through the `finally` that this runs in
        error = leaving or _nodes.fenced(source)
        trip = run.stopped_by
        failed = error
        if error is None and trip is None and _nodes.has_failed(source):
            failed = at.error or _nodes.failure(source)
            if failed is None:
                trip = run.framework_limit(f"{_ending.LIMIT}: the status is FAILED")
                self._runs.pop(source)  # it begins anew, as without a guard
        if failed is not None and (trip is None or not _history.is_of_a_stop(failed)):
            outcome = await run.in_thread(lambda: run.fail(failed))
            remember(failed, outcome)
        else:
            outcome = await run.in_thread(
                lambda: run.end(
                    trip=trip,
                    next_step=None if trip is None else "model call",
                    resume=_RESUME,
                )
            )
        self._opener.outcomes.set(source, outcome)
        if error is not None and leaving is None:
            raise error
        if trip is not None:
            self._opener.trips.set(source, trip)
        if trip is None or at.of_node:
            return
        goes_through = at.inside and run.is_of_the_run_around(trip)
        if goes_through or (run.is_to_raise and not at.inside):
            raise BudgetExceeded(trip, outcome)
