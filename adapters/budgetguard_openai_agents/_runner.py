"""The default runner of the SDK, which ends a stopped run as a normal result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import wraps
from typing import Any, cast

import agents
from agents.agent import AgentBase
from agents.run import (
    DEFAULT_MAX_TURNS,
    AgentRunner,
    get_default_agent_runner,
    set_default_agent_runner,
)
from agents.stream_events import RunItemStreamEvent, StreamEvent

from budgetguard_core import (
    BudgetExceeded,
    Guard,
    Mode,
    kit,
)
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._ending import Ending
from budgetguard_openai_agents._frame import RunFrame, ask, recorder_here, take
from budgetguard_openai_agents._model import bounded_model
from budgetguard_openai_agents._run import Recorder
from budgetguard_openai_agents._tools import copied, tools_of_a_turn

_LOCK = threading.Lock()
_TURNS = {"max_iterations", "max_model_calls"}


class StreamEnding:
    """Watches a streamed run and ends its stream normally: its task and events are replaced."""

    def __init__(
        self, recorder: Recorder, result: Any, given: Any, options: dict[str, Any]
    ) -> None:
        self._recorder = recorder
        self._result = result
        self._work: asyncio.Task[Any] = result.run_loop_task
        self._events = result.stream_events
        _seams.hold_end(result)
        ending = Ending(recorder, given, options, result)
        result.run_loop_task = asyncio.create_task(ending.of(self._work))
        result.run_loop_task.add_done_callback(self._is_over)
        result.stream_events = self._stream

    def _is_over(self, task: asyncio.Task[Any]) -> None:
        # A task that is cancelled before its first step never comes to end anything.
        self._work.cancel()
        _seams.end_events(self._result)
        if task.cancelled() and not self._recorder.run.ended:
            self._recorder.close_batch()
            kit.remember(self._result, self._recorder.run.fail(asyncio.CancelledError()))

    async def _stream(self) -> AsyncIterator[StreamEvent]:
        events = self._events()
        is_left = True
        try:
            async for event in events:
                yield event
            is_left = False
        except Exception as error:
            # The consumer's side may hear of a failed guardrail before the run has ended, and in
            # 0.18 is the only one to hear of it.
            self._work.cancel()
            shell: asyncio.Task[Any] = self._result.run_loop_task
            await asyncio.wait({shell})
            failure = None if shell.cancelled() else shell.exception()
            if failure is not None and isinstance(error, BudgetExceeded):
                # A judge was stopped beside it.
                raise failure from None
            if failure is not None or shell.cancelled() or self._recorder.stop_of(error) is None:
                known = kit.outcome_of(self._result, messages=self._result.to_input_list())
                if known is not None and kit.outcome_of(error) is None:
                    # A judge's verdict that came with the stop.
                    kit.remember(error, known)
                raise
            is_left = False
        finally:
            if is_left and not self._work.done():
                self._result.cancel()
            await events.aclose()
        closing, self._recorder.closing = self._recorder.closing, []
        for item in closing:
            if item.type == "message_output_item":
                yield RunItemStreamEvent(name="message_output_created", item=item)
            elif item.type in ("tool_call_output_item", "handoff_output_item"):
                yield RunItemStreamEvent(name="tool_output", item=item)


class BudgetRunner(AgentRunner):
    """Wraps the runner there was before; only passes on where no budget is active."""

    def __init__(self, previous: AgentRunner) -> None:
        self.previous = previous

    async def run(self, starting_agent: Any, input: Any, **options: Any) -> agents.RunResult:  # noqa: A002
        """Run, and turn a stop into a result."""
        recorder, input = _bind(starting_agent, input, options)  # noqa: A001
        if recorder is None:
            return await self.previous.run(starting_agent, input, **options)
        with kit.entered(RunFrame(recorder)):
            work = asyncio.create_task(self.previous.run(starting_agent, input, **options))
        result: agents.RunResult = await Ending(recorder, input, options).of(work)
        return result

    def run_sync(self, starting_agent: Any, input: Any, **options: Any) -> agents.RunResult:  # noqa: A002
        """Run in an event loop of its own."""
        if _has_budget(options.get("hooks")) or kit.current_guard() is not None:
            return super().run_sync(starting_agent, input, **options)
        return self.previous.run_sync(starting_agent, input, **options)

    def run_streamed(
        self,
        starting_agent: agents.Agent[Any],
        input: Any,  # noqa: A002
        **options: Any,
    ) -> agents.RunResultStreaming:
        """Run in the background, and turn a stop into the end of the stream."""
        recorder, input = _bind(starting_agent, input, options)  # noqa: A001
        if recorder is None:
            return self.previous.run_streamed(starting_agent, input, **options)
        with kit.entered(RunFrame(recorder)):
            try:
                result = self.previous.run_streamed(starting_agent, input, **options)
            except BaseException as error:
                recorder.run.fail(error)
                raise
        StreamEnding(recorder, result, input, options)
        return result


def install() -> None:
    """Install the runner, by which runs with a budget end normally. Others go to the one before.

    Raises:
        AdapterError: The installed release of the SDK lacks what the adapter needs.
    """
    with _LOCK:
        runner = get_default_agent_runner()
        if not isinstance(runner, BudgetRunner):
            _seams.probe()
            set_default_agent_runner(BudgetRunner(runner))
        for owner, name, wrap in _WRAPPED:
            method = getattr(owner, name)
            if not hasattr(method, _MARK):
                made = wrap(method)
                setattr(made, _MARK, True)
                setattr(owner, name, made)


def uninstall() -> None:
    """Put the runner back that there was before. Runs at work end under their budgets.

    What else the import has wrapped stays: outside of runs with a budget it only passes on.
    """
    with _LOCK:
        runner = get_default_agent_runner()
        if isinstance(runner, BudgetRunner):
            set_default_agent_runner(runner.previous)


def _asking(listed: Any) -> Any:
    @wraps(listed)
    async def get_all_tools(self: AgentBase[Any], run_context: Any) -> Any:
        tools, recorder = await listed(self, run_context), recorder_here()
        bounds = recorder is not None and not recorder.run.ended
        return tools_of_a_turn(recorder, tools) if bounds else tools

    return get_all_tools


def _bounded(found: Any) -> Any:
    @wraps(found)
    def get_model(agent: agents.Agent[Any], run_config: agents.RunConfig) -> Any:
        return bounded_model(found(agent, run_config), agent, run_config)

    return get_model


# The mark of a wrapper, which is also on what others have put around it.
_MARK = "_of_budgetguard"
_WRAPPED = ((AgentBase, "get_all_tools", _asking), (_seams.LOOP, "get_model", _bounded))


def _bind(
    agent: agents.Agent[Any], given: Any, options: dict[str, Any]
) -> tuple[Recorder | None, Any]:
    """Open the run, and put its hooks into its options; None when nothing bounds it.

    Returns:
        The hooks, and what the run is given: with `resume`, all that came before as well.
    """
    hooks: Any = options.get("hooks")
    guard, has_own = kit.current_guard(), _has_budget(hooks)
    if guard is None and not has_own:
        return None, given
    kept = _seams.kept_by_server(given, options)
    if kept and _seams.is_unanswered(given):
        # The SDK takes it that its server has what such a run was given.
        options |= kept
        if options.get("context") is None:
            options["context"] = _seams.context_of(given)
        given = _seams.input_of(given)
    location = _seams.InState(given)
    if has_own:
        run, given = _open_call(hooks, location, given, options)
    else:
        run = kit.Envelope(budget=guard).open()
    goes_on = _seams.is_state(given)
    if goes_on:
        agent = _seams.agent_of(given, agent)
        take(given, agent, run)
    config: Any = options.get("run_config")
    recorder = Recorder(
        run,
        hooks.called() if has_own else hooks,
        agent,
        cast("Any", agents.RunConfig)(**config)
        if isinstance(config, dict)
        else config or agents.RunConfig(),
        server_side=bool(kept),
        location=location,
    )
    options["hooks"] = recorder
    options["error_handlers"] = recorder.handlers(options.get("error_handlers"))
    max_turns = options.get("max_turns", DEFAULT_MAX_TURNS)
    if goes_on:
        _seams.replace_pending_tools(given, copied)
        recorder.go_on(given, agent)
    elif not getattr(hooks, "keeps_max_turns", False) and max_turns == DEFAULT_MAX_TURNS:
        # The SDK's default is no decision of the user's.
        options["max_turns"] = None if _has_cap(run, has_own=has_own) else max_turns
    run.guard.start()
    return recorder, given


def _has_budget(hooks: Any) -> bool:
    return isinstance(getattr(hooks, "envelope", None), kit.Envelope)


def _open_call(
    hooks: Any, location: _seams.InState, given: Any, options: dict[str, Any]
) -> tuple[kit.Run, Any]:
    """Open a run, which goes on from what a state or `resume` has left; return its input too."""
    goes_on = _seams.is_state(given)
    context, session = options.get("context"), options.get("session")
    # A state with counters of its own is the newer.
    resume = None if location.get() is not None else hooks.resume
    flow = kit.open_run(
        hooks.envelope,
        location,
        resume=resume,
        user_spoke=not goes_on and _is_user_turn(given),
        config=_seams.context_of(given) if goes_on and context is None else context,
        given=None if goes_on else given,
        # A conversation at OpenAI has no id before its first use, and raises.
        thread=kit.part(session, "session_id") or options.get("conversation_id"),
        asks=ask,
    )
    run, _ = kit.run_blocking(flow)
    is_elsewhere = goes_on or session or _seams.kept_by_server(given, options)
    if isinstance(resume, str) and not is_elsewhere:
        given = [*run.earlier_messages, *agents.ItemHelpers.input_to_new_input_list(given)]
    return run, given


def _has_cap(run: kit.Run, *, has_own: bool) -> bool:
    """Return whether a cap takes the place of the SDK's turns.

    In a sub-agent without a budget of its own only one on turns does: of dollars it could take a
    lot of them.
    """
    guards: list[Guard] = [one for guard in run.guards for one in guard.ancestry]
    caps = {cap for one in guards if one.mode is Mode.ENFORCE for cap in one.budget.caps()}
    is_inside = run.parent is not None and run.parent.run is not None
    return bool(caps & _TURNS if is_inside and not has_own else caps)


def _is_user_turn(given: Any) -> bool:
    if isinstance(given, str):
        return True
    last = cast("list[Any]", given)[-1:]
    return bool(last) and kit.part(last[0], "role") == "user"
