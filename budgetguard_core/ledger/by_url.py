"""One ledger per process and URL."""

from __future__ import annotations

from budgetguard_core.ledger.ledger import Ledger

_BY_URL: dict[str, Ledger] = {}


def as_ledger(given: Ledger | str) -> Ledger:
    """Return the process's ledger of a URL, or the one that is given.

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(given, Ledger):
        return given
    if isinstance(given, str) and given in _BY_URL:
        return _BY_URL[given]
    return _BY_URL.setdefault(given, Ledger(given))
