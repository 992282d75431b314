"""The supervisor: owns the one guard of a script, and answers the script's processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Final, assert_never

from pydantic import ValidationError

from budgetguard_cli.run.messages import (
    LONGEST,
    REQUEST,
    Admitted,
    Answers,
    AskModel,
    AskTools,
    Check,
    Done,
    Hello,
    Noted,
    Refused,
    Reply,
    Request,
    SettleModel,
    SettleTool,
    Stopped,
    StoppedHere,
    Welcome,
    Withdraw,
)
from budgetguard_core import (
    Admit,
    Budget,
    BudgetGuardError,
    Guard,
    ModelCall,
    Stop,
    StopReason,
    ToolDecision,
    Trip,
)
from budgetguard_core.events import Event, ModelCallAdmitted, ModelCallSettled

_LONGEST_PATH: Final = 100
_MOST_REFUSALS: Final = 100
"""Refusals of one loop after which nobody is left who would end by itself."""
_MOST_NOTES: Final = 20
_PEER: Final = struct.Struct("3i")


@dataclass(slots=True)
class ModelUse:
    """The spend on one model."""

    calls: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: Decimal = Decimal(0)
    unpriced: int = 0


@dataclass(slots=True)
class Findings:
    """The findings of the supervisor beside the guard's own figures.

    Attributes:
        models: What was spent, by model.
        stops: Stops by limits that a process looks after itself: reason and how often.
        notes: What the processes want to be said.
    """

    models: dict[str, ModelUse] = field(default_factory=dict[str, ModelUse])
    stops: dict[str, Trip] = field(default_factory=dict[str, Trip])
    notes: list[str] = field(default_factory=list[str])


class Supervisor:
    """Answers the processes of one script over a socket that only this user can reach.

    Args:
        guard: The one guard of the script, on the `shared` part of the budget.
        budget: What the user gave: the whole of it bounds each process as well.
        findings: Where what it learns goes.
    """

    def __init__(self, guard: Guard, budget: Budget, findings: Findings) -> None:
        self.guard = guard
        self.findings = findings
        self._budget = budget.model_copy(update={"max_seconds": None}).to_json()
        self._open: dict[int, Admit] = {}
        self._processes: dict[int, int] = {}
        self._refusals: Counter[str] = Counter()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()

    @contextmanager
    def listening(self) -> Generator[str]:
        """Listen while the block runs; gives the socket's path. After it nobody is admitted."""
        folder = tempfile.mkdtemp(prefix="budgetguard-")
        if len(folder) > _LONGEST_PATH:
            Path(folder).rmdir()
            # The path of a socket has few characters.
            folder = tempfile.mkdtemp(prefix="budgetguard-", dir="/tmp")
        path = str(Path(folder, "s"))
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(path)
            listener.listen(256)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            yield path
        finally:
            # A thread that waits in accept wakes up from this alone.
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            shutil.rmtree(folder, ignore_errors=True)
            with self._lock:
                connections = list(self._connections)
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @property
    def trip(self) -> Trip | None:
        """Why the run was stopped, as a whole or a part of it; None where nothing was."""
        return self.guard.trip or next(iter(self.findings.stops.values()), None)

    def send(self, number: signal.Signals, *, but: int) -> None:
        """Send a signal to every process that is connected, but one."""
        told = {but}
        with self._lock:
            for handle, pid in self._processes.items():
                if pid not in told:
                    told.add(pid)
                    with suppress(OSError):
                        signal.pidfd_send_signal(handle, number)

    # Connections

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        handle, pid = _process_of(connection)
        with self._lock:
            self._connections.add(connection)
            if handle is not None:
                self._processes[handle] = pid
        try:
            with connection.makefile("rwb") as file:
                while line := file.readline(LONGEST):
                    # What is none of our messages gets no answer, and no further question.
                    reply = self._answer(REQUEST.validate_json(line))
                    file.write(reply.model_dump_json().encode() + b"\n")
                    file.flush()
        except (OSError, ValidationError):
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
                if handle is not None:
                    del self._processes[handle]
            connection.close()
            if handle is not None:
                os.close(handle)

    # Questions

    def _answer(self, request: Request) -> Reply:
        guard = self.guard
        match request:
            case Hello():
                return Welcome(
                    run_id=guard.run_id, budget=self._budget, seconds_left=guard.time_left()
                )
            case AskModel():
                return self._model(request.call())
            case SettleModel():
                self._settle(request)
            case AskTools():
                calls = [one.call() for one in request.calls]
                decisions = guard.admit_tool_calls(calls)
                return Answers(answers=tuple(self._tool(one) for one in decisions))
            case SettleTool():
                ticket = self._taken(request.id)
                if ticket is not None:
                    error = "the tool failed" if request.failed else None
                    guard.settle_tool_call(ticket, error=error)
            case Withdraw():
                self._withdraw(request)
            case Check():
                trip = guard.check() if self.is_over else guard.trip
                return Done() if trip is None else Stopped(trip=trip)
            case StoppedHere():
                self._stopped_here(request.trip)
            case Noted():
                self._note(request.text)
            case _:
                assert_never(request)
        return Done()

    @property
    def is_over(self) -> bool:
        """True if the deadline has passed, or somebody has aborted the run.

        Not whether a cap is used up: a script that needs no more than that is not stopped.
        """
        return self.guard.time_left() == 0 or self.guard.cancellation.cancelled

    def _model(self, call: ModelCall) -> Reply:
        decision = self.guard.admit_model_call(call)
        if isinstance(decision, Stop):
            return Stopped(trip=decision.trip)
        self._kept(decision)
        return Admitted(id=decision.call_id, max_output_tokens=decision.max_output_tokens)

    def _tool(self, decision: ToolDecision) -> Admitted | Refused | Stopped:
        if isinstance(decision, Stop):
            return Stopped(trip=decision.trip)
        if isinstance(decision, Admit):
            self._kept(decision)
            return Admitted(id=decision.call_id)
        return Refused(reason=decision.reason, detail=decision.detail, message=decision.message)

    def _kept(self, ticket: Admit) -> None:
        with self._lock:
            self._open[ticket.call_id] = ticket

    def _taken(self, number: int) -> Admit | None:
        with self._lock:
            return self._open.pop(number, None)

    def _settle(self, request: SettleModel) -> None:
        ticket = self._taken(request.id)
        if ticket is None or not isinstance(ticket.call, ModelCall):
            return
        try:
            self.guard.settle_model_call(
                ticket,
                request.usage,
                error="the call failed" if request.failed else None,
                model=request.model,
                cost_usd=request.cost_usd,
            )
        except BudgetGuardError as error:
            # The reservation was charged.
            self._note(str(error))

    def _withdraw(self, request: Withdraw) -> None:
        ticket = self._taken(request.id)
        if ticket is None:
            return
        self.guard.withdraw(ticket, waits=request.waits)

    def _stopped_here(self, trip: Trip) -> None:
        if trip.run_id != self.guard.run_id and trip.reason not in _OF_A_PROCESS:
            return  # a limit of the script's own
        with self._lock:
            self.findings.stops.setdefault(trip.run_id, trip)
            self._refusals[trip.run_id] += 1
            hopeless = self._refusals[trip.run_id] > _MOST_REFUSALS
        if hopeless:
            self.guard.abort(f"the script goes on after a stop: {trip.detail}"[:_LONGEST_PATH])

    def _note(self, text: str) -> None:
        with self._lock:
            if text not in self.findings.notes and len(self.findings.notes) < _MOST_NOTES:
                self.findings.notes.append(text)


_OF_A_PROCESS: Final = frozenset(
    {
        StopReason.NO_PROGRESS,
        StopReason.OSCILLATION,
        StopReason.STALLED,
        StopReason.VELOCITY,
        StopReason.CIRCUIT_OPEN,
    }
)


class Spending:
    """Adds up what each model costs, from the guard's events."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._models: dict[int, str] = {}

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, ModelCallAdmitted):
            self._models[event.call_id] = event.call.model or "unknown"
        elif isinstance(event, ModelCallSettled):
            asked = self._models.pop(event.call_id, "unknown")
            use = self._findings.models.setdefault(event.model or asked, ModelUse())
            use.calls += 1
            use.failed += event.error is not None
            if event.usage is not None:
                use.input_tokens += event.usage.input_tokens
                use.output_tokens += event.usage.output_tokens
            if event.cost_usd is None:
                use.unpriced += 1
            else:
                use.cost_usd += Decimal(event.cost_usd)


def shared(budget: Budget) -> Budget:
    """Return what of a budget is looked after for all processes together: the caps.

    Loops, and what delays or refuses single calls, are each process's own.
    """
    alone: dict[str, object] = {
        "loop_detection": None,
        "progress": None,
        "velocity": None,
        "tool_mix": None,
        "rate_limits": {},
        "bulkheads": {},
        "circuit_breaker": None,
    }
    return budget.model_copy(update=alone)


def _process_of(connection: socket.socket) -> tuple[int | None, int]:
    """Return the process at the other end: a handle that no later process can take over."""
    if not hasattr(socket, "SO_PEERCRED") or not hasattr(os, "pidfd_open"):
        return None, 0
    size = _PEER.size
    pid, _, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    try:
        return os.pidfd_open(pid), pid
    except OSError:
        return None, pid
