"""The rules of the ledger, through its own interface, on each of the stores."""

from __future__ import annotations

import pickle
import uuid
from decimal import Decimal

import pytest

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger import (
    Ledger,
    LedgerChanged,
    LedgerError,
    LedgerRefused,
    LedgerUnreachable,
    as_ledger,
)
from budgetguard_core.ledger import ledger as ledger_module
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.connection import parse_url
from budgetguard_core.ledger.step import Step
from budgetguard_core.testing import ManualClock
from ledger_servers import window_of


def charged(ledger, key="acme"):
    day = ledger.usage(key).daily
    return day.spent_usd + day.reserved_usd


def test_a_retry_after_a_lost_reply_counts_once(place, opened):
    ledger = opened(place, daily_usd=1)
    first = ledger.reserve("acme", usd=0.6, reservation_id="call-1")
    again = ledger.reserve("acme", usd=0.6, reservation_id="call-1")
    assert first.id == again.id
    assert charged(ledger) == Decimal("0.6")
    first.settle(0.25)
    again.settle(0.25)
    assert charged(ledger) == Decimal("0.25")


def test_a_ceiling_refuses_with_reason_limit_and_use(place, opened):
    ledger = opened(place, daily_usd=1, monthly_usd=1.5, daily_tokens=1000)
    ledger.reserve("acme", usd=0.75, tokens=900).settle(0.75, 900)
    with pytest.raises(LedgerRefused) as refused:
        ledger.reserve("acme", usd=0.5)
    assert (refused.value.reason, refused.value.limit, refused.value.used) == (
        "tenant_daily",
        Decimal(1),
        Decimal("0.75"),
    )
    assert "'acme' has used or reserved $0.75 of $1 of the day" in refused.value.detail
    with pytest.raises(LedgerRefused, match="900 of 1000 tokens of the day") as refused:
        ledger.reserve("acme", tokens=101)
    assert refused.value.limit == 1000
    ledger.reserve("acme", usd=0.25, tokens=100)
    assert pickle.loads(pickle.dumps(refused.value)).limit == 1000


def test_the_month_holds_across_days(sqlite, opened):
    clock = ManualClock()
    ledger = opened(sqlite, daily_usd=1, monthly_usd=1.5, clock=clock)
    ledger.reserve("acme", usd=1).settle(1)
    clock.advance(86400)
    with pytest.raises(LedgerRefused) as refused:
        ledger.reserve("acme", usd=0.75)
    assert refused.value.reason == "tenant_monthly"
    assert "of the month 1970-01" in refused.value.detail
    ledger.reserve("acme", usd=0.5).settle(0.5)


def test_several_keys_are_reserved_together_or_not_at_all(place, opened):
    ledger = opened(place, daily_usd=10)
    ledger.set_ceilings("acme/user-7", daily_usd=0.1)
    with pytest.raises(LedgerRefused, match="acme/user-7"):
        ledger.reserve(("acme", "acme/user-7"), usd=0.2)
    assert charged(ledger) == 0
    ledger.reserve(("acme", "acme/user-7"), usd=0.1).settle(0.05)
    assert charged(ledger) == charged(ledger, "acme/user-7") == Decimal("0.05")


def test_more_than_was_reserved_is_charged_and_refuses_what_follows(place, opened):
    ledger = opened(place, daily_usd=1)
    ledger.reserve("acme", usd=0.5).settle(1.25)
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.remaining_usd) == (Decimal("1.25"), Decimal(0))
    with pytest.raises(LedgerRefused):
        ledger.reserve("acme", usd=0.01)


def test_a_released_reservation_costs_nothing(place, opened):
    ledger = opened(place, daily_usd=1, monthly_tokens=50)
    ledger.reserve("acme", usd=1, tokens=10).release()
    usage = ledger.usage("acme")
    assert (usage.daily.remaining_usd, usage.monthly.remaining_tokens) == (1, 50)
    assert (usage.daily.remaining_tokens, usage.monthly.remaining_usd) == (None, None)


def test_stored_ceilings_win_over_defaults(place, opened):
    ledger = opened(place, daily_usd=1)
    ledger.set_ceilings(None, daily_usd=2)
    ledger.reserve("any", usd=1.5)
    ledger.set_ceilings("acme", daily_usd=3, monthly_tokens=10)
    ledger.reserve("acme", usd=2.5)
    with pytest.raises(LedgerRefused):
        ledger.reserve("acme", tokens=11)
    assert ledger.ceilings() == {
        "": {"d": Amount(2 * 10**9), "m": Amount()},
        "acme": {"d": Amount(3 * 10**9), "m": Amount(0, 10)},
    }
    ledger.clear_ceilings("acme")
    ledger.clear_ceilings(None)
    assert ledger.ceilings() == {}
    with pytest.raises(LedgerRefused):
        ledger.reserve("acme", usd=0.1)
    shown = {(row.key, row.window[0]): row.ceiling_usd for row in ledger.windows()}
    assert shown["acme", "d"] == 1  # the one that holds now


def test_a_ceiling_that_the_store_cannot_count_is_refused(place, opened, store):
    ledger = opened(place)
    most = parse_url(place.url).largest_ceiling
    with pytest.raises(ConfigurationError, match="must be below"):
        ledger.set_ceilings("acme", daily_tokens=most)
    ledger.set_ceilings("acme", daily_tokens=most - 1)
    ledger.reserve("acme", tokens=1).settle(0, 3)  # with more than was reserved, and of a run
    run = ledger.attach("run", "acme", on_kill=id, on_warning=id)
    run.settle(run.obtain(Amount(0, 2)), Amount(0, 2))
    ledger.close()
    assert ledger.usage("acme").daily.spent_tokens == 5


HOSTILE = [
    "x'; DROP TABLE windows; --",
    "*",
    "acme*",
    "a:b:c",
    "{budgetguard}:conf",
    "%d %s {0}",
    "../../etc/passwd",
    "аcme",  # noqa: RUF001 - a Cyrillic letter
    "acme ",
    "ACME",
    "acme\u202egpj",
    "😀" * 50,
]


@pytest.mark.slow
def test_hostile_names_reach_no_other_row_and_no_log_line(place, opened, caplog):
    ledger = opened(place, daily_usd=1)
    ledger.reserve("acme", usd=0.9).settle(0.9)
    for name in HOSTILE:
        reservation = ledger.reserve(name, run=name, usd=0.9, reservation_id=name)
        with pytest.raises(LedgerRefused) as refused:
            ledger.reserve(name, usd=0.2)
        reservation.settle(0.8)
        assert charged(ledger, name) == Decimal("0.8"), name
        ledger.set_ceilings(name, daily_usd=2)
        ledger.kill(tenant=name, who=f"{name}\n\x1b[2J", why="a\r\nb")
        with pytest.raises(LedgerRefused, match="was killed by") as refused:
            ledger.reserve(name, usd=0.1)
        assert refused.value.detail.isprintable(), name
        ledger.revive(tenant=name)
    assert charged(ledger) == Decimal("0.9")
    assert {row.key for row in ledger.windows()} == {"acme", *HOSTILE}
    assert set(ledger.ceilings()) == set(HOSTILE)
    assert ledger.kills() == []
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_a_kill_switch_refuses_until_it_is_taken_back(place, opened):
    ledger, other = opened(place), opened(place)
    for target in ({"tenant": "acme"}, {"run": "run-1"}, {"everything": True}):
        kill = ledger.kill(**target, who="ann", why="too dear")
        assert other.kills() == [kill]
        with pytest.raises(LedgerRefused, match=r"killed by ann at 20.*: too dear") as refused:
            other.reserve(("acme", "team"), "run-1", usd=0.1)
        assert refused.value.reason == "aborted"
        ledger.revive(**target)
        other.reserve(("acme", "team"), "run-1", usd=0.1).release()
    assert other.kills() == []


def test_a_kill_switch_that_cannot_be_read_is_set_all_the_same(place, opened, store):
    ledger = opened(place)
    store.write("f:t:acme", "not JSON")
    with pytest.raises(LedgerRefused, match="killed by nobody named"):
        ledger.reserve("acme", usd=0.1)


@pytest.mark.parametrize("target", [{}, {"tenant": "a", "run": "b"}, {"tenant": "a\n"}])
def test_a_kill_switch_has_one_target(sqlite, opened, target):
    ledger = opened(sqlite)
    with pytest.raises(ConfigurationError):
        ledger.kill(**target)


def test_a_reservation_is_settled_in_the_windows_that_it_was_made_in(place, opened):
    ledger = opened(place)
    reservation = ledger.reserve("acme", usd=1)
    windows = ledger._account("beta").windows(ledger.now())
    with pytest.raises(LedgerError, match="must be reported in the windows"):
        ledger.connection.send(Step("settle", reservation.id, windows))
    assert charged(ledger) == 1


def test_a_reservation_taken_back_or_settled_is_not_made_again(place, opened):
    ledger = opened(place)
    ledger.reserve("acme", usd=1, reservation_id="one").release()
    with pytest.raises(LedgerRefused, match="was settled or taken back"):
        ledger.reserve("acme", usd=1, reservation_id="one")


def test_sixteen_keys_are_one_step(place, opened):
    ledger = opened(place, daily_usd=10)
    keys = [f"key {number} ' :%{{}}" for number in range(16)]
    ledger.set_ceilings(keys[11], daily_usd=2)
    ledger.reserve(keys, usd=1).settle(1.5)
    with pytest.raises(LedgerRefused, match=r"key 11 .* has used or reserved .1.5 of .2 of"):
        ledger.reserve(keys, usd=1)
    assert [ledger.usage(key).daily.spent_usd for key in keys] == [Decimal("1.5")] * 16
    assert all(ledger.usage(key).daily.reserved_usd == 0 for key in keys)


def test_a_warning_is_given_to_one_taker_once_per_window(place, opened, caplog):
    ledger = opened(place, daily_usd=1, monthly_tokens=100)
    told = []
    run = ledger.attach("r", "acme", on_kill=told.append, on_warning=told.append)
    ledger.reserve("acme", usd=0.79, tokens=10).settle(0.79, 10)
    assert told == []
    run.close()
    with caplog.at_level("WARNING"):
        ledger.reserve("acme", usd=0.01, tokens=70)
        ledger.reserve("acme", usd=0.01, tokens=1)
    told = [text for record in caplog.records if "reached" in (text := record.getMessage())]
    assert [text[:40] for text in told] == [
        "'acme' reached 80 % of its ceiling (d:20",
        "'acme' reached 80 % of its ceiling (m:20",
    ]


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_window_that_a_call_or_a_report_brought_to_80_percent_warns_with_the_next(
    place, opened, is_reported
):
    ledger, told = opened(place, daily_usd=10), []
    run = ledger.attach("r", "acme", on_kill=told.append, on_warning=told.append)
    beta = ledger.attach("of another", "beta", on_kill=told.append, on_warning=told.append)
    if is_reported:  # nothing was reserved: the run only observes
        run.report(Amount(8 * 10**9))
    else:
        run.settle(run.obtain(Amount(10**9)), Amount(8 * 10**9))
    ledger.send_heartbeat()
    assert told == []  # a settlement asks for nothing that could be held back
    for _ in range(2):
        run.obtain(Amount(10**8))
    assert [(warned.reason, warned.limit, warned.used) for warned in told] == [
        ("tenant_daily", 10, Decimal("8.1"))
    ]
    beta.close()


def test_a_store_that_was_wiped_is_not_taken_for_an_empty_one(place, opened):
    ledger = opened(place, daily_usd=1)
    ledger.reserve("acme", usd=1).settle(1)
    known = ledger.id
    place.wipe()
    with pytest.raises(LedgerRefused, match="got an empty store"):
        ledger.reserve("acme", usd=1)
    other = opened(place, daily_usd=1)
    assert other.id != known  # a new process cannot know; it makes a ledger
    with pytest.raises(LedgerRefused, match="it was wiped, or is another"):
        ledger.reserve("acme", usd=1)
    with pytest.raises(LedgerChanged):
        opened(place, ledger_id=known).usage("acme")
    assert ledger.adopt() == other.id == opened(place).id != known
    ledger.reserve("acme", usd=1)
    opened(place, ledger_id=known).usage("acme")


def test_a_store_that_was_wiped_answers_so_nothing_is_allowed_for_its_absence(place, opened):
    ledger = opened(place, daily_usd=1, on_ledger_error="allow")
    ledger.reserve("acme", usd=1).settle(1)
    place.wipe()
    run = ledger.attach("run", "acme", on_kill=id, on_warning=id)
    assert run.obtain(Amount(1, 1)).detail.endswith(
        "accept it as it is with `budgetguard ledger adopt`."
    )
    with pytest.raises(LedgerRefused, match="it was wiped, or is another"):
        ledger.reserve("acme", usd=1)


def test_the_stores_clock_decides(sqlite, opened):
    ours, theirs = ManualClock(), ManualClock()
    theirs.advance(3 * 86400)
    ledger = opened(sqlite, time_zone="UTC", clock=ours)
    connection = ledger.connection
    connection.opener = lambda: sqlite.store(clock=theirs)
    for trips in (2, 3):
        assert ledger.reserve("acme", usd=1).windows[0].label == "d:1970-01-04"
        assert connection.trips == trips
    store = connection.store()
    real = store.step

    def racing(step):
        theirs.advance(86400)
        return real(step)

    store.step = racing
    with pytest.raises(LedgerRefused, match="clock must stand still"):
        ledger.reserve("acme", usd=1)


def test_a_clock_that_jumps_back_frees_nothing(sqlite, opened):
    clock = ManualClock()
    clock.advance(86400 * 10)
    ledger = opened(sqlite, daily_usd=1, clock=clock)
    ledger.reserve("acme", usd=1).settle(1)
    clock.advance(86400)
    ledger.reserve("acme", usd=1).settle(1)
    clock._now_ns -= 86400 * 10**9
    with pytest.raises(LedgerRefused):
        ledger.reserve("acme", usd=0.1)


def test_old_windows_are_forgotten_when_a_new_one_is_made(place, store):
    import datetime as dt

    from budgetguard_core.ledger.windows import windows_at

    now = dt.datetime(2026, 11, 22, tzinfo=dt.UTC).timestamp()
    for days in (500, 63, 62, 30, 0):
        windows = windows_at("acme", now - days * 86400, dt.UTC)
        one = Step("reserve", uuid.uuid4().hex, _always(windows), Amount(1, 1))
        assert store.step(one).status == "ok"
    labels = sorted(row.label for row in store.windows())
    assert labels == [
        "d:2026-09-21",
        "d:2026-10-23",
        "d:2026-11-22",
        "m:2026-09",
        "m:2026-10",
        "m:2026-11",
    ]


def _always(windows):
    return tuple(window._replace(start=0.0, end=4e10) for window in windows)


def test_a_refusal_leaves_no_trace(place, store):
    import datetime as dt

    from budgetguard_core.ledger.windows import windows_at

    now, need, ceiling = store.now(), Amount(9, 9), Amount(8, 8)
    for at in (now, now + 1000 * 86400):
        windows = [one._replace(ceiling=ceiling) for one in windows_at("acme", at, dt.UTC)]
        asked = store.step(Step("reserve", uuid.uuid4().hex, windows, need))
        assert asked.status == ("refused" if at == now else "clock")
    taken = Step("reserve", "held", windows_at("acme", now, dt.UTC), need)
    assert store.step(taken).status == "ok"
    for verb in ("reserve", "settle"):
        other = Step(verb, "held", windows_at("beta", now, dt.UTC), need)
        assert store.step(other).status == "windows"
    assert {row.key for row in store.windows()} == {"acme"}
    assert len(store.windows()) == 2


def test_a_client_whose_clock_is_years_ahead_has_nothing_forgotten(place, store):
    import datetime as dt

    from budgetguard_core.ledger.windows import windows_at

    windows = windows_at("acme", store.now(), dt.UTC)
    store.step(Step("settle", uuid.uuid4().hex, windows, Amount(1, 1)))
    ahead = windows_at("acme", store.now() + 1000 * 86400, dt.UTC)
    asked = Step("reserve", uuid.uuid4().hex, ahead, Amount(1, 1))
    assert store.step(asked).status == "clock"
    for named in (ahead, [window._replace(start=0.0, end=0.0, oldest="") for window in ahead]):
        store.step(Step("settle", uuid.uuid4().hex, named, Amount(1, 1)))
    for window in windows:
        assert window_of(store, *window[:2]).spent == Amount(1, 1)


def test_each_dimension_has_its_ceilings(place, opened):
    options = {"daily_model_calls": 4, "monthly_tool_calls": 2, "daily_tokens": 50}
    ledger = opened(place, **options)
    kept = ledger.reserve("acme", tokens=10, model_calls=3, tool_calls=1)
    for asked, reason, words in (
        ({"tokens": 41}, "tenant_daily", "10 of 50 tokens of the day"),
        ({"model_calls": 2, "tokens": 1}, "tenant_daily", "3 of 4 model calls of the day"),
        ({"tool_calls": 2, "model_calls": 0}, "tenant_monthly", "1 of 2 tool calls of the month"),
    ):
        with pytest.raises(LedgerRefused, match=words) as refused:
            ledger.reserve("acme", **asked)
        assert refused.value.reason == reason
    kept.settle(tokens=12)
    day = ledger.usage("acme").daily
    assert (day.spent_tokens, day.spent_model_calls, day.spent_tool_calls) == (12, 3, 1)
    assert (day.reserved_model_calls, day.ceiling_model_calls, day.ceiling_tool_calls) == (
        0,
        4,
        None,
    )
    with pytest.raises(TypeError, match="'daily_dollars'"):
        opened(place, daily_dollars=1)


def test_a_ledger_of_a_run_has_the_caps_of_the_run_in_every_process(place, opened):
    url = f"{place.url}{'&' if '?' in place.url else '?'}windows=run"
    caps = {"run_usd": 2, "run_tokens": 100, "run_model_calls": 3, "run_tool_calls": 2}
    opened(url).set_ceilings(None, **caps)
    ledger = opened(url)  # another process, that knows the URL only
    ledger.reserve("run", usd=1.5, tokens=90, tool_calls=2).settle(1.5, 90)
    for asked, reason, words in (
        ({"usd": 1}, "max_cost_usd", r"\$1.5 of \$2 of the run"),
        ({"tokens": 11}, "max_total_tokens", "90 of 100 tokens of the run"),
        ({"model_calls": 3}, "max_model_calls", "1 of 3 model calls of the run"),
        ({"tool_calls": 1}, "max_tool_calls", "2 of 2 tool calls of the run"),
    ):
        with pytest.raises(LedgerRefused, match=words) as refused:
            ledger.reserve("run", **asked)
        assert refused.value.reason == reason
    used = ledger.run_usage("run")
    assert (used.spent_usd, used.spent_model_calls, used.ceiling_model_calls) == (
        Decimal("1.5"),
        1,
        3,
    )
    for wrong in ({"daily_usd": 1}, {"monthly_tokens": 1}):
        with pytest.raises(ConfigurationError, match="must be of the ledger's windows"):
            opened(url, **wrong)
    with pytest.raises(ConfigurationError, match="must be of the ledger's windows"):
        opened(place, run_usd=1)
    with pytest.raises(ConfigurationError, match="windows must be run"):
        opened(url.replace("windows=run", "windows=day"))


def test_credentials_are_shown_nowhere(caplog):
    for scheme in ("redis", "postgresql"):
        ledger = Ledger(
            f"{scheme}://ann:s3cret@127.0.0.1:1/0?application_name=s3cret"
            if scheme == "postgresql"
            else f"{scheme}://ann:s3cret@127.0.0.1:1/0",
            timeout=0.2,
        )
        with pytest.raises(LedgerRefused) as refused:
            ledger.reserve("acme", usd=1)
        with pytest.raises(LedgerUnreachable) as failed:
            ledger.usage("acme")
        text = repr((ledger, ledger.url, refused.value, failed.value, caplog.text))
        assert "s3cret" not in text
        assert "ann" not in text
        assert failed.value.__cause__ is None
        assert "127.0.0.1:1" in ledger.url
        ledger.close()


@pytest.mark.parametrize(
    "url",
    [
        "mysql://host/x",
        "ledger.db",
        "sqlite://host/x",
        "sqlite:///",
        "sqlite:///x?cache=shared",
        "sqlite:///x?synchronous=sometimes",
        "redis://host:port/0",
        "redis://host/name",
        7,
    ],
)
def test_a_url_that_names_no_store_is_refused(url):
    with pytest.raises(ConfigurationError, match=r"must .*got .*\. Use "):
        Ledger(url)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("redis://host?db=1", "redis://host?db=2"),
        ("redis://host/1?name=a", "redis://host/1?name=b"),
        ("postgresql://host/x?options=-csearch_path%3Da", "postgresql://host/x"),
        ("postgresql:///x?host=a", "postgresql:///x?host=b"),
        ("postgresql://host?dbname=a", "postgresql://host?dbname=b"),
        ("postgresql://ann@host", "postgresql://bob@host"),  # each has a data base of that name
        ("postgresql://?service=a", "postgresql://?service=b"),
    ],
)
def test_what_waits_for_one_ledger_is_not_sent_to_another(one, other):
    assert parse_url(one).fingerprint != parse_url(other).fingerprint


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("redis://ann:a@host/1", "redis://ann:b@host/1"),
        ("postgresql://ann@host/x?password=a", "postgresql://ann@host/x?password=b"),
    ],
)
def test_what_waits_is_found_with_another_password(one, other):
    assert parse_url(one).fingerprint == parse_url(other).fingerprint


def test_a_socket_of_redis_is_a_place_too(tmp_path):
    with pytest.raises(LedgerUnreachable):
        Ledger(f"unix://{tmp_path}/none.sock?name=a", queue=tmp_path).now()


def test_several_servers_of_postgresql_are_one_ledger():
    found = parse_url("postgresql://ann:secret@one:5432,two:5433/x?target_session_attrs=primary")
    assert found.shown == "postgresql://one:5432,two:5433/x"


@pytest.mark.parametrize(
    "options",
    [
        {"on_ledger_error": "ignore"},
        {"timeout": 0},
        {"timeout": True},
        {"timeout": "1"},
        {"time_zone": "Nowhere"},
        {"daily_usd": -1},
    ],
)
def test_wrong_options_are_refused(sqlite, options):
    with pytest.raises(ConfigurationError):
        Ledger(sqlite.url, **options)


def test_a_missing_driver_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("budgetguard_core.ledger.connection.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r'pip install "\.\[redis\]"'):
        Ledger("redis://127.0.0.1")
    with pytest.raises(ConfigurationError, match=r'pip install "\.\[postgres\]"'):
        Ledger("postgresql://127.0.0.1/x")
    found = {"psycopg"}.intersection
    monkeypatch.setattr(
        "budgetguard_core.ledger.connection.find_spec", lambda name: found({name}) or None
    )
    with pytest.raises(ConfigurationError, match="needs psycopg_pool, which is not installed"):
        Ledger("postgresql://127.0.0.1/x")


def test_the_ledger_of_a_url_is_one_per_process(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    ledger = as_ledger(f"sqlite:///{tmp_path}/l.sqlite3")
    assert as_ledger(f"sqlite:///{tmp_path}/l.sqlite3") is ledger is as_ledger(ledger)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(ledger)
    with Ledger() as default:
        assert default.url == f"sqlite:///{tmp_path}/.budgetguard/ledger.sqlite3"
        default.reserve("acme", usd=1)
    assert (tmp_path / ".budgetguard" / "ledger.sqlite3").stat().st_mode & 0o77 == 0
    ledger_module._BY_URL.clear()
    ledger.close()
