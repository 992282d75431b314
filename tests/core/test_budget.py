"""The envelope: what it refuses, with which sentence, and that a copy is as strict."""

from __future__ import annotations

import copy
import pickle
import pydoc
import re
import tomllib
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetguard_core import Budget, ConfigurationError, Guard, LoopDetection
from budgetguard_core.budget import DIMENSIONS

NAN, INF = float("nan"), float("inf")
WHOLE = "must be a whole number >= 1, got"
SECONDS = "must be a number of seconds > 0 and <= 1000000000000, got"
DOLLARS = "must be an amount of US dollars > 0 (Decimal, int or float), got"


def refused(field, value):
    with pytest.raises(ConfigurationError) as caught:
        Budget(**{field: value})
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        *[("max_iterations", value, f"{WHOLE} {value!r}.") for value in (0, True, "5", 2.0, NAN)],
        ("max_total_tokens", 10**400, f"must be <= {10**18}, got more. Use None for no cap."),
        ("max_seconds", 0, f"{SECONDS} 0. Use None for no cap."),
        ("max_seconds", INF, f"{SECONDS} inf."),
        ("max_seconds", 10**400, f"{SECONDS} 1000"),
        ("max_seconds", True, f"{SECONDS} True."),
        ("max_cost_usd", -1, "must be finite and > 0, got -1. Use None for no cap."),
        ("max_cost_usd", Decimal("NaN"), "must be finite and > 0, got Decimal('NaN')."),
        ("max_cost_usd", Decimal("1E+999999999999"), "must be >= 1E-15 and < 1E+15"),
        ("max_cost_usd", "5", f"{DOLLARS} '5'."),
        ("warn_at", 1.0, "must be a share between 0 and 1, got 1.0. Use 0.8 for 80 %."),
        ("max_itertions", 3, "is not a field of Budget, got 3. Use max_iterations."),
        ("max_usd", 3, "is not a field of Budget, got 3. Use max_cost_usd."),
        ("colour", 3, "is not a field of Budget, got 3. Use one of: max_iterations, "),
        ("loop_detection", False, "must be a LoopDetection or its fields, got False. Use Loop"),
        ("velocity", 5, "must be a VelocityLimits or its fields, got 5."),
        ("on_unpriced", "free", "must be 'stop' or 'count_zero', got 'free'."),
        ("stop_when", min, "must be a list or a tuple, got <built-in function min>."),
        ("tool_quotas", ["a"], "must map tool names to whole numbers, got ['a']."),
        ("tool_quotas", {"": 1}, "must have tool names as keys, got ''."),
        ("tool_quotas", {"a": 0}, "must be whole numbers >= 1, got 0 for 'a'. Leave the tool out"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_way_out(field, value, sentence):
    assert refused(field, value).startswith(f"{field} {sentence}")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"max_iterations": 3},
            "max_iterations is a budget's, got 3. Use Guard(Budget(max_iterations=3)).",
        ),
        ({"max_usd": 0.5}, "max_usd is a budget's, got 0.5. Use Guard(Budget(max_cost_usd=0.5))."),
        ({"colour": 3}, "colour is not an option of Guard, got 3. Leave it out."),
    ],
)
def test_a_cap_beside_the_budget_is_answered_with_where_it_belongs(options, sentence):
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        Guard(**options)


def test_every_problem_has_its_sentence():
    with pytest.raises(ConfigurationError) as caught:
        Budget(max_iterations=0, max_seconds="x")
    assert str(caught.value).splitlines() == [
        "max_iterations must be a whole number >= 1, got 0. Use None for no cap.",
        f"max_seconds {SECONDS} 'x'. Use None for no cap.",
    ]
    assert len(refused("max_iterations", "9" * 10_000)) < 200


def test_what_is_inside_a_field_is_named():
    assert refused("tool_classes", {"a": 5}).endswith(", got 5. Leave it out for none.")
    assert refused("stop_when", ["submit"]).startswith("stop_when.0 must be a function")
    assert "nudge_after" in refused("loop_detection", {"nudge_after": 0})


def test_the_caps_that_are_set_and_those_that_are_not():
    assert Budget().caps() == {}
    assert Budget().uncapped() == DIMENSIONS
    assert Budget().loop_detection == LoopDetection()
    budget = Budget(max_iterations=3, max_cost_usd=0.3)
    assert budget.caps() == {"max_iterations": 3, "max_cost_usd": Decimal("0.3")}
    assert budget.uncapped() == (
        "max_model_calls",
        "max_tool_calls",
        "max_total_tokens",
        "max_seconds",
        "max_output_tokens_per_call",
    )
    bounded = Budget(max_total_tokens=1, max_output_tokens_per_call=1)
    assert "max_output_tokens_per_call" not in bounded.uncapped()


def test_a_float_means_the_dollars_it_shows():
    assert Budget(max_cost_usd=0.1).max_cost_usd == Decimal("0.1")
    assert type(Budget(max_seconds=2).max_seconds) is float


def test_a_budget_cannot_be_changed():
    quotas = {"search": 3}
    budget = Budget(max_iterations=3, tool_quotas=quotas)
    quotas["search"] = 99
    with pytest.raises(ValueError, match="frozen"):
        budget.max_iterations = 4
    for copied in (pickle.loads(pickle.dumps(budget)), copy.deepcopy(budget), budget.model_copy()):
        assert copied == budget
        assert copied.tool_quotas == {"search": 3}
        with pytest.raises(TypeError, match="settings cannot be changed"):
            copied.tool_quotas["search"] = 99


def test_a_copy_is_validated():
    budget = Budget(max_iterations=3, tool_quotas={"a": 1}, stop_when=[bool])
    copied = budget.model_copy(update={"max_iterations": 4})
    assert (copied.max_iterations, copied.tool_quotas, copied.stop_when) == (4, {"a": 1}, (bool,))
    with pytest.raises(ConfigurationError, match="max_iterations must be a whole number >= 1"):
        budget.model_copy(update={"max_iterations": 0})
    with pytest.raises(ConfigurationError, match="nonsense is not a field"):
        budget.model_copy(update={"nonsense": 1})


counts = st.none() | st.integers(1, 10**9)
budgets = st.builds(
    Budget,
    max_iterations=counts,
    max_total_tokens=counts,
    max_seconds=st.none() | st.floats(1e-9, 1e9),
    max_cost_usd=st.none() | st.decimals(Decimal("0.000001"), 10**6, places=6),
    tool_quotas=st.dictionaries(st.text(min_size=1), st.integers(1, 99), max_size=3),
    tool_classes=st.dictionaries(st.text(), st.text(), max_size=3),
    warn_at=st.floats(0.01, 0.99),
    loop_detection=st.none() | st.just(LoopDetection(exempt=["poll_*"])),
)


@given(budgets)
@settings(derandomize=True, max_examples=100, deadline=None, database=None)
def test_plain_data_and_back(budget):
    assert Budget.from_json(budget.to_json()) == budget


def test_conditions_are_code_and_stay_out_of_the_data():
    assert "stop_when" not in Budget(stop_when=[bool]).to_json()


@pytest.mark.parametrize("value", [True, -1.0, NAN, [1], "", " 1", "1_0", "1e5", "1E+9999999999"])
def test_plain_data_refuses_what_is_no_amount(value):
    for data in ({"max_cost_usd": value}, {"velocity": {"max_cost_usd_per_minute": value}}):
        with pytest.raises(ConfigurationError, match="must be"):
            Budget.from_json(data)


@pytest.mark.parametrize("data", ['{"max_iterations": 5}', None, {"velocity": 3}])
def test_plain_data_of_another_shape_is_refused(data):
    with pytest.raises(ConfigurationError, match=r"must be a (mapping|VelocityLimits)"):
        Budget.from_json(data)


def test_a_table_of_toml_is_a_budget():
    text = """
        max_cost_usd = 0.30
        max_seconds = 90
        loop_detection = { exempt = ["poll_*"] }
        [tool_quotas]
        search = 3
        [velocity]
        max_cost_usd_per_minute = "0.05"
    """
    budget = Budget.from_json(tomllib.loads(text))
    assert budget.max_cost_usd == Decimal("0.3")
    assert budget.velocity.max_cost_usd_per_minute == Decimal("0.05")
    assert budget.tool_quotas == {"search": 3}
    assert budget.max_seconds == 90


def test_help_describes_every_field():
    text = pydoc.plain(pydoc.render_doc(Budget))
    assert [name for name in Budget.model_fields if f"{name}: " not in text] == []
    assert "model_dump" not in text
    assert " object at 0x" not in pydoc.plain(pydoc.render_doc(Guard.extend))
