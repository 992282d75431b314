"""The profiles of a file, read and checked as a whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, cast

from budgetguard_core.budget import Budget, ProfileId
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.profiles.profile import LIFTED, OVERLAY, Profile
from budgetguard_core.profiles.toml_file import TomlFile

FILE = "BUDGETGUARD_PROFILES"
"""The environment variable that names the file."""

_NAMES = ("budgetguard.toml", "pyproject.toml")
_TABLES = frozenset({"profiles", "overlays"})
_OF_A_PROFILE = frozenset({"version", "overlays"})


class Profiles:
    """The profiles of one TOML file, all of them checked when it is read.

    ```toml
    [profiles.research]
    version = 3                      # raise it with each change: it is in every record
    max_iterations = 40
    max_cost_usd = "2.50"
    tool_quotas = { search_web = 10 }

    [profiles.research.overlays.production]
    max_cost_usd = "5.00"

    [overlays.development]           # for every profile; a profile's own overlay wins over it
    max_seconds = 60                 # "none" lifts a cap
    ```

    In a `pyproject.toml` the same tables stand below `[tool.budgetguard]`. A value of an overlay
    takes the place of the profile's, a table as a whole.

    Args:
        path: The file.

    Raises:
        ConfigurationError: It cannot be read, or something in it makes no sense: file, line, rule.

    Attributes:
        path: The file.
        names: The names of its profiles, in the order of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = TomlFile(Path(path))
        self.path = self._file.path
        self._prefix: tuple[str, ...] = ()
        content: Any = self._file.content
        if self.path.name == "pyproject.toml":
            self._prefix = ("tool", "budgetguard")
            content = self._table(self._table(content, "tool"), "budgetguard")
        unknown = sorted(set(content) - _TABLES)
        if unknown:
            raise self._error(
                (unknown[0],), f"is not known. Use one of: {', '.join(sorted(_TABLES))}."
            )
        self._overlays = self._tables(content, ("overlays",))
        self._profiles = self._tables(content, ("profiles",))
        self.names = tuple(self._profiles)
        for name in self.names:
            for overlay in (None, *self.overlays(name)):
                self._build(name, overlay)

    def overlays(self, name: str) -> tuple[str, ...]:
        """Name the overlays that a profile can have."""
        own = self._tables(self._profiles[name], ("profiles", name, "overlays"))
        return tuple(dict.fromkeys((*self._overlays, *own)))

    def get(self, name: str, overlay: str | None = None) -> Profile:
        """Return a profile.

        Args:
            name: Its name.
            overlay: The environment; that of `BUDGETGUARD_OVERLAY` if left out, if that is set.

        Raises:
            ConfigurationError: There is no profile, or no overlay, of that name.
        """
        overlay = overlay or os.environ.get(OVERLAY) or None
        if name not in self._profiles:
            raise _unknown("profile", name, self.names, self.path)
        if overlay is not None and overlay not in self.overlays(name):
            raise _unknown("overlay", overlay, self.overlays(name), self.path)
        return self._build(name, overlay)

    def _build(self, name: str, overlay: str | None) -> Profile:
        table = self._profiles[name]
        version = table.get("version")
        if type(version) not in (int, str) or not str(version).strip():
            raise self._error(
                ("profiles", name),
                f"must have a version, got {version!r}. Add version = 1, and raise it with each "
                "change.",
            )
        fields = {key: value for key, value in table.items() if key not in _OF_A_PROFILE}
        budget = self._budget(("profiles", name), fields)
        if overlay is not None:
            own = self._tables(table, ("profiles", name, "overlays")).get(overlay, {})
            shared = self._overlays.get(overlay, {})
            for keys, changes in (
                (("overlays", overlay), shared),
                (("profiles", name, "overlays", overlay), own),
            ):
                changed = self._budget(keys, changes)
                given = {one: getattr(changed, one) for one in changed.model_fields_set}
                budget = budget.model_copy(update=given)
        label = ProfileId(name=name, version=str(version).strip(), overlay=overlay)
        return Profile(id=label, budget=budget, source=str(self.path))

    def _budget(self, keys: tuple[str, ...], table: Mapping[str, Any]) -> Budget:
        for reserved in ("profile", "stop_when"):
            if reserved in table:
                raise self._error((*keys, reserved), "cannot stand in a file. Leave it out.")
        fields = {key: None if value == LIFTED else value for key, value in table.items()}
        try:
            return Budget.from_json(fields)
        except ConfigurationError as error:
            key, _, problem = str(error).splitlines()[0].partition(" ")
            problem = problem.replace("Use None", f"Use {LIFTED!r}")
            raise self._error((*keys, *key.split(".")), problem) from None

    def _tables(self, content: Any, keys: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        found = self._table(content, keys[-1], keys[:-1])
        return {name: self._table(found, name, keys) for name in found}

    def _table(self, content: Any, name: str, keys: tuple[str, ...] = ()) -> dict[str, Any]:
        found = content.get(name, {})
        if not isinstance(found, dict):
            raise self._error((*keys, name), f"must be a table, got {found!r:.80}.")
        return cast("dict[str, Any]", found)

    def _error(self, key: tuple[str, ...], problem: str) -> ConfigurationError:
        return self._file.error((*self._prefix, *key), problem)


def find_file(start: Path | None = None) -> Path | None:
    """Find the file of profiles: that of `BUDGETGUARD_PROFILES`, else the nearest one.

    In each folder from the current one upwards, `budgetguard.toml` is looked for, and then a
    `pyproject.toml` with a table `[tool.budgetguard]`.

    Args:
        start: The folder to begin in.
    """
    named = os.environ.get(FILE)
    if named:
        return Path(named)
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        for name in _NAMES:
            path = folder / name
            if path.is_file() and (name == _NAMES[0] or _is_ours(path)):
                return path
    return None


def load_profile(name: str, *, overlay: str | None = None) -> Profile:
    """Return a profile by name: of the user's file, or one of the examples of this package.

    Args:
        name: Its name.
        overlay: The environment; that of `BUDGETGUARD_OVERLAY` if left out.

    Raises:
        ConfigurationError: There is none of that name, or the file makes no sense.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"profile must be the name of a profile, got {name!r}. Use profile='research'."
        )
    path = find_file()
    mine = None if path is None else Profiles(path)
    if mine is not None and name in mine.names:
        return mine.get(name, overlay)
    shipped = examples()
    if name not in shipped.names:
        known = (*(() if mine is None else mine.names), *shipped.names)
        raise _unknown("profile", name, known, path)
    chosen = shipped.get(name, overlay)
    return replace(chosen, source="an example, uncalibrated")


def examples() -> Profiles:
    """Return the examples that come with the package. Nobody has measured your runs for them."""
    with as_file(files("budgetguard_core.profiles") / "examples.toml") as path:
        return Profiles(path)


def _is_ours(path: Path) -> bool:
    try:
        tool = TomlFile(path).content.get("tool", {})
    except ConfigurationError:
        # Somebody else's file; its own tools will complain.
        return False
    return isinstance(tool, dict) and "budgetguard" in tool


def _unknown(what: str, name: str, known: tuple[str, ...], path: Path | None) -> ConfigurationError:
    near = get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    where = "" if path is None else f" in {path}"
    return ConfigurationError(
        f"{what} {name!r} is not known{where}{hint} Use one of: {', '.join(known) or 'none'}."
    )
