"""The lock beside a SQLite file: bounded, handed over, never left with somebody who gave up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from budgetguard_core.file_lock import FileLock
from ledger_servers import wait_until


def opened(folder, timeout):
    """A lock that was held before, so that it waits in the kernel."""
    lock = FileLock(folder / "lock", 30.0)
    with lock:
        pass
    lock._timeout = timeout
    return lock


@pytest.fixture
def locks(tmp_path):
    """Locks of one file, each with a descriptor of its own, as processes have them."""
    made = []

    def make(timeout=30.0):
        made.append(opened(tmp_path, timeout))
        return made[-1]

    yield make
    for one in made:
        one.close()


def is_free(path):
    other = FileLock(path, 0.0)
    try:
        return other.acquire()
    finally:
        other.close()


def test_one_holder_at_a_time_and_every_waiter_gets_it(locks):
    inside, most, turns = 0, 0, 0

    def work(lock):
        nonlocal inside, most, turns
        for _ in range(200):
            with lock:
                inside += 1
                most = max(most, inside)
                turns += 1
                inside -= 1

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, locks()) for _ in range(6)]:
            done.result()
    assert (most, turns, inside) == (1, 1200, 0)


def test_a_waiter_is_woken_by_the_release(locks):
    holder, waiter, got = locks(), locks(), threading.Event()

    def wait():
        with waiter:
            got.set()

    with holder:
        thread = threading.Thread(target=wait)
        thread.start()
        assert not got.is_set()
    thread.join()
    assert got.is_set()


def test_who_gave_up_is_not_given_the_lock(locks, tmp_path):
    holder, waiter = locks(), locks(0.01)
    with holder:
        for _ in range(3):  # the thread that waits in the kernel is the same
            with pytest.raises(TimeoutError, match="held it"):
                waiter.__enter__()
    # The thread may get it now; it gives it on.
    wait_until(lambda: is_free(tmp_path / "lock"))
    with waiter:
        assert not is_free(tmp_path / "lock")
    assert is_free(tmp_path / "lock")


def test_who_gave_up_may_ask_again_and_is_given_it(locks):
    holder, waiter, other = locks(), locks(0.01), locks(0.0)
    with holder, pytest.raises(TimeoutError):
        waiter.__enter__()
    waiter._timeout = 30.0
    for _ in range(50):
        with waiter, pytest.raises(TimeoutError):
            other.__enter__()


def test_closing_while_the_thread_waits_frees_everything(locks, tmp_path):
    holder, waiter = locks(), opened(tmp_path, 0.01)
    with holder:
        with pytest.raises(TimeoutError):
            waiter.__enter__()
        waiter.close()
        assert not is_free(tmp_path / "lock")
    wait_until(lambda: is_free(tmp_path / "lock"))
    wait_until(lambda: not any(one.name == "budgetguard-lock" for one in threading.enumerate()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_closes_its_copy_while_the_parents_thread_waits(locks, tmp_path):
    holder, waiter = locks(), opened(tmp_path, 0.01)
    with holder:
        with pytest.raises(TimeoutError):
            waiter.__enter__()
        child = os.fork()
        if child == 0:
            waiter.close()
            try:
                os.fstat(waiter._fd)
            except OSError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    waiter.close()
    wait_until(lambda: is_free(tmp_path / "lock"))


def test_a_killed_holder_leaves_it_to_the_waiter(locks, tmp_path):
    script = (
        "import sys, time; from pathlib import Path; "
        "from budgetguard_core.file_lock import FileLock; "
        "FileLock(Path(sys.argv[1]), 1.0).__enter__(); print('held', flush=True); input()"
    )
    waiter = locks(0.01)
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(TimeoutError):
            waiter.__enter__()
        waiter._timeout = 30.0
        holder.kill()
        with waiter:
            pass


def test_without_a_thread_it_polls(locks, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread at interpreter shutdown")

    holder, waiter = locks(), locks(0.01)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with holder, pytest.raises(TimeoutError):
        waiter.__enter__()
    with waiter:
        pass
    with holder:
        pass


def test_who_never_had_it_leaves_no_thread_behind(locks, tmp_path):
    with locks():
        first = FileLock(tmp_path / "lock", 0.01)
        with pytest.raises(TimeoutError):
            first.__enter__()
        assert first._waiter is None
        first.close()
