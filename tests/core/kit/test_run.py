"""A run of the kit: what is charged to whom, and how it ends."""

import asyncio
import gc
import threading
import weakref
from contextlib import nullcontext
from decimal import Decimal

import pytest

from budgetguard_core import Budget, ConfigurationError, Guard, MemoryStore, Mode, StopReason
from budgetguard_core.kit import (
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    Envelope,
    ModelCall,
    OpenModelCall,
    Stop,
    TokenUsage,
    ToolCall,
    current,
    current_guard,
    joined,
    outcome_of,
)
from budgetguard_core.testing import ManualClock

CALL = ModelCall()
USAGE = TokenUsage(10, 5)


def opened(budget, **options):
    return Envelope(budget=budget, **options).open()


def model_call(run, usage=USAGE, **facts):
    """One call of a model, from its admission to its end."""
    call = run.model_call(CALL)
    if isinstance(call, OpenModelCall):
        run.answered(call, usage, **facts)
    return call


def until_stopped(run, limit=20):
    """How many model calls a run makes before it is stopped."""
    for made in range(limit):
        if isinstance(model_call(run), Stop):
            return made
    return limit


def tool(name="search", value=None, id_=None):
    return ToolCall(name=name, arguments={"value": value}, id=id_)


class TestWhoPays:
    def test_a_run_inside_a_run_spends_the_outer_budget(self):
        outer = opened(Budget(max_model_calls=3))
        with outer.entered():
            inner = opened(Budget(max_model_calls=100))
        assert until_stopped(inner) == 3
        assert outer.guard.usage.model_calls == 3

    def test_the_inner_budget_holds_too(self):
        outer = opened(Budget(max_model_calls=10))
        with outer.entered():
            inner = opened(Budget(max_model_calls=2))
        assert until_stopped(inner) == 2
        assert not isinstance(model_call(outer), Stop)

    def test_a_run_in_an_activate_block_is_bounded_by_it(self):
        guard = Guard(Budget(max_model_calls=2))
        with guard.activate():
            run = opened(Budget())
        assert until_stopped(run) == 2

    def test_activate_inside_a_run_applies_beside_it(self):
        run, guard = opened(Budget(max_model_calls=4)), Guard(Budget(max_model_calls=2))
        with run.entered(), guard.activate():
            inner = opened(Budget())
        assert until_stopped(inner) == 2
        assert run.guard.usage.model_calls == 2

    def test_a_guard_of_another_tree_is_charged_beside_the_run(self):
        outer, guard = opened(Budget(max_model_calls=3)), Guard(Budget(max_model_calls=5))
        with outer.entered():
            inner = opened(guard)
        assert until_stopped(inner) == 3
        assert (outer.guard.usage.model_calls, guard.usage.model_calls) == (3, 3)

    def test_a_place_is_given_back_where_the_other_refuses(self):
        outer, guard = opened(Budget(max_model_calls=1)), Guard(Budget(max_model_calls=5))
        with outer.entered():
            inner = opened(guard)
        assert until_stopped(inner) == 1
        usage = guard.usage
        assert (usage.model_calls, usage.iterations, usage.reserved_tokens) == (1, 1, 0)
        assert guard.open_calls() == ()

    def test_wrong_figures_leave_no_place_taken(self):
        outer, guard = opened(Budget()), Guard()
        with outer.entered():
            inner = opened(guard)
        with pytest.raises(ConfigurationError):
            inner.model_call(ModelCall(input_tokens=-1))
        assert guard.usage.model_calls == outer.guard.usage.model_calls == 0

    def test_relatives_in_one_tree_charge_their_ancestor_once(self):
        root = Guard(Budget(max_model_calls=4))
        left, right = root.child(), root.child(Budget(max_model_calls=3))
        outer = opened(left)
        with outer.entered():
            inner = opened(right)
        assert until_stopped(inner) == 3
        assert (root.usage.model_calls, left.usage.model_calls, right.usage.model_calls) == (3,) * 3

    def test_a_budget_inside_two_relatives_charges_each_once(self):
        root = Guard(Budget(max_model_calls=4))
        left, right = root.child(), root.child()
        with left.activate(), right.activate():
            run = opened(Budget())
        assert until_stopped(run) == 4
        assert (root.usage.model_calls, left.usage.model_calls, right.usage.model_calls) == (4,) * 3

    def test_two_relatives_of_another_tree_are_charged_once_each(self):
        root, own = Guard(Budget(max_model_calls=4)), Guard()
        with root.child().activate(), root.child().activate():
            run = opened(own)
        assert until_stopped(run) == 4
        assert root.usage.model_calls == own.usage.model_calls == 4

    def test_a_run_of_an_ancestor_inside_its_descendant_is_a_part_of_that(self):
        root = Guard(Budget(max_model_calls=5))
        outer = opened(root.child(Budget(max_model_calls=2)))
        with outer.entered():
            inner = opened(root)
        assert until_stopped(inner) == 2
        assert root.usage.model_calls == 2

    def test_a_run_of_a_descendant_inside_its_ancestor_is_charged_once(self):
        root = Guard(Budget(max_model_calls=5))
        outer = opened(root)
        with outer.entered():
            inner = opened(root.child(Budget(max_model_calls=2)))
        assert until_stopped(inner) == 2
        assert root.usage.model_calls == 2

    def test_threads_and_runs_on_one_guard_are_exact_together(self):
        guard = Guard(Budget(max_model_calls=40))
        made = []

        def work():
            made.append(until_stopped(opened(guard), limit=30))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(made) == 40

    def test_runs_at_the_same_time_look_for_loops_apart(self):
        guard = Guard()
        first, second = opened(guard), opened(guard)
        assert first.guard is guard
        assert second.guard is not guard
        first.end()
        assert opened(guard).guard is guard

    @pytest.mark.slow
    def test_a_seat_is_free_again_when_its_run_was_never_begun(self):
        guard = Guard()
        run = opened(guard)
        assert run.guard is guard
        del run
        gc.collect()
        assert opened(guard).guard is guard

    def test_an_ended_run_is_nobodys_parent(self):
        outer = opened(Budget(max_model_calls=1))
        with outer.entered():
            outer.end()
            assert current() is None
            assert current_guard() is None
            assert until_stopped(opened(Budget(max_model_calls=4))) == 4

    def test_the_body_of_an_open_call_belongs_to_its_run_even_after_the_end(self):
        outer = opened(Budget(max_model_calls=1))
        call = outer.tool_call(tool())
        outer.start(call)
        with outer.entered(call):
            outer.end()
            assert until_stopped(opened(Budget())) == 1

    def test_mode_off_charges_only_what_is_around(self):
        outer = opened(Budget(max_model_calls=2))
        with outer.entered():
            inner = opened(Budget(max_model_calls=1), mode=Mode.OFF)
        assert until_stopped(inner) == 2


class TestOneCallTwoLayers:
    def test_a_call_that_two_layers_of_one_run_see_counts_once(self):
        run = opened(Budget(max_model_calls=5))
        call = run.model_call(CALL)
        with run.entered(call):
            below = run.model_call(CALL)
            assert below.tickets == ()
            run.answered(below, USAGE)
        run.answered(call, None, text="x")
        usage = run.guard.usage
        assert (usage.model_calls, usage.total_tokens, usage.estimated_calls) == (1, 15, 0)

    def test_layers_of_different_runs_count_once(self):
        outer = opened(Budget(max_model_calls=5))
        call = outer.model_call(CALL)
        with outer.entered(call):
            inner = opened(Budget(max_model_calls=7))
            below = inner.model_call(CALL)
            inner.answered(below, USAGE)
        outer.answered(call, USAGE)
        assert outer.guard.usage.model_calls == inner.guard.usage.model_calls == 1
        assert outer.guard.usage.total_tokens == inner.guard.usage.total_tokens == 15

    def test_three_layers_count_once(self):
        run = opened(Budget(max_model_calls=5))
        call = run.model_call(ModelCall(seconds=7))
        with run.entered(call):
            middle = run.model_call(CALL)
            with run.entered(middle):
                lowest = run.model_call(CALL)
                assert lowest.seconds == 7
                run.answered(lowest, USAGE)
            run.answered(middle, None)
        run.answered(call, None)
        assert run.guard.usage.model_calls == 1
        assert run.guard.usage.total_tokens == 15

    def test_another_attempt_below_is_a_retry(self):
        outer = opened(Budget(max_model_calls=3))
        call = outer.model_call(CALL)
        with outer.entered(call):
            inner = opened(outer.guard)
            made = until_stopped(inner)
        usage = outer.guard.usage
        assert (made, usage.model_calls, usage.iterations) == (3, 3, 1)

    @pytest.mark.parametrize("same_guard", [True, False])
    def test_a_retry_of_a_client_is_charged_and_its_last_attempt_is_the_call_above(
        self, same_guard
    ):
        """Below an admitted call: each failed attempt costs, and is no iteration."""
        outer = opened(Budget(max_model_calls=9))
        call = outer.model_call(ModelCall(input_tokens=100))
        with outer.entered(call):
            inner = opened(outer.guard if same_guard else Budget(max_model_calls=9))
            for _ in range(2):
                below = inner.model_call(ModelCall(input_tokens=100))
                inner.failed(below, TimeoutError("timed out"))
            below = inner.model_call(ModelCall(input_tokens=100))
            inner.answered(below, USAGE)
        outer.answered(call, None, text="x")
        used = outer.guard.usage
        assert (used.model_calls, used.iterations, used.failed_calls) == (3, 1, 2)
        # What the two that timed out had sent, and what the last one has measured.
        assert used.total_tokens == 2 * 100 + USAGE.input_tokens + USAGE.output_tokens
        assert used.reserved_tokens == 0
        if not same_guard:
            assert inner.guard.usage.model_calls == 3

    def test_a_retry_of_a_client_over_the_cap_is_not_made(self):
        outer = opened(Budget(max_model_calls=2))
        call = outer.model_call(CALL)
        with outer.entered(call):
            inner = opened(outer.guard)
            for _ in range(2):
                below = inner.model_call(CALL)
                inner.failed(below, TimeoutError("timed out"))
            assert isinstance(inner.model_call(CALL), Stop)
        outer.failed(call, TimeoutError("timed out"))
        assert outer.guard.usage.model_calls == outer.guard.usage.failed_calls == 2

    def test_a_run_of_its_own_inside_an_open_call_is_never_taken_for_that_call(self):
        """Whether it makes that call or one beside it is not known: rather one too many."""
        outer = opened(Budget(max_model_calls=9))
        call = outer.model_call(CALL)
        with outer.entered(call):
            inner = opened(Budget())
            with inner.entered():
                inner.answered(inner.model_call(CALL), USAGE)
        outer.answered(call, USAGE)
        assert outer.guard.usage.model_calls == 2

    def test_a_layer_that_never_made_the_call_leaves_it_to_the_next(self):
        run = opened(Budget())
        call = run.model_call(CALL)
        with run.entered(call):
            run.take_back(run.model_call(CALL))
            assert run.model_call(CALL).tickets == ()

    def test_the_bound_of_the_layer_above_holds_below(self):
        run = opened(Budget(max_output_tokens_per_call=50))
        call = run.model_call(CALL)
        with run.entered(call):
            assert run.model_call(CALL).max_output_tokens == 50

    def test_a_tool_call_that_two_layers_see_counts_once(self):
        run = opened(Budget(max_tool_calls=1))
        call = run.tool_call(tool())
        run.start(call)
        with run.entered(call):
            below = run.tool_call(tool())
            assert run.start(below) is None
            run.finished(below, "done")
        run.finished(call, "done")
        assert run.guard.usage.tool_calls == 1

    def test_a_tool_that_calls_itself_counts_each_time(self):
        run = opened(Budget(max_tool_calls=2))
        call = run.tool_call(tool())
        run.start(call)
        with run.entered(call):
            run.tool_call(tool())
            assert run.tool_call(tool()).ticket is not None
        assert run.guard.usage.tool_calls == 2


class TestModelCalls:
    def test_usage_that_is_missing_is_estimated(self):
        run = opened(Budget())
        call = run.model_call(ModelCall(input_tokens=100))
        run.answered(call, None, text="x" * 300)
        usage = run.guard.usage
        assert usage.estimated_calls == 1
        assert usage.input_tokens == 100
        assert usage.output_tokens > 50

    def test_a_second_report_changes_nothing(self):
        run = opened(Budget())
        call = run.model_call(CALL)
        run.answered(call, USAGE)
        run.answered(call, USAGE)
        run.failed(call, "late")
        run.take_back(call)
        assert run.guard.usage.total_tokens == 15
        assert run.guard.usage.model_calls == 1

    def test_figures_that_make_no_sense_are_reported_and_charged_as_reserved(self):
        run = opened(Budget())
        call = run.model_call(ModelCall(input_tokens=40, max_output_tokens=2))
        run.answered(call, USAGE, cost_usd=0.5)
        assert run.guard.usage.total_tokens == 15
        assert "usage" in run.guard.tree.errors[0]

    def test_a_call_that_was_never_made_counts_as_nothing(self):
        run = opened(Budget(max_model_calls=1))
        run.take_back(run.model_call(CALL))
        assert until_stopped(run) == 1

    def test_a_failed_call_is_charged_its_prompt(self):
        run = opened(Budget())
        run.failed(run.model_call(ModelCall(input_tokens=100)), TimeoutError())
        usage = run.guard.usage
        assert (usage.model_calls, usage.failed_calls) == (1, 1)
        assert usage.total_tokens >= 100

    def test_a_call_that_was_turned_away_costs_no_tokens(self):
        class TooMany(Exception):
            status_code = 429

        run = opened(Budget())
        run.failed(run.model_call(ModelCall(input_tokens=100)), TooMany())
        assert run.guard.usage.total_tokens == 0
        assert run.guard.usage.model_calls == 1

    def test_a_framework_may_know_that_a_call_was_turned_away(self):
        run = opened(Budget())
        overflow = ValueError("too long")
        run.failed(run.model_call(ModelCall(input_tokens=100)), overflow, turned_away=True)
        assert run.guard.usage.total_tokens == 0
        call = run.model_call(ModelCall(input_tokens=100))
        run.failed(call, overflow, written="It is", turned_away=True)
        assert run.guard.usage.total_tokens > 100

    def test_the_cost_of_the_provider_is_taken(self):
        run = opened(Budget())
        model_call(run, cost_usd=Decimal("0.5"), model="other")
        assert run.guard.usage.cost_usd == Decimal("0.5")

    def test_a_nudge_reaches_the_next_call(self):
        run = opened(Budget())
        for _ in range(3):
            call = run.tool_call(tool())
            run.start(call)
            run.finished(call, "same")
        assert run.model_call(CALL).nudge is not None

    def test_replies_that_repeat_are_told_to_the_engine(self):
        run = opened(Budget())
        for _ in range(7):
            model_call(
                run,
                text="One more analysis of the figures, please.",
                speaker="Analyzer",
                final=True,
            )
        assert run.check() is not None

    def test_a_nudge_can_be_taken_for_a_result(self):
        run = opened(Budget())
        for _ in range(3):
            call = run.tool_call(tool())
            run.start(call)
            run.finished(call, "same")
        assert run.nudge() is not None
        assert run.nudge() is None


class TestToolCalls:
    def test_calls_past_the_cap_never_start(self):
        run = opened(Budget(max_tool_calls=2))
        batch = run.batch([tool(value=n, id_=str(n)) for n in range(4)])
        answers = [run.start(one) for one in batch]
        assert answers == [None, None, NOT_EXECUTED, NOT_EXECUTED]
        assert run.trip is not None
        assert [one.trip is not None for one in batch] == [False, False, True, True]

    def test_every_guard_around_has_to_admit_a_call(self):
        outer, guard = opened(Budget(max_tool_calls=1)), Guard()
        with outer.entered():
            inner = opened(guard)
        batch = inner.batch([tool(value=1), tool(value=2)])
        assert [inner.start(one) for one in batch] == [None, NOT_EXECUTED]
        assert outer.guard.usage.tool_calls == guard.usage.tool_calls == 1

    def test_a_quota_refuses_one_call_and_the_run_goes_on(self):
        run = opened(Budget(tool_quotas={"search": 1}))
        first, second = run.batch([tool(value=1), tool(value=2)])
        assert first.refusal is None
        assert second.reason is StopReason.TOOL_QUOTA
        assert second.trip is None
        assert run.check() is None

    def test_what_the_history_says_of_a_call(self):
        run = opened(Budget(max_tool_calls=4))
        done, failed, started, waiting, refused = run.batch(
            [tool(value=n, id_=str(n)) for n in range(5)]
        )
        for one in (done, failed, started):
            run.start(one)
        run.finished(done, "result")
        run.finished(done, "another")
        run.finished(failed, "Error: no", error=ValueError("no"))
        assert [one.answer for one in (done, failed, started, waiting, refused)] == [
            "result",
            "Error: no",
            OUTCOME_UNKNOWN,
            NOT_EXECUTED,
            NOT_EXECUTED,
        ]
        assert [one.is_open for one in (done, started, waiting)] == [False, True, False]

    def test_a_call_that_did_not_start_is_withdrawn(self):
        run = opened(Budget(max_tool_calls=1))
        call = run.tool_call(tool())
        run.withdrawn(call)
        run.withdrawn(call)
        assert run.guard.usage.tool_calls == 0
        assert call.answer == NOT_EXECUTED
        assert run.batch([tool()])[0].state == "waiting"

    def test_an_error_reaches_the_engine_whatever_the_framework_made_of_it(self):
        run = opened(Budget())
        call = run.tool_call(tool())
        run.start(call)
        run.finished(call, "An error occurred", error=ValueError("no"))
        assert run.guard.tool_calls[0].status == "failed"


class TestTheEnd:
    def test_a_run_that_came_to_its_end(self):
        told = []
        run = opened(Budget(), on_outcome=told.append)
        model_call(run)
        outcome = run.end(["m"], "the answer")
        assert (outcome.status, outcome.final, outcome.messages) == (
            "completed",
            "the answer",
            ("m",),
        )
        assert told == [outcome]
        assert run.ended

    def test_a_run_ends_once(self):
        told = []
        run = opened(Budget(), on_outcome=told.append)
        first = run.end()
        assert run.end() is first
        assert run.fail(ValueError()) is first
        assert len(told) == 1

    def test_a_stopped_run(self):
        run = opened(Budget(max_model_calls=1), on_trip="raise")
        assert not run.is_to_raise
        until_stopped(run)
        outcome = run.end(resume="again")
        assert outcome.status == "terminated"
        assert outcome.stop_reason is StopReason.MAX_MODEL_CALLS
        assert outcome.resume == "again"
        assert run.is_to_raise
        assert run.is_passed_on

    def test_a_stop_of_the_run_around_is_passed_on(self):
        with opened(Budget(max_model_calls=1)).entered():
            cut = opened(Budget())
            until_stopped(cut)
            assert cut.is_passed_on
            assert not cut.is_to_raise
        alone = opened(Budget(max_model_calls=1))
        assert not alone.is_passed_on
        until_stopped(alone)
        assert not alone.is_passed_on

    def test_a_call_is_freed_with_its_last_reference(self):
        run = opened(Budget())
        gc.disable()
        try:
            calls = [run.model_call(CALL), run.tool_call(tool())]
            for call in calls:
                with run.entered(call):
                    assert current().call is call
            run.answered(calls[0], USAGE)
            run.finished(calls[1], "done")
            kept = [weakref.ref(call) for call in calls]
            del call, calls
            assert [ref() for ref in kept] == [None, None]
        finally:
            gc.enable()

    def test_a_failed_run_has_its_outcome_on_the_exception(self):
        store, told = MemoryStore(), []
        run = opened(Budget(), store=store, on_outcome=told.append)
        model_call(run)
        error = ValueError("no")
        outcome = run.fail(error)
        assert outcome.status == "failed"
        assert outcome.stop_reason is None
        assert outcome.usage.total_tokens == 15
        assert outcome_of(error) == outcome
        assert told == [outcome]
        assert store.load(run.guard.run_id) is not None

    @pytest.mark.parametrize("shared", [False, True])
    def test_a_paused_run_goes_on_and_its_time_stands_still(self, shared):
        clock, told = ManualClock(), []
        budget = Budget(max_seconds=10, max_model_calls=3)
        if shared:
            envelope = Envelope(budget=Guard(budget, clock=clock, sinks=[told.append]))
        else:
            envelope = Envelope(budget=budget, clock=clock, sinks=[told.append])
        run = envelope.open()
        model_call(run)
        clock.advance(3)
        outcome = run.pause()
        assert outcome.status == "paused"
        assert "run_ended" not in [event.event for event in told]
        clock.advance(1000)
        again = envelope.open(resume=run.guard.snapshot())
        assert until_stopped(again) == 2
        clock.advance(3)
        outcome = again.end()
        assert outcome.usage.model_calls == 3
        assert outcome.usage.seconds == 6

    def test_a_guard_made_anew_for_each_request_goes_on_counting(self):
        made = 0
        kept = None
        for _ in range(10):
            envelope = Envelope(budget=Guard(Budget(max_model_calls=3)))
            run = envelope.open(resume=kept)
            made += not isinstance(model_call(run), Stop)
            run.pause()
            kept = run.guard.snapshot()
        assert made == 3

    def test_a_guard_that_counts_already_does_not_count_the_earlier_leg_again(self):
        guard = Guard(Budget(max_model_calls=5))
        first, second = opened(guard), opened(guard)
        model_call(first)
        model_call(second)
        second.pause()
        again = Envelope(budget=guard).open(resume=second.guard.snapshot())
        model_call(again)
        assert guard.usage.model_calls == 3

    def test_a_paused_run_goes_on_in_another_process(self):
        envelope = Envelope(budget=Budget(max_model_calls=3))
        run = envelope.open()
        model_call(run)
        run.pause()
        text = run.guard.snapshot().to_json()
        again = envelope.open(resume=type(run.guard.snapshot()).from_json(text))
        assert again.guard.run_id == run.guard.run_id
        assert until_stopped(again) == 2

    def test_a_paused_part_of_a_run_goes_on_within_it(self):
        outer = opened(Budget(max_model_calls=4))
        with outer.entered():
            envelope = Envelope(budget=Budget(max_model_calls=3))
            run = envelope.open()
            model_call(run)
            run.pause()
            again = envelope.open(resume=run.guard.snapshot())
        assert until_stopped(again) == 2
        assert outer.guard.usage.model_calls == 3

    def test_a_snapshot_never_becomes_a_bound(self):
        envelope = Envelope(budget=Budget(max_model_calls=3))
        snapshot = envelope.open().guard.snapshot()
        forged = snapshot.model_copy(
            update={"budget": Budget(max_model_calls=1000).to_json(), "mode": "off"}
        )
        assert until_stopped(envelope.open(resume=forged)) == 3

    def test_a_resume_under_a_fresh_budget(self):
        envelope = Envelope(budget=Budget(max_model_calls=2))
        run = envelope.open()
        assert until_stopped(run) == 2
        run.end()
        again = envelope.open(resume=run.guard.snapshot(), fresh=True)
        assert until_stopped(again) == 2
        assert again.end().earlier_usage.model_calls == 2

    @pytest.mark.parametrize("inside", [True, False])
    def test_a_run_that_a_condition_does_is_a_part_of_the_run_that_asks_it(self, inside):
        asked = []

        def judged(guard):
            asked.append(guard)
            judge = opened(Budget(max_model_calls=9))
            until_stopped(judge, limit=1)
            judge.end()

        run = opened(Budget(max_model_calls=4, stop_when=[judged]))
        with run.entered() if inside else nullcontext():
            made = until_stopped(run)
        # Before each call one of the judge's, and what it is asked by the judge itself is no ask.
        assert (made, len(asked), run.guard.usage.model_calls) == (2, 3, 4)
        assert not run.guard.tree.errors

    def test_conditions_hold_after_a_pause(self):
        envelope = Envelope(budget=Budget(stop_when=[lambda guard: guard.usage.model_calls >= 2]))
        run = envelope.open()
        model_call(run)
        run.pause()
        assert until_stopped(envelope.open(resume=run.guard.snapshot())) == 1

    def test_a_listener_that_throws_changes_nothing(self):
        def on_outcome(outcome):
            raise ValueError("listener")

        run = opened(Budget(), on_outcome=on_outcome)
        assert run.end().status == "completed"
        assert run.outcome.errors == ("on_outcome: ValueError: listener",)
        assert run.guard.outcome is run.end() is run.outcome

    def test_a_store_that_fails_changes_nothing(self):
        class Full(MemoryStore):
            def save(self, snapshot):
                raise OSError("full")

        run = opened(Budget(), store=Full())
        run.save(["m"])
        assert "full" in run.end().errors[0]

    def test_a_checkpoint_of_a_part_saves_the_whole_as_well(self):
        store = MemoryStore()
        outer = opened(Budget(), store=store)
        assert not opened(Budget()).is_saved
        with outer.entered():
            inner = opened(Budget())
        assert inner.is_saved
        outer.save(["said"])
        model_call(inner)
        inner.save()
        snapshot = store.load(outer.guard.run_id)
        assert snapshot.counters["model_calls"] == 1
        assert snapshot.messages == ("said",)

    async def test_an_end_on_an_event_loop(self):
        run = opened(Budget())
        assert (await run.in_thread(run.end)).status == "completed"
        loops = []

        class Store(MemoryStore):
            def save(self, snapshot):
                loops.append(asyncio.events._get_running_loop())

        run = opened(Budget(), store=Store())
        assert (await run.in_thread(run.end)).status == "completed"
        assert loops == [None]

    @pytest.mark.slow
    def test_nothing_is_kept_of_ended_runs(self):
        guard = Guard()
        runs = []
        for _ in range(100):
            run = opened(guard)
            with run.entered():
                inner = opened(Budget())
                inner.end()
            run.end()
            runs += [weakref.ref(run), weakref.ref(inner)]
        del run, inner
        gc.collect()
        # The guard keeps the last run that sat on it, until another does.
        assert sum(one() is not None for one in runs) == 0


class TestAStopIsNoAnswer:
    def test_a_stop_of_the_run_around_is_told_from_an_own_one(self):
        outer = opened(Budget(max_model_calls=1))
        with outer.entered():
            inner = opened(Budget(max_tool_calls=1))
        model_call(inner)
        stop = inner.model_call(CALL)
        assert inner.is_of_parent_run(stop.trip)
        own = inner.batch([tool(value=1), tool(value=2)])[1].trip
        assert own == stop.trip

    def test_an_activate_block_reads_no_answer(self):
        with Guard(Budget(max_model_calls=1)).activate():
            run = opened(Budget())
            assert until_stopped(run) == 1
            assert not run.is_of_parent_run(run.trip)
            with run.entered():
                inner = opened(Budget())
        assert until_stopped(inner) == 0
        assert inner.is_of_parent_run(inner.trip)

    def test_an_own_stop_is_handed_to_the_parent(self):
        outer = opened(Budget(max_model_calls=5))
        with outer.entered():
            inner = opened(Budget(max_model_calls=1))
        until_stopped(inner)
        assert not inner.is_of_parent_run(inner.trip)
        inner.end()
        assert outer.end().status == "completed"

    def test_a_run_whose_part_was_refused_by_it_is_terminated(self):
        outer = opened(Budget(max_model_calls=1))
        with outer.entered():
            middle = opened(Budget())
            with middle.entered():
                inner = opened(Budget())
        until_stopped(inner)
        inner.end()
        assert middle.end().status == "terminated"
        outcome = outer.end(final="passed")
        assert outcome.status == "terminated"
        assert outcome.stop_reason is StopReason.MAX_MODEL_CALLS

    def test_a_guard_beside_stops_the_run_around_that_holds_it(self):
        guard = Guard(Budget(max_model_calls=1))
        with guard.activate():
            outer = opened(Budget())
        with outer.entered():
            inner = opened(Guard())
        assert until_stopped(inner) == 1
        assert inner.is_of_parent_run(inner.trip)
        assert outer.end().status == "terminated"


class TestWhatHolds:
    def test_the_nearest_deadline_counts(self):
        clock = ManualClock()
        outer = opened(Budget(max_seconds=5), clock=clock)
        outer.guard.start()
        with outer.entered():
            inner = opened(Guard(Budget(max_seconds=50), clock=clock))
        inner.guard.start()
        clock.advance(2)
        assert inner.time_left() == 3
        assert opened(Budget()).time_left() is None
        assert not inner.has_to_end
        clock.advance(3)
        assert inner.has_to_end
        assert inner.trip is None
        assert inner.check().reason is StopReason.MAX_SECONDS
        assert inner.trip is not None

    def test_an_abort_of_any_guard_around_is_heard(self):
        outer = opened(Budget())
        with outer.entered():
            inner = opened(Guard())
        heard = []
        inner.on_abort(lambda: heard.append(1))
        inner.on_abort(lambda: heard.append(2))()
        assert not inner.aborted
        assert not inner.has_to_end
        outer.guard.abort("enough")
        assert inner.aborted
        assert inner.has_to_end
        assert heard == [1]

    def test_children_that_go_on_are_known(self):
        outer = opened(Budget())
        with outer.entered():
            inner = opened(Budget())
        assert outer.has_children
        inner.end()
        assert not outer.has_children

    def test_a_user_who_spoke_ends_a_row(self):
        guard = Guard()
        for _ in range(8):
            run = Envelope(budget=guard).open(user_spoke=True)
            call = run.tool_call(tool())
            run.start(call)
            run.finished(call, "same")
            run.end()
        assert guard.check() is None

    def test_a_user_who_spoke_may_get_the_same_answer_again(self):
        guard = Guard()
        for _ in range(12):
            run = Envelope(budget=guard).open(user_spoke=True)
            call = run.model_call(ModelCall())
            assert isinstance(call, OpenModelCall)
            run.answered(call, TokenUsage(1, 1), text="Yes.", final=True)
            run.end()
        assert guard.check() is None


class TestSingleCalls:
    def test_outside_of_any_run_there_is_none(self):
        assert joined() is None

    def test_they_are_a_part_of_the_run_around(self):
        run = opened(Budget())
        with run.entered():
            assert joined() is run

    def test_an_activate_block_is_a_run_of_its_guard(self):
        guard, other = Guard(Budget(max_model_calls=2)), Guard()
        with other.activate(), guard.activate():
            run = joined()
            assert joined() is run
            assert until_stopped(run) == 2
            inner = opened(Budget())
        assert isinstance(model_call(inner), Stop)
        assert run.guard is guard
        assert other.usage.model_calls == 2

    def test_calls_of_one_owner_are_counted_together(self):
        run, owner = opened(Budget(max_model_calls=5)), object()
        envelope = Envelope(budget=Budget(max_model_calls=2))
        part = run.part(owner, envelope)
        assert run.part(owner, envelope) is part
        assert run.part(object(), envelope) is not part
        assert until_stopped(part) == 2
        assert run.guard.usage.model_calls == 2
        assert not run.has_children

    def test_they_end_with_the_run_unless_their_owner_ends_them(self):
        run, first, second = opened(Budget()), object(), object()
        envelope = Envelope(budget=Budget(max_model_calls=2))
        ended, left = run.part(first, envelope), run.part(second, envelope)
        assert until_stopped(left) == 2
        assert run.without_part(first) is ended
        assert run.without_part(first) is None
        assert run.end().status == "completed"
        assert (ended.outcome, left.outcome.status) == (None, "terminated")


class TestAnswersCutShort:
    def test_at_the_bound_of_each_call(self):
        run = opened(Budget(max_output_tokens_per_call=50))
        call = model_call(run, TokenUsage(10, 50))
        assert run.cut_short(call).reason is StopReason.MAX_OUTPUT_TOKENS_PER_CALL
        assert run.end().status == "terminated"

    def test_at_what_was_left_of_the_tokens(self):
        run = opened(Budget(max_total_tokens=100, max_output_tokens_per_call=500))
        call = run.model_call(ModelCall(input_tokens=40))
        assert call.max_output_tokens == 60
        run.answered(call, TokenUsage(30, 60))
        assert run.cut_short(call).reason is StopReason.MAX_TOTAL_TOKENS

    def test_seen_by_a_layer_below_the_one_that_counts(self):
        run = opened(Budget(max_total_tokens=100, max_output_tokens_per_call=500))
        call = run.model_call(ModelCall(input_tokens=40))
        with run.entered(call):
            below = run.model_call(CALL)
            run.answered(below, TokenUsage(30, 60))
            assert run.cut_short(below).reason is StopReason.MAX_TOTAL_TOKENS

    def test_at_a_bound_of_the_users_own_the_run_goes_on(self):
        run = opened(Budget(max_output_tokens_per_call=50))
        call = run.model_call(ModelCall(max_output_tokens=20))
        run.answered(call, TokenUsage(10, 20))
        assert run.cut_short(call) is None
        assert opened(Budget()).cut_short(model_call(opened(Budget()))) is None

    def test_less_than_the_provider_takes_is_not_sent(self):
        run = opened(Budget(max_total_tokens=50, max_output_tokens_per_call=500))
        stop = run.model_call(ModelCall(input_tokens=40, min_output_tokens=16))
        assert stop.trip.reason is StopReason.MAX_TOTAL_TOKENS
        assert not isinstance(run.guard.trip, type(None))

    def test_a_least_bound_that_is_none_is_refused(self):
        with pytest.raises(
            ConfigurationError, match="min_output_tokens must be a whole number >= 1"
        ):
            opened(Budget()).model_call(ModelCall(min_output_tokens=0))
