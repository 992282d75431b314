"""The one comparison, and the one fast path held against it."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from budgetguard_core import Budget
from budgetguard_core import counters as c

NUMBER = st.integers(0, 12)
CAP = st.none() | st.integers(1, 12)


@st.composite
def links(draw):
    cost = draw(CAP)
    budget = Budget(
        max_iterations=draw(CAP),
        max_model_calls=draw(CAP),
        max_tool_calls=draw(CAP),
        max_total_tokens=draw(CAP),
        max_input_tokens=draw(CAP),
        max_output_tokens=draw(CAP),
        max_seconds=draw(CAP),
        max_cost_usd=None if cost is None else Decimal(cost) / 10**15,
        warn_at=draw(st.sampled_from([0.1, 0.5, 0.8, 0.99])),
    )
    counted = c.Counters(budget)
    counted.used = [draw(NUMBER) for _ in c.ALL]
    counted.reserved_tokens, counted.reserved_cost = draw(NUMBER), draw(NUMBER)
    counted.reserved_input = draw(st.integers(0, counted.reserved_tokens))
    counted.started_ns = draw(st.sampled_from([None, 0]))
    counted.pauses = draw(st.sampled_from([0, 0, 1]))
    counted.warn(draw(st.lists(st.sampled_from([str(one.reason) for one in c.DIMENSIONS]))))
    return c.Link(None, counted, frozenset(draw(st.sets(st.sampled_from(c.ALL)))))


@given(
    *(st.lists(links(), min_size=1, max_size=3), NUMBER, st.booleans()),
    *(NUMBER, NUMBER, NUMBER, NUMBER),
)
def test_a_calm_step_is_one_that_nothing_holds_against_and_nobody_is_warned_of(
    chain, seconds, retry, prompt, answer, cost, tools
):
    now, tokens = seconds * 10**9, prompt + answer
    if not c.is_calm(chain, now, tokens, cost, prompt, tools):
        return
    assert c.violations(chain, now, (retry, tokens, cost, prompt)) == []
    assert c.violations(chain, now, c.BATCH) == []
    for _ in range(tools):
        assert c.violations(chain, now, c.TOOL_CALL) == []
        for link in chain:
            link.counters.count_tool("a", 1)
    c.reserve(chain, retry, tokens, cost, prompt)
    assert c.due_warnings(chain, now) == []


def full(cap, used, more):
    """The contract's words for tokens and dollars."""
    return cap is not None and (used >= cap or used + more > cap)


@given(links(), NUMBER, st.booleans(), NUMBER, NUMBER, NUMBER)
def test_the_comparison_says_what_the_contract_says(link, seconds, retry, prompt, answer, cost):
    tokens = prompt + answer
    link.exempt = frozenset()
    link.counters.started_ns = 0
    has, b = link.counters, link.counters.budget
    usd = None if b.max_cost_usd is None else int(b.max_cost_usd * 10**15)
    expected = {
        c.ITERATIONS: (
            not retry and b.max_iterations is not None and has.used[0] >= b.max_iterations
        ),
        c.MODEL_CALLS: b.max_model_calls is not None and has.used[1] >= b.max_model_calls,
        c.TOOL_CALLS: b.max_tool_calls is not None and has.used[2] > b.max_tool_calls,
        c.TOKENS: full(b.max_total_tokens, has.used[3], has.reserved_tokens + tokens),
        c.TIME: b.max_seconds is not None and seconds >= b.max_seconds,
        c.COST: full(usd, has.used[5], has.reserved_cost + cost),
        c.INPUT: full(b.max_input_tokens, has.used[6], has.reserved_input + prompt),
        c.OUTPUT: full(
            b.max_output_tokens,
            has.used[7],
            has.reserved_tokens - has.reserved_input + answer,
        ),
    }
    found = c.violations([link], seconds * 10**9, (retry, tokens, cost, prompt))
    assert [one for _, over, _ in found for one in over] == [d for d in c.ALL if expected[d]]
