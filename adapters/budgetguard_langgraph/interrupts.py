"""The exceptions that stop a graph, of types that no layer of LangGraph retries or swallows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from langchain_core import exceptions
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.types import Interrupt

from budgetguard_core import BudgetExceeded, Outcome, Trip
from budgetguard_core.kit import part
from budgetguard_langgraph._seams import configuration

TYPE = "budget_exceeded"
"""The `type` in the value of an interrupt that a budget made."""
_REASON: Final = "x-budgetguard-stop-reason"
ANSWERED: Final = (
    "Command(resume=...) must answer a question, got a thread that a budget stopped. "
    "Go on with resume(graph, config, budget)."
)

if TYPE_CHECKING:
    NotRetried = Exception
else:
    # What LangChain's retries leave alone, those of its summaries too; older releases have none.
    NotRetried = getattr(exceptions, "ModelError", Exception)


class BudgetInterrupt(BudgetExceeded, GraphInterrupt, NotRetried):
    """Ends a graph at its next step. The graph itself returns, with its last state.

    Where no graph is around it (a bare model, a chain, an `AgentExecutor`) it is raised.
    """

    def __init__(self, trip: Trip, outcome: Outcome | None = None) -> None:
        BudgetExceeded.__init__(self, trip, outcome)
        namespace = configuration().get("checkpoint_ns", "")
        value = {
            "type": TYPE,
            "stop_reason": str(trip.reason),
            "detail": trip.detail,
            "run_id": trip.run_id,
        }
        # LangGraph keeps what is in `args`; an id of its own keeps an answer that is meant for
        # another interrupt away from it.
        self.args = ((Interrupt.from_ns(value, namespace),),)

    def __str__(self) -> str:
        return f"{self.trip.reason}: {self.trip.detail}"


class BudgetStop(BudgetExceeded, GraphBubbleUp, NotRetried):
    """Ends a graph by passing through all of its layers up to the caller (`on_trip="raise"`)."""


def is_budget_interrupt(interrupt: Any) -> bool:
    """Return whether an interrupt of a graph was made by a budget, not for a person to answer."""
    return bool(part(part(interrupt, "value"), "type") == TYPE)


def is_stop_below(error: BaseException) -> bool:
    """Return whether a graph inside was stopped: LangGraph makes one interrupt of several stops."""
    requested: Any = error.args[0] if isinstance(error, GraphInterrupt) and error.args else ()
    return bool(requested) and all(is_budget_interrupt(one) for one in requested)


def is_refusal(error: BaseException) -> bool:
    """Return whether an error of a client says only that its call was refused, below in HTTP."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # boto3
        headers: Any = cast("Any", response).get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(response, "headers", None)
    return isinstance(headers, Mapping) and _REASON in headers
