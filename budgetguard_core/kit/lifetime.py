"""The life of a run: where it is opened, what holds it, its checkpoints, and its one end."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from budgetguard_core.budget import Budget
from budgetguard_core.counters import is_calm
from budgetguard_core.decision import Stop
from budgetguard_core.ending import end_run
from budgetguard_core.errors import RunFencedError
from budgetguard_core.frame import Frame
from budgetguard_core.guard import Guard, Mode
from budgetguard_core.kit.ambient import entered, housekeeping_for, inside_a_run
from budgetguard_core.kit.calls import OpenModelCall, OpenToolCall
from budgetguard_core.kit.checkpoints import Checkpoints
from budgetguard_core.kit.conversations import Conversation
from budgetguard_core.kit.outcomes import remember
from budgetguard_core.kit.stops import log_stop
from budgetguard_core.outcome import Outcome, Status
from budgetguard_core.stop import StopReason, Trip, Violation
from budgetguard_core.threads import THREADS


class Lifetime:
    """A run but for its calls: what it is a part of, what holds it, and how it ends.

    Attributes:
        envelope: What the adapter was given: the `Envelope`, which imports this.
        guard: The guard of this run.
        guards: Every guard that the run's calls are charged to: its own first, then a part of each
            guard of another tree that is in force around it.
        parent: The frame that the run was opened in; None at the top.
        trip: Why the run was stopped; None while it may go on.
        outcome: How the run ended, or where it paused; None before.
        ended: The run is over. Nothing that it left behind is a part of it any more, but for what
            `goes_on_here`.
        finalized: The model gave a last answer when the run was stopped.
        thread: The identifier of the thread that the run is at home in: the one in which it was
            opened, unless its adapter says otherwise.
        is_loose: It is single calls that belong together; nobody tells their end.
        user_spoke: The user has spoken, and no call was asked for since.
        conversation: The conversation that it is a run of, where that has a budget.
        earlier_messages: The history of the run that the user has named to go on from.
        is_of_clients: Its calls are counted where clients send them, below every framework.
    """

    is_of_clients = False
    earlier_messages: Sequence[Any] = ()

    def __init__(
        self,
        envelope: Any,
        guard: Guard,
        parent: Frame | None,
        enclosing: Sequence[Guard],
        *,
        loose: bool = False,
    ) -> None:
        self.envelope = envelope
        self.guard = guard
        self.guards = (guard, *_siblings(guard, enclosing))
        self.parent = parent
        self.trip: Trip | None = None
        self.outcome: Outcome | None = None
        self.ended = False
        self.thread = threading.get_ident()
        self._was_cut = False
        self.finalized = False
        self._refused: Trip | None = None
        self._enclosing = {one.run_id for nearest in enclosing for one in nearest.ancestry}
        self._saving = threading.RLock()
        store = envelope.store
        self._checkpoints = None if store is None else Checkpoints(guard, store)
        self._children: weakref.WeakSet[Lifetime] = weakref.WeakSet()
        self._parts: dict[object, Any] = {}
        self.is_loose = loose
        self.conversation: Conversation | None = None
        self.user_spoke = False
        self._is_answer = False
        self._note: str | None = None
        self._prunes = False
        # An `activate` block bounds a run and reads no answer of its.
        self._is_inside_a_run = inside_a_run(parent)
        # Nobody tells the end of a loose run, so nobody waits for it.
        if self._outer_run is not None and not loose:
            self._outer_run._children.add(self)  # noqa: SLF001 - another run's own field
        self._block = None if loose else THREADS.open_block()

    # The code of the run

    def entered(self, call: OpenModelCall | OpenToolCall | None = None) -> entered:
        """Make the code in this block a part of the run, and of one of its calls."""
        return entered(self.frame() if call is None else call.frame)

    def frame(self, call: OpenModelCall | OpenToolCall | None = None) -> Frame:
        """Return a frame for code of the run, to be set where a block cannot be used."""
        return Frame(self.guard, run=self, call=call, parent=self.parent)

    @property
    def goes_on_here(self) -> bool:
        """True if this code is what a run has left behind that was stopped, cancelled or failed.

        A body at work in a thread cannot be cancelled: what it calls is still held to the caps. In
        the run's own thread its work is over.
        """
        return self._was_cut and threading.get_ident() != self.thread

    @property
    def has_children(self) -> bool:
        """True if runs inside this one go on; at a deadline they end first, by themselves."""
        return any(not child.ended for child in list(self._children))

    def record_prompt(self, text: str) -> None:
        """Record what the run was asked, before its first call.

        Where it is what the run before it has answered, on the same guard or in the same run or
        `activate` block around them, the two talk to each other: their answers are looked at for
        repetition there, as the replies of one conversation.
        """
        enclosing = self._outer_run or self.parent
        guard = self.guard if enclosing is None else enclosing.guard
        self._is_answer = bool(text.strip()) and text.strip() == guard.state.last_answer
        if self._is_answer:
            self.user_spoke = False
            if enclosing is not None and guard.check() is None:
                self._note = guard.take_nudge()

    def begin_turn(self) -> None:
        """Begin the user's turn, where the user has spoken, with the first call of it."""
        if self.user_spoke:
            self.user_spoke = False
            self.guard.user_turn()

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
            leave = housekeeping_for(guard).time_left()
            if leave is not None and (nearest is None or leave < nearest):
                nearest = leave
        return nearest

    @property
    def aborted(self) -> bool:
        """True if the run, or one around it, was aborted."""
        for guard in self.guards:  # noqa: SIM110 - asked before each call
            if guard.cancellation.cancelled:
                return True
        return False

    @property
    def has_to_end(self) -> bool:
        """True if the run was aborted or its deadline has passed; `check` tells which."""
        for guard in self.guards:
            if guard.cancellation.cancelled:
                return True
            state = guard.state
            if is_calm(state.chain, state.tree.now()):
                continue  # far from every cap, the deadline too: asked before each step
            if housekeeping_for(guard).time_left() == 0:
                return True
        return False

    @property
    def is_enforced(self) -> bool:
        """True if any guard of the run ends it; else all of them observe only, or are off."""
        return any(one.mode is Mode.ENFORCE for guard in self.guards for one in guard.ancestry)

    def framework_limit(self, detail: str) -> Trip:
        """Return the stop of a run that its framework's own cap has ended, to `end` it with.

        It is the stop that there was before, if there was one: whoever swallows that comes to the
        framework's cap. Nothing of the guard is tripped: on a shared one, other runs go on. A run
        that is not enforced ends as its framework ends it.

        Args:
            detail: What the framework says, for people.
        """
        violation = Violation(reason=StopReason.FRAMEWORK_LIMIT, detail=detail)
        limit = Trip(reason=violation.reason, violations=(violation,), run_id=self.guard.run_id)
        return self.stopped_by or limit

    def on_abort(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call back once when the run or one around it is aborted, in the aborting thread.

        Returns:
            A function that takes the callback back.
        """
        if len(self.guards) == 1:
            return self.guard.cancellation.on_cancel(callback)
        forget = [guard.cancellation.on_cancel(callback) for guard in self.guards]

        def forget_all() -> None:
            for one in forget:
                one()

        return forget_all

    def nudge(self) -> str | None:
        """Take the corrective message that is due, to deliver it in a tool's result."""
        return next((text for guard in self.guards if (text := guard.take_nudge())), None)

    def is_of_parent_run(self, trip: Trip) -> bool:
        """Return whether a stop is that of a run around this one.

        Such a stop propagates: the adapter closes its history and raises, so that nobody takes
        its partial result for an answer. Only a run's own envelope gives its parent one.
        """
        return self.is_inside(trip.run_id)

    def is_inside(self, run_id: str) -> bool:
        """Return whether this is a part of a run that somebody else ends."""
        return self._is_inside_a_run and run_id in self._enclosing

    # Checkpoints, pauses and the end

    def go_on_as(self, attempt: int | None, run_id: str) -> None:
        """Take the attempt that `load_to_resume` began for this run.

        Args:
            attempt: Its number.
            run_id: The run that was loaded; on a guard of another name this run is another one.
        """
        if self._checkpoints is not None and run_id == self.guard.run_id:
            self._checkpoints.attempt = attempt

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
                    self.guard.tree.report("checkpoint", error)
            if self._checkpoints is not None and self.conversation is not None:
                self.conversation.save()
        if self._outer_run is not None:
            self._outer_run.save()

    @property
    def is_saved(self) -> bool:
        """True if `save` has anything to do."""
        parent = self._outer_run
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
        if self.trip is None and isinstance(final, str):
            enclosing = self._outer_run or self.parent
            guard = self.guard if enclosing is None else enclosing.guard
            guard.state.last_answer = final.strip()
            if self._is_answer and enclosing is not None:
                guard.report_reply(final)
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
        """Pause the run for a person: its time stands still until it goes on.

        This attempt of it is over. Keep `run.guard.snapshot()` with the framework's own state, and
        go on with `Envelope.open(resume=snapshot)` when the answer comes: in the same object, in a
        new one or in another process. The calls that are open wait with the run. Where something
        of the same batch was refused, the stop comes with the next call, after the answer.
        """
        self.trip = None
        self.guard.pause(self.guard.open_calls())
        return self._concluded("paused", messages, None, saved_messages, resume=resume)

    async def in_thread(self, end: Callable[[], Outcome]) -> Outcome:
        """Do one of the three above from an event loop without blocking it: in a thread, if I/O."""
        if self.envelope.store is None and not self.guard.tree.sinks and self._outer_run is None:
            return end()
        return await asyncio.to_thread(end)

    @property
    def stopped_by(self) -> Trip | None:
        """Why the run has to end: its own stop, or that of a part of it by a limit of its own."""
        return self.trip or self._refused

    @property
    def is_to_raise(self) -> bool:
        """True if the caller wants `BudgetExceeded` for a stop instead of the partial result."""
        return self.envelope.on_trip == "raise" and self.trip is not None and self.is_enforced

    @property
    def is_passed_on(self) -> bool:
        """True if the caller gets `BudgetExceeded` for the stop: it asked for it, or is cut too."""
        trip = self.trip
        return trip is not None and (self.is_to_raise or self.is_of_parent_run(trip))

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
        for part in list(self._parts.values()):
            part.end()
        self.ended = True
        if self._block is not None:
            THREADS.closed(self._block)
        self._was_cut = status in ("terminated", "failed")
        if not (self.trip is None or self.is_loose or self.is_of_parent_run(self.trip)):
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
        if self.conversation is not None:
            self.conversation.leave()
        self.envelope.note(self.outcome)
        if self.envelope.on_outcome is not None:
            try:
                self.envelope.on_outcome(self.outcome)
            except Exception as raised:
                self.guard.tree.report("on_outcome", raised)
                # It was told of the outcome, so what it raised could not be a part of that.
                self.outcome = self.outcome.model_copy(update={"errors": self.guard.tree.errors})
                self.guard.outcome = self.outcome
        return self.outcome

    # What others tell

    @property
    def _outer_run(self) -> Lifetime | None:
        frame = self.parent
        return None if frame is None else frame.run

    def _stopped(self, stop: Stop) -> Stop:
        if self.trip is None and self.is_loose and not self.is_of_parent_run(stop.trip):
            # Nobody tells its end.
            log_stop(stop.trip, self.guard.run_id)
        self.trip = self.trip or stop.trip
        run = self._outer_run
        while run is not None:
            if any(stop.trip.run_id == one.run_id for g in run.guards for one in g.ancestry):
                run._refused = run._refused or stop.trip  # noqa: SLF001
            run = run._outer_run  # noqa: SLF001
        return stop


def _siblings(guard: Guard, enclosing: Sequence[Guard]) -> list[Guard]:
    """Make a part of each guard of another tree; their loops are not looked for here."""
    parts: list[Guard] = []
    trees: list[list[Guard]] = []
    for one in enclosing:
        if one.tree is guard.tree:
            continue
        siblings = next((tree for tree in trees if tree[0].tree is one.tree), None)
        if siblings is None:
            trees.append([one])
        else:
            siblings.append(one)
    for first, *rest in trees:
        parts.append(first.child(Budget(loop_detection=None), linked=rest))
    return parts
