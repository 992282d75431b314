"""Whose a call is.

LangChain tells callbacks apart by identity and calls by run ids, so a run is found by the id of the
chain around a call, and by the frame where a configuration did not come through. Where several runs
are around a call, the innermost one counts it: it is a part of the others.
"""

from __future__ import annotations

from typing import Any

from budgetguard_core.kit import FRAME, Frame, OpenToolCall, current
from budgetguard_langgraph._run import OWNERS, GraphRun, RunId, Step
from budgetguard_langgraph._seams import surrounding_run_id


def owner_of(
    run_id: RunId | None, parent_run_id: RunId | None, frame: Frame | None
) -> GraphRun | None:
    """Return the innermost run that a call in a frame belongs to, as far as it is known."""
    known = None if run_id is None else OWNERS.get(run_id)
    if known is None and parent_run_id is not None:
        known = OWNERS.get(parent_run_id)
    if known is None and OWNERS:
        known = OWNERS.get(surrounding_run_id())
    around = _run_of(frame)
    if known is None and around is None and parent_run_id is not None:
        known = _outlived()
    if known is None or (around is not None and around.is_below(known)):
        return around
    return known


def run_around() -> GraphRun | None:
    """Return the run of this adapter that the code is a part of, by its frame."""
    return _run_of(current())


def _run_of(frame: Frame | None) -> GraphRun | None:
    while frame is not None:
        if isinstance(frame, Step):
            return frame.graph_run
        frame = frame.above
    return None


def _outlived() -> GraphRun | None:
    """Return the run of a chain that is over and unknown by now: what it began may outlive it."""
    frame = FRAME.get()
    if type(frame) is Step and (not frame.run.ended or frame.is_live):
        return frame.graph_run
    return None


def is_counted_below(graph_run: GraphRun, frame: Frame | None) -> bool:
    """Return whether a run of another adapter, inside this one, counts the calls in a frame."""
    if frame is None or isinstance(frame, Step) or frame.run is None:
        return False
    above = frame.run.above
    while above is not None:
        if above.run is graph_run.run:
            return True
        above = above.above
    return False


def call_around(frame: Frame | None) -> Any:
    """Return the tool call that a chain is a part of: it keeps the frame of its body alive."""
    if frame is None or (isinstance(frame, Step) and not isinstance(frame.call, OpenToolCall)):
        return None
    return frame.call
