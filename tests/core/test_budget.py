"""The envelope: what it refuses, with which sentence, and that a copy is as strict."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
import re
import sys
import tomllib
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetguard_core import Budget, ConfigurationError, Guard, LoopDetection
from budgetguard_core.budget import DIMENSIONS

MOST = 10**12
NAN, INF = float("nan"), float("inf")
WHOLE = (
    "max_iterations",
    "max_model_calls",
    "max_tool_calls",
    "max_total_tokens",
    "max_output_tokens_per_call",
)
FIELDS = ", ".join(Budget.model_fields)


def refused(field, value):
    with pytest.raises(ConfigurationError) as caught:
        Budget(**{field: value})
    return str(caught.value)


@pytest.mark.parametrize("field", WHOLE)
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (0, "must be a whole number >= 1, got 0. Use None for no cap."),
        (-1, "must be a whole number >= 1, got -1. Use None for no cap."),
        (10**18 + 1, f"must be <= {10**18}, got more. Use None for no cap."),
        (10**400, f"must be <= {10**18}, got more. Use None for no cap."),
        (True, "must be a whole number >= 1, got True. Use None for no cap."),
        (False, "must be a whole number >= 1, got False. Use None for no cap."),
        ("5", "must be a whole number >= 1, got '5'. Use None for no cap."),
        (2.5, "must be a whole number >= 1, got 2.5. Use None for no cap."),
        (2.0, "must be a whole number >= 1, got 2.0. Use None for no cap."),
        (NAN, "must be a whole number >= 1, got nan. Use None for no cap."),
        (INF, "must be a whole number >= 1, got inf. Use None for no cap."),
        (Decimal(3), "must be a whole number >= 1, got Decimal('3'). Use None for no cap."),
    ],
)
def test_a_count_is_a_whole_number_from_1(field, value, sentence):
    assert refused(field, value) == f"{field} {sentence}"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (0, f"must be a number of seconds > 0 and <= {MOST}, got 0. Use None for no cap."),
        (
            -0.5,
            f"must be a number of seconds > 0 and <= {MOST}, got -0.5. Use None for no cap.",
        ),
        (
            NAN,
            f"must be a number of seconds > 0 and <= {MOST}, got nan. Use None for no cap.",
        ),
        (
            INF,
            f"must be a number of seconds > 0 and <= {MOST}, got inf. Use None for no cap.",
        ),
        (
            1e300,
            f"must be a number of seconds > 0 and <= {MOST}, got 1e+300. Use None for no cap.",
        ),
        (
            True,
            f"must be a number of seconds > 0 and <= {MOST}, got True. Use None for no cap.",
        ),
        (
            "5",
            f"must be a number of seconds > 0 and <= {MOST}, got '5'. Use None for no cap.",
        ),
        (
            Decimal(5),
            f"must be a number of seconds > 0 and <= {MOST}, got Decimal('5'). "
            "Use None for no cap.",
        ),
    ],
)
def test_seconds_are_finite_and_positive(value, sentence):
    assert refused("max_seconds", value) == f"max_seconds {sentence}"


def test_a_number_too_long_for_a_float_is_one_sentence_too():
    sentence = refused("max_seconds", 10**400)
    assert sentence.startswith(
        f"max_seconds must be a number of seconds > 0 and <= {MOST}, got 1000"
    )
    assert len(sentence) < 200


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (0, "must be finite and > 0, got 0. Use None for no cap."),
        (-1, "must be finite and > 0, got -1. Use None for no cap."),
        (NAN, "must be finite and > 0, got nan. Use None for no cap."),
        (INF, "must be finite and > 0, got inf. Use None for no cap."),
        (Decimal("NaN"), "must be finite and > 0, got Decimal('NaN'). Use None for no cap."),
        (
            Decimal("-Infinity"),
            "must be finite and > 0, got Decimal('-Infinity'). Use None for no cap.",
        ),
        (
            True,
            "must be an amount of US dollars > 0 (Decimal, int or float), got True. "
            "Use None for no cap.",
        ),
        (
            "5",
            "must be an amount of US dollars > 0 (Decimal, int or float), got '5'. "
            "Use None for no cap.",
        ),
    ],
)
def test_dollars_are_finite_and_positive(value, sentence):
    assert refused("max_cost_usd", value) == f"max_cost_usd {sentence}"


@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, -0.1, NAN, INF, True, "0.8", None])
def test_warn_at_is_a_share(value):
    assert refused("warn_at", value) == (
        f"warn_at must be a share between 0 and 1, got {value!r}. Use 0.8 for 80 %."
    )


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("max_itertions", "max_iterations"),
        ("max_usd", "max_cost_usd"),
        ("max_tokens", "max_total_tokens"),
        ("timeout", "max_seconds"),
        ("max_turns", "max_iterations"),
        ("max_steps", "max_iterations"),
        ("tool_quota", "tool_quotas"),
    ],
)
def test_an_unknown_field_is_answered_with_the_nearest(name, field):
    assert refused(name, 3) == f"{name} is not a field of Budget, got 3. Use {field}."


def test_a_field_that_is_like_no_other_is_answered_with_all():
    assert refused("colour", 3) == (
        f"colour is not a field of Budget, got 3. Use one of: {FIELDS}."
    )


def test_help_describes_every_field_and_says_what_is_on():
    described = re.findall(r"^    ([a-z_]+): [A-Z]", inspect.getdoc(Budget), re.MULTILINE)
    assert described == list(Budget.model_fields)
    assert "repetition and oscillation are found. On;" in Budget.__doc__


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
        f"max_seconds must be a number of seconds > 0 and <= {MOST}, got 'x'. Use None for no cap.",
    ]


def test_a_long_value_is_cut():
    assert len(refused("max_iterations", "9" * 10_000)) < 200


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("loop_detection", False, "must be a LoopDetection or its fields, got False."),
        ("progress", True, "must be a ProgressReports or its fields, got True."),
        ("tool_classes", ["a"], "must be a mapping of names, got ['a']."),
        ("on_unpriced", "free", "must be 'stop' or 'count_zero', got 'free'."),
        ("stop_when", min, "must be a list or a tuple, got <built-in function min>."),
    ],
)
def test_a_field_of_another_type_is_refused_with_a_way_out(field, value, sentence):
    report = refused(field, value)
    assert report.startswith(f"{field} {sentence} ")
    assert len(report) > len(f"{field} {sentence} ")


def test_what_stops_a_run_is_a_function():
    with pytest.raises(ConfigurationError, match=r"stop_when\.0 must be a function, got"):
        Budget(stop_when=["submit"])


@pytest.mark.parametrize("data", ['{"max_iterations": 5}', ["max_iterations"], None])
def test_plain_data_is_a_mapping(data):
    with pytest.raises(ConfigurationError, match="a budget's data must be a mapping, got"):
        Budget.from_json(data)


@pytest.mark.parametrize(
    ("quotas", "sentence"),
    [
        (["a"], "must map tool names to whole numbers, got ['a']."),
        ({"": 1}, "must have tool names as keys, got ''."),
        ({5: 1}, "must have tool names as keys, got 5."),
        (
            {"a": 0},
            "must be whole numbers >= 1, got 0 for 'a'. Leave the tool out for no quota.",
        ),
        (
            {"a": 10**5000},
            "must be whole numbers >= 1, got int that cannot be written for 'a'. "
            "Leave the tool out for no quota.",
        ),
        (
            {"a": True},
            "must be whole numbers >= 1, got True for 'a'. Leave the tool out for no quota.",
        ),
        (
            {"a": "5"},
            "must be whole numbers >= 1, got '5' for 'a'. Leave the tool out for no quota.",
        ),
    ],
)
def test_quotas_map_names_to_counts(quotas, sentence):
    assert refused("tool_quotas", quotas) == f"tool_quotas {sentence}"


def test_what_pydantic_finds_names_the_field_and_the_value():
    assert refused("tool_classes", {"a": 5}).startswith("tool_classes.a ")
    assert refused("tool_classes", {"a": 5}).endswith(", got 5. Leave it out for none.")
    assert ", got 'ignore'. " in refused("on_unpriced", "ignore")
    assert refused("stop_when", [5]).startswith("stop_when.0 ")
    assert "nudge_after" in refused("loop_detection", {"nudge_after": 0})


def test_nothing_is_capped_unless_asked_for():
    budget = Budget()
    assert budget.caps() == {}
    assert budget.uncapped() == DIMENSIONS
    assert budget.loop_detection == LoopDetection()


def test_the_caps_that_are_set_and_those_that_are_not():
    budget = Budget(max_iterations=3, max_cost_usd=0.3)
    assert budget.caps() == {"max_iterations": 3, "max_cost_usd": Decimal("0.3")}
    assert budget.uncapped() == (
        "max_model_calls",
        "max_tool_calls",
        "max_total_tokens",
        "max_seconds",
        "max_output_tokens_per_call",
    )
    for cap in ({"max_total_tokens": 1}, {"max_cost_usd": 1}):
        assert "max_output_tokens_per_call" in Budget(**cap).uncapped()
        assert (
            "max_output_tokens_per_call"
            not in Budget(**cap, max_output_tokens_per_call=1).uncapped()
        )


def test_a_float_means_the_dollars_it_shows():
    assert Budget(max_cost_usd=0.1).max_cost_usd == Decimal("0.1")
    assert Budget(max_cost_usd=2).max_cost_usd == Decimal(2)
    assert type(Budget(max_seconds=2).max_seconds) is float


def test_a_budget_cannot_be_changed():
    budget = Budget(max_iterations=3)
    with pytest.raises(ValueError, match="frozen"):
        budget.max_iterations = 4


def test_the_callers_quotas_are_copied():
    quotas = {"a": 1}
    budget = Budget(tool_quotas=quotas)
    quotas["a"] = 100
    assert budget.tool_quotas == {"a": 1}


def test_a_copy_is_validated():
    budget = Budget(max_iterations=3, tool_quotas={"a": 1}, stop_when=[bool])
    copy = budget.model_copy(update={"max_iterations": 4})
    assert (copy.max_iterations, copy.tool_quotas, copy.stop_when) == (4, {"a": 1}, (bool,))
    assert budget.max_iterations == 3
    assert budget.model_copy() == budget == budget.model_copy(deep=True)
    with pytest.raises(
        ConfigurationError, match="max_iterations must be a whole number >= 1, got 0"
    ):
        budget.model_copy(update={"max_iterations": 0})
    with pytest.raises(ConfigurationError, match="nonsense is not a field"):
        budget.model_copy(update={"nonsense": 1})


counts = st.none() | st.integers(1, 10**9)
budgets = st.builds(
    Budget,
    max_iterations=counts,
    max_model_calls=counts,
    max_tool_calls=counts,
    max_total_tokens=counts,
    max_seconds=st.none() | st.floats(1e-9, 1e9),
    max_cost_usd=st.none() | st.decimals(Decimal("0.000001"), 10**6, places=6),
    tool_quotas=st.dictionaries(st.text(min_size=1), st.integers(1, 99), max_size=3),
    tool_classes=st.dictionaries(st.text(), st.text(), max_size=3),
    max_output_tokens_per_call=counts,
    warn_at=st.floats(0.01, 0.99),
    on_unpriced=st.sampled_from(["stop", "count_zero"]),
    loop_detection=st.none() | st.just(LoopDetection(exempt=["poll_*"])),
)


@given(budgets)
@settings(derandomize=True, max_examples=100, deadline=None, database=None)
def test_plain_data_and_back(budget):
    assert Budget.from_json(budget.to_json()) == budget


def test_conditions_are_code_and_stay_out_of_the_data():
    assert "stop_when" not in Budget(stop_when=[bool]).to_json()


@pytest.mark.parametrize("text", ["1E+999999999999", "1E-999999999999", "1E+15", "9E-16"])
def test_dollars_that_would_take_all_memory_are_refused_at_once(text):
    with pytest.raises(ConfigurationError, match=r"max_cost_usd must be >= 1E-15 and < 1E\+15"):
        Budget(max_cost_usd=Decimal(text))


@pytest.mark.parametrize("text", ["1E-15", "999999999999999.99"])
def test_dollars_at_the_edge_are_taken(text):
    assert Budget(max_cost_usd=Decimal(text)).max_cost_usd == Decimal(text)


def test_quotas_and_classes_cannot_be_changed_in_place():
    quotas = {"search": 3}
    budget = Budget(tool_quotas=quotas, tool_classes={"delete_*": "mutating"})
    quotas["search"] = 99
    for change in (
        lambda: budget.tool_quotas.__setitem__("search", 99),
        lambda: budget.tool_quotas.update(search=99),
        lambda: budget.tool_classes.clear(),
    ):
        with pytest.raises(TypeError, match="settings cannot be changed"):
            change()
    for copied in (pickle.loads(pickle.dumps(budget)), copy.deepcopy(budget), budget.model_copy()):
        assert copied == budget
        assert copied.tool_quotas == {"search": 3}
        with pytest.raises(TypeError):
            copied.tool_quotas["search"] = 99


@pytest.mark.parametrize(
    ("value", "amount"),
    [("0.50", "0.50"), (0.1, "0.1"), (3, "3"), ("1E-7", "1E-7"), ("1E+2", "1E+2"), (None, None)],
)
def test_plain_data_holds_the_amounts_that_the_constructor_takes_exactly(value, amount):
    expected = None if amount is None else Decimal(amount)
    assert Budget.from_json({"max_cost_usd": value}).max_cost_usd == expected
    velocity = Budget.from_json({"velocity": {"max_cost_usd_per_minute": value}}).velocity
    assert velocity.max_cost_usd_per_minute == expected


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        0,
        -1.0,
        NAN,
        [1],
        "",
        " 1",
        "1_0",
        "-1",
        "NaN",
        "1e5",
        "\u0661",
        "1E+9999999999",
    ],
)
def test_plain_data_refuses_what_is_no_amount(value):
    for data in ({"max_cost_usd": value}, {"velocity": {"max_cost_usd_per_minute": value}}):
        with pytest.raises(ConfigurationError, match="must be"):
            Budget.from_json(data)


@pytest.mark.parametrize("field", [*WHOLE, "max_seconds", "warn_at"])
@pytest.mark.parametrize("value", ["5", True, "0.5"])
def test_plain_data_refuses_what_the_constructor_refuses(field, value):
    with pytest.raises(ConfigurationError) as caught:
        Budget.from_json({field: value})
    assert str(caught.value) == refused(field, value)


def test_plain_data_of_another_shape_is_refused():
    with pytest.raises(ConfigurationError, match="velocity"):
        Budget.from_json({"velocity": 3})


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


def test_help_is_two_pages_that_describe_every_field():
    text = pydoc.plain(pydoc.render_doc(Budget))
    # From Python 3.13 on the signature, which is there twice, has a line for each field.
    signatures = 2 * (len(Budget.model_fields) + 2) if sys.version_info >= (3, 13) else 0
    assert len(text.splitlines()) <= 121 + signatures
    assert [name for name in Budget.model_fields if f"{name}: " not in text] == []
    assert "model_dump" not in text


def test_the_help_of_extend_is_the_same_on_every_day():
    text = pydoc.plain(pydoc.render_doc(Guard.extend))
    assert "`max_iterations`" in text
    assert " object at 0x" not in text


def test_the_signature_has_every_field_and_its_default():
    signature = inspect.signature(Budget)
    shown = {name: one.default for name, one in signature.parameters.items() if name != "unknown"}
    fields = {name: getattr(Budget(), name) for name in Budget.model_fields}
    assert {name: value for name, value in shown.items() if value is not ...} == {
        name: value for name, value in fields.items() if shown[name] is not ...
    }
    assert list(shown) == list(fields)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (
            "loop_detection",
            False,
            "loop_detection must be a LoopDetection or its fields, got False. "
            "Use LoopDetection(...); None goes without it.",
        ),
        ("velocity", 5, "velocity must be a VelocityLimits or its fields, got 5."),
        (
            "rate_limits",
            {"a": 3},
            "rate_limits.a must be a RateLimit or its fields, got 3. Use RateLimit(...).",
        ),
    ],
)
def test_a_value_in_place_of_settings_is_told_what_to_write(field, value, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        Budget(**{field: value})
