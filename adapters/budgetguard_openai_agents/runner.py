"""The users' imports: hooks with a budget, runs within one, and their outcomes."""

from __future__ import annotations

from typing import Any, Unpack

import agents
from agents import Agent
from agents.lifecycle import RunHooksBase

from budgetguard_core import AdapterError, Budget, ConfigurationError, Guard, Outcome, Snapshot
from budgetguard_core.kit import Envelope, EnvelopeOptions, envelope_of, outcome_of, part
from budgetguard_core.kit import outcome as kit_outcome
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._frame import recorder_here
from budgetguard_openai_agents._runner import install

_NOTHING = agents.RunHooks[Any]()


class BudgetHooks(agents.RunHooks[Any]):
    """Bound a run: `Runner.run(agent, input, hooks=BudgetHooks(Budget(max_iterations=25)))`.

    Works in `run`, `run_sync` and `run_streamed`. A run that is stopped returns a normal result,
    with a synthetic last message; `outcome(result)` says why. Sub-agents and runs inside tools
    spend the same budget. Can be given to many runs, one after the other or at the same time.
    A subclass may override any hook; `super()` calls the inner hooks.

    The SDK's `max_turns` of 10 is its default and no decision of yours, so it is lifted where the
    budget has a cap; any other `max_turns` holds, and ends the run as `framework_limit`. In
    `bounded_run` a `max_turns` of 10 holds too.

    Args:
        budget: A `Budget`: each run gets a fresh guard. A `Guard`: it is shared, nothing resets;
            of runs at the same time each looks for loops by itself. An `Envelope`: either, with
            the options below.
        inner: Your own run hooks. They are called after the guard has admitted the step.
        resume: An earlier run to go on with: its id in `store`, its `Snapshot` or `Outcome`. Of a
            run that was left, by a crash for example, the counters go on under this budget's caps;
            one that was stopped has a fresh budget. With an id the run gets the history before its
            input, unless a session or the server keeps it, and whatever else is at work on the
            same run ends at its next call; with a snapshot, give `list(resume.messages)` yourself.
        options: As `Envelope` has them: `mode`, `sinks`, `on_warning`, `on_outcome`, `price_book`,
            `clock`, `breakers`, `store`, `on_trip`, `ledger` and `tenant`. A `tenant` that is a
            function is given the run's context: `tenant=lambda context: context.tenant`.

    Raises:
        ConfigurationError: The budget is none of these, an option does not fit, or inner hooks
            have another budget.
        AdapterError: The installed release of the SDK is not supported.
    """

    def __init__(
        self,
        budget: Budget | Guard | Envelope | None = None,
        inner: agents.RunHooks[Any] | None = None,
        *,
        resume: Snapshot | Outcome | str | None = None,
        **options: Unpack[EnvelopeOptions],
    ) -> None:
        self.envelope = envelope_of(budget, **options)
        self.inner = inner
        self.resume = resume
        self.keeps_max_turns = False
        if inner is not None and not isinstance(inner, RunHooksBase):
            raise ConfigurationError(
                f"inner must be run hooks, got {type(inner).__name__}. Subclass agents.RunHooks."
            )
        if isinstance(inner, BudgetHooks) and inner.envelope.budget is not self.envelope.budget:
            # Two layers that see the same calls: they are counted once.
            raise ConfigurationError(
                "a run has one budget, got BudgetHooks with another one as inner hooks. "
                "Give the same Guard to both, or use Guard.child for a part of the run."
            )
        install()

    def called(self) -> agents.RunHooks[Any] | None:
        """Return the hooks that a run with this budget calls: only a subclass has its own."""
        if type(self) is not BudgetHooks:
            return self
        return self.inner.called() if isinstance(self.inner, BudgetHooks) else self.inner

    def next_hooks(self) -> agents.RunHooks[Any]:
        """Return the hooks that come next, in a run that has this budget."""
        if recorder_here() is None:
            raise AdapterError(
                "BudgetHooks must be the hooks of the run itself, under the default agent runner "
                "that the import installs, got called by others. Give hooks of your own as inner "
                "hooks, BudgetHooks(budget, inner=...); call set_default_agent_runner before."
            )
        return self.inner or _NOTHING


def _passed_on(name: str) -> Any:
    async def hook(self: BudgetHooks, *given: Any, **named: Any) -> None:
        await getattr(self.next_hooks(), name)(*given, **named)

    hook.__doc__ = "Call the inner hooks."
    return hook


for _name in (
    *("on_agent_start", "on_agent_end", "on_llm_start", "on_llm_end"),
    *("on_tool_start", "on_tool_end", "on_handoff"),
):
    setattr(BudgetHooks, _name, _passed_on(_name))


# `conversation_id` is the SDK's own, and says the same.
_OF_THE_BUDGET = frozenset({*EnvelopeOptions.__annotations__, "resume"} - {"conversation_id"})


async def bounded_run(
    agent: Agent[Any],
    input: str | list[agents.TResponseInputItem] | agents.RunState[Any],  # noqa: A002 - the SDK's name
    *,
    budget: Budget | Guard | Envelope | None = None,
    hooks: agents.RunHooks[Any] | None = None,
    **options: Any,
) -> agents.RunResult:
    """Run an agent within a budget: `Runner.run` that ends as a normal result when it is stopped.

    Args:
        agent: The agent to start with.
        input: What the user says, a history, or a `RunState` to go on from.
        budget: A `Budget` (a fresh guard for this run), a `Guard` (shared by reference), or an
            `Envelope`.
        hooks: Your own run hooks, or `BudgetHooks` with more options for the same budget.
        options: `resume` and the options of `BudgetHooks`, and whatever else `Runner.run` takes.
            `max_turns` is None unless you give it.

    Returns:
        The result; `outcome(result)` says how the run ended.
    """
    hooks, rest = _hooks(budget, hooks, options)
    return await agents.Runner.run(agent, input, hooks=hooks, **rest)


def bounded_run_sync(
    agent: Agent[Any],
    input: str | list[agents.TResponseInputItem] | agents.RunState[Any],  # noqa: A002 - the SDK's name
    *,
    budget: Budget | Guard | Envelope | None = None,
    hooks: agents.RunHooks[Any] | None = None,
    **options: Any,
) -> agents.RunResult:
    """Do what `bounded_run` does, where there is no event loop."""
    hooks, rest = _hooks(budget, hooks, options)
    return agents.Runner.run_sync(agent, input, hooks=hooks, **rest)


def bounded_run_streamed(
    agent: Agent[Any],
    input: str | list[agents.TResponseInputItem] | agents.RunState[Any],  # noqa: A002 - the SDK's name
    *,
    budget: Budget | Guard | Envelope | None = None,
    hooks: agents.RunHooks[Any] | None = None,
    **options: Any,
) -> agents.RunResultStreaming:
    """Do what `bounded_run` does, streamed. The synthetic last message is an event like any other.

    A consumer that leaves `stream_events()` early cancels the run.
    """
    hooks, rest = _hooks(budget, hooks, options)
    return agents.Runner.run_streamed(agent, input, hooks=hooks, **rest)


def outcome(
    result: agents.RunResult | agents.RunResultStreaming | BaseException | Outcome,
) -> Outcome:
    """Return how a run ended: status, stop reason, use, messages, how to go on.

    Args:
        result: What the run returned, a stream that was cancelled included, or the exception that
            left it; an outcome is returned as it is.

    Raises:
        AdapterError: The run had no budget, or is not over yet.
    """
    if not isinstance(result, agents.RunResult | agents.RunResultStreaming):
        return kit_outcome(result)
    found = outcome_of(result)
    if found is None:
        raise AdapterError(
            "outcome needs the result of a run that had a budget and is over, got one without. "
            "Consume stream_events() first, or run the agent with BudgetHooks."
        )
    messages = tuple(result.to_input_list())
    return found.model_copy(update={"messages": messages, "final": result.final_output})


def pending_input(
    result: agents.RunResult | agents.RunResultStreaming,
) -> list[agents.TResponseInputItem]:
    """List what a conversation that the server keeps has not seen yet of a run that was stopped.

    With `conversation_id` or `previous_response_id` the server waits for the results of the last
    tool calls; send them before the user's next words:
    `Runner.run(agent, [*unsent_input(result), message], conversation_id=...)`. Of a run that was
    stopped before its model answered, it is all that the run was given.
    """
    pending: list[agents.TResponseInputItem] = []
    waiting: set[Any] = set()
    if result.raw_responses:
        output = result.raw_responses[-1].output
        waiting = {_id_of(raw) for raw in output if not _is_answer(raw)}
        waiting -= {_id_of(raw) for raw in output if _is_answer(raw)}
    for item in reversed(result.new_items):
        raw = item.raw_item
        if part(raw, "id") == _seams.NO_ID:
            continue  # a synthetic message, of this run or of the one that it went on from
        if item.type != "input_item" and not (_is_answer(raw) and _id_of(raw) in waiting):
            break
        pending.insert(0, item.to_input_item())
    given = () if result.raw_responses else agents.ItemHelpers.input_to_new_input_list(result.input)
    return [*given, *pending]


def _is_answer(raw: Any) -> bool:
    """Return whether an item is the result of a call, or what was said to the request for one."""
    return str(part(raw, "type")).endswith(("_output", "_response"))


def _id_of(raw: Any) -> Any:
    return part(raw, "call_id") or part(raw, "approval_request_id") or part(raw, "id")


def _hooks(
    budget: Budget | Guard | Envelope | None,
    hooks: agents.RunHooks[Any] | None,
    options: dict[str, Any],
) -> tuple[BudgetHooks, dict[str, Any]]:
    own: dict[str, Any] = {n: v for n, v in options.items() if n in _OF_THE_BUDGET}
    rest = {n: v for n, v in options.items() if n not in _OF_THE_BUDGET}
    if isinstance(hooks, BudgetHooks) and not own and hooks.envelope.budget is budget:
        own, budget = {"resume": hooks.resume}, hooks.envelope
    bounded = BudgetHooks(budget, hooks, **own)
    bounded.keeps_max_turns = "max_turns" in rest
    return bounded, {"max_turns": None, **rest}
