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

from budgetguard_cli.logs import STDIN, by_attempt, is_there
from budgetguard_cli.options import AsJson
from budgetguard_cli.runs import SPENT_ON_ANSWERS, Node, Run, Spent, read_runs, used_of
from budgetguard_cli.screen import (
    at_minute,
    cell,
    counted,
    figure,
    printable,
    refuse,
    say,
    table,
    write_json,
)
from budgetguard_core.run_log import FOLDER, file_name

_MOST_LISTED = 40
_BAR = 20
# Letters that Markdown or HTML would take for their own.
_SPECIAL = re.compile(r"[\\`*\[\]<>|#!~&]")
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
            help="An event log or a folder of them, - for standard input, or a run's id or the "
            "beginning of one: its log is looked for in the folder that BUDGETGUARD_LOG names. "
            "Left out: the runs of that folder.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(help="The run, where the log has several.", show_default=False),
    ] = None,
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
    name = log or folder
    if name is None:
        refuse("nothing to show. Name a log or a run, or set BUDGETGUARD_LOG.")
    by_id = log is not None and log != STDIN and folder is not None and not is_there(log)
    found, problems = read_runs((_logs_of(Path(str(folder)), name) if by_id else []) or [name])
    wanted = run or (name if by_id else None)
    if wanted is not None:
        found = _named(found, wanted, name)
    if not found:
        refuse(f"{printable(name)} holds no run. Name an event log of BudgetGuard's.")
    if wanted is None and (len(found) > 1 or log is None):
        _list(found, as_json)
    elif as_json:
        write_json(plain(found[-1]))
    elif markdown:
        _markdown(found[-1])
    else:
        # A file or a pipe has no width: soft_wrap would cut a tree at 80 columns.
        Console(width=None if sys.stdout.isatty() else _WHOLE_LINES).print(_tree(found[-1]))
    if problems:
        raise typer.Exit(1)


def log_folder() -> str | None:
    """Return the folder that `BUDGETGUARD_LOG` names."""
    return os.environ.get(FOLDER) or None


def _logs_of(folder: Path, run: str) -> list[str]:
    """Return the logs of all attempts of a run; of all runs where none has the whole name."""
    logs = sorted(folder.glob("*.jsonl*"), key=by_attempt)
    name = file_name(run)
    own = [one for one in logs if one.name.startswith((f"{name}.jsonl", f"{name}-"))]
    if not any(one.name.startswith(f"{name}.jsonl") for one in own):
        own = [one for one in logs if one.name.startswith(run)] or logs
    return [str(one) for one in own]


def _named(found: Sequence[Run], wanted: str, log: str) -> list[Run]:
    """Return the run of an id, or the only one whose id begins so."""
    exact = [one for one in found if wanted in one.nodes]
    begins = exact or [one for one in found if any(id_.startswith(wanted) for id_ in one.nodes)]
    if not begins:
        refuse(
            f"run {printable(wanted)[:80]!r} is not in {printable(log)}. Leave it out for a list."
        )
    if not exact and len({one.root.run_id for one in begins}) > 1:
        names = ", ".join(printable(one.root.run_id)[:40] for one in begins[:5])
        refuse(
            f"{printable(wanted)[:80]!r} must begin one run's id, got {names}. Write more of it."
        )
    return begins


def _list(found: Sequence[Run], as_json: bool) -> None:
    newest = sorted(found, key=lambda one: -one.started_ns)
    if as_json:
        write_json(*map(plain, newest))
        return
    columns = ("started (UTC)", "run", "model", "task", "tenant", "spent", "ended")
    rows = table(*columns, right=("spent",))
    rows.columns[0].no_wrap = True
    ids = {one.root.run_id for one in found}
    enough = next(n for n in range(8, 33) if len({one[:n] for one in ids}) == len(ids) or n == 32)
    for one in newest[:_MOST_LISTED]:
        root = one.root
        cells = (
            at_minute(one.started_ns),
            # An id that was made up; one that somebody chose is whole.
            root.run_id[:enough] if _MADE_UP.fullmatch(root.run_id) else root.run_id,
            ", ".join(one.models()),
            root.profile or "",
            ", ".join(root.tenant),
            figure(one.spent.cost_usd),
            root.ending,
        )
        rows.add_row(*map(cell, cells))
    more = f", the newest {_MOST_LISTED}" if len(found) > _MOST_LISTED else ""
    say(rows, f"{counted(len(found), 'run')}{more}. Show one by the beginning of its id.")


def _markdown(run: Run) -> None:
    """Write what an issue needs; names are escaped, arguments and texts left out."""
    root, used = run.root, run.usage
    facts = [
        ("run", root.run_id),
        ("started (UTC)", at_minute(run.started_ns)),
        ("ended", root.ending),
        ("profile", root.profile or "none"),
        ("models", ", ".join(run.models()) or "none"),
        (
            "used",
            f"{figure(used.cost_usd)}, {used.total_tokens:,} tokens, "
            f"{counted(used.model_calls, 'model call')}, {counted(used.tool_calls, 'tool call')}",
        ),
        *((f"cap {name}", f"{share:.0%}") for name, share in run.shares().items()),
        *((f"tool {name}", _calls(spent)) for name, spent in _by_cost(root.tools)),
        *((f"refused {name}", f"{count}") for name, count in root.refusals.most_common()),
    ]
    if root.trip is not None:
        facts += [("stopped by", str(one.reason)) for one in root.trip.violations]
    typer.echo("| | |\n|---|---|")
    for name, value in facts:
        typer.echo(f"| {_escaped(name)} | {_escaped(value)} |")


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", printable(text)).replace("@", "@\u200b")


def as_text(run: Run) -> str:
    """Return the tree of a run as whole lines."""
    written = io.StringIO()
    Console(file=written, width=_WHOLE_LINES).print(_tree(run))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _tree(run: Run) -> Tree:
    root = run.root
    tree = Tree(cell(f"run {root.run_id}: {root.ending}", "bold"))
    _facts(tree, run)
    caps = tree.add("caps")
    for name, share in run.shares().items():
        full = min(_BAR, round(share * _BAR))
        bar = f"[{'#' * full}{'.' * (_BAR - full)}] {share:.0%}"
        used, cap = figure(used_of(run.usage, name)), figure(root.budget.caps()[name])
        caps.add(cell(f"{name}: {bar} {used} of {cap}"))
    if not run.shares():
        caps.add("none")
    _spent(tree, root)
    for child in root.children:
        _branch(tree, child)
    if root.trip is not None:
        stop = tree.add(cell(f"stopped: {root.trip.reason}", "bold red"))
        for one in root.trip.violations:
            stop.add(cell(one.detail or str(one.reason)))
        if root.next_step is not None:
            stop.add(cell(f"it was about to: {root.next_step}"))
        if root.finalized:
            stop.add("the model gave a last answer, from the reserve")
        for call in root.may_have_taken_effect:
            stop.add(cell(f"may have taken effect: {call}"))
    if root.observed is not None:
        tree.add(cell(f"would have been stopped (observed): {root.observed.detail}"))
    if run.damaged is not None:
        tree.add(cell(f"the log does not fit together: {run.damaged}"))
    if root.status != "completed":
        tree.add(f"to go on: {_GO_ON[root.status]}")
    return tree


def _facts(tree: Tree, run: Run) -> None:
    root, used = run.root, run.usage
    facts = [f"started {at_minute(run.started_ns)} UTC, mode {root.mode}"]
    facts.append(f"{run.seconds:,.1f} seconds")
    if root.budget.profile is not None:
        label = root.budget.profile
        overlay = "" if label.overlay is None else f", overlay {label.overlay}"
        facts.append(f"profile {label.name} version {label.version}{overlay}")
    if root.tenant:
        facts.append(f"tenant {', '.join(root.tenant)}")
    tree.add(cell(", ".join(facts)))
    for ending in root.earlier:
        tree.add(cell(f"it went on after: {ending}"))
    estimated = (
        f", {counted(used.estimated_calls, 'call')} estimated" if used.estimated_calls else ""
    )
    unpriced = (
        f", {counted(used.unpriced_calls, 'call')} of unknown price" if used.unpriced_calls else ""
    )
    tree.add(
        f"used {figure(used.cost_usd)}, {used.total_tokens:,} tokens, "
        f"{counted(used.iterations, 'iteration')}, {counted(used.model_calls, 'model call')}, "
        f"{counted(used.tool_calls, 'tool call')}{estimated}{unpriced}"
    )


def _branch(tree: Tree, node: Node) -> None:
    branch = tree.add(cell(node.housekeeping or f"run {node.run_id}: {node.ending}"))
    if node.trip is not None:
        branch.add(cell(f"stopped: {node.trip.detail}"))
    _spent(branch, node)
    for child in node.children:
        _branch(branch, child)


def _spent(tree: Tree, node: Node) -> None:
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
