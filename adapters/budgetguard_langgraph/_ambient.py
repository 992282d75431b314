"""The path of a run to code whose configuration is out of reach: by the current frame."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, cast

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

from budgetguard_core.kit import FRAME, Frame, Run, current
from budgetguard_langgraph._run import Stretch
from budgetguard_langgraph._seams import graph_of_manager
from budgetguard_langgraph.callback import BudgetCallback

_KEPT: Final = 64


class _Callbacks:
    """The callbacks of the guards of one tree; LangChain tells them apart by identity."""

    def __init__(self) -> None:
        self.known: OrderedDict[str, BudgetCallback] = OrderedDict()


class _FrameCallback(BudgetCallback):
    """The callback of whatever is around the code: an `activate` block, another adapter's run."""

    is_found = True

    def _open(self, **facts: Any) -> Run:
        """Begin a run on the guard itself where it is active in a block, and no run is around."""
        frame = current()
        if frame is None or frame.run is not None or frame.guard is not self.envelope.budget:
            return super()._open(**facts)
        token = FRAME.set(frame.parent)
        try:
            return super()._open(**facts)
        finally:
            FRAME.reset(token)


def _callback_in(frame: Frame) -> BudgetCallback:
    guard = frame.guard
    known: OrderedDict[str, BudgetCallback] = guard.tree.attachment(_Callbacks).known
    found = known.get(guard.run_id)
    if found is None or found.envelope.budget is not guard:
        found = known[guard.run_id] = _FrameCallback(guard)
        while len(known) > _KEPT:
            known.popitem(last=False)
    return found


class _AmbientCallback:
    """Looks to LangChain like a context variable with the callback of the run around the code."""

    def get(self) -> BaseCallbackHandler | None:
        frame = FRAME.get()
        if type(frame) is not Stretch or frame.closed or frame.run.ended:
            frame = current()
        if frame is None or (frame.run is not None and frame.run.is_of_clients):
            # Of a block of clients each call is counted where it is sent.
            return None
        if type(frame) is Stretch:
            opener: BaseCallbackHandler = frame.graph_run.opener
            return opener
        return _callback_in(frame)


agents: Final[list[Callable[[Any], BaseCallbackHandler | None]]] = []
"""The callback of an agent that bounds itself; the middleware sets it."""


class _AgentCallback:
    """Looks to LangChain like a context variable with the callback of the agent that begins."""

    def get(self) -> BaseCallbackHandler | None:
        graph = graph_of_manager() if agents else None
        if graph is None:
            return None
        return next((found for find in agents if (found := find(graph)) is not None), None)


for _variable in (_AmbientCallback(), _AgentCallback()):
    register_configure_hook(
        cast("ContextVar[BaseCallbackHandler | None]", _variable), inheritable=True
    )
