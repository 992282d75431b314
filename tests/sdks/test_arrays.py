"""Arguments and results that are arrays are compared in whole."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from budgetguard_core.canonical import canonical


class Frame:
    """A table: its cells are an array, and its repr shows a few of them."""

    def __init__(self, values):
        self._values = values

    def __array__(self, dtype=None, copy=None):
        del dtype, copy
        return np.array(self._values, dtype=object)

    def __repr__(self):
        return "a table"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(5000), np.concatenate([np.arange(4999), [0]])),
        (np.array([0.123456789012]), np.array([0.123456789013])),
        (np.array([1, 2]), np.array([[1, 2]])),
        (np.array([1, 0]), np.array([1, 0], dtype=bool)),
        (np.arange(10)[::2], np.arange(10)[1::2]),
        (np.array([1, 2] * 900, dtype=object), np.array([1, 3] * 900, dtype=object)),
        (
            np.arange(2000).astype("datetime64[s]"),
            np.flip(np.arange(2000)).astype("datetime64[s]"),
        ),
        (Frame([1, "a"]), Frame([1, "b"])),
    ],
)
def test_arrays_are_looked_at_in_whole(one, other):
    assert canonical(one) == canonical(copy.deepcopy(one))
    assert canonical(one) != canonical(other)
    assert len(canonical(one)) < 200_000
