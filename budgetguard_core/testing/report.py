"""The whole suite for one adapter, also outside this repository."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from budgetguard_core.testing.clauses import CLAUSES
from budgetguard_core.testing.driver import Driver
from budgetguard_core.testing.message import NonConformance
from budgetguard_core.testing.scenario import CallMode


@dataclass(frozen=True, slots=True)
class Case:
    """The result of one clause in one mode."""

    clause: int
    title: str
    mode: CallMode
    verdict: Literal["holds", "deviates", "lacks", "fails"]
    """`deviates`: it fails, as the driver declares. `lacks`: it was not asked, because the
    framework lacks what it needs, as the driver declares."""
    detail: str = ""
    """The reason that the driver declares, or how it fails."""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of every clause; printed as one line each."""

    driver: str
    cases: tuple[Case, ...]

    @property
    def failures(self) -> tuple[Case, ...]:
        """The cases that fail."""
        return tuple(case for case in self.cases if case.verdict == "fails")

    def __str__(self) -> str:
        lines = [
            f"{case.clause:2} {case.mode:8} {case.verdict:8} {case.title}"
            + (f": {case.detail}" if case.detail else "")
            for case in self.cases
        ]
        failed = len(self.failures)
        return "\n".join([f"{self.driver}: {failed} of {len(lines)} cases fail", *lines])


def check(driver: Driver, *, clauses: Collection[int] | None = None) -> Report:
    """Run the contract's clauses through an adapter's driver, in all of its modes.

    Args:
        driver: The way in.
        clauses: The numbers of the clauses to ask for; None: all.

    Returns:
        What became of each; `print` shows it.

    Raises:
        NonConformance: At least one fails; its text is the report.
    """
    cases: list[Case] = []
    for clause in CLAUSES:
        if clauses is not None and clause.number not in clauses:
            continue
        for mode in driver.modes:
            if mode not in clause.modes:
                continue
            if (reason := clause.lacking(driver)) is not None:
                cases.append(Case(clause.number, clause.title, mode, "lacks", reason))
                continue
            try:
                clause.judge(driver, mode)
            except Exception as error:
                detail = f"{type(error).__name__}: {error}"
                cases.append(Case(clause.number, clause.title, mode, "fails", detail))
                continue
            reason = driver.deviation(clause.number, mode)
            verdict: Literal["holds", "deviates"] = "holds" if reason is None else "deviates"
            cases.append(Case(clause.number, clause.title, mode, verdict, reason or ""))
    report = Report(driver.name, tuple(cases))
    if report.failures:
        raise NonConformance(str(report))
    return report
