"""Nothing in the repository depends on, or tells of, the machine it was written on."""

from __future__ import annotations

import re

import pytest

import layout

FOLDERS = ["budgetguard_core", "adapters", "tests", "examples", ".ci"]
BINARY = {".gz", ".pyc"}
FILES = sorted(
    path
    for path in [
        *layout.ROOT.iterdir(),
        *(path for name in FOLDERS for path in (layout.ROOT / name).rglob("*")),
    ]
    if path.is_file()
    and path.suffix not in BINARY
    and not path.name.startswith((".git", ".coverage"))
)
BANNED = {
    "a path of one machine": r"(?<![\w.])/(?:work|root|home|Users)/[A-Za-z.]",
    "a registry's host": r"pypi\.org|pythonhosted\.org|npmjs\.org|--(?:extra-)?index-url",
    "an install of a stranger's package": r"pip install [\"']?budgetguard\b",
}


@pytest.mark.parametrize("what", BANNED)
def test_no_file_holds(what):
    assert len(FILES) > 20
    found = [
        f"{path.relative_to(layout.ROOT)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(BANNED[what], line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a path of one machine", "open('" + "/root" + "/x')"),
        ("a path of one machine", "cd " + "/work" + "/main"),
        ("a registry's host", "https://pypi" + ".org/simple"),
        ("an install of a stranger's package", "pip install " + '"budgetguard[langgraph]"'),
    ],
)
def test_a_planted_line_is_seen(what, line):
    assert re.search(BANNED[what], line)


def test_every_link_in_a_readme_leads_somewhere():
    pages = [path for path in FILES if path.suffix == ".md"]
    broken = [
        f"{page.relative_to(layout.ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert len(pages) > 10
    assert broken == []
