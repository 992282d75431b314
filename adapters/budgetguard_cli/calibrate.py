"""`budgetguard calibrate`: caps from measured runs, and with `--check` caps against them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from budgetguard_cli.measured import Measured
from budgetguard_cli.recordings import Reading, Unreadable, readable
from budgetguard_cli.terminal import printable, refuse
from budgetguard_cli.verdict import verdicts, whole_runs
from budgetguard_core import Budget, BudgetGuardError, FinalizeReserve, PriceBook
from budgetguard_core.budget import DIMENSIONS
from budgetguard_core.profiles import Profiles, load_profile
from budgetguard_core.profiles.audit import Finding, audit
from budgetguard_core.profiles.calibration import FEWEST, Figure, Proposal, propose

_UNNAMED = "default"

Logs = Annotated[
    list[str],
    typer.Argument(
        metavar="LOG",
        help="Recorded runs as JSON Lines, also gzipped, or folders of them; - is standard input. "
        "BudgetGuard's own event logs, or one trajectory a line.",
    ),
]
ProfileName = Annotated[
    str,
    typer.Option("--profile", help="The profile of runs whose recording names none."),
]
Good = Annotated[
    bool,
    typer.Option(
        "--labelled",
        help="The completed runs of event logs are known to be good: somebody has looked.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(calibrate)


def calibrate(
    files: Logs,
    profile: ProfileName = _UNNAMED,
    labelled: Good = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check the caps that are set, and propose none.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="With --check: a file of profiles; the caps that the runs were recorded under if "
            "left out.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Propose caps from measured runs, or check the caps set.

    Runs that a cap or somebody ended, failed, did not succeed or have not ended are left out. With
    fewer than 10 nothing is proposed; with 10 to 29 three times the maximum (provisional), with 30
    to 299 twice; from 300 on 1.5 times the 99th percentile, tokens and dollars twice. Where nobody
    says which runs are good, 2.5 times the 95th percentile.

    With --check: a cap below the 99th percentile of healthy runs truncates real work; one above
    five times that never fires. Profiles with fewer than 10 runs are not judged.

    Examples: budgetguard calibrate logs >> budgetguard.toml,
    budgetguard calibrate logs --check --config budgetguard.toml

    The figures go to the standard error, the TOML to the standard output. Ends with 0; with 1 when
    a check finds something or a line could not be read (the rest is used); with 2 when nothing can
    be proposed, a file is wrong, or a profile is not known.
    """
    if config is not None and not check:
        refuse("--config needs --check: it names the caps to check. Give both.")
    errors = Console(stderr=True)
    groups, problems = _measured(files, profile, labelled, errors)
    if check:
        wrong = [_checked(name, group, config, as_json) for name, group in groups.items()]
        if not groups:
            refuse("the files hold no run. Name logs of runs.")
        if any(wrong) or problems:
            raise typer.Exit(1)
        return
    proposals = {name: list(_proposals(group)) for name, group in groups.items()}
    if as_json:
        for name, group in groups.items():
            for one in proposals[name]:
                _print_json(type="proposal", profile=name, **_plain_proposal(one, group))
            _print_json(type="profile", profile=name, **_plain_group(group))
    else:
        for name, group in groups.items():
            _show_proposals(errors, name, group, proposals[name])
        typer.echo(_toml(groups, proposals), nl=False)
    if not any(proposals.values()):
        refuse(
            f"nothing can be proposed: {FEWEST} runs of one profile that ended by themselves are "
            f"needed, got {max((one.usable for one in groups.values()), default=0)} at most."
        )
    if problems:
        raise typer.Exit(1)


def _checked(name: str, group: Measured, config: Path | None, as_json: bool) -> bool:
    """Show the findings on the caps of one profile, and return whether there are any."""
    budget = group.budget or Budget()
    if config is not None or name != _UNNAMED:
        budget = _caps(name, config, group.budget)
    found = list(audit(budget, group.figures, runs=group.runs, stopped=group.stopped))
    if as_json:
        for one in found:
            _print_json(type="finding", profile=name, **_text(asdict(one)))
        _print_json(type="profile", profile=name, findings=len(found), **_plain_group(group))
        return bool(found)
    out = Console()
    _say(out, f"{name}: {_summary(group)}")
    if group.usable < FEWEST:
        _say(out, f"  not judged: fewer than {FEWEST} runs ended by themselves")
    for one in found:
        _say(out, f"  {_sentence(one)}")
    if group.usable >= FEWEST and not found:
        _say(out, "  nothing wrong")
    return bool(found)


def _measured(
    files: Sequence[str], profile: str, labelled: bool, errors: Console
) -> tuple[dict[str, Measured], int]:
    groups: dict[str, Measured] = {}
    reading = Reading(errors)
    prices = PriceBook()
    try:
        legs = reading.files(readable(files), lambda lines: verdicts(lines, None, prices))
        for found in whole_runs(legs):
            named = found.budget.profile
            name = profile if named is None else named.name
            groups.setdefault(name, Measured()).add(found, labelled=labelled)
    except Unreadable as error:
        refuse(str(error))
    return dict(sorted(groups.items())), reading.problems


def _proposals(group: Measured) -> Iterator[Proposal]:
    for dimension in DIMENSIONS:
        figures = group.figures.get(dimension, ())
        # Half of the runs without a price say nothing of the other half.
        if len(figures) == group.usable:
            found = propose(dimension, figures, labelled=group.are_labelled)
            if found is not None:
                yield found


def _reserve(group: Measured) -> FinalizeReserve | None:
    return None if group.budget is None else group.budget.finalize_reserve


def _whole_cap(one: Proposal, group: Measured) -> Figure:
    """Return the cap to write: runs that ended by themselves used nothing of the reserve."""
    reserve = _reserve(group)
    held = None if reserve is None else reserve.of_caps().get(one.dimension)
    # Only caps on tokens and dollars have one, in their own unit.
    return one.cap if held is None else cast("Figure", cast("Any", one.cap) + held)


def _caps(name: str, config: Path | None, recorded: Budget | None) -> Budget:
    try:
        if config is not None:
            return Profiles(config).get(name).budget
        return recorded or load_profile(name).budget
    except BudgetGuardError as error:
        refuse(str(error))


def _toml(groups: dict[str, Measured], proposals: dict[str, list[Proposal]]) -> str:
    lines: list[str] = []
    for name, found in proposals.items():
        if not found:
            continue
        group = groups[name]
        lines += [
            f"# {group.usable} runs measured{'' if group.are_labelled else ', unlabelled'}"
            f"{', provisional: measure more' if found[0].provisional else ''}.",
            f"[profiles.{_quoted(name)}]",
            f'version = "calibrated-{group.usable}"',
        ]
        for one in found:
            cap = _whole_cap(one, group)
            held = "" if cap == one.cap else ", and the reserve"
            lines.append(f"{one.dimension} = {_in_toml(cap)}  # {_basis(one)}{held}")
        if (reserve := _reserve(group)) is not None:
            given = reserve.model_dump(exclude_unset=True, exclude_none=True)
            kept = ", ".join(f"{name} = {_in_toml(value)}" for name, value in given.items())
            lines.append(f"finalize_reserve = {{ {kept} }}")
        lines.append("")
    return "".join(f"{line}\n" for line in lines)


def _quoted(name: str) -> str:
    # TOML knows no pairs of surrogates, in which JSON escapes what is beyond 16 bits.
    text = json.dumps(printable(name), ensure_ascii=False)
    return "".join(char if char.isascii() else f"\\U{ord(char):08X}" for char in text)


def _in_toml(cap: Figure) -> str:
    return f'"{cap:f}"' if isinstance(cap, Decimal) else str(cap)


def _basis(one: Proposal) -> str:
    return f"{one.factor:g} x {one.basis}"


def _show_proposals(
    console: Console, name: str, group: Measured, proposals: Iterable[Proposal]
) -> None:
    _say(console, f"{name}: {_summary(group)}")
    if group.usable < FEWEST:
        _say(console, f"  nothing proposed: fewer than {FEWEST} runs ended by themselves")
        return
    table = Table(box=None, padding=(0, 1))
    for heading in ("cap", "runs", "p50", "p95", "p99", "max", "proposed", "95 % interval", "cuts"):
        table.add_column(heading, justify="left" if heading == "cap" else "right", overflow="fold")
    for one in proposals:
        spread = one.measured
        table.add_row(
            Text(one.dimension),
            f"{spread.runs:,}",
            *(_short(figure) for figure in (spread.p50, spread.p95, spread.p99, spread.maximum)),
            f"{_short(one.cap)} ({_basis(one)})",
            f"{_short(one.low)} to {_short(one.high)}",
            f"<= {one.exceeds:.2%}",
        )
    # Not cut to a width that nobody looks at.
    wide = console if console.is_terminal else Console(file=console.file, width=160)
    wide.print(table)
    for dimension in DIMENSIONS:
        known = len(group.figures.get(dimension, ()))
        if 0 < known < group.usable:
            _say(
                console,
                f"  {dimension}: nothing proposed, it is known of {known:,} of the runs only",
            )
    if group.estimated:
        _say(
            console, f"  the tokens of {group.estimated:,} runs are estimates, in part or in whole"
        )


def _short(figure: Figure) -> str:
    if isinstance(figure, int):
        return f"{figure:,}"
    if isinstance(figure, Decimal):
        return f"${figure:,.4f}".rstrip("0").rstrip(".")
    return f"{figure:,.1f}"


def _summary(group: Measured) -> str:
    stopped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(group.stopped.items()))
    return (
        f"{group.runs:,} runs, {group.usable:,} used"
        f"{'' if group.are_labelled else ' (unlabelled)'}, {group.stopped.total():,} ended by a "
        f"limit{f' ({stopped})' if stopped else ''}, {group.unfinished:,} unfinished and "
        f"{group.failed:,} that failed or were aborted left out"
    )


def _sentence(one: Finding) -> str:
    if one.dimension is None:
        often = "every one" if one.problem == "limits_always_fire" else "none"
        return f"of {one.runs:,} runs {often} was stopped by a limit"
    cap, p99 = _short(one.cap or 0), _short(one.p99 or 0)
    if one.problem == "truncates":
        return (
            f"{one.dimension} {cap} truncates real work: p99 of healthy runs is {p99}, "
            f"{one.share:.1%} of them need more"
        )
    return f"{one.dimension} {cap} never fires: it is above five times p99, which is {p99}"


def _plain_proposal(one: Proposal, group: Measured) -> dict[str, Any]:
    whole = _text({"cap": _whole_cap(one, group)})
    return {**_text(asdict(one)), **whole, "labelled": group.are_labelled}


def _plain_group(group: Measured) -> dict[str, Any]:
    return {
        "runs": group.runs,
        "used": group.usable,
        "labelled": group.are_labelled,
        "stopped": dict(sorted(group.stopped.items())),
        "unfinished": group.unfinished,
        "left_out": group.failed,
    }


def _text(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _text(cast("dict[str, Any]", value))
        if isinstance(value, dict)
        else str(value)
        if isinstance(value, Decimal)
        else value
        for name, value in record.items()
    }


def _print_json(**record: Any) -> None:
    typer.echo(json.dumps(record))


def _say(console: Console, text: str) -> None:
    console.print(Text(printable(text)), soft_wrap=True)
