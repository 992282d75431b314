"""The contract as a suite: each clause checked once, through any adapter's driver and way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from budgetguard_core.testing.driver import Driver, Feature
from budgetguard_core.testing.failures import DriverError, NonConformance, expect
from budgetguard_core.testing.message import Message
from budgetguard_core.testing.scenario import MODES, Mode


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause of the contract."""

    number: int
    title: str
    check: Callable[[Driver, Mode], None]
    """Raises `NonConformance` when it does not hold, and whatever the driver failed with."""
    modes: tuple[Mode, ...] = MODES
    """The ways in for which it has a meaning."""
    needs: tuple[Feature, ...] = ()
    """What a framework has to have for it to have a meaning."""

    def lacking(self, driver: Driver) -> str | None:
        """Return why the clause has no meaning for a driver, or None when it has one."""
        return next((driver.lacks[one] for one in self.needs if not driver.has(one)), None)

    def is_asked(self, driver: Driver, mode: Mode) -> bool:
        """Return whether the clause has a meaning for a driver in a mode."""
        return mode in driver.modes and mode in self.modes and self.lacking(driver) is None

    def judge(self, driver: Driver, mode: Mode) -> None:
        """Check the clause, or that the deviation that is declared for it still stands.

        Raises:
            NonConformance: The clause does not hold.
            DriverError: It holds, and a deviation is declared; or the driver ignores a part of a
                scenario.
        """
        reason = driver.deviation(self.number, mode)
        if reason is None:
            self.check(driver, mode)
            return
        try:
            self.check(driver, mode)
        except NonConformance:
            return
        raise DriverError(
            f"clause {self.number} holds through {driver.name} ({mode}), but a deviation is "
            f"declared: {reason!r}. Take it out."
        )


def check_history(history: Sequence[Message]) -> None:
    """Check that a provider would take a history as it is: clause 11.

    Every tool call has exactly one result, right after the message that asked; no result without
    a call; no two assistant or two user messages in a row.
    """
    open_calls: list[str] = []
    before: str | None = None
    for place, message in enumerate(history):
        where = f"message {place} ({message.role})"
        if message.role == "tool":
            expect(
                message.tool_call_id in open_calls,
                f"{where} answers {message.tool_call_id!r}, which is not open",
            )
            open_calls.remove(str(message.tool_call_id))
        else:
            expect(not open_calls, f"{where} comes before the results of {open_calls}")
            expect(
                message.role == "system" or message.role != before, f"{where} follows another one"
            )
        open_calls += [id_ for id_, _ in message.tool_calls]
        before = message.role
    expect(not open_calls, f"no result for {open_calls}")


def check_request(request: Sequence[Message]) -> None:
    """Check that a strict provider would answer a request: a history that waits for an answer.

    Besides what `check_history` asks for: it begins with the system's or the user's words and ends
    with the user's or with results, nobody says nothing, and no id is given to two calls.
    """
    expect(request, "the request is empty, or the driver does not report it")
    check_history(request)
    words = [message for message in request if message.role != "system"]
    expect(words[0].role == "user", f"the request begins with the {words[0].role}'s words")
    expect(words[-1].role in ("user", "tool"), "the request ends with the assistant's words")
    for message in words:
        said = message.text or message.tool_calls or message.role == "tool"
        expect(said, f"a message of the {message.role} is empty")
    ids = [id_ for message in request for id_, _ in message.tool_calls]
    expect(len(set(ids)) == len(ids), f"calls with the same id: {ids}")
