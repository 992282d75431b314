"""The capability table, made from what the drivers declare."""

from __future__ import annotations

from collections.abc import Sequence

from budgetguard_core.testing.clauses import CLAUSES
from budgetguard_core.testing.driver import Driver
from budgetguard_core.testing.scenario import CallMode

BEGIN = "<!-- capability table -->"
END = "<!-- end of capability table -->"


def capability_table(drivers: Sequence[Driver]) -> str:
    """Write the table as Markdown: a row for each clause that some way in lacks, a column for each.

    Above it stands how many clauses hold everywhere. `yes` means that the clause is tested in every
    mode of the way in; `-` that the framework has no such thing; any other cell names the modes for
    which it holds, or `no`, with the reason below the table. Below that stands what the drivers
    declare beyond the clauses.
    """
    reasons: list[str] = []
    lines = [
        "| clause | "
        + " | ".join(f"{d.adapter.removeprefix('budgetguard_')}: `{d.name}`" for d in drivers)
        + " |",
        "|---|" + "---|" * len(drivers),
        "| ways in | " + " | ".join(", ".join(driver.modes) for driver in drivers) + " |",
    ]
    differing = 0
    for clause in CLAUSES:
        cells: list[str] = []
        for driver in drivers:
            requested: list[CallMode] = [mode for mode in driver.modes if mode in clause.modes]
            lacking = clause.lacking(driver)
            why = {mode: lacking or driver.deviation(clause.number, mode) for mode in requested}
            held = [mode for mode, reason in why.items() if reason is None]
            notes: list[str] = []
            for reason in dict.fromkeys(reason for reason in why.values() if reason):
                if reason not in reasons:
                    reasons.append(reason)
                notes.append(f"[{reasons.index(reason) + 1}]")
            if not requested:
                cell = "-"
            elif not notes:
                cell = "yes"
            else:
                none = "no" if lacking is None else "-"
                cell = f"{', '.join(held) or none} {' '.join(notes)}"
            cells.append(cell)
        if set(cells) != {"yes"}:
            lines.append(f"| {clause.number}. {clause.title} | " + " | ".join(cells) + " |")
            differing += 1
    everywhere = len(CLAUSES) - differing
    lines = [
        f"{everywhere} of {len(CLAUSES)} clauses hold in every way in; these differ:",
        "",
        *lines,
    ]
    notes = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    if notes:
        lines += ["", *"  \n".join(notes).split("\n")]
    limits = {
        f"- {driver.adapter.removeprefix('budgetguard_')}: {limit}"
        for driver in drivers
        for limit in driver.limits.values()
    }
    if limits:
        lines += ["", "Beyond the clauses:", "", *sorted(limits)]
    return "\n".join(lines)
