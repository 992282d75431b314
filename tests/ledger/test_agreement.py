"""The three stores and a naive model are given the same random steps, and say the same."""

from __future__ import annotations

import random
import uuid
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from budgetguard_core.clock import SystemClock
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.reconcile import differences
from budgetguard_core.ledger.step import SEPARATOR, Step
from budgetguard_core.ledger.windows import Window
from ledger_servers import STORES, Place, need, set_ceiling, window_of


class Naive:
    """The ledger as one would explain it: a list of holds, and sums over it."""

    def __init__(self):
        self.holds, self.ceilings, self.flags, self.warned = {}, {}, {}, set()

    def ceiling(self, window):
        kind = window.label[0]
        for name in (window.key, ""):
            if (name, kind) in self.ceilings:
                return self.ceilings[name, kind]
        return window.ceiling

    def window(self, key, label):
        """Charged and spent."""
        holds = [hold for hold in self.holds.values() if (key, label) in hold["windows"]]
        return tuple(
            sum(hold["amount"][d] for hold in holds if hold["closed"] or not only_closed)
            for only_closed in (False, True)
            for d in range(4)
        )

    def step(self, step, now):
        """What is to be said: status, amount, detail, warned windows."""
        named = tuple((window.key, window.label) for window in step.windows)
        hold = self.holds.get(step.id)
        nothing = (0, 0, 0, 0)
        if hold and not hold["closed"] and hold["windows"] != named:
            return "windows", nothing, "", 0
        if step.verb == "settle":
            spent = step.amount
            if hold and hold["closed"]:
                spent = tuple(map(max, hold["amount"], spent))
            self.holds[step.id] = {"windows": named, "amount": spent, "closed": True}
            return "ok", tuple(spent), "", 0
        if hold:
            return "closed" if hold["closed"] else "ok", tuple(hold["amount"]), "", 0
        for flag in sorted(step.flags):
            if flag in self.flags:
                return "killed", nothing, flag + SEPARATOR + self.flags[flag], 0
        if not all(window.start <= now < window.end for window in step.windows):
            return "clock", nothing, "", 0
        for place, window in enumerate(step.windows):
            for d in range(4):
                charged = self.window(window.key, window.label)[d]
                limit = self.ceiling(window)[d]
                if limit and charged + step.amount[d] > limit:
                    facts = (place, d, charged, limit)
                    return "refused", nothing, SEPARATOR.join(map(str, facts)), 0
        self.holds[step.id] = {"windows": named, "amount": step.amount, "closed": False}
        warn = 0
        for place, window in enumerate(step.windows):
            charged, ceiling = self.window(window.key, window.label), self.ceiling(window)
            reached = any(ceiling[d] and charged[d] >= 0.8 * ceiling[d] for d in range(4))
            if reached and window[:2] not in self.warned:
                self.warned.add(window[:2])
                warn |= 1 << place
        return "ok", tuple(step.amount), "", warn


AMOUNTS = st.tuples(
    st.integers(0, 700), st.integers(0, 30), st.integers(0, 2), st.integers(0, 3)
).map(lambda figures: Amount(*figures))
DAYS = st.sampled_from(["d:2026-11-21", "d:2026-11-22"])
CHOICE = st.integers(0, 2**16)


class Agreement(RuleBasedStateMachine):
    stores: list

    def __init__(self):
        super().__init__()
        self.tag = uuid.uuid4().hex[:8]
        self.keys = [f"{self.tag}{name}" for name in ("acme", "acme/user 7 {x}:", "Ünï%_'\"; DROP")]
        self.model = Naive()
        self.steps: dict[str, Step] = {}
        self.said: Counter[str] = Counter()
        self.touched: set[tuple[str, str]] = set()
        self.sent = 0
        for store in self.stores:
            for kind in "dmr":
                set_ceiling(store, "", kind, None)

    def windows(self, day, chosen, shift=0.0):
        now = SystemClock.wall_ns() / 1e9 + shift
        if day.startswith("r"):
            return tuple(
                Window(key, "r:run", now - 9000, 4e10, Amount(9000, 300, 30, 40))
                for key in sorted(chosen)
            )
        return tuple(
            Window(key, label, now - 9000, now + 9000, ceiling)
            for key in sorted(chosen)
            for label, ceiling in (
                (day, Amount(6000, 300, 0, 50)),
                ("m:2026-11", Amount(9000, 0, 40)),
            )
        )

    def flags(self, windows):
        return ("all", *sorted({f"t:{window.key}" for window in windows} | {f"t:{self.tag}"}))

    def send(self, step):
        wanted = self.model.step(step, SystemClock.wall_ns() / 1e9)
        for store in self.stores:
            got = store.step(step)
            said = (got.status, tuple(got.amount), got.detail, got.warn)
            assert said == wanted, (type(store).__name__, step)
        self.said[wanted[0]] += 1
        self.said["warned"] += bool(wanted[3])
        self.touched.update(window[:2] for window in step.windows)
        self.sent += 1
        if self.sent % 8 == 0:
            self.teardown()
        self.steps[step.id] = step

    def teardown(self):
        """Compare the windows: sums, so that a difference stays until it is seen here."""
        for key, label in sorted(self.touched):
            figures = self.model.window(key, label)
            for store in self.stores:
                kept = window_of(store, key, label)
                assert (*kept.charged, *kept.spent) == figures, type(store).__name__
        self.touched.clear()

    def pick(self, choice):
        return list(self.steps.values())[choice % len(self.steps)]

    @rule(
        day=st.sampled_from(["d:2026-11-21", "d:2026-11-22", "r:run"]),
        chosen=st.sets(st.sampled_from([0, 1, 2]), min_size=1, max_size=2),
        amount=AMOUNTS,
        away=st.sampled_from([0.0] * 15 + [20_000.0]),
    )
    def reserve(self, day, chosen, amount, away):
        windows = self.windows(day, [self.keys[place] for place in chosen], away)
        flags = self.flags(windows)
        self.send(Step("reserve", uuid.uuid4().hex, windows, amount, flags, owner="r"))

    @rule(day=DAYS, amount=AMOUNTS)
    def settle_what_nobody_knows(self, day, amount):
        windows = self.windows(day, self.keys[:1])
        self.send(Step("settle", uuid.uuid4().hex, windows, amount))

    @precondition(lambda self: self.steps)
    @rule(choice=CHOICE, spent=AMOUNTS)
    def settle(self, choice, spent):
        old = self.pick(choice)
        self.send(Step("settle", old.id, old.windows, spent))

    @precondition(lambda self: self.steps)
    @rule(choice=CHOICE)
    def repeat(self, choice):
        self.send(self.pick(choice))

    @precondition(lambda self: self.steps)
    @rule(choice=CHOICE, amount=AMOUNTS)
    def reserve_again(self, choice, amount):
        old = self.pick(choice)
        self.send(old._replace(verb="reserve", amount=amount, flags=self.flags(old.windows)))

    @precondition(lambda self: self.steps)
    @rule(choice=CHOICE, day=DAYS, spent=AMOUNTS, verb=st.sampled_from(["reserve", "settle"]))
    def other_windows(self, choice, day, spent, verb):
        old = self.pick(choice)
        hold = self.model.holds.get(old.id)
        if hold and not hold["closed"]:
            windows = self.windows(day, self.keys[1:2])
            self.send(Step(verb, old.id, windows, spent))
            self.steps[old.id] = old

    @rule(place=st.integers(0, 3), kind=st.sampled_from("dmr"), ceiling=st.none() | AMOUNTS)
    def set_ceiling(self, place, kind, ceiling):
        key = (*self.keys, "")[place]
        if ceiling is not None:
            ceiling = Amount(*(10 * figure for figure in ceiling))
        if ceiling is None:
            self.model.ceilings.pop((key, kind), None)
        else:
            self.model.ceilings[key, kind] = ceiling
        for store in self.stores:
            set_ceiling(store, key, kind, ceiling)

    @rule(place=st.integers(0, 3))
    def kill_or_revive(self, place):
        flag = f"t:{(*self.keys, self.tag)[place]}"
        text = None if flag in self.model.flags else '{"who": "ann", "why": "5 | 7"}'
        if text is None:
            del self.model.flags[flag]
        else:
            self.model.flags[flag] = text
        for store in self.stores:
            store.write(f"f:{flag}", text)


def machine_for(stores):
    # A class attribute is all that a machine can be given.
    return type("Machine", (Agreement,), {"stores": stores})


def agree(stores, examples, steps):
    run_state_machine_as_test(
        machine_for(stores),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # a history is shrunk for minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


def wander(stores, steps, seed=7):
    """Long runs, which a state machine that looks for short ones does not make."""
    rnd, machine = random.Random(seed), machine_for(stores)()

    def amount(most=700):
        counts = (rnd.randrange(1 + most // 20), rnd.randrange(3), rnd.randrange(3))
        return Amount(rnd.randrange(most), *counts)

    def choice():
        return rnd.randrange(2**16)

    for number in range(steps):
        if number == 20:
            for store in stores:
                set_ceiling(store, "", "d", Amount(20_000, 900))
            machine.model.ceilings["", "d"] = Amount(20_000, 900)
        kind = rnd.random()
        day = rnd.choice(["d:2026-11-21", "d:2026-11-22"])
        if kind < 0.5 or number < 5:
            chosen = set(rnd.sample([0, 1, 2], rnd.choice([1, 1, 2])))
            away = rnd.choice([0.0] * 30 + [20_000.0])
            machine.reserve(rnd.choice([day, day, "r:run"]), chosen, amount(300), away)
        elif kind < 0.52:
            machine.settle_what_nobody_knows(day, amount())
        elif kind < 0.82:
            machine.settle(choice(), amount(300))
        elif kind < 0.88:
            machine.repeat(choice())
        elif kind < 0.94:
            machine.reserve_again(choice(), amount())
        elif kind < 0.97:
            machine.other_windows(choice(), day, amount(), rnd.choice(["reserve", "settle"]))
        elif kind < 0.99:
            machine.set_ceiling(rnd.randrange(3), rnd.choice("dmr"), amount(5000))
        else:
            place = rnd.randrange(4)
            machine.kill_or_revive(place)
            machine.reserve(day, {0, 1}, amount(), 0.0)
            machine.kill_or_revive(place)
    machine.teardown()
    return machine.said


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("sqlite",), STORES], ids=["sqlite", "all stores"])
def test_the_stores_and_a_naive_model_agree(kinds, tmp_path):
    for kind in kinds:
        need(kind)
    places = [Place(kind, tmp_path) for kind in kinds]
    stores = [place.store() for place in places]
    try:
        agree(stores, 20, 40)
        said = wander(stores, 1000)
        assert {status for status, count in said.items() if count > 5} == {
            *("ok", "refused", "killed", "clock", "closed", "windows", "warned")
        }, said
        if kinds == ("sqlite",):
            assert differences(*stores[0].records(), stores[0].now()) == []
    finally:
        for place, store in zip(places, stores, strict=True):
            store.close()
            place.remove()
