"""The API as users annotate it: type-checked by mypy and pyright, never run.

A line that must be refused carries an ignore comment; a checker that stops refusing it reports the
comment as unused.
"""

from __future__ import annotations

planted: int = "five"  # type: ignore[assignment]
