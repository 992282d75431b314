"""A framework that is not installed, named together with the extra that brings it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def required(framework: str, *, module: str, extra: str) -> Generator[None]:
    """Import a framework in this block: if it is missing, the error names the extra.

    A framework that is there but has moved a module shows its own error.

    Args:
        framework: The framework's name, for people.
        module: The framework's top-level module.
        extra: The extra of the distribution that brings it.

    Raises:
        ModuleNotFoundError: The framework is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"{framework} must be installed for this adapter, found none. "
            f'Install BudgetGuard with its extra, from a checkout: pip install ".[{extra}]"',
            name=module,
        ) from None
