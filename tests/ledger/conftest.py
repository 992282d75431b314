from __future__ import annotations

import pytest

from ledger_servers import STORES, Place, need


@pytest.fixture(params=STORES)
def place(request, tmp_path):
    """An empty ledger in each of the stores."""
    need(request.param)
    found = Place(request.param, tmp_path)
    yield found
    found.remove()


@pytest.fixture
def store(place):
    made = place.store()
    yield made
    made.close()
