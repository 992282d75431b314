"""`budgetguard demo`: a real runaway in each adapter that is installed, and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import count

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from budgetguard_cli.replay import printable
from budgetguard_cli.sections import SECTIONS, Section
from budgetguard_cli.sticky_server import MODEL, StickyServer
from budgetguard_core import Budget, Event, Guard, Outcome, PriceBook, TokenUsage, Usage
from budgetguard_core.events import ModelCallAdmitted, ModelCallSettled, NudgeTaken
from budgetguard_core.pricing import to_usd

CALLS_PER_MINUTE = 20
HOURS = 9

_THINKS_S = 0.05
_BUDGET = Budget(
    max_iterations=25,
    max_tool_calls=40,
    max_total_tokens=100_000,
    max_seconds=20,
    max_cost_usd=Decimal("0.05"),
)
_UNITS = {
    "max_iterations": "{:.0f}",
    "max_model_calls": "{:.0f}",
    "max_tool_calls": "{:.0f}",
    "max_total_tokens": "{:,.0f}",
    "max_seconds": "{:.1f} s",
    "max_cost_usd": "${:.4f}",
}
_WINDOW = 128_000
_LOG = "".join(
    f"2026-03-02 23:{minute:02}:07 deploy[4711]: waiting for the health check of web-{minute % 3}\n"
    for minute in range(14)
)


@dataclass(frozen=True, slots=True)
class _Act:
    title: str
    read_file: Callable[[], Callable[[str], str]]


def _same() -> Callable[[str], str]:
    return lambda path: f"{path}:\n{_LOG}"


def _growing() -> Callable[[str], str]:
    numbers = count(1)
    return lambda path: f"{path}:\n{_LOG}attempt {next(numbers)} of the health check failed\n"


_ACTS = (
    _Act("The tool says the same thing every time", _same),
    _Act("The tool says something new every time", _growing),
)


class SectionFailed(Exception):
    """A section did not show what it has to show."""


def run_demo(console: Console, sections: Sequence[Section] = SECTIONS) -> bool:
    """Run every section whose adapter is installed; a failing one does not keep the rest.

    Returns:
        Whether all of them showed a runaway that was stopped, with every call accounted for.
    """
    failed: list[str] = []
    shown: list[str] = []
    missing: list[str] = []
    say = _Say(console)
    say(
        f'The model of this demonstration answers everything with the tool call read_file("deploy'
        f'.log"). It is a server on this machine that speaks the OpenAI format; it is priced as '
        f"{MODEL}, a token for every four characters. Nothing leaves the machine."
    )
    with StickyServer(thinks_s=_THINKS_S if console.is_terminal else 0.0) as server:
        for section in sections:
            if not section.is_installed():
                missing.append(section.title)
                continue
            shown.append(section.title)
            say.heading(section.title)
            try:
                _show_section(section, server, console)
            except Exception as error:
                failed.append(section.title)
                say(f"FAILED: {type(error).__name__}: {printable(str(error))}")
    console.print()
    if missing:
        say(f"Not installed here, so not shown: {', '.join(missing)}.")
    if failed:
        say(f"FAILED: {', '.join(failed)}.")
    elif shown:
        say("Every runaway ended as a normal result. No exception, no call unaccounted for.")
    else:
        say("No adapter is installed: nothing was shown.")
    return bool(shown) and not failed


def _show_section(section: Section, server: StickyServer, console: Console) -> None:
    say = _Say(console)
    run = section.load()
    for act in _ACTS:
        console.print()
        say(f"{act.title}:")
        server.begin()
        view = _View(console)
        guard = Guard(_BUDGET, sinks=[view.take])
        with view.watch(guard):
            outcome = run(server.base_url, guard, act.read_file())
        requests = server.requests
        for line in _told(outcome):
            say(line, indent=2)
        say(
            f"model calls: {outcome.usage.model_calls} counted by the guard, "
            f"{requests} by the server",
            indent=2,
        )
        if outcome.status != "terminated":
            msg = f"the runaway must be stopped, got {outcome.status} after {requests} requests."
            raise SectionFailed(msg)
        if requests != outcome.usage.model_calls:
            msg = (
                f"the guard must count every request, got {outcome.usage.model_calls} of {requests}"
                " that the server saw."
            )
            raise SectionFailed(msg)
        if outcome.errors:
            msg = f"nothing may fail on the way, got {outcome.errors[0]}"
            raise SectionFailed(msg)
        if act is _ACTS[0]:
            console.print()
            say(by_morning(view.calls, guard.price_book, outcome.usage), indent=2)


def _told(outcome: Outcome) -> list[str]:
    usage = outcome.usage
    return [
        f"stopped: {outcome.stop_reason} ({outcome.detail})",
        f"outcome: {outcome.status}, {len(outcome.messages)} messages kept, "
        f"{usage.tool_calls} tool calls, {usage.total_tokens:,} tokens, ${usage.cost_usd:.4f}",
        f'last message: "{outcome.final}"',
    ]


def by_morning(calls: Sequence[TokenUsage], prices: PriceBook, spent: Usage) -> str:
    """Say what the run would have cost had nobody stopped it, and on what assumptions.

    Args:
        calls: What each call of the run used, in order: its context grows from call to call.
        prices: Where the price comes from.
        spent: What the run used until it was stopped.
    """
    rates = prices.rates_for(MODEL)
    if rates is None or len(calls) < 2:
        return f"By the morning: unknown; {len(calls)} calls were measured."
    window = rates.context_window or _WINDOW
    growth = (calls[-1].input_tokens - calls[0].input_tokens) // (len(calls) - 1)
    output = sum(call.output_tokens for call in calls) // len(calls)
    number = HOURS * 60 * CALLS_PER_MINUTE
    full = cached = 0
    before = 0
    for place in range(number):
        prompt = min(calls[0].input_tokens + place * growth, window - output)
        full += rates.cost(TokenUsage(prompt, output))
        cached += rates.cost(TokenUsage(prompt, output, cache_read_tokens=before))
        before = prompt
    return (
        f"By the morning: from 23:00 to 08:00, at {CALLS_PER_MINUTE} calls a minute, {number:,} "
        f"calls. Each adds {growth:,} tokens to the next prompt, as measured above, until the "
        f"window of {window:,} tokens is full; then the oldest are dropped. At the prices of "
        f"{MODEL} that is ${to_usd(full):,.0f}; at best ${to_usd(cached):,.0f}, with every earlier "
        f"token read from the provider's prompt cache. Stopped, it was ${spent.cost_usd:.4f}."
    )


class _Say:
    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, text: str, *, indent: int = 0) -> None:
        # A folded line keeps its indent.
        self._console.print(Padding(Text(text), (0, 0, 0, indent), expand=False))

    def heading(self, title: str) -> None:
        self._console.print()
        self._console.rule(title, align="left", style="bold", characters="-")


class _View:
    """A bar for each cap, and a line for what the guard says on the way."""

    def __init__(self, console: Console) -> None:
        self.calls: list[TokenUsage] = []
        self._bars = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=max(5, min(30, console.width - 42))),
            TextColumn("{task.fields[amount]}"),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._guard: Guard | None = None

    def watch(self, guard: Guard) -> Progress:
        self._guard = guard
        for name, cap in guard.budget.caps().items():
            self._tasks[name] = self._bars.add_task(name, total=float(cap), amount="")
        self._draw(guard)
        return self._bars

    def take(self, event: Event) -> None:
        if isinstance(event, ModelCallSettled) and event.usage is not None:
            self.calls.append(event.usage)
        message: str | None = None
        if isinstance(event, ModelCallAdmitted):
            message = event.nudge
        elif isinstance(event, NudgeTaken):
            message = event.message
        if message is not None:
            _Say(self._bars.console)(f"nudge to the model: {message}", indent=2)
        if self._guard is not None:
            self._draw(self._guard)

    def _draw(self, guard: Guard) -> None:
        usage = guard.usage
        for name, cap in guard.budget.caps().items():
            used = float(getattr(usage, _USED[name]))
            shown = f"{_UNITS[name].format(used)} of {_UNITS[name].format(cap)}"
            self._bars.update(self._tasks[name], completed=used, amount=shown)


_USED = {
    "max_iterations": "iterations",
    "max_model_calls": "model_calls",
    "max_tool_calls": "tool_calls",
    "max_total_tokens": "total_tokens",
    "max_seconds": "seconds",
    "max_cost_usd": "cost_usd",
}
