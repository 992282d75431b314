"""`budgetguard report`: one self-contained page about many runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from budgetguard_cli.options import Logs
from budgetguard_cli.runs import Run, read_runs
from budgetguard_cli.screen import at_minute, counted, figure, printable, refuse, write_json
from budgetguard_cli.show import as_text, row
from budgetguard_core.budget import DIMENSIONS

_MOST_LINES = 40
_MOST_BARS = 12
_MOST_ROWS = 200
_NONE = "(none)"
_HANDOFFS = "(handoffs)"


def report(
    logs: Logs,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="The page's figures as one JSON object, and no page.")
    ] = False,
) -> None:
    """Write one page about many runs: stops, spend, near misses.

    The page holds all that it needs and loads nothing. It can be read on a phone, and follows the
    reader's dark mode.

    Example: budgetguard report logs/ -o report.html

    Ends with 0, with 1 when a line could not be read (the rest is in the page), and with 2 when a
    log is missing, or the page cannot be written.
    """
    if not as_json and find_spec("plotly") is None:
        refuse(
            "the page needs plotly, not installed here. Install the extra from the checkout: "
            'pip install ".[report]"'
        )
    runs, problems = read_runs(logs, points=True)
    if not runs:
        refuse("the logs hold no run. Name event logs of BudgetGuard's.")
    figures = _figures(sorted(runs, key=lambda run: run.started_ns), problems)
    if as_json:
        write_json(figures)
    else:
        try:
            output.write_text(_page(figures), encoding="utf-8")
        except OSError as error:
            refuse(f"{output}: {error.strerror}. Name a file that can be written.")
        typer.echo(
            f"{output}: {counted(len(runs), 'run')}, {counted(problems, 'line')} not read.",
            err=True,
        )
    if problems:
        raise typer.Exit(1)


def _page(figures: dict[str, Any]) -> str:
    # No text of a log may end the script that holds it.
    data = json.dumps(figures).replace("<", "\\u003c")
    plotly = files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    page = files("budgetguard_cli").joinpath("report.html").read_text(encoding="utf-8")
    return page.replace("__PLOTLY__", plotly).replace("__DATA__", data)


def _figures(runs: Sequence[Run], problems: int) -> dict[str, Any]:
    cost = sum((run.spent.cost_usd for run in runs), Decimal(0))
    unpriced = sum(run.usage.unpriced_calls for run in runs)
    near = [(run, name, share) for run in runs for name, share in run.near_misses().items()]
    stopped = [run for run in runs if run.root.status == "terminated"]
    latest = list(reversed(runs[-_MOST_ROWS:]))
    nodes = [node for run in runs for node in run.nodes.values()]
    first, last = at_minute(runs[0].started_ns), at_minute(max(run.last_ns for run in runs))
    notes = [f"{first} to {last} UTC, {counted(len(runs), 'run')}"]
    if problems:
        notes.append(f"{counted(problems, 'line')} could not be read")
    if unpriced:
        notes.append(f"{unpriced:,} model calls of unknown price are not in the dollars")
    damaged = sum(run.damaged is not None for run in runs)
    if damaged:
        notes.append(f"{damaged:,} logs do not fit together and are counted up to there")
    return {
        "about": f"{', '.join(notes)}.",
        "tiles": [
            [f"{len(runs):,}", "runs"],
            [f"{len(stopped):,}", "stopped by a limit"],
            [figure(cost), "spent" if not unpriced else "spent, at least"],
            [f"{sum(run.spent.tokens for run in runs):,}", "tokens"],
            [f"{len({run.root.run_id for run, *_ in near}):,}", "near misses"],
        ],
        "statuses": _counted(run.root.status or "not ended" for run in runs),
        "reasons": _counted(str(run.root.stop_reason) for run in stopped),
        "burn": [found for name in DIMENSIONS if (found := _burn(name, runs)) is not None],
        "days": sorted(_spent(runs, lambda run: at_minute(run.started_ns)[:10])),
        "tenants": _spent(runs, lambda run: ", ".join(run.root.tenant) or _NONE),
        "profiles": _spent(runs, lambda run: run.root.profile or _NONE),
        "models": _largest(
            (name, one.cost_usd) for node in nodes for name, one in node.models.items()
        ),
        # A handoff is no tool, and what led to one is none of theirs.
        "tools": _largest(
            (_HANDOFFS if name in node.handoffs else name, one.cost_usd)
            for node in nodes
            for name, one in node.tools.items()
        ),
        "handoffs": _counted(name for node in nodes for name in node.handoffs.elements()),
        "near": [
            [printable(run.root.run_id)[:40], name, f"{share:.0%}", run.root.profile or ""]
            for run, name, share in sorted(near, key=lambda one: -one[2])[:_MOST_ROWS]
        ],
        "runs": [_row(run) for run in latest],
        "trees": [as_text(run) for run in latest],
        "runs_note": f"The latest {len(latest):,} of {len(runs):,}." if latest else "",
    }


def _burn(dimension: str, runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return what was left of a cap over time, of the latest runs that had it."""
    capped = [run for run in runs if run.points and dimension in run.root.budget.caps()]
    if not capped:
        return None
    lines: list[dict[str, Any]] = []
    for run in capped[-_MOST_LINES:]:
        known = [point for point in run.points if dimension in point.shares]
        reasons = [] if run.root.trip is None else [one.reason for one in run.root.trip.violations]
        lines.append(
            {
                "name": printable(run.root.run_id)[:12],
                "x": [0.0, *(round(point.seconds, 3) for point in known)],
                "y": [100.0, *(round(100 * (1 - point.shares[dimension]), 2) for point in known)],
                "stopped": dimension in reasons,
            }
        )
    of = f", of the latest {len(lines)} of {len(capped):,}" if len(capped) > len(lines) else ""
    hits = sum(line["stopped"] for line in lines)
    return {
        "dimension": dimension,
        "note": f"Share of the cap that each run had left{of}; {hits} ended at it.",
        "runs": lines,
        "lowest": min(min(line["y"]) for line in lines),
    }


def _counted(names: Iterable[str]) -> list[list[Any]]:
    return [[name, count] for name, count in Counter(names).most_common(_MOST_BARS)]


def _spent(runs: Sequence[Run], key: Callable[[Run], str]) -> list[list[Any]]:
    return _largest((key(run), run.spent.cost_usd) for run in runs)


def _largest(parts: Iterable[tuple[str, Decimal]]) -> list[list[Any]]:
    sums: dict[str, Decimal] = {}
    for name, amount in parts:
        sums[name] = sums.get(name, Decimal(0)) + amount
    ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    if [*sums] == [_NONE]:
        return []
    rows: list[list[Any]] = [
        [printable(name)[:80], float(sum_)] for name, sum_ in ordered[:_MOST_BARS]
    ]
    rest = sum((sum_ for _, sum_ in ordered[_MOST_BARS:]), Decimal(0))
    return [*rows, [f"{len(ordered) - _MOST_BARS} others", float(rest)]] if rest else rows


def _row(run: Run) -> list[str]:
    started, run_id, models, task, tenant, _, ending = map(printable, row(run))
    ending += ", last answer" if run.root.finalized else ""
    usage = run.usage
    cells = [run_id[:40], started, ending, models, task, tenant, figure(usage.cost_usd)]
    return [*cells, *map(figure, (usage.total_tokens, usage.model_calls, run.seconds))]
