"""The Python blocks of every README satisfy a type checker, as they stand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pytest_examples import find_examples

import layout

pytest.importorskip("pyright", reason="it comes with the dependency group `types`")

READMES = sorted(
    path
    for folder in [layout.ROOT, *(layout.ROOT / name for name in ("adapters", "budgetguard_core"))]
    for path in (folder.glob("*.md") if folder == layout.ROOT else folder.rglob("README.md"))
)
# The names and the values that only the reader has; and a block that prints what a run has made.
LEFT_TO_THE_READER = [
    "reportUndefinedVariable",
    "reportRedeclaration",
    "reportOptionalMemberAccess",
    "reportPossiblyUnboundVariable",
]


def checked(folder):
    """Check a folder; return the file, the line and the text of each error."""
    settings = dict.fromkeys(LEFT_TO_THE_READER, False) | {"typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", folder]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    return [
        (one["file"].rpartition("/")[2], one["range"]["start"]["line"] + 1, one["message"])
        for one in json.loads(done.stdout)["generalDiagnostics"]
    ]


@pytest.mark.slow
def test_the_blocks_of_every_readme_are_typed(tmp_path):
    for path in READMES:
        blocks = [one.source for one in find_examples(str(path)) if one.prefix == "python"]
        if blocks:
            name = "_".join(path.relative_to(layout.ROOT).parts[:-1])
            (tmp_path / f"blocks_{name}.py").write_text("\n".join(blocks))
    assert len(list(tmp_path.iterdir())) > 8
    (tmp_path / "planted.py").write_text(
        "from budgetguard_core import Budget\nBudget(max_iteration=3)\n"
    )
    found = checked(tmp_path)
    assert [one for one in found if one[0] != "planted.py"] == []
    assert [line for _, line, _ in found] == [2]
