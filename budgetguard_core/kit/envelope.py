"""The budget that every adapter takes, checked in one place, and the opening of a run on it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Unpack, cast

from budgetguard_core.breakers import BreakerRegistry
from budgetguard_core.budget import Budget
from budgetguard_core.clock import Clock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.events import Event
from budgetguard_core.frame import Frame, current
from budgetguard_core.guard import Guard, Mode, WarningHandler
from budgetguard_core.kit.ambient import in_force
from budgetguard_core.kit.calls import OpenModelCall
from budgetguard_core.kit.conversations import Conversation, is_in_one, run_id_of
from budgetguard_core.kit.conversations import joined as joined_conversation
from budgetguard_core.kit.options import EnvelopeOptions, OnTrip
from budgetguard_core.kit.projection import estimate
from budgetguard_core.kit.pruning import Prune
from budgetguard_core.kit.run import Run
from budgetguard_core.outcome import Outcome
from budgetguard_core.pricing import PriceBook
from budgetguard_core.profiles import Profile, Selector, Task, load_profile
from budgetguard_core.profiles.profile import PROFILE
from budgetguard_core.sinks import Sink
from budgetguard_core.snapshot import Snapshot
from budgetguard_core.stop import AsksPerson
from budgetguard_core.stop_state import ModeName, as_mode
from budgetguard_core.stores import CheckpointStore
from budgetguard_core.tree import as_sink

if TYPE_CHECKING:
    from budgetguard_core.ledger import Ledger, Tenant

_OF_THE_GUARD = (
    "mode",
    "sinks",
    "on_warning",
    "price_book",
    "clock",
    "breakers",
    "ledger",
    "tenant",
    "profile",
    "conversation",
)
_PAST_RUNS = 32
_STRIPPED: dict[str, Any] = {"messages": (), "final": None, "tool_calls": ()}
_SEATS: weakref.WeakKeyDictionary[Guard, weakref.ref[Run]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """A budget with everything that belongs to it: what each adapter takes.

    Args:
        budget: A `Budget`: a fresh guard for each run, which within another run is a part of that.
            A `Guard`: shared by reference, nothing resets; of runs on it at the same time each
            looks for loops by itself. None: all that the profile says.
        mode: Of fresh guards: ENFORCE, OBSERVE or OFF.
        sinks: Of fresh guards: where events go.
        on_warning: Of fresh guards: called at the warning share of a cap; it may extend or abort.
        price_book: Of fresh guards: where prices come from.
        clock: Of fresh guards: where time comes from.
        breakers: Of fresh guards: the circuit breakers, rate limits and bulkheads that they share.
            The runs of one envelope share theirs; give the same registry to several, or the part
            of it that is for a profile or tenant (`registry.scoped(tenant)`).
        on_outcome: Called with the outcome of each run when it has ended or paused: completed,
            terminated, paused or failed. What it raises is in the `errors` of the outcome that the
            caller gets.
        store: Where checkpoints go.
        on_trip: `return` the partial result of a stopped run as the framework's normal result, or
            `raise` `BudgetExceeded` with the same outcome. Or a function, which may be async, that
            is asked before a cap stops a run, in a parallel branch too: it gets a `LimitQuestion`
            and returns the caps to raise, such as `{"max_iterations": 40}`, or None for the end as
            a partial result. `ask` asks as LangGraph, the Agents SDK or Strands ask a person.
            Nothing is asked of a model or a tool, time stands still, and what tenants and runs
            around leave remains the bound. `max_seconds` and loops do not ask.
        prune: Shortens what is sent, from the first prompt that reached `warn_at` of its model's
            context window on: takes the messages of a request in the framework's own form, and
            returns those to send. The history stays whole. `keep_turns(last=6)` is one. What it
            raises is in the guard's `errors`, and nothing is cut. Not called in OBSERVE.
        ledger: Of fresh guards: the ledger that their model calls are charged to as well, a
            `Ledger` or its URL. It is shared by all processes.
        tenant: Of fresh guards: whom a run is for, a name, a `Key` or several. Where the framework
            has a configuration of the run, a function of it:
            `lambda config: config["configurable"]["tenant"]`.
        conversation: Of fresh guards: caps of the whole conversation, beside those of each run.
            Their counters go on over its runs; in a `store` over processes too, without one this
            process remembers the last 10,000 conversations. `Budget(..., per="conversation")` in
            place of the budget is the same without caps a run. Two processes in one conversation
            at once do not see each other: use a `ledger` there.
        conversation_id: Its id, or a function of the framework's configuration of the run; that of
            the framework's thread or session if left out.
        profile: Of fresh guards: the profile that the caps come from, by name, or chosen for each
            run by a function of its `Task`. What `budget` sets wins over environment variables,
            they over the overlay, and that over the profile. Without a budget and a profile, that
            of `BUDGETGUARD_PROFILE`.

    Raises:
        ConfigurationError: The budget is neither, an option is none, or options of fresh guards
            were given with a `Guard`, which has its own; or there is no such profile.
    """

    budget: Budget | Guard | None = None
    mode: Mode | ModeName = Mode.ENFORCE
    sinks: Iterable[Sink | Callable[[Event], object]] = ()
    on_warning: WarningHandler | None = None
    on_outcome: Callable[[Outcome], object] | None = None
    price_book: PriceBook | None = None
    clock: Clock | None = None
    breakers: BreakerRegistry | None = field(default=None, compare=False)
    store: CheckpointStore | None = None
    on_trip: OnTrip = "return"
    prune: Prune | None = None
    ledger: Ledger | str | None = None
    tenant: Tenant | Callable[[Any], Tenant] | None = None
    conversation: Budget | None = None
    conversation_id: str | Callable[[Any], str | None] | None = None
    profile: str | Profile | Selector | None = None
    _past: deque[Outcome] = field(
        init=False, repr=False, compare=False, default_factory=lambda: deque(maxlen=_PAST_RUNS)
    )

    def __post_init__(self) -> None:
        if self.budget is None:
            if self.profile is None:
                object.__setattr__(self, "profile", _named_by_environment())
            if self.profile is not None:
                object.__setattr__(self, "budget", Budget())
        if not isinstance(self.budget, Budget | Guard):
            raise ConfigurationError(
                f"budget must be a Budget, a Guard or an Envelope, got "
                f"{type(self.budget).__name__}. Build one with Budget(max_iterations=25)."
            )
        if not isinstance(self.conversation, Budget | None):
            raise ConfigurationError(
                f"conversation must be a Budget, got {type(self.conversation).__name__}. "
                "Build one with Budget(max_cost_usd=5)."
            )
        if self.on_trip not in ("return", "raise", "ask") and not callable(self.on_trip):
            raise ConfigurationError(
                f"on_trip must be 'return', 'raise', 'ask' or a function, got {self.on_trip!r}. "
                "Leave it out for a normal result."
            )
        object.__setattr__(self, "mode", as_mode(self.mode))
        if not isinstance(cast("object", self.sinks), Iterable):
            raise ConfigurationError(
                f"sinks must be a list, got {type(self.sinks).__name__}. Use sinks=[sink]."
            )
        object.__setattr__(self, "sinks", tuple(as_sink(sink) for sink in self.sinks))
        for name in ("on_warning", "on_outcome", "prune"):
            handler = getattr(self, name)
            if handler is not None and not callable(handler):
                raise ConfigurationError(
                    f"{name} must be callable, got {type(handler).__name__}. Pass a function."
                )
        if self.price_book is not None and not isinstance(self.price_book, PriceBook):
            raise ConfigurationError(
                f"price_book must be a PriceBook, got {type(self.price_book).__name__}. "
                "Build one with PriceBook(overrides={...})."
            )
        if self.clock is not None and not isinstance(self.clock, Clock):
            raise ConfigurationError(
                f"clock must tell the time, got {type(self.clock).__name__}. "
                "Pass an object with monotonic_ns and wall_ns."
            )
        if self.breakers is not None and not isinstance(self.breakers, BreakerRegistry):
            raise ConfigurationError(
                f"breakers must be a BreakerRegistry, got {type(self.breakers).__name__}. "
                "Leave it out for one of this envelope's own."
            )
        if self.breakers is None and isinstance(self.budget, Budget):
            object.__setattr__(self, "breakers", BreakerRegistry())
        if self.store is not None and not isinstance(self.store, CheckpointStore):
            raise ConfigurationError(
                f"store must save, load and delete snapshots, got {type(self.store).__name__}. "
                "Pass a MemoryStore, a SqliteStore or a CheckpointStore of your own."
            )
        if (self.ledger is None) != (self.tenant is None):
            missing = "ledger" if self.ledger is None else "tenant"
            raise ConfigurationError(
                f"ledger and tenant must be given together, got no {missing}. "
                'Use ledger="sqlite:///ledger.sqlite3", tenant="acme".'
            )
        if self.ledger is not None and self.tenant is not None:
            from budgetguard_core.ledger import as_ledger
            from budgetguard_core.ledger.windows import as_keys

            object.__setattr__(self, "ledger", as_ledger(self.ledger))
            if not callable(self.tenant):
                # Once: what is iterated over may be empty the second time.
                object.__setattr__(self, "tenant", as_keys(self.tenant))
        if isinstance(self.profile, str):
            # Now, so that a wrong name is said where it is given.
            object.__setattr__(self, "profile", load_profile(self.profile))
        elif not (
            self.profile is None or isinstance(self.profile, Profile) or callable(self.profile)
        ):
            raise ConfigurationError(
                f"profile must be a name, a Profile or a function of a Task, got "
                f"{type(self.profile).__name__}. Use profile='research'."
            )
        if isinstance(self.profile, Profile) and isinstance(self.budget, Budget):
            self.profile.under(self.budget)
        if isinstance(self.budget, Guard):
            given = [name for name in _OF_THE_GUARD if getattr(self, name) != _DEFAULTS[name]]
            if given:
                raise ConfigurationError(
                    f"{', '.join(given)} must be left out with a Guard, which has its own, got "
                    "both. Give them to Guard(...), or give a Budget."
                )

    @property
    def may_ask_for_progress(self) -> bool:
        """True if runs may be asked for reports, so that the tool for them is to be offered."""
        given = self.budget
        budget = given.budget if isinstance(given, Guard) else given
        if budget is not None and budget.progress is not None:
            return True
        if isinstance(self.profile, Profile):
            return self.profile.budget.progress is not None
        return callable(self.profile)

    def open(
        self,
        *,
        user_spoke: bool = False,
        resume: Snapshot | None = None,
        fresh: bool = False,
        run_id: str | None = None,
        loose: bool = False,
        config: Any = None,
        given: Any = None,
        thread: object = None,
        asks: AsksPerson | None = None,
    ) -> Run:
        """Begin a run here: the caller's frame decides what it is a part of.

        Args:
            user_spoke: The run begins with new words of the user's: what is asked again is no
                repetition.
            resume: Go on from this snapshot: with its counters, under this envelope's caps and
                mode. What a snapshot holds never becomes a bound.
            fresh: With `resume`: under a fresh budget, what was used before is only reported.
            run_id: The run's name; that of the snapshot, or a random one, if left out.
            loose: For single calls that belong together while nobody tells their end.
            config: The framework's configuration of the run, for a `tenant` or a `profile` that is
                a function.
            given: What the run is given as its input, for a `profile` that is a function.
            thread: The framework's id of the conversation.
            asks: The framework's own way to ask a person, for `on_trip="ask"`.

        Raises:
            ConfigurationError: The function found no tenant, or no profile; or there is a budget
                of the conversation, and no id of it; or this framework asks nobody by itself.
            CheckpointError: The snapshot, or that of the conversation, does not fit together.
        """
        frame = current()
        enclosing = in_force(frame)
        if self.on_trip != "ask":
            asks = self.on_trip if callable(self.on_trip) else None
        elif asks is None:
            raise ConfigurationError(
                "on_trip='ask' needs a framework that asks by itself, which this way in does not. "
                "Pass a function that asks a person: on_trip=ask_person."
            )
        if isinstance(self.budget, Guard):
            run = self._seated(self.budget, frame, enclosing, None if fresh else resume, loose)
        else:
            budget, whole = self._bound(config, given), self.conversation
            if budget.per == "conversation":
                budget, whole = Budget(loop_detection=budget.loop_detection), whole or budget
            joined = None
            if whole is not None and loose and not is_in_one(enclosing):
                raise ConfigurationError(
                    "a budget of a conversation needs runs with an end, got single calls. Put "
                    "them in a bounded block, or give a budget per run."
                )
            if whole is not None and not loose:
                joined = self._conversation(whole, frame, enclosing, config, thread)
            within = enclosing if joined is None else [joined.guard]
            guard = self._fresh(budget, frame, within, resume, fresh, run_id, config, loose)
            run = Run(self, guard, frame, enclosing, loose=loose)
            run.conversation = joined
        if callable(asks):
            run.guard.state.ask_before_a_stop(asks)
            if run.conversation is not None:
                run.conversation.guard.state.ask_before_a_stop(asks)
        run.user_spoke = user_spoke and bool(run.guard.usage.model_calls or run.guard.tool_counts)
        return run

    def _conversation(
        self,
        budget: Budget,
        frame: Frame | None,
        enclosing: Sequence[Guard],
        config: Any,
        thread: object,
    ) -> Conversation | None:
        """Join the conversation of a run; None where that is a part of another run of it."""
        found = self.conversation_id
        key = (found(config) if callable(found) else found) or thread
        if key is None and is_in_one(enclosing):
            return None
        name = run_id_of(key)
        if is_in_one(enclosing, name):
            return None

        def make(before: Snapshot | None) -> Guard:
            return self._fresh(budget, frame, enclosing, before, False, name, config, False)

        return joined_conversation(name, self.store, make)

    def note(self, outcome: Outcome) -> None:
        """Remember how a run ended, for the next choice of a profile."""
        if callable(self.profile):
            self._past.append(outcome.model_copy(update=_STRIPPED))

    def _bound(self, config: Any, given: Any) -> Budget:
        budget = self.budget if isinstance(self.budget, Budget) else Budget()
        profile = self.profile
        if profile is None:
            return budget
        if not isinstance(profile, Profile | str):
            size = None if given is None else estimate(given)
            task = Task(input_tokens=size, config=config, history=tuple(self._past))
            try:
                profile = profile(task)
            except Exception as error:
                # A run without its profile could be unbounded.
                raise ConfigurationError(
                    f"profile must choose one for the task, got {type(error).__name__}. "
                    "Return a name for every task."
                ) from error
        return (profile if isinstance(profile, Profile) else load_profile(profile)).under(budget)

    def _fresh(
        self,
        budget: Budget,
        frame: Frame | None,
        enclosing: Sequence[Guard],
        resume: Snapshot | None,
        fresh: bool,
        run_id: str | None,
        config: Any,
        loose: bool,
    ) -> Guard:
        in_a_call = frame is not None and isinstance(frame.call, OpenModelCall)
        # What runs inside of a call that is counted already is charged beside it: the first call
        # here is the same one, and only this budget has not seen it.
        near = (
            []
            if in_a_call or loose
            else [one for one in enclosing if (one.tree is enclosing[0].tree)]
        )
        paid: dict[str, Any] = {"ledger": self.ledger, "tenant": self._tenant(config)}
        settings: dict[str, Any] = {
            # The log of the run around single calls has them already.
            "sinks": None if loose and enclosing and not self.sinks else self.sinks,
            "on_warning": self.on_warning,
            "price_book": self.price_book or (enclosing[0].tree.price_book if enclosing else None),
            "clock": self.clock or (enclosing[0].tree.clock if enclosing else None),
            "breakers": self.breakers,
        }
        if resume is not None:
            guard = Guard.restore(
                resume.model_copy(update={"mode": str(self.mode), "budget": budget.to_json()}),
                budget if fresh else None,
                stop_when=() if fresh else budget.stop_when,
                within=near,
                **settings,
                **paid,
            )
            guard.go_on()
            return guard
        if near:
            return near[0].child(
                budget,
                mode=self.mode,
                run_id=run_id,
                on_warning=self.on_warning,
                linked=near[1:],
                breakers=self.breakers,
                **paid,
            )
        if enclosing:
            budget = budget.inheriting(enclosing[0].budget)
        return Guard(budget, mode=self.mode, run_id=run_id, **settings, **paid)

    def _tenant(self, config: Any) -> Tenant | None:
        if not callable(self.tenant):
            return self.tenant
        try:
            return self.tenant(config)
        except Exception as error:
            # A run that nobody pays for would be unbounded.
            raise ConfigurationError(
                "tenant must find a name in the run's configuration, got "
                f"{type(error).__name__}. Give one with each call, or a name for all."
            ) from error

    def _seated(
        self,
        budget: Guard,
        frame: Frame | None,
        enclosing: Sequence[Guard],
        resume: Snapshot | None,
        loose: bool,
    ) -> Run:
        if resume is not None:
            if resume.run_id != budget.run_id:
                # Made anew for this request; one that counts already has counted the one before.
                type(budget).restore(resume, onto=budget)
            budget.go_on()
        part = next((one for one in enclosing if budget in one.ancestry), None)
        if part is not None:
            siblings = [one for one in enclosing if one is not part and (one.tree is part.tree)]
            return Run(self, part.child(linked=siblings), frame, enclosing, loose=loose)
        siblings = [
            one for one in enclosing if (one.tree is budget.tree) and one not in budget.ancestry
        ]
        with _LOCK:
            seat = _SEATS.get(budget)
            before = None if seat is None else seat()
            if siblings or (before is not None and not before.ended):
                return Run(self, budget.child(linked=siblings), frame, enclosing, loose=loose)
            run = Run(self, budget, frame, enclosing, loose=loose)
            _SEATS[budget] = weakref.ref(run)
            return run


def joined() -> Run | None:
    """Return the run that a single call from this code is a part of; None outside of any.

    In an `activate` block it is a run of the block's own guard.
    """
    frame = current()
    if frame is None:
        return None
    with _LOCK:
        if frame.run is None:
            frame.run = Run(
                Envelope(budget=frame.guard),
                frame.guard,
                frame.parent,
                in_force(frame.parent),
                loose=True,
            )
    run: Run = frame.run
    return run


_DEFAULTS = {one.name: one.default for one in fields(Envelope) if one.init}


def _named_by_environment() -> str | None:
    return os.environ.get(PROFILE) or None


def envelope_of(
    budget: Budget | Guard | Envelope | None,
    *,
    default: Budget | None = None,
    **options: Unpack[EnvelopeOptions],
) -> Envelope:
    """Return the envelope of whatever an adapter was given as its budget.

    Args:
        budget: A budget, a guard, or an envelope, which has its own options.
        default: The budget of an adapter that is given none, and no profile either.
        options: The adapter's own options, as `Envelope` takes them.

    Raises:
        ConfigurationError: It is none of these; an option is none of an envelope's; or an
            envelope came with options.
    """
    if isinstance(budget, Envelope):
        changed = sorted(name for name, value in options.items() if value != _DEFAULTS.get(name))
        if changed:
            raise ConfigurationError(
                f"{', '.join(changed)} must be left out with an Envelope, which has its own, got "
                "both. Give them to Envelope(...)."
            )
        return budget
    unknown = sorted(set(options) - set(_DEFAULTS))
    if unknown:
        raise ConfigurationError(
            f"{unknown[0]} is no option of an envelope. Use one of: "
            f"{', '.join(name for name in _DEFAULTS if name != 'budget')}."
        )
    if budget is None and options.get("profile") is None and _named_by_environment() is None:
        budget = default
    return Envelope(budget=budget, **options)
