from __future__ import annotations

import datetime as dt
import random
from zoneinfo import ZoneInfo, available_timezones

import pytest

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger import Key
from budgetguard_core.ledger.windows import as_keys, windows_at


def test_days_and_months_tile_in_every_zone():
    rnd, lengths = random.Random(3), set()
    for name in sorted(available_timezones()):
        zone = ZoneInfo(name)
        for _ in range(5):
            now = rnd.uniform(1104534000, 2051218800)
            day, month = windows_at("t", now, zone)
            after = windows_at("t", day.end, zone)[0]
            assert day.start <= now < day.end, name
            assert month.start <= day.start < day.end <= month.end, name
            assert after.start == day.end, name
            assert after.label > day.label, name
            assert windows_at("t", day.end - 0.001, zone)[0] == day, name
            lengths.add(round((day.end - day.start) / 3600, 2))
    assert 24.0 in lengths


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Europe/Berlin", dt.date(2026, 3, 29), 23),
        ("Europe/Berlin", dt.date(2026, 10, 25), 25),
        ("America/Havana", dt.date(2026, 11, 1), 25),  # midnight comes twice
        ("Africa/Cairo", dt.date(2026, 4, 24), 23),  # midnight does not come
        ("America/St_Johns", dt.date(2010, 11, 6), 24),  # 00:01 is 23:01 again
        ("America/St_Johns", dt.date(2010, 11, 7), 25),
        ("America/Toronto", dt.date(1919, 3, 30), 24),  # after 23:30 comes 00:30
        ("America/Toronto", dt.date(1919, 3, 31), 23),
        ("Australia/Lord_Howe", dt.date(2026, 10, 4), 23.5),
        ("Australia/Lord_Howe", dt.date(2026, 4, 5), 24.5),
    ],
)
def test_clocks_that_change_move_an_edge_and_leave_no_gap(zone, day, hours):
    where = ZoneInfo(zone)
    noon = dt.datetime(day.year, day.month, day.day, 12, tzinfo=where).timestamp()
    found = windows_at("t", noon, where)[0]
    assert found.label == f"d:{day}"
    assert (found.end - found.start) / 3600 == hours
    for step in range(int(found.start), int(found.end), 60):
        assert windows_at("t", step, where)[0] == found
    assert windows_at("t", found.end, where)[0].start == found.end


def test_labels_say_nothing_of_the_zone():
    now = dt.datetime(2026, 11, 22, 12, tzinfo=dt.UTC).timestamp()
    labels = {windows_at("t", now, ZoneInfo(zone))[0].label for zone in ("UTC", "Europe/Berlin")}
    assert labels == {"d:2026-11-22"}
    assert [window.oldest for window in windows_at("t", now, dt.UTC)] == [
        "d:2026-09-21",
        "m:2025-10",
    ]


@pytest.mark.parametrize(
    "name", ["", "a\n", "a\0", "a\x1f", "x" * 201, "é" * 101, "\ud800", 7, None, "a\x85", b"a"]
)
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ConfigurationError, match=r"^tenant must .* Use .*\.$"):
        as_keys([name])


def test_a_megabyte_is_not_repeated_in_the_message():
    with pytest.raises(ConfigurationError) as refused:
        Key("x" * 2**20)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("tenant", [(), ["a", "a"], 7, [f"k{n}" for n in range(17)]])
def test_what_is_no_tenant_is_refused(tenant):
    with pytest.raises(ConfigurationError, match="tenant must be a name"):
        as_keys(tenant)


@pytest.mark.parametrize("zone", ["Mars/Base", "", "../etc/passwd", "/etc/localtime", 5])
def test_what_is_no_time_zone_is_refused(zone):
    with pytest.raises(ConfigurationError, match="time_zone must be a name"):
        Key("acme", zone)


def test_one_tenant_or_several():
    assert as_keys("acme") == (Key("acme"),)
    assert as_keys(Key("acme", "Europe/Berlin")) == (Key("acme", "Europe/Berlin"),)
    assert as_keys(("acme", Key("u", "Asia/Tokyo")), "Europe/Berlin") == (
        Key("acme", "Europe/Berlin"),
        Key("u", "Asia/Tokyo"),
    )
