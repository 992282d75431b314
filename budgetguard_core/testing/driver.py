"""The driver, which performs a scenario with a real framework."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from budgetguard_core.testing.message import DriverError, NonConformance
from budgetguard_core.testing.recording import part
from budgetguard_core.testing.scenario import MODES, CallMode, Ran, Scenario, ignored_parts
from budgetguard_core.usage import TokenUsage

Feature: TypeAlias = Literal[
    "approval",
    "at_last",
    "bounded_output",
    "dialogue",
    "equal_ids",
    "fallback",
    "imported",
    "judge",
    "new_process",
    "own_limit",
    "reports",
    "structured",
    "swallowing",
    "waits",
]
"""Features that some frameworks lack, by the part of a scenario or reply that needs them:

`approval`: `Tool.approval`, a run waits for a person. `at_last`: what ends a run can call its
model. `new_process`: what it waits with can be
written down and opened elsewhere. `bounded_output`: a request says how long its answer may be
(`Script.next`, `Reply.cut`). `reports`: `Tool.reports`. `equal_ids`: the framework runs two calls
of one id. `fallback`: the model of a request can be set (`Script.next`). `imported`: a run that
knows nothing of the adapter, which is imported, is bounded by
`guard.activate()`. `waits`: a hook before a call can wait. `dialogue`, `judge`, `own_limit`,
`structured`, `swallowing`: `Scenario`'s.
"""

_SETTLING = 1.0
_T = TypeVar("_T")


class Driver(ABC):
    """One way in of one adapter, acted out with its real framework.

    A run must not raise what the framework raised, which goes into `Ran.raised`; anything else that
    is raised is a failure of the driver.
    """

    adapter: ClassVar[str]
    """The import name of the adapter: `budgetguard_loop`."""
    name: ClassVar[str]
    """The way in, as users know it: `run_bounded`."""
    modes: ClassVar[tuple[CallMode, ...]] = MODES
    """The ways in that exist."""
    subagents: ClassVar[frozenset[Literal["tool", "handoff", "graph"]]] = frozenset({"tool"})
    """The way in which the framework lets one agent run another."""
    lacks: ClassVar[Mapping[Feature, str]] = {}
    """Features that the framework does not have, with the reason; shown in the README. A driver
    never gets a scenario that needs one."""
    deviations: ClassVar[Mapping[int | tuple[int, CallMode], str]] = {}
    """Clauses that the framework makes impossible, with the reason; shown in the README."""
    limits: ClassVar[Mapping[str, str]] = {}
    """Deviations that no clause asks for: what cannot be done, by the name of the test that shows
    it, so that the entry goes when the test does; shown in the README."""
    usage_records: ClassVar[Sequence[tuple[Any, TokenUsage]]] = ()
    """Usage records in every form that the framework's providers send (`Reply.record`), those that
    do not add up as well, and what is to be read from each."""
    patience: ClassVar[float] = 60.0
    """Seconds after which a run that does not end fails its clause."""

    @abstractmethod
    def run_sync(self, scenario: Scenario) -> Ran:
        """Do a run in mode `sync`, outside any event loop."""

    @abstractmethod
    async def run_async(self, scenario: Scenario) -> Ran:
        """Do a run in mode `async` or `streamed`, on the running event loop."""

    def run(self, scenario: Scenario) -> Ran:
        """Do the run, outside any event loop."""
        if scenario.mode == "sync":
            return self.run_sync(scenario)
        ran, leaked = run_in_loop(self.run_async(scenario), patience=self.patience)
        ran.leaked = leaked
        return ran

    def has(self, feature: Feature) -> bool:
        """Return whether the framework has a feature."""
        return feature not in self.lacks

    def deviation(self, clause: int, mode: CallMode) -> str | None:
        """Return why a clause cannot hold in a mode, or None when it has to."""
        return self.deviations.get((clause, mode)) or self.deviations.get(clause)


class Nested:
    """A run of any adapter's that the body of a tool does: `Tool(runs=Nested(driver, scenario))`.

    Attributes:
        ran: The reports of the runs that came to an end.
        failures: What was raised besides what the framework raised. It is raised in the tool's
            body as well, where the framework around it may swallow it.
    """

    def __init__(self, driver: Driver, scenario: Scenario) -> None:
        self.driver = driver
        self.scenario = scenario
        self.ran: list[Ran] = []
        self.failures: list[Exception] = []

    def run(self) -> str:
        """Do the run where no event loop runs, and return its final text."""
        try:
            ran = self.driver.run_sync(self.scenario)
        except Exception as error:
            self.failures.append(error)
            raise
        return self._answer(ran)

    async def run_async(self) -> str:
        """Do the run on the running event loop, and return its final text."""
        try:
            ran = await self.driver.run_async(self.scenario)
        except Exception as error:
            self.failures.append(error)
            raise
        return self._answer(ran)

    def _answer(self, ran: Ran) -> str:
        self.ran.append(ran)
        if ran.raised is not None:
            raise ran.raised
        return ran.history[-1].text if ran.history else ""


def perform(driver: Driver, scenario: Scenario) -> Ran:
    """Perform a run by a driver, and check that it used all parts of it.

    Raises:
        DriverError: It ignored a part of the scenario.
        NonConformance: The run did not end.
    """
    ran = driver.run(scenario)
    check_parts(driver, scenario)
    if isinstance(ran.raised, NonConformance):
        raise ran.raised
    return ran


def check_parts(driver: Driver, scenario: Scenario) -> None:
    """Raise what went wrong in the driver itself: `DriverError`, or what a nested run raised."""
    for tool in part(scenario, "tools"):
        nested = part(tool, "runs")
        if nested is not None and nested.failures:
            raise nested.failures[0]
    if ignored := ignored_parts(scenario):
        raise DriverError(
            f"the driver {driver.name} ignores {', '.join(ignored)}, which the scenario sets. "
            "Use it, or declare in `lacks` that the framework has no such thing."
        )


def run_in_loop(
    coroutine: Coroutine[Any, Any, _T], *, patience: float = Driver.patience
) -> tuple[_T, tuple[str, ...]]:
    """Run a coroutine in a new event loop.

    Returns:
        What it returned, and the names of the tasks that it left behind.

    Raises:
        NonConformance: It did not end within `patience` seconds.
    """

    async def main() -> tuple[_T, tuple[str, ...]]:
        limit = asyncio.timeout(patience)
        try:
            async with limit:
                result = await coroutine
        except TimeoutError:
            if limit.expired():
                raise NonConformance(f"the run did not end within {patience:g} s") from None
            raise
        # An abandoned stream is closed by a task of its own, which may have to save first.
        for _ in range(10):
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            _, left = await asyncio.wait(left, timeout=_SETTLING)
        return result, tuple(sorted(task.get_name() for task in left))

    return asyncio.run(main())
