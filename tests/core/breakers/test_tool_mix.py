"""The tool mix: chi-squared against its definition, and what is unusual."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetguard_core.breakers import ToolMix, ToolMixBaseline
from budgetguard_core.breakers.tool_mix import ToolMixAlarm, chi_squared, chi_squared_p_value
from budgetguard_core.errors import ConfigurationError

fixed = settings(derandomize=True, deadline=None, max_examples=150, database=None)

USUAL = {"search": 300, "read_file": 500, "write_file": 150, "run_tests": 50, "ask": 2}
BASELINE = ToolMixBaseline(runs=40, tools=USUAL)


# Of the distribution's upper tail, as tables have it.
@pytest.mark.parametrize(
    ("statistic", "freedom", "p_value"),
    [
        (0, 3, 1),
        (0.5, 1, 0.47950012218695337),
        (3.84, 1, 0.05004352124870519),
        (20, 5, 0.0012497305630313773),
        (100, 31, 3.4643702449416187e-09),
        (700, 301, 8.07210477478807e-34),
        (1400, 100, 4.4774296035996127e-228),
    ],
)
def test_the_p_value_is_that_of_the_distribution(statistic, freedom, p_value):
    assert chi_squared_p_value(statistic, freedom) == pytest.approx(p_value, rel=1e-9)


histograms = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 400), min_size=1)


@fixed
@given(run=histograms, baseline=histograms)
def test_the_statistic_is_that_of_the_pooled_categories(run, baseline):
    result = chi_squared(run, baseline)
    names = sorted({*run, *baseline}, key=lambda n: (run.get(n, 0) + baseline.get(n, 0), n))
    sides = (run, baseline)
    whole = sum(sum(side.values()) for side in sides)

    def expected(some, side):
        return sum(run.get(n, 0) + baseline.get(n, 0) for n in some) * sum(side.values()) / whole

    # Pooled by trying: the fewest of the rarest so that every category has five.
    for rare in range(len(names) + 1):
        groups = ([names[:rare]] if rare else []) + [[name] for name in names[rare:]]
        if all(expected(group, side) >= 5 for group in groups for side in sides):
            break
    if len(groups) < 2 or rare == len(names):
        assert result is None
        return
    statistic = sum(
        (sum(side.get(name, 0) for name in group) - expected(group, side)) ** 2
        / expected(group, side)
        for group in groups
        for side in sides
    )
    assert result[0] == pytest.approx(statistic, rel=1e-9, abs=1e-9)
    assert result[1] == len(groups) - 1


def told(calls, **changes):
    alarm = ToolMixAlarm(ToolMix(baseline=BASELINE, **changes))
    return [alarm.observe(tool) for tool in calls]


def usual(times):
    return (["search"] * 6 + ["read_file"] * 10 + ["write_file"] * 3 + ["run_tests"]) * times


def test_200_reads_without_a_search_are_told_once():
    answers = told(["read_file"] * 200)
    assert [number for number, answer in enumerate(answers, 1) if answer] == [20]
    answer = answers[19]
    assert answer["calls"] == 20
    assert answer["p_value"] < 0.001
    assert answer["detail"].startswith(
        "20 tool calls are unlike those of 40 recorded runs: chi-squ"
    )
    assert answer["detail"].endswith(
        "most unlike: rare tools 0 % instead of 50 %, read_file 100 % instead of 50 %"
    )


def test_a_usual_mix_is_not_told():
    assert not any(told(usual(100)))


def test_what_begins_later_is_seen_when_the_calls_have_doubled():
    answers = told(usual(1) + ["read_file"] * 200)
    assert [number for number, answer in enumerate(answers, 1) if answer] == [80]


def test_a_single_new_tool_is_rare_and_a_run_of_new_tools_is_unusual():
    assert not any(told([*usual(1)[:-1], "something_else"]))
    answer = told([f"invented_{number}" for number in range(20)])[-1]
    assert (
        "tools that are not in the baseline" in answer["detail"] or "rare tools" in answer["detail"]
    )


def test_names_without_end_take_no_memory():
    alarm = ToolMixAlarm(ToolMix(baseline=BASELINE))
    for number in range(10_000):
        alarm.observe(f"invented_{number}")
    assert len(alarm._counts) == len(USUAL)


def test_a_baseline_is_recorded_from_runs_and_kept_as_json():
    baseline = ToolMixBaseline.of([{"search": 2}, {}, {"search": 1, "read": 4}])
    assert (baseline.runs, baseline.tools) == (2, {"search": 3, "read": 4})
    text = baseline.model_dump_json()
    assert json.loads(text) == {
        "format_version": 1,
        "runs": 2,
        "tools": {"search": 3, "read": 4},
    }
    assert ToolMixBaseline.model_validate_json(text) == baseline
    assert pickle.loads(pickle.dumps(baseline)) == baseline
    assert hash(baseline) == hash(ToolMixBaseline.model_validate_json(text))
    with pytest.raises(TypeError, match="settings cannot be changed"):
        baseline.tools["read"] = 5


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ToolMixBaseline(runs=1, tools={}), "tools must map 1 to 1024 tool names"),
        (lambda: ToolMixBaseline(runs=1, tools={"a": 0}), "got {'a': 0}"),
        (lambda: ToolMixBaseline(runs=1, tools={"a" * 201: 1}), "got {'aaaa"),
        (lambda: ToolMixBaseline.of([{}]), "Record it with ToolMixBaseline.of(runs)."),
        (lambda: ToolMixBaseline(format_version=2, runs=1, tools={"a": 1}), "format_version must"),
        (lambda: ToolMix(baseline=BASELINE, alpha=1), "alpha must be a probability > 0 and <= 0.5"),
        (lambda: ToolMix(), "baseline must be given, got nothing. Pass baseline=..."),
        (lambda: BASELINE.model_copy(update={"runs": 0}), "runs must be a whole number >= 1"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(make, sentence):
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert sentence in str(caught.value)
