from __future__ import annotations

import gc
import os
from collections import Counter

import pytest

from budgetguard_core.frame import FRAME


@pytest.fixture(autouse=True)
def _frame():
    """A run that a test leaves behind would be around every test after it in this process."""
    before = FRAME.get()
    yield
    left = FRAME.get()
    FRAME.set(before)
    assert left is before


@pytest.fixture(autouse=True)
def _collected(request):
    """A client that nobody closed fails the test that made it, and none after it."""
    yield
    if request.path.name.startswith("test_http"):
        gc.collect()
        # What was imported meanwhile is not looked at again: that takes seconds.
        gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend():
    # The frameworks run on asyncio only.
    return "asyncio"


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    # A worker is told by the process that started it.
    if hasattr(config, "workerinput"):
        return
    options = config.option
    if config.args_source is config.ArgsSource.ARGS:
        # Files that are named run whole, in one process.
        if options.markexpr == "not slow and not benchmark":
            options.markexpr = "not benchmark"
        return
    # The suite runs in parallel. Coverage would have to know it earlier: by `-n` beside `--cov`.
    decided = options.collectonly or config.pluginmanager.hasplugin("_cov")
    if not decided and getattr(options, "numprocesses", 0) is None:
        options.numprocesses = "auto"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    # Of many cases of one test some run by default, as `sample` says; the others are slow.
    seen = Counter()
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % sample.args[0]:
                item.add_marker("slow")
            seen[test] += 1
    yield
    # In one more environment: each so many-th of what would run.
    every = int(os.environ.get("BUDGETGUARD_EVERY", "1"))
    kept = items[::every]
    if every > 1:
        config.hook.pytest_deselected(items=[*set(items).difference(kept)])
        items[:] = kept


def pytest_collection_finish():
    # A million objects of tests and frameworks: a full collection among them takes a second, which
    # is longer than the deadlines of some tests.
    gc.collect()
    gc.freeze()
