"""Clauses 31, 32 and 35: what models and providers send."""

from __future__ import annotations

from budgetguard_core.budget import Budget
from budgetguard_core.guard import Guard
from budgetguard_core.stop import StopReason
from budgetguard_core.testing.message import check_history, expect
from budgetguard_core.testing.script import Agent, Call, Reply, Script, Tool, calls, says
from budgetguard_core.testing.trial import Trial, check_equal, check_nudge, search_tool, watched
from budgetguard_core.usage import estimate_tokens

_SLACK = 0.3


def equal_ids(at: Trial) -> None:
    """Clause 31."""

    def same(*names: str) -> Reply:
        return calls(*(Call(name, id="call_0") for name in names))

    tools = [search_tool(), Tool("read", "what was read")]
    done = says("Done.")
    in_turns = [same("search"), same("read"), same("search")]
    in_a_batch = [same("search"), same("read", "search")]
    for model, runaway, question in (
        ([*in_turns, done], in_turns, 3),
        ([same("search", "read"), done], in_a_batch, 2),
    ):
        guard = Guard(Budget(max_iterations=9))
        ran = at.run(model, guard, *tools)
        ran.completed(calls=len(model), model_calls=len(model), tool_calls=len(ran.started))
        check_equal("results", len([one for one in ran.history if one.role == "tool"]), question)
        check_equal("calls in flight", guard.open_calls(), ())
        # Under a cap each is a call of its own.
        ran = at.run(runaway, Budget(max_tool_calls=2), *tools)
        ran.stopped(StopReason.MAX_TOOL_CALLS, bodies=2, tool_calls=2)


def dialogue(at: Trial) -> None:
    """Clause 32."""
    other = Agent(name="other", script=Script([says("No, after you.")]))
    guard, events = watched(max_iterations=30)
    done = at.run([says("After you.")], guard, tools=(), dialogue=other)
    outcome, made = done.outcome, done.script.calls
    expect(
        outcome.stop_reason in (StopReason.NO_PROGRESS, StopReason.OSCILLATION),
        f"ended {outcome.status} ({outcome.stop_reason}) after {made} answers",
    )
    check_history(done.history)
    expect(made <= 10, f"{made} answers that say the same")
    check_nudge(events, done.script, other.script)

    other = Agent(name="other", script=Script(lambda number: says(f"And so is {number * 7}.")))
    guard = Guard(Budget(max_iterations=14))
    done = at.run(lambda n: says(f"Point {n} is new."), guard, tools=(), dialogue=other)
    done.stopped(StopReason.MAX_ITERATIONS)


def every_usage(at: Trial) -> None:
    """Clause 35."""
    expect(at.driver.usage_records, "the driver gives no usage records")
    for record, meant in at.driver.usage_records:
        reply = Reply(text="Done.", record=record)
        usage = at.run([reply], Guard(Budget(max_iterations=9)), tools=()).completed().usage
        for name in meant._fields[:-1]:
            check_equal(f"{name} of {record}", getattr(usage, name), getattr(meant, name))
        check_equal(f"estimated calls of {record}", usage.estimated_calls, 0)

    # Without usage: everything that was sent is estimated.
    question = "Please look this up, and be careful about it. " * 40
    tool_text = "Looks things up in the books, and says where it found them. " * 40
    answer = "It is in the third book on the left. " * 40
    search = Tool("search", description=tool_text)
    done = at.run(
        [says(answer, None)], Guard(Budget(max_iterations=9)), search, user_input=question
    )
    usage = done.completed(estimated_calls=1).usage
    for name, used, text in (
        ("input", usage.input_tokens, question + tool_text),
        ("output", usage.output_tokens, answer),
    ):
        real = estimate_tokens(text)
        near = abs(used - real) <= _SLACK * real
        expect(near, f"{used} {name} tokens are estimated of {real} that were sent")
