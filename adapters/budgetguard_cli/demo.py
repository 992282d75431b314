"""`budgetguard demo`: two runaways of each framework, stopped, and what they would have cost."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.util import find_spec
from itertools import count
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from budgetguard_cli.options import AsJson
from budgetguard_cli.quickstart import NEEDS, text_of
from budgetguard_cli.screen import printable, refuse, table, write_json
from budgetguard_core import Budget, Guard, Outcome, PriceBook
from budgetguard_core.events import ModelCallAdmitted, ModelCallSettled, NudgeTaken
from budgetguard_core.kit import Event, TokenUsage
from budgetguard_core.pricing import to_usd
from budgetguard_core.run_log import FOLDER
from budgetguard_core.testing.scripted import Answers, Turn

MODEL = "gpt-4o"
CALLS_PER_MINUTE = 20
HOURS = 9

_BUDGET = Budget(max_iterations=25, max_seconds=20, max_cost_usd=Decimal("0.05"))
_WINDOW = 128_000
_LOG = "".join(
    f"2026-03-02 23:{minute:02}:07 deploy[4711]: waiting for the health check of web-{minute % 3}\n"
    for minute in range(14)
)
_ACTS = {
    "The tool says the same thing every time": "",
    "The tool says something new every time": "attempt {} of the health check failed\n",
}
CALL: Final = {"search": {"query": "deploy.log"}}
_PER_TOKEN: Final = 4  # characters
# An adapter that fails to stop its loop must fail, not hang.
_MOST_CALLS: Final = 200


class StickyAnswers(Answers):
    """Answers everything with the same tool call, and counts the tokens of its growing prompt."""

    def __init__(self, tool: Callable[[str], str]) -> None:
        super().__init__([CALL])
        self._tool = tool
        self._size = len("Find it.")

    def search(self, query: str) -> str:
        """Search."""
        text = self._tool(query)
        self._size += len(text)
        return text

    def next(self) -> Turn:
        """Take the next answer; after 200 calls it is a text."""
        requested = len(json.dumps(CALL))
        self.usage = TokenUsage(self._size // _PER_TOKEN + 1, requested // _PER_TOKEN)
        self._size += requested
        if self.calls >= _MOST_CALLS:
            self.answers = ["I give up: nobody stopped me."]
        return super().next()


@dataclass(frozen=True)
class Agent:
    """The agent that `quickstart` writes for a framework."""

    name: str
    title: str

    def is_installed(self) -> bool:
        """Return whether its framework can be imported."""
        return find_spec(NEEDS[self.name][0]) is not None

    def run_away(self, answers: StickyAnswers, guard: Guard) -> Outcome | None:
        """Run it with this model, and its tool, until the guard stops it."""
        given = {"never_ends": answers, "budget": guard, "search": answers.search}
        text = text_of(self.name)
        text = re.sub("^(never_ends|budget) = .*", r"\1 = given['\1']", text, flags=re.MULTILINE)
        text = text.replace('f"nothing about {query}"', "given['search'](query)")
        with redirect_stdout(io.StringIO()):
            exec(text, {"__name__": "agent", "given": given})  # noqa: S102 - a file of this package
        return guard.outcome


AGENTS: Final = (
    Agent("langgraph", "A LangGraph graph"),
    Agent("loop", "A plain Python loop"),
    Agent("openai-agents", "OpenAI Agents SDK"),
    Agent("pydantic-ai", "Pydantic AI"),
    Agent("strands", "Strands Agents"),
)


@dataclass(slots=True)
class Shown:
    """The runaways of one agent, and how they ended."""

    agent: Agent
    calls: int = 0
    spent: Decimal = Decimal(0)
    failed: str = ""
    """Why it did not show what it has to show."""
    by_morning: Decimal | None = None
    """The cost of the first, had nobody stopped it."""
    details: list[str] = field(default_factory=list[str])
    """The observations on the way, line by line."""


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="One runaway of each framework.")] = False,
    framework: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Show this one: {', '.join(agent.name for agent in AGENTS)}. May be given again.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Stop a runaway of each framework, on this machine alone.

    The real framework's loop, around a scripted model that never changes its mind.

    Example: budgetguard demo --quick

    Ends with 0, with 1 when a runaway was not stopped, and with 2 when a framework is not known.
    """
    known = [agent.name for agent in AGENTS]
    for name in framework or ():
        if name not in known:
            refuse(f"--framework must be one of {', '.join(known)}, got {printable(name)}.")
    chosen = [agent for agent in AGENTS if not framework or agent.name in framework]
    shown = run_agents([agent for agent in chosen if agent.is_installed()], quick=quick)
    if as_json:
        for one in shown:
            report = {"framework": one.agent.name, "calls": one.calls, "failed": one.failed or None}
            write_json({**report, "spent_usd": one.spent, "by_morning_usd": one.by_morning})
    else:
        _print(shown, [agent.title for agent in chosen if not agent.is_installed()])
    if not shown or any(one.failed for one in shown):
        raise typer.Exit(1)


def run_agents(agents: Sequence[Agent], *, quick: bool = False) -> list[Shown]:
    """Run the runaways of agents; one that fails does not keep the others.

    The folder that `BUDGETGUARD_LOG` names is left alone: these runs are nobody's.
    """
    os.environ.pop(FOLDER, None)
    shown = [Shown(agent) for agent in agents]
    for one in shown:
        try:
            for title in list(_ACTS)[: 1 if quick else None]:
                _run_away(one, title)
        except Exception as error:
            one.failed = one.failed or f"{type(error).__name__}: {error}"
    return shown


def _run_away(shown: Shown, title: str) -> None:
    shown.details.append(f"{title}:")
    used, attempts = list[TokenUsage](), count(1)

    def take(event: Event) -> None:
        nudge = event.message if isinstance(event, NudgeTaken) else None
        if isinstance(event, ModelCallAdmitted):
            nudge = event.nudge
        if nudge is not None:
            shown.details.append(f"  nudge to the model: {printable(nudge)}")
        if isinstance(event, ModelCallSettled) and event.usage is not None:
            used.append(event.usage)

    def look(query: str) -> str:
        return f"{query}:\n{_LOG}{_ACTS[title].format(next(attempts))}"

    guard, answers = Guard(_BUDGET, sinks=[take]), StickyAnswers(look)
    outcome = shown.agent.run_away(answers, guard)
    if outcome is None:
        shown.failed = "the run ended without an outcome."
        return
    usage = outcome.usage
    lines = (
        f"stopped: {outcome.stop_reason} ({outcome.detail})",
        f"outcome: {outcome.status}, {len(outcome.messages)} messages kept, "
        f"{usage.tool_calls} tool calls, {usage.total_tokens:,} tokens, ${usage.cost_usd:.4f}",
        f'last message: "{outcome.final}"',
        f"model calls: {usage.model_calls} counted by the guard, {answers.calls} by the model",
    )
    shown.details += [f"  {printable(line)}" for line in lines]
    if outcome.status != "terminated":
        got = f"{outcome.status} after {answers.calls} calls"
        shown.failed = f"the runaway must be stopped, got {got}."
    elif answers.calls != usage.model_calls:
        got = f"{usage.model_calls} of {answers.calls} that the model answered"
        shown.failed = f"the guard must count every call, got {got}."
    elif outcome.errors:
        shown.failed = f"nothing may fail on the way, got {outcome.errors[0]}"
    shown.calls += usage.model_calls
    shown.spent += usage.cost_usd
    if shown.by_morning is None:
        shown.by_morning = until_morning(used, guard.tree.price_book)


def until_morning(calls: Sequence[TokenUsage], prices: PriceBook) -> Decimal | None:
    """Return what a run would have cost from 23:00 to 08:00; None where too little was measured.

    Its context grows with each call as measured, until the model's window is full; then the oldest
    messages are dropped.
    """
    rates = prices.rates_for(MODEL)
    if rates is None or len(calls) < 2:
        return None
    growth = (calls[-1].input_tokens - calls[0].input_tokens) // (len(calls) - 1)
    output = sum(call.output_tokens for call in calls) // len(calls)
    most = (rates.context_window or _WINDOW) - output
    prompts = (
        min(calls[0].input_tokens + number * growth, most)
        for number in range(HOURS * 60 * CALLS_PER_MINUTE)
    )
    return to_usd(sum(rates.cost(TokenUsage(prompt, output)) for prompt in prompts))


def _print(shown: Sequence[Shown], missing: Sequence[str]) -> None:
    # FORCE_COLOR must not bring a cursor's codes into a file.
    console = Console(force_terminal=None if sys.stdout.isatty() else False)

    def say(text: str) -> None:
        # A folded line keeps its indent.
        line = text.lstrip()
        console.print(Padding(Text(line), (0, 0, 0, len(text) - len(line)), expand=False))

    say(
        'The model of this demonstration answers everything with the tool call search("deploy.log'
        f'"). It is a script in this process, priced as {MODEL}, a token for every four '
        "characters. Nothing leaves the machine."
    )
    if missing:
        say(f"Not installed here, so not shown: {', '.join(missing)}.")
    if not shown:
        say("No adapter is installed: nothing was shown.")
        return
    rows = table("runaway in", "calls", "spent", "by 08:00", right=("calls", "spent", "by 08:00"))
    for one in shown:
        morning = "unknown" if one.by_morning is None else f"${one.by_morning:,.0f}"
        cells = ("failed", "", "") if one.failed else (f"{one.calls}", f"${one.spent:.4f}", morning)
        rows.add_row(one.agent.title, *cells)
    console.print()
    console.print(rows)
    say(
        f"By 08:00: from 23:00 on at {CALLS_PER_MINUTE} calls a minute, each prompt longer by what "
        f"was measured below, until the window of {MODEL} is full; no prompt cache."
    )
    for one in shown:
        console.print()
        console.rule(one.agent.title, align="left", style="bold", characters="-")
        for line in one.details:
            say(line)
        if one.failed:
            say(f"FAILED: {printable(one.failed)}")
    console.print()
    failed = [one.agent.title for one in shown if one.failed]
    if failed:
        say(f"FAILED: {', '.join(failed)}.")
        return
    say("Every runaway ended as a normal result. No exception, no call unaccounted for.")
    say(f"For an agent of your own: budgetguard quickstart {shown[0].agent.name} -o agent.py")
