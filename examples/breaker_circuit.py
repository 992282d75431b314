"""A tool that is down is left alone, and a run that has nothing else to call is ended."""

from __future__ import annotations

from budgetguard_core import Budget
from budgetguard_core.breakers import CircuitBreakerConfig
from budgetguard_core.testing.scripted import Answers
from budgetguard_loop import run_bounded, scripted


def fetch(page: int) -> str:
    print(f"  fetching page {page}")
    raise TimeoutError(f"no answer for page {page}")


def main() -> None:
    config = CircuitBreakerConfig(sliding_window_size=4, minimum_number_of_calls=2)
    # A model that tries the same server again and again, a page at a time.
    answers = Answers([{"fetch": {"page": page}} for page in range(1, 26)])
    outcome = run_bounded(
        scripted.scripted_model(answers),
        Budget(circuit_breaker=config, max_iterations=25),
        messages="Read all pages.",
        tools={"fetch": fetch},
    )
    for message in outcome.messages:
        if message["role"] == "tool":
            print(f"  the model reads: {message['content'][:60]}")
    print(f"{outcome.status}: {outcome.detail}")


if __name__ == "__main__":
    main()
