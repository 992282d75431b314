"""Where things stand in the repository, and what each folder under `adapters/` is."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# Import packages under `adapters/` that stand on adapters and bind no framework themselves: no
# conformance driver, and no place among the adapters that must not import each other.
NOT_ADAPTERS = {"budgetguard_cli": "the command line; it shows the adapters that are installed"}


def packages() -> list[str]:
    """Every import package under `adapters/`, sorted."""
    return sorted(path.parent.name for path in (ROOT / "adapters").glob("*/__init__.py"))


def adapters() -> list[str]:
    """The packages that bind a framework, or a plain loop, to the engine, sorted."""
    return [name for name in packages() if name not in NOT_ADAPTERS]


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
