"""The meter of one run, rule by rule of the contract."""

from __future__ import annotations

import copy
import re
from decimal import Decimal

import pytest

from budgetguard_core import (
    AdapterError,
    Budget,
    ConfigurationError,
    FinalizeReserve,
    Guard,
    LoopDetection,
    MemoryStore,
    Mode,
    Price,
    PriceBook,
    Snapshot,
    StopReason,
    replay,
)
from budgetguard_core.events import LimitNearlyReached
from budgetguard_core.kit import (
    NOT_EXECUTED,
    Admit,
    ModelCall,
    Nudge,
    Refuse,
    Stop,
    TokenUsage,
    ToolCall,
    Violation,
)
from budgetguard_core.testing import ManualClock

DIME = Decimal("0.10")
BOOK = PriceBook(
    {
        "m": Price(input=1, output=2, context_window=1000),
        "free-output": Price(input=1, output=0),
    }
)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def make(clock):
    def make(budget=None, **options):
        options = {"clock": clock, "price_book": BOOK, "run_id": "r"} | options
        return Guard(budget, **options)

    return make


ONE_EACH = TokenUsage(1, 1)


def spend(guard, usage=ONE_EACH, *, cost_usd=None, **call):
    decision = guard.admit_model_call(ModelCall(**call))
    if isinstance(decision, Admit):
        guard.settle_model_call(decision, usage, cost_usd=cost_usd)
    return decision


def use(guard, name="tool", result="x", **call):
    decision = guard.admit_tool_call(ToolCall(name=name, **call))
    if isinstance(decision, Admit):
        guard.settle_tool_call(decision, result)
    return decision


def reasons(decision):
    return [str(violation.reason) for violation in decision.trip.violations]


# --- iterations and model calls -------------------------------------------------------------


def test_a_retry_is_a_model_call_but_no_iteration(make):
    guard = make(Budget(max_iterations=1))
    ticket = guard.admit_model_call()
    guard.settle_model_call(ticket, error=TimeoutError())
    for _ in range(3):
        spend(guard, TokenUsage(10, 0), retry=True)
    usage = guard.usage
    assert (usage.iterations, usage.model_calls, usage.failed_calls) == (1, 4, 1)
    assert usage.total_tokens == 30
    assert reasons(spend(guard)) == ["max_iterations"]
    assert reasons(spend(guard, retry=True)) == ["max_iterations"]


def test_the_trip_is_sticky(make, clock):
    guard = make(Budget(max_total_tokens=10, max_iterations=5))
    spend(guard, TokenUsage(10, 0))
    first = spend(guard)
    clock.advance(1000)
    guard.abort()
    guard.hold(Violation(reason=StopReason.FRAMEWORK_LIMIT))
    for again in (spend(guard), spend(guard, retry=True), use(guard), guard.check()):
        assert getattr(again, "trip", again) is first.trip is guard.trip
    assert reasons(first) == ["max_total_tokens"]
    assert first.message == NOT_EXECUTED


# --- tokens and dollars ---------------------------------------------------------------------


def test_three_dimes_fit_in_thirty_cents(make):
    guard = make(Budget(max_cost_usd=0.3))
    decisions = []
    for _ in range(4):
        decision = guard.admit_model_call(ModelCall(cost_usd=DIME))
        decisions.append(type(decision))
        if isinstance(decision, Admit):
            guard.settle_model_call(decision, TokenUsage(1, 1), cost_usd=DIME)
    assert decisions == [Admit, Admit, Admit, Stop]
    assert guard.usage.cost_usd == Decimal("0.3")
    assert guard.trip.detail == "max_cost_usd=0.3 reached: 0.3 used"


def test_a_call_without_a_projection_may_pass_the_cap_and_is_billed(make):
    guard = make(Budget(max_total_tokens=10))
    spend(guard, TokenUsage(9, 0))
    spend(guard, TokenUsage(50, 50))
    assert guard.usage.total_tokens == 109
    assert reasons(use(guard)) == ["max_total_tokens"]


def test_the_price_book_bills(make):
    guard = make()
    spend(guard, TokenUsage(1_000_000, 500_000), model="m")
    assert guard.usage.cost_usd == 2


def test_the_providers_own_price_wins_and_its_free_hit_counts(make):
    guard = make(Budget(max_iterations=2, max_cost_usd=1))
    spend(guard, TokenUsage(1_000_000, 0), cost_usd=Decimal("0.25"), model="m")
    spend(guard, TokenUsage(1_000_000, 0), cost_usd=Decimal(0), model="m")
    assert guard.usage.cost_usd == Decimal("0.25")
    assert guard.usage.unpriced_calls == 0
    assert reasons(spend(guard, model="m")) == ["max_iterations"]


def test_the_model_that_was_really_called_is_billed(make):
    guard = make()
    ticket = guard.admit_model_call(ModelCall(model="free-output"))
    guard.settle_model_call(ticket, TokenUsage(0, 1_000_000), model="m")
    assert guard.usage.cost_usd == 2
    ticket = guard.admit_model_call(ModelCall(model="m"))
    guard.settle_model_call(ticket, TokenUsage(0, 1_000_000), model="my-deployment")
    assert guard.usage.cost_usd == 4


@pytest.mark.parametrize(
    ("cost", "charged"), [("0E-999999999", "0"), ("1E-999999999", "1E-15"), ("1E-15", "1E-15")]
)
def test_a_cost_below_what_is_counted_is_rounded_up(make, cost, charged):
    guard = make(Budget(max_cost_usd=1))
    ticket = guard.admit_model_call(ModelCall(cost_usd=Decimal(cost)))
    guard.settle_model_call(ticket, TokenUsage(1, 1), cost_usd=Decimal(cost))
    assert guard.usage.cost_usd == Decimal(charged)


def test_figures_that_make_no_sense_are_charged_as_reserved(make):
    guard = make(Budget(max_total_tokens=1000))
    ticket = guard.admit_model_call(ModelCall(input_tokens=100, max_output_tokens=50))
    with pytest.raises(ConfigurationError, match="output_tokens must be a whole number"):
        guard.settle_model_call(ticket, TokenUsage(1, -5), cost_usd=Decimal(-1))
    usage = guard.usage
    assert (usage.input_tokens, usage.output_tokens, usage.estimated_calls) == (100, 50, 1)
    assert guard.settle_model_call(ticket) is False


@pytest.mark.parametrize(
    "usage",
    [
        pytest.param(bytes([9, 5, 0, 0, 0, 0, 0]), id="bytes"),
        pytest.param(range(7), id="range"),
        pytest.param(["a"] * 7, id="texts"),
        pytest.param([9, 5, 0, 0, 0, 9, False], id="list"),
        pytest.param(TokenUsage(9, 5, estimated="x"), id="estimated"),
        pytest.param(TokenUsage(9, 5)._replace(estimated=None), id="none"),
    ],
)
def test_what_is_no_usage_is_refused_by_name_and_leaves_no_call_open(make, usage):
    guard = make(Budget(max_total_tokens=1000))
    ticket = guard.admit_model_call(ModelCall(input_tokens=100))
    with pytest.raises(ConfigurationError, match=r"\. (Pass|Leave|Add)"):
        guard.settle_model_call(ticket, usage)
    assert guard.open_calls() == ()
    assert guard.usage.total_tokens == 100


def test_nothing_left_for_the_output_stops(make):
    guard = make(Budget(max_total_tokens=100, max_output_tokens_per_call=400))
    stop = guard.admit_model_call(ModelCall(input_tokens=100))
    assert stop.trip.detail == "max_total_tokens=100 would be exceeded: 0 used, 101 projected"


def test_clamping_copes_with_free_output_and_a_passed_cap(make):
    guard = make(Budget(max_cost_usd=Decimal("0.000001"), max_output_tokens_per_call=10))
    spend(guard, TokenUsage(100, 1), model="free-output")
    assert reasons(guard.admit_model_call(ModelCall(model="free-output"))) == ["max_cost_usd"]


# --- unknown prices, missing usage ----------------------------------------------------------


@pytest.mark.parametrize("model", ["never-heard-of", None])
def test_an_unknown_price_stops_before_the_call(make, model):
    guard = make(Budget(max_cost_usd=1))
    stop = guard.admit_model_call(ModelCall(model=model))
    assert reasons(stop) == ["unpriced_model"]
    assert "Price(input=..., output=...)" in stop.trip.detail
    assert repr(model) in stop.trip.detail
    assert guard.usage.model_calls == 0


def test_an_unknown_price_is_free_only_where_asked_for(make):
    guard = make(Budget(max_cost_usd=1, on_unpriced="count_zero"))
    assert isinstance(spend(guard, model="never-heard-of"), Admit)
    assert guard.usage.unpriced_calls == 1
    assert isinstance(spend(make(Budget(max_iterations=1)), model="never-heard-of"), Admit)


def test_a_projection_serves_in_place_of_a_price(make):
    guard = make(Budget(max_cost_usd=1))
    ticket = guard.admit_model_call(ModelCall(model="never-heard-of", cost_usd=DIME))
    guard.settle_model_call(ticket, TokenUsage(1, 1))
    assert guard.usage.cost_usd == DIME
    assert guard.usage.unpriced_calls == 0
    assert isinstance(guard.admit_model_call(ModelCall(cost_usd=DIME)), Admit)


def test_a_child_under_a_dollar_cap_needs_prices_too(make):
    child = make(Budget(max_cost_usd=1)).child()
    assert reasons(child.admit_model_call(ModelCall(model="never-heard-of"))) == ["unpriced_model"]


def test_an_unpriced_call_that_slipped_through_stops_the_next(make):
    guard = make(Budget(max_iterations=9))
    child = guard.child(Budget(max_cost_usd=1))
    restored = Guard.restore(
        guard_in_flight(child).snapshot(), price_book=PriceBook(), clock=ManualClock()
    )
    (ticket,) = restored.open_calls()
    restored.settle_model_call(ticket, TokenUsage(5, 5))
    assert reasons(restored.admit_model_call(ModelCall(cost_usd=DIME))) == ["unpriced_model"]


def guard_in_flight(guard):
    guard.admit_model_call(ModelCall(model="m"))
    return guard


def test_missing_usage_is_charged_as_reserved_and_marked(make):
    guard = make(Budget(max_total_tokens=1000))
    ticket = guard.admit_model_call(ModelCall(model="m", input_tokens=100, max_output_tokens=20))
    guard.settle_model_call(ticket)
    usage = guard.usage
    assert (usage.input_tokens, usage.output_tokens, usage.estimated_calls) == (100, 20, 1)
    assert (usage.cost_usd, usage.reserved_usd) == (Decimal("0.00014"), 0)
    assert guard.trip is None


@pytest.mark.parametrize(
    "caps", [{"max_total_tokens": 9}, {"max_cost_usd": 9}, {"max_output_tokens": 9}]
)
def test_usage_that_is_missing_without_an_estimate_stops(make, caps):
    guard = make(Budget(**caps))
    guard.settle_model_call(guard.admit_model_call(ModelCall(model="m")))
    assert reasons(guard.admit_model_call(ModelCall(model="m"))) == ["unmetered_usage"]


def test_missing_usage_does_not_matter_where_it_is_not_needed(make):
    guard = make(Budget(max_iterations=5))
    guard.settle_model_call(guard.admit_model_call())
    dollars = make(Budget(max_cost_usd=9))
    dollars.settle_model_call(dollars.admit_model_call(ModelCall(model="m")), cost_usd=DIME)
    failed = make(Budget(max_total_tokens=9))
    failed.settle_model_call(failed.admit_model_call(), error="timeout")
    for one in (guard, dollars, failed):
        assert isinstance(one.admit_model_call(ModelCall(model="m")), Admit)
    assert failed.usage.failed_calls == 1


# --- tools ----------------------------------------------------------------------------------


def test_every_quota_that_matches_counts(make):
    guard = make(
        Budget(
            tool_quotas={"mutating/*": 2, "delete_*": 1, "*": 3},
            tool_classes={"delete_*": "mutating", "write_*": "mutating"},
        )
    )
    names = ["delete_a", "delete_b", "write_a", "write_b", "read", "read"]
    decisions = [use(guard, name) for name in names]
    assert [type(decision) for decision in decisions] == [
        Admit,
        Refuse,
        Admit,
        Refuse,
        Admit,
        Refuse,
    ]
    assert [d.detail for d in decisions if isinstance(d, Refuse)] == [
        "tool_quotas['delete_*']=1 reached",
        "tool_quotas['mutating/*']=2 reached",
        "tool_quotas['*']=3 reached",
    ]


def test_hosted_tools_are_counted_and_stopped_at_the_next_model_call(make):
    guard = make(Budget(max_tool_calls=1))
    for _ in range(2):
        assert isinstance(guard.admit_tool_call(ToolCall(name="web", kind="hosted")), Admit)
    assert guard.usage.tool_calls == 2
    assert guard.open_tool_calls() == ()
    stop = guard.admit_model_call()
    assert stop.trip.detail == "max_tool_calls=1 reached: 2 used"


def test_hosted_tools_past_their_quota_stop_the_run(make):
    guard = make(Budget(tool_quotas={"web": 1}))
    for _ in range(2):
        guard.admit_tool_call(ToolCall(name="web", kind="hosted"))
    stop = guard.admit_model_call()
    assert stop.trip.detail == "tool_quotas['web']=1 exceeded: 2 used"
    assert stop.trip.reason is StopReason.TOOL_QUOTA


def test_reported_calls_are_counted_and_never_refused(make):
    guard = make(Budget(max_tool_calls=2))
    for _ in range(3):
        ticket = guard.admit_tool_call(ToolCall(name="web", arguments="{}", kind="reported"))
        assert guard.open_tool_calls() == (ticket,)
        assert guard.settle_tool_call(ticket, "nothing")
    stop = guard.admit_model_call()
    assert stop.trip.detail == "max_tool_calls=2 reached: 3 used"


@pytest.mark.parametrize("kind", ["handoff", "output"])
def test_handoffs_and_output_are_no_tool_calls(make, kind):
    guard = make(Budget(max_tool_calls=1, tool_quotas={"*": 1}))
    for number in range(3):
        assert isinstance(use(guard, "x", kind=kind, arguments={"n": number}), Admit)
    assert guard.usage.tool_calls == 0
    assert guard.tool_counts == {}
    assert isinstance(use(guard), Admit)


@pytest.mark.parametrize("kind", ["handoff", "output", "reported"])
def test_other_kinds_are_looked_at_for_loops(make, kind):
    guard = make()
    for _ in range(3):
        use(guard, "x", kind=kind)
    assert isinstance(guard.admit_model_call(), Nudge)


def test_after_the_trip_output_and_hosted_still_pass_and_handoffs_do_not(make):
    guard = make(Budget(max_iterations=1))
    spend(guard)
    spend(guard)
    kinds = ["function", "handoff", "output", "hosted"]
    decisions = guard.admit_tool_calls([ToolCall(name="x", kind=kind) for kind in kinds])
    assert [type(decision) for decision in decisions] == [Stop, Stop, Admit, Admit]
    assert guard.usage.tool_calls == 1


# --- time -----------------------------------------------------------------------------------


def test_time_runs_from_the_first_admission(make, clock):
    guard = make(Budget(max_seconds=10))
    clock.advance(100)
    assert guard.usage.seconds == 0
    assert guard.time_left() == 10
    assert guard.check() is None
    clock.advance(100)
    spend(guard)
    clock.advance(9.5)
    assert guard.time_left() == 0.5
    assert isinstance(spend(guard), Admit)
    clock.advance(0.5)
    assert guard.time_left() == 0
    assert guard.check().reason is StopReason.MAX_SECONDS
    assert reasons(spend(guard)) == ["max_seconds"]
    clock.advance(1)
    assert guard.time_left() == 0


def test_a_child_has_the_time_of_its_ancestors(make, clock):
    guard = make(Budget(max_seconds=10))
    child = guard.child(Budget(max_seconds=100))
    assert guard.time_left() == 10
    spend(child)
    clock.advance(4)
    assert child.time_left() == 6
    assert child.admit_model_call(ModelCall(seconds=9)).seconds == 6
    assert make().time_left() is None


# --- warnings -------------------------------------------------------------------------------


def test_each_dimension_warns_once_at_80_per_cent(make, clock):
    told = []
    guard = make(
        Budget(
            max_iterations=10,
            max_model_calls=20,
            max_tool_calls=5,
            max_total_tokens=100,
            max_seconds=10,
            max_cost_usd=1,
        ),
        on_warning=lambda guard, event: told.append((event.dimension, event.limit, event.used)),
    )
    for number in range(10):
        spend(guard, TokenUsage(9, 0), cost_usd=DIME, model="m")
        if number < 4:
            use(guard, arguments=number)
        clock.advance(1)
    assert guard.warnings == tuple(name for name, _, _ in told)
    assert sorted(told) == [
        ("max_cost_usd", "1", "0.8"),
        ("max_iterations", 10, 8),
        ("max_seconds", 10.0, 8.0),
        ("max_tool_calls", 5, 4),
        ("max_total_tokens", 100, 81),
    ]


def test_a_handler_may_extend(make):
    told = []

    def extend(guard, event):
        told.append(event)
        guard.extend(max_iterations=20)

    guard = make(Budget(max_iterations=10), on_warning=extend)
    decisions = [type(spend(guard)) for _ in range(21)]
    assert decisions == [Admit] * 20 + [Stop]
    assert [type(event) for event in told] == [LimitNearlyReached]


def test_a_handler_may_end_the_run(make):
    guard = make(Budget(max_iterations=10), on_warning=lambda guard, event: guard.abort("too dear"))
    decisions = [spend(guard) for _ in range(9)]
    assert [type(decision) for decision in decisions] == [Admit] * 8 + [Stop]
    assert decisions[-1].trip.detail == "too dear"


def test_a_handler_that_raises_changes_nothing(make):
    guard = make(Budget(max_iterations=10), on_warning=lambda guard, event: 1 / 0)
    assert [type(spend(guard)) for _ in range(11)] == [Admit] * 10 + [Stop]
    assert guard.tree.errors == ("on_warning: ZeroDivisionError: division by zero",)


def test_a_parents_handler_hears_of_the_childs_steps(make):
    told = []
    guard = make(Budget(max_iterations=5), on_warning=lambda one, event: told.append(one.run_id))
    child = guard.child(Budget(max_iterations=100))
    for _ in range(5):
        spend(child)
    assert told == ["r"]
    assert child.warnings == ()


# --- loops ----------------------------------------------------------------------------------


def test_a_user_turn_lifts_a_loop_but_not_an_abort(make):
    guard = make(Budget(loop_detection=LoopDetection(nudge_after=1, stop_after=2)))
    for _ in range(2):
        use(guard, "read")
    assert guard.take_nudge() is not None
    use(guard, "read")
    guard.user_turn()
    assert type(spend(guard)) is Admit
    guard.abort()
    guard.user_turn()
    assert reasons(spend(guard)) == ["aborted"]


def test_a_correction_can_travel_in_a_refused_tool_call(make):
    guard = make()
    decisions = [use(guard, "read") for _ in range(6)]
    assert [type(decision) for decision in decisions] == [Admit] * 3 + [Refuse, Admit, Stop]
    assert "read" in decisions[3].message
    assert decisions[3].reason is StopReason.NO_PROGRESS


def test_a_nudge_can_be_taken_by_hand_once(make):
    guard = make()
    for _ in range(3):
        use(guard, "read")
    assert "read" in guard.take_nudge()
    assert guard.take_nudge() is None
    assert type(spend(guard)) is Admit
    assert make(Budget(loop_detection=None)).take_nudge() is None


def test_what_is_to_be_ignored_in_a_result_does_not_tell_results_apart(make):
    guard = make(Budget(loop_detection=LoopDetection(ignore_results=["took_ms"])))
    for took in range(3):
        assert type(spend(guard)) is Admit
        use(guard, "read", result={"rows": [], "took_ms": took})
    assert type(spend(guard)) is Nudge


def test_what_a_caller_knows_already_is_not_fingerprinted_again(make):
    guard = make()
    for number in range(3):
        ticket = guard.admit_tool_call(ToolCall(name="read", fingerprint=f"{number}"))
        guard.settle_tool_call(
            ticket, error="error", result_fingerprint=f"{number}", error_fingerprint="gone"
        )
    assert "the same error" in guard.take_nudge()


def test_an_error_whose_text_cannot_be_had_is_settled(make):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    guard = make()
    ticket = guard.admit_tool_call(ToolCall(name="a"))
    assert guard.settle_tool_call(ticket, error=Mute())
    assert guard.open_tool_calls() == ()
    assert [record.status for record in guard.tool_calls] == ["failed"]


def test_without_detection_nothing_is_a_loop(make):
    guard = make(Budget(loop_detection=None))
    for _ in range(50):
        assert type(spend(guard)) is Admit
        assert type(use(guard, "read")) is Admit
    guard.user_turn()


def test_a_childs_loop_is_its_own_and_a_parents_does_not_end_the_child(make):
    guard = make(Budget(loop_detection=LoopDetection(nudge_after=1, stop_after=2)))
    child = guard.child()
    for _ in range(2):
        use(guard, "delegate")
    guard.take_nudge()
    use(guard, "delegate")
    assert type(spend(child)) is Admit
    assert reasons(spend(guard)) == ["no_progress"]
    assert reasons(spend(child)) == ["no_progress"]


# --- abort, hold, extend, reset -------------------------------------------------------------


def test_a_parents_abort_ends_everything_below(make):
    guard = make()
    grandchild = guard.child().child()
    guard.abort()
    assert grandchild.cancellation.cancelled
    stop = grandchild.admit_model_call()
    assert (reasons(stop), stop.trip.run_id) == (["aborted"], "r")


def test_a_frameworks_own_limit_is_held(make):
    guard = make()
    held = Violation(reason=StopReason.FRAMEWORK_LIMIT, limit=25, used=25, detail="recursion")
    guard.hold(held)
    guard.hold(held)
    assert guard.check().violations == (held,)


def test_extend_raises_caps_of_the_run_only(make):
    guard = make(Budget(max_iterations=2, tool_quotas={"a": 1}, max_output_tokens_per_call=5))
    use(guard, "a")
    guard.extend(max_iterations=3)
    assert guard.budget.max_iterations == 3
    assert isinstance(use(guard, "a"), Refuse)
    for caps, sentence in [
        ({"max_iterations": 3}, "max_iterations must be raised above 3, got 3. Extend only "),
        ({"max_iterations": 2}, "max_iterations must be raised above 3, got 2."),
        ({"max_iterations": None}, "max_iterations must be raised above 3, got None."),
        ({"max_tool_calls": 5}, "max_tool_calls must be raised above None, got 5."),
        ({"max_output_tokens_per_call": 9}, "max_output_tokens_per_call must be raised above 5"),
        ({"max_iterations": "9"}, "max_iterations must be a whole number >= 1, got '9'."),
        ({"nonsense": 1}, "nonsense is not a field of Budget"),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            guard.extend(**caps)
        assert str(caught.value).startswith(sentence)
    assert guard.budget.max_iterations == 3


def test_a_stopped_run_is_not_extended(make):
    guard = make(Budget(max_iterations=1))
    spend(guard)
    spend(guard)
    with pytest.raises(AdapterError, match=r"got a run stopped by max_iterations\. Resume it"):
        guard.extend(max_iterations=2)


# --- modes ----------------------------------------------------------------------------------


def test_a_passed_quota_is_no_trip_and_hides_none(make):
    guard = make(Budget(max_iterations=3, tool_quotas={"a": 1}), mode="observe")
    for number in range(5):
        assert isinstance(spend(guard), Admit)
        assert isinstance(use(guard, "a", arguments=number), Admit)
    (violation,) = guard.observed_trip.violations
    assert violation.reason is StopReason.MAX_ITERATIONS


def test_the_observed_trip_is_the_first_and_the_only_one(make):
    events = []
    guard = make(Budget(max_iterations=1), mode="observe", sinks=[events.append])
    spend(guard)
    spend(guard)
    first = guard.observed_trip
    guard.extend(max_iterations=2)
    guard.hold(Violation(reason=StopReason.FRAMEWORK_LIMIT))
    guard.abort("later")
    for _ in range(5):
        assert isinstance(spend(guard), Admit)
    assert guard.check() is None
    assert guard.observed_trip is first
    assert [event.event for event in events].count("trip_observed") == 1
    assert not guard.cancellation.cancelled


def test_observe_corrects_nobody(make):
    guard = make(mode="observe")
    for _ in range(3):
        use(guard, "read")
    assert guard.take_nudge() is None
    for _ in range(10):
        assert type(spend(guard)) is Admit
        assert type(use(guard, "read")) is Admit
    assert guard.observed_trip.reason is StopReason.NO_PROGRESS
    tools_alone = make(mode="observe")
    assert [type(use(tools_alone, "read")) for _ in range(10)] == [Admit] * 10
    assert tools_alone.observed_trip.reason is StopReason.NO_PROGRESS


def test_an_advisory_child_is_bound_by_its_parent_alone(make):
    guard = make(Budget(max_iterations=3, max_output_tokens_per_call=100, max_total_tokens=10_000))
    child = guard.child(Budget(max_iterations=1, max_output_tokens_per_call=5), mode="observe")
    decisions = [child.admit_model_call() for _ in range(4)]
    assert [type(decision) for decision in decisions] == [Admit] * 3 + [Stop]
    assert {decision.max_output_tokens for decision in decisions[:3]} == {100}
    assert child.observed_trip.reason is StopReason.MAX_ITERATIONS
    assert decisions[-1].trip.run_id == "r"


def test_an_advisory_parent_cuts_nothing_from_its_child(make):
    guard = make(
        Budget(max_output_tokens_per_call=5, max_total_tokens=50, max_seconds=1), mode="observe"
    )
    child = guard.child(Budget(max_output_tokens_per_call=100), mode="enforce")
    ticket = child.admit_model_call()
    assert (ticket.max_output_tokens, ticket.seconds) == (100, None)
    assert guard.observed_trip is not None


def test_off_does_nothing(make):
    guard = make(Budget(max_iterations=1, max_tool_calls=1), mode="off")
    for _ in range(3):
        assert type(spend(guard)) is Admit
        assert [type(d) for d in guard.admit_tool_calls([ToolCall(name="a")] * 2)] == [Admit] * 2
    assert guard.check() is None
    assert guard.usage.model_calls == 0
    assert guard.warnings == ()
    assert guard.time_left() is None
    ticket = guard.admit_model_call()
    assert guard.settle_model_call(ticket, TokenUsage(1, 1)) is False
    assert guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="a"))) is False


def test_a_child_that_is_off_still_spends_its_parents_budget(make):
    guard = make(Budget(max_iterations=5))
    child = guard.child(Budget(max_iterations=1), mode="off")
    for _ in range(5):
        assert type(spend(child)) is Admit
        use(child, "same")
    assert reasons(spend(child)) == ["max_iterations"]
    assert child.usage.iterations == 0
    assert guard.usage.iterations == 5


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigurationError, match="mode must be one of enforce, observe, off, got"):
        Guard(mode="watch")


# --- children -------------------------------------------------------------------------------


def test_child_and_ancestor_at_once_are_both_named(make):
    guard = make(Budget(max_iterations=1))
    child = guard.child(Budget(max_total_tokens=1), run_id="c")
    spend(child)
    stop = spend(child)
    assert reasons(stop) == ["max_iterations", "max_total_tokens"]
    assert stop.trip.run_id == "r"
    assert [str(v.reason) for v in guard.trip.violations] == ["max_iterations"]


def test_the_trip_is_whose_limit_comes_first(make):
    guard = make(Budget(max_total_tokens=2))
    child = guard.child(Budget(max_iterations=1), run_id="c")
    spend(child)
    stop = spend(child)
    assert reasons(stop) == ["max_iterations", "max_total_tokens"]
    assert stop.trip.run_id == "c"
    assert guard.trip.run_id == "r"


def test_a_child_gets_at_most_what_is_left(make):
    guard = make(Budget(max_total_tokens=100, max_output_tokens_per_call=50))
    spend(guard, TokenUsage(30, 40))
    child = guard.child(Budget(max_total_tokens=1000, max_output_tokens_per_call=80))
    assert child.admit_model_call(ModelCall(input_tokens=5)).max_output_tokens == 25
    tools = make(Budget(max_tool_calls=3, tool_quotas={"a": 1}))
    child = tools.child(Budget(max_tool_calls=2, tool_quotas={"b": 1}))
    names = ["a", "a", "b", "c"]
    assert [type(use(child, name)) for name in names] == [Admit, Refuse, Admit, Stop]
    assert [type(use(tools, name)) for name in ("a", "b", "c")] == [Refuse, Admit, Stop]


def test_a_child_inherits_the_mode_and_has_its_own_name(make):
    guard = make(mode="observe")
    assert guard.child().mode is Mode.OBSERVE
    assert guard.child(mode="enforce").mode is Mode.ENFORCE
    assert guard.child().run_id != guard.child().run_id
    assert guard.child().parent is guard


def test_what_is_in_flight_belongs_to_its_guard(make):
    guard = make()
    child = guard.child()
    mine = guard.admit_tool_call(ToolCall(name="a", id="1"))
    model = guard.admit_model_call()
    child.admit_tool_call(ToolCall(name="b"))
    assert guard.open_tool_calls() == (mine,)
    assert guard.open_calls() == (mine, model)
    assert [record.status for record in guard.tool_calls] == ["interrupted"]


# --- the rest -------------------------------------------------------------------------------


def test_a_budget_must_be_one(make):
    with pytest.raises(ConfigurationError, match=r"budget must be a Budget, got dict\. Build one"):
        make({"max_iterations": 3})
    with pytest.raises(ConfigurationError, match="a sink must take events, got int"):
        make(sinks=[5])


@pytest.mark.parametrize("run_id", ["", 5, b"r"])
def test_a_run_has_a_text_for_a_name(run_id):
    for make in (Guard, Guard().child):
        with pytest.raises(ConfigurationError, match=r"run_id must be a text, not empty, got "):
            make(run_id=run_id)


def test_failures_of_an_adapter_can_be_reported(make):
    guard = make()
    guard.tree.report("the view could not be drawn")
    guard.tree.report("view", OSError("gone"))
    assert guard.tree.errors == ("the view could not be drawn", "view: OSError: gone")


def test_a_refusal_changes_nothing(make):
    store = MemoryStore()
    guard = make(Budget(max_iterations=1, tool_quotas={"a": 1}))
    spend(guard)
    use(guard, "a")
    spend(guard)
    before = guard.snapshot()
    store.save(before)
    spend(guard)
    spend(guard, retry=True)
    assert guard.snapshot() == store.load("r") == before


def test_a_call_past_both_its_quota_and_the_cap_ends_the_run():
    guard = Guard(Budget(max_tool_calls=1, tool_quotas={"search": 1}))
    assert isinstance(guard.admit_tool_call(ToolCall(name="search")), Admit)
    decision = guard.admit_tool_call(ToolCall(name="search"))
    assert isinstance(decision, Stop)
    assert decision.trip.reason == "max_tool_calls"


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.OFF])
def test_an_abort_cancels_nothing_where_nothing_is_refused(mode):
    guard = Guard(Budget(), mode=mode)
    guard.abort()
    assert not guard.cancellation.cancelled
    assert isinstance(guard.admit_model_call(), Admit)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (ModelCall(input_tokens=-5), "input_tokens must be a whole number >= 0, got -5."),
        (
            ModelCall(input_tokens=10**5000),
            f"input_tokens must be a whole number >= 0 and <= {10**18}, got int",
        ),
        (ModelCall(cost_usd=Decimal("1E+999999999")), "cost_usd must be a Decimal >= 0, got Dec"),
        (
            ModelCall(input_tokens=float("nan")),
            "input_tokens must be a whole number >= 0, got nan.",
        ),
        (ModelCall(input_tokens=10.5), "input_tokens must be a whole number >= 0, got 10.5."),
        (ModelCall(input_tokens="5"), "input_tokens must be a whole number >= 0, got '5'."),
        (ModelCall(input_tokens=True), "input_tokens must be a whole number >= 0, got True."),
        (
            ModelCall(max_output_tokens=2.5),
            "max_output_tokens must be a whole number >= 1, got 2.5.",
        ),
        (
            ModelCall(max_output_tokens="5"),
            "max_output_tokens must be a whole number >= 1, got '5'.",
        ),
        (ModelCall(max_output_tokens=0), "max_output_tokens must be a whole number >= 1, got 0."),
        (
            ModelCall(max_output_tokens=float("nan")),
            "max_output_tokens must be a whole number >= 1, got nan.",
        ),
    ],
)
@pytest.mark.parametrize("bound", [None, 50])
def test_a_projection_that_makes_no_sense_counts_nothing(call, sentence, bound):
    guard = Guard(Budget(max_total_tokens=100, max_output_tokens_per_call=bound))
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        guard.admit_model_call(call)
    assert guard.usage.model_calls == 0


@pytest.mark.parametrize("option", ["on_warning", "price_book"])
def test_an_option_that_is_none_is_refused_where_it_is_given(option):
    with pytest.raises(ConfigurationError, match=f"{option} must be .*, got int. "):
        Guard(Budget(), **{option: 5})


@pytest.mark.parametrize("late", ["model", "tool"])
def test_a_call_that_takes_long_warns_when_it_ends_in_time_to_extend(late):
    clock = ManualClock()

    def on_warning(guard, event):
        guard.extend(max_seconds=100)

    guard = Guard(Budget(max_seconds=10), clock=clock, on_warning=on_warning)
    model = guard.admit_model_call()
    if late == "model":
        clock.advance(11)
    guard.settle_model_call(model, TokenUsage(1, 1))
    tool = guard.admit_tool_call(ToolCall(name="build"))
    if late == "tool":
        clock.advance(11)
    guard.settle_tool_call(tool, "built")
    assert guard.warnings == ("max_seconds",)
    assert isinstance(guard.admit_model_call(), Admit)


def test_a_copy_of_a_guard_is_the_guard():
    guard = Guard(Budget(max_iterations=1))
    assert copy.copy(guard) is guard
    assert copy.deepcopy({"guard": guard})["guard"] is guard


# --- what a sub-agent inherits --------------------------------------------------------------


def test_a_child_without_settings_of_its_own_has_its_parents(make):
    detection = LoopDetection(nudge_after=1, stop_after=2)
    guard = make(Budget(warn_at=0.5, loop_detection=detection))
    for budget in (None, Budget(max_iterations=9), Budget(max_iterations=8).raised({})):
        child = guard.child(budget)
        assert (child.budget.warn_at, child.budget.loop_detection) == (0.5, detection)
        assert child.budget.max_iterations == (None if budget is None else budget.max_iterations)
        grandchild = child.child()
        assert (grandchild.budget.warn_at, grandchild.budget.loop_detection) == (0.5, detection)
    child = guard.child(Budget(max_iterations=4))
    spend(child)
    spend(child)
    assert child.warnings == ("max_iterations",)
    use(child, "same")
    use(child, "same")
    assert child.take_nudge() is not None
    silent = make(Budget(loop_detection=None)).child(Budget(max_iterations=9))
    assert silent.budget.loop_detection is None


def test_a_childs_own_settings_are_its_own(make):
    guard = make(Budget(warn_at=0.5, loop_detection=None))
    own = Budget(warn_at=0.8, loop_detection=LoopDetection())
    assert guard.child(own).budget is own
    assert guard.child(Budget(loop_detection=None)).budget.warn_at == 0.5
    extended = guard.child(Budget(max_iterations=1))
    extended.extend(max_iterations=5)
    assert (extended.budget.warn_at, extended.budget.loop_detection) == (0.5, None)


@pytest.mark.parametrize("model", [123, ["m"], b"m"])
def test_a_model_that_is_no_name_is_a_clear_error_and_the_call_is_charged(make, model):
    guard = make(Budget(max_cost_usd=1))
    with pytest.raises(ConfigurationError, match="model must be a model's name, got "):
        guard.admit_model_call(ModelCall(model=model))
    assert guard.usage.model_calls == 0
    ticket = guard.admit_model_call(ModelCall(model="m", max_output_tokens=1))
    with pytest.raises(ConfigurationError, match="model must be a model's name, got "):
        guard.settle_model_call(ticket, TokenUsage(1_000_000, 0), model=model)
    assert (guard.usage.input_tokens, guard.usage.cost_usd) == (1_000_000, 1)
    assert guard.open_calls() == ()


# --- when the time begins -------------------------------------------------------------------


@pytest.mark.parametrize("ask", [spend, use])
def test_an_observed_child_over_its_cap_leaves_no_clock_above_it_unstarted(make, clock, ask):
    guard = make(Budget(max_seconds=10))
    child = guard.child(Budget(max_total_tokens=1), mode=Mode.OBSERVE)
    child.hold(Violation(reason=StopReason.FRAMEWORK_LIMIT))
    assert isinstance(ask(child), Admit)
    clock.advance(10)
    assert guard.usage.seconds == 10
    assert reasons(guard.admit_model_call()) == ["max_seconds"]


@pytest.mark.parametrize("ask", [spend, use])
def test_a_refused_first_call_leaves_no_clock_above_it_unstarted(make, clock, ask):
    guard = make(Budget(max_seconds=10))
    child = guard.child().child()
    child.abort()
    assert isinstance(ask(child), Stop)
    clock.advance(10)
    assert (guard.usage.seconds, child.usage.seconds) == (10, 10)
    assert reasons(guard.admit_model_call()) == ["max_seconds"]


# --- calls at the same time without an output bound ---------------------------------------------


LONG = 2_000


def test_a_fan_out_before_any_answer_stays_within_the_cap(make):
    book = PriceBook({"m": Price(input=0, output=10)})
    guard = make(Budget(max_cost_usd=Decimal("0.05")), price_book=book)
    answers = [guard.admit_model_call(ModelCall(model="m")) for _ in range(60)]
    admitted = [one for one in answers if isinstance(one, Admit)]
    for ticket in admitted:
        guard.settle_model_call(ticket, TokenUsage(0, 1_000))  # $0.01
    assert 1 <= len(admitted) <= 5
    assert guard.usage.cost_usd <= Decimal("0.05")
    assert reasons(answers[-1]) == ["max_cost_usd"]


def test_a_fan_out_of_sub_agents_stays_within_the_cap_of_the_whole(make):
    guard = make(Budget(max_total_tokens=5_000))
    answers = [guard.child().admit_model_call() for _ in range(60)]
    assert sum(isinstance(one, Admit) for one in answers) == 4
    assert guard.usage.reserved_tokens == 4 * 1_024


def test_a_call_by_itself_is_held_to_what_is_known_of_it(make):
    guard = make(Budget(max_total_tokens=110))
    spend(guard, TokenUsage(0, 100))
    assert isinstance(spend(guard, TokenUsage(0, 10)), Admit)
    assert reasons(spend(guard)) == ["max_total_tokens"]


def test_a_guess_is_no_projection_and_is_not_charged(make):
    guard = make(Budget(max_total_tokens=10_000, max_cost_usd=1))
    failed = guard.admit_model_call(ModelCall(model="m", input_tokens=10))
    assert guard.usage.reserved_tokens == 1_034
    guard.settle_model_call(failed, error=TimeoutError())
    assert (guard.usage.total_tokens, guard.usage.reserved_tokens) == (10, 0)
    assert guard.usage.cost_usd == Decimal("0.00001")
    guard.settle_model_call(guard.admit_model_call(ModelCall(model="m")))
    assert reasons(spend(guard, model="m")) == ["unmetered_usage"]


def test_a_guess_survives_a_restart(make):
    guard = make(Budget(max_total_tokens=10_000))
    spend(guard, TokenUsage(0, LONG))
    guard.admit_model_call(ModelCall(input_tokens=10))
    again = Guard.restore(guard.snapshot())
    assert again.usage.reserved_tokens == LONG + 10
    again.settle_model_call(*again.open_calls(), error="gone")
    assert (again.usage.total_tokens, again.usage.reserved_tokens) == (LONG + 10, 0)
    again.admit_model_call()
    assert again.usage.reserved_tokens == LONG


# --- the warning before a stop by projection ----------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "raised", "call"),
    [
        ("max_total_tokens", 1000, {"input_tokens": 90}),
        ("max_total_tokens", 1000, {"input_tokens": 90, "max_output_tokens": 10}),
        ("max_cost_usd", 1000, {"cost_usd": Decimal(90)}),
    ],
)
@pytest.mark.parametrize("extends", [True, False])
def test_the_warning_comes_before_a_stop_by_projection(make, cap, raised, call, extends):
    seen, events = [], []

    def on_warning(guard, event):
        seen.append((event.dimension, guard.trip))
        if extends:
            guard.extend(**{cap: raised})

    guard = make(Budget(**{cap: 100}), on_warning=on_warning, sinks=[events.append])
    spend(guard, TokenUsage(50, 0), model="m", cost_usd=Decimal(50))
    assert seen == []
    answer = guard.admit_model_call(ModelCall(**call))
    assert seen == [(cap, None)]
    assert isinstance(answer, Admit if extends else Stop)
    assert guard.warnings == (cap,)
    again = replay(events, price_book=BOOK)
    assert (again.trip, again.warnings) == (guard.trip, guard.warnings)
    assert again.snapshot().counters == guard.snapshot().counters


def test_a_stopped_run_is_not_warned_any_more(make):
    guard = make(Budget(max_total_tokens=100, max_iterations=10))
    guard.abort()
    guard.check()
    assert isinstance(spend(guard, input_tokens=200), Stop)
    assert guard.warnings == ()


def test_an_observed_run_that_only_looks_on_is_not_warned_of_projections(make):
    guard = make(Budget(max_total_tokens=100, max_cost_usd=100), mode=Mode.OBSERVE)
    spend(guard, input_tokens=200)
    assert guard.warnings == ("max_total_tokens",)
    guard.admit_model_call(ModelCall(input_tokens=200, cost_usd=Decimal(200)))
    assert guard.warnings == ("max_total_tokens",)


# --- what is asked, at its bounds -----------------------------------------------------------


def test_who_serves_a_model_decides_its_price(make):
    guard = make(Budget(max_cost_usd=1), price_book=PriceBook())
    assert isinstance(guard.admit_model_call(ModelCall(model="gpt-4o")), Admit)
    stop = guard.admit_model_call(ModelCall(model="gpt-4o", provider="ollama"))
    assert reasons(stop) == ["unpriced_model"]
    guard = make(Budget(max_cost_usd=1, on_unpriced="count_zero"), price_book=PriceBook())
    ticket = guard.admit_model_call(ModelCall(model="no-such-model", provider="ollama"))
    guard.settle_model_call(ticket, TokenUsage(10**6, 0), model="gpt-4o")
    assert (guard.usage.cost_usd, guard.usage.unpriced_calls) == (0, 1)


@pytest.mark.parametrize(
    ("budget", "call", "admitted"),
    [
        (Budget(max_total_tokens=100), {"input_tokens": 10}, 90),
        (Budget(max_cost_usd=Decimal("0.0001")), {"model": "m", "input_tokens": 20}, 40),
    ],
)
def test_a_bound_that_can_be_cut_to_fit_is_no_reason_to_warn(make, budget, call, admitted):
    guard = make(budget)
    ticket = guard.admit_model_call(ModelCall(max_output_tokens=500, **call))
    assert (ticket.max_output_tokens, guard.warnings) == (admitted, ())


def test_a_warning_of_a_projection_has_the_time_of_its_call(make, clock):
    seen = []
    guard = make(
        Budget(max_total_tokens=100), on_warning=lambda guard, event: seen.append(event.at_ns)
    )
    guard.admit_model_call()
    clock.advance(3)
    guard.admit_model_call(ModelCall(input_tokens=200))
    assert seen == [3 * 10**9]


def test_the_log_says_what_failed_by_its_kind_alone(make):
    events = []
    guard = make(sinks=[events.append])
    for error in ("no such secret", OSError("no such secret")):
        guard.settle_model_call(guard.admit_model_call(), error=error)
        guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="read")), error=error)
    failed = [event.error for event in events if getattr(event, "error", None)]
    assert failed == ["error", "error", "OSError", "OSError"]
    assert "secret" not in str(events)


def test_a_handoff_after_the_stop_is_stopped_by_the_same_trip(make):
    guard = make(Budget(max_tool_calls=1))
    calls = [ToolCall(name=name) for name in ("read", "read")] + [
        ToolCall(name="to_b", kind="handoff")
    ]
    admitted, *stops = guard.admit_tool_calls(calls)
    assert isinstance(admitted, Admit)
    assert [stop.trip for stop in stops] == [guard.trip] * 2


def test_a_correction_is_what_the_refused_call_says_and_what_the_log_has(make):
    events = []
    guard = make(sinks=[events.append])
    for _ in range(3):
        use(guard, "read")
    refused = use(guard, "read")
    assert isinstance(refused, Refuse)
    assert refused.detail == refused.message
    assert refused.message.startswith("You have called read with these arguments 3 times")
    guard = make(sinks=[events.append])
    for _ in range(3):
        use(guard, "read")
    nudge = guard.admit_model_call()
    assert isinstance(nudge, Nudge)
    assert [event.nudge for event in events if hasattr(event, "nudge")] == [nudge.message]


# Prompts and completions by themselves


def test_prompts_are_capped_by_themselves():
    guard = Guard(Budget(max_input_tokens=100))
    spend(guard, TokenUsage(60, 500), input_tokens=60)
    stop = guard.admit_model_call(ModelCall(input_tokens=41, max_output_tokens=500))
    assert stop.trip.detail == "max_input_tokens=100 would be exceeded: 60 used, 41 projected"
    again = Guard.restore(guard.snapshot(), Budget(max_input_tokens=100))
    assert isinstance(again.admit_model_call(ModelCall(input_tokens=100)), Admit)


def test_completions_are_capped_by_themselves_and_clamped_to_what_is_left():
    guard = Guard(Budget(max_output_tokens=100, max_output_tokens_per_call=80))
    first = guard.admit_model_call(ModelCall(input_tokens=10_000))
    second = guard.admit_model_call(ModelCall(input_tokens=10_000))
    assert (first.max_output_tokens, second.max_output_tokens) == (80, 20)
    assert second.clamped_by is StopReason.MAX_OUTPUT_TOKENS
    guard.settle_model_call(first, TokenUsage(10_000, 80))
    guard.settle_model_call(second, TokenUsage(10_000, 20))
    assert guard.warnings == ("max_output_tokens",)
    assert guard.admit_model_call().trip.reason is StopReason.MAX_OUTPUT_TOKENS


def test_a_fan_out_under_a_cap_on_completions_reserves_answers_of_unknown_length():
    guard = Guard(Budget(max_output_tokens=3_000))
    answers = [guard.admit_model_call(ModelCall(input_tokens=5)) for _ in range(4)]
    assert [type(one) for one in answers] == [Admit, Admit, Stop, Stop]


def test_what_a_call_in_flight_has_reserved_is_kept_in_a_snapshot():
    guard = Guard(Budget(max_input_tokens=100, max_output_tokens=100))
    guard.admit_model_call(ModelCall(input_tokens=60, max_output_tokens=70))
    again = Guard.restore(Snapshot.from_json(guard.snapshot().to_json()))
    (ticket,) = again.open_calls()
    again.settle_model_call(ticket, TokenUsage(60, 70))
    assert again.usage.reserved_tokens == 0
    assert again.admit_model_call(ModelCall(input_tokens=41)).trip.reason == "max_input_tokens"


def test_a_cap_on_completions_can_be_raised_and_keeps_a_reserve():
    guard = Guard(Budget(max_output_tokens=100, finalize_reserve=FinalizeReserve(tokens=40)))
    guard.settle_model_call(guard.admit_model_call(), TokenUsage(1, 60))
    guard.extend(max_output_tokens=200)
    assert isinstance(guard.admit_model_call(), Admit)
