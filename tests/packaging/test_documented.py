"""Every public name is documented: classes, functions, their members, and data."""

from __future__ import annotations

import ast
import inspect
import itertools
from functools import cache
from importlib import import_module

import pytest

import layout


def public_packages():
    core = layout.ROOT / "budgetguard_core"
    rooms = sorted(path.parent.name for path in core.glob("*/__init__.py"))
    return ["budgetguard_core", *(f"budgetguard_core.{name}" for name in rooms), *layout.adapters()]


PACKAGES = public_packages()


@cache
def with_docstrings(top):
    """Names of data that have a text below them, in any module of a top-level package."""
    home = layout.ROOT / ("" if top == "budgetguard_core" else "adapters") / top
    names = set()
    for file in home.rglob("*.py"):
        body = ast.parse(file.read_text()).body
        for before, after in itertools.pairwise(body):
            if isinstance(before, ast.AnnAssign):
                target = before.target
            elif isinstance(before, ast.Assign):
                target = before.targets[0]
            else:
                continue
            text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if text and isinstance(target, ast.Name):
                names.add(target.id)
    return names


def members(owner):
    """The public methods and properties that a class of ours brings itself."""
    for name, member in list(vars(owner).items()):
        function = getattr(member, "fget", getattr(member, "__func__", member))
        if not name.startswith("_") and inspect.isroutine(function):
            yield name


def undocumented(package):
    module = import_module(package)
    texts = with_docstrings(package.partition(".")[0])
    for name in module.__all__:
        public = getattr(module, name)
        if inspect.isclass(public) or inspect.isroutine(public):
            # What a dataclass writes by itself says nothing: `Name(field: type, ...)`.
            text = public.__doc__ or ""
            if not text or text.startswith(f"{name}("):
                yield name
            if inspect.isclass(public) and public.__module__.startswith("budgetguard_"):
                for member in members(public):
                    if not inspect.getdoc(inspect.getattr_static(public, member)):
                        yield f"{name}.{member}"
        elif name not in texts and not getattr(public, "description", None):
            yield name


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(package):
    assert import_module(package).__doc__
    assert list(undocumented(package)) == []


def test_every_public_package_says_what_is_public():
    assert [name for name in PACKAGES if not getattr(import_module(name), "__all__", None)] == []


def test_a_name_without_a_text_is_seen(monkeypatch):
    module = import_module("budgetguard_loop")

    def bare():
        pass

    monkeypatch.setattr(module, "planted", bare, raising=False)
    monkeypatch.setattr(module, "NUMBER", 3, raising=False)
    monkeypatch.setattr(module, "__all__", ["NUMBER", "bounded", "planted"])
    assert list(undocumented("budgetguard_loop")) == ["NUMBER", "planted"]


TO_AVOID = {"What", "Tell", "Tells", "Say", "Be", "Let", "Have", "Whether"}


def texts(tree):
    """The docstrings of a module, and the texts below its data, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.body[0].lineno, ast.get_docstring(node)
            for before, after in itertools.pairwise(node.body):
                if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    yield after.lineno, getattr(after.value, "value", None)


def test_a_docstring_says_what_a_thing_is_or_does_from_its_first_word_on():
    found = [
        f"{file}:{line}: {text.split()[0]}"
        for root in ("budgetguard_core", "adapters")
        for file in sorted((layout.ROOT / root).rglob("*.py"))
        for line, text in texts(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(text, str) and text.split()[0].rstrip(",.:") in TO_AVOID
    ]
    assert found == []
