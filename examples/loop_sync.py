"""A plain loop with a scripted model: stopped, explained, and resumed under a fresh budget."""

from __future__ import annotations

from budgetguard_core import Budget, MemoryStore
from budgetguard_core.testing.scripted import Answers
from budgetguard_loop import run_bounded, scripted

PAGES = ["page 1 of 4", "page 2 of 4", "page 3 of 4", "page 4 of 4"]
READS = [{"read_page": {"number": number}} for number in range(1, len(PAGES) + 1)]


def read_page(number: int) -> str:
    print(f"  reading page {number}")
    return PAGES[number - 1]


def main() -> None:
    # In place of a function that calls `client.chat.completions.create(messages=messages, ...)`.
    model = scripted.scripted_model(Answers([*READS, "The report has four pages."]))
    store = MemoryStore()  # SqliteStore() outlives the process
    tools = {"read_page": read_page}

    print("Under a budget that is too small:")
    outcome = run_bounded(
        model,
        Budget(max_iterations=2, max_cost_usd=0.10),
        messages="How many pages has the report?",
        tools=tools,
        model="gpt-4o",
        store=store,
    )
    print(f"  {outcome.status}: {outcome.detail}")

    print("Resumed under a fresh one:")
    outcome = run_bounded(
        model,
        Budget(max_iterations=10, max_cost_usd=0.10),
        tools=tools,
        model="gpt-4o",
        store=store,
        resume=outcome.run_id,
    )
    print(f"  {outcome.status}: {outcome.final}")
    both = outcome.earlier_usage + outcome.usage
    print(f"  {both.model_calls} model calls in all, {both.cost_usd} US dollars")


if __name__ == "__main__":
    main()
