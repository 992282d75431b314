"""The ledger's part in a run: its place there, and what its model calls set aside."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from budgetguard_core import limits
from budgetguard_core.budget import Budget
from budgetguard_core.charges import FEMTO_PER_NANO, MOST, ROUND_UP, Amounts, Charge, Charges
from budgetguard_core.decision import ModelCall
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.standing import Mode, Standing
from budgetguard_core.stop import StopReason, Violation

if TYPE_CHECKING:
    from budgetguard_core.ledger import Ledger, LedgerRun, Refusal, Tenant, Warned


class Charged(Protocol):
    """What a tenant's ceilings and kill switches stand against."""

    run_id: str
    budget: Budget
    mode: Mode

    def abort(self, detail: str) -> None:
        """End the run."""
        ...

    def hold(self, violation: Violation) -> None:
        """Let a limit stand against the next step."""
        ...


class TenantPlace:
    """One run's place in the ledger of its tenant.

    Attributes:
        run: The run there.
        standing: What stands against the run's next step: an advisory run that would have been
            stopped only looks on.
    """

    __slots__ = ("_guard", "run", "standing")

    def __init__(self, guard: Charged, run: LedgerRun, standing: Standing) -> None:
        self._guard = guard
        self.run = run
        self.standing = standing

    @property
    def payer(self) -> object:
        """Who pays; equal for runs of one tenant in one ledger."""
        return self.run.payer

    @property
    def names(self) -> tuple[str, ...]:
        """Who pays, for the records."""
        return self.run.account.names

    def close(self) -> None:
        """Give back what the run has set aside and does not need any more."""
        self.run.close()

    def charge(
        self,
        amount: Amounts,
        model: str | None,
        *,
        unpriced: bool,
        last_answer: Charged | None = None,
    ) -> Charge | None:
        """Charge a model call ahead of it, with a trip to the store where it takes one.

        Args:
            amount: What is set aside for it.
            model: The model's name.
            unpriced: Its price is not known.
            last_answer: The guard of a last answer, if it is one: nothing that stands against the
                stopped run binds that, so a refusal stands against it, too.

        Returns:
            The charge; None when the tenant refuses it. A refusal stands against the step.
        """
        guard, run = self._guard, self.run
        if not run.is_open:  # a guard that is shared by several runs, one after the other
            run.open()
        part = None
        if self.standing.observed is None:
            if unpriced and guard.budget.on_unpriced == "stop" and run.caps_dollars():
                unknown = limits.unpriced_model(model, "a tenant's ceiling in dollars")
                for one in (guard,) if last_answer is None else (guard, last_answer):
                    one.hold(unknown)
                if guard.mode is Mode.ENFORCE:
                    return None
            part = run.take(*amount) or run.obtain(*amount)
            if part.refusal is not None:
                self._stand_against(guard, part.refusal)
                if last_answer is not None:
                    self._stand_against(last_answer, part.refusal)
                if guard.mode is Mode.ENFORCE:
                    return None
                part = None
        return run, part, amount

    def settle_untold(
        self, model: str | None, *, unpriced: bool, unmetered: bool, cost_given: bool
    ) -> None:
        """Let a settled call that cannot be charged to the tenant stand against the next step."""
        guard, run = self._guard, self.run
        if self.standing.observed is not None:
            return
        if unpriced and guard.budget.on_unpriced == "stop" and run.caps_dollars():
            guard.hold(limits.unpriced_model(model, "a tenant's ceiling in dollars"))
        elif unmetered and (run.caps_tokens() or (run.caps_dollars() and not cost_given)):
            guard.hold(limits.unmetered_usage())

    def _stand_against(self, guard: Charged, refusal: Refusal) -> None:
        if refusal.reason == StopReason.ABORTED:
            guard.abort(refusal.detail)
        else:
            guard.hold(
                Violation(
                    reason=StopReason(refusal.reason),
                    limit=refusal.limit,
                    used=refusal.used,
                    detail=refusal.detail,
                )
            )


def charge_ahead(
    places: Sequence[TenantPlace],
    call: ModelCall,
    tokens: int,
    cost: int,
    unpriced: bool,
    last_answer: Charged | None = None,
) -> Charges:
    """Charge a model call to every tenant that pays for it, up to the first that refuses it."""
    # As `measured`, without a call. At least one unit, or a used-up ceiling would admit it.
    usd = (cost + ROUND_UP) // FEMTO_PER_NANO or 1
    usd, tokens = amount = usd if usd < MOST else MOST, (tokens or 1) if tokens < MOST else MOST
    charges: Charges = ()
    for place in places:
        run = place.run
        # Out of what is leased, as nearly every call is: part of every step.
        if not unpriced and run.is_open and place.standing.observed is None:
            part = run.take(usd, tokens)
            if part is not None:
                charges += ((run, part, amount),)
                continue
        charge = place.charge(amount, call.model, unpriced=unpriced, last_answer=last_answer)
        if charge is None:
            break
        charges += (charge,)
    return charges


def tenant_place(
    guard: Charged,
    standing: Standing,
    ledger: Ledger | str | None,
    tenant: Tenant | None,
    on_warning: Callable[[Warned], object],
) -> TenantPlace | None:
    """Take a run's place in a ledger; None without one. Nothing is asked of its store yet.

    Raises:
        ConfigurationError: Only one of `ledger` and `tenant` was given.
    """
    if ledger is None and tenant is None:
        return None
    if ledger is None or tenant is None:
        missing = "ledger" if ledger is None else "tenant"
        raise ConfigurationError(
            f"ledger and tenant must be given together, got no {missing}. "
            'Use Guard(..., ledger="sqlite:///ledger.sqlite3", tenant="acme").'
        )
    from budgetguard_core.ledger import as_ledger

    if guard.mode is Mode.OFF:
        return None
    run = as_ledger(ledger).attach(
        guard.run_id, tenant, on_kill=_weakly(guard.abort), on_warning=_weakly(on_warning)
    )
    # A guard that nobody keeps has ended, whether or not somebody said so.
    weakref.finalize(guard, run.abandon).atexit = False
    return TenantPlace(guard, run, standing)


def _weakly(method: Callable[[Any], object]) -> Callable[[Any], None]:
    """Call a guard's method as long as somebody keeps the guard."""
    kept = weakref.WeakMethod(method)

    def call(fact: Any) -> None:
        found = kept()
        if found is not None:
            found(fact)

    return call
