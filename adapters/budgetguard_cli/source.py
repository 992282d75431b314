"""The imports and names of a script, read from its text: nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_MOST_FILES: Final = 500
_MODEL_NAMES: Final = frozenset({"model", "model_id", "model_name"})
_LONGEST_NAME: Final = 100


@dataclass(slots=True)
class Source:
    """A script, and the modules beside it that it imports."""

    modules: set[str] = field(default_factory=set[str])
    """The imports, by full name."""
    models: set[str] = field(default_factory=set[str])
    """Names of models, as far as they stand in the text."""
    texts: set[str] = field(default_factory=set[str])
    """Every text in it, and the names of attributes, with a dot before them."""
    problems: list[str] = field(default_factory=list[str])
    """Files that could not be read."""

    def imports(self, module: str) -> bool:
        """Return whether a module, or a part of it, is imported."""
        return any(one == module or one.startswith(f"{module}.") for one in self.modules)


def read_source(script: Path) -> Source:
    """Read a script and what it imports from its own folder."""
    source = Source()
    waiting, seen = [script.resolve()], set[Path]()
    while waiting and len(seen) < _MOST_FILES:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes(), str(file))
        except (OSError, SyntaxError, ValueError) as error:
            source.problems.append(f"{file.name} cannot be read: {error}")
            continue
        _names(tree, source)
        for name in _imports(tree):
            own = list(_modules_in(script.resolve().parent, name))
            waiting += own
            # What lies beside the script takes the place of a package of that name.
            if not own and not list(_modules_in(script.resolve().parent, name.partition(".")[0])):
                source.modules.add(name)
    return source


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield module
                yield from (f"{module}.{one.name}" for one in names)
            case ast.ImportFrom(names=names, module=module):
                yield from ([module] if module else [one.name for one in names])
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name
            case _:
                pass


def _names(tree: ast.AST, source: Source) -> None:
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                source.texts.add(text)
            case ast.Attribute(attr=name):
                source.texts.add(f".{name}")
            case ast.keyword(arg=str(name), value=ast.Constant(value=str(model))):
                _take_model(name, model, source)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(model))):
                _take_model(name, model, source)
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                        _take_model(str(key.value), value.value, source)
            case ast.Call(
                func=ast.Name(id="init_chat_model") | ast.Attribute(attr="init_chat_model"),
                args=[ast.Constant(value=str(model)), *_],
            ):
                _take_model("model", model, source)
            case _:
                pass


def _take_model(name: str, model: object, source: Source) -> None:
    is_name = isinstance(model, str) and 0 < len(model) <= _LONGEST_NAME and " " not in model
    if name.lower() in _MODEL_NAMES and is_name:
        source.models.add(str(model))


def _modules_in(folder: Path, module: str) -> Iterator[Path]:
    path = folder.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            yield file
