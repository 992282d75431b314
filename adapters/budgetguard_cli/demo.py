"""`budgetguard demo`: a real runaway in each adapter that is installed, and its end."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import count

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from budgetguard_cli.sections import SECTIONS, Section
from budgetguard_cli.sticky_server import MODEL, StickyServer
from budgetguard_cli.terminal import printable
from budgetguard_core import Budget, Event, Guard, Outcome, PriceBook, TokenUsage, Usage
from budgetguard_core.events import ModelCallAdmitted, ModelCallSettled, NudgeTaken
from budgetguard_core.pricing import to_usd
from budgetguard_core.run_log import FOLDER

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
_MADE = ("from budgetguard_core import Budget", "budget = Budget(max_iterations=25)")
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


@dataclass(frozen=True, slots=True)
class _Row:
    """What the table at the end says of a section."""

    section: Section
    calls: int | None = None
    """Model calls of all its runaways; None where it failed."""
    spent: Decimal = Decimal(0)
    morning: Decimal | None = None


def run_demo(
    console: Console, sections: Sequence[Section] = SECTIONS, *, quick: bool = False
) -> bool:
    """Run every section whose adapter is installed; a failing one does not keep the rest.

    Args:
        console: Where it is shown.
        sections: What is shown.
        quick: Show one runaway of each section, without waiting between its calls.

    Returns:
        Whether all of them showed a runaway that was stopped, with every call accounted for.
    """
    rows: list[_Row] = []
    missing: list[str] = []
    say = _Say(console)
    say(
        f'The model of this demonstration answers everything with the tool call read_file("deploy'
        f'.log"). It is a server on this machine that speaks the OpenAI format; it is priced as '
        f"{MODEL}, a token for every four characters. Nothing leaves the machine."
    )
    acts = _ACTS[:1] if quick else _ACTS
    # What was shown on the way comes after the table of how it ended.
    # In the output's encoding: what draws the bars asks for it.
    written = io.TextIOWrapper(io.BytesIO(), console.encoding, errors="backslashreplace")
    details = Console(file=written, width=console.width, force_terminal=False)
    say_later = _Say(details)
    live = console if console.is_terminal and not quick else None
    with _without_log(), StickyServer(thinks_s=_THINKS_S if live else 0.0) as server:
        for section in sections:
            if not section.is_installed():
                missing.append(section.title)
                continue
            say_later.heading(section.title)
            try:
                rows.append(_show_section(section, server, details, acts, live))
            except Exception as error:
                rows.append(_Row(section))
                say_later(f"FAILED: {type(error).__name__}: {printable(str(error))}")
    console.print()
    if missing:
        say(f"Not installed here, so not shown: {', '.join(missing)}.")
    if not rows:
        say("No adapter is installed: nothing was shown.")
        return False
    console.print(_table(rows))
    written.seek(0)
    console.print(Text(written.read().rstrip()), soft_wrap=True)
    console.print()
    failed = [row.section.title for row in rows if row.calls is None]
    if failed:
        say(f"FAILED: {', '.join(failed)}.")
        return False
    say("Every runaway ended as a normal result. No exception, no call unaccounted for.")
    _show_lines(rows, console)
    return True


@contextmanager
def _without_log() -> Generator[None]:
    """Leave the folder that `BUDGETGUARD_LOG` names alone: these runs are nobody's."""
    folder = os.environ.pop(FOLDER, None)
    try:
        yield
    finally:
        if folder is not None:
            os.environ[FOLDER] = folder


def _table(rows: Sequence[_Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    table.add_column("runaway in", overflow="fold")
    for name in ("calls", "spent", "by 08:00"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.calls is None:
            table.add_row(row.section.title, "failed", "", "")
            continue
        morning = "unknown" if row.morning is None else f"${row.morning:,.0f}"
        table.add_row(row.section.title, str(row.calls), f"${row.spent:.4f}", morning)
    return table


def _show_lines(rows: Sequence[_Row], console: Console) -> None:
    """Show what to paste; a line that is folded could not be."""
    say = _Say(console)
    console.print()
    say("For an agent of your own, the budget and two lines:")
    for lines in (_MADE, *(row.section.lines for row in rows)):
        console.print()
        for line in lines:
            console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _show_section(
    section: Section,
    server: StickyServer,
    console: Console,
    acts: Sequence[_Act],
    live: Console | None,
) -> _Row:
    say = _Say(console)
    run = section.load()
    row = _Row(section, calls=0)
    for act in acts:
        console.print()
        say(f"{act.title}:")
        server.begin()
        view = _View(console, live)
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
        row = replace(
            row,
            calls=(row.calls or 0) + outcome.usage.model_calls,
            spent=row.spent + outcome.usage.cost_usd,
        )
        if act is _ACTS[0]:
            console.print()
            say(by_morning(view.calls, guard.tree.price_book, outcome.usage), indent=2)
            unbounded = _until_morning(view.calls, guard.tree.price_book)
            row = replace(row, morning=None if unbounded is None else unbounded.full)
    return row


def _told(outcome: Outcome) -> list[str]:
    usage = outcome.usage
    return [
        f"stopped: {outcome.stop_reason} ({outcome.detail})",
        f"outcome: {outcome.status}, {len(outcome.messages)} messages kept, "
        f"{usage.tool_calls} tool calls, {usage.total_tokens:,} tokens, ${usage.cost_usd:.4f}",
        f'last message: "{outcome.final}"',
    ]


@dataclass(frozen=True, slots=True)
class _Unbounded:
    """What the run would have cost had nobody stopped it, in US dollars."""

    full: Decimal
    cached: Decimal
    """With every earlier token read from the provider's prompt cache."""
    calls: int
    growth: int
    """Tokens that each call adds to the next prompt."""
    window: int


def _until_morning(calls: Sequence[TokenUsage], prices: PriceBook) -> _Unbounded | None:
    rates = prices.rates_for(MODEL)
    if rates is None or len(calls) < 2:
        return None
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
    return _Unbounded(to_usd(full), to_usd(cached), number, growth, window)


def by_morning(calls: Sequence[TokenUsage], prices: PriceBook, spent: Usage) -> str:
    """Say what the run would have cost had nobody stopped it, and on what assumptions.

    Args:
        calls: What each call of the run used, in order: its context grows from call to call.
        prices: Where the price comes from.
        spent: What the run used until it was stopped.
    """
    found = _until_morning(calls, prices)
    if found is None:
        return f"By the morning: unknown; {len(calls)} calls were measured."
    return (
        f"By the morning: from 23:00 to 08:00, at {CALLS_PER_MINUTE} calls a minute, "
        f"{found.calls:,} calls. Each adds {found.growth:,} tokens to the next prompt, as measured "
        f"above, until the window of {found.window:,} tokens is full; then the oldest are dropped. "
        f"At the prices of {MODEL} that is ${found.full:,.0f}; at best ${found.cached:,.0f}, with "
        "every earlier token read from the provider's prompt cache. Stopped, it was "
        f"${spent.cost_usd:.4f}."
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
    """A bar for each cap, live on a terminal, and a line for what the guard says on the way."""

    def __init__(self, console: Console, live: Console | None) -> None:
        self.calls: list[TokenUsage] = []
        self._bars = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=max(5, min(30, console.width - 42))),
            TextColumn("{task.fields[amount]}"),
            console=live or console,
            transient=live is not None,
        )
        self._console = console
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
            _Say(self._console)(f"nudge to the model: {message}", indent=2)
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
