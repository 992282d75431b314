"""The script: answers of a model and results of tools, without any framework."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeAlias

from budgetguard_core.budget import Budget
from budgetguard_core.testing.clock import ManualClock
from budgetguard_core.testing.message import Message
from budgetguard_core.testing.recording import Recorded
from budgetguard_core.usage import TokenUsage

MODEL = "scripted-model"
"""The name that scripted replies give as their model; priced by a `PriceBook` override."""
FALLBACK = "scripted-model-small"
"""The name of the cheaper model that requests fall back to."""
USAGE = TokenUsage(100, 20)
"""The usage of a scripted reply that names none."""

_NUMBERS = count()


class ProviderError(Exception):
    """The error of a scripted model call; a driver may raise its framework's own."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call in a scripted reply."""

    name: str
    value: str = ""
    """The call's only argument, `value`; the JSON text of `fields` where those are given."""
    id: str | None = None
    """Unique within the script when it is left out."""
    fields: Mapping[str, Any] | None = None
    """The arguments of a tool that takes others: `report_progress`."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments as the model writes them."""
        return {"value": self.value} if self.fields is None else dict(self.fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Recorded):
    """One answer of a scripted model."""

    text: str = ""
    tool_calls: tuple[Call, ...] = ()
    handoff: str | None = None
    """The name of the agent in `Scenario.handoffs` that the model hands over to."""
    usage: TokenUsage | None = USAGE
    """The usage that the provider reports; None when it reports nothing."""
    error: Exception | None = None
    """The call fails with it. The driver raises it, or its framework's exception for it."""
    hang: bool = False
    """The call never answers; the driver's model awaits `hang()`. Never in sync mode."""
    record: Any = None
    """The usage record in the framework's own form, one of `Driver.usage_records`; the driver
    reports it in place of `usage`."""
    cut: bool = False
    """The bound of the request cut the answer short; the driver gives its provider's finish reason
    for that (`length`, `max_tokens`)."""
    model: str = MODEL
    """The model that the request went to: the response names it."""
    seconds: float = 0.0
    """The time by which the script's `ManualClock` moves while the model answers."""


def calls(*names: str | Call, usage: TokenUsage | None = USAGE) -> Reply:
    """Make a reply that asks for these tools, in parallel."""
    return Reply(
        tool_calls=tuple(Call(name) if isinstance(name, str) else name for name in names),
        usage=usage,
    )


def says(text: str, usage: TokenUsage | None = USAGE) -> Reply:
    """Make a reply that ends the run with a text."""
    return Reply(text=text, usage=usage)


Replies: TypeAlias = Sequence[Reply] | Callable[[int], Reply]


class Script:
    """The answers of a model, in order; safe under threads.

    Args:
        replies: The answers. After the last one it is given again and again: a sticky model. A
            function gets the number of the call, from 0.
        clock: Moved by `Reply.seconds`.

    Attributes:
        calls: How often the model was called.
        sent: What was sent to it, as text, per call.
        requests: What was sent to it, as messages, per call.
        bounds: The completion tokens that each request asked for at most.
        models: The model that each request went to.
        given: The answers that were given, per call.
    """

    def __init__(self, replies: Replies, *, clock: ManualClock | None = None) -> None:
        self._replies = replies
        self._clock = clock
        self._number = next(_NUMBERS)
        self._lock = threading.Lock()
        self.calls = 0
        self.sent: list[str] = []
        self.requests: list[tuple[Message, ...]] = []
        self.bounds: list[int | None] = []
        self.models: list[str] = []
        self.given: list[Reply] = []

    def next(
        self,
        sent: str,
        *,
        request: Sequence[Message] = (),
        bound: int | None = None,
        model: str = MODEL,
    ) -> Reply:
        """Take the next answer; the driver's model calls it once per attempt.

        Args:
            sent: Everything that the framework handed to the model, serialised.
            request: The messages of it, in the suite's words.
            bound: The completion tokens that the request asks for at most, if it does.
            model: The model that it goes to.
        """
        with self._lock:
            number = self.calls
            self.calls += 1
            self.sent.append(sent)
            self.requests.append(tuple(request))
            self.bounds.append(bound)
            self.models.append(model)
        # Outside the lock: a reply that is a function may wait for another call of this script.
        if callable(self._replies):
            reply = self._replies(number)
        else:
            reply = self._replies[min(number, len(self._replies) - 1)]
        if reply.seconds and self._clock is not None:
            self._clock.advance(reply.seconds)
        given = replace(
            _cut(reply, bound),
            model=model,
            tool_calls=tuple(
                call
                if call.id is not None
                else replace(call, id=f"call_{self._number}_{number}_{index}")
                for index, call in enumerate(reply.tool_calls)
            ),
        )
        with self._lock:
            self.given.append(given)
        return given


def _cut(reply: Reply, bound: int | None) -> Reply:
    """Give as much of an answer as the bound of its request lets through."""
    usage = reply.usage
    if bound is None or usage is None or usage.output_tokens <= bound:
        return reply
    text = reply.text[: len(reply.text) * bound // usage.output_tokens]
    return replace(reply, text=text, usage=usage._replace(output_tokens=bound), cut=True)


class Tool(Recorded):
    """A scripted tool. It takes one optional text argument, `value`, and returns a text.

    Args:
        name: What the model calls it.
        result: What it returns: a text, or a function of the number of the call (from 0) and the
            value.
        error: What it raises instead.
        hang: It never ends. Never in sync mode.
        agent: It runs this agent as a sub-agent with the call's value as its user input, and
            returns its final text.
        runs: Its body does this run (a `Nested`), of any adapter's, and returns its final text.
        approval: A person has to approve each call of it, in the framework's own way.
        description: What the model is told about it.
        reports: It is the adapter's own `report_progress`, which the driver takes in its place.

    A tool's body in a driver is `Scenario.call` or `await Scenario.acall`; where the tool has an
    `agent`, the driver then runs it.
    """

    def __init__(
        self,
        name: str,
        result: str | Callable[[int, str], str] = "done",
        *,
        error: Exception | None = None,
        hang: bool = False,
        agent: Agent | None = None,
        runs: Any = None,
        approval: bool = False,
        description: str = "A tool.",
        reports: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.result = result
        self.error = error
        self.hang = hang
        self.agent = agent
        self.runs = runs
        self.approval = approval
        self.description = description
        self.reports = reports
        self._lock = threading.Lock()
        self._started = 0

    def run(self, value: str) -> str:
        """Run one call: raise the error, or return the result."""
        with self._lock:
            number = self._started
            self._started += 1
        if self.error is not None:
            raise self.error
        return self.result if isinstance(self.result, str) else self.result(number, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent(Recorded):
    """Another agent of the same framework: as a tool, a handoff target, or a sub-graph."""

    name: str
    script: Script
    tools: Sequence[Tool] = field(default_factory=tuple)
    budget: Budget | None = None
    """Its own envelope, a child of the run's guard; None: it spends the run's budget alone."""


def changing(number: int, value: str) -> str:
    """Return another result each time, whatever tool asks, so that no loop is seen."""
    return f"result {number}.{next(_NUMBERS)} for {value!r}"


async def hang() -> None:
    """Never return; cancelling ends it."""
    await asyncio.get_running_loop().create_future()


def arguments_value(arguments: Mapping[str, Any] | None) -> str:
    """Read the one argument of a scripted tool from what a framework handed over."""
    return str((arguments or {}).get("value", ""))
