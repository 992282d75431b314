"""`budgetguard show`: one run as a tree, and how to go on."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from budgetguard_cli.recordings import Reading, Unreadable, by_leg, is_there, readable
from budgetguard_cli.terminal import printable, refuse, table
from budgetguard_cli.timeline import (
    SPENT_ON_ANSWERS,
    Node,
    Spent,
    Timeline,
    Timelines,
    at_minute,
    log_folder,
    short_number,
    used_of,
)
from budgetguard_core import PriceBook
from budgetguard_core.run_log import file_name

_MOST_LISTED = 40
_BAR = 20
# Letters that Markdown or HTML would take for their own.
_SPECIAL = re.compile(r"[\\`*\[\]<>|#!~&]")
_WHOLE_LINES = 10_000
_GO_ON = {
    "terminated": "Resume it under a fresh budget: its history is closed, no completed tool call "
    "runs again.",
    "paused": "It waits for a person; its counters go on with the answer.",
    "failed": "An exception left it. What it had spent is above; its checkpoint can be resumed.",
    None: "It has not ended: it is still going, or its process was killed. Its checkpoint can be "
    "resumed.",
}


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(show)


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
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """List runs, or show one: its spend, why it stopped, how to go on.

    Example: budgetguard show 9f0c

    A log with several runs is listed, the newest first. Ends with 0, with 1 when a line could not
    be read, and with 2 when there is no such log or run, or several begin with the letters given.
    """
    reading = Reading(Console(stderr=True))
    folder = log_folder()
    name = log or folder
    if name is None:
        refuse("nothing to show. Name a log or a run, or set BUDGETGUARD_LOG.")
    by_id = log is not None and log != "-" and folder is not None and not is_there(log)
    told = Timelines(PriceBook())
    try:
        files = (_legs(Path(str(folder)), name) if by_id else []) or readable([name])
        reading.into(told.read, files)
    except Unreadable as error:
        refuse(str(error))
    found = told.roots
    wanted = run or (name if by_id else None)
    if wanted is not None:
        found = _named(found, wanted, name)
    if not found:
        refuse(f"{printable(name)} holds no run. Name an event log of BudgetGuard's.")
    if wanted is None and (len(found) > 1 or log is None):
        _list(found, as_json)
    elif as_json:
        typer.echo(json.dumps(_plain(found[-1])))
    elif markdown:
        _markdown(found[-1])
    else:
        # A file or a pipe has no width: soft_wrap would cut a tree at 80 columns.
        _show(Console(width=None if sys.stdout.isatty() else _WHOLE_LINES), found[-1])
    if reading.problems:
        raise typer.Exit(1)


def _legs(folder: Path, run: str) -> list[str]:
    """Return the logs of all legs of a run; of all runs where none has the whole name."""
    logs = sorted(folder.glob("*.jsonl*"), key=by_leg)
    name = file_name(run)
    legs = [one for one in logs if one.name.startswith((f"{name}.jsonl", f"{name}-"))]
    if not any(one.name.startswith(f"{name}.jsonl") for one in legs):
        legs = [one for one in logs if one.name.startswith(run)] or logs
    return [str(one) for one in legs]


def _named(found: Sequence[Timeline], wanted: str, log: str) -> list[Timeline]:
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


def _list(found: Sequence[Timeline], as_json: bool) -> None:
    newest = sorted(found, key=lambda one: -one.started_ns)
    if as_json:
        for one in newest:
            typer.echo(json.dumps(_plain(one)))
        return
    rows = table("started (UTC)", "run", "model", "task", "tenant", "spent", "ended")
    rows.box, rows.pad_edge = None, False
    # The end of a run keeps the room; a folded id is still whole.
    rows.columns[0].no_wrap, rows.columns[1].max_width = True, 10
    for one in newest[:_MOST_LISTED]:
        root = one.root
        cells = (
            at_minute(one.started_ns),
            root.run_id,
            ", ".join(one.models()),
            root.profile or "",
            ", ".join(root.tenant),
            short_number(one.spent.cost_usd),
            _ending(root),
        )
        rows.add_row(*map(_text, cells))
    console = Console()
    console.print(rows)
    more = f", the newest {_MOST_LISTED}" if len(found) > _MOST_LISTED else ""
    _say(console, f"{len(found):,} runs{more}. Show one by the beginning of its id.")


def _markdown(run: Timeline) -> None:
    """Write what an issue needs; names are escaped, arguments and texts left out."""
    root, used = run.root, run.usage
    facts = [
        ("run", root.run_id),
        ("started (UTC)", at_minute(run.started_ns)),
        ("ended", _ending(root)),
        ("profile", root.profile or "none"),
        ("models", ", ".join(run.models()) or "none"),
        (
            "used",
            f"{short_number(used.cost_usd)}, {used.total_tokens:,} tokens, "
            f"{used.model_calls} model calls, {used.tool_calls} tool calls",
        ),
        *((f"cap {name}", f"{share:.0%}") for name, share in run.shares().items()),
        *((f"tool {name}", _calls(spent)) for name, spent in _by_cost(root.tools)),
        *((f"refused {name}", f"{count}") for name, count in root.refusals.most_common()),
    ]
    if root.trip is not None:
        facts += [("stopped by", str(one.reason)) for one in root.trip.violations]
    typer.echo("| | |\n|---|---|")
    for name, value in facts:
        typer.echo(f"| {_cell(name)} | {_cell(value)} |")


def _cell(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", printable(text)).replace("@", "@\u200b")


def as_text(run: Timeline) -> str:
    """Return the tree of a run as whole lines."""
    written = io.StringIO()
    _show(Console(file=written, width=_WHOLE_LINES), run)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _show(console: Console, run: Timeline) -> None:
    root = run.root
    tree = Tree(_text(f"run {root.run_id}: {_ending(root)}", "bold"))
    _facts(tree, run)
    caps = tree.add(_text("caps"))
    for name, share in run.shares().items():
        used, cap = used_of(run.usage, name), root.budget.caps().get(name)
        if cap is not None:
            caps.add(_text(f"{name}: {_bar(share)} {short_number(used)} of {short_number(cap)}"))
    if not run.shares():
        caps.add(_text("none"))
    _spent(tree, root)
    for child in root.children:
        _branch(tree, child)
    if root.trip is not None:
        stop = tree.add(_text(f"stopped: {root.trip.reason}", "bold red"))
        for one in root.trip.violations:
            stop.add(_text(one.detail or str(one.reason)))
        if root.next_step is not None:
            stop.add(_text(f"it was about to: {root.next_step}"))
        if root.finalized:
            stop.add(_text("the model gave a last answer, from the reserve"))
        for call in root.may_have_taken_effect:
            stop.add(_text(f"may have taken effect: {call}"))
    if root.observed is not None:
        tree.add(_text(f"would have been stopped (observed): {root.observed.detail}"))
    if run.damaged is not None:
        tree.add(_text(f"the log does not fit together: {run.damaged}"))
    if root.status != "completed":
        tree.add(_text(f"to go on: {_GO_ON[root.status]}"))
    console.print(tree)


def _facts(tree: Tree, run: Timeline) -> None:
    root = run.root
    used = run.usage
    facts = [f"mode {root.mode}", f"{run.seconds:,.1f} seconds"]
    if root.budget.profile is not None:
        label = root.budget.profile
        overlay = "" if label.overlay is None else f", overlay {label.overlay}"
        facts.append(f"profile {label.name} version {label.version}{overlay}")
    if root.tenant:
        facts.append(f"tenant {', '.join(root.tenant)}")
    tree.add(_text(", ".join(facts)))
    estimated = f", {used.estimated_calls} calls estimated" if used.estimated_calls else ""
    unpriced = f", {used.unpriced_calls} calls of unknown price" if used.unpriced_calls else ""
    tree.add(
        _text(
            f"used {short_number(used.cost_usd)}, {used.total_tokens:,} tokens, "
            f"{used.iterations} iterations, {used.model_calls} model calls, "
            f"{used.tool_calls} tool calls{estimated}{unpriced}"
        )
    )


def _branch(tree: Tree, node: Node) -> None:
    name = f"run {node.run_id}: {_ending(node)}" if node.housekeeping is None else node.housekeeping
    branch = tree.add(_text(name))
    if node.trip is not None:
        branch.add(_text(f"stopped: {node.trip.detail}"))
    _spent(branch, node)
    for child in node.children:
        _branch(branch, child)


def _spent(tree: Tree, node: Node) -> None:
    if node.models:
        models = tree.add(_text("models"))
        for name, spent in _by_cost(node.models):
            models.add(_text(f"{name}: {_calls(spent)}, {spent.tokens:,} tokens, {_cost(spent)}"))
    if node.tools:
        tools = tree.add(_text("tools, with the model calls that asked for them"))
        for name, spent in _by_cost(node.tools):
            calls = "" if name == SPENT_ON_ANSWERS else f"{_calls(spent)}, "
            tools.add(_text(f"{name}: {calls}{_cost(spent)}"))
    if node.refusals:
        refused = ", ".join(f"{count} {reason}" for reason, count in node.refusals.most_common())
        tree.add(_text(f"refused: {refused}"))
    if node.delayed:
        tree.add(_text(f"delayed by rate limits: {node.delayed:,} calls"))
    if node.warned:
        tree.add(_text(f"warned: {', '.join(node.warned)}"))


def _by_cost(spent: dict[str, Spent]) -> list[tuple[str, Spent]]:
    return sorted(spent.items(), key=lambda item: (-item[1].cost_usd, -item[1].calls, item[0]))


def _calls(spent: Spent) -> str:
    extra = [f"{spent.failed} failed"] if spent.failed else []
    extra += [f"{spent.refused} refused"] if spent.refused else []
    return f"{spent.calls} calls" + (f" ({', '.join(extra)})" if extra else "")


def _cost(spent: Spent) -> str:
    return short_number(spent.cost_usd)


def _ending(node: Node) -> str:
    if node.status is None:
        return "not ended"
    if node.status == "terminated":
        return f"terminated, {node.stop_reason}"
    return node.status + (f", {node.error}" if node.error else "")


def _bar(share: float) -> str:
    full = min(_BAR, round(share * _BAR))
    return f"[{'#' * full}{'.' * (_BAR - full)}] {share:.0%}"


def _plain(run: Timeline) -> dict[str, Any]:
    return {
        "line": run.line,
        "seconds": run.seconds,
        "shares": run.shares(),
        "usage": run.usage.model_dump(mode="json"),
        "damaged": run.damaged,
        **_plain_node(run.root),
    }


def _plain_node(node: Node) -> dict[str, Any]:
    profile = node.budget.profile
    return {
        "run_id": node.run_id,
        "status": node.status,
        "stop_reason": node.stop_reason,
        "finalized": node.finalized,
        "housekeeping": node.housekeeping,
        "delayed": node.delayed,
        "mode": node.mode,
        "profile": None if profile is None else profile.model_dump(),
        "tenant": list(node.tenant),
        "violations": []
        if node.trip is None
        else [one.model_dump(mode="json") for one in node.trip.violations],
        "next_step": node.next_step,
        "may_have_taken_effect": list(node.may_have_taken_effect),
        "models": {name: _plain_spent(spent) for name, spent in node.models.items()},
        "tools": {name: _plain_spent(spent) for name, spent in node.tools.items()},
        "refusals": dict(node.refusals),
        "warned": node.warned,
        "to_go_on": None if node.housekeeping else _GO_ON.get(node.status),
        "runs": [_plain_node(child) for child in node.children],
    }


def _plain_spent(spent: Spent) -> dict[str, Any]:
    return {
        "calls": spent.calls,
        "failed": spent.failed,
        "refused": spent.refused,
        "tokens": spent.tokens,
        "cost_usd": str(spent.cost_usd),
    }


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def _say(console: Console, text: str) -> None:
    console.print(_text(text), soft_wrap=True)
