"""The hooks that users attach to a run."""

from __future__ import annotations

from typing import Any, Unpack

from agents import RunHooks
from agents.lifecycle import RunHooksBase

from budgetguard_core import AdapterError, Budget, ConfigurationError, Guard, Outcome, Snapshot
from budgetguard_core.kit import Envelope, EnvelopeOptions, envelope_of
from budgetguard_openai_agents._calls import around
from budgetguard_openai_agents._runner import BoundedHooks, install, is_installed

_NOTHING = RunHooks[Any]()


class BudgetHooks(BoundedHooks):
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
        inner: RunHooks[Any] | None = None,
        *,
        resume: Snapshot | Outcome | str | None = None,
        **options: Unpack[EnvelopeOptions],
    ) -> None:
        self.envelope = envelope_of(budget, **options)
        self.inner = inner
        self.resume = resume
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

    def called(self) -> RunHooks[Any] | None:
        """Return the hooks that a run with this budget calls: only a subclass has its own."""
        if type(self) is not BudgetHooks:
            return self
        return self.inner.called() if isinstance(self.inner, BudgetHooks) else self.inner

    def _inner(self) -> RunHooks[Any]:
        """Return the hooks that come next, in a run that has this budget."""
        calls = around()
        hooks = None if calls is None else calls.hooks
        while isinstance(hooks, BudgetHooks):
            if hooks is self:
                return self.inner or _NOTHING
            hooks = hooks.inner
        if not is_installed():
            raise AdapterError(
                "BudgetHooks works through the default agent runner that it installs, and another "
                "one was set since. Call set_default_agent_runner before you make BudgetHooks."
            )
        raise AdapterError(
            "BudgetHooks must be the hooks of the run itself, got called by other hooks that "
            "hold it. Give those as inner hooks: BudgetHooks(budget, inner=...)."
        )

    async def on_agent_start(self, context: Any, agent: Any) -> None:
        """Call the inner hooks."""
        await self._inner().on_agent_start(context, agent)

    async def on_agent_end(self, context: Any, agent: Any, output: Any) -> None:
        """Call the inner hooks."""
        await self._inner().on_agent_end(context, agent, output)

    async def on_llm_start(
        self, context: Any, agent: Any, system_prompt: str | None, input_items: list[Any]
    ) -> None:
        """Call the inner hooks."""
        await self._inner().on_llm_start(context, agent, system_prompt, input_items)

    async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:
        """Call the inner hooks."""
        await self._inner().on_llm_end(context, agent, response)

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
        """Call the inner hooks."""
        await self._inner().on_tool_start(context, agent, tool)

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        """Call the inner hooks."""
        await self._inner().on_tool_end(context, agent, tool, result)

    async def on_handoff(self, context: Any, from_agent: Any, to_agent: Any) -> None:
        """Call the inner hooks."""
        await self._inner().on_handoff(context=context, from_agent=from_agent, to_agent=to_agent)
