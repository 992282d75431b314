"""Kill switches: for a run, a tenant or everything, set in the store until they are taken back."""

from __future__ import annotations

import datetime as dt
import json
from typing import NamedTuple, cast

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.windows import check_name, quoted

_LONGEST_TEXT = 200
_YEAR_10000 = 253_402_300_800.0


class Kill(NamedTuple):
    """A kill switch that is set."""

    flag: str
    """`all`, `t:<tenant>` or `r:<run>`."""
    who: str
    when: float
    """Seconds since the epoch, by the store's clock."""
    why: str

    @property
    def detail(self) -> str:
        """One sentence for people."""
        kind, _, name = self.flag.partition(":")
        what = {"t": f"tenant {quoted(name)}", "r": f"run {quoted(name)}"}.get(kind, "everything")
        when = dt.datetime.fromtimestamp(self.when, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        why = f": {self.why}" if self.why else ""
        return f"{what} was killed by {self.who or 'nobody named'} at {when}{why}"

    def to_text(self) -> str:
        """Return what the store keeps."""
        return json.dumps({"who": self.who, "when": self.when, "why": self.why})


def plain(text: str) -> str:
    """Return a person's words as one printable line."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line.encode("utf-8", "replace").decode()[:_LONGEST_TEXT]


def kill_of(flag: str, text: str) -> Kill:
    """Read a kill switch; one that cannot be read is set all the same."""
    try:
        found = json.loads(text)
        facts = cast("dict[str, object]", found)
        when = facts["when"]
        # Seconds that no calendar has say nothing.
        seconds = when if isinstance(when, int | float) and 0 <= when < _YEAR_10000 else 0.0
        return Kill(flag, plain(str(facts["who"])), seconds, plain(str(facts["why"])))
    except (ValueError, KeyError, TypeError):
        return Kill(flag, "", 0.0, "")


def flag_of(tenant: str | None, run: str | None, everything: bool) -> str:
    """Return the flag of the one thing that is named.

    Raises:
        ConfigurationError: Not exactly one is.
    """
    given = (tenant is not None) + (run is not None) + bool(everything)
    if given != 1:
        raise ConfigurationError(
            f"exactly one of tenant, run and everything must be given, got {given}. "
            'Use kill(tenant="acme").'
        )
    if tenant is not None:
        return f"t:{check_name(tenant, 'tenant')}"
    return "all" if run is None else f"r:{check_name(run, 'run')}"
