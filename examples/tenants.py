"""Two agents of one tenant in several processes, under one daily ceiling that all of them share.

Uses the Redis of this machine where there is one, a SQLite file elsewhere. Runs offline.
"""

import logging
import multiprocessing
import os
import tempfile
import uuid
from decimal import Decimal
from typing import Any

from budgetguard_core import Budget, Guard
from budgetguard_core.decision import Stop
from budgetguard_core.kit import ModelCall, TokenUsage
from budgetguard_core.ledger import Ledger

PROCESSES = 4
CEILING = Decimal("0.60")


REDIS = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")


def redis_client() -> Any:
    """This machine's Redis, or None."""
    try:
        import redis
    except ImportError:
        return None
    client = redis.Redis.from_url(REDIS, socket_timeout=1, socket_connect_timeout=1)
    try:
        client.ping()
    except redis.RedisError:
        return None
    return client


def agent(number: int, url: str) -> tuple[int, str]:
    """Call a model until the budget or the tenant's money ends; here without a real model."""
    logging.getLogger("budgetguard").setLevel(logging.ERROR)
    with Ledger(url, daily_usd=CEILING) as ledger:
        guard = Guard(Budget(max_iterations=100), ledger=ledger, tenant=("acme", f"user-{number}"))
        calls = 0
        while True:
            decision = guard.admit_model_call(ModelCall(cost_usd=Decimal("0.02")))
            if isinstance(decision, Stop):
                return calls, decision.trip.reason
            guard.settle_model_call(decision, TokenUsage(900, 50), cost_usd=Decimal("0.01"))
            calls += 1


def main() -> None:
    logging.getLogger("budgetguard").setLevel(logging.ERROR)
    client, name = redis_client(), f"example-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:
        url = f"{REDIS}?name={name}" if client else f"sqlite:///{folder}/ledger.sqlite3"
        with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
            ended = pool.starmap(agent, [(number, url) for number in range(PROCESSES)])
        with Ledger(url) as ledger:
            day = ledger.usage("acme").daily
        if client:  # nothing is left behind by an example
            client.delete(*client.scan_iter(f"{{{name}}}:*"))
            client.close()
    print(f"{PROCESSES} processes made {sum(calls for calls, _ in ended)} calls")
    print("they ended by", *sorted({reason for _, reason in ended}))
    print(f"spent ${day.spent_usd} of ${CEILING}, reserved ${day.reserved_usd}")
    if day.spent_usd + day.reserved_usd > CEILING:
        raise SystemExit("the ceiling was passed")


if __name__ == "__main__":
    main()
