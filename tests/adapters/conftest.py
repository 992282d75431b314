"""Tests of a framework are left out where it is not installed, and the report says so."""

from importlib.util import find_spec

FRAMEWORKS = {
    "agents": "test_openai_agents*.py",
    "langgraph": "test_langgraph*.py",
    "pydantic_ai": "test_pydantic_ai*.py",
    "strands": "test_strands*.py",
}
MISSING = [framework for framework in FRAMEWORKS if find_spec(framework) is None]

collect_ignore_glob = [FRAMEWORKS[framework] for framework in MISSING]


def pytest_report_header():
    return [f"tests of {framework}: left out, it is not installed" for framework in MISSING]
