"""The hooks of a swarm or graph: its nodes are parts of one run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from strands import Agent
from strands.hooks import (
    AfterMultiAgentInvocationEvent,
    AfterNodeCallEvent,
    BeforeMultiAgentInvocationEvent,
    BeforeNodeCallEvent,
)
from strands.multiagent.base import MultiAgentBase
from strands.multiagent.graph import Graph

from budgetguard_core import BudgetExceeded, ToolCall
from budgetguard_core.frame import FRAME
from budgetguard_core.kit import OpenToolCall
from budgetguard_strands import _history
from budgetguard_strands._opening import Opened, Opener

_RESUME = "Call it again under a fresh budget."


class _OrchestratorRun:
    """One run of a swarm or graph."""

    def __init__(self, opened: Opened) -> None:
        self.run, self.inside, _, self.of_node = opened
        self.calls: dict[str, OpenToolCall] = {}
        self.graph_limit: tuple[int | None] | None = None
        """Of a stopped graph: its own limit, to be put back."""


class Orchestrators:
    """What one provider does on the swarms and graphs that it is attached to."""

    def __init__(self, opener: Opener, install: Callable[[Agent], None]) -> None:
        self._opener = opener
        self._install_agent = install
        self._runs: WeakKeyDictionary[Any, _OrchestratorRun] = WeakKeyDictionary()
        self._known: WeakSet[Any] = WeakSet()

    def install(self, orchestrator: Any) -> None:
        """Bound a swarm or graph and all its nodes; a second time changes nothing."""
        for node in orchestrator.nodes.values():
            executor = getattr(node, "executor", None)
            if isinstance(executor, Agent):
                self._install_agent(executor)
            elif isinstance(executor, MultiAgentBase) and hasattr(executor, "nodes"):
                self.install(executor)
        if orchestrator in self._known:
            return
        self._known.add(orchestrator)
        for event, callback in (
            (BeforeMultiAgentInvocationEvent, self._before),
            (BeforeNodeCallEvent, self._before_node),
            (AfterNodeCallEvent, self._after_node),
            (AfterMultiAgentInvocationEvent, self._after),
        ):
            orchestrator.hooks.add_callback(event, callback)

    def _before(self, event: BeforeMultiAgentInvocationEvent) -> None:
        source: Any = event.source
        self.install(source)
        opened = self._opener.open(source, event.invocation_state, None, user_spoke=True)
        self._runs[source] = _OrchestratorRun(opened)

    def _before_node(self, event: BeforeNodeCallEvent) -> None:
        source: Any = event.source
        at = self._runs[source]
        executor = source.nodes[event.node_id].executor
        call = at.run.tool_call(ToolCall(name=event.node_id, id=event.node_id, kind="handoff"))
        if isinstance(executor, Agent | MultiAgentBase):
            self._opener.nodes[executor] = at.run
        if isinstance(source, Graph):
            # A graph's nodes have a task each: nothing of this shows in the caller's context.
            FRAME.set(at.run.frame())
        refusal = at.run.start(call)
        if refusal is None:
            at.calls[event.node_id] = call
        elif call.trip is None:
            return
        elif isinstance(source, Graph):
            # A graph raises for a cancelled node, but ends normally at its own limit. The
            # node itself stops before its first model call.
            if at.graph_limit is None:
                at.graph_limit = (source.max_node_executions,)
            source.max_node_executions = 0
        else:
            event.cancel_node = refusal

    def _after_node(self, event: AfterNodeCallEvent) -> None:
        source: Any = event.source
        at = self._runs[source]
        executor = source.nodes[event.node_id].executor
        if isinstance(executor, Agent | MultiAgentBase):
            self._opener.nodes.pop(executor, None)
        call = at.calls.pop(event.node_id, None)
        if call is None:
            return
        messages = getattr(executor, "messages", None)
        at.run.finished(call, _history.text_of(messages[-1]) if messages else None)
        correction = at.run.nudge()
        if correction:
            self._opener.corrections[at.run] = correction

    async def _after(self, event: AfterMultiAgentInvocationEvent) -> None:
        source: Any = event.source
        at = self._runs[source]
        run = at.run
        if at.graph_limit is not None:
            (source.max_node_executions,) = at.graph_limit
        error = sys.exception()  # what is on its way through the `finally` that this runs in
        trip = run.stopped_by or run.check()
        if error is not None and trip is None:
            outcome = await run.in_thread(lambda: run.fail(error))
        else:
            outcome = await run.in_thread(
                lambda: run.end(
                    trip=trip,
                    next_step=None if trip is None else "model call",
                    resume=_RESUME,
                )
            )
        self._opener.outcomes[source] = outcome
        if trip is None or at.of_node:
            return
        goes_through = at.inside and run.is_of_the_run_around(trip)
        if goes_through or (run.is_to_raise and not at.inside):
            raise BudgetExceeded(trip, outcome)
