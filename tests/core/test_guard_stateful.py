"""Any interleaving of steps, against a model that keeps lists of calls and adds them up."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Pool
from hypothesis.stateful import (
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from budgetguard_core import (
    AdapterError,
    Budget,
    Guard,
    PriceBook,
    Snapshot,
    counters,
    read_events,
    replay,
)
from budgetguard_core.events import CheckpointSaved
from budgetguard_core.kit import Admit, ModelCall, Refuse, Stop, TokenUsage, ToolCall
from budgetguard_core.testing import ManualClock

CENT = Decimal("0.01")
BOOK = PriceBook()


@pytest.fixture(autouse=True, scope="module")
def short_answers():
    """Answers of unknown length are short here as well, so that several of them fit in a cap."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counters, "UNKNOWN_ANSWER", 5)
        yield


@dataclass
class Call:
    """A model call as the model remembers it."""

    chain: list[Naive]
    retry: bool
    tokens: int
    cents: int
    output: int = 0
    guess: int = 0
    settled: tuple[int, int] | None = None
    completion: int = 0
    failed: bool = False


@dataclass
class Tool:
    chain: list[Naive]
    name: str
    batch: int


@dataclass(eq=False)
class Naive:
    """A guard that counts nothing: whatever it is asked, it looks through its lists."""

    caps: dict[str, int]
    quotas: dict[str, int]
    bound: int | None
    parent: Naive | None
    calls: list[Call]
    tools: list[Tool]
    calls_since: int = 0
    turns_since: int = 0
    tools_since: int = 0
    started: float | None = None
    halted: bool = False
    tripped: bool = False
    warned: set[str] = field(default_factory=set)

    def chain(self):
        return [self] if self.parent is None else [self, *self.parent.chain()]

    def mine(self):
        return [call for call in self.calls[self.calls_since :] if self in call.chain]

    def iterations(self):
        turns = self.calls[max(self.turns_since, self.calls_since) :]
        return sum(self in call.chain and not call.retry for call in turns)

    def tokens(self):
        return sum(call.settled[0] for call in self.mine() if call.settled)

    def cents(self):
        return sum(call.settled[1] for call in self.mine() if call.settled)

    def reserved_tokens(self):
        return sum(call.tokens for call in self.mine() if not call.settled)

    def reserved_cents(self):
        return sum(call.cents for call in self.mine() if not call.settled)

    def largest(self):
        return max((call.completion for call in self.mine()), default=0)

    def tool_calls(self, name=None):
        tools = [tool for tool in self.tools[self.tools_since :] if self in tool.chain]
        return sum(name in (None, tool.name) for tool in tools)

    def full(self, dimension, used, more=0):
        cap = self.caps.get(dimension)
        return cap is not None and (used >= cap or used + more > cap)

    def no_more(self, now):
        """Whether nothing at all may start."""
        return (
            self.halted
            or self.full("max_seconds", 0 if self.started is None else now - self.started)
            or self.full("max_cost_usd", self.cents())
            or self.full("max_total_tokens", self.tokens())
        )

    def no_more_calls(self, now, retry, tokens, cents):
        return (
            self.no_more(now)
            or (not retry and self.full("max_iterations", self.iterations()))
            or self.full("max_model_calls", len(self.mine()))
            or self.full("max_cost_usd", self.cents(), self.reserved_cents() + cents)
            or self.full("max_total_tokens", self.tokens(), self.reserved_tokens() + tokens)
            or self.tool_calls() > self.caps.get("max_tool_calls", 10**9)
        )

    def quota_used_up(self, name):
        return name in self.quotas and self.tool_calls(name) >= self.quotas[name]

    def start_clock(self, now):
        for guard in self.chain():
            if guard.started is None:
                guard.started = now

    def stopped(self, now, refuses):
        """Whether the chain refuses; whoever refuses has tripped then, and the asker with it."""
        self.start_clock(now)
        chain = self.chain()
        if not any(guard.tripped for guard in chain):
            refusing = [guard for guard in chain if refuses(guard)]
            if not refusing:
                return False
            for guard in refusing:
                guard.tripped = True
        self.tripped = True
        return True


caps = st.fixed_dictionaries(
    {},
    optional={
        "max_iterations": st.integers(1, 8),
        "max_model_calls": st.integers(1, 10),
        "max_tool_calls": st.integers(1, 8),
        "max_total_tokens": st.integers(1, 60),
        "max_seconds": st.integers(1, 20),
        "max_cost_usd": st.integers(1, 30),
    },
)
quotas = st.dictionaries(st.sampled_from("ab"), st.integers(1, 4))
bounds = st.none() | st.integers(1, 9)
batches = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["function", "function", "function", "hosted", "output", "handoff"]),
    ),
    max_size=5,
)


def budget_of(caps, quotas, bound):
    given = dict(caps)
    if "max_cost_usd" in given:
        given["max_cost_usd"] = given["max_cost_usd"] * CENT
    return Budget(**given, tool_quotas=quotas, max_output_tokens_per_call=bound)


def known(guard):
    """Everything that the guard says about itself."""
    return guard.snapshot(), guard.usage, guard.tool_calls, guard.time_left()


class Interleavings(RuleBasedStateMachine):
    guards = Pool("guards")
    flying = Pool("flying")
    landed = Pool("landed")
    bodies = Pool("bodies")

    @initialize(target=guards, caps=caps, quotas=quotas, bound=bounds)
    def begin(self, caps, quotas, bound):
        self.clock = ManualClock()
        self.log = []
        self.calls, self.tools, self.numbers = [], [], 0
        self.root = Guard(
            budget_of(caps, quotas, bound),
            run_id="root",
            clock=self.clock,
            price_book=BOOK,
            sinks=[lambda event: self.log.append(event.model_dump_json() + "\n")],
        )
        naive = Naive(dict(caps), quotas, bound, None, self.calls, self.tools)
        self.all = [(self.root, naive)]
        return self.all[0]

    def now(self):
        return self.clock.monotonic_ns() / 10**9

    @rule(target=guards, pair=guards, caps=caps, quotas=quotas, bound=bounds)
    def child(self, pair, caps, quotas, bound):
        guard, naive = pair
        if len(self.all) == 5:
            return multiple()
        made = guard.child(budget_of(caps, quotas, bound), run_id=f"child {len(self.all)}")
        mine = Naive(dict(caps), quotas, bound, naive, self.calls, self.tools)
        self.all.append((made, mine))
        return self.all[-1]

    @rule(
        target=flying,
        pair=guards,
        retry=st.sampled_from([False, False, False, True]),
        inputs=st.integers(1, 12),
        bound=bounds,
        cents=st.integers(0, 6),
    )
    def admit_model_call(self, pair, retry, inputs, bound, cents):
        guard, naive = pair
        before = [known(one)[0].counters for one, _ in self.all]
        decision = guard.admit_model_call(
            ModelCall(
                retry=retry, input_tokens=inputs, max_output_tokens=bound, cost_usd=cents * CENT
            )
        )
        wanted = [one.bound for one in naive.chain()] + [bound]
        output = min((one for one in wanted if one is not None), default=None)
        if output is not None:
            for one in naive.chain():
                if "max_total_tokens" in one.caps:
                    left = one.caps["max_total_tokens"] - one.tokens() - one.reserved_tokens()
                    output = min(output, left - inputs)
            output = max(output, 1)
        tokens, guess = inputs + (output or 0), 0
        chain = naive.chain()
        if output is None and any(
            {"max_total_tokens", "max_cost_usd"} & set(one.caps) for one in chain
        ):
            guess = next((one.largest() for one in chain if one.largest()), 0)
            guess = max(guess, counters.UNKNOWN_ANSWER)
        kept = tokens + guess
        if any(one.reserved_tokens() or one.reserved_cents() for one in chain):
            tokens = kept
        now = self.now()
        if naive.stopped(now, lambda one: one.no_more_calls(now, retry, tokens, cents)):
            assert type(decision) is Stop
            assert decision.trip is guard.trip
            assert before == [known(one)[0].counters for one, _ in self.all]
            return multiple()
        assert type(decision) is Admit
        assert decision.max_output_tokens == output
        call = Call(naive.chain(), retry, kept, cents, output or 0, guess)
        self.calls.append(call)
        return decision, call

    @rule(target=landed, flight=consumes(flying), share=st.integers(0, 4), error=st.booleans())
    def settle(self, flight, share, error):
        decision, call = flight
        tokens, cents = call.tokens * share // 4, call.cents * share // 4
        assert decision.guard.settle_model_call(
            decision,
            TokenUsage(tokens, 0),
            cost_usd=cents * CENT,
            error=OSError() if error else None,
        )
        call.settled, call.failed = (tokens, cents), error
        return decision

    @rule(target=landed, flight=consumes(flying))
    def fail_without_a_word(self, flight):
        decision, call = flight
        assert decision.guard.settle_model_call(decision, error="timeout")
        call.settled, call.failed = (call.tokens - call.guess, call.cents), True
        call.completion = call.output
        return decision

    @rule(decision=landed)
    def settle_again(self, decision):
        before = known(decision.guard)
        assert not decision.guard.settle_model_call(decision, TokenUsage(9, 9))
        assert known(decision.guard) == before

    @rule(target=bodies, pair=guards, batch=batches)
    def admit_tool_calls(self, pair, batch):
        guard, naive = pair
        asked = []
        for name, kind in batch:
            # A number in each, so that nothing here is a loop.
            self.numbers += 1
            asked.append(ToolCall(name=name, kind=kind, arguments={"n": self.numbers}))
        decisions = guard.admit_tool_calls(asked)
        now = self.now()
        stopped = naive.stopped(now, lambda one: one.no_more(now))
        admitted = []
        for (name, kind), decision in zip(batch, decisions, strict=True):
            expected = Admit
            if kind == "function" and not stopped:
                full = [
                    one for one in naive.chain() if one.full("max_tool_calls", one.tool_calls())
                ]
                for one in full:
                    one.tripped = naive.tripped = stopped = True
                if not full and any(one.quota_used_up(name) for one in naive.chain()):
                    expected = Refuse
            if stopped and kind in ("function", "handoff"):
                expected = Stop
            assert type(decision) is expected
            if expected is Admit and kind in ("function", "hosted"):
                self.tools.append(Tool(naive.chain(), name, len(self.tools)))
                for one in naive.chain():
                    if kind == "hosted" and one.tool_calls(name) > one.quotas.get(name, 10**9):
                        one.halted = True
            if expected is Admit and kind != "hosted":
                admitted.append(decision)
        return multiple(*admitted)

    @rule(decision=consumes(bodies), error=st.booleans())
    def settle_tool_call(self, decision, error):
        self.numbers += 1
        # In letters: errors that differ in numbers only are of a kind.
        word = str(self.numbers).translate(str.maketrans("0123456789", "ghijklmnop"))
        error = OSError(word) if error else None
        assert decision.guard.settle_tool_call(decision, self.numbers, error=error)
        assert not decision.guard.settle_tool_call(decision, "again")

    @rule(pair=guards, more=st.integers(1, 5), data=st.data())
    def extend(self, pair, more, data):
        guard, naive = pair
        if not naive.caps:
            return
        name = data.draw(st.sampled_from(sorted(naive.caps)))
        raised = naive.caps[name] + more
        given = raised * CENT if name == "max_cost_usd" else raised
        if naive.tripped:
            with pytest.raises(AdapterError):
                guard.extend(**{name: given})
        else:
            guard.extend(**{name: given})
            naive.caps[name] = raised

    @rule(pair=guards)
    def abort(self, pair):
        guard, naive = pair
        guard.abort()
        if not naive.tripped:
            naive.halted = True

    @rule(pair=guards)
    def check(self, pair):
        guard, naive = pair
        trip = guard.check()
        now = self.now()
        started = [one.started for one in naive.chain()]
        stopped = naive.stopped(now, lambda one: one.no_more(now))
        for one, before in zip(naive.chain(), started, strict=True):
            one.started = before
        assert (trip is not None) is stopped

    @rule(pair=guards)
    def user_turn(self, pair):
        pair[0].user_turn()

    @rule(pair=guards)
    def restart_iterations(self, pair):
        guard, naive = pair
        guard.state.restart_iterations()
        naive.turns_since = len(self.calls)

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def restore(self):
        assert known(self.restored()) == known(self.root)

    def restored(self):
        text = self.root.snapshot().to_json()
        return Guard.restore(Snapshot.from_json(text), clock=self.clock, price_book=BOOK)

    @invariant()
    def the_counters_are_the_sums(self):
        for guard, naive in getattr(self, "all", []):
            mine, usage = naive.mine(), guard.usage
            assert usage.iterations == naive.iterations()
            assert usage.model_calls == len(mine)
            assert usage.failed_calls == sum(call.failed for call in mine)
            assert usage.tool_calls == naive.tool_calls()
            assert usage.total_tokens == naive.tokens()
            assert usage.reserved_tokens == naive.reserved_tokens()
            assert usage.cost_usd == naive.cents() * CENT
            assert usage.reserved_usd == naive.reserved_cents() * CENT
            assert usage.seconds == (0 if naive.started is None else self.now() - naive.started)
            assert (guard.trip is not None) is naive.tripped
            assert guard.tool_counts == {
                name: naive.tool_calls(name) for name in "abc" if naive.tool_calls(name)
            }

    @invariant()
    def no_cap_is_ever_passed(self):
        for guard, naive in getattr(self, "all", []):
            usage, none = guard.usage, 10**9
            assert usage.model_calls <= naive.caps.get("max_model_calls", none)
            assert usage.iterations <= naive.caps.get("max_iterations", none)
            tokens, cost = usage.total_tokens, usage.cost_usd
            assert tokens + usage.reserved_tokens <= naive.caps.get("max_total_tokens", none)
            assert cost + usage.reserved_usd <= naive.caps.get("max_cost_usd", none) * CENT

    def teardown(self):
        if not hasattr(self, "root"):
            return
        # The log's last word on the time.
        self.root.emit(CheckpointSaved)
        replayed = replay(read_events(self.log), clock=self.clock, price_book=BOOK)
        copies = [self.root, self.restored(), replayed]
        assert known(copies[1]) == known(copies[0])
        assert known(copies[2]) == known(copies[0])
        answers = [list(self.later(guard)) for guard in copies]
        assert answers[1] == answers[0]
        assert answers[2] == answers[0]
        known_now = [guard.snapshot().model_copy(update={"seq": 0}) for guard in copies]
        assert known_now[1] == known_now[0]
        assert known_now[2] == known_now[0]

    def later(self, guard):
        """Ask a guard for more, and tell what it answered."""
        guard.user_turn()
        for ticket in guard.open_calls():
            if isinstance(ticket.call, ToolCall):
                yield guard.settle_tool_call(ticket, "late")
            else:
                yield guard.settle_model_call(ticket, TokenUsage(2, 1), cost_usd=CENT)
        for number in range(12):
            request = ModelCall(retry=number % 3 == 2, input_tokens=number, cost_usd=CENT)
            decision = guard.admit_model_call(request)
            yield self.told(decision)
            if isinstance(decision, Admit) and number % 4:
                guard.settle_model_call(decision, TokenUsage(number, 0), cost_usd=CENT)
            for decision in guard.admit_tool_calls(
                [ToolCall(name=name, arguments=number // 5) for name in "aab"]
            ):
                yield self.told(decision)
                if isinstance(decision, Admit):
                    guard.settle_tool_call(decision, number // 6)
            yield guard.usage, guard.warnings, guard.time_left(), guard.check()

    @staticmethod
    def told(decision):
        if isinstance(decision, Admit):
            bound = decision.max_output_tokens
            return type(decision), decision.call_id, bound, getattr(decision, "message", None)
        return decision


TestInterleavings = pytest.mark.slow(Interleavings.TestCase)
TestInterleavings.settings = settings(
    derandomize=True,
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
