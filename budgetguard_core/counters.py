"""The counters of a run, and the one comparison that holds them against its caps.

A run is charged on a chain of links: its own, then those of the runs above it. `violations` asks
every link before anything is counted; `reserve` and `settle` then move all of them.
This module knows no guard, no plug and no clock: it takes the time as a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fnmatch import fnmatchcase
from operator import add, ge
from typing import Any, NamedTuple, TypeAlias

from budgetguard_core.budget import Budget
from budgetguard_core.decision import Admit, ModelCall
from budgetguard_core.pricing import Rates, from_usd, to_usd
from budgetguard_core.stop import StopReason, Violation
from budgetguard_core.usage import Counts, Usage

INFINITY = math.inf
"""The limit of a dimension without a cap."""
UNKNOWN_ANSWER = 1024
"""Tokens that an answer of unknown length is taken for at least, beside other calls."""
_NOT_REQUESTED = -INFINITY
_NAMES_KEPT = 1024
_SECOND = 1_000_000_000


def _to_ns(seconds: float) -> int:
    return int(seconds * _SECOND)


def _to_seconds(ns: int) -> float:
    return ns / _SECOND


class Dimension(NamedTuple):
    """One cap of a run."""

    reason: StopReason
    """The stop reason, whose value is the name of the cap in `Budget`."""
    compiled: Callable[[Any], int]
    """Turns the unit of the budget into the unit that is counted in."""
    shown: Callable[[int], float | Decimal]
    """Turns it back."""


DIMENSIONS = (
    Dimension(StopReason.MAX_ITERATIONS, int, int),
    Dimension(StopReason.MAX_MODEL_CALLS, int, int),
    Dimension(StopReason.MAX_TOOL_CALLS, int, int),
    Dimension(StopReason.MAX_TOTAL_TOKENS, int, int),
    Dimension(StopReason.MAX_SECONDS, _to_ns, _to_seconds),
    Dimension(StopReason.MAX_COST_USD, from_usd, to_usd),
    Dimension(StopReason.MAX_INPUT_TOKENS, int, int),
    Dimension(StopReason.MAX_OUTPUT_TOKENS, int, int),
)
ITERATIONS, MODEL_CALLS, TOOL_CALLS, TOKENS, TIME, COST, INPUT, OUTPUT = ALL = range(
    len(DIMENSIONS)
)
METERED = (TOKENS, COST, INPUT, OUTPUT)
"""Those that only a provider can tell."""

TOTALS = (
    *("cache_read_tokens", "cache_write_tokens", "cache_write_1h_tokens", "reasoning_tokens"),
    *("estimated_calls", "failed_calls", "unpriced_calls"),
)
"""Sums kept besides the dimensions, in the order of a settled call's figures."""
COUNTED = {
    "iterations": ITERATIONS,
    "model_calls": MODEL_CALLS,
    "tool_calls": TOOL_CALLS,
    "tokens": TOKENS,
    "cost": COST,
    "input_tokens": INPUT,
    "output_tokens": OUTPUT,
}
RESERVED = ("reserved_tokens", "reserved_cost", "reserved_input")
"""Amounts set aside for open model calls."""
COUNTERS = tuple(sorted({*COUNTED, *TOTALS, *RESERVED}))
"""Every running total by name, as a snapshot holds it; money in the unit of `pricing`."""


class Quota:
    """The bodies of the tools that match a pattern: how many may start, and how many did."""

    def __init__(self, pattern: str, limit: int, used: int) -> None:
        self.pattern = pattern
        self.limit = limit
        self.used = used


class Tool:
    """The quotas of one tool, and how many of its bodies were started."""

    def __init__(self, quotas: tuple[Quota, ...], started: int = 0) -> None:
        self.quotas = quotas
        self.started = started


class Counters:
    """The counters of one run, and its caps.

    Attributes:
        used: What was used of each dimension; the time as of the last `tick`.
        caps: The cap of each dimension, less what is kept back for a last answer.
        whole_caps: The same with nothing kept back.
        levels: From where each dimension is warned of; infinity once it was.
        marks: The same, and the cap once it was: below every mark a step is calm.
        totals: The sums of `TOTALS`.
        reserved_tokens: Tokens of open model calls.
        reserved_cost: Money of open model calls.
        reserved_input: Those of the tokens that are of their prompts.
        binds: False once an advisory run has recorded its trip: its caps refuse nothing more.
        largest_output: Tokens of the largest completion.
        warned: The dimensions that were warned of, in order.
        started_ns: When the time began, moved on by every pause; None before the first step.
        stood_ns: Since when the time stands still; None while it runs.
        pauses: How many of the guard's runs wait for a person.
        housekeeping: How many housekeeping blocks are open in the run.
    """

    def __init__(self, budget: Budget) -> None:
        self.used = [0] * len(ALL)
        self.totals = [0] * len(TOTALS)
        self.reserved_tokens = self.reserved_cost = self.reserved_input = self.largest_output = 0
        self.pauses = self.housekeeping = 0
        self.binds = True
        self.started_ns: int | None = None
        self.stood_ns: int | None = None
        self.warned: tuple[str, ...] = ()
        self.tools: dict[str, Tool] = {}
        self.quotas: tuple[Quota, ...] = ()
        self.set_budget(budget)

    def set_budget(self, budget: Budget, quotas_used: Mapping[str, int] | None = None) -> None:
        """Compile the caps of a budget; what was used stays."""
        used = self.quotas_used() if quotas_used is None else quotas_used
        self.budget = budget
        caps = [getattr(budget, one.reason.value) for one in DIMENSIONS]
        self.whole_caps = tuple(
            INFINITY if cap is None else one.compiled(cap)
            for one, cap in zip(DIMENSIONS, caps, strict=True)
        )
        self.caps = tuple(
            cap - one.compiled(self.kept_back(one.reason) or 0)
            for one, cap in zip(DIMENSIONS, self.whole_caps, strict=True)
        )
        self.refuses_unpriced = budget.max_cost_usd is not None and budget.on_unpriced == "stop"
        self.quotas = tuple(
            Quota(pattern, cap, used.get(pattern, 0)) for pattern, cap in budget.tool_quotas.items()
        )
        started, self.tools = self.tools, {}
        for name, tool in started.items():
            self.tool(name).started = tool.started
        self.warn(())

    def kept_back(self, reason: StopReason) -> Any:
        """Return what is kept back of a cap for a last answer, in the budget's unit."""
        reserve, cap = self.budget.finalize_reserve, self.budget.max_seconds
        if reserve is not None and reason is StopReason.MAX_SECONDS:
            return None if cap is None else min(reserve.seconds, cap / 2)
        return None if reserve is None else reserve.of_caps().get(reason.value)

    def warn(self, dimensions: Iterable[str]) -> None:
        """Note that these dimensions were warned of."""
        self.warned = tuple(dict.fromkeys((*self.warned, *dimensions)))
        share = self.budget.warn_at
        levels: list[float] = []
        marks: list[float] = []
        for one, cap in zip(DIMENSIONS, self.caps, strict=True):
            level = cap if cap == INFINITY else math.ceil(cap * share)
            warned = one.reason in self.warned
            levels.append(INFINITY if warned else level)
            marks.append(cap if warned else level)
        self.levels, self.marks = tuple(levels), tuple(marks)

    # Time

    def tick(self, now: int) -> None:
        """Bring the time up to now."""
        if self.started_ns is not None:
            self.used[TIME] = (now if self.stood_ns is None else self.stood_ns) - self.started_ns

    @property
    def may_stand(self) -> bool:
        """True if the time stands still as soon as nothing is in flight that it counts for."""
        return self.pauses > 0 or self.housekeeping > 0

    def keep_time(self, now: int, *, stands: bool) -> None:
        """Stop the time, or let it run on from where it stopped."""
        if self.started_ns is None:
            return
        if stands and self.stood_ns is None:
            self.stood_ns = now
        elif not stands and self.stood_ns is not None:
            self.started_ns += now - self.stood_ns
            self.stood_ns = None

    # Tools

    def tool(self, name: str) -> Tool:
        """Return the quotas and the count of a tool."""
        tool = self.tools.get(name)
        if tool is None:
            classes = self.budget.tool_classes.items()
            of = next((one for pattern, one in classes if fnmatchcase(name, pattern)), "")
            names = name, name.rpartition(".")[2], f"{of}/{name}"
            tool = Tool(
                tuple(q for q in self.quotas if any(fnmatchcase(one, q.pattern) for one in names))
            )
            # Names come from the model: what is kept must not grow with what it invents.
            if len(self.tools) < _NAMES_KEPT:
                self.tools[name] = tool
        return tool

    def count_tool(self, name: str, by: int) -> None:
        """Count a tool body that starts (1), or take it back (-1)."""
        tool = self.tools.get(name) or self.tool(name)
        tool.started += by
        self.used[TOOL_CALLS] += by
        for quota in tool.quotas:
            quota.used += by

    # Reading

    def quotas_used(self) -> dict[str, int]:
        """Return what was used of each quota, by pattern."""
        return {quota.pattern: quota.used for quota in self.quotas}

    def tools_started(self) -> dict[str, int]:
        """Return how many bodies of each tool were started."""
        return {name: tool.started for name, tool in self.tools.items() if tool.started}

    def to_dict(self) -> dict[str, int]:
        """Return every running total by name."""
        return {
            **{name: self.used[dimension] for name, dimension in COUNTED.items()},
            **dict(zip(TOTALS, self.totals, strict=True)),
            **{name: getattr(self, name) for name in RESERVED},
        }

    def restore(self, counters: Mapping[str, int]) -> None:
        """Take over the running totals of an earlier run."""
        for name, dimension in COUNTED.items():
            self.used[dimension] = counters[name]
        self.totals = [counters[name] for name in TOTALS]
        for name in RESERVED:
            setattr(self, name, counters[name])

    def usage(self, now: int) -> Usage:
        """Return the totals as users read them."""
        self.tick(now)
        facts: dict[str, Any] = {
            name: total for name, total in self.to_dict().items() if name in Usage.model_fields
        }
        facts |= {
            "total_tokens": self.used[TOKENS],
            "cost_usd": to_usd(self.used[COST]),
            "seconds": self.used[TIME] / _SECOND,
            "reserved_usd": to_usd(self.reserved_cost),
        }
        return Usage(**facts)


class Link:
    """One run that a call is charged to, and what of that run does not bind the call.

    Args:
        owner: The run's guard.
        counters: Its counters.
        exempt: The dimensions that do not bind: housekeeping has no iterations and no run time.
        answers: The call is the last answer of the run, which was stopped: the reserve is for it.
    """

    def __init__(
        self,
        owner: Any,
        counters: Counters,
        exempt: frozenset[int] = frozenset(),
        *,
        answers: bool = False,
    ) -> None:
        self.owner = owner
        self.counters = counters
        self.exempt = exempt
        self.answers = answers

    @property
    def limits(self) -> Sequence[float]:
        """The caps that bind the call."""
        caps = self.counters.whole_caps if self.answers else self.counters.caps
        if not self.exempt:
            return caps
        return [INFINITY if one in self.exempt else cap for one, cap in zip(ALL, caps, strict=True)]

    def describe(self, dimension: int, projected: float = 0) -> Violation:
        """Put a cap that is reached, or would be exceeded, into words."""
        reason, _, shown = DIMENSIONS[dimension]
        counters, budget = self.counters, self.counters.budget
        used, limit = shown(counters.used[dimension]), getattr(budget, reason.value)
        kept = None if self.answers else counters.kept_back(reason)
        held_back = "" if kept is None else f", {kept} kept back for a last answer"
        text = f"reached: {used} used"
        if counters.used[dimension] < self.limits[dimension] and projected:
            text = f"would be exceeded: {used} used, {shown(int(projected))} projected"
        return Violation(
            reason=reason, limit=limit, used=used, detail=f"{reason}={limit} {text}{held_back}"
        )


Chain: TypeAlias = Sequence[Link]
"""The links that a call is charged to: the asking run's first, then those above it."""


class Request(NamedTuple):
    """The amounts that a step requests in each dimension. Without a projection, each open one is 1.

    So one comparison serves all: a cap is held against a step where `used + needed > cap`.
    """

    iterations: float = _NOT_REQUESTED
    model_calls: float = _NOT_REQUESTED
    tool_calls: float = _NOT_REQUESTED
    tokens: float = _NOT_REQUESTED
    time: float = _NOT_REQUESTED
    cost: float = _NOT_REQUESTED
    input: float = _NOT_REQUESTED
    output: float = _NOT_REQUESTED

    @classmethod
    def model_call(
        cls, counters: Counters, retry: bool, tokens: int, cost: int, prompt: int
    ) -> Request:
        """Return what a model call needs of a run, beside what its open calls have reserved.

        Hosted tools are counted when the provider reports them, so tool calls can pass their cap;
        then no model call starts, though it needs none.
        """
        tokens += counters.reserved_tokens
        cost += counters.reserved_cost
        prompt += counters.reserved_input
        answer = tokens - prompt
        turn = _NOT_REQUESTED if retry else 1
        return cls(turn, 1, 0, tokens or 1, 1, cost or 1, prompt or 1, answer or 1)


BATCH = Request(tokens=1, time=1, cost=1, input=1, output=1)
"""A batch of tool calls, whose number is asked for call by call."""
TOOL_CALL = Request(tool_calls=1)
"""One tool call of a batch."""
_ANYTHING = Request(1, 1, 1, 1, 1, 1, 1, 1)
Found: TypeAlias = list[tuple[Link, list[int], Request]]
"""The links that hold something against a step: in which dimensions, and what was needed."""


def passed(used: Sequence[int], needed: Request, limits: Sequence[float]) -> list[int]:
    """Return the dimensions in which what is needed exceeds the limit: the only comparison."""
    return [
        one
        for one, has, needs, limit in zip(ALL, used, needed, limits, strict=True)
        if has + needs > limit
    ]


def violations(chain: Chain, now: int, request: Request | tuple[bool, int, int, int]) -> Found:
    """Return what every link holds against a step; empty where it may start."""
    found: Found = []
    for link in chain:
        counters = link.counters
        if counters.binds:
            counters.tick(now)
            needed = (
                request if isinstance(request, Request) else Request.model_call(counters, *request)
            )
            over = passed(counters.used, needed, link.limits)
            if over:
                found.append((link, over, needed))
    return found


def is_calm(
    chain: Chain, now: int, tokens: int = 0, cost: int = 0, prompt: int = 0, tools: int = 0
) -> bool:
    """Return whether a step leaves every dimension of every link below its warning level.

    Then `violations` and `due_warnings` are empty, before and after it, and no time has to be kept:
    the one fast path. A property test holds it against them.
    """
    for link in chain:
        counters = link.counters
        started, stands = counters.started_ns, counters.pauses or counters.housekeeping
        if started is None or stands or counters.stood_ns is not None:
            return False
        used = counters.used
        used[TIME] = now - started
        whole, inputs = tokens + counters.reserved_tokens, prompt + counters.reserved_input
        money = cost + counters.reserved_cost
        requested = (1, 1, tools, whole, 0, money, inputs, whole - inputs)
        if any(map(ge, map(add, used, requested), counters.marks)):
            return False
    return True


def due_warnings(chain: Chain, now: int) -> list[tuple[Link, int]]:
    """Return the dimensions that have reached their warning share, each once."""
    found: list[tuple[Link, int]] = []
    for link in chain:
        counters = link.counters
        counters.tick(now)
        for dimension in passed(counters.used, _ANYTHING, counters.levels):
            found.append((link, dimension))
    return found


def foreseen_warnings(found: Found) -> list[tuple[Link, int]]:
    """Return the caps that a projection alone would pass, where nobody was warned of them yet."""
    return [
        (link, dimension)
        for link, over, _ in found
        for dimension in over
        if dimension in METERED
        and link.counters.levels[dimension] < INFINITY
        and link.counters.used[dimension] < link.limits[dimension]
    ]


def clamp(
    chain: Chain, call: ModelCall, rates: Rates | None, bound: int
) -> tuple[int, StopReason | None]:
    """Cut a completion bound to what is left of tokens and dollars, and return which cut it."""
    reason: StopReason | None = None
    for link in chain:
        counters, limits = link.counters, link.limits
        if not counters.binds:
            continue
        room = limits[TOKENS] - counters.used[TOKENS] - counters.reserved_tokens
        if room - call.input_tokens < bound:
            bound, reason = int(room) - call.input_tokens, StopReason.MAX_TOTAL_TOKENS
        room = limits[OUTPUT] - counters.used[OUTPUT]
        room -= counters.reserved_tokens - counters.reserved_input
        if room < bound:
            bound, reason = int(room), StopReason.MAX_OUTPUT_TOKENS
        room = limits[COST] - counters.used[COST] - counters.reserved_cost
        if room < INFINITY and rates is not None and call.cost_usd is None and bound > 0:
            remaining = max(int(room) - rates.input_cost(call.input_tokens), 0)
            full = rates.output_cost(bound, input_tokens=call.input_tokens)
            if full > remaining:
                bound, reason = remaining * bound // full, StopReason.MAX_COST_USD
    # With less than the provider takes the call does not fit, and is not admitted.
    return max(bound, call.min_output_tokens), reason


def start_time(chain: Chain, now: int) -> None:
    """Start the time of every run that has not begun."""
    for link in chain:
        if link.counters.started_ns is None:
            link.counters.started_ns = now


def expected_completion(chain: Chain) -> int:
    """Return what an answer of unknown length is taken for where calls go out at the same time.

    The longest answer of the run, or of an ancestor where it has none; at least `UNKNOWN_ANSWER`.
    """
    for one in chain:
        if one.counters.largest_output:
            return max(one.counters.largest_output, UNKNOWN_ANSWER)
    return UNKNOWN_ANSWER


def reserve(chain: Chain, retry: bool, tokens: int, cost: int, prompt: int, by: int = 1) -> None:
    """Count a model call that starts and set aside what it may use; with -1, take both back."""
    for link in chain:
        counters = link.counters
        if not retry and ITERATIONS not in link.exempt:
            # After the iterations were begun anew, there may be none left to take back.
            counters.used[ITERATIONS] = max(counters.used[ITERATIONS] + by, 0)
        counters.used[MODEL_CALLS] += by
        counters.reserved_tokens += by * tokens
        counters.reserved_cost += by * cost
        counters.reserved_input += by * prompt


def settle(chain: Chain, ticket: Admit, usage: Counts, cost: int | None, failed: bool) -> None:
    """Replace the reservation of a call by what it used.

    An interrupt leaves each link charged in whole or not at all: called again with the same
    figures, it goes on with the links that were not.
    """
    inputs, outputs, *parts = usage
    figures = (*parts, failed, cost is None)
    more = (0, 0, 0, inputs + outputs, 0, cost or 0, inputs, outputs)
    for link in chain[ticket.charged :]:
        has = link.counters
        used = list(map(add, has.used, more))
        totals = list(map(add, has.totals, figures))
        reserved_tokens = has.reserved_tokens - ticket.reserved_tokens
        reserved_cost = has.reserved_cost - ticket.reserved_cost
        reserved_input = has.reserved_input - ticket.reserved_input
        largest = outputs if outputs > has.largest_output else has.largest_output
        charged = ticket.charged + 1
        # One statement, which nothing interrupts: neither a signal nor an exception of a thread's.
        (
            has.reserved_tokens,
            has.reserved_cost,
            has.reserved_input,
            has.used,
            has.totals,
            has.largest_output,
            ticket.charged,
        ) = (reserved_tokens, reserved_cost, reserved_input, used, totals, largest, charged)
