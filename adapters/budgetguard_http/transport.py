"""The explicit way in: transports for the clients of httpx and httpx2."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Self, Unpack

from budgetguard_core import Budget, Guard, Outcome
from budgetguard_core.kit import Envelope, Run, envelope_of
from budgetguard_http._policy import ClientOptions, Policy, split
from budgetguard_http._runs import EnvelopeRuns, end, traffic_of
from budgetguard_http._seam import Exchange, Seam, module_of

if TYPE_CHECKING:
    import httpx
    import httpx2

    class _Sync(httpx.BaseTransport, httpx2.BaseTransport):
        def handle_request(self, request: Any) -> Any: ...

    class _Async(httpx.AsyncBaseTransport, httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any: ...
else:
    # A client looks for no base class, and there are two packages that it may come from.
    _Sync = _Async = object


class Bounded:
    """The common part of the explicit ways in."""

    def __init__(
        self,
        budget: Budget | Guard | Envelope | None = None,
        inner: Any = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._policy, rest = split(options)
        self._runs = EnvelopeRuns(envelope_of(budget, default=Budget(), **rest))
        self._seam = Seam(self._runs.here, self._policy_of)
        self._inner = inner

    def _policy_of(self, _: Run) -> Policy:
        return self._policy

    @property
    def run(self) -> Run | None:
        """The run of the calls that are part of no other run; None before the first."""
        return self._runs.outside

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of that run, or of the latest one within another run; None before its end."""
        run = self._runs.outside or self._runs.latest
        return None if run is None else run.outcome

    def pending_input(self) -> list[Any]:
        """List what OpenAI lacks of the conversation that it keeps; as `bounded_clients` has it."""
        run = self._runs.outside
        return [] if run is None else traffic_of(run).pending_input()


class Blocking(Bounded):
    """The common part of those that are closed without waiting."""

    def close(self) -> None:
        """End the run of the calls; clients that go on begin another one."""
        if self._inner is not None:
            self._inner.close()
        for run in self._runs.to_end():
            end(run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BudgetTransport(Blocking, _Sync):
    """Bounds the calls of a synchronous client: `httpx.Client(transport=BudgetTransport(budget))`.

    The client goes to the SDK: `OpenAI(http_client=openai.DefaultHttpxClient(transport=...))`.
    Calls from any thread count, also where the thread has no copy of the context.

    Args:
        budget: A `Budget`: one run from the first call to the closing of the client, and one for
            each run of an adapter that the calls are made in. A `Guard`, shared by reference. An
            `Envelope` of either.
        inner: Sends what is admitted; an `HTTPTransport` of the client's package if left out.
        options: As `Envelope` takes them, and `on_unknown`, `exempt` and `ask_for_usage` as
            `Policy`. With `on_trip="raise"`, `CallRefused` leaves the SDK's call, which is no
            `Exception`.

    Attributes:
        run: The run of the calls that are part of no other run.
        outcome: How that run ended.

    Raises:
        ConfigurationError: The budget or an option makes no sense.
    """

    def handle_request(self, request: Any) -> Any:
        """Handle each request of the client."""
        if self._inner is None:
            self._inner = module_of(request).HTTPTransport()
        return self._seam.send(Exchange(request, self._inner.handle_request))


class AsyncBudgetTransport(Bounded, _Async):
    """Bounds the calls of an asynchronous client; as `BudgetTransport`.

    The deadline and an abort also end a call in flight at once.
    """

    async def handle_async_request(self, request: Any) -> Any:
        """Handle each request of the client."""
        if self._inner is None:
            self._inner = module_of(request).AsyncHTTPTransport()
        send = self._inner.handle_async_request
        return await self._seam.send(Exchange(request, send, is_async=True))

    async def aclose(self) -> None:
        """End the run of the client's calls."""
        if self._inner is not None:
            await self._inner.aclose()
        for run in self._runs.to_end():
            await run.in_thread(functools.partial(end, run))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
