"""Once the window is nearly full, a loop's step is given what `prune` keeps."""

from __future__ import annotations

from budgetguard_core import Budget
from budgetguard_core.kit import TokenUsage, keep_turns
from budgetguard_loop import ModelReply, bounded, run_bounded

MODEL = "gpt-4o"


def test_the_step_is_given_less_and_the_history_stays_whole():
    given = []

    def step(messages):
        given.append(messages)
        number = len(given)
        if number == 5:
            return "Done."
        call = {"id": str(number), "function": {"name": "look", "arguments": "{}"}}
        message = {"role": "assistant", "tool_calls": [call]}
        used = 120_000 if number == 3 else 1000
        return ModelReply(message=message, usage=TokenUsage(used, 10))

    outcome = run_bounded(
        step,
        Budget(max_iterations=9),
        messages="Go.",
        tools={"look": lambda: f"seen {len(given)}"},
        model=MODEL,
        prune=keep_turns(1),
    )
    assert outcome.status == "completed"
    assert [len(messages) for messages in given] == [1, 3, 5, 3, 3]
    assert given[-1][0]["content"] == "Go."
    assert given[-1][-1]["content"] == "seen 4"
    assert len(outcome.messages) == 10


def test_a_hand_written_loop_asks_what_to_send():
    messages = [{"role": "user", "content": "Go."}]
    sizes = []
    with bounded(Budget(max_iterations=4), messages=messages, prune=keep_turns(1)) as run:
        while True:
            with run.model_call(MODEL) as call:
                sizes.append(len(run.to_send()))
                call.settle(TokenUsage(120_000, 1))
                messages.append({"role": "assistant", "content": f"{len(sizes)}"})
                messages.append({"role": "user", "content": "Go on."})
    assert sizes == [1, 3, 3, 3]
