"""One run: everything that an adapter tells the engine, and is told by it."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

from budgetguard_core.budget import Budget
from budgetguard_core.decision import Admit, ModelCall, Nudge, Refuse, Stop, ToolCall
from budgetguard_core.ending import end_run
from budgetguard_core.errors import ConfigurationError, RunFencedError
from budgetguard_core.frame import Frame, current
from budgetguard_core.guard import Guard, Mode
from budgetguard_core.housekeeping import late
from budgetguard_core.kit.ambient import entered, housekeeping_for
from budgetguard_core.kit.calls import Batch, OpenModelCall, OpenToolCall
from budgetguard_core.kit.checkpoints import Checkpoints
from budgetguard_core.kit.delay import wait, wait_async
from budgetguard_core.kit.failed_calls import failed_usage
from budgetguard_core.kit.outcomes import remember
from budgetguard_core.kit.projection import Prompt
from budgetguard_core.kit.pruning import Prune
from budgetguard_core.kit.stops import log_stop
from budgetguard_core.kit.usage import answered_usage
from budgetguard_core.limits import cut_answer
from budgetguard_core.outcome import Outcome, Status
from budgetguard_core.stop import StopReason, Trip
from budgetguard_core.stores import CheckpointStore
from budgetguard_core.usage import TokenUsage

if TYPE_CHECKING:
    from decimal import Decimal


Asked: TypeAlias = OpenModelCall | OpenToolCall | Stop
"""What was answered to whoever asked for a call."""


class Terms(Protocol):
    """What a run asks of the envelope that it was opened on."""

    @property
    def store(self) -> CheckpointStore | None:
        """Where checkpoints go."""
        ...

    @property
    def on_outcome(self) -> Callable[[Outcome], object] | None:
        """Called with each outcome."""
        ...

    @property
    def prune(self) -> Prune | None:
        """Shortens what is sent."""
        ...

    @property
    def on_trip(self) -> str:
        """What the caller gets for a stop."""
        ...

    def open(self, *, loose: bool = False) -> Run:
        """Open a run."""
        ...

    def note(self, outcome: Outcome) -> None:
        """Remember how a run ended."""
        ...


class Run:
    """One run of one adapter, from its opening to its one end. Made by `Envelope.open`.

    Attributes:
        envelope: What the adapter was given.
        guard: The guard of this run.
        guards: Every guard that the run's calls are charged to: its own first, then a part of each
            guard of another tree that is in force around it.
        above: The frame that the run was opened in; None at the top.
        trip: Why the run was stopped; None while it may go on.
        outcome: How the run ended, or where it paused; None before.
        ended: The run is over. Nothing that it left behind is a part of it any more.
        finalized: The model gave a last answer when the run was stopped.
        is_loose: It is single calls that belong together; nobody tells their end.
        said: What the last run inside this one has answered.
    """

    def __init__(
        self,
        envelope: Terms,
        guard: Guard,
        above: Frame | None,
        around: Sequence[Guard],
        *,
        loose: bool = False,
    ) -> None:
        self.envelope = envelope
        self.guard = guard
        self.guards = (guard, *_beside(guard, around))
        self.above = above
        self.trip: Trip | None = None
        self.outcome: Outcome | None = None
        self.ended = False
        self.finalized = False
        self._refused: Trip | None = None
        self._around = {one.run_id for nearest in around for one in nearest.lineage}
        self._saving = threading.RLock()
        store = envelope.store
        self._checkpoints = None if store is None else Checkpoints(guard, store)
        self._children: weakref.WeakSet[Run] = weakref.WeakSet()
        self._parts: dict[object, Run] = {}
        self.is_loose = loose
        self.said = ""
        self._is_answer = False
        self._note: str | None = None
        self._prunes = False
        # An `activate` block bounds a run and reads no answer of its.
        self._is_inside_a_run = _is_inside_a_run(above)
        # Nobody tells the end of a loose run, so nobody waits for it.
        if self._parent is not None and not loose:
            self._parent._children.add(self)  # noqa: SLF001 - another run's own field

    def part(self, owner: object, envelope: Terms) -> Run:
        """Return the run in which an owner's single calls within this run are counted together.

        Args:
            owner: What makes the calls: a guarded function, a client.
            envelope: Its own budget, opened on first use.
        """
        with self._saving:
            found = self._parts.get(owner)
            if found is None:
                with self.entered():
                    found = self._parts[owner] = envelope.open(loose=True)
        return found

    # The code of the run

    def entered(self, call: OpenModelCall | OpenToolCall | None = None) -> entered:
        """Make the code in this block a part of the run, and of one of its calls."""
        return entered(self.frame() if call is None else call.frame)

    def frame(self, call: OpenModelCall | OpenToolCall | None = None) -> Frame:
        """Return a frame for code of the run, to be set where a block cannot be used."""
        return Frame(self.guard, run=self, call=call, above=self.above)

    @property
    def has_children(self) -> bool:
        """Whether runs inside this one go on; at a deadline they end first, by themselves."""
        return any(not child.ended for child in list(self._children))

    def told(self, text: str) -> None:
        """Say what a run was asked, before its first call.

        Where it is what the run before it has answered, in the same run or `activate` block around
        them, the two talk to each other: their answers are looked at for repetition there, as the
        replies of one conversation.
        """
        around = self._parent or self.above
        if around is None or not text.strip():
            return
        self._is_answer = text.strip() == around.said
        if self._is_answer and around.guard.check() is None:
            self._note = around.guard.take_nudge()

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
        self._prunes = self._prunes or self.guard.window_nearly_full
        if not (self._prunes or self._nearly_fills(messages, model, provider)):
            return None
        try:
            kept = list(prune(list(messages)))
        except Exception as error:
            self.guard.report("prune", error)
            return None
        # A request without messages is none.
        return kept if kept and len(kept) != len(messages) else None

    def _nearly_fills(
        self, messages: Sequence[Any], model: str | None, provider: str | None
    ) -> bool:
        rates = None if model is None else self.guard.price_book.rates_for(model, provider)
        window = None if rates is None else rates.context_window
        if window is None:
            return False
        self._prunes = Prompt().project(messages) >= window * self.guard.budget.warn_at
        return self._prunes

    def model_call(self, call: ModelCall) -> OpenModelCall | Stop:
        """Ask for a model call, of every guard that it is charged to.

        A call that a layer above has admitted and that no layer has seen since is the same call:
        it is counted once. Another one within it is a retry. Where the attempt before it has ended,
        that one is charged with the retry, and the call that is admitted here takes its place as
        the one that the layer above settles.

        Returns:
            The call, to be reported with `answered` or `failed`; or `Stop`: the run ends.

        Raises:
            ConfigurationError: A figure of the call makes no sense; nothing was counted.
        """
        outer = _open_model_call()
        charged = () if outer is None else outer.charged
        same = outer is not None and not outer.seen
        before = None if outer is None or same else outer.attempt
        retries: list[Admit] = []
        if outer is not None:
            outer.seen = True
        tickets: list[Admit] = []
        nudge, self._note = self._note, None
        for own in self.guards:
            guard = housekeeping_for(own)
            request, asked = call, tickets
            if _covers(charged, guard):
                if same:
                    continue
                request = replace(call, retry=True)
                asked = tickets if before is None else retries
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
            asked.append(decision)
        bounds = [one.max_output_tokens for one in (*tickets, *retries)]
        is_the_outer = outer is not None and (same or before is not None)
        if outer is not None and is_the_outer:
            bounds.append(outer.max_output_tokens)
            if before is not None:
                used, error = before
                outer.attempt = outer.measured = None
                for ticket in retries:
                    self._settle(ticket, used, error=error or "tried again")
        opened = OpenModelCall(
            call,
            tickets,
            nudge=nudge,
            max_output_tokens=min((one for one in bounds if one is not None), default=None),
            above=outer if is_the_outer else None,
        )
        opened.frame = self.frame(opened)
        return opened

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
        if call.above is not None:
            call.above.attempted(used)
        for ticket in call.tickets:
            self._settle(ticket, used, model=model, cost_usd=cost_usd)
        # What housekeeping writes is no reply of the run.
        if final and not any(one.guard.is_housekeeping for one in call.charged):
            self.guard.report_reply(text, speaker=speaker)

    def cut_short(self, call: OpenModelCall) -> Trip | None:
        """Say that a settled answer ended at its completion bound, and not by itself.

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
        if call.above is not None:
            call.above.attempted(used, error)
        for ticket in call.tickets:
            self._settle(ticket, used, error=error)

    def unreported(self, call: OpenModelCall) -> None:
        """Settle a model call of which nobody says what it used: its reservation is charged."""
        if call.close():
            for ticket in call.tickets:
                self._settle(ticket, call.measured)

    def unmade(self, call: OpenModelCall) -> None:
        """Take back a model call that was admitted and never made; it counts as nothing."""
        if call.close():
            self._give_back(call.tickets)
            if call.above is not None:
                call.above.seen = False

    # The wait between an admission and a start

    @overload
    def wait(self, call: OpenModelCall | Stop) -> OpenModelCall | Stop: ...

    @overload
    def wait(self, call: OpenToolCall) -> OpenToolCall: ...

    @overload
    def wait(self, call: Asked) -> Asked: ...

    def wait(self, call: Asked) -> Asked:
        """Wait until a call may start, where the run's breakers hold it back.

        For the pace, a rate limit or a place: within the deadline, and no longer once the run is
        aborted. Blocking: on an event loop use `wait_async`.

        Args:
            call: What `model_call` answered, or a call of a batch, before `start`.

        Returns:
            The call. A model call becomes `Stop` where the run ended meanwhile, and was not made;
            a tool call is then refused, as it is where it got no place in time: `start` has its
            result.
        """
        if isinstance(call, Stop):
            return call
        return self._waited(call, wait(self, call))

    @overload
    async def wait_async(self, call: OpenModelCall | Stop) -> OpenModelCall | Stop: ...

    @overload
    async def wait_async(self, call: OpenToolCall) -> OpenToolCall: ...

    @overload
    async def wait_async(self, call: Asked) -> Asked: ...

    async def wait_async(self, call: Asked) -> Asked:
        """Wait as `wait` does, in this task. Cancelled meanwhile, the call is taken back."""
        if isinstance(call, Stop):
            return call
        return self._waited(call, await wait_async(self, call))

    @staticmethod
    def _waited(call: OpenModelCall | OpenToolCall, trip: Trip | None) -> Asked:
        return call if trip is None or isinstance(call, OpenToolCall) else Stop(trip)

    # Tool calls

    def batch(self, calls: Iterable[ToolCall]) -> Batch:
        """Ask for the tool calls of one reply together, in the model's order.

        Every guard that they are charged to has to admit a call; where one refuses, the places
        that others gave are given back.
        """
        asked = list(calls)
        opened: list[OpenToolCall | None] = [None] * len(asked)
        places = list(range(len(asked)))
        tickets: dict[int, list[Admit]] = {place: [] for place in places}
        for own in self.guards:
            guard = housekeeping_for(own)
            decisions = guard.admit_tool_calls([asked[place] for place in places])
            left: list[int] = []
            for place, decision in zip(places, decisions, strict=True):
                if isinstance(decision, Admit):
                    tickets[place].append(decision)
                    left.append(place)
                    continue
                for ticket in tickets[place]:
                    ticket.guard.withdraw_tool_call(ticket)
                if isinstance(decision, Stop):
                    self._is_late(decision, guard)
                    self._stopped(decision)
                refused = opened[place] = OpenToolCall(asked[place], ())
                trip = decision.trip if isinstance(decision, Stop) else None
                why = decision if isinstance(decision, Refuse) else decision.trip
                refused.refuse(decision.message, why.reason, why.detail, trip=trip)
            places = left
        for place in places:
            opened[place] = OpenToolCall(asked[place], tickets[place])
        batch = Batch([one for one in opened if one is not None])
        for one in batch:
            one.frame = self.frame(one)
        return batch

    def tool_call(self, call: ToolCall, *, function: object = None) -> OpenToolCall:
        """Ask for one tool call: a batch of one.

        A call that a layer above has admitted and whose body has not been seen since is the same
        call: it has no tickets of its own, and is counted once.

        Args:
            call: What is to be called.
            function: The tool's body; the call above is the same one if this is its body, or if it
                has the same name.
        """
        frame = current()
        outer = None if frame is None else frame.call
        if (
            isinstance(outer, OpenToolCall)
            and not outer.seen
            and (outer.call.name == call.name or (function and outer.function is function))
            and all(_covers(outer.tickets, guard) for guard in self.guards)
        ):
            outer.seen = True
            opened = OpenToolCall(call, ())
            opened.frame = self.frame(opened)
            return opened
        return next(iter(self.batch((call,))))

    def start(self, call: OpenToolCall) -> str | None:
        """Say that a tool's body starts now: None, or the result to give in its place."""
        if call.refusal is None:
            call.state = "started"
            for ticket in call.tickets:
                ticket.guard.start_tool_call(ticket)
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
                ticket.guard.withdraw_tool_call(ticket, waits=waits)

    # What holds

    def check(self) -> Trip | None:
        """Ask whether the run has to end now, without starting anything."""
        for guard in self.guards:
            trip = guard.check()
            if trip is not None:
                self._stopped(Stop(trip))
                break
        return self.trip

    def time_left(self) -> float | None:
        """Seconds until the nearest deadline around this run; None without one."""
        nearest: float | None = None
        for guard in self.guards:
            left = housekeeping_for(guard).time_left()
            if left is not None and (nearest is None or left < nearest):
                nearest = left
        return nearest

    @property
    def aborted(self) -> bool:
        """Whether the run, or one around it, was aborted."""
        for guard in self.guards:  # noqa: SIM110 - asked before each call
            if guard.cancellation.cancelled:
                return True
        return False

    def on_abort(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call back once when the run or one around it is aborted, in the aborting thread.

        Returns:
            A function that takes the callback back.
        """
        forget = [guard.cancellation.on_cancel(callback) for guard in self.guards]

        def forget_all() -> None:
            for one in forget:
                one()

        return forget_all

    def nudge(self) -> str | None:
        """Take the corrective message that is due, to deliver it in a tool's result."""
        return next((text for guard in self.guards if (text := guard.take_nudge())), None)

    def is_of_the_run_around(self, trip: Trip) -> bool:
        """Tell whether a stop is that of a run around this one.

        Such a stop goes through: the adapter closes its history and raises, so that nobody takes
        its partial result for an answer. Only a run's own envelope gives its parent one.
        """
        return self.is_inside(trip.run_id)

    def is_inside(self, run_id: str) -> bool:
        """Tell whether this is a part of a run that somebody else ends."""
        return self._is_inside_a_run and run_id in self._around

    # Checkpoints, pauses and the end

    def go_on_as(self, leg: int | None, run_id: str) -> None:
        """Take the leg that `load_to_resume` began for this run.

        Args:
            leg: Its number.
            run_id: The run that was loaded; on a guard of another name this run is another one.
        """
        if self._checkpoints is not None and run_id == self.guard.run_id:
            self._checkpoints.leg = leg

    def save(
        self,
        messages: Sequence[Any] | None = None,
        pending: Sequence[Any] = (),
        *,
        to_plain: Callable[[Sequence[Any]], Iterable[Any]] = list,
    ) -> None:
        """Save a checkpoint of this run and of those that it is a part of; blocking.

        What it costs depends on how much is new since the last one, where the store is a
        `NumberedStore`.

        Args:
            messages: The conversation; that of the last checkpoint if left out.
            pending: What comes after it for now.
            to_plain: Writes messages as plain data, one for each. It is given those that are new.

        Raises:
            RunFencedError: The run was resumed elsewhere, so it must not go on here. A store that
                fails is in the guard's `errors`.
        """
        # Under a lock, so that no older checkpoint overwrites a newer one.
        with self._saving:
            if self._checkpoints is not None:
                try:
                    if messages is not None:
                        self._checkpoints.take(messages, pending, to_plain)
                    self._checkpoints.put()
                except RunFencedError:
                    raise
                except Exception as error:
                    self.guard.report("checkpoint", error)
        if self._parent is not None:
            self._parent.save()

    @property
    def is_saved(self) -> bool:
        """Whether `save` has anything to do."""
        parent = self._parent
        return self.envelope.store is not None or (parent is not None and parent.is_saved)

    def end(
        self,
        messages: Sequence[Any] = (),
        final: Any = None,
        *,
        trip: Trip | None = None,
        saved_messages: Sequence[Any] | None = None,
        next_step: str | None = None,
        resume: str | None = None,
    ) -> Outcome:
        """End a run that came to its end or was stopped; blocking, and done once.

        The adapter has closed its history. The checkpoint is saved, the incident recorded, the
        outcome given to `on_outcome`. A run in which something was refused by its own limits is a
        terminated one, even if whatever asked made an answer of that.

        Args:
            messages: The closed history, in the framework's own types.
            final: The final answer, or the text of the synthetic last message.
            trip: Why the run was stopped, where the adapter knows better than `trip`.
            saved_messages: The history as plain data for the checkpoint; `messages` if left out.
            next_step: What the run was about to do, for the incident record.
            resume: How to go on, for the outcome of a stopped run.
        """
        self.trip = trip or self.stopped_by
        around = self._parent or self.above
        if around is not None and self.trip is None and isinstance(final, str):
            around.said = final.strip()
            if self._is_answer:
                around.guard.report_reply(final)
        return self._concluded(
            "completed" if self.trip is None else "terminated",
            messages,
            final,
            saved_messages,
            next_step=next_step,
            resume=None if self.trip is None else resume,
        )

    def fail(
        self,
        error: BaseException,
        messages: Sequence[Any] = (),
        *,
        saved_messages: Sequence[Any] | None = None,
        resume: str | None = None,
    ) -> Outcome:
        """End a run that an exception or a cancellation left; the outcome is on the exception.

        A run that was stopped before is a terminated one all the same, as with `end`.
        """
        self.trip = self.stopped_by
        outcome = self._concluded(
            "failed", messages, None, saved_messages, error=error, resume=resume
        )
        remember(error, outcome)
        return outcome

    def pause(
        self,
        messages: Sequence[Any] = (),
        *,
        saved_messages: Sequence[Any] | None = None,
        resume: str | None = None,
    ) -> Outcome:
        """Say that the run waits for a person: its time stands still until it goes on.

        This leg of it is over. Keep `run.guard.snapshot()` with the framework's own state, and go
        on with `Envelope.open(resume=snapshot)` when the answer comes: in the same object, in a
        new one or in another process. The calls that are open wait with the run. Where something
        of the same batch was refused, the stop comes with the next call, after the answer.
        """
        self.trip = None
        self.guard.pause(self.guard.open_calls())
        return self._concluded("paused", messages, None, saved_messages, resume=resume)

    async def in_thread(self, end: Callable[[], Outcome]) -> Outcome:
        """Do one of the three above from an event loop without blocking it: in a thread, if I/O."""
        if self.envelope.store is None and not self.guard.has_sinks and self._parent is None:
            return end()
        return await asyncio.to_thread(end)

    @property
    def stopped_by(self) -> Trip | None:
        """Why the run has to end: its own stop, or that of a part of it by a limit of its own."""
        return self.trip or self._refused

    @property
    def is_to_raise(self) -> bool:
        """Whether the caller wants `BudgetExceeded` for a stop instead of the partial result."""
        return self.envelope.on_trip == "raise" and self.trip is not None

    def _concluded(
        self,
        status: Status,
        messages: Sequence[Any],
        final: Any,
        saved_messages: Sequence[Any] | None,
        *,
        error: BaseException | None = None,
        next_step: str | None = None,
        resume: str | None = None,
    ) -> Outcome:
        if self.outcome is not None:
            return self.outcome
        self.ended = True
        if not (self.trip is None or self.is_loose or self.is_of_the_run_around(self.trip)):
            log_stop(self.trip, self.guard.run_id)
        for guard in self.guards[1:]:
            end_run(guard, trip=self.trip, paused=status == "paused", error=error)
        self.outcome = end_run(
            self.guard,
            trip=self.trip,
            messages=messages,
            final=final,
            store=self._checkpoints,
            saved_messages=saved_messages,
            next_step=next_step,
            resume=resume,
            paused=status == "paused",
            error=error,
            finalized=self.finalized and status == "terminated",
        )
        self.envelope.note(self.outcome)
        if self.envelope.on_outcome is not None:
            try:
                self.envelope.on_outcome(self.outcome)
            except Exception as raised:
                self.guard.report("on_outcome", raised)
                # It was told of the outcome, so what it raised could not be a part of that.
                self.outcome = self.outcome.model_copy(update={"errors": self.guard.errors})
                self.guard.outcome = self.outcome
        return self.outcome

    # What others tell

    @property
    def _parent(self) -> Run | None:
        frame = self.above
        return None if frame is None else frame.run

    def _stopped(self, stop: Stop) -> Stop:
        if self.trip is None and self.is_loose and not self.is_of_the_run_around(stop.trip):
            # Nobody tells its end.
            log_stop(stop.trip, self.guard.run_id)
        self.trip = self.trip or stop.trip
        run = self._parent
        while run is not None:
            if any(stop.trip.run_id == one.run_id for g in run.guards for one in g.lineage):
                run._refused = run._refused or stop.trip  # noqa: SLF001
            run = run._parent  # noqa: SLF001
        return stop

    def _is_late(self, stop: Stop, guard: Guard) -> None:
        """Raise where the deadline of housekeeping has passed: it ends that, and not the run."""
        own = guard.is_housekeeping and stop.trip.run_id == guard.run_id
        if own and stop.trip.reason is StopReason.MAX_SECONDS:
            raise TimeoutError(late(guard.budget.max_seconds))

    def _give_back(self, tickets: Iterable[Admit]) -> None:
        for ticket in tickets:
            ticket.guard.withdraw_model_call(ticket)

    def _settle(self, ticket: Admit, usage: TokenUsage | None, **facts: Any) -> None:
        try:
            ticket.guard.settle_model_call(ticket, usage, **facts)
        except ConfigurationError as error:
            # The reservation was charged; a provider's wrong figures must not end the run.
            self.guard.report("usage", error)


def _beside(guard: Guard, around: Sequence[Guard]) -> list[Guard]:
    """Make a part of each guard of another tree; their loops are not looked for here."""
    parts: list[Guard] = []
    trees: list[list[Guard]] = []
    for one in around:
        if one.is_kin_of(guard):
            continue
        kin = next((tree for tree in trees if tree[0].is_kin_of(one)), None)
        if kin is None:
            trees.append([one])
        else:
            kin.append(one)
    for first, *rest in trees:
        parts.append(first.child(Budget(loop_detection=None), beside=rest))
    return parts


def _is_inside_a_run(frame: Frame | None) -> bool:
    while frame is not None:
        if frame.is_live and frame.run is not None and not frame.run.is_loose:
            return True
        frame = frame.above
    return False


def _open_model_call() -> OpenModelCall | None:
    """Return the call of a layer above that this code makes; None where it makes one of its own.

    Where a framework has several of a run open before it sends the first (the prompts of one
    `generate`), it is one that no layer below has seen yet.
    """
    frame = innermost = current()
    while frame is not None and innermost is not None and frame.run is innermost.run:
        call = frame.call
        if not (isinstance(call, OpenModelCall) and call.is_open):
            break
        if not call.seen:
            return call
        frame = frame.above
    call = None if innermost is None else innermost.call
    return call if isinstance(call, OpenModelCall) and call.is_open else None


def _covers(tickets: Iterable[Admit], guard: Guard) -> bool:
    """Tell whether one of these admissions has charged a guard, or what it is a part of."""
    return any(guard in one.guard.lineage or one.guard in guard.lineage for one in tickets)
