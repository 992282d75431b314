"""The suite through an adapter of the kit for a framework that is not ours."""

from __future__ import annotations

import pytest

import layout
from budgetguard_core.testing import CLAUSES, check
from conformance.drivers import marks
from conformance.toy_driver import Toy

CASES = [
    pytest.param(
        clause, mode, id=f"clause_{clause.number:02}-{mode}", marks=marks(Toy(), clause.number)
    )
    for clause in CLAUSES
    for mode in Toy.modes
    if clause.is_requested(Toy(), mode)
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("clause", "mode"), CASES)
def test_clause(clause, mode):
    clause.judge(Toy(), mode)


def test_the_adapter_is_short():
    lines = (layout.ROOT / "tests/conformance/toy_adapter.py").read_text().splitlines()
    assert len(lines) <= 150


def test_the_report_of_an_adapter_that_keeps_the_contract():
    report = check(Toy(), clauses={1, 32})
    assert [(case.clause, case.mode, case.verdict) for case in report.cases] == [
        (1, "sync", "holds"),
        (1, "async", "holds"),
        (1, "streamed", "holds"),
        *((32, mode, "lacks") for mode in ("sync", "async", "streamed")),
    ]
    assert report.failures == ()
    first, *rest = str(report).splitlines()
    assert first == "Bounded: 0 of 6 cases fail"
    assert rest[0] == " 1 sync     holds    within the caps nothing changes"
    assert rest[-1].endswith(": a run ends with the first reply without a call")
