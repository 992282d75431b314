"""A plain loop with a scripted model: stopped, explained, and resumed under a fresh budget."""

from __future__ import annotations

from typing import Any

from budgetguard_core import Budget, MemoryStore
from budgetguard_loop import run_bounded

PAGES = ["page 1 of 4", "page 2 of 4", "page 3 of 4", "page 4 of 4"]


def model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Stand in for `client.chat.completions.create(model=..., messages=messages)`."""
    turn = sum(message["role"] == "tool" for message in messages)
    usage = {"prompt_tokens": 400 + 150 * turn, "completion_tokens": 40}
    if turn == len(PAGES):
        message: dict[str, Any] = {"role": "assistant", "content": "The report has four pages."}
    else:
        function = {"name": "read_page", "arguments": f'{{"number": {turn + 1}}}'}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"choices": [{"message": message}], "usage": usage}


def read_page(number: int) -> str:
    print(f"  reading page {number}")
    return PAGES[number - 1]


def main() -> None:
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
