"""What a reader can take in: no long file in the engine, no guard with a long list of members."""

from __future__ import annotations

import pytest

import layout
from budgetguard_core import Guard

FILES = sorted((layout.ROOT / "budgetguard_core").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_of_the_engine_is_longer_than_600_lines(file):
    assert len(file.read_bytes().splitlines()) <= 600


def test_a_guard_has_at_most_45_public_members():
    assert len([name for name in dir(Guard) if not name.startswith("_")]) <= 45
