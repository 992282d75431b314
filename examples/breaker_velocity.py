"""A burst of 200 calls in one reply is cut at the ceiling for a minute."""

from __future__ import annotations

from budgetguard_core import Budget
from budgetguard_core.breakers import VelocityLimits
from budgetguard_core.testing.scripted import Answers
from budgetguard_loop import run_bounded, scripted


def main() -> None:
    sent: list[str] = []

    def send_mail(to: str) -> str:
        sent.append(to)
        return "sent"

    # From 99 % of the ceiling on calls would wait until the minute is over.
    limits = VelocityLimits(max_tool_calls_per_minute=20, throttle_at=0.99)
    answers = Answers([[("send_mail", {"to": f"customer {number}"}) for number in range(200)]])
    outcome = run_bounded(
        scripted.scripted_model(answers),
        Budget(velocity=limits),
        messages="Write to all.",
        tools={"send_mail": send_mail},
    )
    print(f"{outcome.status}: {outcome.detail}")
    print(f"{len(sent)} of 200 mails are out")


if __name__ == "__main__":
    main()
