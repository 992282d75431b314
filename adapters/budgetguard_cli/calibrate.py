"""`budgetguard calibrate`: caps from measured runs, and with `--check` caps against them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
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
    """The runs of one profile."""

    labelled: bool
    """Somebody has looked: the completed runs are known to be healthy."""
    runs: int = 0
    stopped: Counter[str] = field(default_factory=Counter[str])
    left_out: int = 0
    """Runs that an exception left, that somebody aborted, or that wait."""
    unfinished: int = 0
    """Runs whose log breaks off: they go on, or their process was killed."""
    figures: dict[str, list[Figure]] = field(default_factory=dict[str, list[Figure]])
    """The usage of each healthy run, by dimension."""
    budget: Budget | None = None
    """The budget of the last run."""
    estimated: int = 0
    """Runs whose tokens are estimates in part."""

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
        """The number of runs behind the figures."""
        return len(self.figures.get("max_model_calls", ()))

    @property
    def reserve(self) -> FinalizeReserve | None:
        """The part of their budget that is kept back for a last answer."""
        return None if self.budget is None else self.budget.finalize_reserve

    def proposals(self) -> list[Proposal]:
        """Return the caps that the runs speak for."""
        # Half of the runs without a price say nothing of the other half.
        whole = {name: one for name, one in self.figures.items() if len(one) == self.usable}
        found = (propose(name, one, labelled=self.labelled) for name, one in whole.items())
        return [one for one in found if one is not None]

    def whole_cap(self, one: Proposal) -> Figure:
        """Return the cap to write: runs that ended by themselves used nothing of the reserve."""
        held = None if self.reserve is None else self.reserve.of_caps().get(one.dimension)
        # Only caps on tokens and dollars have one, in their own unit.
        return one.cap if held is None else cast("Figure", cast("Any", one.cap) + held)

    def summary(self) -> str:
        """Return what the runs are, in a sentence."""
        reasons = ", ".join(f"{count:,} {name}" for name, count in sorted(self.stopped.items()))
        return (
            f"{counted(self.runs, 'run')}, {self.usable:,} used"
            f"{'' if self.labelled else ' (unlabelled)'}, {self.stopped.total():,} ended by a "
            f"limit{f' ({reasons})' if reasons else ''}, {self.unfinished:,} unfinished and "
            f"{self.left_out:,} that failed or were aborted left out"
        )

    def plain(self) -> dict[str, Any]:
        """Return the counts for machines."""
        same = ("runs", "labelled", "stopped", "unfinished", "left_out")
        return {"used": self.usable, **{name: getattr(self, name) for name in same}}


def calibrate(
    files: Logs,
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
    groups: dict[str, Measured] = {}
    found, problems = read_runs(files)
    for run in found:
        if run.damaged is None:
            groups.setdefault(run.root.profile or _UNNAMED, Measured(labelled)).add(run)
    if check:
        wrong = [_checked(name, groups[name], config, as_json) for name in sorted(groups)]
        if not groups:
            refuse("the files hold no run. Name logs of runs.")
        if any(wrong) or problems:
            raise typer.Exit(1)
        return
    anything = False
    for name, group in sorted(groups.items()):
        proposals = group.proposals()
        anything |= bool(proposals)
        if as_json:
            write_json(
                *(
                    {"type": "proposal", "profile": name, **asdict(one)}
                    | {"cap": group.whole_cap(one), "labelled": group.labelled}
                    for one in proposals
                ),
                {"type": "profile", "profile": name, **group.plain()},
            )
        else:
            _show(name, group, proposals)
            if proposals:
                typer.echo(_toml(name, group, proposals))
    if not anything:
        refuse(
            f"nothing can be proposed: {FEWEST} runs of one profile that ended by themselves are "
            f"needed, got {max((one.usable for one in groups.values()), default=0)} at most."
        )
    if problems:
        raise typer.Exit(1)


def _checked(name: str, group: Measured, config: Path | None, as_json: bool) -> bool:
    """Show the findings on the caps of one profile, and return whether there are any."""
    try:
        budget = group.budget or (Budget() if name == _UNNAMED else load_profile(name).budget)
        if config is not None:
            budget = Profiles(config).get(name).budget
    except BudgetGuardError as error:
        refuse(str(error))
    found = list(audit(budget, group.figures, runs=group.runs, stopped=group.stopped))
    if as_json:
        write_json(
            *({"type": "finding", "profile": name, **asdict(one)} for one in found),
            {"type": "profile", "profile": name, "findings": len(found), **group.plain()},
        )
        return bool(found)
    say(f"{name}: {group.summary()}", *(f"  {_sentence(one)}" for one in found))
    if group.usable < FEWEST:
        say(f"  not judged: fewer than {FEWEST} runs ended by themselves")
    elif not found:
        say("  nothing wrong")
    return bool(found)


def _show(name: str, group: Measured, proposals: Sequence[Proposal]) -> None:
    say(f"{name}: {group.summary()}", errors=True)
    if group.usable < FEWEST:
        say(f"  nothing proposed: fewer than {FEWEST} runs ended by themselves", errors=True)
        return
    numbers = ("p50", "p95", "p99", "max", "proposed", "at most cut")
    rows = table("cap", *numbers, right=numbers)
    notes: list[str] = []
    for one in proposals:
        spread = one.measured
        figures = map(figure, (spread.p50, spread.p95, spread.p99, spread.maximum, one.cap))
        rows.add_row(one.dimension, *figures, f"{one.exceeds:.2%}")
        interval = f"{figure(one.low)} to {figure(one.high)}"
        notes.append(f"  {one.dimension}: 95 % interval {interval}")
    for dimension, known in group.figures.items():
        if len(known) < group.usable:
            only = f"it is known of {len(known):,} of the runs only"
            notes.append(f"  {dimension}: nothing proposed, {only}")
    if group.estimated:
        part = "in part or in whole"
        notes.append(f"  the tokens of {group.estimated:,} runs are estimates, {part}")
    say(rows, *notes, errors=True)


def _toml(name: str, group: Measured, proposals: Sequence[Proposal]) -> str:
    lines = [
        f"# {group.usable} runs measured{'' if group.labelled else ', unlabelled'}"
        f"{', provisional: measure more' if proposals[0].provisional else ''}.",
        f"[profiles.{_quoted(name)}]",
        f'version = "calibrated-{group.usable}"',
    ]
    for one in proposals:
        cap = group.whole_cap(one)
        basis = f"{one.factor:g} x {one.basis}" + (", and the reserve" if cap != one.cap else "")
        lines.append(f"{one.dimension} = {_in_toml(cap)}  # {basis}")
    if group.reserve is not None:
        given = group.reserve.model_dump(exclude_unset=True, exclude_none=True)
        kept = ", ".join(f"{name} = {_in_toml(value)}" for name, value in given.items())
        lines.append(f"finalize_reserve = {{ {kept} }}")
    return "\n".join((*lines, ""))


def _quoted(name: str) -> str:
    # TOML knows no pairs of surrogates, in which JSON escapes what is beyond 16 bits.
    text = json.dumps(printable(name), ensure_ascii=False)
    return "".join(char if char.isascii() else f"\\U{ord(char):08X}" for char in text)


def _in_toml(cap: Figure) -> str:
    return f'"{cap:f}"' if isinstance(cap, Decimal) else str(cap)


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
