"""How a swarm or graph that was stopped is left: what has finished stays so, the rest is open."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from strands.multiagent import Swarm
from strands.multiagent.base import Status
from strands.multiagent.graph import Graph

from budgetguard_core import RunFencedError
from budgetguard_strands import _seams


def ask_before_nodes(state: Any, is_over: Callable[[], bool]) -> None:
    """Let the question whether nodes may follow, which the state answers, go to the budget first.

    Neither a swarm nor a graph has a hook that ends it between two nodes.
    """
    own = state.should_continue

    def should_continue(*args: Any, **kwargs: Any) -> Any:
        if is_over():
            return False, "the run was stopped"
        return own(*args, **kwargs)

    state.should_continue = should_continue


def ask_no_more(state: Any) -> None:
    """Take that back: the state may live on in the next run."""
    if "should_continue" in vars(state):
        del state.should_continue


def not_finished(source: Any, node_id: str) -> None:
    """Take back that a node has finished: its agent was stopped before it had."""
    node, state = source.nodes[node_id], source.state
    result = state.results.get(node_id)
    if result is not None:
        result.status = Status.FAILED
    if isinstance(source, Graph):
        state.completed_nodes.discard(node)
        state.failed_nodes.discard(node)
        if node in state.execution_order[-1:]:
            state.execution_order.pop()
        # As one in flight: it is done again after a reload, and what waits for it still waits.
        node.execution_status = Status.EXECUTING
        if state.status == Status.EXECUTING:
            state.status = Status.FAILED
    elif state.handoff_node is None and node in state.node_history[-1:]:
        state.node_history.pop()


def has_failed(source: Any) -> bool:
    """Tell whether a swarm or graph has failed."""
    state = source.state
    status = state.status if isinstance(source, Graph) else state.completion_status
    return bool(status == Status.FAILED)


def failure(source: Any) -> Exception | None:
    """Return what a node of a failed one failed with; None where Strands' own limit ended it."""
    errors = [one.result for one in source.state.results.values()]
    found = next((one for one in reversed(errors) if isinstance(one, Exception)), None)
    if found is None and getattr(source.state, "failed_nodes", None):
        return RuntimeError("a node failed")
    return found


def fenced(source: Any) -> RunFencedError | None:
    """Return what left a node whose run was resumed elsewhere: a swarm makes a result of it."""
    results = [one.result for one in source.state.results.values()]
    return next((one for one in results if isinstance(one, RunFencedError)), None)


def mark_failed(source: Any) -> None:
    """Give a stopped swarm or graph the status that Strands' own limits give one."""
    if isinstance(source, Graph):
        source.state.status = Status.FAILED
    else:
        source.state.completion_status = Status.FAILED


def keep_unfinished(swarm: Swarm, is_unfinished: Callable[[Swarm], bool]) -> None:
    """Let the session of a stopped swarm name the node to go on with.

    Strands 1.62 and before name none for a swarm that failed, and begin anew.
    """
    own = swarm.serialize_state

    def serialize_state() -> dict[str, Any]:
        state = own()
        node = swarm.state.current_node
        if node is not None and is_unfinished(swarm):
            state["next_nodes_to_execute"] = [node.node_id]
        return state

    owner: Any = swarm
    owner.serialize_state = serialize_state


def end_normally(graph: Graph, is_stopped: Callable[[Graph, BaseException], bool]) -> None:
    """Let a graph return its result where a node was left by a stop; Strands raises it.

    Only what runs an agent by itself, in a node of the user's own, is left by one.
    """
    own: Any = graph.stream_async

    async def stream_async(*args: Any, **kwargs: Any) -> AsyncGenerator[dict[str, Any], None]:
        try:
            async with aclosing(own(*args, **kwargs)) as events:
                async for event in events:
                    yield event
        except Exception as error:
            if not is_stopped(graph, error):
                raise
            yield {"type": "multiagent_result", "result": _seams.result_of(graph)}

    owner: Any = graph
    owner.stream_async = stream_async


def go_on(source: Any) -> None:
    """Let a stopped swarm or graph with a session go on in this very object, as in a new one."""
    if source.session_manager is not None:
        source.deserialize_state(source.serialize_state())
