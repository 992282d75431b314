"""The hook provider: admits and settles every call of an agent, and ends its run in time."""

from __future__ import annotations

import asyncio
import json
import logging
from asyncio import current_task
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from opentelemetry import trace
from strands import Agent
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterMultiAgentInvocationEvent,
    AfterNodeCallEvent,
    AfterToolCallEvent,
    AgentInitializedEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeMultiAgentInvocationEvent,
    BeforeNodeCallEvent,
    BeforeToolCallEvent,
    HookRegistry,
    MultiAgentInitializedEvent,
)
from strands.multiagent.base import MultiAgentBase
from strands.multiagent.graph import Graph
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException
from strands.types.session import encode_bytes_values

from budgetguard_core import (
    AdapterError,
    Admit,
    Budget,
    BudgetExceeded,
    CheckpointError,
    CheckpointStore,
    Clock,
    ConfigurationError,
    Event,
    Guard,
    Mode,
    ModelCall,
    Nudge,
    Outcome,
    PriceBook,
    Sink,
    Snapshot,
    Stop,
    StopReason,
    TokenUsage,
    ToolCall,
    Violation,
    end_run,
    synthetic_metadata,
    synthetic_text,
)
from budgetguard_strands import _history, _seams
from budgetguard_strands._bounds import bounded
from budgetguard_strands._run import Run
from budgetguard_strands._seams import FIRST, LAST, ORDERED, Events
from budgetguard_strands._usage import estimated_usage, model_name, token_usage
from budgetguard_strands._watchdog import Watchdog

DEFAULT_MAX_ITERATIONS = 25
"""The cap of a provider that is given neither a budget nor a guard."""

_LOG = logging.getLogger("budgetguard.strands")
# Where it shows is the application's choice; without one it would go to standard error.
_LOG.addHandler(logging.NullHandler())
_KEY = "budgetguard"
# The provider turned the call away before it did any work; others may have cost what was reserved.
_REFUSALS = (ContextWindowOverflowException, ModelThrottledException)
_RESUME = "Call the agent again, or give its session to a new agent, under a fresh budget."

_Target = TypeVar("_Target", Agent, MultiAgentBase)

# The runs that the running code is inside of, innermost last.
_around: ContextVar[tuple[Run, ...]] = ContextVar("budgetguard_strands_runs", default=())
_attached: WeakKeyDictionary[Agent, list[BudgetHookProvider]] = WeakKeyDictionary()


class _Halt(BaseException):
    """Ends the event loop before a model call.

    Not an Exception, because Strands and its users' hooks retry and swallow those. It never
    leaves the run: the provider that raised it catches it around the event loop.
    """

    def __init__(self, run: Run) -> None:
        super().__init__("the run was stopped")
        self.run = run


class BudgetHookProvider:
    """Bounds the runs of Strands agents: `Agent(..., hooks=[BudgetHookProvider(budget)])`.

    Also a plugin (`Agent(..., plugins=[provider])`), and attached to what exists already:
    `provider.attach(agent)`, or a swarm or graph, whose nodes then spend one budget together.
    Agents that an agent uses as tools spend its budget by themselves; an agent made inside a tool
    does when it is given the same provider.

    One agent can serve runs under different budgets: a `Budget` or `Guard` in
    `invocation_state["budgetguard"]` takes the place of the provider's own for that invocation.

    A stopped run ends before its next model call: `AgentResult.stop_reason` is the reason
    (`"max_iterations"`), and the last message is a synthetic one, marked in its metadata and kept
    by the session manager.

    Args:
        budget: A `Budget`: each invocation of an agent gets a fresh guard, and a hook that resumes
            the agent only its iterations anew. A `Guard`: shared by reference, nothing resets.
            None: `Budget(max_iterations=25)`.
        on_trip: Whether a stopped run returns normally, or raises `BudgetExceeded` with the same
            outcome after its history was closed and kept.
        store: Where a stopped run's checkpoint goes. The counters are in `agent.state` anyway.
        mode: Of fresh guards: ENFORCE, OBSERVE or OFF.
        sinks: Of fresh guards: where events go.
        on_warning: Of fresh guards: called at 80 % of a cap. The stream carries the warning too,
            as a `budgetguard_warning` event.
        price_book: Of fresh guards: where prices come from.
        clock: Of fresh guards: where time comes from.

    Raises:
        ConfigurationError: `budget` is neither, or a guard is given with options of fresh guards.
    """

    name = "budgetguard"
    """The plugin's name."""

    def __init__(
        self,
        budget: Budget | Guard | None = None,
        *,
        on_trip: Literal["return", "raise"] = "return",
        store: CheckpointStore | None = None,
        mode: Mode | str = Mode.ENFORCE,
        sinks: Iterable[Sink | Callable[[Event], object]] = (),
        on_warning: Callable[[Guard, Any], object] | None = None,
        price_book: PriceBook | None = None,
        clock: Clock | None = None,
    ) -> None:
        if budget is None:
            budget = Budget(max_iterations=DEFAULT_MAX_ITERATIONS)
        if on_trip not in ("return", "raise"):
            raise ConfigurationError(
                f"on_trip must be 'return' or 'raise', got {on_trip!r}. "
                "Leave it out for a normal result."
            )
        self._sinks = tuple(sinks)
        if isinstance(budget, Guard) and (
            self._sinks or on_warning or price_book or clock or mode is not Mode.ENFORCE
        ):
            raise ConfigurationError(
                "mode, sinks, on_warning, price_book and clock must be left out with a Guard, "
                "which has its own, got both. Give them to Guard(...)."
            )
        self._own = _checked(budget)
        self._guard = budget if isinstance(budget, Guard) else None
        self._on_trip = on_trip
        self._store = store
        self._mode = mode
        self._on_warning = on_warning
        self._price_book = price_book or PriceBook()
        self._clock = clock
        self._runs: WeakKeyDictionary[Any, Run] = WeakKeyDictionary()
        self._orchestrated: WeakKeyDictionary[Any, Run] = WeakKeyDictionary()
        self._orchestrators: WeakSet[Any] = WeakSet()
        self._watching: WeakSet[Agent] = WeakSet()
        self._outcomes: WeakKeyDictionary[Any, Outcome] = WeakKeyDictionary()
        # Strands registers what stands in these by itself; all is registered in `init_agent`.
        self.hooks: list[Any] = []
        self.tools: list[Any] = []

    # Attaching

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Be called by Strands for `hooks=[provider]`, of an agent, swarm or graph."""
        del kwargs
        registry.add_callback(AgentInitializedEvent, self._agent_made)
        registry.add_callback(MultiAgentInitializedEvent, self._orchestrator_made)

    def init_agent(self, agent: Agent) -> None:
        """Be called by Strands for `plugins=[provider]`."""
        self._install(agent)

    def attach(self, target: _Target) -> _Target:
        """Bound an agent, swarm or graph that exists already, and return it.

        The nodes of a swarm or graph spend one budget together; attaching twice changes nothing.

        Raises:
            AdapterError: The target is something else, or this release of Strands has no place
                for the guard.
        """
        if isinstance(target, Agent):
            self._install(target)
        elif isinstance(target, MultiAgentBase) and hasattr(target, "nodes"):
            self._install_orchestrator(target)
        else:
            raise AdapterError(
                f"target must be an Agent, Swarm or Graph, got {type(target).__name__}. "
                "Attach the agents that it uses."
            )
        return target

    def outcome(self, target: Agent | MultiAgentBase) -> Outcome | None:
        """Return the outcome of the last run of an agent, swarm or graph; None before its end."""
        return self._outcomes.get(target)

    def _agent_made(self, event: AgentInitializedEvent) -> None:
        self._install(event.agent)

    def _orchestrator_made(self, event: MultiAgentInitializedEvent) -> None:
        self._install_orchestrator(event.source)

    def _install(self, agent: Agent) -> None:
        others = _attached.setdefault(agent, [])
        if self in others:
            return
        # Two providers with one guard would count each call twice.
        if self._guard is not None and any(one._guard is self._guard for one in others):  # noqa: SLF001
            others.append(self)
            return
        _seams.wrap_runs(agent, self._around_run)
        others.append(self)
        for event, callback, order in (
            (BeforeInvocationEvent, self._before_invocation, FIRST),
            (BeforeModelCallEvent, self._before_model_call, LAST),
            (AfterModelCallEvent, self._after_model_call, FIRST),
            (BeforeToolCallEvent, self._before_tool_call, LAST),
            (AfterToolCallEvent, self._after_tool_call, LAST),
            (AfterInvocationEvent, self._after_leg, FIRST),
            (AfterInvocationEvent, self._after_invocation, LAST),
        ):
            _seams.add_hook(agent, event, callback, order)
        _seams.pass_on(agent, f"{self.name}-{id(self):x}", self._begin_inherited)

    def _begin_inherited(self, event: BeforeInvocationEvent) -> None:
        """Begin the first run of an agent that one of Strands' own tools made."""
        if self not in _attached.get(event.agent, ()):
            self._install(event.agent)
            self._before_invocation(event)

    def _install_orchestrator(self, orchestrator: Any) -> None:
        for node in orchestrator.nodes.values():
            executor = node.executor
            if isinstance(executor, Agent):
                self._install(executor)
            elif isinstance(executor, MultiAgentBase):
                self._install_orchestrator(executor)
        if orchestrator in self._orchestrators:
            return
        self._orchestrators.add(orchestrator)
        for event, callback in (
            (BeforeMultiAgentInvocationEvent, self._before_orchestration),
            (BeforeNodeCallEvent, self._before_node),
            (AfterNodeCallEvent, self._after_node),
            (AfterMultiAgentInvocationEvent, self._after_orchestration),
        ):
            orchestrator.hooks.add_callback(event, callback)

    def _cover(self, child: Agent, guard: Guard) -> None:
        """Make an agent that is used as a tool spend `guard`, unless a provider of its own does."""
        for other in _attached.get(child, ()):
            if other is self or other._guard is None or _is_under(other._guard, guard):  # noqa: SLF001
                return
        self._install(child)

    # The guard of a run

    def _begin(self, target: Any, invocation_state: Mapping[str, Any] | None) -> Run:
        """Make the run of an invocation that begins: of a sub-agent, or at the top."""
        parent = self._orchestrated.get(target) or self._enclosing()
        before = self._runs.get(target)
        own = self._own
        if parent is None:
            own = _checked((invocation_state or {}).get(_KEY, own))
            guard = own if isinstance(own, Guard) else self._fresh(target, own)
        elif parent.provider is self:
            guard = parent.guard.child()
        else:
            guard = own if isinstance(own, Guard) else parent.guard.child(own)
        run = Run(
            provider=self,
            guard=guard,
            shared=guard is own,
            parent=parent,
            bounded=_is_bounded(guard),
        )
        if before is not None and before.guard is guard:
            guard.user_turn()
            # A call that was interrupted for a person's answer goes on under its first admission.
            run.tools = before.tools
        run.note_warnings(silently=True)
        return run

    def _enclosing(self) -> Run | None:
        runs = _around.get()
        for run in reversed(runs):
            if run.provider is self:
                return run
        return runs[-1] if runs else None

    def _fresh(self, target: Any, budget: Budget) -> Guard:
        kept: Any = target.state.get(_KEY) if isinstance(target, Agent) else None
        problem: Exception | None = None
        if kept:
            try:
                if kept["unfinished"]:
                    return self._continued(kept, budget)
            except (CheckpointError, KeyError, TypeError, ValueError) as error:
                problem = error
        guard = Guard(
            budget,
            mode=self._mode,
            sinks=self._sinks,
            on_warning=self._on_warning,
            price_book=self._price_book,
            clock=self._clock,
        )
        if problem is not None:
            guard.report(f"agent.state[{_KEY!r}]: {type(problem).__name__}: {problem}")
        return guard

    def _continued(self, kept: Mapping[str, Any], budget: Budget) -> Guard:
        """Go on after a run of the same session that was stopped, or is at a checkpoint."""
        snapshot = Snapshot.from_json(kept["snapshot"])
        at_checkpoint = kept["unfinished"] == "checkpoint"
        own = {"mode": str(Mode(self._mode)), "budget": budget.to_json()}
        return Guard.restore(
            # What a tool could have written into the state must not become a bound.
            snapshot.model_copy(update=own),
            None if at_checkpoint else budget,
            stop_when=budget.stop_when if at_checkpoint else (),
            sinks=self._sinks,
            on_warning=self._on_warning,
            price_book=self._price_book,
            clock=self._clock,
        )

    # One leg of a run

    def _before_invocation(self, event: BeforeInvocationEvent) -> None:
        agent = event.agent
        run = self._runs.get(agent)
        # A hook that resumes the agent stays in the same invocation.
        metrics = agent.event_loop_metrics
        number = len(metrics.agent_invocations)
        if run is not None and run.resumable:
            run.begin_leg()
        elif run is not None and run.metrics is metrics and run.invocation == number:
            run.begin_leg()
            if not run.shared and run.trip is None:
                run.guard.restart_iterations()
        else:
            run = self._runs[agent] = self._begin(agent, event.invocation_state)
            self._outcomes.pop(agent, None)
            _history.drop_overtaken(agent.messages, goes_on=not event.messages)
        run.metrics, run.invocation = metrics, number
        # Not before the first run, so that this comes inside of the user's own middleware.
        wanted = run.bounded or _seams.has_model_middleware(agent)
        if wanted and agent not in self._watching:
            self._watch_models(agent)
        if run.parent is not None and run.parent.correction and event.messages:
            event.messages[-1]["content"].append({"text": run.parent.correction})
            run.parent.correction = ""

    def _watch_models(self, agent: Agent) -> None:
        if _seams.watch_models(agent, self._model_called):
            self._watching.add(agent)

    def _model_called(self, agent: Agent, model: Any) -> Any:
        """Note which model a call goes to, and return it with the call's completion bound."""
        run = self._runs[agent]
        run.model = model
        bound = None if run.call is None else run.call.max_output_tokens
        return model if bound is None else bounded(model, bound)

    async def _around_run(
        self, agent: Agent, invocation_state: dict[str, Any], events: Events
    ) -> AsyncGenerator[Any, None]:
        run = self._runs[agent]
        if run.watched:
            async for event in events:
                yield event
            return
        run.watched = True
        run.runs = (*_around.get(), run)
        dog = run.dog = Watchdog(run.guard, lambda: run.children > 0)
        if run.parent is not None:
            run.parent.children += 1
        loop, write = asyncio.get_running_loop(), run.written.append
        try:
            # Set for each step, so that nothing of it shows in the consumer's context; but not
            # while a model answers: nothing else starts then, and its chunks are many. Without an
            # order of hooks nobody knows whose comes first at the answer's end.
            run.entered = _around.set(run.runs)
            dog.waiting = current_task(loop)
            async for event in events:
                dog.waiting = None
                if run.entered:
                    run.leave(_around)
                if "data" in event:
                    write(event["data"])
                    dog.streaming = ORDERED
                elif "event" in event and "metadata" in event["event"]:
                    run.usage = event["event"]["metadata"].get("usage") or run.usage
                yield event
                if not dog.streaming:
                    if dog.due:
                        break
                    for notice in run.take_notices():
                        yield _seams.StreamEvent({"budgetguard_warning": notice})
                    run.entered = _around.set(run.runs)
                dog.waiting = current_task(loop)
            else:
                dog.took_effect()
                return
            dog.took_effect()
        except asyncio.CancelledError:
            if not dog.took_effect():
                raise
        except _Halt as halt:
            if halt.run is not run:
                # Another provider's budget ended the run, and the admitted call was never made.
                self._settle(run, agent, None, made=False)
                raise
        finally:
            dog.close()
            run.leave(_around)
            if run.parent is not None:
                run.parent.children -= 1
            await events.aclose()
        yield await self._stop(agent, run, invocation_state)

    async def _stop(self, agent: Agent, run: Run, invocation_state: dict[str, Any]) -> Any:
        """Close the history of a stopped run, and make the event that ends it."""
        trip = run.trip or run.guard.check()
        if trip is None:
            raise AdapterError("a stopped run must have a trip, got none. Please report this.")
        run.trip = trip
        _LOG.warning(
            "agent=<%s>, stop_reason=<%s>, detail=<%s> | run stopped before its next model call",
            agent.name,
            trip.reason,
            trip.detail,
        )
        written = "".join(run.written)
        self._settle(run, agent, "the run was stopped")
        if run.span is not None and run.span.is_recording():
            run.span.end()
        answers = _history.results_for_open_calls(agent.messages, run.results, run.tools)
        if answers is not None:
            await _history.append(agent, answers)
        message = _history.synthetic_message(
            written, synthetic_text(run.guard), synthetic_metadata(run.guard, trip)
        )
        await _history.append(agent, message)
        return _seams.StopEvent(
            str(trip.reason),
            message,
            agent.event_loop_metrics,
            invocation_state.setdefault("request_state", {}),
        )

    # Model calls

    def _before_model_call(self, event: BeforeModelCallEvent) -> None:
        if getattr(event, "cancel", False):
            return  # somebody refused the call already; younger releases only
        agent = event.agent
        run = self._runs[agent]
        run.results.clear()
        cycle = len(agent.event_loop_metrics.agent_invocations[-1].cycles)
        retry = run.overflowed or cycle == run.cycle
        run.cycle, run.overflowed = cycle, False
        # Without Strands' own estimate: the last prompt and its answer are in the next one.
        projected = getattr(event, "projected_input_tokens", None) or run.last_tokens
        decision = run.guard.admit_model_call(
            ModelCall(model=model_name(agent.model), retry=retry, input_tokens=projected)
        )
        run.note_warnings()
        run.span = trace.get_current_span()
        if isinstance(decision, Stop):
            run.trip = decision.trip
            raise _Halt(run)
        run.begin_call()
        run.call = decision
        if isinstance(decision, Nudge) and agent.messages[-1]["role"] == "user":
            agent.messages[-1]["content"].append({"text": decision.message})

    def _after_model_call(self, event: AfterModelCallEvent) -> None:
        run = self._runs[event.agent]
        if run.entered is None and run.dog is not None and run.dog.streaming:
            run.entered = _around.set(run.runs)  # what other hooks start now belongs to the run
        if isinstance(event.exception, ContextWindowOverflowException):
            run.overflowed = True
            if not run.shared and not run.recovered:
                # As the reference does; but once a leg, because a loop that overflows again and
                # again would never end.
                run.recovered = True
                run.guard.restart_iterations()
        if run.usage is None and event.stop_response is not None:
            message: dict[str, Any] = {**event.stop_response.message}
            metadata: dict[str, Any] = message.get("metadata") or {}
            run.usage = metadata.get("usage")
            # With the arguments of its tool calls, in case that they have to be estimated.
            run.written[:] = [json.dumps(message["content"], default=str)]
        self._settle(run, event.agent, event.exception)

    def _settle(
        self, run: Run, agent: Agent, error: BaseException | str | None, *, made: bool = True
    ) -> None:
        """Charge the model call in flight, if there is one, with what it reported so far."""
        if run.call is None:
            return
        usage = token_usage(run.usage)
        if usage is None:
            if agent in self._watching and run.model is None:
                made = False  # the user's own hook or middleware answered in the model's place
            if not made or (isinstance(error, _REFUSALS) and not run.written):
                usage = TokenUsage()
            elif run.written or not isinstance(error, BaseException):
                projected = run.call.call.input_tokens
                usage = estimated_usage(agent.messages, "".join(run.written), projected)
        if usage is not None:
            run.last_tokens = usage.total_tokens
        other = None if run.model in (None, agent.model) else model_name(run.model)
        try:
            run.guard.settle_model_call(run.call, usage, error=error, model=other)
        except ConfigurationError as wrong:
            run.guard.report(f"usage: {wrong}")
        run.begin_call()
        run.note_warnings()

    # Tool calls

    def _before_tool_call(self, event: BeforeToolCallEvent) -> None:
        run = self._runs.get(event.agent)
        if event.cancel_tool or run is None or run.ended:
            return  # outside of a run it is the user's own code that calls the tool
        use = event.tool_use
        if use["toolUseId"] in run.tools:
            return  # it was interrupted for a person's answer, and goes on
        child = getattr(event.selected_tool, "agent", None)
        if isinstance(child, Agent):
            self._cover(child, run.guard)
        decision = run.guard.admit_tool_call(
            ToolCall(
                name=use["name"],
                arguments=use["input"],
                id=use["toolUseId"],
                kind=_kind(event.selected_tool, use["name"], run),
            )
        )
        run.note_warnings()
        if isinstance(decision, Admit):
            run.tools[use["toolUseId"]] = decision
            return
        event.cancel_tool = decision.message
        if isinstance(decision, Stop):
            run.trip = decision.trip

    def _after_tool_call(self, event: AfterToolCallEvent) -> None:
        run = self._runs.get(event.agent)
        if run is None or run.ended:
            return
        use = event.tool_use["toolUseId"]
        child = getattr(event.selected_tool, "agent", None)
        if (
            isinstance(child, Agent)
            and child.messages
            and _history.is_synthetic(child.messages[-1])
        ):
            event.result = _history.failed(event.result, _history.partial_work(child.messages))
        ticket = run.tools.pop(use, None)
        if ticket is not None:
            failed = event.result["status"] == "error"
            content = event.result["content"]
            run.guard.settle_tool_call(
                ticket,
                None if failed else content,
                error=event.exception or str(content) if failed else None,
            )
        message = run.guard.take_nudge() if run.trip is None else None
        if message is not None:
            event.result = _history.with_text(event.result, message)
        run.results[use] = event.result

    # The end

    def _after_leg(self, event: AfterInvocationEvent) -> None:
        """Settle what is open and keep the counters, before the session manager looks."""
        agent = event.agent
        run = self._runs.get(agent)
        if run is None:
            return
        if run.dog is not None:
            run.dog.close()
        self._settle(run, agent, "the run was left")
        reason = None if event.result is None else event.result.stop_reason
        if str(reason).startswith("limit_"):
            run.guard.hold(
                Violation(
                    reason=StopReason.FRAMEWORK_LIMIT,
                    detail=f"Strands' own limit ended the run: {reason}",
                )
            )
            run.trip = run.guard.check()
        if run.parent is None:
            unfinished = "checkpoint" if reason == "checkpoint" else run.trip and "stopped"
            # As text, because the state copies what it keeps each time that it is asked.
            agent.state.set(
                _KEY,
                {
                    "unfinished": unfinished,
                    "snapshot": run.guard.snapshot().to_json(),
                },
            )

    async def _after_invocation(self, event: AfterInvocationEvent) -> None:
        """End the run, after the session manager has kept it."""
        agent = event.agent
        run = self._runs.get(agent)
        if run is None or run.ended:
            return
        if run.trip is not None and event.resume is not None:
            _LOG.warning(
                "agent=<%s>, stop_reason=<%s> | a stopped run is not resumed by a hook",
                agent.name,
                run.trip.reason,
            )
            event.resume = None
        if event.resume is not None:
            return
        if event.result is not None and event.result.stop_reason == "checkpoint":
            run.resumable = True
            return
        run.ended = True
        if event.result is None and run.trip is None:
            run.guard.flush()
            return
        final = _history.text_of(agent.messages[-1]) if agent.messages else ""
        structured = getattr(event.result, "structured_output", None)
        outcome = await self._conclude(run, agent.messages, structured or final)
        self._outcomes[agent] = outcome
        if run.trip is not None and self._on_trip == "raise" and run.parent is None:
            raise BudgetExceeded(run.trip, outcome)

    async def _conclude(self, run: Run, messages: Iterable[Any], final: Any) -> Outcome:
        messages = tuple(messages)
        store = self._store if run.parent is None and run.trip is not None else None

        def end() -> Outcome:
            return end_run(
                run.guard,
                trip=run.trip,
                messages=messages,
                final=final,
                store=store,
                saved_messages=None if store is None else encode_bytes_values(messages),
                next_step=None if run.trip is None else "model call",
                resume=None if run.trip is None else _RESUME,
            )

        if run.trip is None and not self._sinks and not run.shared:
            return end()
        # A sink or a store may wait for the disk.
        return await asyncio.to_thread(end)

    # Swarms and graphs

    def _before_orchestration(self, event: BeforeMultiAgentInvocationEvent) -> None:
        source: Any = event.source
        self._install_orchestrator(source)
        self._runs[source] = self._begin(source, event.invocation_state)
        self._outcomes.pop(source, None)

    def _before_node(self, event: BeforeNodeCallEvent) -> None:
        source: Any = event.source
        run = self._runs[source]
        self._orchestrated[source.nodes[event.node_id].executor] = run
        decision = run.guard.admit_tool_call(
            ToolCall(name=event.node_id, id=event.node_id, kind="handoff")
        )
        if isinstance(decision, Admit):
            run.tools[event.node_id] = decision
        elif isinstance(decision, Stop):
            run.trip = decision.trip
            if isinstance(source, Graph):
                # A graph raises for a cancelled node, but ends normally at its own limit. The
                # node itself stops before its first model call.
                if run.graph_limit is None:
                    run.graph_limit = (source.max_node_executions,)
                source.max_node_executions = 0
            else:
                event.cancel_node = decision.message

    def _after_node(self, event: AfterNodeCallEvent) -> None:
        source: Any = event.source
        run = self._runs[source]
        executor = source.nodes[event.node_id].executor
        self._orchestrated.pop(executor, None)
        ticket = run.tools.pop(event.node_id, None)
        if ticket is None:
            return
        messages = getattr(executor, "messages", None)
        run.guard.settle_tool_call(ticket, _history.text_of(messages[-1]) if messages else None)
        run.correction = run.guard.take_nudge() or run.correction

    async def _after_orchestration(self, event: AfterMultiAgentInvocationEvent) -> None:
        source: Any = event.source
        run = self._runs[source]
        if run.graph_limit is not None:
            (source.max_node_executions,) = run.graph_limit
        run.trip = run.guard.trip
        outcome = self._outcomes[source] = await self._conclude(run, (), None)
        if run.trip is not None and self._on_trip == "raise" and run.parent is None:
            raise BudgetExceeded(run.trip, outcome)


def _kind(tool: Any, name: str, run: Run) -> Literal["function", "handoff", "output"]:
    if tool is None or getattr(tool, "tool_type", None) == "structured_output":
        return "output"  # an unknown tool has no body that could start, and is looked at for loops
    if name == "handoff_to_agent" and run.parent is not None and run.parent.tools:
        return "handoff"
    return "function"


def _checked(budget: object) -> Budget | Guard:
    if isinstance(budget, (Budget, Guard)):
        return budget
    raise ConfigurationError(
        f"budget must be a Budget or a Guard, got {type(budget).__name__}. "
        "Build one with Budget(max_iterations=25)."
    )


def _is_bounded(guard: Guard) -> bool:
    """Tell whether the completion of each call is bounded, here or above."""
    above: Guard | None = guard
    while above is not None:
        if above.budget.max_output_tokens_per_call is not None:
            return True
        above = above.parent
    return False


def _is_under(guard: Guard, other: Guard) -> bool:
    above: Guard | None = guard
    while above is not None and above is not other:
        above = above.parent
    return above is other
