"""`budgetguard replay`: what another budget would have made of recorded runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import typer

from budgetguard_cli.counted import Amounts, Counted, plain
from budgetguard_cli.options import AsJson, Logs, budgeted
from budgetguard_cli.runs import Run, read_runs
from budgetguard_cli.screen import counted, in_dollars, printable, say, table, write_json
from budgetguard_core import Budget
from budgetguard_core.stop import PRECEDENCE

_SHOWN = 20


@budgeted
def replay(logs: Logs, budget: Budget, as_json: AsJson = False) -> None:
    """Replay recorded runs: what a budget would stop, cut and save.

    Examples: budgetguard replay logs --max-iterations 25 --tool-quota search_web=3;
    budgetguard replay logs --profile research

    A run goes on as recorded until the budget stops it; that a correction might have brought the
    model back is not assumed. Ends with 0, with 1 when a line could not be read (the rest is
    replayed), and with 2 when an option or a file is wrong.
    """
    # The recorded model was not asked to report.
    budget = budget.model_copy(update={"progress": None})
    found, problems = read_runs(logs, candidate=budget)
    # What does not fit together is left out: it would only pull the figures down.
    runs = [run for run in found if run.damaged is None]
    figures = _figures(runs, budget, problems)
    stopped = [run for run in runs if _candidate(run).trip is not None]
    if as_json:
        write_json(*map(_plain, stopped), figures)
    else:
        _show(figures, [run for run in stopped if run.root.status == "completed"], budget)
    if problems:
        raise typer.Exit(1)


def _candidate(run: Run) -> Counted:
    return cast("Counted", run.candidate)  # all runs were read with one


def _saved(run: Run) -> Amounts:
    # A candidate that allows more than the recorded budget goes on where the log ends.
    candidate = _candidate(run)
    return Amounts() if candidate.trip is None else run.recorded.amounts - candidate.amounts


def _figures(runs: Sequence[Run], budget: Budget, problems: int) -> dict[str, Any]:
    """Return the figures of all runs together."""
    trips = [(run.root.status, trip) for run in runs if (trip := _candidate(run).trip) is not None]
    reasons = Counter(trip.reason for _, trip in trips)
    statuses = Counter(run.root.status for run in runs)
    of_stopped = Counter(status for status, _ in trips)
    recorded = sum((run.recorded.amounts for run in runs), Amounts())
    return {
        "type": "all",
        "runs": len(runs),
        "budget": budget.to_json(),
        "succeeded": statuses["completed"],
        "runaways": statuses["terminated"],
        "stopped": {str(one): reasons[one] for one in sorted(reasons, key=PRECEDENCE.__getitem__)},
        "successful_runs_cut": of_stopped["completed"],
        "runaways_stopped": of_stopped["terminated"],
        "recorded": plain(recorded),
        "saved": plain(sum(map(_saved, runs), Amounts())),
        "breakers": sum((_candidate(run).refused for run in runs), Counter[str]()),
        "lines_not_read": problems,
        "notes": list(_notes(runs, recorded, problems)),
    }


def _show(found: dict[str, Any], cut: Sequence[Run], budget: Budget) -> None:
    given = [*budget.caps().items(), *budget.tool_quotas.items()]
    caps = ", ".join(f"{printable(name)}={cap}" for name, cap in given)
    detection = "off" if budget.loop_detection is None else "on"
    say(f"Budget: {caps or 'no caps'}; loop detection {detection}.")
    saved, of, refused = found["saved"], found["recorded"], found["breakers"]
    why = ", ".join(f"{reason} {count}" for reason, count in found["stopped"].items())
    figures = {
        "runs": f"{found['runs']:,}",
        "stopped": f"{sum(found['stopped'].values()):,}" + (f" ({why})" if why else ""),
        "successful runs cut": f"{found['successful_runs_cut']:,} of {found['succeeded']:,}",
        "runaways stopped": f"{found['runaways_stopped']:,} of {found['runaways']:,}",
        "model calls saved": f"{saved['model_calls']:,} of {of['model_calls']:,}",
        "tool calls saved": f"{saved['tool_calls']:,} of {of['tool_calls']:,}",
        "tokens saved": f"{saved['tokens']:,} of {of['tokens']:,}",
        "dollars saved": f"{_dollars(saved)} of {_dollars(of)}",
        **{name.replace("_", " "): f"{count:,}" for name, count in refused.items()},
    }
    rows = table("", "")
    rows.show_header = False
    for name, value in figures.items():
        rows.add_row(name, value)
    say(rows)
    for run in cut[:_SHOWN]:
        trip = _candidate(run).trip
        say(f"cut: {run.file}:{run.line}, run {run.root.run_id}: {trip and trip.detail}")
    if len(cut) > _SHOWN:
        say(f"cut: {len(cut) - _SHOWN} more, see --json")
    for note in found["notes"]:
        say(f"Note: {note}")


def _plain(run: Run) -> dict[str, object]:
    trip = _candidate(run).trip
    return {
        "type": "stopped_run",
        "file": run.file,
        "line": run.line,
        "run_id": run.root.run_id,
        "reason": trip and str(trip.reason),
        "detail": trip and trip.detail,
        "succeeded": run.root.status == "completed",
        "runaway": run.root.status == "terminated",
        "recorded": plain(run.recorded.amounts),
        "saved": plain(_saved(run)),
    }


def _notes(runs: Sequence[Run], recorded: Amounts, problems: int) -> Iterator[str]:
    """Name what the figures leave out."""
    of = f"of {recorded['model_calls']:,} model calls"
    if recorded["estimated_calls"]:
        yield (
            f"{recorded['estimated_calls']:,} {of} have no recorded usage. Their tokens, and the "
            "dollars that follow, are estimates."
        )
    if recorded["unpriced_calls"]:
        yield (
            f"{recorded['unpriced_calls']:,} {of} have neither a recorded cost nor a known price. "
            "They are not in the dollars."
        )
    without_usage = sum(run.recorded.calls_without_usage for run in runs)
    if without_usage:
        yield f"{counted(without_usage, 'model call')} never reported back, and in no figure."
    if problems:
        yield f"{counted(problems, 'line')} not read."


def _dollars(amounts: dict[str, Any]) -> str:
    # Nothing priced is not the same as nothing spent.
    if amounts["unpriced_calls"] and amounts["unpriced_calls"] == amounts["model_calls"]:
        return "unknown"
    return ("at least " if amounts["unpriced_calls"] else "") + in_dollars(amounts["cost_usd"])
