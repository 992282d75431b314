"""The hook provider: what is attached to agents, swarms and graphs to bound their runs."""

from __future__ import annotations

from typing import Any, TypeVar, Unpack

from strands import Agent
from strands.agent.agent_result import AgentResult
from strands.hooks import AgentInitializedEvent, HookRegistry, MultiAgentInitializedEvent
from strands.multiagent import Swarm
from strands.multiagent.base import MultiAgentBase
from strands.multiagent.graph import Graph
from strands.plugins import Plugin

from budgetguard_core import AdapterError, Budget, Guard, Outcome, Snapshot
from budgetguard_core.kit import Envelope, EnvelopeOptions, envelope_of
from budgetguard_core.kit import outcome as kit_outcome
from budgetguard_strands._agents import attach as attach_agent
from budgetguard_strands._opening import OUTCOMES, Opener
from budgetguard_strands._orchestration import attach as attach_orchestrator
from budgetguard_strands._orchestration import is_a

DEFAULT_MAX_ITERATIONS = 25
"""The cap of a provider that is given neither a budget nor a guard."""

_Target = TypeVar("_Target", Agent, MultiAgentBase)


class BudgetHookProvider(Plugin):
    """Bounds the runs of Strands agents: `Agent(..., hooks=[BudgetHookProvider(budget)])`.

    Also a plugin (`Agent(..., plugins=[provider])`), and attached to what exists already:
    `provider.attach(agent)`, or a swarm or graph, whose nodes then spend one budget together.
    Agents that run inside of a bounded run spend its budget by themselves. An agent, swarm or
    graph has one provider.

    One agent can serve runs under different budgets: a `Budget` or `Guard` in
    `invocation_state["budgetguard"]` takes the place of the provider's own for that invocation.

    A stopped run ends before its next model call: `AgentResult.stop_reason` is the reason
    (`"max_iterations"`), and the last message is a synthetic one, marked in its metadata and kept
    by the session manager.

    Args:
        budget: A `Budget`: each invocation of an agent gets a fresh guard, and a hook that resumes
            the agent only its iterations anew. A `Guard`: shared by reference, nothing resets. An
            `Envelope`: one of the two with its options. None: `Budget(max_iterations=25)`.
        resume: An earlier run that the first one goes on from: its `Outcome`, its `Snapshot`, or
            its id in `store`. An agent without messages gets those of that run. What a session or
            `agent.state` has goes on by itself.
        options: As `Envelope` takes them. With `store`, a stopped or paused run's checkpoint goes
            there; the counters are in `agent.state` anyway. Warnings are in the stream too, as
            `budgetguard_warning` events. `on_trip="raise"` raises after the history was closed
            and kept.

    Raises:
        ConfigurationError: `budget` is none of these, or the options do not fit it.
    """

    @property
    def name(self) -> str:
        """The plugin's name."""
        return "budgetguard"

    def __init__(
        self,
        budget: Budget | Guard | Envelope | None = None,
        *,
        resume: Snapshot | Outcome | str | None = None,
        **options: Unpack[EnvelopeOptions],
    ) -> None:
        default = Budget(max_iterations=DEFAULT_MAX_ITERATIONS)
        self._opener = Opener(envelope_of(budget, default=default, **options), resume)
        # Nothing that Strands finds by itself: all is registered in `init_agent`.
        super().__init__()

    # Attaching

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register with Strands, for `hooks=[provider]` of an agent, swarm or graph."""
        del kwargs
        registry.add_callback(AgentInitializedEvent, self._made)
        registry.add_callback(MultiAgentInitializedEvent, self._made)

    def _made(self, event: Any) -> None:
        self.attach(event.agent if hasattr(event, "agent") else event.source)

    def init_agent(self, agent: Agent) -> None:
        """Register with Strands, for `plugins=[provider]`."""
        self.attach(agent)

    def attach(self, target: _Target) -> _Target:
        """Bound an agent, swarm or graph that exists already, and return it.

        The nodes of a swarm or graph spend one budget together; attaching twice changes nothing.

        Raises:
            AdapterError: The target is something else, or this release of Strands has no place
                for the guard.
            ConfigurationError: Another provider bounds it already.
        """
        known: Any = target
        if is_a(known, Agent):
            attach_agent(known, self._opener)
        elif is_a(known, Graph, Swarm):
            attach_orchestrator(known, self._opener)
        else:
            raise AdapterError(
                f"target must be an Agent, Swarm or Graph, got {type(target).__name__}, which has "
                "no loop to end. Attach the agents that it uses."
            )
        return target

    def outcome(self, target: Agent | MultiAgentBase) -> Outcome | None:
        """Return the outcome of the last run of an agent, swarm or graph; None before its end."""
        return OUTCOMES.get(target)


def outcome(target: Agent | MultiAgentBase | AgentResult | BaseException) -> Outcome:
    """Return the outcome of the last run of an agent, swarm or graph.

    Args:
        target: The agent, swarm or graph; the result of an agent; or the exception that left.

    Raises:
        AdapterError: None is known: it had no budget, or the run is not over.
    """
    found = OUTCOMES.get(target) or OUTCOMES.get(getattr(target, "metrics", None))
    return kit_outcome(target) if found is None else found
