"""`run_bounded` and its async and streamed forms: one loop, three ways to run it."""

from __future__ import annotations

from typing import Unpack

from budgetguard_core import Budget, Guard, Outcome
from budgetguard_core.kit import Envelope
from budgetguard_loop import _async, _sync
from budgetguard_loop._plan import LoopOptions, Plan, Step
from budgetguard_loop._stream import BoundedStream


def run_bounded(
    step: Step,
    budget: Budget | Guard | Envelope | None = None,
    **options: Unpack[LoopOptions],
) -> Outcome:
    """Run the classic agent loop, model, tools, model, until the model is done or a limit holds.

    Each model call and each batch of tool calls is admitted before it starts. The history is a
    list of messages in the format of OpenAI's chat completions. Inside another guarded run, a
    `Budget` is an envelope within that run's.

    Args:
        step: Makes one model call: takes the messages, returns a chat completion, an assistant
            message, a text or a `ModelReply`. It is also given `max_output_tokens` and `seconds`,
            the bounds of this call, where it has keywords of these names. Turn off the retries of
            your client: they cannot be counted. Use `retries`. For a last answer
            (`Budget.finalize_reserve`) it is given `without_tools=True`, where it has a keyword of
            this name: send no tools then. What it asks tools for is not looked at.
        budget: A `Budget`, for a fresh guard, a `Guard`, shared by reference, or an `Envelope`. A
            run that begins while another is on the same guard is a child of it: the same caps,
            exact together, with a run id, a checkpoint and a loop memory of its own.
        **options: What follows, and the options of `Envelope`: `mode`, `sinks`, `on_warning`,
            `on_outcome`, `price_book`, `clock`, `store`, `on_trip`.
        messages: The conversation to begin with, or the user's text. With `resume`: what the user
            says now; leave it out to go on where the run stopped.
        tools: The functions that the model may call, by name. They get the arguments as keywords;
            what they raise goes to the model as the call's result. Where the budget has
            `progress`, `report_progress` is one of them: send its form
            (`budgetguard_core.kit.PROGRESS_TOOL`) with the others.
        model: The model's name, for its price. Needed with `max_cost_usd`.
        provider: The provider's id where several have a model of this name.
        retries: How often a model call that raised is tried again, after half a second that
            doubles each time, or what the provider asks for in `Retry-After`, and within the
            deadline. Each attempt is charged as a model call, none as an iteration.
        store: Where checkpoints go: before each call starts and after it has ended, so that a
            killed process loses nothing.
        resume: An earlier run to go on with: its id in `store`, its `Snapshot` or its `Outcome`.
            No completed tool call runs again; one that was in flight when the process was killed
            is reported to the model as of unknown outcome. Under a fresh `Budget` the caps count
            from zero; without one (not from an `Outcome`, nor for a part of another run that goes
            on alone) everything is as it was. For sinks and
            handlers pass `Guard.restore(snapshot, ...)` as the budget and the snapshot here.

    Raises:
        BudgetExceeded: The run was stopped and `on_trip` is `raise`.
        Exception: What `step` raised at its last attempt, after the checkpoint was saved. Its
            outcome is that of `budgetguard_core.kit.outcome_of(error)`, and given to `on_outcome`.
    """
    plan = Plan(step, budget, options)
    plan.check_sync()
    return _sync.drive(plan)


async def run_bounded_async(
    step: Step,
    budget: Budget | Guard | Envelope | None = None,
    **options: Unpack[LoopOptions],
) -> Outcome:
    """Run the loop of `run_bounded` on an event loop.

    Step and tools may be async; those that are not run in threads. The tool calls of one reply run
    at the same time. The deadline and an abort cancel what is in flight; a thread cannot be
    cancelled and is left behind, under the run's caps. Checkpoints are saved in a thread. Arguments
    and errors are those of `run_bounded`.
    """
    return await _async.drive(Plan(step, budget, options))


def run_bounded_stream(
    step: Step,
    budget: Budget | Guard | Envelope | None = None,
    **options: Unpack[LoopOptions],
) -> BoundedStream:
    """Run the loop of `run_bounded_async` and hand the chunks of the model's replies on.

    `step` returns, or is, an async iterator of the chunks of a chat completion, or of pieces of
    text. Ask the provider for usage (`stream_options={"include_usage": True}`); without it the
    tokens are estimated. A stopped run's last chunk is its synthetic message. A call that has
    already handed on a chunk is not tried again. Leaving the loop early closes the provider's
    stream and saves the checkpoint; use `contextlib.aclosing(aiter(stream))` to wait for that.
    Arguments and errors are those of `run_bounded`.
    """
    return BoundedStream(Plan(step, budget, options))
