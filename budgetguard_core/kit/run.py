"""One run: everything that an adapter tells the engine, and is told by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from budgetguard_core.decision import Admit, ModelCall, Nudge, Refuse, Stop, ToolCall
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.frame import current
from budgetguard_core.guard import Guard, Mode
from budgetguard_core.housekeeping import late
from budgetguard_core.kit.ambient import housekeeping_for, open_model_call
from budgetguard_core.kit.calls import OpenModelCall, OpenToolCall
from budgetguard_core.kit.delay import starts_at_once, waited
from budgetguard_core.kit.failed_calls import failed_usage
from budgetguard_core.kit.flow import Flow, in_thread, run_awaited, run_blocking
from budgetguard_core.kit.lifetime import Lifetime
from budgetguard_core.kit.projection import Prompt
from budgetguard_core.kit.usage import answered_usage
from budgetguard_core.stop import StopReason, Trip
from budgetguard_core.stop_state import cut_answer
from budgetguard_core.tool_calls import ToolCalls
from budgetguard_core.usage import TokenUsage

if TYPE_CHECKING:
    from decimal import Decimal


Admitted: TypeAlias = OpenModelCall | OpenToolCall | Stop
"""The answer to a request for a call."""


_KEEPS_ITS_OWN = "fallback_model: the model of a request cannot be set here, so it keeps its own"
_Calls = TypeVar("_Calls", OpenModelCall | Stop, OpenToolCall, list[OpenToolCall])
_Waits = TypeVar("_Waits", OpenModelCall | Stop, OpenToolCall, Admitted)


class Run(Lifetime):
    """One run of one adapter, from its opening to its one end. Made by `Envelope.open`."""

    def part(self, owner: object, envelope: Any) -> Run:
        """Return the run in which an owner's single calls within this run are counted together.

        This run's end ends it, unless its owner does.

        Args:
            owner: What makes the calls: a guarded function, a client.
            envelope: Its own budget, opened on first use.
        """
        with self._saving:
            if owner not in self._parts:
                with self.entered():
                    self._parts[owner] = envelope.open(loose=True)
            found: Run = self._parts[owner]
        return found

    def without_part(self, owner: object) -> Run | None:
        """Return what `part` has opened for an owner, who ends it; None where there is nothing."""
        part: Run | None = self._parts.pop(owner, None)
        return part

    def ask(self, question: Callable[[], _Calls]) -> Flow[_Calls]:
        """Ask for calls; where a store has a say, an event loop asks it in a thread.

        Cancelled meanwhile, what was granted is taken back.

        Args:
            question: Calls `model_call`, `batch` or `tool_call`.
        """
        if not any(guard.state.may_wait for guard in self.guards):
            return question()
        answer: _Calls = yield in_thread(question, self._undo)
        return answer

    def _undo(self, requested: Admitted | list[OpenToolCall]) -> None:
        for one in requested if isinstance(requested, list) else (requested,):
            if isinstance(one, OpenToolCall):
                self.withdrawn(one)
            elif isinstance(one, OpenModelCall):
                self.take_back(one)

    # Model calls

    def pruned(
        self, messages: Sequence[Any], model: str | None = None, provider: str | None = None
    ) -> list[Any] | None:
        """Return what is to be sent in place of these messages; None where all are.

        Once a prompt has come near to its model's context window, this one by its projection or an
        earlier one, every later one is pruned: the history stays whole.

        Args:
            messages: The messages of a request.
            model: The name of the model that they go to.
            provider: Who has it, where the name alone does not tell.
        """
        prune = self.envelope.prune
        if prune is None or self.guard.mode is not Mode.ENFORCE:
            return None
        if not (self._prunes or self._nearly_fills(messages, model, provider)):
            return None
        try:
            kept = list(prune(list(messages)))
        except Exception as error:
            self.guard.tree.report("prune", error)
            return None
        # A request without messages is none.
        return kept if kept and len(kept) != len(messages) else None

    def _nearly_fills(
        self, messages: Sequence[Any], model: str | None, provider: str | None
    ) -> bool:
        rates = None if model is None else self.guard.tree.price_book.rates_for(model, provider)
        window = None if rates is None else rates.context_window
        if window is None:
            return False
        self._prunes = Prompt().project(messages) >= window * self.guard.budget.warn_at
        return self._prunes

    def model_call(self, call: ModelCall, *, may_fall_back: bool = False) -> OpenModelCall | Stop:
        """Ask for a model call, of every guard that it is charged to.

        A call that a layer above has admitted and that no layer has seen since is the same call:
        it is counted once. Another one within it is a retry. Where the attempt before it has ended,
        that one is charged with the retry, and the call that is admitted here takes its place as
        the one that the layer above settles.

        Args:
            call: What is asked for.
            may_fall_back: The model of the request can be set: to `fallback_model` of the answer.

        Returns:
            The call, to be reported with `answered` or `failed`; or `Stop`: the run ends.

        Raises:
            ConfigurationError: A figure of the call makes no sense; nothing was counted.
        """
        self.begin_turn()
        outer = open_model_call()
        cheaper = self._fallback(call, outer, may_fall_back)
        if cheaper is not None:
            call = replace(call, model=cheaper)
        charged: Sequence[Admit] = ()
        same, before = False, None
        if outer is not None:
            charged, same = outer.charged, not outer.seen
            before = None if same else outer.attempt
            outer.seen = True
        tickets: list[Admit] = []
        retries: list[Admit] = []
        nudge, self._note = self._note, None
        for own in self.guards:
            guard = housekeeping_for(own)
            request, requested = call, tickets
            if charged and _covers(charged, guard):
                if same:
                    continue
                request = replace(call, retry=True)
                requested = tickets if before is None else retries
            try:
                decision = guard.admit_model_call(request)
            except BaseException:
                self._give_back([*tickets, *retries])
                raise
            if isinstance(decision, Stop):
                self._give_back([*tickets, *retries])
                self._is_late(decision, guard)
                return self._stopped(decision)
            if isinstance(decision, Nudge):
                nudge = nudge or decision.message
            requested.append(decision)
        parent = outer if same or before is not None else None
        if parent is not None and before is not None:
            used, error = before
            parent.attempt = parent.measured = None
            for ticket in retries:
                self._settle(ticket, used, error or "tried again")
        bound = None if parent is None else parent.max_output_tokens
        for one in (*tickets, *retries):
            most = one.max_output_tokens
            if most is not None and (bound is None or most < bound):
                bound = most
        open_call = OpenModelCall(
            call, tickets, nudge=nudge, max_output_tokens=bound, parent=parent, run=self
        )
        open_call.fallback_model = cheaper
        return open_call

    def _fallback(
        self, call: ModelCall, outer: OpenModelCall | None, may_fall_back: bool
    ) -> str | None:
        """Return the cheaper model that a call goes to; None where it keeps its own."""
        if outer is not None or self.trip is not None:
            return None  # the layer above has decided; a last answer is the run's own model's
        for guard in self.guards:
            model: str | None = guard.state.fallback()
            if model is not None and model != call.model:
                if may_fall_back:
                    return model
                if _KEEPS_ITS_OWN not in guard.tree.errors:
                    guard.tree.report(_KEEPS_ITS_OWN)
        return None

    def answered(
        self,
        call: OpenModelCall,
        usage: object = None,
        *,
        text: str = "",
        model: str | None = None,
        cost_usd: Decimal | None = None,
        speaker: str | None = None,
        final: bool = False,
    ) -> None:
        """Charge a model call that answered; a second report changes nothing.

        Args:
            call: What `model_call` returned.
            usage: What the provider reported: a `TokenUsage`, or a response or record as
                `token_usage` reads it. Where it reported nothing, the prompt is the projection
                and the answer is estimated from its text; where nothing was projected either, the
                call is unmetered.
            text: Everything that the model wrote, the arguments of its tool calls included.
            model: The model that was really called, if the provider says so.
            cost_usd: What the provider says it cost, used in place of the price book.
            speaker: Who spoke: an agent's or a node's name.
            final: The reply has no tool call, so its text is looked at for repetition.
        """
        if not call.close():
            return
        used = answered_usage(
            call.measured if usage is None else usage,
            projected_input=call.call.input_tokens,
            written=text,
        )
        if call.parent is not None:
            call.parent.attempted(used)
        for ticket in call.tickets:
            self._settle(ticket, used, None, model, cost_usd)
        # What housekeeping writes is no reply of the run.
        if final and not any(one.guard.clock.is_housekeeping for one in call.charged):
            self.guard.report_reply(text, speaker=speaker)

    def cut_short(self, call: OpenModelCall) -> Trip | None:
        """Record that a settled answer ended at its completion bound, and not by itself.

        Returns:
            The stop, where the bound was the budget's: the run ends, and its text is kept. None
            where the request itself, or the model, was the bound.
        """
        bound, own = call.max_output_tokens, call.call.max_output_tokens
        if bound is None or (own is not None and own <= bound):
            return None
        charged = call.charged
        reason = next((one.clamped_by for one in charged if one.clamped_by is not None), None)
        violation = cut_answer(reason or StopReason.MAX_OUTPUT_TOKENS_PER_CALL, bound)
        self.guard.hold(violation)
        return self.check()

    def failed(
        self,
        call: OpenModelCall,
        error: BaseException | str,
        *,
        written: str = "",
        turned_away: bool = False,
    ) -> None:
        """Charge a model call that failed, timed out or was cancelled, by the one rule for them.

        Args:
            call: What `model_call` returned.
            error: What ended it. A call that the provider turned away before any work costs no
                tokens, any other its projected prompt and what was written.
            written: What a stream had brought until then.
            turned_away: The provider did no work for it, as the framework says by a class of its
                own; otherwise the error's status tells.
        """
        if not call.close():
            return
        used: TokenUsage | None = TokenUsage()
        if written or not turned_away:
            used = failed_usage(
                error,
                projected_input=call.call.input_tokens,
                written=written,
                reported=call.measured,
            )
        if call.parent is not None:
            call.parent.attempted(used, error)
        for ticket in call.tickets:
            self._settle(ticket, used, error=error)

    def charge_reserved(self, call: OpenModelCall) -> None:
        """Settle a model call of which nobody says what it used: its reservation is charged."""
        if call.close():
            for ticket in call.tickets:
                self._settle(ticket, call.measured)

    def take_back(self, call: OpenModelCall) -> None:
        """Take back a model call that was admitted and never made; it counts as nothing."""
        if call.close():
            self._give_back(call.tickets)
            if call.parent is not None:
                call.parent.seen = False

    # The wait between an admission and a start

    def waited(self, call: _Waits) -> Flow[_Waits]:
        """Wait until a call may start, where the run's breakers hold it back.

        For the pace, a rate limit or a place: within the deadline, and no longer once the run is
        aborted. A task that is cancelled meanwhile takes the call back.

        Args:
            call: What `model_call` answered, or a call of a batch, before `start`.

        Returns:
            The call. A model call becomes `Stop` where the run ended meanwhile, and was not made;
            a tool call is then refused, as it is where it got no place in time: `start` has its
            result.
        """
        if isinstance(call, Stop) or starts_at_once(self, call):
            return call
        trip = yield from waited(self, call)
        if trip is None or isinstance(call, OpenToolCall):
            return call
        return cast("_Waits", Stop(trip))

    def wait(self, call: _Waits) -> _Waits:
        """Wait as `waited` does, in this thread."""
        return run_blocking(self.waited(call))

    async def wait_async(self, call: _Waits) -> _Waits:
        """Wait as `waited` does, in this task."""
        return await run_awaited(self.waited(call))

    # Tool calls

    def batch(self, calls: Iterable[ToolCall]) -> list[OpenToolCall]:
        """Ask for the tool calls of one reply together, in the model's order.

        Every guard that they are charged to has to admit a call; where one refuses, the places
        that others gave are given back.
        """
        open_call = [OpenToolCall(call, run=self) for call in calls]
        self._admit(open_call, self.guards)
        return open_call

    def _admit(self, waiting: list[OpenToolCall], guards: Sequence[Guard]) -> None:
        self.begin_turn()
        for own in guards:
            guard = housekeeping_for(own)
            decisions = guard.admit_tool_calls([one.call for one in waiting])
            admitted: list[OpenToolCall] = []
            for one, decision in zip(waiting, decisions, strict=True):
                if isinstance(decision, Admit):
                    one.tickets = (*one.tickets, decision)
                    admitted.append(one)
                else:
                    self._refuse(one, decision, guard)
            waiting = admitted

    def _refuse(self, call: OpenToolCall, decision: Refuse | Stop, guard: Guard) -> None:
        for ticket in call.tickets:
            ticket.guard.withdraw(ticket)
        call.tickets = ()
        if isinstance(decision, Refuse):
            call.refuse(decision.message, decision.reason, decision.detail)
            return
        self._is_late(decision, guard)
        self._stopped(decision)
        trip = decision.trip
        call.refuse(decision.message, trip.reason, trip.detail, trip=trip)

    def tool_call(self, call: ToolCall, *, function: object = None) -> OpenToolCall:
        """Ask for one tool call: a batch of one.

        A call that a layer above has admitted and whose body has not been seen since is the same
        call: only the guards that have not charged it yet are asked.

        Args:
            call: What is to be called.
            function: The tool's body; the call above is the same one if this is its body, or if it
                has the same name.
        """
        frame = current()
        outer = None if frame is None else frame.call
        guards = self.guards
        unstarted: Sequence[Admit] = ()
        if isinstance(outer, OpenToolCall) and not outer.seen:
            is_body = function is not None and outer.function is function
            if is_body or outer.call.name == call.name:
                outer.seen = True
                guards = tuple(guard for guard in guards if not _covers(outer.tickets, guard))
                # Only of the body itself is it known that nothing was done before.
                unstarted = outer.tickets if is_body else ()
        open_call = OpenToolCall(call, run=self)
        self._admit([open_call], guards)
        if open_call.refusal is not None:
            for ticket in unstarted:
                ticket.guard.withdraw(ticket)
        return open_call

    def refuses_tools(self, names: Sequence[str]) -> list[bool]:
        """Return which calls of these tools, in this order, a cap or a quota would refuse now.

        Nothing is counted and nothing trips: no person is asked about what will be refused.
        """
        answers = [ToolCalls(guard.state).refuses(names) for guard in self.guards]
        return [any(of) for of in zip(*answers, strict=True)]

    def start(self, call: OpenToolCall) -> str | None:
        """Start a tool's body: returns None, or the result to give in its place."""
        if call.refusal is None:
            call.state = "started"
            for ticket in call.tickets:
                if ticket.holds and ticket.breakers is not None:
                    ticket.started()
        return call.refusal

    def finished(
        self, call: OpenToolCall, result: Any = None, *, error: BaseException | str | None = None
    ) -> None:
        """Report how a tool's body ended; a second report changes nothing.

        Args:
            call: What `batch` returned.
            result: What the tool returned, or what its framework made of what it raised.
            error: What it raised. A tool that failed is reported with it even where the framework
                turned the exception into a text.
        """
        if call.state not in ("started", "waiting"):
            return
        call.state = "completed" if error is None else "failed"
        call.result = result
        for ticket in call.tickets:
            ticket.guard.settle_tool_call(ticket, result, error=error)

    def withdrawn(self, call: OpenToolCall, *, waits: bool = False) -> None:
        """Take back a call that was admitted and whose body did not start; it is not counted.

        Args:
            call: What `batch` returned.
            waits: A person is asked; the call is asked for again after the answer.
        """
        if call.state == "waiting":
            call.state = "withdrawn"
            for ticket in call.tickets:
                ticket.guard.withdraw(ticket, waits=waits)

    def _is_late(self, stop: Stop, guard: Guard) -> None:
        """Raise where the deadline of housekeeping has passed: it ends that, and not the run."""
        own = guard.clock.is_housekeeping and stop.trip.run_id == guard.run_id
        if own and stop.trip.reason is StopReason.MAX_SECONDS:
            raise TimeoutError(late(guard.budget.max_seconds))

    def _give_back(self, tickets: Iterable[Admit]) -> None:
        for ticket in tickets:
            ticket.guard.withdraw(ticket)

    def _settle(
        self,
        ticket: Admit,
        usage: TokenUsage | None,
        error: BaseException | str | None = None,
        model: str | None = None,
        cost_usd: Decimal | None = None,
    ) -> None:
        try:
            ticket.guard.settle_model_call(
                ticket, usage, error=error, model=model, cost_usd=cost_usd
            )
        except ConfigurationError as wrong:
            # The reservation was charged; a provider's wrong figures must not end the run.
            self.guard.tree.report("usage", wrong)
        else:
            if usage is not None and ticket.rates is not None and ticket.guard is self.guard:
                full = ticket.rates.window * self.guard.budget.warn_at
                self._prunes = self._prunes or usage.input_tokens >= full


def _covers(tickets: Iterable[Admit], guard: Guard) -> bool:
    """Return whether one of these admissions has charged a guard, or what it is a part of."""
    return any(guard in one.guard.ancestry or one.guard in guard.ancestry for one in tickets)
