"""The model calls of a run: admitted against its caps, and charged when they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from budgetguard_core import counters, events
from budgetguard_core.counters import COST, INFINITY, INPUT, OUTPUT, TOKENS, Chain
from budgetguard_core.decision import (
    Admit,
    ModelCall,
    ModelDecision,
    Nudge,
    Stop,
    check_projection,
    given_cost,
    projected_cost,
)
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.plugs import Ended
from budgetguard_core.pricing import Rates, to_usd
from budgetguard_core.questions import ask_person
from budgetguard_core.run_state import WITHDRAWN, Notice, RunState, objections_of
from budgetguard_core.stop_state import Mode, unmetered_usage, unpriced_model
from budgetguard_core.usage import Counts, TokenUsage, check_token_usage

_NO_GUESS = (0, 0)


class ModelCalls:
    """The model calls of one run. What it keeps follows from the chain that they are charged to."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._follow(state.chain)

    def _follow(self, chain: Chain) -> None:
        self._chain = chain
        self._needs_price = any(link.counters.refuses_unpriced for link in chain)
        # An advisory envelope must not cut what the enforced ones allow.
        enforced = tuple(link for link in chain if link.owner.mode is Mode.ENFORCE)
        self._binding: Chain = enforced or chain
        self._enforced = bool(enforced)
        bounds = [one.counters.budget.max_output_tokens_per_call for one in self._binding]
        self._output_bound = min((one for one in bounds if one is not None), default=None)
        # Nothing else tells what calls at the same time may come to.
        self._expects = self._output_bound is None and any(
            link.limits[one] != INFINITY for link in chain for one in (TOKENS, COST, OUTPUT)
        )

    def rates_of(self, model: str | None, provider: str | None) -> Rates | None:
        """Return the price of a model, where it is known. Outside the lock."""
        if model is None:
            return None
        if not isinstance(model, str):
            raise ConfigurationError(
                f"model must be a model's name, got {type(model).__name__}. "
                "Leave it out where it is not known."
            )
        found: Rates | None = self._state.tree.price_book.rates_for(model, provider)
        return found

    def admit(self, call: ModelCall) -> ModelDecision:
        """Answer whether a model call may start, and count it when it may."""
        state = self._state
        tree, chain = state.tree, state.chain
        if not chain:
            ticket = Admit(state.guard, call, 0)
            ticket.max_output_tokens = call.max_output_tokens
            return ticket
        if chain is not self._chain:
            self._follow(chain)
        # Outside the lock: the first price of a process is looked up in a large table.
        rates = self.rates_of(call.model, call.provider)
        check_projection(call)
        bound, own = self._output_bound, call.max_output_tokens
        if own is not None and (bound is None or own < bound or call.output_is_fixed):
            bound = own
        retry, prompt = call.retry, call.input_tokens
        if tree.asks:
            least = bound or 0
            if bound is not None and not call.output_is_fixed:
                least = min(bound, call.min_output_tokens)  # it is cut to what is left
            needed = (retry, prompt + least, projected_cost(call, rates, least), prompt)
            ask_person(state, needed, f"call the model {call.model or ''}".strip())
        tokens = prompt + (bound or 0)
        cost = projected_cost(call, rates, bound)
        unpriced = rates is None and call.cost_usd is None
        ask = state.reserve(call, tokens, cost, unpriced=unpriced)
        clamped_by = None
        if ask is not None and ask.bound is not None:
            bound, clamped_by = ask.bound, ask.cut_by
            tokens, cost = prompt + bound, projected_cost(call, rates, bound)
        decision: ModelDecision | None = None
        warnings: Sequence[Notice] = ()
        with tree.lock:
            now = tree.now()
            kept_tokens, kept_cost, guess = tokens, cost, _NO_GUESS
            if bound is None and self._expects:
                expected = counters.expected_completion(chain)
                kept_tokens = tokens + expected
                kept_cost = projected_cost(call, rates, expected)
                guess = expected, kept_cost - cost
                # A guess refuses nothing but beside other calls.
                if any(one.counters.reserved_tokens for one in chain):
                    tokens, cost = kept_tokens, kept_cost
            calm = counters.is_calm(chain, now, kept_tokens, kept_cost, prompt)
            if not calm:
                counters.start_time(chain, now)
            found = () if calm else counters.violations(chain, now, (retry, tokens, cost, prompt))
            if found and bound is not None and not call.output_is_fixed:
                bound, cut_by = counters.clamp(self._binding, call, rates, bound)
                clamped_by = cut_by or clamped_by
                tokens = kept_tokens = prompt + bound
                cost = kept_cost = projected_cost(call, rates, bound)
                found = counters.violations(chain, now, (retry, tokens, cost, prompt))
            if found and not any(link.owner.trip for link in chain):
                warnings = state.warn(counters.foreseen_warnings(found), now)
            if not warnings:
                objections = objections_of(found) if found else {}
                if unpriced and self._needs_price:
                    unknown = unpriced_model(call.model)
                    for link in chain:
                        if link.counters.refuses_unpriced:
                            objections.setdefault(link.owner, []).append(unknown)
                trip = state.ask(ask, objections, now)
                if trip is not None:
                    decision = Stop(trip)
                    if tree.sinks:
                        facts = {"call": replace(call), "reason": trip.reason}
                        state.record(events.ModelCallRefused, now, **facts)
                else:
                    if state.detector is not None:
                        state.detector.begin_reply()
                    message = state.take_message()
                    if state.wraps_up and message is None:
                        message = state.wrap_up(now)
                    # A message would change the run, and OBSERVE changes nothing.
                    tree.call_id += 1
                    if message is not None and state.mode is Mode.ENFORCE:
                        decision = ticket = Nudge(state.guard, call, tree.call_id, message)
                    else:
                        decision = ticket = Admit(state.guard, call, tree.call_id)
                    ticket.max_output_tokens = bound if self._enforced else own
                    if clamped_by is not None:
                        ticket.clamped_by = clamped_by
                    ticket.rates = rates
                    ticket.reserved_tokens, ticket.reserved_cost = kept_tokens, kept_cost
                    ticket.reserved_input = prompt
                    if guess is not _NO_GUESS:
                        ticket.expected = guess
                    tree.open[ticket.call_id] = ticket
                    counters.reserve(chain, retry, kept_tokens, kept_cost, prompt)
                    if ask is not None:
                        ask.tokens, ask.cost = kept_tokens, kept_cost
                        state.book(ask, ticket)
                    if tree.sinks:
                        state.record(
                            events.ModelCallAdmitted,
                            now,
                            call=replace(call),
                            call_id=ticket.call_id,
                            admitted_output_tokens=ticket.max_output_tokens,
                            nudge=message,
                            holds=tuple(hold.id for hold in ticket.holds if hold.id),
                        )
                        state.record_delay(ticket, now)
                    if not calm:
                        warnings = state.look(now)
        if ask is not None and not isinstance(decision, Admit):
            for hold in ask.holds:
                hold.settle(WITHDRAWN, None)
        if warnings or tree.outbox or tree.postponed:
            state.finish(warnings)
        # Whoever was warned may have raised the cap. A dimension is warned of once.
        return self.admit(call) if decision is None else decision

    def settle(
        self,
        ticket: Admit,
        usage: TokenUsage | None,
        error: BaseException | str | None,
        model: str | None,
        cost_usd: Decimal | None,
    ) -> bool:
        """Charge a model call of this run that ended."""
        state = self._state
        tree, call, rates = state.tree, ticket.call, ticket.rates
        counts, cost = None, None
        problems: list[ConfigurationError] = []
        try:
            counts = None if usage is None else check_token_usage(usage)
        except ConfigurationError as wrong:
            problems.append(wrong)
            usage = None
        try:
            if model is not None and model != call.model:
                # The provider's name may be a deployment's that no price is known for.
                rates = self.rates_of(model, call.provider) or rates
        except ConfigurationError as wrong:
            problems.append(wrong)
            model = None
        try:
            cost = None if cost_usd is None else given_cost(cost_usd)
        except ConfigurationError as wrong:
            problems.append(wrong)
            cost_usd = None
        if cost_usd is None:
            if counts is not None and rates is not None:
                cost = rates.cost(counts)
            elif rates is not None or call.cost_usd is not None:
                cost = ticket.reserved_cost - ticket.expected[1]
        used = ticket.estimate() if counts is None else counts
        failed = error is not None
        ended = None
        if ticket.holds or usage is None or cost is None:
            # A guess at the completion is not a projection.
            reserved = ticket.reserved_tokens, ticket.reserved_cost
            metered = usage is not None or reserved != ticket.expected
            given = cost_usd is not None
            ended = Ended(False, failed, used[0] + used[1], cost, metered, given)
        with tree.lock:
            if tree.open.get(ticket.call_id) is not ticket:
                return False
            now = tree.now()
            facts: dict[str, Any] = {}
            if tree.sinks:
                facts = {"call_id": ticket.call_id, "model": model, "usage": usage}
                facts["cost_usd"] = None if cost is None else str(to_usd(cost))
                facts["given_cost_usd"] = None if cost_usd is None else str(cost_usd)
                facts["error"] = error_name(error)
            try:
                self._charge(ticket, used, cost, failed, now, facts)
            except BaseException:
                # An interrupt, which goes on its way once the call is charged and written in whole.
                self._charge(ticket, used, cost, failed, now, facts)
                raise
            if ended is not None:
                state.end_holds(ticket, ended, now)
                self._hold_uncharged(ticket, ended)
            warnings = () if counters.is_calm(state.chain, now) else state.look(now)
        if ended is not None:
            for hold in ticket.holds:
                hold.settle(ended, ticket)
        if warnings or tree.outbox or tree.postponed:
            state.finish(warnings)
        for problem in problems:
            raise problem
        return True

    def _charge(
        self, ticket: Admit, used: Counts, cost: int | None, failed: bool, now: int, facts: Any
    ) -> None:
        state = self._state
        counters.settle(state.chain, ticket, used, cost, failed)
        if ticket.call_id in state.tree.open:
            state.record(events.ModelCallSettled, now, **facts)
            del state.tree.open[ticket.call_id]

    def _hold_uncharged(self, ticket: Admit, ended: Ended) -> None:
        """Hold a call that cannot be charged against the next step, where that matters."""
        if ended.failed or (ended.metered and ended.cost is not None):
            return
        for link in self._state.chain:
            has = link.counters
            if ended.cost is None and has.refuses_unpriced:
                link.owner.state.hold(unpriced_model(ticket.call.model))
            capped = [TOKENS, INPUT, OUTPUT, *(() if ended.cost_given else (COST,))]
            if not ended.metered and any(has.caps[one] != INFINITY for one in capped):
                link.owner.state.hold(unmetered_usage())

    def withdraw(self, ticket: Admit, now: int) -> None:
        """Take back a model call that was not made. Under the lock."""
        state = self._state
        kept = ticket.reserved_tokens, ticket.reserved_cost, ticket.reserved_input
        counters.reserve(state.chain, ticket.call.retry, *kept, by=-1)
        state.record(events.ModelCallWithdrawn, now, call_id=ticket.call_id)


def error_name(error: BaseException | str | None) -> str | None:
    """Return the type of an error, as an event names it."""
    if error is None:
        return None
    return "error" if isinstance(error, str) else type(error).__name__
