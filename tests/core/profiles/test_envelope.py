"""A profile in the envelope that every adapter takes, and in every record."""

from __future__ import annotations

import pytest

from budgetguard_core import Budget, ConfigurationError, Guard
from budgetguard_core.events import IncidentRecorded, RunEnded, RunStarted
from budgetguard_core.kit import Envelope, ModelCall, Stop, TokenUsage, envelope_of
from budgetguard_core.profiles import ProfileId, load_profile
from budgetguard_core.profiles.profile import CAPS
from budgetguard_core.records import line_of

FILE = """\
[profiles.small]
version = 7
max_iterations = 2

[profiles.large]
version = 8
max_iterations = 5

[overlays.production]
max_tool_calls = 9
"""
SMALL = ProfileId(name="small", version="7")


@pytest.fixture(autouse=True)
def _file(tmp_path, monkeypatch):
    for name in ("BUDGETGUARD_PROFILE", "BUDGETGUARD_OVERLAY", "BUDGETGUARD_PROFILES", *CAPS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "budgetguard.toml").write_text(FILE)


def ended(envelope):
    """Run until the envelope stops it: how often the model was called, and the outcome."""
    run = envelope.open()
    calls = 0
    while not isinstance(call := run.model_call(ModelCall()), Stop):
        calls += 1
        run.answered(call, TokenUsage(input_tokens=1, output_tokens=1))
    return calls, run.end()


def test_the_profile_bounds_the_run():
    calls, outcome = ended(envelope_of(None, profile="small"))
    assert calls == 2
    assert outcome.profile == SMALL


def test_it_is_in_every_record():
    events = []
    _, outcome = ended(envelope_of(None, profile="small", sinks=[events.append]))
    started, incident, end = (
        next(one for one in events if isinstance(one, kind))
        for kind in (RunStarted, IncidentRecorded, RunEnded)
    )
    assert Budget.from_json(started.budget).profile == SMALL
    assert incident.profile == end.profile == outcome.profile == SMALL
    assert '"profile":{"name":"small","version":"7","overlay":null}' in line_of(end)


def test_it_is_in_the_snapshot_and_comes_back():
    run = envelope_of(None, profile="small").open()
    snapshot = run.guard.snapshot()
    assert Guard.restore(snapshot).budget.profile == SMALL


def test_a_sub_agent_is_in_the_profile_of_its_parent():
    parent = envelope_of(None, profile="small").open()
    with parent.entered():
        child = envelope_of(Budget(max_iterations=1)).open()
    assert child.guard.budget.profile == SMALL
    assert child.guard.budget.max_iterations == 1


def test_code_wins():
    calls, outcome = ended(envelope_of(Budget(max_iterations=1), profile="small"))
    assert calls == 1
    assert outcome.profile == SMALL


def test_without_budget_and_profile_the_variable_names_one(monkeypatch):
    monkeypatch.setenv("BUDGETGUARD_PROFILE", "large")
    assert ended(envelope_of(None, default=Budget(max_iterations=1)))[0] == 5
    # A program that says what it wants is not changed from outside.
    assert ended(envelope_of(Budget(max_iterations=3)))[0] == 3
    assert ended(envelope_of(None, profile="small"))[0] == 2


def test_without_anything_the_adapters_own_default_holds():
    assert ended(envelope_of(None, default=Budget(max_iterations=1)))[0] == 1


def test_the_overlay_is_named_by_a_variable(monkeypatch):
    monkeypatch.setenv("BUDGETGUARD_OVERLAY", "production")
    budget = envelope_of(None, profile="small").open().guard.budget
    assert budget.max_tool_calls == 9
    assert budget.profile is not None
    assert budget.profile.overlay == "production"


def test_a_profile_object_is_taken_as_it_is():
    envelope = Envelope(profile=load_profile("small", overlay="production"))
    assert envelope.open().guard.budget.max_tool_calls == 9


def test_a_selector_chooses_by_input_and_history():
    def chosen(task):
        assert task.input_tokens is not None
        if any(one.status == "terminated" for one in task.history):
            return "large"
        return "small" if task.input_tokens < 100 else load_profile("large")

    envelope = envelope_of(None, profile=chosen)
    assert envelope.open(given="Hello.").guard.budget.profile == SMALL
    assert envelope.open(given="word " * 500).guard.budget.max_iterations == 5
    run = envelope.open(given="Hello.")
    while not isinstance(run.model_call(ModelCall()), Stop):
        pass
    run.end()
    assert envelope.open(given="Hello.").guard.budget.max_iterations == 5


def test_a_selector_that_fails_opens_no_run():
    def chosen(task):
        raise KeyError("task_class")

    with pytest.raises(ConfigurationError, match="profile must choose one for the task"):
        envelope_of(None, profile=chosen).open()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"profile": "no_such"}, "'no_such' is not known"),
        ({"profile": ""}, "must be the name"),
        ({"profile": 3}, "must be a name, a Profile or a function"),
    ],
)
def test_what_is_no_profile_is_refused_where_it_is_given(options, said):
    with pytest.raises(ConfigurationError, match=said):
        envelope_of(None, **options)


def test_a_guard_has_its_own():
    with pytest.raises(ConfigurationError, match="profile must be left out with a Guard"):
        envelope_of(Guard(), profile="small")


def test_nothing_at_all_is_still_refused():
    with pytest.raises(ConfigurationError, match="budget must be"):
        envelope_of(None)
