"""A guard whose calls are charged to a tenant as well, in memory and in every store."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from decimal import Decimal
from pathlib import Path

import pytest

import budgetguard_core
from budgetguard_core import Budget, Guard
from budgetguard_core.decision import Admit, Stop
from budgetguard_core.errors import CheckpointError, ConfigurationError
from budgetguard_core.events import LimitNearlyReached, StopHeld
from budgetguard_core.kit import ModelCall, TokenUsage, ToolCall
from budgetguard_core.kit.envelope import Envelope
from budgetguard_core.ledger import Ledger, LedgerUnreachable
from budgetguard_core.outcome import Outcome
from budgetguard_core.replay import replay
from budgetguard_core.snapshot import Snapshot
from budgetguard_core.testing import ManualClock
from ledger_servers import wait_until


def call(usd="0.10"):
    return ModelCall(cost_usd=Decimal(usd), input_tokens=10, max_output_tokens=10)


def spend(guard, usd="0.10", tokens=20):
    """One model call; its ticket, or why it was stopped."""
    decision = guard.admit_model_call(call(usd))
    if isinstance(decision, Stop):
        return decision.trip.reason
    usage = TokenUsage(input_tokens=tokens // 2, output_tokens=tokens - tokens // 2)
    guard.settle_model_call(decision, usage, cost_usd=Decimal(usd))
    return decision


def day(ledger, key="acme"):
    ledger.send_heartbeat()
    return ledger.usage(key).daily


def ledger_code_of_a_step(guard):
    """The functions of the ledger's modules that a model call and a tool call run."""
    package = Path(budgetguard_core.__file__).parent
    found = set()

    def profile(frame, event, _):
        code = frame.f_code
        name = code.co_filename
        if event == "call" and name.startswith(str(package / "ledger")):
            found.add(code.co_name)

    before = sys.getprofile()
    gc.disable()  # what other tests left behind is not of this step
    sys.setprofile(profile)
    try:
        last = spend(guard)
        tool = guard.admit_tool_call(ToolCall(name="search", arguments={"q": id(last)}))
        if isinstance(tool, Admit):
            guard.settle_tool_call(tool, "found")
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


def test_a_step_without_a_ledger_runs_no_code_of_it(sqlite, opened):
    ledger = opened(sqlite, daily_usd=1000, clock=ManualClock())
    paid = Guard(ledger=ledger, tenant="acme")
    assert {"reserve", "settle"} <= ledger_code_of_a_step(paid)
    assert {"reserve", "settle"} <= ledger_code_of_a_step(paid.child(Budget(max_iterations=5)))
    # A ledger elsewhere in the process changes nothing for a run without one.
    free = Guard(Budget(max_iterations=2, max_cost_usd=1))
    for guard in (free, free.child(), Guard(mode="observe"), Guard(mode="off")):
        assert ledger_code_of_a_step(guard) == set()
    assert spend(free) == "max_iterations"
    assert ledger_code_of_a_step(free) == set()


def test_a_tenants_ceiling_stops_the_run(place, opened):
    ledger = opened(place, daily_usd=1)
    guard = Guard(Budget(max_iterations=50), ledger=ledger, tenant="acme")
    calls = 0
    while isinstance(last := spend(guard), Admit):
        calls += 1
    assert (calls, last) == (10, "tenant_daily")
    assert guard.trip.violations[0].limit == Decimal(1)
    assert "'acme'" in guard.trip.detail
    assert spend(guard) == "tenant_daily"  # sticky
    other = Guard(ledger=ledger, tenant="beta")
    assert isinstance(spend(other), Admit)
    ledger.close()
    assert ledger.usage("acme").daily.spent_usd == Decimal(1)
    assert ledger.usage("acme").daily.spent_tokens == 200


def test_a_month_and_a_token_ceiling_have_their_reasons(sqlite, opened):
    ledger = opened(sqlite, monthly_tokens=100)
    guard = Guard(ledger=ledger, tenant="acme")
    reasons = [spend(guard) for _ in range(6)]
    assert reasons[-1] == "tenant_monthly"
    assert guard.trip.violations[0].limit == 100


def test_tool_calls_are_reserved_where_a_ceiling_is_set_for_them(place, opened):
    ledger = opened(place, daily_tool_calls=3, daily_usd=5)
    first, second = (Guard(ledger=ledger, tenant="acme") for _ in range(2))
    calls = lambda: [ToolCall(name="search", arguments={"q": n}) for n in range(2)]  # noqa: E731
    taken = first.admit_tool_calls(calls())
    assert all(isinstance(one, Admit) for one in taken)
    first.settle_tool_call(taken[0], "found")
    first.withdraw(taken[1])
    _, admitted_too = second.admit_tool_calls(calls())
    assert isinstance(admitted_too, Admit)
    third = first.admit_tool_call(ToolCall(name="search", arguments={"q": 9}))
    assert third.trip.reason == "tenant_daily"
    assert "3 of 3 tool calls of the day" in third.trip.detail
    used = day(ledger)
    assert (used.spent_tool_calls, used.reserved_tool_calls) == (1, 2)
    trips = ledger.connection.trips
    free = Guard(ledger=opened(place, daily_usd=5), tenant="beta")
    assert isinstance(free.admit_tool_call(ToolCall(name="search")), Admit)
    assert ledger.connection.trips == trips


def test_a_run_without_any_ceiling_of_its_tenant_is_refused_where_it_opens(place, tmp_path):
    with Ledger(place.url, queue=tmp_path / "q", timeout=60.0) as ledger:
        words = (
            r"^a ceiling must be set for 'acme' in \S+, got none, so nothing would bound the run. "
            r"Set one with `budgetguard ledger set --tenant acme --daily-usd 20`, or a default for "
            r"all tenants with Ledger\(url, daily_usd=20\)\.$"
        )
        for make in (
            lambda: Guard(ledger=ledger, tenant="acme"),
            lambda: Guard().child(ledger=ledger, tenant="acme"),
            lambda: Envelope(budget=Budget(), ledger=ledger, tenant="acme").open(),
        ):
            with pytest.raises(ConfigurationError, match=words):
                make()
        assert ledger._heartbeat.all() == []
        Guard(mode="observe", ledger=ledger, tenant="acme")  # bounds nothing anyhow
        ledger.set_ceilings("acme", monthly_tool_calls=5)
        assert isinstance(spend(Guard(ledger=ledger, tenant="acme")), Admit)
        ledger.set_ceilings("beta")  # none, and somebody said so
        assert isinstance(spend(Guard(ledger=ledger, tenant="beta")), Admit)
        ledger.set_ceilings(None, daily_usd=1)
        assert isinstance(spend(Guard(ledger=ledger, tenant="gamma")), Admit)


def test_threads_of_many_runs_never_pass_it(sqlite, opened):
    ledger = opened(sqlite, daily_usd=5)
    made = []

    def work():
        guard = Guard(ledger=ledger, tenant="acme")
        while isinstance(spend(guard), Admit):
            made.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 50


def test_a_used_up_ceiling_refuses_a_call_without_a_projection(sqlite, opened):
    ledger = opened(sqlite, daily_usd=0.1)
    guard = Guard(ledger=ledger, tenant="acme")
    free = ModelCall(cost_usd=Decimal(0))
    ticket = guard.admit_model_call(free)
    guard.settle_model_call(ticket, TokenUsage(5, 5), cost_usd=Decimal("0.1"))
    assert guard.admit_model_call(free).trip.reason == "tenant_daily"


def test_the_runs_own_caps_come_with_their_own_reason_and_give_the_place_back(sqlite, opened):
    ledger = opened(sqlite, daily_usd=1)
    guard = Guard(Budget(max_iterations=1), ledger=ledger, tenant="acme")
    spend(guard)
    assert spend(guard) == "max_iterations"
    assert spend(guard) == "max_iterations"
    withdrawn = Guard(ledger=ledger, tenant="acme")
    withdrawn.withdraw(withdrawn.admit_model_call(call()))
    ledger.close()
    assert ledger.usage("acme").daily.spent_usd == Decimal("0.1")
    assert ledger.usage("acme").daily.reserved_usd == 0


def test_what_is_never_settled_stays_charged(sqlite, opened):
    ledger = opened(sqlite, daily_usd=1)
    guard = Guard(ledger=ledger, tenant="acme")
    guard.admit_model_call(call("0.4"))
    ledger.close()
    assert ledger.usage("acme").daily.remaining_usd == Decimal("0.6")


def test_a_failed_call_without_usage_is_charged_as_reserved(sqlite, opened):
    ledger = opened(sqlite)
    guard = Guard(ledger=ledger, tenant="acme")
    ticket = guard.admit_model_call(call("0.4"))
    assert guard.settle_model_call(ticket, error="timeout")
    assert not guard.settle_model_call(ticket, error="timeout")
    ledger.close()
    usage = ledger.usage("acme").daily
    assert (usage.spent_usd, usage.spent_tokens) == (Decimal("0.4"), 20)


def test_sub_agents_are_charged_once(sqlite, opened):
    ledger = opened(sqlite)
    guard = Guard(ledger=ledger, tenant="acme")
    part = guard.child(ledger=ledger, tenant="acme")
    other = part.child(ledger=ledger, tenant="beta")
    spend(other)
    ledger.close()
    assert ledger.usage("acme").daily.spent_usd == Decimal("0.1")
    assert ledger.usage("beta").daily.spent_usd == Decimal("0.1")


def test_an_ancestors_tenant_ends_both(sqlite, opened):
    ledger = opened(sqlite, daily_usd=0.2)
    guard = Guard(ledger=ledger, tenant="acme")
    part = guard.child(Budget(max_iterations=9))
    spend(part)
    spend(part)
    assert spend(part) == "tenant_daily"
    assert guard.trip is not None


def test_observe_records_the_stop_and_charges_on(sqlite, opened):
    ledger = opened(sqlite, daily_usd=0.2)
    guard = Guard(mode="observe", ledger=ledger, tenant="acme")
    assert all(isinstance(spend(guard), Admit) for _ in range(4))
    assert guard.trip is None
    assert guard.observed_trip.reason == "tenant_daily"
    assert day(ledger).spent_usd == Decimal("0.4")
    off = Guard(mode="off", ledger=ledger, tenant="acme")
    assert isinstance(spend(off), Admit)


def test_a_warning_at_80_percent_comes_once_per_window(sqlite, opened):
    ledger = opened(sqlite, daily_usd=1)
    told, events = [], []
    guard = Guard(
        ledger=ledger,
        tenant="acme",
        on_warning=lambda guard, event: told.append((event.dimension, event.limit, event.used)),
        sinks=[events.append],
    )
    for _ in range(9):
        spend(guard)
        ledger.send_heartbeat()
    assert told == [("tenant_daily", "1", "0.8")]
    assert guard.warnings == ("tenant_daily",)
    assert sum(isinstance(event, LimitNearlyReached) for event in events) == 1
    tokens = opened(sqlite, daily_tokens=400)
    guard = Guard(
        ledger=tokens,
        tenant="beta",
        on_warning=lambda guard, event: told.append((event.limit, event.used)),
    )
    spend(guard, tokens=390)
    spend(guard)
    tokens.send_heartbeat()
    assert guard.trip.reason == "tenant_daily"
    assert told[1:] == []  # beyond 80 % and refused at once


@pytest.mark.slow
def test_a_kill_switch_aborts_runs_in_every_process(place, opened, heartbeat):
    ledger, operator = opened(place), opened(place)
    cancelled = threading.Event()
    guard = Guard(ledger=ledger, tenant="acme", run_id="run-1")
    guard.cancellation.on_cancel(cancelled.set)
    untouched = Guard(ledger=ledger, tenant="acme", run_id="run-2")
    spend(guard)
    operator.kill(run="run-1", who="ann", why="loops")
    assert cancelled.wait(60)  # by the heartbeat's own thread
    assert spend(guard) == "aborted"
    assert "killed by ann at" in guard.trip.detail
    assert guard.trip.detail.endswith(": loops")
    assert isinstance(spend(untouched), Admit)
    operator.kill(tenant="acme")
    late = Guard(ledger=ledger, tenant="acme")
    ledger.send_heartbeat()
    assert spend(late) == "aborted"
    operator.revive(tenant="acme")
    ledger.send_heartbeat()
    assert isinstance(spend(Guard(ledger=ledger, tenant="acme")), Admit)


def test_a_kill_that_comes_before_the_first_event_is_logged_after_it(sqlite, opened, monkeypatch):
    attach = Ledger.attach

    def attached(self, *given, on_kill, **more):
        run = attach(self, *given, on_kill=on_kill, **more)
        on_kill("killed at once")  # by the heartbeat's thread, before the guard is whole
        return run

    monkeypatch.setattr(Ledger, "attach", attached)
    told = []
    guard = Guard(ledger=opened(sqlite), tenant="acme", sinks=[told.append])
    assert [event.event for event in told] == ["run_started", "aborted"]
    assert spend(guard) == "aborted"
    assert replay(told).trip == guard.trip


class Beats:
    """In place of the heartbeat's event: says how long a beat may wait, and ends it when told."""

    def __init__(self):
        self.asked, self.is_over, self._let_go = [], False, threading.Semaphore(0)

    def wait(self, seconds):
        self.asked.append(seconds)
        assert self._let_go.acquire(timeout=300)

    def send_heartbeat(self):
        self._let_go.release()

    def set(self):
        """Wake nobody before the end: only a beat that was due anyway counts."""
        if self.is_over:
            self.send_heartbeat()

    def clear(self):
        pass

    def is_set(self):
        return True


def test_a_kill_is_seen_by_the_next_beat_which_comes_within_half_a_second(place, opened, heartbeat):
    ledger, operator = opened(place), opened(place)
    beats = ledger._heartbeat._event = Beats()
    cancelled = threading.Event()
    guard = Guard(ledger=ledger, tenant="acme")
    guard.cancellation.on_cancel(cancelled.set)
    guard.admit_model_call(call())  # and hangs
    beats.send_heartbeat()
    wait_until(lambda: len(beats.asked) == 2)
    operator.kill(tenant="acme", who="ann")
    assert not cancelled.is_set()
    beats.send_heartbeat()
    try:
        assert cancelled.wait(60)
        assert set(beats.asked) == {0.5}
    finally:
        beats.is_over = True


def test_a_kill_reaches_a_call_that_hangs_in_an_event_loop(sqlite, opened, heartbeat):
    """By the clock, with the patience that a loaded machine needs; the beats are tested above."""
    ledger = opened(sqlite)

    async def main():
        guard = Guard(ledger=ledger, tenant="acme")
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        guard.cancellation.on_cancel(lambda: loop.call_soon_threadsafe(woken.set))
        guard.admit_model_call(call())
        await loop.run_in_executor(None, lambda: ledger.kill(everything=True, who="ann"))
        await asyncio.wait_for(woken.wait(), 60)
        return guard

    assert asyncio.run(main()).check().reason == "aborted"


def test_a_store_that_cannot_be_reached_ends_the_run_gracefully(opened):
    ledger = opened("redis://127.0.0.1:1/0", timeout=0.2)
    guard = Guard(Budget(max_iterations=5), ledger=ledger, tenant="acme")
    assert spend(guard) == "aborted"
    assert "must answer in time" in guard.trip.detail


def test_or_lets_it_go_on_and_charges_it_later(sqlite, opened, tmp_path):
    ledger = opened(sqlite, on_ledger_error="allow", timeout=0.1, daily_usd=0.5)
    sqlite.path.mkdir()  # a folder where the file should be
    guard = Guard(ledger=ledger, tenant="acme")
    assert isinstance(spend(guard), Admit)
    assert isinstance(spend(guard), Admit)
    assert len(list((tmp_path / "queue").rglob("*.json"))) == 2
    sqlite.path.rmdir()
    wait_until(lambda: _is_charged(ledger, "0.2"))
    assert list((tmp_path / "queue").rglob("*.*")) == []


def _is_charged(ledger, usd):
    try:
        ledger.send_heartbeat()
        return ledger.usage("acme").daily.spent_usd == Decimal(usd)
    except Exception:
        return False


UNPRICED = ModelCall(model="nobody-knows-it", input_tokens=10, max_output_tokens=10)


def test_an_unknown_price_is_refused_under_a_tenants_dollar_ceiling(place, opened):
    ledger = opened(place, monthly_usd=5)
    guard = Guard(ledger=ledger, tenant="acme")
    refused = guard.admit_model_call(UNPRICED)
    assert refused.trip.reason == "unpriced_model"
    assert "'nobody-knows-it' and a tenant's ceiling in dollars" in refused.trip.detail
    assert day(ledger).reserved_tokens == 0
    named = Guard(ledger=ledger, tenant="acme")
    given = ModelCall(model="nobody-knows-it", cost_usd=Decimal(1))
    assert isinstance(named.admit_model_call(given), Admit)
    free = Guard(Budget(on_unpriced="count_zero"), ledger=ledger, tenant="acme")
    assert isinstance(free.admit_model_call(UNPRICED), Admit)


def test_the_ceilings_that_the_store_holds_decide_whether_a_price_is_needed(place, opened):
    ledger = opened(place, daily_tokens=1000)

    def reason():
        return getattr(Guard(ledger=ledger, tenant="acme").admit_model_call(UNPRICED), "trip", None)

    assert reason() is None
    ledger.set_ceilings("acme", daily_usd=1)
    assert reason().reason == "unpriced_model"
    ledger.set_ceilings("acme")
    ledger.set_ceilings(None, monthly_usd=1)
    assert reason() is None  # its own ceilings win over the default
    ledger.clear_ceilings("acme")
    assert reason().reason == "unpriced_model"


def test_another_processs_ceiling_is_seen_after_a_second(sqlite, opened):
    clock = ManualClock()
    ledger, operator = opened(sqlite, clock=clock), opened(sqlite)
    guard = Guard(ledger=ledger, tenant="acme")
    assert isinstance(guard.admit_model_call(UNPRICED), Admit)
    operator.set_ceilings("acme", daily_usd=1)
    trips = ledger.connection.trips
    assert isinstance(guard.admit_model_call(UNPRICED), Admit)
    assert ledger.connection.trips - trips <= 1
    clock.advance(2)
    assert guard.admit_model_call(UNPRICED).trip.reason == "unpriced_model"


def test_a_store_that_cannot_be_asked_leaves_it_at_what_it_said(sqlite, opened, monkeypatch):
    clock = ManualClock()
    ledger = opened(sqlite, clock=clock)
    account = ledger._account("acme")

    def silent(_):
        raise LedgerUnreachable("nothing")

    with monkeypatch.context() as patch:
        patch.setattr(ledger.connection, "ask", silent)
        assert all(one.usd for one in ledger._ceilings.of(account))  # one may be there
    assert not any(one.usd for one in ledger._ceilings.of(account))
    clock.advance(2)
    monkeypatch.setattr(ledger.connection, "ask", silent)
    assert not any(one.usd for one in ledger._ceilings.of(account))
    monkeypatch.undo()


def test_observe_records_an_unknown_price_and_charges_on(sqlite, opened):
    ledger = opened(sqlite, daily_usd=1)
    guard = Guard(mode="observe", ledger=ledger, tenant="acme")
    ticket = guard.admit_model_call(UNPRICED)
    guard.settle_model_call(ticket, TokenUsage(10, 10))
    assert guard.observed_trip.reason == "unpriced_model"
    ledger.close()
    assert ledger.usage("acme").daily.spent_tokens == 20


def test_ledger_and_tenant_belong_together(sqlite):
    with pytest.raises(ConfigurationError, match="got no tenant"):
        Guard(ledger=sqlite.url)
    with pytest.raises(ConfigurationError, match="got no ledger"):
        Guard(tenant="acme")
    with pytest.raises(ConfigurationError, match="got no tenant"):
        Envelope(budget=Budget(), ledger=sqlite.url)
    with pytest.raises(ConfigurationError, match="must be left out with a Guard"):
        Envelope(budget=Guard(), ledger=Ledger(sqlite.url), tenant="acme")
    with pytest.raises(ConfigurationError, match="must be a URL or a Ledger"):
        Guard(ledger=7, tenant="acme")


def test_an_envelope_charges_its_runs(sqlite, opened):
    ledger = opened(sqlite, daily_usd=0.2)
    envelope = Envelope(budget=Budget(), ledger=ledger, tenant=iter(["acme", "team"]))
    for _ in range(2):
        run = envelope.open()
        assert isinstance(spend(run.guard), Admit)
        with_part = run.guard.child()
        assert with_part.parent is run.guard
    assert spend(envelope.open().guard) == "tenant_daily"
    assert day(ledger, "team").spent_usd + day(ledger, "team").reserved_usd == Decimal("0.2")


def test_a_tenant_from_the_frameworks_configuration(sqlite, opened):
    ledger = opened(sqlite)
    envelope = Envelope(
        budget=Budget(), ledger=ledger, tenant=lambda config: config["configurable"]["tenant"]
    )
    run = envelope.open(config={"configurable": {"tenant": "acme"}})
    spend(run.guard)
    ledger.close()
    assert ledger.usage("acme").daily.spent_usd == Decimal("0.1")
    with pytest.raises(ConfigurationError, match="tenant must find a name"):
        envelope.open(config={})


def test_a_restored_run_is_charged_for_what_is_new(sqlite, opened):
    ledger = opened(sqlite)
    guard = Guard(ledger=ledger, tenant="acme")
    spend(guard)
    again = Guard.restore(guard.snapshot(), ledger=ledger, tenant="acme")
    spend(again)
    part = Guard.restore(guard.snapshot(), within=[again], ledger=ledger, tenant="beta")
    spend(part)
    ledger.close()
    assert ledger.usage("acme").daily.spent_usd == Decimal("0.3")
    assert ledger.usage("beta").daily.spent_usd == Decimal("0.1")


def test_a_run_that_a_tenant_pays_for_does_not_go_on_without_its_ledger(sqlite, opened):
    ledger = opened(sqlite)
    guard = Guard(Budget(max_cost_usd=1), ledger=ledger, tenant=("acme", "acme/u7"))
    spend(guard)
    snapshot = Snapshot.from_json(guard.snapshot().to_json())
    assert snapshot.tenant == ("acme", "acme/u7")
    needed = "needs its ledger again, got none for 'acme', 'acme/u7'"
    for budget in (None, Budget(max_cost_usd=2)):
        with pytest.raises(CheckpointError, match=needed):
            Guard.restore(snapshot, budget)
    with pytest.raises(CheckpointError, match=needed):
        Envelope(budget=Budget(max_cost_usd=1)).open(resume=snapshot)
    anew = Guard(Budget(max_cost_usd=1))
    with pytest.raises(CheckpointError, match=needed):
        Guard.restore(snapshot, onto=anew)
    assert anew.usage.model_calls == 0
    paid = Guard(ledger=ledger, tenant=("acme/u7", "acme"))
    Guard.restore(snapshot, onto=paid)


def test_a_run_whose_tenant_pays_above_it_goes_on_there(sqlite, opened):
    ledger = opened(sqlite)
    parent = Guard(ledger=ledger, tenant="acme")
    own = parent.child(ledger=ledger, tenant="acme").snapshot()
    part = Guard.restore(own, within=[parent])
    spend(part)
    assert Guard.restore(parent.child().snapshot()).snapshot().tenant == ()
    beta = parent.child(ledger=ledger, tenant="beta").snapshot()
    with pytest.raises(CheckpointError, match="got none for 'beta'"):
        Guard.restore(beta, within=[parent])
    ledger.close()
    assert ledger.usage("acme").daily.spent_usd == Decimal("0.1")


def test_a_run_goes_on_without_its_tenant_where_somebody_says_so(sqlite, opened):
    guard = Guard(ledger=opened(sqlite), tenant="acme")
    snapshot = guard.snapshot()
    Guard.restore(snapshot.model_copy(update={"mode": "off"}))  # nothing bounds it anyhow
    with pytest.raises(CheckpointError, match="got none for 'acme'"):
        Guard.restore(snapshot, ledger=opened(sqlite), tenant="another")
    freed = snapshot.model_copy(update={"tenant": ()})
    Guard.restore(freed)
    Guard.restore(freed, ledger=opened(sqlite), tenant="another")
    earlier = json.loads(snapshot.to_json())
    del earlier["tenant"]  # as an earlier release wrote it
    assert Guard.restore(Snapshot.from_json(json.dumps(earlier))).run_id == guard.run_id


def test_the_log_of_a_restored_tenants_run_is_replayed(sqlite, opened):
    events, ledger = [], opened(sqlite)
    guard = Guard(ledger=ledger, tenant="acme")
    spend(guard)
    again = Guard.restore(guard.snapshot(), ledger=ledger, tenant="acme", sinks=[events.append])
    spend(again)
    assert replay(events).usage.model_calls == 2


def conclude(guard, status, reason):
    # pydantic keeps the locals of the frame that first builds a model.
    usage = guard.usage
    guard.conclude(Outcome(status=status, stop_reason=reason, run_id=guard.run_id, usage=usage))


def test_nothing_is_kept_of_a_run_that_ended(sqlite, opened):
    ledger = opened(sqlite)
    guard = Guard(ledger=ledger, tenant="acme")
    spend(guard)
    conclude(guard, "paused", None)
    assert len(ledger._heartbeat.all()) == 1
    conclude(guard, "completed", "completed")
    assert len(ledger._heartbeat.all()) == 0
    spend(guard)  # shared by another run
    assert len(ledger._heartbeat.all()) == 1
    lost = Guard(ledger=ledger, tenant="acme")
    del guard, lost
    gc.collect()
    ledger.send_heartbeat()
    wait_until(lambda: not ledger._heartbeat.all())


def test_the_stop_is_in_the_log(sqlite, opened):
    ledger = opened(sqlite, daily_usd=0.1)
    events = []
    guard = Guard(ledger=ledger, tenant="acme", sinks=[events.append])
    spend(guard)
    spend(guard)
    (held,) = [event for event in events if isinstance(event, StopHeld)]
    assert held.violation.reason == "tenant_daily"
    assert replay(events).trip == guard.trip


def test_no_lock_of_the_guard_is_held_during_a_trip(sqlite, opened):
    ledger = opened(sqlite, daily_usd=10)
    guard, asked = Guard(ledger=ledger, tenant="acme"), []
    store = ledger.connection.store()
    real = store.step

    def step(message):
        def use():
            asked.append((guard.check(), guard.usage.model_calls))

        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "the guard is locked while the store is asked"
        return real(message)

    store.step = step
    assert isinstance(spend(guard), Admit)
    assert asked
