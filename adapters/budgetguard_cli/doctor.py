"""`budgetguard doctor`: what would hold here, one finding after the other."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.machinery import FileFinder
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.table import Table

from budgetguard_cli.logs import is_there
from budgetguard_cli.options import AsJson, LedgerUrl, ProfileName, missing_file
from budgetguard_cli.screen import cell, printable, refuse, say, table, write_json
from budgetguard_cli.source import Source, read_source
from budgetguard_core import BudgetGuardError, ConfigurationError, PriceBook
from budgetguard_core.ledger import Ledger
from budgetguard_core.profiles import Profiles, find_file, load_profile

_OURS: Final = "budgetguard"
_PROVIDER: Final = "<provider>"
_AMBIENT: Final = "budgetguard_http"
_LOOP: Final = "budgetguard_loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A module that calls models: one that an adapter covers, or one that nothing bounds."""

    adapter: str
    module: str
    texts: Sequence[str] = ()
    """It does other work, too: it counts where the script names one of these."""
    distribution: str = ""
    extra: str = ""
    """The extra of ours that brings it, with its range of releases."""
    gaps: Sequence[str] = ()
    """The gaps of the adapter there."""
    run_gaps: Sequence[str] = ()
    """The same, of `budgetguard run` alone."""
    why: str = ""
    """Why it is not covered; empty where it is."""
    instead: str = ""
    """The advice."""

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


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; a `problem` would not hold.

    Attributes:
        kind: What it is: framework, client, way, mix, model, ledger, profile or script; `run` is
            what concerns `budgetguard run` alone.
        version: The release that is installed, where it is a package.
    """

    status: Literal["ok", "note", "problem"]
    kind: str
    name: str
    detail: str
    version: str | None = None


def doctor(
    script: Annotated[
        str | None,
        typer.Argument(
            help="Its imports are looked at, and nothing of it is run. Left out: everything that "
            "is installed."
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model whose price is needed; again for more.")
    ] = None,
    profile: ProfileName = None,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Check what would hold here: frameworks, prices, ledger.

    For a script: whether everything that it uses to call models is covered, in a supported
    release. What it imports in a way that its text does not show is not seen.

    Example: budgetguard doctor agent.py --model gpt-4o --profile research

    Ends with 0; with 1 when something that is used is not covered or would not hold; with 2 when
    the script cannot be found.
    """
    entries, models = list(declared()), list(model or ())
    if script is None:
        found = list(packages(entries, None))
    else:
        if not is_there(script) or not Path(script).is_file():
            refuse(f"the script must be a file, got {printable(script)}. Check the path.")
        source = read_source(Path(script))
        found = [*packages(entries, source), *_ways(entries, source), *_mixes(entries, source)]
        models += sorted(source.models - set(models))
        found += [Finding("problem", "script", script, problem) for problem in source.problems]
        if not any(one.kind in ("framework", "client", "way") for one in found):
            imports = ", ".join(sorted(source.modules)) or "none"
            detail = f"nothing known to call models is among its imports: {imports}."
            found.append(Finding("note", "script", script, detail))
    found += [*_prices(models), *_profiles(profile), *_reached(ledger)]
    if as_json:
        write_json(*map(asdict, found))
    else:
        looked = [script or "all that is installed", *(f"model {name}" for name in models)]
        looked += [f"profile {profile}"] if profile else []
        looked += ["the ledger"] if ledger is not None else []
        say(f"Looked at: {', '.join(looked)}.", _table(one for one in found if one.kind != "run"))
        of_run = [one for one in found if one.kind == "run"]
        if of_run:
            say("", "Under `budgetguard run` alone:", _table(of_run))
    if any(one.status == "problem" for one in found):
        raise typer.Exit(1)


def packages(entries: Sequence[Entry], source: Source | None) -> Iterator[Finding]:
    """Look at frameworks and clients: those that a script uses, or all that are installed."""
    reported: set[str] = set()
    for one in entries:
        if one.why or (one.installed is None if source is None else not _uses(source, one)):
            continue
        version, supported = one.installed, one.supported
        detail = f"covered by {one.adapter}" + (f" (supported: {supported})" if supported else "")
        status: Literal["ok", "problem"] = "problem"
        if version is None:
            install = f". Install the extra {one.extra!r}" if supported else ""
            detail = f"not installed{install}"
        elif not supported.contains(version, prereleases=True):
            detail = f"supported are {supported}: its calls are bounded at HTTP alone"
        else:
            status = "ok"
        kind = "client" if one.adapter == _AMBIENT else "framework"
        yield Finding(status, kind, one.distribution, f"{detail}.", version)
        for kind, gaps in (("way", one.gaps), ("run", one.run_gaps)):
            yield from (
                Finding("note", kind, one.module, f"{gap}.") for gap in gaps if gap not in reported
            )
            reported.update(gaps)


def _ways(entries: Sequence[Entry], source: Source) -> Iterator[Finding]:
    """Find what a script uses and nothing covers."""
    for one in entries:
        if one.why and _uses(source, one):
            detail = f"not covered: {one.why}. Way out: {one.instead}."
            yield Finding("problem", "way", one.module, detail)


def _mixes(entries: Sequence[Entry], source: Source) -> Iterator[Finding]:
    """Find what a script uses beside its adapters, and none of them sees."""
    used = [one for one in entries if not one.why and _uses(source, one)]
    frameworks = {one.module for one in used if one.adapter != _AMBIENT}
    adapters = sorted({_LOOP, *(one.adapter for one in entries)})
    bound = [one for one in adapters if source.imports(one)]
    if used and not bound:
        detail = "no adapter is imported: bound it in code, or start it with `budgetguard run`."
        yield Finding("note", "mix", "no adapter", detail)
    if not bound or _AMBIENT in bound:
        return
    names = ", ".join(bound)
    for one in used:
        if one.adapter != _AMBIENT and one.adapter not in bound:
            detail = f"not bounded: {names} sees no run of it. Use {one.adapter} as well."
            yield Finding("problem", "mix", one.module, detail)
        if one.adapter == _AMBIENT and one.module not in frameworks and bound != [_LOOP]:
            detail = (
                f"{names} sees no call that is made with it outside of a run. Put such calls in a "
                "block of budgetguard_http.bounded_clients."
            )
            yield Finding("note", "mix", one.module, detail)


def _uses(source: Source, one: Entry) -> bool:
    return source.imports(one.module) and (
        not one.texts or any(_names(source, text) for text in one.texts)
    )


def _names(source: Source, text: str) -> bool:
    if text != _PROVIDER:
        return any(text in one for one in source.texts)
    from budgetguard_http import is_provider  # only here: the other commands need no client

    parts = (part for one in source.texts for part in one.replace(":", "/").split("/"))
    return any(map(is_provider, parts))


def _prices(models: Iterable[str]) -> Iterator[Finding]:
    """Look up the prices of models: a cap in dollars stops a run at one that has none."""
    book = PriceBook()
    for name in models:
        # LangChain and pydantic-ai put the provider before a colon, litellm before a slash.
        spellings = (name, name.partition(":")[2], name.partition("/")[2])
        if any(one and book.rates_for(one) is not None for one in spellings):
            yield Finding("ok", "model", name, "its price is known.")
        else:
            detail = (
                "no price is known: a cap in dollars stops the run at its first call. Give "
                "PriceBook(overrides=...), or --count-unpriced-as-zero."
            )
            yield Finding("problem", "model", name, detail)


def _reached(url: str | None) -> Iterator[Finding]:
    """Reach for a ledger."""
    if url is None:
        return
    shown = url.partition("://")[0]
    try:
        with Ledger(url, timeout=5.0) as found_ledger:
            if (file := missing_file(found_ledger)) is not None:
                raise ConfigurationError(
                    f"there is no file {file}. Make it with `budgetguard ledger set`."
                )
            found_ledger.now()
    except BudgetGuardError as error:
        yield Finding("problem", "ledger", shown, str(error))
    else:
        yield Finding("ok", "ledger", shown, "it can be reached.")


def _profiles(name: str | None) -> Iterator[Finding]:
    """Read the file of profiles, and the profile that is asked for."""
    try:
        if (path := find_file()) is not None:
            listed = ", ".join(Profiles(path).names) or "none"
            yield Finding("ok", "profile", path.name, f"valid: {listed}.")
        if name:
            chosen = load_profile(name)
            missing = ", ".join(chosen.budget.uncapped()) or "nothing"
            detail = f"of {chosen.source}; it leaves open: {missing}."
            yield Finding("ok", "profile", name, detail, chosen.version)
    except BudgetGuardError as error:
        yield Finding("problem", "profile", name or "file", str(error))


def _table(found: Iterable[Finding]) -> Table:
    styles = {"problem": "bold red", "note": "yellow"}
    rows = table("", "what", "name", "release", "finding")
    for one in found:
        status = cell(one.status, styles.get(one.status, ""))
        rows.add_row(status, one.kind, cell(one.name), one.version or "", cell(one.detail))
    return rows


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
