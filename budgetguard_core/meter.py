"""One guard's counters. It takes the time as a number and knows no guard.

The functions below the class take the meters of a whole chain, the asking run's first: all of them
are asked, then all are moved. Only this module moves a counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from budgetguard_core.budget import Budget
from budgetguard_core.caps import INFINITY, Caps, Quota, marks_of
from budgetguard_core.decision import Admit, ModelCall
from budgetguard_core.pricing import Rates, to_usd
from budgetguard_core.stop import StopReason
from budgetguard_core.usage import Counts, Usage

COUNTERS = (
    "cache_read_tokens",
    "cache_write_1h_tokens",
    "cache_write_tokens",
    "cost",
    "estimated_calls",
    "failed_calls",
    "input_tokens",
    "iterations",
    "model_calls",
    "output_tokens",
    "reasoning_tokens",
    "reserved_cost",
    "reserved_tokens",
    "tokens",
    "tool_calls",
    "unpriced_calls",
)
"""The running totals of a meter, by name; money in the unit of `pricing`."""

_NAMES_KEPT = 1024


class Tool:
    """What a meter knows of one tool: its quotas, and how many of its bodies were started."""

    __slots__ = ("quotas", "started")

    def __init__(self, quotas: tuple[Quota, ...], started: int = 0) -> None:
        self.quotas = quotas
        self.started = started


class Meter:
    """What one guard has counted, and what it may count up to.

    Attributes:
        caps: The budget, compiled.
        marks: From where a step is looked at closely.
        mark_at: The same for the time, as a reading of the clock; long past while every step is.
        mark_calls: The same for the model calls, with the iterations among them.
        halt: Something other than a cap stands against every step.
        largest_output: Tokens of the largest completion so far.
        looks_on: The caps hold nothing back: an advisory envelope has recorded its trip.
        tools: What is known of each tool, by name.
        warned: The dimensions that were warned of, in order.
        started_ns: When the time began, moved on by every pause; None before the first step.
        stood_ns: Since when the time stands still; None while it runs.
        pauses: How many of the guard's runs wait for a person.
        housekeeping: How many housekeeping blocks are open in the run.
    """

    __slots__ = (
        *COUNTERS,
        "caps",
        "halt",
        "housekeeping",
        "largest_output",
        "looks_on",
        "mark_at",
        "mark_calls",
        "marks",
        "pauses",
        "started_ns",
        "stood_ns",
        "tools",
        "warned",
    )

    cache_read_tokens: int
    cache_write_1h_tokens: int
    cache_write_tokens: int
    cost: int
    estimated_calls: int
    failed_calls: int
    input_tokens: int
    iterations: int
    model_calls: int
    output_tokens: int
    reasoning_tokens: int
    reserved_cost: int
    reserved_tokens: int
    tokens: int
    tool_calls: int
    unpriced_calls: int

    def __init__(self, budget: Budget) -> None:
        self.begin(budget)

    def begin(self, budget: Budget) -> None:
        """Put every counter to its beginning."""
        for name in COUNTERS:
            setattr(self, name, 0)
        self.halt = False
        self.housekeeping = 0
        self.largest_output = 0
        self.looks_on = False
        self.pauses = 0
        self.started_ns: int | None = None
        self.stood_ns: int | None = None
        self.tools: dict[str, Tool] = {}
        self.warned: tuple[str, ...] = ()
        self._set_caps(Caps(budget))

    def go_on_from(
        self,
        counters: Mapping[str, int],
        quotas: Mapping[str, int],
        tool_counts: Mapping[str, int],
        warned: tuple[str, ...],
        now: int,
        elapsed_ns: int | None,
        pauses: int,
    ) -> None:
        """Take over what another meter had counted; a paused one stands still."""
        for name in COUNTERS:
            setattr(self, name, counters[name])
        self.warned = tuple(dict.fromkeys(warned))
        self.pauses = pauses
        if elapsed_ns is not None:
            self.started_ns = now - elapsed_ns
        self._set_caps(Caps(self.caps.budget, quotas))
        for name, started in tool_counts.items():
            tool = self.tool(name)
            tool.started = started
        if pauses:
            self.stand_still(now)

    def extend(self, budget: Budget) -> None:
        """Go on under raised caps."""
        self._set_caps(Caps(budget, self.quotas_used()))

    def set_halt(self, halt: bool, looks_on: bool) -> None:
        """Take in what stands against the run besides its caps."""
        self.halt = halt
        self.looks_on = looks_on
        self._set_mark_at()

    def warn(self, dimension: str) -> None:
        """Remember that a dimension was warned of; its mark is its cap from now on."""
        if dimension not in self.warned:
            self.warned += (dimension,)
        self.set_marks()

    def restart_iterations(self) -> None:
        """Begin the iterations anew."""
        self.iterations = 0
        self.set_marks()

    def saw_completion(self, tokens: int) -> None:
        """Take over how large the completions of an earlier leg were."""
        self.largest_output = tokens

    def set_aside(self, tokens: int, cost: int) -> None:
        """Keep the reservation of a call of an earlier leg that may still cost it."""
        self.reserved_tokens += tokens
        self.reserved_cost += cost

    # Time

    def start(self, at_ns: int) -> None:
        """Let the time begin."""
        self.started_ns = at_ns
        self._set_mark_at()

    def elapsed(self, now: int) -> int:
        """Return the nanoseconds of the run; pauses are not among them."""
        if self.started_ns is None:
            return 0
        return (now if self.stood_ns is None else self.stood_ns) - self.started_ns

    def pause(self) -> None:
        """Note that one more run waits; every step is looked at closely while one does."""
        self.pauses += 1
        self._set_mark_at()

    def end_pause(self) -> None:
        """Note that one run less waits."""
        self.pauses -= 1

    def begin_housekeeping(self) -> None:
        """Note that housekeeping has begun; every step is looked at closely until it ends."""
        self.housekeeping += 1
        self._set_mark_at()

    def end_housekeeping(self) -> None:
        """Note that it is over."""
        self.housekeeping = max(self.housekeeping - 1, 0)

    @property
    def may_stand(self) -> bool:
        """Whether the time stands still as soon as nothing is in flight that it counts for."""
        return self.pauses > 0 or self.housekeeping > 0

    def stand_still(self, now: int) -> None:
        """Stop the time."""
        if self.started_ns is not None and self.stood_ns is None:
            self.stood_ns = now
        self._set_mark_at()

    def run_on(self, now: int) -> None:
        """Let the time run again, from where it stopped."""
        if self.started_ns is not None and self.stood_ns is not None:
            self.started_ns += now - self.stood_ns
            self.stood_ns = None
        self._set_mark_at()

    # Questions

    def fits_model_call(self, now: int, retry: bool, tokens: int, cost: int) -> bool:
        """Tell whether one more model call is within every cap.

        Equal to `not model_call_violations(...)`; kept beside it because each step pays for it.
        """
        caps = self.caps
        return (
            (retry or self.iterations < caps.iterations)
            and self.model_calls < caps.model_calls
            and self.elapsed(now) < caps.nanoseconds
            and self.cost < caps.cost
            and self.cost + self.reserved_cost + cost <= caps.cost
            and self.tokens < caps.tokens
            and self.tokens + self.reserved_tokens + tokens <= caps.tokens
            and self.tool_calls <= caps.tool_calls
        )

    def fits_tool_calls(self, now: int) -> bool:
        """Tell whether a batch of tool calls may start; each call's place is asked for later."""
        caps = self.caps
        return (
            self.elapsed(now) < caps.nanoseconds
            and self.cost < caps.cost
            and self.tokens < caps.tokens
        )

    def tool(self, name: str) -> Tool:
        """Return what is known of a tool."""
        tool = self.tools.get(name)
        if tool is None:
            tool = Tool(self.caps.quotas_of(name))
            # Names come from the model: what is kept must not grow with what it invents.
            if len(self.tools) < _NAMES_KEPT:
                self.tools[name] = tool
        return tool

    def tools_started(self) -> dict[str, int]:
        """Return how many bodies of each tool were started."""
        return {name: tool.started for name, tool in self.tools.items() if tool.started}

    def quotas_used(self) -> dict[str, int]:
        """Return what was used of each quota, by pattern."""
        return {quota.pattern: quota.used for quota in self.caps.quotas}

    def counters(self) -> dict[str, int]:
        """Return every running total by name."""
        return {name: getattr(self, name) for name in COUNTERS}

    def usage(self, now: int) -> Usage:
        """Return the totals as users read them."""
        return Usage(
            iterations=self.iterations,
            model_calls=self.model_calls,
            tool_calls=self.tool_calls,
            total_tokens=self.tokens,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            cache_read_tokens=self.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens,
            cache_write_1h_tokens=self.cache_write_1h_tokens,
            reasoning_tokens=self.reasoning_tokens,
            cost_usd=to_usd(self.cost),
            seconds=self.elapsed(now) / 1_000_000_000,
            reserved_tokens=self.reserved_tokens,
            reserved_usd=to_usd(self.reserved_cost),
            unpriced_calls=self.unpriced_calls,
            estimated_calls=self.estimated_calls,
            failed_calls=self.failed_calls,
        )

    def _set_caps(self, caps: Caps) -> None:
        self.caps = caps
        self.tools = {
            name: Tool(caps.quotas_of(name), tool.started) for name, tool in self.tools.items()
        }
        self.set_marks()

    def set_marks(self) -> None:
        """Work out from where a step is looked at closely."""
        self.marks = marks = marks_of(self.caps, self.warned)
        # No more iterations begin than model calls: up to here, neither reaches its mark.
        left = min(marks.iterations - self.iterations, marks.model_calls - self.model_calls)
        self.mark_calls = self.model_calls + left
        self._set_mark_at()

    def _set_mark_at(self) -> None:
        # Also the first step, which starts the time, every one during a pause or housekeeping, and
        # whatever something other than a cap stands against.
        started = self.started_ns
        if started is None or self.halt or self.may_stand:
            self.mark_at = -INFINITY
        else:
            self.mark_at = started + self.marks.nanoseconds


Chain: TypeAlias = tuple[Meter, ...]
"""The meters that a step is charged to: the asking run's first, then those above it."""


def largest_completion(chain: Chain) -> int:
    """Return the tokens of the run's largest completion; of a run above it, where it has none."""
    for meter in chain:
        if meter.largest_output:
            return meter.largest_output
    return 0


def in_flight(chain: Chain) -> bool:
    """Tell whether anything is set aside for other calls."""
    return any(meter.reserved_tokens or meter.reserved_cost for meter in chain)


def far_from_caps(chain: Chain, now: int, tokens: int, cost: int) -> bool:
    """Tell whether one more model call leaves every dimension below its mark."""
    for meter in chain:
        marks = meter.marks
        if (
            now >= meter.mark_at
            or meter.model_calls + 1 >= meter.mark_calls
            or meter.tokens + meter.reserved_tokens + tokens >= marks.tokens
            or meter.cost + meter.reserved_cost + cost >= marks.cost
            or meter.tool_calls >= marks.tool_calls
        ):
            return False
    return True


def far_from_tool_caps(chain: Chain, now: int, calls: int) -> bool:
    """Tell whether a batch of this size leaves every dimension below its mark."""
    for meter in chain:
        marks = meter.marks
        if (
            now >= meter.mark_at
            or meter.tokens >= marks.tokens
            or meter.cost >= marks.cost
            or meter.tool_calls + calls >= marks.tool_calls
        ):
            return False
    return True


def start_time(chain: Chain, now: int) -> None:
    """Let the time begin where it has not: what is refused below began for those above, too."""
    for meter in chain:
        if meter.started_ns is None:
            meter.start(now)


def model_call_fits(chain: Chain, now: int, retry: bool, tokens: int, cost: int) -> bool:
    """Tell whether every meter admits one more model call; starts the time of all."""
    start_time(chain, now)
    for meter in chain:
        if meter.halt or not (meter.looks_on or meter.fits_model_call(now, retry, tokens, cost)):
            return False
    return True


def tool_calls_fit(chain: Chain, now: int) -> bool:
    """Tell whether every meter admits a batch of tool calls; starts the time of all."""
    start_time(chain, now)
    for meter in chain:
        if meter.halt or not (meter.looks_on or meter.fits_tool_calls(now)):
            return False
    return True


def clamp(
    chain: Chain, call: ModelCall, rates: Rates | None, bound: int
) -> tuple[int, StopReason | None]:
    """Cut the completion bound to what is left of tokens and dollars; say which cut it."""
    reason: StopReason | None = None
    for meter in chain:
        caps = meter.caps
        if meter.looks_on:
            continue
        if caps.tokens != INFINITY:
            left = int(caps.tokens) - meter.tokens - meter.reserved_tokens - call.input_tokens
            if left < bound:
                bound, reason = left, StopReason.MAX_TOTAL_TOKENS
        if caps.cost != INFINITY and rates is not None and call.cost_usd is None and bound > 0:
            room = int(caps.cost) - meter.cost - meter.reserved_cost
            room = max(room - rates.input_cost(call.input_tokens), 0)
            full = rates.output_cost(bound, input_tokens=call.input_tokens)
            if full > room:
                bound, reason = room * bound // full, StopReason.MAX_COST_USD
    # With less than the provider takes the call does not fit, and is not admitted.
    return max(bound, call.min_output_tokens), reason


def reserve(chain: Chain, retry: bool, tokens: int, cost: int) -> None:
    """Count a model call that starts, and set aside what it may use."""
    for meter in chain:
        if not retry:
            meter.iterations += 1
        meter.model_calls += 1
        meter.reserved_tokens += tokens
        meter.reserved_cost += cost


def release(chain: Chain, retry: bool, tokens: int, cost: int) -> None:
    """Take back a model call that was never made, and what was set aside for it."""
    for meter in chain:
        if not retry and meter.iterations:
            meter.iterations -= 1
        meter.model_calls -= 1
        meter.reserved_tokens -= tokens
        meter.reserved_cost -= cost
        # Of a retry, iterations were not taken back: what was worked out does not hold any more.
        meter.set_marks()


def charge(
    chain: Chain,
    ticket: Admit,
    usage: Counts,
    cost: int | None,
    failed: bool,
    now: int,
) -> bool:
    """Replace the reservation of a call by what it used; True when a mark was reached.

    An interrupt leaves each meter charged in whole or not at all: called again with the same
    figures, it goes on with the meters that were not.
    """
    near = False
    reserved_tokens, reserved_cost = ticket.reserved_tokens, ticket.reserved_cost
    inputs, outputs, read, write, write_1h, reasoning, estimated = usage
    money = cost or 0
    rare = write or reasoning or estimated or failed or cost is None
    for meter in chain[ticket.charged :] if ticket.charged else chain:
        marks = meter.marks
        # One statement, which nothing interrupts: neither a signal nor an exception of a thread's.
        if rare or outputs > meter.largest_output:
            (
                ticket.charged,
                meter.reserved_tokens,
                meter.reserved_cost,
                meter.input_tokens,
                meter.output_tokens,
                meter.tokens,
                meter.cost,
                meter.largest_output,
                meter.cache_read_tokens,
                meter.cache_write_tokens,
                meter.cache_write_1h_tokens,
                meter.reasoning_tokens,
                meter.estimated_calls,
                meter.failed_calls,
                meter.unpriced_calls,
            ) = (
                ticket.charged + 1,
                meter.reserved_tokens - reserved_tokens,
                meter.reserved_cost - reserved_cost,
                meter.input_tokens + inputs,
                meter.output_tokens + outputs,
                meter.tokens + inputs + outputs,
                meter.cost + money,
                max(outputs, meter.largest_output),
                meter.cache_read_tokens + read,
                meter.cache_write_tokens + write,
                meter.cache_write_1h_tokens + write_1h,
                meter.reasoning_tokens + reasoning,
                meter.estimated_calls + estimated,
                meter.failed_calls + failed,
                meter.unpriced_calls + (cost is None),
            )
        else:
            (
                ticket.charged,
                meter.reserved_tokens,
                meter.reserved_cost,
                meter.input_tokens,
                meter.output_tokens,
                meter.tokens,
                meter.cost,
                meter.cache_read_tokens,
            ) = (
                ticket.charged + 1,
                meter.reserved_tokens - reserved_tokens,
                meter.reserved_cost - reserved_cost,
                meter.input_tokens + inputs,
                meter.output_tokens + outputs,
                meter.tokens + inputs + outputs,
                meter.cost + money,
                meter.cache_read_tokens + read,
            )
        if meter.tokens >= marks.tokens or now >= meter.mark_at or meter.cost >= marks.cost:
            near = True
    return near


def count_tool_call(chain: Chain, name: str) -> bool:
    """Count a tool call that starts; False where a meter had no place left for it."""
    fits = True
    for meter in chain:
        tool = meter.tools.get(name) or meter.tool(name)
        tool.started += 1
        meter.tool_calls = calls = meter.tool_calls + 1
        if calls > meter.caps.tool_calls and not meter.looks_on:
            fits = False
        for quota in tool.quotas:
            quota.used = used = quota.used + 1
            if used > quota.limit and not meter.looks_on:
                fits = False
    return fits


def uncount_tool_call(chain: Chain, name: str) -> None:
    """Take back a tool call that did not start after all."""
    for meter in chain:
        meter.tool_calls -= 1
        tool = meter.tool(name)
        tool.started -= 1
        for quota in tool.quotas:
            quota.used -= 1
