"""The exceptions of BudgetGuard.

BudgetGuardError                 catch this to catch everything
|-- BudgetExceeded               a run was stopped; beside the `Outcome` that it carries
|-- ConfigurationError           a budget, price or setting makes no sense (also a ValueError)
|-- CheckpointError              a snapshot or log is damaged, or of a newer format
|   `-- RunFencedError           another process has gone on with the run
`-- AdapterError                 a guard cannot attach to a framework, or is used against its rules
"""

from typing import Any


class BudgetGuardError(Exception):
    """The root of every exception that BudgetGuard raises."""


class ConfigurationError(BudgetGuardError, ValueError):
    """A value makes no sense. The sentence gives the rule, the value and the way out."""


class CheckpointError(BudgetGuardError):
    """A snapshot or a recorded log cannot be used: damaged, incomplete or of a newer format."""


class RunFencedError(CheckpointError):
    """A run was resumed elsewhere since: this attempt of it must not go on, and saves nothing."""


class AdapterError(BudgetGuardError):
    """The guard cannot be attached, or was used against its rules; the run is not protected."""


def shown(value: Any) -> str:
    """Write a value into an error: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a whole number of thousands of digits, or the value's own code
        return f"{type(value).__name__} that cannot be written"
    return text if len(text) <= 80 else f"{text[:77]}..."


def text_of(error: object) -> str:
    """Return an error's text, or its type's name where its own code fails to give one."""
    try:
        return str(error)
    except Exception:  # the error's own code runs here, and whoever asks has work to end
        return type(error).__name__
