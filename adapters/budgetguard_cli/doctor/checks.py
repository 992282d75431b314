"""The checks of `doctor`, one finding after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from budgetguard_cli.doctor.declared import Covered, Declared, Uncovered
from budgetguard_cli.doctor.source import Source
from budgetguard_cli.options import missing_file
from budgetguard_core import BudgetGuardError, PriceBook
from budgetguard_core.ledger import Ledger
from budgetguard_core.profiles import Profiles, find_file, load_profile
from budgetguard_http import is_provider

Status: TypeAlias = Literal["ok", "note", "problem"]

_PROVIDER: Final = "<provider>"
_AMBIENT: Final = "budgetguard_http"
_LOOP: Final = "budgetguard_loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        kind: What it is: framework, client, way, mix, model, ledger, profile or script; `run` is
            what concerns `budgetguard run` alone.
        name: Which one.
        version: The release that is installed, where it is a package.
        status: `problem` is what would not hold.
        detail: One sentence.
    """

    kind: str
    name: str
    version: str | None = None
    status: Status = "ok"
    detail: str


def packages(all_of: Declared, source: Source | None) -> Iterator[Finding]:
    """Look at frameworks and clients: those that a script uses, or all that are installed."""
    told: set[str] = set()
    for one in all_of.covered:
        used = source is not None and _uses(source, one)
        if source is not None and not used:
            continue
        if one.installed is None and not used:
            continue
        yield _package(one)
        for kind, gaps in (("way", one.gaps), ("run", one.run_gaps)):
            for gap in gaps:
                if gap not in told:
                    told.add(gap)
                    yield Finding(kind=kind, name=one.module, status="note", detail=f"{gap}.")


def _package(one: Covered) -> Finding:
    version, supported = one.installed, one.supported
    kind = "client" if one.adapter == _AMBIENT else "framework"
    detail = f"covered by {one.adapter}"
    is_supported = version is not None and supported.contains(version, prereleases=True)
    if version is None:
        detail = "not installed"
        if supported:
            detail += f". Install the extra {one.extra!r}"
    elif not is_supported:
        detail = f"supported are {supported}: its calls are bounded at HTTP alone"
    elif supported:
        detail += f" (supported: {supported})"
    return Finding(
        kind=kind,
        name=one.distribution,
        version=version,
        status="ok" if is_supported else "problem",
        detail=f"{detail}.",
    )


def ways(all_of: Declared, source: Source) -> Iterator[Finding]:
    """Look for what a script uses and nothing covers."""
    for one in all_of.uncovered:
        if _uses(source, one):
            detail = f"not covered: {one.why}. Way out: {one.instead}."
            yield _problem("way", one.module, detail)


def mixes(all_of: Declared, source: Source) -> Iterator[Finding]:
    """Find what a script uses beside its adapters, and none of them sees."""
    used = [one for one in all_of.covered if _uses(source, one)]
    frameworks = {one.module: one for one in used if one.adapter != _AMBIENT}
    adapters = {one.adapter for one in all_of.covered} | {_LOOP}
    bound = ", ".join(sorted(one for one in adapters if source.imports(one)))
    if not bound and used:
        detail = "no adapter is imported: bound it in code, or start it with `budgetguard run`."
        yield Finding(kind="mix", name="no adapter", status="note", detail=detail)
    if not bound or _AMBIENT in bound:
        return
    for one in frameworks.values():
        if one.adapter not in bound:
            detail = f"not bounded: {bound} sees no run of it. Use {one.adapter} as well."
            yield _problem("mix", one.module, detail)
    for one in used:
        if one.adapter == _AMBIENT and one.module not in frameworks and bound != _LOOP:
            detail = (
                f"{bound} sees no call that is made with it outside of a run. Put such calls in a "
                "block of budgetguard_http.bounded_clients."
            )
            yield Finding(kind="mix", name=one.module, status="note", detail=detail)


def _uses(source: Source, one: Covered | Uncovered) -> bool:
    return source.imports(one.module) and (
        not one.texts or any(_names(source, text) for text in one.texts)
    )


def _names(source: Source, text: str) -> bool:
    if text != _PROVIDER:
        return source.names(text)
    return any(
        is_provider(part) for one in source.texts for part in one.replace(":", "/").split("/")
    )


def models(names: list[str]) -> Iterator[Finding]:
    """Look up the prices of models: a cap in dollars stops a run at one that has none."""
    book = PriceBook()
    for name in names:
        # LangChain and pydantic-ai put the provider before a colon, litellm before a slash.
        spellings = (name, name.partition(":")[2], name.partition("/")[2])
        if any(one and book.rates_for(one) is not None for one in spellings):
            yield Finding(kind="model", name=name, detail="its price is known.")
        else:
            yield _problem(
                "model",
                name,
                "no price is known: a cap in dollars stops the run at its first call. Give "
                "PriceBook(overrides=...), or --count-unpriced-as-zero.",
            )


def ledger(url: str) -> Finding:
    """Try to reach a ledger."""
    shown = url.partition("://")[0]
    try:
        with Ledger(url, timeout=5.0) as opened:
            file = missing_file(opened)
            if file is not None:
                way_out = "Make it with `budgetguard ledger set`."
                return _problem("ledger", shown, f"there is no file {file}. {way_out}")
            opened.now()
    except BudgetGuardError as error:
        return _problem("ledger", shown, str(error))
    return Finding(kind="ledger", name=shown, detail="it can be reached.")


def profile(name: str | None) -> Iterator[Finding]:
    """Check the file of profiles, and the profile that is asked for."""
    try:
        path = find_file()
        if path is not None:
            listed = ", ".join(Profiles(path).names) or "none"
            yield Finding(kind="profile", name=path.name, detail=f"valid: {listed}.")
        if name:
            chosen = load_profile(name)
            missing = ", ".join(chosen.budget.uncapped()) or "nothing"
            detail = f"of {chosen.source}; it leaves open: {missing}."
            yield Finding(kind="profile", name=name, version=chosen.version, detail=detail)
    except BudgetGuardError as error:
        yield _problem("profile", name or "file", str(error))


def _problem(kind: str, name: str, detail: str) -> Finding:
    return Finding(kind=kind, name=name, status="problem", detail=detail)
