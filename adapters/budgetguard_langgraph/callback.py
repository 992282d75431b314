"""The callback: everything is enforced before the call goes out, on any graph, chain or model."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, Literal, cast
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage, messages_to_dict
from langchain_core.outputs import LLMResult
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.types import Command

from budgetguard_core import (
    AdapterError,
    Admit,
    Budget,
    BudgetExceeded,
    CheckpointStore,
    ConfigurationError,
    Guard,
    Mode,
    ModelCall,
    Outcome,
    Refuse,
    Stop,
    StopReason,
    TokenUsage,
    ToolCall,
    ToolDecision,
    Trip,
    Violation,
    end_run,
)
from budgetguard_langgraph._calls import (
    Batch,
    Calls,
    Key,
    OpenModelCall,
    OpenToolCall,
    chain,
    innermost,
    keep,
)
from budgetguard_langgraph._history import (
    final_text,
    merged,
    messages_of,
    results_for,
    synthetic_message,
)
from budgetguard_langgraph._outcomes import remember
from budgetguard_langgraph._stack import close_pending_hooks, frame_of
from budgetguard_langgraph._tool_node import enclosing_tool_node, refusal, tool_call_id_of_stack
from budgetguard_langgraph._usage import (
    PromptEstimator,
    answer_of,
    estimate_prompt,
    is_mapping,
    model_of,
    request_of,
    text_of,
    usage_of,
)
from budgetguard_langgraph.interrupts import BudgetInterrupt, BudgetStop, is_budget_interrupt

SCOPE: Final = "budgetguard_scope"
"""The key in the inheritable metadata of a configuration that tells whose calls they are."""

_SCOPES: weakref.WeakValueDictionary[str, Guard] = weakref.WeakValueDictionary()
_STREAMS: Final = frozenset({"stream", "astream"})
ANSWERED: Final = (
    "Command(resume=...) must answer a question, got a thread that a budget stopped. "
    "Go on with resume(graph, config, budget)."
)
_CLIENT_ERRORS: Final = range(400, 500)
_TIMEOUT: Final = 408


ATTACHED: ContextVar[BudgetCallback | None] = ContextVar("budgetguard_attached", default=None)
"""The callback that a middleware attaches to what it wraps."""
register_configure_hook(
    cast("ContextVar[BaseCallbackHandler | None]", ATTACHED),
    inheritable=True,
)


class _StopsAreNoErrors(logging.Filter):
    """Takes out the warning that langchain-core writes for each stop."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (
            isinstance(record.args, tuple)
            and len(record.args) == 3
            and str(record.args[2]).startswith(("BudgetInterrupt(", "BudgetStop(", "ToolCallRef"))
        )


logging.getLogger("langchain_core.callbacks.manager").addFilter(_StopsAreNoErrors())


class Run:
    """A top-level call that a callback sees, with everything below it."""

    __slots__ = ("calls", "guard", "prompts", "root")

    def __init__(self, guard: Guard, root: UUID | None) -> None:
        self.guard = guard
        self.calls = guard.attachment(Calls)
        self.root = root
        self.prompts: OrderedDict[Any, PromptEstimator] = OrderedDict()

    def estimate(
        self, place: Key, prompt: Sequence[Any], parameters: Mapping[str, Any] | None
    ) -> int:
        """Estimate the tokens of a prompt, as a part of its graph's conversation."""
        conversation = _graph_of(place)
        known = self.prompts.get(conversation)
        if known is None:
            known = PromptEstimator()
            keep(self.prompts, conversation, known)
        return known.estimate(prompt, parameters)


class BudgetCallback(BaseCallbackHandler):
    """Bounds whatever it is passed to: `graph.invoke(input, {"callbacks": [BudgetCallback(b)]})`.

    Works on compiled graphs, chains and models as they are, with every entry point, sub-graphs,
    sub-agents and tools included. A stopped graph returns its last state, with an interrupt that
    tells why; `outcome(result)` and `callback.outcome` give the outcome, whose `messages` are the
    closed conversation. A callback cannot write to the graph's state, nor cancel a call that
    hangs: `bounded` does.

    Args:
        budget: A budget: a fresh guard for each top-level call of a graph or chain; models and
            tools that are called on their own share one. Or a guard, shared by reference.
        on_trip: `return`, or `raise` to have `BudgetExceeded` raised, with the outcome.
        store: Where the guard's checkpoint goes when the run ends.
        messages_key: The key of the conversation in the graph's state.

    Raises:
        ConfigurationError: The budget is neither a `Budget` nor a `Guard`.
    """

    # Without the first langchain-core only logs; without the second some calls pass by it.
    raise_error = True
    run_inline = True

    def __init__(
        self,
        budget: Budget | Guard,
        *,
        on_trip: Literal["return", "raise"] = "return",
        store: CheckpointStore | None = None,
        messages_key: str = "messages",
    ) -> None:
        check_arguments(budget, on_trip)
        self._budget = budget
        self._on_trip = on_trip
        self._store = store
        self._messages_key = messages_key
        self._loose: Run | None = None
        self._runs: dict[UUID, Run] = {}
        # Tools that still run when their graph has returned; what they start is still its work.
        self._orphans: OrderedDict[UUID, Run] = OrderedDict()
        self._last: Guard | None = None
        self._concludes = True
        self._saves = False
        self._corrects = True

    @property
    def guard(self) -> Guard:
        """The guard that was given, or that of the run that began last."""
        if isinstance(self._budget, Guard):
            return self._budget
        return self._last or self._loose_run().guard

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the run that began last; None while it goes on."""
        return self.guard.outcome

    # Chains and graphs: observed only. Raising here loses answers that are paid for.

    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **_: Any,
    ) -> None:
        """Note whose run a chain belongs to."""
        run = self.run_of(parent_run_id) or self._surrounding()
        if run is None:
            answer = getattr(inputs, "resume", None)
            if answer is not None and isinstance(inputs, Command):
                _refuse_answer_to_a_stop()
            run = self._begin(run_id, parent_run_id, inputs)
        self._runs[run_id] = run
        run.calls.roots[run_id] = run.root

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
        """End the run when its root has ended."""
        run = self._chain_ended(run_id)
        if run is not None:
            self._end(run, outputs, None)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """End the run when its root has failed; a stop gets its outcome."""
        run = self._chain_ended(run_id)
        if run is not None:
            self._end(run, None, error)

    # Models

    def on_chat_model_start(
        self,
        serialized: dict[str, Any] | None,
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **facts: Any,
    ) -> None:
        """Admit a call of a chat model, or stop the run."""
        self._start_model_call(run_id, parent_run_id, metadata, facts, messages[0])

    def on_llm_start(
        self,
        serialized: dict[str, Any] | None,
        prompts: list[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **facts: Any,
    ) -> None:
        """Admit a call of a text model, or stop the run."""
        self._start_model_call(run_id, parent_run_id, metadata, facts, prompts)

    def on_llm_new_token(
        self, token: str | list[str | dict[str, Any]], *, run_id: UUID, **_: Any
    ) -> None:
        """Measure a stream, and end it when the deadline has passed or the run was aborted."""
        run = self.run_of(run_id)
        call = None if run is None else run.calls.models.get(run_id)
        if run is None or call is None:
            return
        call.streamed += len(token) if isinstance(token, str) else len(str(token))
        guard: Guard = call.ticket.guard
        if guard.cancellation.cancelled or guard.time_left() == 0:
            trip = guard.check()
            if trip is not None:
                raise self._stopped(run, trip, call.prompt)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        """Charge a model call that answered."""
        run = self._known_run(run_id)
        if run is None:
            return
        with run.calls.lock:
            call = run.calls.models.pop(run_id, None)
            if call is not None:
                run.calls.failed.pop(call.place, None)
        if call is None:
            return
        usage, cost = usage_of(response)
        if usage is None or (not usage.input_tokens and cost is None):
            answered = usage.output_tokens if usage else 0
            usage = TokenUsage(
                estimate_prompt(call.prompt, call.parameters),
                answered or max(len(text_of(response)), call.streamed) // 3 + 1,
                estimated=True,
            )
        guard: Guard = call.ticket.guard
        guard.settle_model_call(call.ticket, usage, model=model_of(response), cost_usd=cost)
        answer = answer_of(response)
        if isinstance(answer, AIMessage) and answer.tool_calls:
            calls = [
                ToolCall(name=c["name"], arguments=c["args"], id=c["id"]) for c in answer.tool_calls
            ]
            run.calls.asked(call.root, _graph_of(call.place), calls)
        self._save(guard)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """Charge a model call that failed or was cancelled."""
        run = self._known_run(run_id)
        if run is None:
            return
        with run.calls.lock:
            call = run.calls.models.pop(run_id, None)
            if call is None:
                return
            keep(run.calls.failed, call.place, None)
        guard: Guard = call.ticket.guard
        guard.settle_model_call(call.ticket, _usage_of_failure(call, error), error=error)
        self._save(guard)

    # Tools

    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        inputs: dict[str, Any] | None = None,
        tool_call_id: str | None = None,
        **_: Any,
    ) -> None:
        """Admit a tool call together with the others of its batch, refuse it, or stop the run."""
        run = self._run_below(parent_run_id)
        # Known below it, so that the calls of a sub-agent belong to the same run.
        self._runs[run_id] = run
        calls = run.calls
        calls.roots[run_id] = run.root
        if run_id in calls.tools:
            return
        call = ToolCall(
            name=(serialized or {}).get("name", ""),
            arguments=input_str if inputs is None else inputs,
            id=tool_call_id or tool_call_id_of_stack(),
        )
        guard = self._guard_for(run, metadata)
        key = (run.root, _graph_of((run.root, _namespace(metadata))), call.id)
        node: Any = None
        with calls.lock:
            paused = None if call.id is None else calls.paused.pop(_pause(metadata, key), None)
            if paused is not None:
                calls.tools[run_id] = OpenToolCall(paused, key, _pause(metadata, key))
                return
            batch = calls.batches.get(key)
            if batch is not None and not batch.admitted:
                node = enclosing_tool_node()
                _admit_batch(guard, batch, node)
            known = None if batch is None or call.id is None else batch.decisions.get(call.id)
            decision = known.popleft() if known else guard.admit_tool_call(call)
            if isinstance(decision, Admit):
                calls.tools[run_id] = OpenToolCall(decision, key, _pause(metadata, key))
        if isinstance(decision, Admit):
            self._save(guard)
            return
        self._runs.pop(run_id, None)
        calls.roots.pop(run_id, None)
        refused = refusal(node or enclosing_tool_node(), decision.message)
        if isinstance(decision, Stop):
            stop = self._stopped(run, decision.trip)
            raise refused or stop
        if refused is not None:
            raise refused
        raise self._stopped(run, _trip_for(guard, decision))

    def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
        """Settle a tool call that returned, and hand a correction that is due to the model."""
        run = self._known_run(run_id)
        found = None if run is None else run.calls.ended(run_id)
        if run is None or found is None:
            return
        ticket, key = found.ticket, found.key
        guard: Guard = ticket.guard
        message = output if isinstance(output, ToolMessage) else None
        if message is None:
            guard.settle_tool_call(ticket, output)
        elif message.status == "error":
            guard.settle_tool_call(ticket, error=str(message.content))
        else:
            guard.settle_tool_call(ticket, message.content)
        if message is not None:
            if self._corrects and guard.mode is Mode.ENFORCE:
                _correct(guard, message)
            with run.calls.lock:
                batch = run.calls.batches.get(key)
                if batch is not None:
                    batch.results[str(key[2])] = message
        self._save(guard)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """Settle a tool call that failed; one that a stop or a person interrupted stays open."""
        run = self._known_run(run_id)
        found = None if run is None else run.calls.ended(run_id)
        if run is None or found is None:
            return
        ticket = found.ticket
        guard: Guard = ticket.guard
        if isinstance(error, BudgetExceeded):
            return
        if isinstance(error, GraphInterrupt) and ticket.call.id is not None:
            # Its body runs again with the answer, and is the same call.
            with run.calls.lock:
                keep(run.calls.paused, found.pause, ticket)
            return
        if isinstance(error, GraphBubbleUp):
            guard.settle_tool_call(ticket, "handed over")
        elif isinstance(error, Exception):
            guard.settle_tool_call(ticket, error=error)
        self._save(guard)

    # Whose run it is

    def _begin(self, run_id: UUID, parent_run_id: UUID | None, given: Any) -> Run:
        budget = self._budget
        guard = budget if isinstance(budget, Guard) else _fresh(budget)
        calls = guard.attachment(Calls)
        # Another callback of the tree may have seen more of the run than this one.
        root = None if parent_run_id is None else calls.roots.get(parent_run_id)
        root = root or calls.roots.get(_surrounding_run_id())
        if root is None and self._concludes:
            mine = calls.take(run_id, guard)
            if mine is guard and not (given is None or isinstance(given, Command)):
                guard.user_turn()
            guard = mine
        self._last = guard
        return Run(guard, root or run_id)

    def _chain_ended(self, run_id: UUID) -> Run | None:
        """Forget a chain; return its run if it was the root."""
        run = self._runs.pop(run_id, None)
        if run is None:
            return None
        run.calls.roots.pop(run_id, None)
        return run if run.root == run_id else None

    def _loose_run(self) -> Run:
        if self._loose is None:
            budget = self._budget
            self._loose = Run(budget if isinstance(budget, Guard) else Guard(budget), None)
        return self._loose

    def _surrounding(self) -> Run | None:
        """Find the run around a call that was given its callbacks anew."""
        return self.run_of(_surrounding_run_id()) if self._runs else None

    def _run_below(self, parent_run_id: UUID | None) -> Run:
        known = self.run_of(parent_run_id) or self._surrounding()
        if known is not None:
            return known
        if isinstance(self._budget, Guard):
            roots = self._budget.attachment(Calls).roots
            root = roots.get(parent_run_id) or roots.get(_surrounding_run_id())
            if root is not None:
                return Run(self._budget, root)
        return self._loose_run()

    def run_of(self, run_id: UUID | None) -> Run | None:
        """Return the run that a chain, a model call or a tool call belongs to, if known."""
        if run_id is None:
            return None
        return self._runs.get(run_id) or self._orphans.get(run_id)

    def _known_run(self, run_id: UUID) -> Run | None:
        run = self._runs.pop(run_id, None)
        return run or (self._orphans.pop(run_id, None) if self._orphans else None)

    def _guard_for(self, run: Run, metadata: Mapping[str, Any] | None) -> Guard:
        scope = (metadata or {}).get(SCOPE)
        scoped = None if scope is None else _SCOPES.get(scope)
        active = Guard.active()
        attached = ATTACHED.get()
        inner = None if attached is None else attached.guard
        if scoped is None and active in (None, run.guard) and inner in (None, run.guard):
            return run.guard
        return innermost(run.calls, run.guard, scoped, active, inner) or run.guard

    # The work of the hooks

    def _start_model_call(
        self,
        run_id: UUID,
        parent_run_id: UUID | None,
        metadata: Mapping[str, Any] | None,
        facts: Mapping[str, Any],
        prompt: Sequence[Any],
    ) -> None:
        run = self._run_below(parent_run_id)
        calls = run.calls
        self._runs[run_id] = run
        if run_id in calls.models:
            return
        guard = self._guard_for(run, metadata)
        parameters = facts.get("invocation_params")
        parameters = parameters if is_mapping(parameters) else None
        model, provider, bound = request_of(metadata, parameters)
        place: Key = (run.root, _namespace(metadata) or parent_run_id or run_id)
        decision = guard.admit_model_call(
            ModelCall(
                model=model,
                provider=provider,
                retry=place in calls.failed,
                input_tokens=run.estimate(place, prompt, parameters) if _is_capped(guard) else 0,
                max_output_tokens=bound,
            )
        )
        if isinstance(decision, Stop):
            self._runs.pop(run_id, None)
            close_pending_hooks()
            raise self._stopped(run, decision.trip, prompt)
        calls.models[run_id] = OpenModelCall(decision, prompt, parameters, run.root, place)
        self._save(guard)

    def _stopped(
        self, run: Run, trip: Trip, prompt: Sequence[Any] = ()
    ) -> BudgetInterrupt | BudgetStop:
        messages = [message for message in prompt if isinstance(message, BaseMessage)]
        if run.root is not None:
            with run.calls.lock:
                if messages or run.root not in run.calls.stops:
                    keep(run.calls.stops, run.root, (trip, messages))
        outcome = None
        if run.root is None and self._concludes:
            outcome = self._conclude(run, trip, messages)
        kind = BudgetStop if self._on_trip == "raise" else BudgetInterrupt
        return kind(trip, outcome)

    def _end(self, run: Run, outputs: Any, error: BaseException | None) -> None:
        calls = run.calls
        with calls.lock:
            left = [id_ for id_, call in calls.models.items() if call.root == run.root]
            for run_id in left:
                call = calls.models.pop(run_id)
                self._runs.pop(run_id, None)
                # A cancelled call reports nothing at all.
                call.ticket.guard.settle_model_call(
                    call.ticket, _usage_of_failure(call, error), error="cancelled"
                )
            if run.root is not None:
                calls.active.pop(run.root, None)
            for run_id in [id_ for id_, run_ in self._runs.items() if run_ is run]:
                keep(self._orphans, run_id, self._runs.pop(run_id))
        if not self._concludes or calls.wrapped or not calls.ends((run.root, run.guard.run_id)):
            return
        trip, messages = stop_of(calls, run.root, run.guard)
        if error is not None and not isinstance(error, BudgetExceeded):
            return
        messages = messages_of(outputs, self._messages_key) or messages
        outcome = self._conclude(run, trip, messages)
        if isinstance(error, BudgetExceeded):
            error.outcome = outcome
        remember(outputs, self._messages_key, outcome)

    def _conclude(self, run: Run, trip: Trip | None, messages: Sequence[BaseMessage]) -> Outcome:
        closed = list(messages)
        if trip is not None:
            closed += results_for(closed, run.guard, lambda id_: run.calls.result_of(run.root, id_))
            closed = merged(closed, [synthetic_message(closed, run.guard, trip)])
        return end_run(
            run.guard,
            trip=trip,
            messages=closed,
            final=final_text(closed),
            store=self._store,
            saved_messages=messages_to_dict(closed) if self._store is not None else None,
            resume=None if trip is None else "resume(graph, config, budget), with a checkpointer",
        )

    def release(self, namespace: str) -> None:
        """Charge the model calls below a node that was cancelled; they report nothing."""
        calls = self.guard.attachment(Calls)
        with calls.lock:
            for run_id, call in list(calls.models.items()):
                if str(call.place[1]).startswith(namespace):
                    del calls.models[run_id]
                    call.ticket.guard.settle_model_call(
                        call.ticket, _usage_of_failure(call, None), error="cancelled"
                    )

    def _save(self, guard: Guard) -> None:
        if self._saves and self._store is not None:
            try:
                self._store.save(chain(guard)[-1].snapshot())
            except Exception as error:
                guard.report("checkpoint", error)


def check_arguments(budget: object, on_trip: str) -> None:
    """Refuse what is neither a budget nor a guard, and an ending that there is not."""
    if not isinstance(budget, (Budget, Guard)):
        raise ConfigurationError(
            f"budget must be a Budget or a Guard, got {type(budget).__name__}. "
            "Build one with Budget(max_iterations=25)."
        )
    if on_trip not in ("return", "raise"):
        raise ConfigurationError(f"on_trip must be 'return' or 'raise', got {on_trip!r}.")


def scope_of(guard: Guard) -> str:
    """Return the mark that makes calls below a configuration those of this guard."""
    for token, known in _SCOPES.items():
        if known is guard:
            return token
    token = uuid4().hex
    _SCOPES[token] = guard
    return token


def guard_around(config: Mapping[str, Any] | None) -> Guard | None:
    """Return the guard that bounds the code which is running now, if any."""
    active = Guard.active()
    for found in (config, var_child_runnable_config.get()):
        if not found:
            continue
        manager: Any = found.get("callbacks")
        handlers = cast("list[Any]", getattr(manager, "handlers", manager or []))
        for handler in handlers:
            if isinstance(handler, BudgetCallback):
                run = handler.run_of(getattr(manager, "parent_run_id", None))
                if run is not None:
                    scope = (found.get("metadata") or {}).get(SCOPE)
                    scoped = None if scope is None else _SCOPES.get(scope)
                    return innermost(run.calls, run.guard, scoped, active)
    return active


def stop_of(
    calls: Calls, root: UUID | None, guard: Guard
) -> tuple[Trip | None, Sequence[BaseMessage]]:
    """Return why a run was stopped, and the last conversation that was seen; None if it was not."""
    if root is None:
        return None, ()
    with calls.lock:
        trip, messages = calls.stops.get(root, (None, ()))
    if trip is not None and trip.run_id in {one.run_id for one in chain(guard)}:
        return trip, messages
    return None, messages


def _refuse_answer_to_a_stop() -> None:
    """Raise when a thread that a budget stopped is answered like a person's question.

    The answer would go to the next question in the node that was stopped. A checkpointer that
    only works with `await` cannot be asked from here; `bounded` can.
    """
    frame = frame_of(_STREAMS, "config")
    graph: Any = None if frame is None else frame.f_locals.get("self")
    config: Any = None if frame is None else frame.f_locals.get("config")
    try:
        tasks: Any = graph.get_state(config).tasks
    except Exception:
        return
    if any(is_budget_interrupt(one) for task in tasks for one in task.interrupts):
        raise AdapterError(ANSWERED)


def _fresh(budget: Budget) -> Guard:
    around = Guard.active()
    return Guard(budget) if around is None else around.child(budget)


def root_around(guard: Guard) -> UUID | None:
    """Return the top-level call around this code, where a callback of the guard has seen it."""
    return guard.attachment(Calls).roots.get(_surrounding_run_id())


def _surrounding_run_id() -> UUID | None:
    manager: Any = (var_child_runnable_config.get() or {}).get("callbacks")
    return getattr(manager, "parent_run_id", None)


def _is_capped(guard: Guard) -> bool:
    return any(
        one.budget.max_total_tokens is not None or one.budget.max_cost_usd is not None
        for one in chain(guard)
    )


def _namespace(metadata: Mapping[str, Any] | None) -> str:
    namespace = (metadata or {}).get("langgraph_checkpoint_ns") or ""
    return str(namespace)


def _pause(metadata: Mapping[str, Any] | None, key: Key) -> Key:
    """Return what a tool call is known by when its graph is called again with an answer."""
    return ((metadata or {}).get("thread_id"), *key[1:])


def _graph_of(place: Key) -> str:
    """Return the namespace of the graph around a node: tasks have their own below it."""
    namespace = place[1]
    return namespace.rpartition("|")[0] if isinstance(namespace, str) else ""


def _admit_batch(guard: Guard, batch: Batch, node: Any) -> None:
    tools = getattr(node, "tools_by_name", None)
    # A name that the node does not know gets an error from it, and starts nothing.
    calls = [call for call in batch.calls if tools is None or call.name in tools]
    batch.admitted = True
    for call, decision in zip(calls, guard.admit_tool_calls(calls), strict=True):
        batch.decisions.setdefault(str(call.id), deque[ToolDecision]()).append(decision)


def _trip_for(guard: Guard, refused: Refuse) -> Trip:
    """Stop a run in which nobody can answer the model for a refused call."""
    guard.hold(Violation(reason=refused.reason, detail=refused.detail))
    return guard.check() or Trip(
        reason=StopReason.TOOL_QUOTA,
        violations=(Violation(reason=refused.reason, detail=refused.detail),),
        run_id=guard.run_id,
    )


def _correct(guard: Guard, message: ToolMessage) -> None:
    correction = guard.take_nudge()
    if correction is None:
        return
    content = message.content
    if isinstance(content, str):
        message.content = f"{content}\n\n{correction}"
    else:
        message.content = [*content, {"type": "text", "text": correction}]


def _usage_of_failure(call: OpenModelCall, error: BaseException | None) -> TokenUsage:
    """Charge what a failed call has used at most: nothing where the provider turned it away."""
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and status in _CLIENT_ERRORS and status != _TIMEOUT:
        return TokenUsage(estimated=True)
    return TokenUsage(
        estimate_prompt(call.prompt, call.parameters), call.streamed // 3, estimated=True
    )
