"""How large a lease is."""

from __future__ import annotations

from dataclasses import dataclass, fields

from budgetguard_core.errors import ConfigurationError

TTL_OF_LEASES = 60.0
"""Seconds until the store lists a holder that went silent; also the most that may be set."""


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """How large a lease is. Measured: a cap by rate and by calls is what matters.

    With 8 processes these take 0.1 trips a call, and the first refusal comes at 99.6 % of the
    ceiling; with a share of what is left alone it comes at 0.02 %.
    """

    seconds: float = 30.0
    """Of recent spend."""
    least_calls: int = 4
    """Calls of the recent mean that are asked for at least, however slow the spend."""
    most_calls: int = 16
    """And at most, however fast."""
    share: int = 2
    """No more is granted than a holder's even share of what is left, divided by this; or, where
    that is more, what the call that waits needs."""
    ttl: float = TTL_OF_LEASES
    """Seconds until the store lists a silent holder for reconciliation."""
    recall: float = 0.6
    """Seconds that a refused call waits for what others give back: a little more than a beat."""
    tight: float = 5.0
    """Seconds after a recall in which only what is needed is asked for."""

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` where a figure makes no sense."""
        for name, least, most in (
            ("seconds", 0, 3600),
            ("least_calls", 1, 10**9),
            ("most_calls", self.least_calls, 10**9),
            ("share", 1, 1000),
            ("ttl", 1, TTL_OF_LEASES),  # reconciliation takes it for this
            ("recall", 0, 3600),
            ("tight", 0, 3600),
        ):
            value = getattr(self, name)
            kinds = (int, float) if isinstance(_DEFAULTS[name], float) else (int,)
            if type(value) not in kinds or not least <= value <= most:
                raise ConfigurationError(
                    f"{name} must be from {least} to {most}, got {str(value)[:40]}. "
                    f"Use {_DEFAULTS[name]}."
                )


_DEFAULTS = {one.name: one.default for one in fields(LeaseOptions)}
