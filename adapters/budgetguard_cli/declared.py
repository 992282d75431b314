"""The declarations of the installed adapters: what they cover, in which releases, and what not."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import FileFinder
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

_OURS: Final = "budgetguard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A module that calls models: one that an adapter covers, or one that nothing bounds.

    Attributes:
        adapter: The adapter's package that declares it.
        module: What a script imports.
        texts: It does other work, too: it counts where the script names one of these.
        distribution: What is installed.
        extra: The extra of ours that brings it, with its range of releases.
        gaps: What the adapter does not cover there.
        run_gaps: The same, of `budgetguard run` alone.
        why: Why it is not covered; empty where it is.
        instead: What to use then.
    """

    adapter: str
    module: str
    texts: Sequence[str] = ()
    distribution: str = ""
    extra: str = ""
    gaps: Sequence[str] = ()
    run_gaps: Sequence[str] = ()
    why: str = ""
    instead: str = ""

    @property
    def installed(self) -> str | None:
        """The release that is installed, or None."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def supported(self) -> SpecifierSet:
        """The releases that our own metadata names; all where it names none."""
        return _ranges().get((self.extra, self.distribution), SpecifierSet())


def declared() -> Iterator[Entry]:
    """Read it from each adapter's `coverage.toml`; no adapter is imported."""
    for found in pkgutil.iter_modules():
        finder = found.module_finder
        if not found.name.startswith(f"{_OURS}_") or not isinstance(finder, FileFinder):
            continue
        file = Path(finder.path, found.name, "coverage.toml")
        if file.is_file():
            content = tomllib.loads(file.read_text(encoding="utf-8"))
            common = {key: content[key] for key in ("extra", "gaps", "run_gaps") if key in content}
            for entry in content.get("covers", ()):
                yield Entry(adapter=found.name, **{**common, **entry})
            for entry in content.get("uncovered", ()):
                yield Entry(adapter=found.name, **entry)


@cache
def _ranges() -> dict[tuple[str, str], SpecifierSet]:
    extras = importlib.metadata.metadata(_OURS).get_all("Provides-Extra") or []
    return {
        (extra, one.name.lower()): one.specifier
        for one in map(Requirement, importlib.metadata.requires(_OURS) or [])
        for extra in extras
        if one.marker is not None and one.marker.evaluate({"extra": extra})
    }
