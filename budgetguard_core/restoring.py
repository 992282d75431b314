"""A guard as a snapshot, and a guard that goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from budgetguard_core import counters
from budgetguard_core.counters import MODEL_CALLS, RESERVED, TIME, TOOL_CALLS
from budgetguard_core.decision import Admit, ModelCall, Occurrences, ToolCall
from budgetguard_core.events import Event, RunRestored
from budgetguard_core.loops import LoopDetector
from budgetguard_core.run_state import RunState
from budgetguard_core.sinks import Sink
from budgetguard_core.snapshot import OpenCall, Snapshot
from budgetguard_core.stop_state import Mode, StopState
from budgetguard_core.tool_calls import RECORDS_KEPT, ToolCalls
from budgetguard_core.tree import as_sink

_G = TypeVar("_G", bound=Any)


def snapshot_of(state: RunState, tools: ToolCalls, messages: Sequence[Any]) -> Snapshot:
    """Return everything that a guard knows, and the conversation it is given. Under the lock."""
    guard, mine, stops, tree = state.guard, state.counters, state.stops, state.tree
    mine.tick(tree.now())
    return Snapshot(
        run_id=guard.run_id,
        parent_run_id=None if guard.parent is None else guard.parent.run_id,
        mode=state.mode.value,
        budget=guard.budget.to_json(),
        stop_conditions=len(guard.budget.stop_when),
        tenant=state.tenant(),
        counters=mine.to_dict(),
        quotas=mine.quotas_used(),
        tool_counts=mine.tools_started(),
        records=tuple(tools.records[-RECORDS_KEPT:]),
        completed_tool_calls=state.completed_tool_calls,
        elapsed_ns=None if mine.started_ns is None else mine.used[TIME],
        pauses=mine.pauses,
        trip=stops.trip,
        observed=stops.observed,
        aborted=stops.aborted,
        held=stops.held,
        warned=mine.warned,
        wraps_up=state.wraps_up,
        detector=None if state.detector is None else state.detector.state(),
        open_calls=tuple(OpenCall.of(ticket) for ticket in guard.open_calls()),
        occurrences=tools.occurrences.state(),
        largest_output=mine.largest_output,
        earlier=guard.earlier_usage,
        seq=tree.seq,
        call_id=tree.call_id,
        price_book=tree.price_book.version,
        messages=tuple(messages),
    )


def restored(
    snapshot: Snapshot,
    guard: _G,
    tools: ToolCalls,
    *,
    fresh: bool,
    sinks: Sequence[Sink | Callable[[Event], object]] = (),
) -> _G:
    """Return a guard that was made for a run that goes on, with what the snapshot knows of it."""
    state: RunState = guard.state
    tree = state.tree
    if state.counters.used[MODEL_CALLS] or state.counters.used[TOOL_CALLS]:
        return guard
    if state.mode is not Mode.OFF:
        snapshot.check_paid(state.payers())
    try:
        with tree.lock:
            take_over(state, tools, snapshot, fresh=fresh)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise snapshot.misfit(error) from None
    if sinks:
        tree.sinks = tuple(as_sink(sink) for sink in sinks)
    if tree.sinks:
        guard.emit(RunRestored, snapshot=guard.snapshot().model_dump(mode="json"))
    return guard


def take_over(state: RunState, tools: ToolCalls, snapshot: Snapshot, *, fresh: bool) -> None:
    """Go on from a snapshot: under a fresh budget, or with what was counted. Under the lock."""
    if snapshot.counters.keys() != set(counters.COUNTERS):
        raise ValueError("its counters are not those of a guard")
    guard, tree, mine = state.guard, state.tree, state.counters
    guard.earlier_usage = snapshot.earlier
    # The guard of the earlier attempt may still be in this tree: its open calls are these.
    for ticket in [one for one in tree.open.values() if one.guard.run_id == guard.run_id]:
        del tree.open[ticket.call_id]
        _set_aside(guard.ancestry[1:], ticket, -1)
    # In a tree that goes on already, the numbers of the old one are taken.
    first = tree.call_id if guard.parent is not None else 0
    tickets = [_ticket_of(state, call, first) for call in snapshot.open_calls]
    seq = snapshot.seq if guard.parent is None else tree.seq
    tree.go_on_from(seq, first + snapshot.call_id, tickets)
    for ticket in tickets:
        # Its settlement will take this off everyone in the chain.
        _set_aside(guard.ancestry[1:], ticket, 1)
    tools.records.extend(snapshot.records)
    state.completed_tool_calls += snapshot.completed()
    mine.largest_output = snapshot.largest_output
    if snapshot.occurrences is not None:
        tools.occurrences = Occurrences(**snapshot.occurrences)
    for ticket in tickets:
        if isinstance(ticket.call, ToolCall) and ticket.call.id:
            # Made again after the restart, it is the same call.
            tools.occurrences.give_back(ticket.call, ticket.occurrence)
    if fresh:
        guard.earlier_usage = snapshot.earlier + snapshot.usage()
        for ticket in tickets:
            _set_aside((guard,), ticket, 1)
        return
    now = tree.now()
    mine.restore(snapshot.counters)
    mine.set_budget(guard.budget, snapshot.quotas)
    for name, started in snapshot.tool_counts.items():
        mine.tool(name).started = started
    mine.warn(snapshot.warned)
    guard.state.wraps_up = guard.state.wraps_up and snapshot.wraps_up
    mine.pauses = snapshot.pauses
    if snapshot.elapsed_ns is not None:
        mine.started_ns = now - snapshot.elapsed_ns
    mine.keep_time(now, stands=snapshot.pauses > 0)
    detection = guard.budget.loop_detection
    if detection is not None and snapshot.detector is not None:
        state.detector = LoopDetector.from_state(detection, snapshot.detector)
    # Whoever has ended this guard before it began has ended the run.
    aborted = snapshot.aborted or state.stops.aborted
    state.stops = StopState(snapshot.trip, snapshot.observed, aborted, snapshot.held)
    mine.binds = snapshot.observed is None
    tree.halted = True
    if snapshot.aborted is not None and state.mode is Mode.ENFORCE:
        guard.cancellation.cancel()


def _set_aside(guards: Sequence[Any], ticket: Admit, by: int) -> None:
    for one in guards:
        mine = one.state.counters
        for name in RESERVED:
            setattr(mine, name, getattr(mine, name) + by * getattr(ticket, name))


def _ticket_of(state: RunState, open_call: OpenCall, first: int) -> Admit:
    call, rates = open_call.call, None
    if isinstance(call, ModelCall) and call.model is not None:
        rates = state.tree.price_book.rates_for(call.model, call.provider)
    return open_call.ticket(state.guard, first + open_call.call_id, rates)
