"""One run that a driver has to do, and what it reports of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeAlias

from budgetguard_core.budget import Budget
from budgetguard_core.guard import Guard
from budgetguard_core.outcome import Outcome
from budgetguard_core.stop import AsksPerson
from budgetguard_core.stores import CheckpointStore
from budgetguard_core.testing.message import Message
from budgetguard_core.testing.recording import Recorded, part, parts_read, unread
from budgetguard_core.testing.script import USAGE, Agent, Reply, Script, Tool, hang

CallMode: TypeAlias = Literal["sync", "async", "streamed"]
"""The way in which a run is called."""
MODES: tuple[CallMode, ...] = ("sync", "async", "streamed")
"""Every way in which a run is called."""
Location: TypeAlias = Literal["same object", "new object", "new process"]
"""The location at which a paused run goes on."""
LOCATIONS: tuple[Location, ...] = ("same object", "new object", "new process")
"""Every place where a paused run goes on."""


class Scratch(dict[str, Any]):
    """The memory of a driver between scenarios that run on one and the same agent object.

    Attributes:
        used: The parts of those scenarios that the driver has read so far, for the suite.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[str, list[Any]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(Recorded):
    """One run that a driver has to do with its real framework and a scripted model.

    It remembers which of its parts were read: a driver that ignores one that a clause has set
    fails, because the clause would say nothing.
    """

    script: Script
    """The model of the (first) agent."""
    mode: CallMode
    """The way in to use."""
    guard: Budget | Guard | None
    """The budget or guard of the adapter. None: run the bare framework, without the adapter."""
    tools: Sequence[Tool] = ()
    user_input: str | None = "Go."
    """The user's words; None with `after`: go on where that run stopped."""
    handoffs: Sequence[Agent] = ()
    """Agents that the model can hand over to (only for drivers with `handoff` in `subagents`)."""
    graph: Agent | None = None
    """An agent that runs as a part of the run, before the first model call of the script's own
    agent (only for drivers with `graph` in `subagents`)."""
    judge: Agent | None = None
    """An agent that the user's own check runs before the run's first model call: a guardrail, a
    condition, a hook, a middleware. The check gives its answer to `read`."""
    dialogue: Agent | None = None
    """Another agent that this one talks to within the run: every answer without tool calls is the
    other's input, until a limit ends it."""
    on_trip: Literal["return", "raise"] | AsksPerson = "return"
    store: CheckpointStore | None = None
    """Our checkpoint store, for adapters that take one."""
    stored: bool = False
    """The framework keeps the history for the next turn (session, thread), or our store where the
    framework has none; the driver reports what is kept in `Ran.history`, what the caller got in
    `Ran.returned`, and a run `after` this one is given its new input alone."""
    conversation: str | None = None
    """The id of the conversation, for `conversation_id`; that of the framework's if left out."""
    retries: int = 0
    """The retries of a failed model call by the framework's own retry layer."""
    twice: bool = False
    """The adapter is attached in two layers that both see every call (clause 21)."""
    structured: bool = False
    """The agent has to end with structured output; the driver reports it in `Ran.typed`."""
    own_limit: int | None = None
    """The framework's own cap of model calls, which ends the run without an exception."""
    swallowing: bool = False
    """The user's own hooks, middleware or callables catch exceptions of models and tools, report
    them as answers, or try again; wherever the framework lets them."""
    after: Ran | None = None
    """Go on from the end of this run: same thread, session or history."""
    answer: Literal["approve", "refuse"] | None = None
    """With `after`, which is paused: what the person says to every call that waits."""
    location: Location = "same object"
    """With `answer`: where the run goes on. On the same agent object and adapter; on new ones,
    with what the framework and the store keep in memory; or with nothing but what they have
    written as bytes."""
    break_after: int | None = None
    """Streamed: the consumer leaves after this many chunks."""
    shared: Scratch = field(default_factory=Scratch)
    """Scratch space of the driver. Scenarios that share it are to run on one and the same agent
    object; they have the same script and tools."""
    started: list[str] = field(default_factory=list[str])
    """The tool bodies that were started, by name, those of sub-agents included."""
    answers: list[str] = field(default_factory=list[str])
    """The answers of nested runs that the user's code has read."""

    def start(self, tool: Tool) -> None:
        """Write down that a tool's body starts, where the framework runs a sub-agent by itself."""
        part(self, "started").append(tool.name)

    def call(self, tool: Tool, value: str = "") -> str:
        """Run a tool's body where it is not async, to be called where the framework calls it."""
        self.start(tool)
        result = tool.run(value)
        return result if tool.runs is None else self.read(tool.runs.run())

    async def acall(self, tool: Tool, value: str = "") -> str:
        """Run a tool's body on an event loop."""
        self.start(tool)
        result = tool.run(value)
        if tool.hang:
            await hang()
        return result if tool.runs is None else self.read(await tool.runs.run_async())

    def read(self, answer: str) -> str:
        """Take the answer of a nested run, wherever code of the user's gets it."""
        part(self, "answers").append(answer)
        return answer


@dataclass(slots=True, kw_only=True)
class Ran:
    """The result of a run, as a driver reports it."""

    history: Sequence[Message]
    """The conversation after the run, as the next turn would send it."""
    returned: Sequence[Message] | None = None
    """With `Scenario.stored`: the history in the framework's result, if it gave one."""
    outcome: Outcome | None = None
    """The adapter's outcome, also of a run that failed; None without a guard."""
    typed: Any = "not reported"
    """With `Scenario.structured`: what stands where the program reads the structured output."""
    raised: Exception | None = None
    """The exception that left the framework's entry point, if any."""
    chunks: Sequence[object] = ()
    """Streamed: everything that the consumer got."""
    leaked: Sequence[str] = ()
    """Tasks that were still there when the run was over, by name."""
    session: Any = None
    """Whatever the driver needs to go on from here."""


# What belongs to the suite, or is read by it.
_ITS_OWN = frozenset({"mode", "script", "shared", "started", "answers", "break_after"})


def ignored_parts(scenario: Scenario) -> list[str]:
    """Name the parts of a scenario that are set and that its driver has not used."""
    found: list[str] = []
    used = part(scenario, "shared").used
    read = parts_read(scenario)
    for one in fields(Scenario):
        value = part(scenario, one.name)
        if one.name in read:
            used.setdefault(one.name, []).append(value)
            continue
        is_set = one.default is MISSING or value != one.default
        known = used.get(one.name, ())
        if is_set and one.name not in _ITS_OWN and not any(_same(value, old) for old in known):
            found.append(one.name)
    script: Script = part(scenario, "script")
    if script.calls and part(scenario, "break_after") and "break_after" not in read:
        found.append("break_after")
    agents = list(_agents(scenario))
    tools = [tool for one in (scenario, *agents) for tool in part(one, "tools")]
    found += [f"Tool.{name}" for name in ("description",) if unread(tools, name, "A tool.")]
    found += [f"Tool.{name}" for name in ("approval", "reports") if unread(tools, name, False)]
    started = [tool for tool in tools if part(tool, "name") in part(scenario, "started")]
    found += [f"Tool.{name}" for name in ("agent", "runs") if unread(started, name, None)]
    found += [f"Tool.{name}" for name in ("hang",) if unread(started, name, False)]
    ran = [agent for agent in agents if part(agent, "script").calls]
    found += [
        f"Agent.{name}"
        for name, unset in (("budget", None), ("tools", ()))
        if unread(ran, name, unset)
    ]
    scripts = [script, *(part(agent, "script") for agent in agents)]
    found += _ignored_of_replies([reply for one in scripts for reply in one.given])
    for tool in started:
        if (nested := part(tool, "runs")) is not None:
            found += [f"{name} (nested)" for name in ignored_parts(nested.scenario)]
    return found


def _same(value: Any, other: Any) -> bool:
    if {type(value), type(other)} <= {list, tuple}:
        return list(map(id, value)) == list(map(id, other))
    return value is other or (isinstance(value, str | bool | int) and value == other)


def _agents(scenario: Scenario) -> Iterator[Agent]:
    waiting: list[Agent | None] = list(part(scenario, "handoffs"))
    waiting += [part(tool, "agent") for tool in part(scenario, "tools")]
    waiting += [part(scenario, name) for name in ("graph", "judge", "dialogue")]
    while waiting:
        agent = waiting.pop()
        if agent is not None:
            yield agent
            waiting += [part(tool, "agent") for tool in part(agent, "tools")]


def _ignored_of_replies(replies: list[Reply]) -> list[str]:
    found = [name for name in ("error",) if unread(replies, name, None)]
    replies = [reply for reply in replies if part(reply, "error") is None]
    found += [name for name in ("hang",) if unread(replies, name, False)]
    replies = [reply for reply in replies if not part(reply, "hang")]
    for name, unset in (("text", ""), ("tool_calls", ()), ("handoff", None), ("cut", False)):
        found += [name] if unread(replies, name, unset) else []
    found += [name for name in ("record",) if unread(replies, name, None)]
    replies = [reply for reply in replies if part(reply, "record") is None]
    found += [name for name in ("usage",) if unread(replies, name, USAGE)]
    return [f"Reply.{name}" for name in found]
