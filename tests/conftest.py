from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend():
    # The frameworks run on asyncio only.
    return "asyncio"
