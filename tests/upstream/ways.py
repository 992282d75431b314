"""A pytest plugin for a framework's own suite: every test under a budget that never fires.

The way in is named by the environment: `BUDGETGUARD_UPSTREAM=langgraph.bounded`. The result of
each test is written to the file that `BUDGETGUARD_UPSTREAM_RESULTS` names.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from budgetguard_core import Budget, Guard

BUDGET = Budget(
    max_iterations=10**9,
    max_model_calls=10**9,
    max_tool_calls=10**9,
    max_total_tokens=10**15,
    max_seconds=10**6,
    loop_detection=None,
)


Made = Callable[..., Any]


def _wrapped(owner: Any, name: str, wrap: Callable[[Made], Made]) -> None:
    """Replace a method, static or not, by a wrapper of it."""
    raw = owner.__dict__[name]
    kind = type(raw) if isinstance(raw, staticmethod | classmethod) else None
    function = raw.__func__ if kind else raw
    made = functools.wraps(function)(wrap(function))
    setattr(owner, name, kind(made) if kind else made)


def _langgraph_callback() -> None:
    from langchain_core.tracers.context import register_configure_hook

    from budgetguard_langgraph import BudgetCallback

    variable: ContextVar[Any] = ContextVar("upstream", default=BudgetCallback(BUDGET))  # noqa: B039
    register_configure_hook(variable, inheritable=True)


def _langgraph_bounded() -> None:
    from langgraph.graph.state import StateGraph

    from budgetguard_langgraph import bounded

    _wrapped(
        StateGraph,
        "compile",
        lambda made: lambda *args, **options: bounded(made(*args, **options), BUDGET),
    )


def _langgraph_middleware() -> None:
    import langchain.agents.factory as factory

    from budgetguard_langgraph import BudgetMiddleware

    create = factory.create_agent

    @functools.wraps(create)
    def create_agent(*args: Any, middleware: Any = (), **options: Any) -> Any:
        return create(*args, middleware=[*middleware, BudgetMiddleware(BUDGET)], **options)

    factory.create_agent = create_agent
    __import__("langchain.agents").agents.create_agent = create_agent


def _openai_agents() -> Any:
    """Import the adapter, which the suite's fixture uninstalls before each test."""
    import agents.run

    import budgetguard_openai_agents as ours

    reset = agents.run.set_default_agent_runner

    def set_default_agent_runner(runner: Any) -> None:
        reset(runner)
        ours.install()

    agents.run.set_default_agent_runner = set_default_agent_runner
    return ours


def _openai_agents_hooks() -> None:
    from agents import Runner

    ours = _openai_agents()

    def hooked(run: Made) -> Made:
        return lambda *args, hooks=None, **options: run(
            *args, hooks=ours.BudgetHooks(BUDGET, hooks), **options
        )

    for name in ("run", "run_sync", "run_streamed"):
        _wrapped(Runner, name, hooked)


def _openai_agents_bounded_run() -> None:
    from agents import Runner

    ours = _openai_agents()
    for name in ("run", "run_sync", "run_streamed"):
        begin = getattr(ours, f"bounded_{name}")

        def bounded(run: Made, begin: Made = begin) -> Made:
            def with_budget(cls: Any, agent: Any, *args: Any, **options: Any) -> Any:
                if isinstance(options.get("hooks"), ours.BudgetHooks):
                    return run(cls, agent, *args, **options)
                return begin(agent, *args, budget=BUDGET, **options)

            return with_budget

        _wrapped(Runner, name, bounded)


def _strands_provider() -> None:
    from strands import Agent

    from budgetguard_strands import BudgetHookProvider

    def with_provider(init: Callable[..., None]) -> Callable[..., None]:
        def made(self: Agent, *args: Any, hooks: Any = None, **options: Any) -> None:
            init(self, *args, hooks=[*(hooks or ()), BudgetHookProvider(BUDGET)], **options)

        return made

    _wrapped(Agent, "__init__", with_provider)


def _imported(name: str) -> Callable[[], None]:
    return lambda: __import__(name) and None


def _http() -> None:
    from budgetguard_http import install

    install()


class Way:
    """One way in: what it changes once, and whether a guard is active around each test."""

    def __init__(self, begin: Callable[[], None], *, active: bool = False) -> None:
        self.begin = begin
        self.active = active


WAYS: dict[str, Way] = {
    "langgraph.callback": Way(_langgraph_callback),
    "langgraph.bounded": Way(_langgraph_bounded),
    "langgraph.middleware": Way(_langgraph_middleware),
    "langgraph.activate": Way(_imported("budgetguard_langgraph"), active=True),
    "openai_agents.hooks": Way(_openai_agents_hooks),
    "openai_agents.bounded_run": Way(_openai_agents_bounded_run),
    "openai_agents.activate": Way(_openai_agents, active=True),
    "strands.provider": Way(_strands_provider),
    "strands.activate": Way(_imported("budgetguard_strands"), active=True),
    "http.install": Way(_http),
    "http.activate": Way(_http, active=True),
}


class Upstream:
    """The plugin: the way in of the whole run, and the result of each test."""

    def __init__(self, way: Way | None, results: Path) -> None:
        self.way = way
        self.results = results
        self.outcomes: dict[str, str] = {}
        # A loop that lives as long as the suite copies its context once: one guard for all tests.
        self.guard = Guard(BUDGET) if way is not None and way.active else None

    def block(self) -> AbstractContextManager[Any]:
        """The block around a test."""
        return nullcontext() if self.guard is None else self.guard.activate()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None]:
        with self.block():
            yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            was = self.outcomes.get(report.nodeid)
            self.outcomes[report.nodeid] = "failed" if was == "failed" else report.outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.results.write_text(json.dumps(self.outcomes))


def pytest_configure(config: pytest.Config) -> None:
    """Take the way in that the environment names before the suite is imported."""
    name = os.environ.get("BUDGETGUARD_UPSTREAM", "")
    way = WAYS[name] if name else None
    if way is not None:
        way.begin()
    config.pluginmanager.register(
        Upstream(way, Path(os.environ["BUDGETGUARD_UPSTREAM_RESULTS"])), "budgetguard-upstream"
    )
