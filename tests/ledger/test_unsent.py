"""What could not be sent, in this process: a full disk, a fork, the next process."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from budgetguard_core.ledger import Ledger, LedgerError, LedgerRefused, Warned
from budgetguard_core.ledger import ledger as ledgers
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.sqlite import SqliteLedgerStore
from budgetguard_core.ledger.step import Step
from budgetguard_core.ledger.windows import Window
from ledger_servers import ZONE

WINDOWS = (Window("acme", "d:2026-11-22", 0.0, 0.0),)
CENT = 10**7


def silent(*_):
    raise LedgerUnreachable("nothing")


def report(name, usd=CENT):
    return Step("settle", name, WINDOWS, Amount(usd, 1))


def test_the_next_process_sends_the_latest_report_of_each_hold(tmp_path):
    first, sent = Outbox(tmp_path), []
    first.record(report("a"))
    first.record(report("a", 2 * CENT))
    first.record(report("b"))
    first.deliver_orphans(sent.append)  # they are its own
    assert sent == []
    Outbox(tmp_path).deliver_orphans(sent.append)
    assert sorted((step.id, step.amount.usd) for step in sent) == [("a", 2 * CENT), ("b", CENT)]
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_the_store_refuses_to_hear_is_dropped_and_the_rest_is_sent(tmp_path):
    outbox, sent = Outbox(tmp_path), []

    def send(step):
        if step.id == "wrong":
            raise LedgerError("other windows")
        sent.append(step.id)

    outbox.add(report("wrong"))
    outbox.add(report("right"))
    outbox.deliver(send)
    assert (sent, len(outbox)) == (["right"], 0)


def test_what_dead_processes_left_does_not_go_before_what_waits_here(sqlite, opened, monkeypatch):
    ledger = opened(sqlite, daily_usd=1)
    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "deliver_orphans", silent)
        run = ledger.attach("run", "acme", on_kill=id, on_warning=id)
        run.settle(run.obtain(Amount(CENT, 1)), Amount(CENT, 1))
        with pytest.raises(LedgerUnreachable):
            ledger.send_heartbeat()
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal("0.01"), 0)


def test_what_another_process_may_not_open_is_left_alone(tmp_path):
    (tmp_path / "folder.json").mkdir()
    Outbox(tmp_path).deliver_orphans(print)
    assert (tmp_path / "folder.json").exists()


def test_a_forked_child_leaves_the_file_to_its_parent(tmp_path):
    outbox, sent = Outbox(tmp_path), []
    outbox.record(report("a"))
    outbox.add(report("b"))
    outbox.forked()
    outbox.deliver(sent.append)
    assert (sent, len(outbox)) == ([], 0)
    outbox.record(report("a", 2 * CENT))
    assert len(list(tmp_path.glob("*.json"))) == 2


def unreachable(sqlite, tmp_path, **options):
    sqlite.path.mkdir()  # a folder where the file should be
    return Ledger(sqlite.url, on_ledger_error="allow", timeout=0.1, time_zone=ZONE, **options)


def test_a_call_that_cannot_be_written_down_is_not_allowed(sqlite, tmp_path, caplog):
    queue = tmp_path / "queue"
    queue.write_text("a file where the folder should be")
    with unreachable(sqlite, tmp_path, queue=queue) as ledger:
        run = ledger.attach("run", "acme", on_kill=print, on_warning=print)
        assert "must be writable" in run.obtain(Amount(CENT, 1)).detail
        with pytest.raises(LedgerRefused, match="queue of unsent reports must be writable"):
            ledger.reserve("acme", usd=1)
        run.report(Amount(CENT, 1))
        assert not ledger._heartbeat.tick()
        assert len(ledger._outbox) == 1
    assert "queue of unsent reports must be writable" in caplog.text


def test_a_heartbeat_that_fails_beats_on(sqlite, opened, monkeypatch, caplog):
    ledger = opened(sqlite)

    def fail(*_):
        raise RuntimeError("secret")

    monkeypatch.setattr(ledger._heartbeat, "all", fail)
    assert ledger._heartbeat.tick() is False
    assert "the heartbeat failed: RuntimeError" in caplog.text
    assert "secret" not in caplog.text


def test_a_fork_begins_anew_and_what_was_set_aside_stays_charged(place, opened, monkeypatch):
    ledger = opened(place)
    run = ledger.attach("run", "acme", on_kill=print, on_warning=print)
    run.obtain(Amount(CENT, 1))
    monkeypatch.setattr(ledgers, "_LEDGERS", [ledger])
    ledgers._before_fork()
    ledgers._forked()
    assert ledger.usage("acme").daily.reserved_usd >= Decimal("0.01")
    for left in ledger.connection._inherited:
        left.close()
    ledgers._close_all()
    assert ledger.connection._store is None


def test_a_warning_without_figures_where_the_store_does_not_answer(sqlite, opened, monkeypatch):
    ledger = opened(sqlite)
    told = []
    run = ledger.attach("run", "acme", on_kill=id, on_warning=told.append)
    with monkeypatch.context() as patch:
        patch.setattr(ledger.connection, "ask", silent)
        ledger._heartbeat.warn(WINDOWS[0])
    run.close()
    assert told == [Warned("acme", "tenant_daily", "d:2026-11-22")]


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0?socket_timeout=x", "redis://h?nobody=1"])
def test_a_redis_url_that_its_client_does_not_take_is_refused(url):
    from budgetguard_core.errors import ConfigurationError
    from budgetguard_core.ledger.redis import RedisLedgerStore

    with pytest.raises(ConfigurationError, match="must be one that redis-py understands"):
        RedisLedgerStore(url)


def test_a_file_that_cannot_be_made_is_no_ledger(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerUnreachable, match="must be usable, got File exists"):
        SqliteLedgerStore(tmp_path / "file" / "a")


def test_a_relative_file_stays_the_same_ledger_wherever_its_process_goes(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = SqliteLedgerStore("ledger.sqlite3")
    name = store.identity()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.identity() == name
    assert list((tmp_path / "elsewhere").iterdir()) == []
    store.close()


def test_a_settlement_that_finds_no_store_is_sent_later(sqlite, opened, monkeypatch):
    ledger = opened(sqlite)
    reservation = ledger.reserve("acme", usd=1)

    def silent(_):
        raise LedgerUnreachable("nothing")

    with monkeypatch.context() as patch:
        patch.setattr(ledger.connection, "send", silent)
        reservation.settle(0.5)
    ledger.send_heartbeat()
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal("0.5"), 0)


def test_a_data_base_of_a_newer_format_is_left_alone(tmp_path):
    import psycopg

    from ledger_servers import POSTGRES, Place, need

    need("postgres")
    place = Place("postgres", tmp_path)
    try:
        place.store().close()
        with psycopg.connect(POSTGRES, autocommit=True) as db:
            db.execute(f"UPDATE {place.name}.bg_notes SET text = '9' WHERE name = 'format'")
        with pytest.raises(LedgerUnreachable, match="format must be 1, got 9"):
            place.store()
    finally:
        place.remove()


@pytest.mark.parametrize(
    "wrong",
    [{"spent": [2**70, 1]}, {"spent": [-1, 1]}, {"owner": "\x00"}, {"windows": []}],
    ids=["too large", "negative", "a name that is none", "no window"],
)
def test_one_bad_report_in_the_queue_holds_up_nothing(place, opened, wrong, caplog):
    ledger = opened(place)
    folder = ledger._outbox._folder
    folder.mkdir(parents=True)
    usage = ledger.usage("ac\u00a0me")
    windows = [["ac\u00a0me", usage.daily.window], ["ac\u00a0me", usage.monthly.window]]
    good = {"op": 1, "windows": windows, "spent": [CENT, 1], "owner": "run"}
    for name, one in {"a": {"id": "bad"} | good | wrong, "b": {"id": "1"} | good}.items():
        (folder / f"{name}.json").write_text(json.dumps(one))
    ledger.send_heartbeat()
    assert ledger.usage("ac\u00a0me").daily.spent_usd == Decimal("0.01")
    assert [path.name for path in folder.iterdir()] == ["a.rejected"]
    assert "a report that no store can count" in caplog.text
