"""The Analyzer and the Verifier: two agents that ask each other for one more pass, for ever.

Nothing fails and no cap is near, so nothing but loop detection ends it. It is on by default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from budgetguard_core import Budget
from budgetguard_loop import bounded, run_bounded

PRICES = {"prompt_tokens": 1200, "completion_tokens": 60}


def agent(name: str, says: str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Stand in for an agent with a model of its own, which answers all the same."""

    def model(messages: list[dict[str, Any]]) -> dict[str, Any]:
        told = [m for m in messages if "circle" in str(m.get("content"))]
        print(f"  {name}: {says}" + ("  (was told that it goes in a circle)" if told else ""))
        return {"choices": [{"message": {"role": "assistant", "content": says}}], "usage": PRICES}

    return model


def main() -> None:
    logging.getLogger("budgetguard").setLevel(logging.ERROR)
    analyzer = agent("analyzer", "Growth was 4 %. Please verify the analysis.")
    verifier = agent("verifier", "The analysis needs one more pass. Please expand it.")
    text = "Analyze the market."
    # What the real one cost until somebody looked: 47,000 dollars in eleven days.
    with bounded(Budget(max_cost_usd=47_000)) as team:
        while True:
            for model in (analyzer, verifier):
                text = run_bounded(model, messages=text, model="gpt-4o").final
    outcome = team.outcome
    print(f"{outcome.stop_reason}: {outcome.detail}")
    print(f"{outcome.usage.model_calls} model calls, ${outcome.usage.cost_usd}")


if __name__ == "__main__":
    main()
