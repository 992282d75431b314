from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session")
def anyio_backend():
    # The frameworks run on asyncio only.
    return "asyncio"


def pytest_collection_finish():
    # A million objects of tests and frameworks: a full collection among them takes a second, which
    # is longer than the deadlines of some tests.
    gc.collect()
    gc.freeze()
