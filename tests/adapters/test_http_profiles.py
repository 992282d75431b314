"""The clients of a block take a profile as every adapter's runs do."""

from __future__ import annotations

import httpx
import pytest

from budgetguard_core import Budget, ConfigurationError
from budgetguard_core.profiles import ProfileId
from budgetguard_http import BudgetTransport, bounded_clients
from provider_server import ProviderServer

FILE = "[profiles.small]\nversion = 7\nmax_iterations = 3\nloop_detection = 'none'\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BUDGETGUARD_PROFILE", raising=False)
    (tmp_path / "budgetguard.toml").write_text(FILE)


def ask(client, url):
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Go."}]}
    for _ in range(5):
        client.post(url + "/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize(
    ("given", "variable", "hits"),
    [
        ({"profile": "small"}, None, 3),
        ({"budget": Budget(max_iterations=2), "profile": "small"}, None, 2),
        ({}, "small", 3),
    ],
    ids=["named", "code wins", "variable"],
)
def test_a_block_is_bounded_by_its_profile(given, variable, hits, monkeypatch):
    if variable is not None:
        monkeypatch.setenv("BUDGETGUARD_PROFILE", variable)
    options = dict(given)
    budget = options.pop("budget", None)
    with ProviderServer() as server:
        with bounded_clients(budget, **options) as block, httpx.Client() as client:
            ask(client, server.url)
        assert server.hits == hits
    assert block.outcome.stop_reason == "max_iterations"
    assert block.outcome.profile == ProfileId(name="small", version="7")


def test_so_is_a_transport():
    with ProviderServer() as server:
        transport = BudgetTransport(profile="small")
        with httpx.Client(transport=transport) as client:
            ask(client, server.url)
        assert server.hits == 3
    assert transport.outcome.profile == ProfileId(name="small", version="7")


def test_a_profile_that_is_not_there_is_refused_at_once():
    with pytest.raises(ConfigurationError, match="smal"), bounded_clients(profile="smal"):
        pass
