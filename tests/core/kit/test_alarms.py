"""One thread waits for the deadlines of all blocking calls, and leaves nothing behind."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

from budgetguard_core import Budget
from budgetguard_core.kit import Envelope, Watch
from budgetguard_core.kit.alarms import ALARMS, Alarms

LATER = 10**6
PATIENCE = 60


@pytest.fixture
def alarms():
    return Alarms()


def test_an_alarm_goes_off_once_in_a_thread_of_its_own(alarms):
    heard, by = threading.Event(), []

    def ring():
        by.append(threading.current_thread())
        heard.set()

    waiting = alarms.set(LATER, ring)
    thread = alarms.thread
    alarms.set(0, ring)
    assert heard.wait(PATIENCE)
    waiting.cancel()
    assert len(by) == 1
    assert by[0] not in (thread, threading.main_thread())
    assert len(alarms) == 0


def test_what_is_due_earlier_than_the_others_goes_off_alone(alarms):
    heard = threading.Event()
    later = [alarms.set(LATER, pytest.fail) for _ in range(3)]
    alarms.set(0.01, heard.set)
    assert heard.wait(PATIENCE)
    assert len(alarms) == len(later)


def test_one_that_is_taken_back_leaves_nothing(alarms):
    class Kept:
        def ring(self):
            raise AssertionError("it was taken back")

    kept = Kept()
    gone = weakref.ref(kept)
    alarm = alarms.set(LATER, kept.ring)
    heard = threading.Event()
    alarms.set(0, heard.set)
    assert heard.wait(PATIENCE)  # the thread has looked at them, and sleeps again
    alarm.cancel()
    alarm.cancel()
    del kept, alarm
    gc.collect()
    assert (len(alarms), gone()) == (0, None)


def test_a_thousand_calls_have_one_thread_which_ends_when_nothing_is_set(alarms):
    threads = set()
    for _ in range(1_000):
        alarm = alarms.set(LATER, pytest.fail)
        threads.add(alarms.thread)
        alarm.cancel()
    # It ends after a second, so a slow machine may see a few.
    assert len(threads) < 100
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert alarms.thread is None


def test_after_its_end_the_next_alarm_is_heard(alarms):
    alarms.set(LATER, pytest.fail).cancel()
    alarms.thread.join(PATIENCE)
    heard = threading.Event()
    alarms.set(0, heard.set)
    assert heard.wait(PATIENCE)


def test_a_callback_that_blocks_or_fails_holds_up_no_other(alarms, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda error: None)
    release, heard = threading.Event(), threading.Event()
    alarms.set(0, lambda: release.wait(PATIENCE))
    alarms.set(0, lambda: 1 / 0)
    alarms.set(0.01, heard.set)
    assert heard.wait(PATIENCE)
    release.set()


def test_where_no_thread_is_to_be_had_it_is_tried_again(alarms, monkeypatch):
    start, heard, refused = threading.Thread.start, threading.Event(), []

    def failing(thread):
        if thread.name != "budgetguard-alarms" and len(refused) < 2:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    alarms.set(0, heard.set)
    assert heard.wait(PATIENCE)
    assert len(refused) == 2


def test_where_not_even_the_first_is_to_be_had_nothing_is_kept(alarms, monkeypatch):
    def failing(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", failing)
        with pytest.raises(RuntimeError):
            alarms.set(0, pytest.fail)
    assert (len(alarms), alarms.thread) == (0, None)
    heard = threading.Event()
    alarms.set(0, heard.set)
    assert heard.wait(PATIENCE)


def test_many_threads_set_and_take_back(alarms):
    heard = threading.Semaphore(0)

    def work():
        for number in range(200):
            alarm = alarms.set(LATER, pytest.fail)
            if number % 20 == 0:
                alarms.set(0, heard.release)
            alarm.cancel()

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for _ in range(16 * 10):
        assert heard.acquire(timeout=PATIENCE)
    for thread in threads:
        thread.join(PATIENCE)
    assert len(alarms) == 0


def test_a_handler_of_a_signal_may_set_one_while_its_thread_does(alarms):
    with alarms._changed:
        heard = threading.Event()
        alarms.set(0, heard.set)
    assert heard.wait(PATIENCE)


def test_a_watch_of_a_blocking_call_starts_no_thread_of_its_own():
    run = Envelope(budget=Budget(max_seconds=LATER)).open()
    run.guard.start()
    watches = [Watch(run, pytest.fail) for _ in range(50)]
    waiting = [one for one in threading.enumerate() if one.name == "budgetguard-alarms"]
    assert ALARMS.thread in waiting
    assert len(ALARMS) >= 50
    for watch in watches:
        watch.close()
    # Others of this process may have some.
    assert all(watch._timer not in ALARMS._set for watch in watches)


FORKING = """
import os, threading
from budgetguard_core.kit.alarms import ALARMS

inherited = ALARMS.set(10**6, print)
with ALARMS._changed:  # as if another thread had held it
    child = os.fork()
    if not child:
        heard = threading.Event()
        assert (len(ALARMS), ALARMS.thread) == (0, None)
        inherited.cancel()
        ALARMS.set(0, heard.set)
        os._exit(0 if heard.wait(60) else 1)
_, status = os.waitpid(child, 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_child_has_alarms_of_its_own():
    # Python 3.12 warns of every fork beside a thread.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interpreter_ends_while_alarms_are_set():
    code = "from budgetguard_core.kit.alarms import ALARMS; ALARMS.set(10**6, print)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
