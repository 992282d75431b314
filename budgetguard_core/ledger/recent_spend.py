"""What was spent lately, which tells how large a lease is good to have."""

from __future__ import annotations

from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.lease_options import LeaseOptions

_NS = 10**9
_CALLS = 8
"""The mean is about so many calls."""


class RecentSpend:
    """The mean of the last calls and the rate of the last seconds. Its lease's lock protects it.

    Args:
        options: How large a lease is.
        now: Monotonic nanoseconds.
    """

    def __init__(self, options: LeaseOptions, now: int) -> None:
        self._options = options
        self._mean = Amount()
        self._rate = (0.0, 0.0)
        self._rated_ns = now

    def add(self, now: int, calls: int, usd: int, tokens: int) -> bool:
        """Add what calls have cost since the last time; False where no time has passed since."""
        if calls:
            mean = Amount(usd // calls, tokens // calls)
            if any(self._mean):
                part = min(calls, _CALLS)
                mean = Amount(
                    self._mean.usd + (mean.usd - self._mean.usd) * part // _CALLS,
                    self._mean.tokens + (mean.tokens - self._mean.tokens) * part // _CALLS,
                )
            self._mean = mean
        seconds = (now - self._rated_ns) / _NS
        if seconds <= 0:
            return False
        window = self._options.seconds
        weight = 1.0 if seconds >= window else max(0.25, seconds / window)
        usd_rate, tokens_rate = self._rate
        usd_rate += (usd / seconds - usd_rate) * weight
        tokens_rate += (tokens / seconds - tokens_rate) * weight
        self._rate = (usd_rate, tokens_rate)
        self._rated_ns = now
        return True

    def target(self, need: Amount) -> Amount:
        """So many seconds of recent spend, within so many calls."""
        options = self._options

        def of(mean: int, rate: float, needed: int) -> int:
            call = mean or needed
            least, most = options.least_calls * call, options.most_calls * call
            return max(least, min(int(rate * options.seconds), most))

        return Amount(
            of(self._mean.usd, self._rate[0], need.usd),
            of(self._mean.tokens, self._rate[1], need.tokens),
        )
