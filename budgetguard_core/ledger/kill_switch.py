"""Kill switches: for a run, a tenant or everything, set in the store until they are taken back."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.windows import check_name, quoted

_LONGEST_TEXT = 200
_YEAR_10000 = 253_402_300_800


class Kill(NamedTuple):
    """A kill switch that is set."""

    flag: str
    """`all`, `t:<tenant>` or `r:<run>`."""
    who: str = ""
    when: Annotated[float, Field(ge=0, lt=_YEAR_10000)] = 0.0
    """Seconds since the epoch, by the store's clock."""
    why: str = ""

    @property
    def detail(self) -> str:
        """One sentence for people."""
        kind, _, name = self.flag.partition(":")
        what = {"t": f"tenant {quoted(name)}", "r": f"run {quoted(name)}"}.get(kind, "everything")
        when = dt.datetime.fromtimestamp(self.when, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        why = f": {plain(self.why)}" if self.why else ""
        return f"{what} was killed by {plain(self.who) or 'nobody named'} at {when}{why}"

    def to_text(self) -> str:
        """Return the text that the store keeps."""
        return _TEXT.dump_json(self).decode()


_TEXT = TypeAdapter(Kill)


def plain(text: str) -> str:
    """Return a person's words as one printable line."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line.encode("utf-8", "replace").decode()[:_LONGEST_TEXT]


def kill_of(flag: str, text: str) -> Kill:
    """Read a kill switch; one that cannot be read is set all the same."""
    try:
        return _TEXT.validate_json(text)._replace(flag=flag)
    except ValidationError:
        return Kill(flag)


def flag_of(tenant: str | None, run: str | None, everything: bool) -> str:
    """Return the flag of the one thing that is named."""
    given = (tenant is not None) + (run is not None) + bool(everything)
    if given != 1:
        raise ConfigurationError(
            f"exactly one of tenant, run and everything must be given, got {given}. "
            'Use kill(tenant="acme").'
        )
    if tenant is not None:
        return f"t:{check_name(tenant, 'tenant')}"
    return "all" if run is None else f"r:{check_name(run, 'run')}"
