"""The names that users build on. Adding one is a decision; removing one is a break."""

from __future__ import annotations

import inspect

import pydantic
import pytest

import budgetguard_core
from budgetguard_core import kit


def test_the_top_level_is_what_users_need_and_no_more():
    names = budgetguard_core.__all__
    assert names == sorted(set(names))
    assert len(names) <= 26


@pytest.mark.parametrize(
    "name",
    ["Budget", "LoopDetection", "Outcome", "Snapshot", "Trip", "Usage"],
)
def test_records_are_frozen_and_refuse_what_they_do_not_know(name):
    kind = getattr(budgetguard_core, name)
    assert issubclass(kind, pydantic.BaseModel)
    assert kind.model_config["frozen"] is True
    assert kind.model_config["extra"] == "forbid"


@pytest.mark.parametrize(
    ("function", "positional"),
    [
        (budgetguard_core.Guard, ["budget"]),
        (budgetguard_core.Guard.child, ["self", "budget"]),
        (budgetguard_core.Guard.restore, ["snapshot", "budget"]),
        (budgetguard_core.replay, ["events"]),
        (budgetguard_core.Guard.settle_model_call, ["self", "ticket", "usage"]),
        (budgetguard_core.Guard.settle_tool_call, ["self", "ticket", "result"]),
        (kit.end_run, ["guard"]),
    ],
)
def test_options_are_keyword_only(function, positional):
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    parameters = inspect.signature(function).parameters.values()
    assert [one.name for one in parameters if one.kind in kinds] == positional


def test_every_public_name_says_what_it_is():
    for name in budgetguard_core.__all__:
        thing = getattr(budgetguard_core, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), name
