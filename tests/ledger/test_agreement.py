"""The three stores and a naive model are given the same random steps, and say the same."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from budgetguard_core.clock import SystemClock
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.step import SEPARATOR, Step
from budgetguard_core.ledger.windows import Window
from ledger_servers import STORES, Place, need


class Naive:
    """The ledger as one would explain it: a list of holds, and sums over it."""

    def __init__(self):
        self.holds, self.ceilings, self.flags, self.warned = {}, {}, {}, set()
        self.asked_under = {}

    def ceiling(self, window):
        kind = window.label[0]
        for name in (window.key, ""):
            if (name, kind) in self.ceilings:
                return self.ceilings[name, kind]
        return window.ceiling

    def charge(self, hold):
        if hold["closed"]:
            return hold["spent"]
        return tuple(map(max, hold["granted"], hold["spent"]))

    def window(self, key, label):
        """Charged and spent."""
        holds = [hold for hold in self.holds.values() if (key, label) in hold["windows"]]
        return tuple(
            sum(figures[d] for figures in map(of, holds))
            for of in (self.charge, lambda hold: hold["spent"])
            for d in (0, 1)
        )

    def step(self, step, now):
        named = tuple((window.key, window.label) for window in step.windows)
        hold = self.holds.get(step.id)
        if hold and not hold["closed"] and hold["windows"] != named:
            return "windows", (0, 0), "", 0
        if hold and step.op <= hold["op"]:
            # A repeat, or overtaken by a later message: the largest report counts, nothing else.
            status = "closed" if hold["closed"] and not step.close else "ok"
            hold["spent"] = tuple(map(max, hold["spent"], step.spent))
            if hold["closed"]:
                hold["granted"] = hold["spent"]
            return status, hold["granted"], "", self.warn(step)
        before = dict(hold) if hold else None
        if hold is None:
            hold = {"windows": named, "granted": (0, 0), "spent": (0, 0), "op": 0}
            hold |= {"closed": False, "lease": False, "expires": 0.0}
        asks = any((*step.need, *step.want))
        status, detail = "ok", ""
        if asks and (hold["closed"] or step.close):
            status = "closed"
        elif asks and any(flag in self.flags for flag in step.flags):
            flag = min(flag for flag in step.flags if flag in self.flags)
            status, detail = "killed", flag + SEPARATOR + self.flags[flag]
        elif asks and not all(window.start <= now < window.end for window in step.windows):
            status = "clock"
        # What the holder says of itself counts, whatever becomes of its wish.
        hold["op"] = step.op
        hold["spent"] = tuple(map(max, hold["spent"], step.spent))
        if hold["closed"] or step.close:
            hold |= {"closed": True, "granted": hold["spent"]}
        elif before:
            hold["granted"] = tuple(step.keep)
        base = hold["granted"]
        self.holds[step.id] = hold
        more = (0, 0)
        grows = not step.close and (
            step.op > 1 or step.want[0] > step.need[0] or step.want[1] > step.need[1]
        )
        if asks and status == "ok":
            status, detail, more = self.grant(step, hold, grows)
        if before is None and status != "ok":
            del self.holds[step.id]
            return status, (0, 0), detail, 0
        hold["granted"] = (base[0] + more[0], base[1] + more[1])
        hold["lease"] = hold["lease"] or grows
        hold["expires"] = now + step.ttl
        if asks:
            for window in step.windows:
                self.asked_under[window[:2]] = self.ceiling(window)
        return status, hold["granted"], detail, self.warn(step)

    def warn(self, step):
        """Windows that are at 80 % of the ceiling that money was last asked for under."""
        warn = 0
        for place, window in enumerate(step.windows):
            charged = self.window(window.key, window.label)
            ceiling = self.asked_under.get(window[:2], (0, 0))
            reached = any(ceiling[d] and charged[d] >= 0.8 * ceiling[d] for d in (0, 1))
            if reached and window[:2] not in self.warned:
                self.warned.add(window[:2])
                warn |= 1 << place
        return warn

    def grant(self, step, hold, grows):
        live = 1
        if grows:
            live += sum(
                other is not hold
                and other["lease"]
                and not other["closed"]
                and other["windows"][0][0] == step.windows[0].key
                and other["expires"] == float("inf")
                for other in self.holds.values()
            )
        more = list(step.want)
        for place, window in enumerate(step.windows):
            ceiling = self.ceiling(window)
            for d in (0, 1):
                if not ceiling[d]:
                    continue
                charged = self.window(window.key, window.label)[d]
                left = ceiling[d] - charged
                if left < step.need[d]:
                    facts = (place, d, charged, ceiling[d], live)  # with what is reported here
                    return "refused", SEPARATOR.join(map(str, facts)), (0, 0)
                fair = left // (2 * live)
                more[d] = max(0, min(more[d], max(step.need[d], fair), left))
        return "ok", "", tuple(more)


AMOUNTS = st.tuples(st.integers(0, 700), st.integers(0, 30)).map(lambda pair: Amount(*pair))
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
            for kind in "dm":
                store.set_ceiling("", kind, None)

    def windows(self, day, chosen, shift=0.0):
        now = SystemClock.wall_ns() / 1e9 + shift
        return tuple(
            Window(key, label, now - 9000, now + 9000, ceiling)
            for key in sorted(chosen)
            for label, ceiling in ((day, Amount(6000, 300)), ("m:2026-11", Amount(9000, 0)))
        )

    def flags(self, windows):
        return ("all", *sorted({f"t:{window.key}" for window in windows} | {f"t:{self.tag}"}))

    def send(self, step):
        now = SystemClock.wall_ns() / 1e9
        # An expired lease has no time to live from the start, any other never ends.
        ttl, step = step.ttl, replace(step, ttl=9000.0 if step.ttl else 0.0)
        wanted = self.model.step(replace(step, ttl=float("inf") if ttl else 0.0), now)
        for store in self.stores:
            got = store.step(step)
            said = (got.status, tuple(got.granted), got.detail, got.warn)
            assert said == wanted, (type(store).__name__, step)
        self.said[wanted[0]] += 1
        self.said["warned"] += bool(wanted[3] and any((*step.need, *step.want)))
        self.said["warned by a report"] += bool(wanted[3] and not any((*step.need, *step.want)))
        self.touched.update(window[:2] for window in step.windows)
        self.sent += 1
        if self.sent % 8 == 0:
            self.teardown()
        if step.id not in self.steps or step.op > self.steps[step.id].op:
            self.steps[step.id] = step

    def teardown(self):
        """Compare the windows: sums, so that a difference stays until it is seen here."""
        for key, label in sorted(self.touched):
            figures = self.model.window(key, label)
            for store in self.stores:
                kept = store.window(key, label)
                assert (*kept.charged, *kept.spent) == figures, type(store).__name__
        self.touched.clear()

    def pick(self, choice):
        return list(self.steps.values())[choice % len(self.steps)]

    @rule(
        day=DAYS,
        chosen=st.sets(st.sampled_from([0, 1, 2]), min_size=1, max_size=2),
        amount=AMOUNTS,
        beyond=st.sampled_from([0, 0, 0, 5]),
        away=st.sampled_from([0.0] * 15 + [20_000.0]),
        ttl=st.sampled_from([60.0, 60.0, 0.0]),
    )
    def reserve_or_lease(self, day, chosen, amount, beyond, away, ttl):
        windows = self.windows(day, [self.keys[place] for place in chosen], away)
        want = Amount(amount.usd * (1 + beyond), amount.tokens * (1 + beyond))
        flags = self.flags(windows)
        one = uuid.uuid4().hex
        self.send(Step(one, 1, windows, need=amount, want=want, flags=flags, ttl=ttl, owner="r"))

    @rule(day=DAYS, amount=AMOUNTS)
    def reports_what_nobody_knows(self, day, amount):
        windows = self.windows(day, self.keys[:1])
        self.send(Step(uuid.uuid4().hex, 2, windows, spent=amount, close=True))

    @precondition(lambda self: self.steps)
    @rule(choice=CHOICE, spent=AMOUNTS)
    def settle(self, choice, spent):
        old = self.pick(choice)
        self.send(Step(old.id, old.op + 1, old.windows, spent=spent, close=True))

    @precondition(lambda self: self.steps)
    @rule(choice=CHOICE)
    def repeat(self, choice):
        self.send(self.pick(choice))

    @precondition(lambda self: self.steps)
    @rule(choice=CHOICE, back=CHOICE, spent=AMOUNTS)
    def overtaken(self, choice, back, spent):
        old = self.pick(choice)
        self.send(replace(old, op=1 + back % old.op, spent=spent))

    @precondition(lambda self: self.steps)
    @rule(choice=CHOICE, spent=AMOUNTS, more=AMOUNTS, need=st.booleans(), close=st.booleans())
    def top_up_or_give_back(self, choice, spent, more, need, close):
        old = self.pick(choice)
        hold = self.model.holds.get(old.id)
        keep = Amount(*hold["granted"]) if hold else Amount()
        self.send(
            Step(
                old.id,
                old.op + 1,
                old.windows,
                spent=spent,
                keep=keep if need else Amount(keep.usd // 2, keep.tokens // 2),
                need=more if need else Amount(),
                want=more,
                close=close and not need,
                flags=self.flags(old.windows),
            )
        )

    @precondition(lambda self: self.steps)
    @rule(choice=CHOICE, day=DAYS, spent=AMOUNTS)
    def other_windows(self, choice, day, spent):
        old = self.pick(choice)
        hold = self.model.holds.get(old.id)
        if hold and not hold["closed"]:
            windows = self.windows(day, self.keys[1:2])
            self.send(Step(old.id, old.op + 1, windows, spent=spent, close=True))

    @rule(place=st.integers(0, 3), kind=st.sampled_from("dm"), ceiling=st.none() | AMOUNTS)
    def set_ceiling(self, place, kind, ceiling):
        key = (*self.keys, "")[place]
        if ceiling is not None:
            ceiling = Amount(ceiling.usd * 10, ceiling.tokens * 10)
        if ceiling is None:
            self.model.ceilings.pop((key, kind), None)
        else:
            self.model.ceilings[key, kind] = ceiling
        for store in self.stores:
            store.set_ceiling(key, kind, ceiling)

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
        return Amount(rnd.randrange(most), rnd.randrange(most // 20))

    def choice():
        return rnd.randrange(2**16)

    for number in range(steps):
        if number == 20:
            for store in stores:
                store.set_ceiling("", "d", Amount(20_000, 900))
            machine.model.ceilings["", "d"] = Amount(20_000, 900)
        kind = rnd.random()
        day = rnd.choice(["d:2026-11-21", "d:2026-11-22"])
        if kind < 0.5 or number < 5:
            chosen = set(rnd.sample([0, 1, 2], rnd.choice([1, 1, 2])))
            beyond, away = rnd.choice([0, 0, 5]), rnd.choice([0.0] * 30 + [20_000.0])
            machine.reserve_or_lease(
                day, chosen, amount(300), beyond, away, rnd.choice([60.0, 0.0])
            )
        elif kind < 0.52:
            machine.reports_what_nobody_knows(day, amount())
        elif kind < 0.75:
            machine.settle(choice(), amount(300))
        elif kind < 0.8:
            machine.repeat(choice())
        elif kind < 0.87:
            machine.overtaken(choice(), choice(), amount())
        elif kind < 0.97:
            machine.top_up_or_give_back(choice(), amount(200), amount(), rnd.random() < 0.5, False)
        elif kind < 0.98:
            machine.other_windows(choice(), day, amount())
        elif kind < 0.99:
            machine.set_ceiling(rnd.randrange(3), rnd.choice("dm"), amount(5000))
        else:
            place = rnd.randrange(4)
            machine.kill_or_revive(place)
            machine.reserve_or_lease(day, {0, 1}, amount(), 5, 0.0, 60.0)
            machine.kill_or_revive(place)
    machine.teardown()
    return machine.said + warned_by_reports(stores)


def warned_by_reports(stores):
    """Windows that a report brings to 80 %: settled, unknown, overtaken, or of a lease."""
    said, day, much = Counter(), "d:2026-11-21", Amount(5000, 0)
    for number in range(10):
        machine = machine_for(stores)()
        machine.reserve_or_lease(day, {0, 1} if number % 2 else {0}, Amount(90, 1), 0, 0.0, 60.0)
        if number < 4:
            machine.settle(0, much)
        elif number < 6:
            machine.reports_what_nobody_knows(day, much)
        elif number < 8:
            machine.overtaken(0, 0, much)
        else:
            machine.top_up_or_give_back(0, much, Amount(), False, False)
        machine.reserve_or_lease(day, {0}, Amount(1, 0), 0, 0.0, 60.0)  # told already
        machine.teardown()
        said += machine.said
    return said


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
            *("ok", "refused", "killed", "clock", "closed", "windows"),
            *("warned", "warned by a report"),
        }, said
        if kinds == ("sqlite",):
            assert stores[0].check() == []
    finally:
        for place, store in zip(places, stores, strict=True):
            store.close()
            place.remove()
