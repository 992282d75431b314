"""The supervisor and the guards of its processes, over a real socket, in one process."""

from __future__ import annotations

import json
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import pytest

from budgetguard_cli.run.link import GONE, Link
from budgetguard_cli.run.shared_guard import SharedGuard
from budgetguard_cli.run.supervisor import Findings, Spending, Supervisor, shared
from budgetguard_core import (
    Admit,
    Budget,
    ConfigurationError,
    Guard,
    ModelCall,
    Refuse,
    Stop,
    TokenUsage,
    ToolCall,
)
from budgetguard_core.testing import ManualClock


class Supervised:
    """A supervisor, and what its processes would be."""

    def __init__(self, budget, clock=None):
        self.findings = Findings()
        self.guard = Guard(shared(budget), sinks=[Spending(self.findings)], clock=clock)
        self.supervisor = Supervisor(self.guard, budget, self.findings)
        self.path = None
        self.links = []

    def process(self):
        """Return the guard of another process."""
        link = Link(self.path)
        self.links.append(link)
        welcome = link.enter()
        kind = type("OneProcess", (SharedGuard,), {"__slots__": (), "link": link})
        return kind(Budget.from_json(welcome.budget), run_id=welcome.run_id, sinks=None)


@contextmanager
def supervised(clock=None, **caps):
    one = Supervised(Budget(**caps), clock)
    with one.supervisor.listening() as one.path:
        yield one
    for link in one.links:
        link.close()


def spend(guard, tokens=110):
    decision = guard.admit_model_call(ModelCall(model="gpt-4o", input_tokens=100))
    if isinstance(decision, Admit):
        guard.settle_model_call(decision, TokenUsage(100, tokens - 100))
    return decision


def test_the_caps_are_exact_over_processes_and_threads():
    with supervised(max_iterations=37) as run:
        guards = [run.process() for _ in range(4)]
        with ThreadPoolExecutor(8) as pool:
            decisions = list(pool.map(lambda n: spend(guards[n % 4]), range(80)))
    assert sum(isinstance(one, Admit) for one in decisions) == 37
    assert {str(one.trip.reason) for one in decisions if isinstance(one, Stop)} == {
        "max_iterations"
    }
    assert run.guard.usage.total_tokens == 37 * 110
    assert run.findings.models["gpt-4o"].calls == 37
    assert run.findings.models["gpt-4o"].cost_usd == run.guard.usage.cost_usd


def test_dollars_are_reserved_with_the_supervisor():
    call = ModelCall(cost_usd=Decimal("0.10"))
    with supervised(max_cost_usd=Decimal("0.30")) as run:
        first, second = run.process(), run.process()
        held = [first.admit_model_call(call), second.admit_model_call(call)]
        held.append(first.admit_model_call(call))
        assert isinstance(second.admit_model_call(call), Stop)
        first.settle_model_call(held[0], TokenUsage(1, 1), cost_usd=Decimal("0.10"))
        # A stop is sticky; what was taken back counts as nothing all the same.
        second.withdraw(held[1])
        assert run.guard.usage.model_calls == 2


def test_a_batch_is_admitted_in_order_by_what_all_processes_have_left():
    with supervised(max_tool_calls=3, tool_quotas={"mail": 1}) as run:
        first, second = run.process(), run.process()
        (mailed,) = first.admit_tool_calls([ToolCall(name="mail", arguments={"to": "a"})])
        first.settle_tool_call(mailed, "sent")
        batch = [ToolCall(name=name, arguments={"n": n}) for n, name in enumerate("xmxx")]
        batch[1].name = "mail"
        kinds = [type(one) for one in second.admit_tool_calls(batch)]
        assert kinds == [Admit, Refuse, Admit, Stop]
        assert run.guard.usage.tool_calls == 3
        assert isinstance(second.admit_model_call(), Stop)


def test_a_tool_call_that_was_not_made_gives_its_place_back():
    with supervised(max_tool_calls=1) as run:
        guard = run.process()
        (ticket,) = guard.admit_tool_calls([ToolCall(name="x")])
        guard.withdraw(ticket)
        assert isinstance(run.process().admit_tool_call(ToolCall(name="x")), Admit)


def test_the_deadline_is_the_supervisors():
    clock = ManualClock()
    with supervised(clock, max_seconds=10) as run:
        run.guard.start()
        guard = run.process()
        assert 0 < guard.time_left() <= 10
        assert guard.check() is None
        clock.advance(11)
        assert str(guard.check().reason) == "max_seconds"
        assert str(spend(run.process()).trip.reason) == "max_seconds"


def test_used_up_is_not_stopped():
    with supervised(max_iterations=1) as run:
        guard = run.process()
        spend(guard)
        assert not run.supervisor.is_over
        assert run.supervisor.trip is None


def test_an_abort_reaches_the_next_call_and_what_waits():
    with supervised(max_iterations=9) as run:
        guard = run.process()
        run.guard.abort("by hand")
        assert str(spend(guard).trip.reason) == "aborted"
        assert guard.cancellation.cancelled


def test_a_script_that_asks_on_after_its_own_loop_is_aborted():
    with supervised(max_iterations=999) as run:
        guard = run.process().child()
        for _ in range(200):
            decision = guard.admit_model_call()
            if isinstance(decision, Stop):
                continue
            guard.settle_model_call(decision, TokenUsage(1, 1))
            (ticket,) = guard.admit_tool_calls([ToolCall(name="look", arguments={})])
            if isinstance(ticket, Admit):
                guard.settle_tool_call(ticket, "nothing")
        assert [str(one.reason) for one in run.findings.stops.values()] == ["no_progress"]
        assert run.guard.cancellation.cancelled


def test_a_limit_of_the_scripts_own_is_no_stop_of_the_run():
    with supervised(max_iterations=9) as run:
        guard = run.process().child(Budget(max_iterations=1))
        spend(guard)
        assert isinstance(spend(guard), Stop)
        assert run.supervisor.trip is None
        assert run.guard.usage.iterations == 1


def test_wrong_figures_count_as_what_they_are():
    with supervised(max_total_tokens=1000) as run:
        guard = run.process()
        with pytest.raises(ConfigurationError):
            guard.admit_model_call(ModelCall(input_tokens=-1))
        ticket = guard.admit_model_call(ModelCall(input_tokens=100))
        with pytest.raises(ConfigurationError):
            guard.settle_model_call(ticket, TokenUsage(-5, 1))
        assert run.guard.usage.total_tokens == 100


def test_after_the_supervisor_everything_is_refused():
    with supervised(max_iterations=9) as run:
        guard = run.process()
        spend(guard)
    decision = spend(guard)
    assert (str(decision.trip.reason), decision.trip.detail) == ("aborted", GONE)
    assert isinstance(guard.admit_tool_call(ToolCall(name="x")), Stop)
    assert Link(run.path).enter() is None


def test_the_socket_is_this_users_alone():
    with supervised(max_iterations=1) as run:
        folder = Path(run.path).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


@pytest.mark.parametrize(
    "line",
    [
        b"hello\n",
        b'{"op": "extend", "max_iterations": 99}\n',
        b'{"op": "check", "more": 1}\n',
        b'{"op": "settle_tool", "id": "1", "failed": "perhaps"}\n',
        b"x" * (2**20) + b"\n",
        b"\x80\x04\x95\n",
    ],
)
def test_what_is_none_of_the_messages_gets_no_answer(line):
    with supervised(max_iterations=1) as run:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(run.path)
            try:
                connection.sendall(line)
                answer = connection.recv(100)
            except ConnectionError:
                answer = b""
        assert answer == b""
        assert isinstance(spend(run.process()), Admit)


def test_nothing_of_the_arguments_leaves_the_process():
    seen = []
    with supervised(max_tool_calls=1) as run:
        guard = run.process()
        told = guard.link.ask
        type(guard).link.ask = lambda request, kind: (
            seen.append(request.model_dump_json()),
            told(request, kind),
        )[1]
        guard.admit_tool_call(ToolCall(name="x", arguments={"password": "hunter2"}))
    (asked,) = seen
    assert json.loads(asked)["op"] == "ask_tools"
    assert "hunter2" not in asked


def test_a_forked_process_has_a_connection_of_its_own():
    with supervised(max_iterations=2) as run:
        guard = run.process()
        spend(guard)
        parent = guard.link
        inherited = parent._stream
        parent.forked()
        assert isinstance(spend(guard), Admit)
        assert isinstance(spend(guard), Stop)
        assert parent._stream is not inherited
    assert run.guard.usage.iterations == 2
