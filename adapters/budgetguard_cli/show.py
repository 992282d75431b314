"""`budgetguard show`: the runs of a folder, or one as a tree, and how to go on."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.tree import Tree

from budgetguard_cli.logs import by_attempt, is_there
from budgetguard_cli.options import AsJson
from budgetguard_cli.runs import SPENT_ON_ANSWERS, Node, Run, Spent, read_runs
from budgetguard_cli.screen import (
    answer,
    at_minute,
    cell,
    counted,
    figure,
    only,
    printable,
    refuse,
    table,
    write_json,
)
from budgetguard_core.run_log import FOLDER, file_name

_MOST_LISTED = 40
_BAR = 20
_MADE_UP = re.compile("[0-9a-f]{32}")
_WHOLE_LINES = 10_000
_GO_ON = {
    "terminated": "Resume it under a fresh budget: its history is closed, no completed tool call "
    "runs again.",
    "paused": "It waits for a person; its counters go on with the answer.",
    "failed": "An exception left it. What it had spent is above; its checkpoint can be resumed.",
    None: "It has not ended: it is still going, or its process was killed. Its checkpoint can be "
    "resumed.",
}


def show(
    log: Annotated[
        str | None,
        typer.Argument(
            metavar="LOG|RUN",
            help="An event log, a folder of them, or the beginning of a run's id, to be looked for "
            "in the folder that BUDGETGUARD_LOG names. Left out: the runs of that folder.",
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(help="The run, where the log has several.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="To paste into an issue: no arguments, no secrets.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List runs, or show one: its spend, why it stopped, how to go on.

    Example: budgetguard show 9f0c

    A log with several runs is listed, the newest first. Ends with 0, with 1 when a line could not
    be read, and with 2 when there is no such log or run, or several begin with the letters given.
    """
    folder = log_folder()
    position = log or folder
    if position is None:
        refuse("nothing to show. Name a log or a run, or set BUDGETGUARD_LOG.")
    logs = [position]
    if folder is not None and log is not None and not is_there(log):
        run, position = run or position, folder
        logs = logs_of(run) or [folder]
    found, problems = read_runs(logs)
    if run is not None:
        of_id = {id_: one for one in found for id_ in one.nodes}
        id_ = only(run, of_id)
        if id_ is None:
            where = f"is not in {printable(position)}. Leave it out for a list."
            refuse(f"run {printable(run)[:80]!r} {where}")
        found = [of_id[id_]]
    if not found:
        refuse(f"{printable(position)} holds no run. Name an event log of BudgetGuard's.")
    if run is None and (len(found) > 1 or log is None):
        _list(found, as_json)
    elif as_json:
        write_json(plain(found[0]))
    elif markdown:
        typer.echo(f"```text\n{as_text(found[0], is_public=True)}\n```")
    else:
        # A file or a pipe has no width: soft_wrap would cut a tree at 80 columns.
        Console(width=None if sys.stdout.isatty() else _WHOLE_LINES).print(_tree(found[0]))
    if problems:
        raise typer.Exit(1)


def log_folder() -> str | None:
    """Return the folder that `BUDGETGUARD_LOG` names."""
    return os.environ.get(FOLDER) or None


def logs_of(run: str) -> list[str]:
    """Return the logs in the folder of a run, of which the beginning of its id may be given."""
    logs = sorted(Path(log_folder() or "").glob("*.jsonl*"), key=by_attempt)
    return [str(one) for one in logs if one.name.startswith(file_name(run))]


def _list(found: Sequence[Run], as_json: bool) -> None:
    newest = sorted(found, key=lambda one: -one.started_ns)
    columns = ("started (UTC)", "run", "model", "task", "tenant", "spent", "ended")
    rows = table(*columns, right=("spent",))
    rows.columns[0].no_wrap = True
    ids = {one.root.run_id for one in found}
    enough = next(n for n in range(8, 33) if len({one[:n] for one in ids}) == len(ids) or n == 32)
    for one in newest[:_MOST_LISTED]:
        started, id_, *cells = row(one)
        if _MADE_UP.fullmatch(id_):  # one that somebody chose is whole
            id_ = id_[:enough]
        rows.add_row(started, *map(cell, (id_, *cells)))
    more = f", the newest {_MOST_LISTED}" if len(found) > _MOST_LISTED else ""
    shown = f"{counted(len(found), 'run')}{more}. Show one by the beginning of its id."
    answer(as_json, map(plain, newest), rows, shown)


def row(run: Run) -> list[str]:
    """Return a run in a row: time, id, models, task, tenant, spend, and how it ended."""
    root = run.root
    return [
        at_minute(run.started_ns),
        root.run_id,
        ", ".join(run.models()),
        root.profile or "",
        ", ".join(root.tenant),
        figure(run.spent.cost_usd),
        root.ending,
    ]


def as_text(run: Run, *, is_public: bool = False) -> str:
    """Return the tree of a run as whole lines, for the public without texts of the run."""
    written = io.StringIO()
    Console(file=written, width=_WHOLE_LINES).print(_tree(run, is_public=is_public))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _tree(run: Run, *, is_public: bool = False) -> Tree:
    root = run.root
    tree = Tree(cell(f"run {root.run_id}: {root.ending}", "bold"))
    _facts(tree, run, is_public)
    caps = tree.add("caps")
    for one in run.caps():
        full = min(_BAR, round(one.share * _BAR))
        bar = f"[{'#' * full}{'.' * (_BAR - full)}] {one.share:.0%}"
        caps.add(cell(f"{one.name}: {bar} {one}"))
    if not run.caps():
        caps.add("none")
    _inside(tree, root, is_public)
    if root.trip is not None:
        stop = tree.add(cell(f"stopped: {root.trip.reason}", "bold red"))
        texts = [one.detail or str(one.reason) for one in root.trip.violations]
        if root.next_step is not None:
            texts.append(f"it was about to: {root.next_step}")
        texts += [f"may have taken effect: {call}" for call in root.may_have_taken_effect]
        for text in () if is_public else texts:
            stop.add(cell(text))
        if root.finalized:
            stop.add("the model gave a last answer, from the reserve")
    if root.observed is not None:
        why = root.observed.reason if is_public else root.observed.detail
        tree.add(cell(f"would have been stopped (observed): {why}"))
    if run.damaged is not None:
        why = "" if is_public else f": {run.damaged}"
        tree.add(cell(f"the log does not fit together{why}"))
    if root.status != "completed":
        tree.add(f"to go on: {_GO_ON[root.status]}")
    return tree


def _facts(tree: Tree, run: Run, is_public: bool) -> None:
    root, used = run.root, run.usage
    facts = [f"started {at_minute(run.started_ns)} UTC", f"mode {root.mode}"]
    facts.append(f"{run.seconds:,.1f} seconds")
    if root.budget.profile is not None:
        label = root.budget.profile
        overlay = "" if label.overlay is None else f", overlay {label.overlay}"
        facts.append(f"profile {label.name} version {label.version}{overlay}")
    if root.tenant and not is_public:
        facts.append(f"tenant {', '.join(root.tenant)}")
    tree.add(cell(", ".join(facts)))
    for ending in root.earlier:
        tree.add(cell(f"it went on after: {ending}"))
    rare = ((used.estimated_calls, "estimated"), (used.unpriced_calls, "of unknown price"))
    parts = [
        f"used {figure(used.cost_usd)}, {used.total_tokens:,} tokens",
        counted(used.iterations, "iteration"),
        counted(used.model_calls, "model call"),
        counted(used.tool_calls, "tool call"),
        *(f"{counted(calls, 'call')} {what}" for calls, what in rare if calls),
    ]
    tree.add(", ".join(parts))


def _inside(tree: Tree, node: Node, is_public: bool) -> None:
    if node.models:
        models = tree.add("models")
        for name, spent in _by_cost(node.models):
            cost = figure(spent.cost_usd)
            models.add(cell(f"{name}: {_calls(spent)}, {spent.tokens:,} tokens, {cost}"))
    if node.tools:
        tools = tree.add("tools, with the model calls that asked for them")
        for name, spent in _by_cost(node.tools):
            calls = "" if name == SPENT_ON_ANSWERS else f"{_calls(spent)}, "
            kind = " (handoff)" if name in node.handoffs else ""
            tools.add(cell(f"{name}{kind}: {calls}{figure(spent.cost_usd)}"))
    if node.refusals:
        refused = ", ".join(f"{count} {reason}" for reason, count in node.refusals.most_common())
        tree.add(cell(f"refused: {refused}"))
    if node.delayed:
        tree.add(f"delayed by rate limits: {counted(node.delayed, 'call')}")
    if node.fallback:
        tree.add(cell(f"fell back {node.fallback}"))
    if node.warned:
        tree.add(cell(f"warned: {', '.join(node.warned)}"))
    for child in node.children:
        branch = tree.add(cell(child.housekeeping or f"run {child.run_id}: {child.ending}"))
        if child.trip is not None:
            branch.add(cell(f"stopped: {child.trip.reason if is_public else child.trip.detail}"))
        _inside(branch, child, is_public)


def _by_cost(spent: dict[str, Spent]) -> list[tuple[str, Spent]]:
    return sorted(spent.items(), key=lambda item: (-item[1].cost_usd, -item[1].calls, item[0]))


def _calls(spent: Spent) -> str:
    extra = [f"{spent.failed} failed"] if spent.failed else []
    extra += [f"{spent.refused} refused"] if spent.refused else []
    return counted(spent.calls, "call") + (f" ({', '.join(extra)})" if extra else "")


def plain(run: Run) -> dict[str, Any]:
    """Return a run for machines."""
    return {
        "started": at_minute(run.started_ns),
        "seconds": run.seconds,
        "shares": run.shares(),
        "usage": run.usage.model_dump(mode="json"),
        "damaged": run.damaged,
        **_plain_node(run.root),
    }


def _plain_node(node: Node) -> dict[str, Any]:
    profile = node.budget.profile
    same = ["run_id", "status", "stop_reason", "finalized", "housekeeping", "delayed", "mode"]
    same += ["next_step", "may_have_taken_effect", "tenant", "refusals", "warned", "fallback"]
    same += ["earlier"]
    return {
        **{name: getattr(node, name) for name in same},
        "profile": None if profile is None else profile.model_dump(),
        "violations": []
        if node.trip is None
        else [one.model_dump(mode="json") for one in node.trip.violations],
        "models": {name: asdict(spent) for name, spent in node.models.items()},
        "tools": {name: asdict(spent) for name, spent in node.tools.items()},
        "to_go_on": None if node.housekeeping else _GO_ON.get(node.status),
        "runs": [_plain_node(child) for child in node.children],
    }
