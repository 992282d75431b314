"""The contract as a suite: each clause checked once, through any adapter's driver and way in."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from budgetguard_core.budget import Budget
from budgetguard_core.guard import Guard
from budgetguard_core.outcome import Outcome
from budgetguard_core.stores import CheckpointStore
from budgetguard_core.testing.script import Agent, Script, Tool

Mode: TypeAlias = Literal["sync", "async", "streamed"]
MODES: tuple[Mode, ...] = ("sync", "async", "streamed")
PATIENCE = 20.0
"""Seconds after which a run that does not end fails its clause."""
_SETTLING = 1.0

_T = TypeVar("_T")


class NonConformance(AssertionError):
    """A clause does not hold through a driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run that a driver has to do with its real framework and a scripted model."""

    script: Script
    """The model of the (first) agent."""
    mode: Mode
    """The way in to use."""
    guard: Budget | Guard | None
    """What is given to the adapter. None: run the bare framework, without the adapter."""
    tools: Sequence[Tool] = ()
    user_input: str | None = "Go."
    """What the user says; None with `after`: go on where that run stopped."""
    handoffs: Sequence[Agent] = ()
    """Agents that the model can hand over to (only for drivers with `handoff` in `subagents`)."""
    graph: Agent | None = None
    """An agent that runs as a part of the run, before the first model call of the script's own
    agent (only for drivers with `graph` in `subagents`)."""
    on_trip: Literal["return", "raise"] = "return"
    store: CheckpointStore | None = None
    """Our checkpoint store, for adapters that take one."""
    retries: int = 0
    """How often the framework's own retry layer tries a failed model call again."""
    twice: bool = False
    """The adapter is attached in two layers that both see every call (clause 21)."""
    structured: bool = False
    """The agent has to end with structured output, where the framework has that."""
    swallowing: bool = False
    """The user's own hooks, middleware or callables catch exceptions of models and tools, report
    them as answers, or try again; wherever the framework lets them."""
    after: Ran | None = None
    """Go on from the end of this run: same thread, session or history."""
    break_after: int | None = None
    """Streamed: the consumer leaves after this many chunks."""
    shared: dict[str, Any] = field(default_factory=dict[str, Any])
    """Scratch space of the driver. Scenarios that share it are to run on one and the same agent
    object; they have the same script and tools."""
    started: list[str] = field(default_factory=list[str])
    """The tool bodies that were started, by name, those of sub-agents included."""

    def start(self, tool: Tool, value: str = "") -> str:
        """Run a tool's body, to be called where the framework calls the tool's function.

        Where the tool hangs, the driver then awaits `hang()`; where it is an agent, it then runs
        the agent.
        """
        self.started.append(tool.name)
        return tool.run(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a framework's history, in common words."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()
    """Id and name of each tool call of an assistant message, handoffs left out."""
    tool_call_id: str | None = None
    """The call that a tool message answers."""
    synthetic: Mapping[str, Any] | None = None
    """The metadata of a synthetic message, None for any other."""


@dataclass(slots=True, kw_only=True)
class Ran:
    """What a run came to, as a driver reports it."""

    history: Sequence[Message]
    """The conversation after the run, as the next turn would send it."""
    outcome: Outcome | None = None
    """The adapter's outcome; None without a guard, or when the run raised something else."""
    raised: Exception | None = None
    """What came out of the framework's entry point, if anything."""
    chunks: Sequence[object] = ()
    """Streamed: everything that the consumer got."""
    leaked: Sequence[str] = ()
    """Tasks that were still there when the run was over, by name."""
    session: Any = None
    """Whatever the driver needs to go on from here."""


class Driver(ABC):
    """One way in of one adapter, acted out with its real framework.

    `run` must not raise what the framework raised (it goes into `Ran.raised`); an exception of
    `run` itself fails the clause. Async modes run their own event loop: `run_in_loop`.
    """

    adapter: ClassVar[str]
    """The import name of the adapter: `budgetguard_loop`."""
    name: ClassVar[str]
    """The way in, as users know it: `run_bounded`."""
    modes: ClassVar[tuple[Mode, ...]] = MODES
    """The ways in that exist."""
    subagents: ClassVar[frozenset[Literal["tool", "handoff", "graph"]]] = frozenset({"tool"})
    """How the framework lets one agent run another."""
    deviations: ClassVar[Mapping[int | tuple[int, Mode], str]] = {}
    """Clauses that the framework makes impossible, with the reason; shown in the README."""
    limits: ClassVar[Mapping[str, str]] = {}
    """Deviations that no clause asks for: what cannot be done, by the name of the test that shows
    it, so that the entry goes when the test does; shown in the README."""

    @abstractmethod
    def run(self, scenario: Scenario) -> Ran:
        """Do the run."""

    def deviation(self, clause: int, mode: Mode) -> str | None:
        """Return why a clause cannot hold in a mode, or None when it has to."""
        return self.deviations.get((clause, mode)) or self.deviations.get(clause)


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause of the contract."""

    number: int
    title: str
    check: Callable[[Driver, Mode], None]
    """Raises `NonConformance`, or whatever the driver failed with, when it does not hold."""
    modes: tuple[Mode, ...] = MODES
    """The ways in for which it has a meaning."""


def run_in_loop(coroutine: Coroutine[Any, Any, _T]) -> tuple[_T, tuple[str, ...]]:
    """Run a driver's coroutine in a new event loop.

    Returns:
        What it returned, and the names of the tasks that it left behind.

    Raises:
        TimeoutError: It did not end within `PATIENCE` seconds.
    """

    async def main() -> tuple[_T, tuple[str, ...]]:
        async with asyncio.timeout(PATIENCE):
            result = await coroutine
        # An abandoned stream is closed by a task of its own, which may have to save first.
        for _ in range(10):
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            _, left = await asyncio.wait(left, timeout=_SETTLING)
        return result, tuple(sorted(task.get_name() for task in left))

    return asyncio.run(main())


def expect(condition: object, message: str) -> None:
    """Raise `NonConformance` unless the condition holds."""
    if not condition:
        raise NonConformance(message)


def check_history(history: Sequence[Message]) -> None:
    """Check that a provider would take a history as it is: clause 11.

    Every tool call has exactly one result, right after the message that asked; no result without
    a call; no two assistant or two user messages in a row.
    """
    open_calls: list[str] = []
    before: str | None = None
    for place, message in enumerate(history):
        where = f"message {place} ({message.role})"
        if message.role == "tool":
            expect(
                message.tool_call_id in open_calls,
                f"{where} answers {message.tool_call_id!r}, which is not open",
            )
            open_calls.remove(str(message.tool_call_id))
        else:
            expect(not open_calls, f"{where} comes before the results of {open_calls}")
            expect(
                message.role == "system" or message.role != before, f"{where} follows another one"
            )
        open_calls += [id_ for id_, _ in message.tool_calls]
        before = message.role
    expect(not open_calls, f"no result for {open_calls}")
