"""`budgetguard calibrate`: caps from measured runs, and with `--check` caps against them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from budgetguard_cli.options import AsJson, Logs
from budgetguard_cli.runs import Run, read_runs, used_of
from budgetguard_cli.screen import counted, figure, printable, refuse, say, table, write_json
from budgetguard_core import Budget, BudgetGuardError, FinalizeReserve
from budgetguard_core.budget import DIMENSIONS
from budgetguard_core.profiles import Profiles, load_profile
from budgetguard_core.profiles.audit import Finding, audit
from budgetguard_core.profiles.calibration import FEWEST, Figure, Proposal, propose
from budgetguard_core.stop import StopReason

_UNNAMED = "default"


@dataclass
class Measured:
    """The runs of one profile.

    Attributes:
        labelled: Somebody has looked: the completed runs are known to be healthy.
        left_out: Runs that an exception left, that somebody aborted, or that wait.
        unfinished: Runs whose log breaks off: they go on, or their process was killed.
        figures: What each healthy run used, by dimension.
        budget: The budget of the last run.
        estimated: Runs whose tokens are estimates in part.
    """

    labelled: bool
    runs: int = 0
    stopped: Counter[str] = field(default_factory=Counter[str])
    left_out: int = 0
    unfinished: int = 0
    figures: dict[str, list[Figure]] = field(default_factory=dict[str, list[Figure]])
    budget: Budget | None = None
    estimated: int = 0

    def add(self, run: Run) -> None:
        """Take in one run."""
        self.runs += 1
        root, used = run.root, run.usage
        if root.budget.caps():
            self.budget = root.budget
        ended = [*root.earlier, root.ending]
        limits = [one.partition(", ")[2] for one in ended if one.startswith("terminated, ")]
        if root.status is None:
            # What it needed in all is not known: it would only pull the figures down.
            self.unfinished += 1
        elif StopReason.ABORTED in limits or root.status in ("failed", "paused"):
            self.left_out += 1
        elif limits:
            # It only repeats the cap that ended it.
            self.stopped[limits[-1]] += 1
        else:
            self.estimated += used.estimated_calls > 0
            for name in DIMENSIONS:
                if name != "max_cost_usd" or not used.unpriced_calls:
                    self.figures.setdefault(name, []).append(used_of(used, name))

    @property
    def usable(self) -> int:
        """How many runs the figures are of."""
        return len(self.figures.get("max_model_calls", ()))


def calibrate(
    files: Logs,
    profile: Annotated[
        str, typer.Option("--profile", help="The profile of runs whose recording names none.")
    ] = _UNNAMED,
    labelled: Annotated[
        bool,
        typer.Option(
            "--labelled", help="The completed runs are known to be good: somebody has looked."
        ),
    ] = False,
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
    groups, problems = _measured(files, profile, labelled)
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
            write_json(
                *(
                    {"type": "proposal", "profile": name, **_plain_proposal(one, group)}
                    for one in proposals[name]
                ),
                {"type": "profile", "profile": name, **_plain_group(group)},
            )
    else:
        for name, group in groups.items():
            _show_proposals(name, group, proposals[name])
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
        write_json(
            *({"type": "finding", "profile": name, **asdict(one)} for one in found),
            {"type": "profile", "profile": name, "findings": len(found), **_plain_group(group)},
        )
        return bool(found)
    say(f"{name}: {_summary(group)}")
    if group.usable < FEWEST:
        say(f"  not judged: fewer than {FEWEST} runs ended by themselves")
    say(*(f"  {_sentence(one)}" for one in found))
    if group.usable >= FEWEST and not found:
        say("  nothing wrong")
    return bool(found)


def _measured(
    files: Sequence[str], profile: str, labelled: bool
) -> tuple[dict[str, Measured], int]:
    groups: dict[str, Measured] = {}
    found, problems = read_runs(files)
    for run in found:
        if run.damaged is None:
            groups.setdefault(run.root.profile or profile, Measured(labelled)).add(run)
    return dict(sorted(groups.items())), problems


def _proposals(group: Measured) -> Iterator[Proposal]:
    for dimension in DIMENSIONS:
        figures = group.figures.get(dimension, ())
        # Half of the runs without a price say nothing of the other half.
        if len(figures) == group.usable:
            found = propose(dimension, figures, labelled=group.labelled)
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
            f"# {group.usable} runs measured{'' if group.labelled else ', unlabelled'}"
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


def _show_proposals(name: str, group: Measured, proposals: Iterable[Proposal]) -> None:
    say(f"{name}: {_summary(group)}", errors=True)
    if group.usable < FEWEST:
        say(f"  nothing proposed: fewer than {FEWEST} runs ended by themselves", errors=True)
        return
    numbers = ("p50", "p95", "p99", "max", "proposed", "at most cut")
    rows = table("cap", *numbers, right=numbers)
    for one in proposals:
        spread = one.measured
        rows.add_row(
            one.dimension,
            *map(figure, (spread.p50, spread.p95, spread.p99, spread.maximum, one.cap)),
            f"{one.exceeds:.2%}",
        )
    say(rows, errors=True)
    for one in proposals:
        interval = f"{figure(one.low)} to {figure(one.high)}"
        say(f"  {one.dimension}: {_basis(one)}, 95 % interval {interval}", errors=True)
    for dimension in DIMENSIONS:
        known = len(group.figures.get(dimension, ()))
        if 0 < known < group.usable:
            said = "nothing proposed, it is known of"
            say(f"  {dimension}: {said} {known:,} of the runs only", errors=True)
    if group.estimated:
        said = "runs are estimates, in part or in whole"
        say(f"  the tokens of {group.estimated:,} {said}", errors=True)


def _summary(group: Measured) -> str:
    stopped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(group.stopped.items()))
    return (
        f"{counted(group.runs, 'run')}, {group.usable:,} used"
        f"{'' if group.labelled else ' (unlabelled)'}, {group.stopped.total():,} ended by a "
        f"limit{f' ({stopped})' if stopped else ''}, {group.unfinished:,} unfinished and "
        f"{group.left_out:,} that failed or were aborted left out"
    )


def _sentence(one: Finding) -> str:
    if one.dimension is None:
        often = "every one" if one.problem == "limits_always_fire" else "none"
        return f"of {one.runs:,} runs {often} was stopped by a limit"
    cap, p99 = figure(one.cap or 0), figure(one.p99 or 0)
    if one.problem == "truncates":
        return (
            f"{one.dimension} {cap} truncates real work: p99 of healthy runs is {p99}, "
            f"{one.share:.1%} of them need more"
        )
    return f"{one.dimension} {cap} never fires: it is above five times p99, which is {p99}"


def _plain_proposal(one: Proposal, group: Measured) -> dict[str, Any]:
    return {**asdict(one), "cap": _whole_cap(one, group), "labelled": group.labelled}


def _plain_group(group: Measured) -> dict[str, Any]:
    return {
        "runs": group.runs,
        "used": group.usable,
        "labelled": group.labelled,
        "stopped": dict(sorted(group.stopped.items())),
        "unfinished": group.unfinished,
        "left_out": group.left_out,
    }
