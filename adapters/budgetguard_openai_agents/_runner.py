"""The default runner of the SDK, which ends a stopped run as a normal result."""

from __future__ import annotations

import asyncio
import threading
from functools import wraps
from typing import Any, cast

from agents import (
    Agent,
    ItemHelpers,
    ModelSettings,
    RunHooks,
    RunResult,
    RunResultStreaming,
    RunState,
)
from agents.agent import AgentBase
from agents.run import (
    DEFAULT_MAX_TURNS,
    AgentRunner,
    get_default_agent_runner,
    set_default_agent_runner,
)

from budgetguard_core import (
    CheckpointError,
    ConfigurationError,
    Guard,
    Mode,
    Outcome,
    Snapshot,
)
from budgetguard_core.kit import Envelope, Run, current_guard, entered, load_to_resume, part
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._calls import around
from budgetguard_openai_agents._ending import ended
from budgetguard_openai_agents._run import Recorder
from budgetguard_openai_agents._settings import asking, bounded_config, config_of
from budgetguard_openai_agents._stream import StreamEnding

_LOCK = threading.Lock()


class BoundedHooks(RunHooks[Any]):
    """Hooks with a budget.

    Attributes:
        envelope: The budget and its options.
        resume: Where an earlier run stopped, to go on from there.
        keeps_max_turns: `max_turns` was given by the user, whatever it is.
    """

    envelope: Envelope
    resume: Snapshot | Outcome | str | None = None
    keeps_max_turns: bool = False

    def called(self) -> RunHooks[Any] | None:
        """Return the hooks that a run with this budget calls: these, if they have code to run."""
        return self


class BudgetRunner(AgentRunner):
    """Wraps the runner there was before; only passes on where no budget is active."""

    def __init__(self, previous: AgentRunner) -> None:
        self.previous = previous

    async def run(self, starting_agent: Agent[Any], input: Any, **options: Any) -> RunResult:  # noqa: A002
        """Run, and turn a stop into a result."""
        recorder, input = _bind(starting_agent, input, options)  # noqa: A001
        if recorder is None:
            return await self.previous.run(starting_agent, input, **options)
        with entered(recorder.calls.turn_frame):
            work = asyncio.create_task(self.previous.run(starting_agent, input, **options))
        return cast("RunResult", await ended(recorder, work, input, options))

    def run_sync(self, starting_agent: Agent[Any], input: Any, **options: Any) -> RunResult:  # noqa: A002
        """Run in an event loop of its own."""
        if isinstance(options.get("hooks"), BoundedHooks) or current_guard() is not None:
            return super().run_sync(starting_agent, input, **options)
        return self.previous.run_sync(starting_agent, input, **options)

    def run_streamed(
        self,
        starting_agent: Agent[Any],
        input: Any,  # noqa: A002
        **options: Any,
    ) -> RunResultStreaming:
        """Run in the background, and turn a stop into the end of the stream."""
        recorder, input = _bind(starting_agent, input, options)  # noqa: A001
        if recorder is None:
            return self.previous.run_streamed(starting_agent, input, **options)
        with entered(recorder.calls.turn_frame):
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
        current = get_default_agent_runner()
        if not isinstance(current, BudgetRunner):
            _seams.probe()
            set_default_agent_runner(BudgetRunner(current))
        for owner, name, wrap in _ASKING:
            method = getattr(owner, name)
            if not _is_asking(method):
                _MADE[name] = wrap(method)
                setattr(owner, name, _MADE[name])


def uninstall() -> None:
    """Put the runner back that there was before. Runs at work end under their budgets."""
    with _LOCK:
        current = get_default_agent_runner()
        if isinstance(current, BudgetRunner):
            set_default_agent_runner(current.previous)
        for owner, name, _ in _ASKING:
            method = getattr(owner, name)
            # What somebody else has put around ours stays; without a run ours only passes on.
            if method is _MADE.get(name, _asking):
                setattr(owner, name, method.__wrapped__)


def is_installed() -> bool:
    """Return whether runs with a budget are bounded."""
    return isinstance(get_default_agent_runner(), BudgetRunner)


def _asking(listed: Any) -> Any:
    @wraps(listed)
    async def get_all_tools(self: AgentBase[Any], run_context: Any) -> Any:
        tools = await listed(self, run_context)
        calls = around()
        return tools if calls is None or calls.run.ended else calls.begin_turn(tools)

    return get_all_tools


_ASKING = ((AgentBase, "get_all_tools", _asking), (ModelSettings, "resolve", asking))
_MADE: dict[str, Any] = {}


def _is_asking(method: Any) -> bool:
    while method is not None:
        if method in _MADE.values():
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _bind(agent: Agent[Any], given: Any, options: dict[str, Any]) -> tuple[Recorder | None, Any]:
    """Open the run, and put its hooks into its options; None when nothing bounds it.

    Returns:
        The hooks, and what the run is given: with `resume`, all that came before as well.
    """
    hooks = options.get("hooks")
    guard = current_guard()
    if guard is None and not isinstance(hooks, BoundedHooks):
        return None, given
    kept = _seams.kept_by_server(given, options)
    if kept and isinstance(given, RunState) and _seams.is_unanswered(given):
        # The SDK takes it that its server has what such a run was given.
        options |= kept
        if options.get("context") is None:
            options["context"] = _seams.context_of(given)
        given = _seams.input_of(given)
    if isinstance(hooks, BoundedHooks):
        run, given = _opened(hooks, given, options)
    else:
        run = Envelope(budget=guard).open()
    goes_on = isinstance(given, RunState)
    if goes_on:
        agent = _seams.agent_of(given, agent)
    recorder = Recorder(
        run,
        hooks.called() if isinstance(hooks, BoundedHooks) else hooks,
        agent,
        config_of(options.get("run_config")),
        server_side=bool(kept),
    )
    if not recorder.is_off:
        options["run_config"] = bounded_config(options.get("run_config"), recorder)
        recorder.calls.bounds = recorder
    options["hooks"] = recorder
    options["error_handlers"] = recorder.handlers(options.get("error_handlers"))
    if goes_on:
        recorder.calls.go_on(given, agent)
    elif (
        options.get("max_turns", DEFAULT_MAX_TURNS) == DEFAULT_MAX_TURNS
        and not getattr(hooks, "keeps_max_turns", False)
        and (isinstance(hooks, BoundedHooks) or run.above is None or run.above.run is None)
        and _has_cap(run)
    ):
        # The SDK's default is no decision of the user's; a sub-agent without a budget keeps it.
        options["max_turns"] = None
    run.guard.start()
    return recorder, cast("Any", given)


def _opened(hooks: BoundedHooks, given: Any, options: dict[str, Any]) -> tuple[Run, Any]:
    envelope, resume = hooks.envelope, hooks.resume
    goes_on = isinstance(given, RunState)
    if goes_on:
        kept = _seams.kept(given)
        if kept is not None:
            resume = Snapshot.model_validate_json(kept)
        context = _seams.context_of(given) if options.get("context") is None else options["context"]
    else:
        context = options.get("context")
    stopped = isinstance(resume, Outcome) and resume.status == "terminated"
    if isinstance(resume, Outcome):
        resume = Snapshot.of_outcome(resume)
    leg: int | None = None
    # A run that was stopped goes on under a fresh budget, one that was left where it is.
    fresh = not goes_on or resume is hooks.resume
    if isinstance(resume, str):
        resume, leg = _loaded(envelope, resume)
        if not (goes_on or options.get("session") or _seams.kept_by_server(given, options)):
            # Who keeps the conversation elsewhere has it already.
            given = [*resume.messages, *ItemHelpers.input_to_new_input_list(given)]
    spoke = not goes_on and _is_user_turn(given)
    fresh = fresh and resume is not None and (stopped or resume.trip is not None)
    asked = None if isinstance(given, RunState) else given
    run = envelope.open(user_spoke=spoke, resume=resume, fresh=fresh, config=context, given=asked)
    if resume is not None:
        run.go_on_as(leg, resume.run_id)
    return run, cast("Any", given)


def _loaded(envelope: Envelope, run_id: str) -> tuple[Snapshot, int | None]:
    if envelope.store is None:
        raise ConfigurationError(
            f"resume={run_id!r} names a run in a store, got store=None. Pass the store, or a "
            "Snapshot."
        )
    snapshot, leg = load_to_resume(envelope.store, run_id)
    if snapshot is None:
        raise CheckpointError(f"the store has no run {run_id!r}. Check the id, or start anew.")
    return snapshot, leg


def _has_cap(run: Run) -> bool:
    guards: list[Guard] = [one for guard in run.guards for one in guard.lineage]
    return any(one.mode is Mode.ENFORCE and one.budget.caps() for one in guards)


def _is_user_turn(given: Any) -> bool:
    if isinstance(given, str):
        return True
    last = cast("list[Any]", given)[-1:]
    return bool(last) and part(last[0], "role") == "user"
