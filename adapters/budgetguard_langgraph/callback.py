"""The callback: everything is enforced before the call goes out, on any graph, chain or model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, Unpack
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from langgraph.types import Command

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    Guard,
    Outcome,
    Snapshot,
    Trip,
)
from budgetguard_core.kit import (
    FRAME,
    Envelope,
    EnvelopeOptions,
    Flow,
    OpenToolCall,
    Run,
    current,
    entered,
    envelope_of,
    take_answers,
)
from budgetguard_langgraph import _calls, _endings
from budgetguard_langgraph._pauses import Thread
from budgetguard_langgraph._run import (
    GraphRun,
    RunId,
    Stretch,
    is_counted_below,
    owner_of,
    record_of,
)
from budgetguard_langgraph._seams import (
    WaitingHook,
    configuration,
    current_request,
    graph_call,
    is_step,
    probe,
    thread_of,
)
from budgetguard_langgraph.interrupts import ANSWERED, is_refusal
from budgetguard_langgraph.questions import asker, taken, watch_approvals


def goes_on(given: Any) -> bool:
    """Return whether a graph is to go on with what its thread is at."""
    return given is None or isinstance(given, Command)


class BudgetCallback(BaseCallbackHandler):
    """Bounds whatever it is passed to: `graph.invoke(input, {"callbacks": [BudgetCallback(b)]})`.

    Works on compiled graphs, chains and models as they are, with every entry point, sub-graphs,
    sub-agents and tools included. A stopped graph returns its last state, with an interrupt that
    tells why; `outcome(result)` and `callback.outcome` give the outcome, whose `messages` are the
    closed conversation. A callback cannot write to the graph's state, nor cancel a call that
    hangs: `bounded` does.

    Args:
        budget: A budget: a fresh guard for each top-level call of a graph or chain; models and
            tools that are called on their own share one. A guard, shared by reference. Or an
            envelope.
        messages_key: The key of the conversation in the graph's state.
        options: As `budgetguard_core.kit.Envelope` takes them.

    Raises:
        ConfigurationError: The budget or an option is none.
        AdapterError: The releases of LangGraph and LangChain are not supported.
    """

    # Without the first langchain-core only logs; without the second some calls pass by it.
    raise_error = True
    run_inline = True

    ends_elsewhere = False
    """True if its one run was opened and is ended by somebody else."""
    is_found = False
    """True if LangChain finds it by the current context, as nobody passes it on."""
    ends_in_a_node = False
    """True if a node of the graph itself writes it, which has to start for that."""

    def __init__(
        self,
        budget: Budget | Guard | Envelope | None = None,
        *,
        messages_key: str = "messages",
        **options: Unpack[EnvelopeOptions],
    ) -> None:
        probe()
        self.envelope = envelope_of(budget, **options)
        self.messages_key = messages_key
        self._lock = threading.Lock()
        self._loose: GraphRun | None = None
        self._last: GraphRun | None = None

    @property
    def guard(self) -> Guard:
        """The guard that was given, or that of the run that began last."""
        budget = self.envelope.budget
        if isinstance(budget, Guard):
            return budget
        return (self._last or self._own_loose_run()).run.guard

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the run that began last; None while it goes on."""
        return None if self._last is None else self._last.run.outcome

    # Chains and graphs: observed only. Raising here loses answers that are paid for.

    def _start_chain(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        tags: list[str] | None = None,
        **_: Any,
    ) -> Flow[None] | None:
        """Note whose run a chain belongs to, and start no step of a run that was stopped."""
        open_call = self._last
        if self.ends_elsewhere and open_call is not None and open_call.root is None:
            open_call.root, open_call.graph_call = (
                run_id,
                graph_call(),
            )  # the first is the graph itself
        frame = current()
        known = record_of(run_id)
        owner = owner_of(known or record_of(parent_run_id), parent_run_id, frame)
        mine = owner
        if owner is not None and owner.opener is not self:
            mine = owner.run_of(self)
        if mine is None and not self._skips(owner):
            return self._begin(run_id, inputs, owner, metadata, tags, parent_run_id)
        if owner is None:
            return None
        if mine is owner and is_step(tags):
            self._start_step(owner, parent_run_id, metadata)
        if mine is not owner and known is not None:
            return None
        is_inside = type(frame) is Stretch and frame.graph_run is owner and frame.call is None
        enclosing = None if frame is None else frame.call
        if type(frame) is Stretch and type(enclosing) is not OpenToolCall:
            enclosing = None  # only a tool call keeps the frame of its body alive
        step = Stretch(owner, run_id, enclosing)
        # Only below the root: what reads a stream from outside is no part of the run.
        is_below = mine is owner and run_id is not owner.root
        if is_below and not is_inside and not is_counted_below(owner, frame):
            FRAME.set(step)
        return None

    def _start_step(
        self, owner: GraphRun, parent_id: RunId | None, metadata: Mapping[str, Any] | None
    ) -> None:
        """Raise where a step of a run begins that was stopped, whatever its node calls."""
        if (self.ends_in_a_node or owner.ends_in_a_node) and parent_id == owner.root:
            return
        details = metadata or {}
        if owner.resumed and owner.goes_on_with(parent_id, details.get("langgraph_step")):
            return
        trip = owner.has_to_end()
        if trip is not None:
            owner.next_step = owner.next_step or f"run the node {details.get('langgraph_node')}"
            raise _endings.stop(owner, trip, ())

    def _end_chain(self, outputs: Any, *, run_id: UUID, **_: Any) -> Flow[None] | None:
        """End the run when its root has ended."""
        return self._over(run_id, outputs, None)

    def _fail_chain(
        self, error: BaseException, *, run_id: UUID, tags: list[str] | None = None, **_: Any
    ) -> Flow[None] | None:
        """End the run when its root has failed; a stop gets its outcome.

        What was refused to a client in a node ends the graph as a refused tool does.
        """
        record = self._flying(run_id) if is_step(tags) and is_refusal(error) else None
        flow = self._over(run_id, None, error)
        if flow is None and record is not None:
            self._stop(record.graph_run, record.run.check())
        return flow

    def _over(self, run_id: RunId, outputs: Any, error: BaseException | None) -> Flow[None] | None:
        record = record_of(run_id)
        if record is None:
            return None
        owner = record.graph_run
        if owner.opener is not self and owner.run_of(self) is None:
            return None
        record.leave()
        # The first callback that hears of it ends all runs that are this call.
        return self._end(run_id, owner, outputs, error) if record.run_id is owner.root else None

    def _end(
        self, run_id: RunId, innermost: GraphRun, outputs: Any, error: BaseException | None
    ) -> Flow[None]:
        stop: BudgetExceeded | None = None
        mine: GraphRun | None = innermost
        while mine is not None and mine.root == run_id:
            mine.over(error)
            opener: BudgetCallback = mine.opener
            if not opener.ends_elsewhere:
                ended = yield from _endings.end(mine, outputs, error, opener.messages_key)
                stop = ended or stop
            opener.let_go()
            mine = mine.outer
        if stop is not None:
            raise stop

    def _stop(self, mine: GraphRun, trip: Trip | None, prompt: Sequence[Any] = ()) -> None:
        if trip is not None:
            raise _endings.stop(mine, trip, prompt)

    on_chain_start: Any = WaitingHook(_start_chain)
    on_chain_end: Any = WaitingHook(_end_chain)
    on_chain_error: Any = WaitingHook(_fail_chain)

    # Models

    def _start_model_call(
        self,
        serialized: Any,
        prompts: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        invocation_params: Any = None,
        batch_size: int = 1,
        **_: Any,
    ) -> Flow[None] | None:
        """Admit a model call, or stop the run."""
        mine = self._counting(run_id, parent_run_id)
        if mine is None:
            return None
        requested = current_request(invocation_params)
        return self._ask_model(
            mine, run_id, parent_run_id, prompts, requested, metadata, batch_size
        )

    def _ask_model(
        self, mine: GraphRun, run_id: RunId, parent: RunId | None, prompts: Any, *facts: Any
    ) -> Flow[None]:
        trip = yield from _calls.start_model_call(mine, run_id, parent, prompts, *facts)
        self._stop(mine, trip, prompts[0] if prompts else ())

    on_chat_model_start: Any = WaitingHook(_start_model_call)
    on_llm_start: Any = on_chat_model_start

    def on_llm_new_token(
        self, token: str | list[str | dict[str, Any]], *, chunk: Any = None, run_id: UUID, **_: Any
    ) -> None:
        """Measure a stream, and end it when the deadline has passed or the run was aborted."""
        record = self._flying(run_id)
        if record is not None:
            text = token if isinstance(token, str) else str(token)
            self._stop(record.graph_run, _calls.measure_token(record, text, chunk))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        """Charge a model call that answered."""
        record = self._flying(run_id)
        if record is not None:
            _calls.end_model_call(record, response)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """Charge a model call that failed or was cancelled."""
        record = self._flying(run_id)
        if record is not None:
            _calls.fail_model_call(record, error)

    # Tools

    def _start_tool_call(
        self,
        serialized: dict[str, Any] | None,
        given: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        inputs: Any = None,
        tool_call_id: str | None = None,
        **_: Any,
    ) -> Flow[None] | None:
        """Admit a tool call together with the others of its batch, refuse it, or stop the run."""
        mine = self._counting(run_id, parent_run_id)
        if mine is None:
            return None
        name: str = (serialized or {}).get("name") or ""
        details = given if inputs is None else inputs
        return self._ask_tool(mine, run_id, name, details, tool_call_id, metadata or {})

    def _ask_tool(self, mine: GraphRun, *facts: Any) -> Flow[None]:
        refused = yield from _calls.start_tool_call(mine, *facts)
        if isinstance(refused, Exception):
            raise refused
        self._stop(mine, refused)

    on_tool_start: Any = WaitingHook(_start_tool_call)

    def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
        """Settle a tool call that returned."""
        record = self._flying(run_id)
        if record is not None:
            _calls.end_tool_call(record, output)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """Settle a tool call that failed; one that a stop or a person interrupted stays open."""
        record = self._flying(run_id)
        if record is not None:
            self._stop(record.graph_run, _calls.fail_tool_call(record, error))

    # Whose run it is

    def _begin(
        self,
        run_id: RunId,
        given: Any,
        owner: GraphRun | None,
        metadata: dict[str, Any] | None,
        tags: list[str] | None,
        parent_id: RunId | None,
    ) -> Flow[None]:
        call = graph_call()
        thread, kept, answers = None, None, {}
        # A chain's hooks are told the metadata of its configuration, and no more of it.
        config: Any = {"metadata": metadata or {}} if call is None else call.config
        if call is not None:
            thread = Thread(call.graph, configuration(config), owner)
            if goes_on(given):
                kept = yield from thread.kept()
                answers = taken(given, thread.waiting)[0]
            if getattr(given, "resume", None) is not None and thread.asks_nobody:
                raise AdapterError(ANSWERED)
        enclosing = current()
        inside = owner is None or (enclosing is not None and enclosing.run is owner.run)
        with nullcontext() if inside or owner is None else entered(owner.run.frame()):
            mine = self.open(owner, given, config, thread, answers, resume=kept)
        mine.root, mine.graph_call = run_id, call
        Stretch(mine, run_id)
        if is_step(tags):
            self._start_step(mine, parent_id, metadata)

    def open(
        self,
        outer: GraphRun | None,
        given: Any,
        config: Any,
        thread: Thread | None = None,
        answers: Mapping[str, Any] = MappingProxyType({}),
        *,
        resume: Snapshot | None = None,
        fresh: bool = False,
        answered: bool = True,
    ) -> GraphRun:
        """Open the run of a graph or chain that is called."""
        watch_approvals()
        run = self._open(
            user_spoke=not goes_on(given),
            resume=resume,
            fresh=fresh,
            config=config,
            given=given,
            thread=thread_of(config),
            asks=asker(self.envelope, thread),
        )
        take_answers(run, answers)
        # Its first node may be one that asks no model, and hang.
        run.guard.start()
        mine = GraphRun(run, self, None, outer, answered=answered and resume is not None)
        mine.thread = thread
        self._last = mine
        return mine

    def _open(self, **facts: Any) -> Run:
        return self.envelope.open(**facts)

    def let_go(self) -> None:
        """Forget a run that is over, where this lives as long as its agent or guard."""
        if self.is_found:
            self._last = None

    def _skips(self, owner: GraphRun | None) -> bool:
        """Return whether what is opened inside is left to others: it is a part of the guard."""
        guard = self.envelope.budget
        if owner is None or not self.is_found or not isinstance(guard, Guard):
            return False
        return any(guard in one.ancestry for one in owner.run.guards)

    def _own_loose_run(self) -> GraphRun:
        """Return the run of models and tools that are called on their own."""
        with self._lock:
            if self._loose is None:
                self._loose = GraphRun(self._open(loose=True), self, None, None)
            return self._loose

    def _counting(self, run_id: RunId, parent_run_id: RunId | None) -> GraphRun | None:
        """Return this callback's run where it is the innermost one around a call."""
        frame = current()
        known = record_of(run_id)
        owner = owner_of(known or record_of(parent_run_id), parent_run_id, frame)
        mine = owner
        if owner is not None and owner.opener is not self:
            mine = owner.run_of(self)
        if mine is None:
            if self._skips(owner):
                return None
            mine = self._run_in(owner)
        elif mine is not owner:
            return None
        is_known = known is not None and known.graph_run is mine  # it was given to it twice
        is_below = type(frame) is not Stretch and is_counted_below(mine, frame)
        return None if is_known or is_below else mine

    def _run_in(self, owner: GraphRun | None) -> GraphRun:
        """Return the run of a call that was given this callback by itself."""
        if owner is None or owner.root is None:
            mine = self._own_loose_run()
            self._last = self._last or mine
            return mine
        with owner.lock:
            found = owner.inner.get(id(self))
            if found is None:
                with entered(owner.run.frame()):
                    found = GraphRun(self._open(loose=True), self, None, owner)
                owner.inner[id(self)] = found
        self._last = found
        return found

    def _flying(self, run_id: RunId) -> Stretch | None:
        """Return what goes on under a run id, where it is of this callback's own run."""
        record = record_of(run_id)
        return record if record is not None and record.graph_run.opener is self else None

    def __copy__(self) -> BudgetCallback:
        return self

    def __deepcopy__(self, memo: Any) -> BudgetCallback:
        # Configurations are copied; the callback is known by its identity.
        return self
