"""The HTTP adapter as users annotate it: type-checked by mypy and pyright, never run."""

from __future__ import annotations

import httpx
import httpx2
import openai

from budgetguard_core import Budget, Guard, Outcome, SqliteStore
from budgetguard_core.kit import Envelope, Run
from budgetguard_http import (
    AsyncBudgetTransport,
    BedrockHooks,
    BudgetTransport,
    bounded_clients,
    install,
    report_progress,
    uncovered_hosts,
    uninstall,
)

with bounded_clients(Budget(max_iterations=3), on_trip="raise", exempt=["mine-*"]) as block:
    guard: Guard = block.guard
ended: Outcome = block.outcome


async def on_a_loop() -> None:
    async with bounded_clients(Guard(Budget()), on_unknown="refuse", everywhere=True) as one:
        run: Run = one.run
        print(run)


transport = BudgetTransport(Budget(max_cost_usd=1), httpx.HTTPTransport(http2=True))
client = httpx.Client(transport=transport)
whole: Outcome | None = transport.outcome

asynchronous = AsyncBudgetTransport(Envelope(budget=Budget()), store=SqliteStore("runs.db"))
slow = httpx.AsyncClient(transport=asynchronous)
newer = httpx2.Client(transport=transport)
newer_slow = httpx2.AsyncClient(transport=asynchronous)
of_openai = openai.OpenAI(http_client=openai.DefaultHttpxClient(transport=transport))


class Bedrock:
    """Stands for boto3's client, which has no types of its own."""


with BedrockHooks(Budget(max_tool_calls=3), on_unknown="pass") as hooks:
    bedrock: Bedrock = hooks.register(Bedrock())

install(watch_connections=True)
uninstall()
counts: dict[str, int] = uncovered_hosts()
said: str = report_progress(["a"], "b", 3)

bounded_clients(Budget(), on_unknown="perhaps")  # type: ignore[arg-type]
BudgetTransport(Budget(), on_trip="never")  # type: ignore[arg-type]
bounded_clients(profile="research", everywhere=True)
