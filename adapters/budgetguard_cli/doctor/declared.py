"""The declarations of the installed adapters: what they cover, in which releases, and what not."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import FileFinder
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

_OURS: Final = "budgetguard"
_FILE: Final = "coverage.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """A module that an adapter covers.

    Attributes:
        adapter: The adapter's package.
        module: What a script imports.
        distribution: What is installed.
        extra: The extra of ours that brings it, with its range of releases.
        texts: It does other work, too: it counts where the script names one of these.
        gaps: What the adapter does not cover there.
        run_gaps: The same, of `budgetguard run` alone.
    """

    adapter: str
    module: str
    distribution: str
    extra: str
    texts: Sequence[str] = ()
    gaps: Sequence[str] = ()
    run_gaps: Sequence[str] = ()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncovered:
    """A module that calls models where nothing bounds them.

    Attributes:
        module: What a script imports.
        texts: It does other work, too: it counts where the script names one of these.
        why: Why it is not covered.
        instead: What to use.
    """

    module: str
    texts: Sequence[str] = ()
    why: str
    instead: str


@dataclass(frozen=True, slots=True)
class Declared:
    """Everything that the adapters of this installation declare."""

    covered: Sequence[Covered]
    uncovered: Sequence[Uncovered]


def declared() -> Declared:
    """Read it from each adapter's `coverage.toml`; no adapter is imported."""
    covered: list[Covered] = []
    uncovered: list[Uncovered] = []
    for adapter, file in _files():
        content: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
        common = {key: content[key] for key in ("extra", "gaps", "run_gaps") if key in content}
        covered += [
            Covered(adapter=adapter, **{**common, **entry}) for entry in content.get("covers", ())
        ]
        uncovered += [Uncovered(**entry) for entry in content.get("uncovered", ())]
    return Declared(covered, uncovered)


def _files() -> Iterable[tuple[str, Path]]:
    for found in pkgutil.iter_modules():
        finder = found.module_finder
        if found.ispkg and found.name.startswith(f"{_OURS}_") and isinstance(finder, FileFinder):
            file = Path(finder.path, found.name, _FILE)
            if file.is_file():
                yield found.name, file


@cache
def _ranges() -> dict[tuple[str, str], SpecifierSet]:
    ranges: dict[tuple[str, str], SpecifierSet] = {}
    try:
        lines = importlib.metadata.requires(_OURS) or []
        extras = importlib.metadata.metadata(_OURS).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    for requirement in map(Requirement, lines):
        for extra in extras:
            if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
                ranges[extra, requirement.name.lower()] = requirement.specifier
    return ranges
