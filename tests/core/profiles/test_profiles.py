"""Files of profiles: what they may hold, where an error is, and who wins over whom."""

from __future__ import annotations

import codecs
import json
import tomllib
from decimal import Decimal
from importlib.resources import files

import jsonschema
import pytest

from budgetguard_core import Budget, ConfigurationError, FinalizeReserve, LoopDetection
from budgetguard_core.breakers import BulkheadConfig, RateLimit, VelocityLimits
from budgetguard_core.budget import DIMENSIONS
from budgetguard_core.profiles import Profiles, examples, find_file, load_profile
from budgetguard_core.profiles.profile import CAPS

FILE = """\
# Ours.
[profiles.research]
version = 3
max_iterations = 40
max_seconds = 100
max_cost_usd = "2.50"
tool_quotas = { search_web = 10 }

[profiles.research.overlays.production]
max_cost_usd = "5.00"

[overlays.production]
max_cost_usd = "4.00"
max_seconds = 60

[overlays.development]
max_seconds = "none"
"""
EXAMPLES = files("budgetguard_core.profiles") / "examples.toml"
SCHEMA = json.loads((files("budgetguard_core.profiles") / "budgetguard.schema.json").read_text())


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("PROFILE", "OVERLAY", "PROFILES"):
        monkeypatch.delenv(f"BUDGETGUARD_{name}", raising=False)
    for name in CAPS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="budgetguard.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_a_profile_is_a_named_versioned_budget(write):
    profile = Profiles(write(FILE)).get("research")
    assert (profile.name, profile.version, profile.id.overlay) == ("research", "3", None)
    assert profile.budget.caps() == {
        "max_iterations": 40,
        "max_seconds": 100.0,
        "max_cost_usd": Decimal("2.50"),
    }
    assert profile.budget.tool_quotas == {"search_web": 10}


def test_a_file_from_windows_is_read(write):
    path = write(FILE)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\n", b"\r\n"))
    assert Profiles(path).get("research").budget.caps()["max_iterations"] == 40


def test_an_overlay_changes_it_and_the_profiles_own_one_wins(write):
    profiles = Profiles(write(FILE))
    production = profiles.get("research", "production").budget
    assert production.max_cost_usd == Decimal("5.00")
    assert production.max_seconds == 60
    assert production.max_iterations == 40
    assert profiles.get("research", "development").budget.max_seconds is None


@pytest.mark.parametrize("case", range(16))
def test_code_wins_over_variables_over_the_overlay_over_the_profile(write, monkeypatch, case):
    """All sixteen ways in which the four can set a value, or leave it open."""
    in_code, in_variable, in_overlay, in_profile = (bool(case & bit) for bit in (8, 4, 2, 1))
    write(
        "[profiles.one]\nversion = 1\n"
        + ("max_iterations = 1\n" if in_profile else "")
        + "[overlays.production]\n"
        + ("max_iterations = 2\n" if in_overlay else "")
    )
    if in_variable:
        monkeypatch.setenv("BUDGETGUARD_MAX_ITERATIONS", "3")
    code = Budget(max_iterations=4) if in_code else Budget()
    budget = load_profile("one", overlay="production").under(code)
    given = ((in_code, 4), (in_variable, 3), (in_overlay, 2), (in_profile, 1))
    assert budget.max_iterations == next((value for is_given, value in given if is_given), None)


def test_none_in_code_lifts_a_cap(write):
    write(FILE)
    assert load_profile("research").under(Budget(max_seconds=None)).max_seconds is None


def test_what_code_brings_along_stays(write):
    def enough(guard):
        return None

    write(FILE)
    budget = load_profile("research").under(Budget(stop_when=(enough,), loop_detection=None))
    assert budget.stop_when == (enough,)
    assert budget.loop_detection is None
    assert budget.max_iterations == 40


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_iterations", "7", 7),
        ("max_seconds", "1.5", 1.5),
        ("max_cost_usd", "0.10", Decimal("0.10")),
        ("max_total_tokens", "none", None),
    ],
)
def test_a_variable_sets_a_cap(write, name, text, value):
    write(FILE)
    environment = {f"BUDGETGUARD_{name.upper()}": text}
    assert getattr(load_profile("research").under(Budget(), environment), name) == value


def test_every_dimension_has_its_variable():
    assert set(DIMENSIONS) < set(CAPS.values())


@pytest.mark.parametrize("text", ["0", "many", "-1", "1.5", "nan", "inf"])
def test_a_variable_that_is_no_cap_is_refused(write, text):
    write(FILE)
    with pytest.raises(ConfigurationError, match=r"^BUDGETGUARD_MAX_ITERATIONS must be .*'none'"):
        load_profile("research").under(Budget(), {"BUDGETGUARD_MAX_ITERATIONS": text})


WRONG = [
    ("[profiles.a]\nversion = 1\n\nmax_iterations = 0\n", 4, "profiles.a.max_iterations must be"),
    ("[profiles.a]\nversion = 1\nmax_turns = 9\n", 3, "profiles.a.max_turns is not a field"),
    ("[profiles.a]\n# no version\nmax_iterations = 2\n", 1, "profiles.a must have a version"),
    ("[profiles.a]\nversion = true\n", 1, "profiles.a must have a version"),
    ("[profiles.a]\nversion = 1\nmax_cost_usd = 'a lot'\n", 3, "profiles.a.max_cost_usd must be"),
    (
        "[profiles.a]\nversion = 1\n[profiles.b]\nversion = 1\n[profiles.b.tool_quotas]\nx = 0\n",
        5,
        "profiles.b.tool_quotas must be",
    ),
    (
        "[profiles.a]\nversion = 1\n[profiles.a.overlays.dev]\n\nmax_seconds = -1\n",
        5,
        "profiles.a.overlays.dev.max_seconds must be",
    ),
    ("[profiles.a]\nversion = 1\n[overlays.dev]\nmax_seconds=[\n1,\n2\n]\n", 4, "overlays.dev."),
    ("[profile.a]\nversion = 1\n", 1, "profile is not known"),
    ("profiles = 3\n", 1, "profiles must be a table"),
    ("[profiles]\na = 3\n", 2, "profiles.a must be a table"),
    ("[profiles.a]\nversion = 1\nprofile = { name = 'x', version = '1' }\n", 3, "cannot stand in"),
    ("[profiles.a]\nversion = 1\nstop_when = []\n", 3, "profiles.a.stop_when cannot stand in"),
]


@pytest.mark.parametrize(("text", "line", "said"), WRONG)
def test_what_makes_no_sense_is_said_with_file_and_line(write, text, line, said):
    path = write(text)
    with pytest.raises(ConfigurationError) as caught:
        Profiles(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert said in str(caught.value)


def test_the_line_is_found_in_a_pyproject_too(write):
    path = write(
        "[project]\nname = 'x'\n\n[tool.budgetguard.profiles.a]\nversion = 1\nmax_tool_calls = 0\n",
        "pyproject.toml",
    )
    with pytest.raises(ConfigurationError, match=r"toml:6: tool\.budgetguard\.profiles\.a\.max_t"):
        Profiles(path)


@pytest.mark.parametrize("name", ["budgetguard.toml", "missing.toml"])
def test_a_file_that_cannot_be_read_is_said(write, name):
    path = write("[profiles.a\n").parent / name
    with pytest.raises(ConfigurationError, match=f"^{path}: "):
        Profiles(path)


def test_the_nearest_file_is_taken(write, tmp_path, monkeypatch):
    parent = write("[tool.budgetguard.profiles.a]\nversion = 1\n", "pyproject.toml")
    below = tmp_path / "app"
    below.mkdir()
    (below / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert find_file(below) == parent
    (below / "budgetguard.toml").write_text("[profiles.a]\nversion = 2\n")
    assert find_file(below) == below / "budgetguard.toml"
    monkeypatch.setenv("BUDGETGUARD_PROFILES", str(parent))
    assert find_file(below) == parent


def test_an_unknown_name_says_which_are_known(write):
    path = write(FILE)
    with pytest.raises(ConfigurationError, match=r"did you mean 'research'\?"):
        load_profile("reserch")
    with pytest.raises(ConfigurationError, match="overlay 'staging' is not known"):
        Profiles(path).get("research", "staging")


def test_the_examples_say_that_nobody_has_measured():
    shipped = examples()
    assert shipped.names == ("quick_qa", "research", "coding_agent", "recovery_loop")
    for name in shipped.names:
        assert shipped.get(name).version.startswith("uncalibrated")
        assert not set(shipped.get(name).budget.uncapped())
        assert shipped.overlays(name) == ("development", "production", "cost_sensitive")
    assert load_profile("coding_agent").source == "an example, uncalibrated"


def test_a_file_of_ones_own_wins_over_the_examples(write):
    write(FILE)
    assert load_profile("research").version == "3"
    assert load_profile("quick_qa").version.startswith("uncalibrated")


def test_the_schema_has_every_field():
    definitions = SCHEMA["$defs"]
    in_code = {"profile", "stop_when"}
    assert definitions["overlay"]["properties"].keys() == Budget.model_fields.keys() - in_code
    of_a_profile = definitions["overlay"]["properties"].keys() | {"version", "overlays"}
    assert definitions["profile"]["properties"].keys() == of_a_profile
    for settings in (LoopDetection, FinalizeReserve, VelocityLimits, RateLimit, BulkheadConfig):
        assert definitions[settings.__name__]["properties"].keys() == settings.model_fields.keys()


@pytest.mark.parametrize("text", [FILE, EXAMPLES.read_text()])
def test_the_schema_takes_what_is_right(text):
    jsonschema.validate(tomllib.loads(text), SCHEMA)


# The schema tells an amount and a quota by their types only.
@pytest.mark.parametrize(
    "text", [text for text, *_ in WRONG if "a lot" not in text and "x = 0" not in text]
)
def test_the_schema_refuses_what_is_wrong(text):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"\xff\xfe# Ours.", "must be UTF-8"), (b"#" * (2**20 + 1), "must have at most")],
)
def test_a_file_that_is_no_text_or_too_long_is_refused(tmp_path, content, problem):
    path = tmp_path / "budgetguard.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=problem):
        Profiles(path)


def test_an_overlay_that_no_profile_has_is_refused(write):
    with pytest.raises(ConfigurationError, match="staging"):
        Profiles(write(FILE)).get("research", "staging")


def test_somebody_elses_broken_file_is_left_alone(write):
    write("[tool", "pyproject.toml")
    assert find_file() is None
