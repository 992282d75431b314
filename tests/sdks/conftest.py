"""Tests against the SDKs of the dependency group `sdks`: in the second part of the suite."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MISSING = [name for name in ("cohere", "grpc", "litellm", "mistralai") if find_spec(name) is None]

collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header():
    return [f"tests/sdks: left out, {name} is not installed" for name in MISSING[:1]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
