"""The ambient way in: every client of this process, bounded in a block or by the guard around."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self, Unpack

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    Outcome,
    Snapshot,
)
from budgetguard_core.kit import (
    Envelope,
    Run,
    envelope_of,
    is_stop,
    joined,
    open_run,
    run_blocking,
)
from budgetguard_http import audit
from budgetguard_http._patches import Patches
from budgetguard_http._policy import ClientOptions, OnUnknown, Policy, split
from budgetguard_http._refusal import CallRefused
from budgetguard_http._runs import traffic_of
from budgetguard_http._seam import Seam
from budgetguard_http.bedrock import Hooks

_DEFAULT = Policy()
_BOUNDS = frozenset({"ledger", "profile"})
_LOCK = threading.Lock()
# Kept with the run itself.
_POLICY = "_budgetguard_http_policy"


class _Ambient:
    """The settings that are on in this process."""

    def __init__(self) -> None:
        self.patches = Patches(Seam(self.here, self.policy_of), Hooks(self.here, self.policy_of))
        self.installed: Policy | None = None
        self.everywhere: Run | None = None

    def here(self) -> Run | None:
        """Return the run that a call from the running code is a part of."""
        return joined() or self.everywhere

    def policy_of(self, run: Run) -> Policy:
        """Return the policy of a block's run, or that of `install`."""
        own: Policy | None = vars(run).get(_POLICY)
        return own or self.installed or _DEFAULT


_AMBIENT = _Ambient()


def install(
    *,
    on_unknown: OnUnknown = "admit",
    exempt: Sequence[str] = (),
    ask_for_usage: bool = True,
    watch_connections: bool = False,
) -> None:
    """Bound the clients of this process wherever a guard is active, until `uninstall`.

    That is in a `guard.activate()` block, and in every run of an adapter: a call that the adapter
    has admitted passes as that call, retries of the client below it are charged as retries, and a
    call that the adapter did not see is admitted like any other. Where no guard is active nothing
    changes. Calling it again takes the new settings.

    Args:
        on_unknown: What is done with requests to a provider that are not understood, as `Policy`.
        exempt: Models that cost no money, by name or pattern.
        ask_for_usage: Ask for the usage of streams.
        watch_connections: Count connections to providers that go past the seam (websockets,
            aiohttp): see `uncovered_hosts`. Its audit hook stays in the process for good.

    Raises:
        ConfigurationError: A setting makes no sense.
    """
    policy = Policy(on_unknown=on_unknown, exempt=exempt, ask_for_usage=ask_for_usage)
    with _LOCK:
        before, _AMBIENT.installed = _AMBIENT.installed, policy
    if before is None:
        _AMBIENT.patches.hold()
    if watch_connections:
        audit.watch()


def uninstall() -> None:
    """Take back what `install` has put in place; blocks that are open keep it until they end."""
    with _LOCK:
        before, _AMBIENT.installed = _AMBIENT.installed, None
    if before is not None:
        _AMBIENT.patches.release()


def is_installed() -> bool:
    """Return whether clients are bounded wherever a guard is active."""
    return _AMBIENT.patches.are_installed


class bounded_clients:
    """Bound every call that a client makes in a block: `with bounded_clients(Budget(...)):`.

    Use `async with` on an event loop. It holds in this thread or task, in tasks that are started
    inside, and in threads that get a copy of the context. A call that may not start is answered
    with a normal, synthetic reply, so that loops end by themselves; the block itself goes on. The
    deadline and an abort end calls in flight, and nothing else in the block.

    Args:
        budget: A `Budget`, for a fresh guard, a `Guard`, shared by reference, or an `Envelope`.
        everywhere: Calls from threads that have no context of any run are a part of this one, too.
            For scripts, and one block at a time: where several runs go on in one process, nobody
            could tell whose such a call is.
        resume: An earlier run that the block goes on from: its `Outcome`, its `Snapshot`, or its
            id in `store`. What to send is the program's to say: `outcome.messages`.
        options: As `Envelope` takes them, and `on_unknown`, `exempt` and `ask_for_usage` as
            `Policy`. With `on_trip="raise"` the first refused call leaves the block, past every
            `except Exception` inside, and the block raises `BudgetExceeded`.

    Raises:
        ConfigurationError: The budget or an option makes no sense; or, on entering, there is
            neither a budget, a ledger nor a profile, and no run that the block is a part of.
        AdapterError: On entering: another block is everywhere already.
        BudgetExceeded: On leaving: the run was stopped and `on_trip` is `raise`, or the limit is
            that of a run around the block.
    """

    def __init__(
        self,
        budget: Budget | Guard | Envelope | None = None,
        *,
        everywhere: bool = False,
        resume: Snapshot | Outcome | str | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._resume = resume
        self._policy, rest = split(options)
        self._envelope = envelope_of(budget, default=Budget(), **rest)
        of_variables = self._envelope.profile is not None
        self._is_bound = budget is not None or of_variables or not _BOUNDS.isdisjoint(options)
        self._everywhere = everywhere
        self._run: Run | None = None
        self._stack = ExitStack()
        self._uncovered: dict[str, int] = {}

    @property
    def run(self) -> Run:
        """The run of the block, once it has been entered.

        Raises:
            AdapterError: It has not.
        """
        if self._run is None:
            raise AdapterError("a block has a run when it was entered. Use it in `with`.")
        return self._run

    @property
    def guard(self) -> Guard:
        """The run's guard."""
        return self.run.guard

    @property
    def outcome(self) -> Outcome:
        """The outcome of the run, once the block has ended, be it by an exception.

        Its `messages` are the turns that were sent last, in the provider's format.

        Raises:
            AdapterError: It has not.
        """
        if self._run is None or self._run.outcome is None:
            raise AdapterError("a block has an outcome when it has ended. Ask after the block.")
        return self._run.outcome

    def pending_input(self) -> list[Any]:
        """List what OpenAI lacks of the conversation that it keeps, after a stop.

        With `previous_response_id` or `conversation` it waits for the results that the refused
        request had. Send them before the user's next words:
        `input=[*block.unsent_input(), message]`, with the `id` of the last reply, which is that of
        the last response that OpenAI has made; where the very first request was refused there is
        none, and it begins anew. Of several conversations it is the one that was heard of last.

        Raises:
            AdapterError: The block was not entered.
        """
        return traffic_of(self.run).pending_input()

    def __enter__(self) -> Self:
        if not self._is_bound and joined() is None:
            raise ConfigurationError(
                "bounded_clients needs a budget, got none, and there is no run that the block is "
                "a part of. Write bounded_clients(Budget(max_iterations=50, max_cost_usd=1))."
            )
        opening = open_run(self._envelope, resume=self._resume)
        run = self._run = run_blocking(opening)[0]
        run.is_of_clients = True
        vars(run)[_POLICY] = self._policy
        if self._everywhere:
            with _LOCK:
                if _AMBIENT.everywhere is not None:
                    raise AdapterError(
                        "only one block at a time can be everywhere, got a second one. Leave "
                        "everywhere out, and give your threads a copy of the context."
                    )
                _AMBIENT.everywhere = run
        self._uncovered = audit.uncovered_hosts()
        _AMBIENT.patches.hold()
        self._stack.enter_context(run.entered())
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._leave()
        self._end(error)
        return self._raised(error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._leave()
        await self.run.in_thread(lambda: self._end(error))
        return self._raised(error)

    def _leave(self) -> None:
        self._stack.close()
        _AMBIENT.patches.release()
        if self._everywhere:
            with _LOCK:
                _AMBIENT.everywhere = None
        for host, count in audit.uncovered_hosts().items():
            if count > self._uncovered.get(host, 0):
                self.run.guard.tree.report(f"a connection to {host} went past the bounded clients")

    def _end(self, error: BaseException | None) -> Outcome:
        run = self.run
        ends = traffic_of(run).ending()
        if error is None or (ends["trip"] is not None and _is_a_stop(error)):
            return run.end(**ends)
        return run.fail(error, ends["messages"])

    def _raised(self, error: BaseException | None) -> bool:
        """Raise what is to be raised; tell whether an exception was nothing but the stop."""
        run, trip = self.run, self.run.trip
        if trip is None:
            return False
        if run.is_to_raise or run.is_of_parent_run(trip):
            raise BudgetExceeded(trip, self.outcome) from error
        return error is not None and _is_a_stop(error)


def _is_a_stop(error: BaseException) -> bool:
    return isinstance(error, CallRefused) or is_stop(error)
