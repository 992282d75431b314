"""A batch goes on against a locked account; no refusal of the provider costs; claude-code #91962.

What a cap stops is no text of a model's: the batch has to be able to tell.
"""

from __future__ import annotations

import asyncio
from decimal import Decimal

import openai
import pytest

from budgetguard_core import Budget, BudgetExceeded, Guard
from budgetguard_http import bounded_clients
from provider_server import ProviderServer

ITEMS, GOOD = 34, 5
# 100 tokens in, 20 of them cached, and 10 out.
COST = (80 * Decimal("2.5") + 20 * Decimal("1.25") + 10 * 10) / 1_000_000


def batch(server, mode, **options):
    """Send each item, note what fails and go on, as the report's script does; list what came."""

    def asked(number):
        words = [{"role": "user", "content": f"item {number}"}]
        return {"model": "gpt-4o", "messages": words, "max_tokens": 100}

    given = {"api_key": "key", "base_url": server.url + "/v1", "max_retries": 0}
    found = []
    if mode == "sync":
        with openai.OpenAI(**given) as client:
            for number in range(ITEMS):
                try:
                    found.append(client.chat.completions.create(**asked(number)))
                except openai.APIStatusError as error:
                    found.append(error)
        return found

    async def go():
        async with openai.AsyncOpenAI(**given) as client:
            for number in range(ITEMS):
                try:
                    found.append(await client.chat.completions.create(**asked(number)))
                except openai.APIStatusError as error:
                    found.append(error)

    asyncio.run(go())
    return found


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("status", [402, 403, 429])
def test_a_refusal_costs_nothing_and_counts_as_a_call(status, mode):
    with ProviderServer([*["ok"] * GOOD, *[status] * ITEMS]) as server:
        guard = Guard(Budget(max_cost_usd=0.1))
        with bounded_clients(guard):
            found = batch(server, mode)
        assert server.hits == ITEMS
        assert sum(isinstance(one, openai.APIStatusError) for one in found) == ITEMS - GOOD
        assert guard.usage.cost_usd == GOOD * COST
        assert (guard.usage.model_calls, guard.trip) == (ITEMS, None)

    with ProviderServer([*["ok"] * GOOD, *[status] * ITEMS]) as server:
        with bounded_clients(Budget(max_model_calls=12)):
            batch(server, mode)
        assert server.hits == 12


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_cap_stopped_is_marked_or_raised(mode):
    with ProviderServer() as server:
        with bounded_clients(Budget(max_model_calls=3)):
            found = batch(server, mode)
        assert server.hits == 3
        marked = [bool((one.model_extra or {}).get("budgetguard")) for one in found]
        assert marked == [False] * 3 + [True] * (ITEMS - 3)

    with ProviderServer() as server:
        with (
            pytest.raises(BudgetExceeded),
            bounded_clients(Budget(max_model_calls=3), on_trip="raise"),
        ):
            batch(server, mode)
        assert server.hits == 3
