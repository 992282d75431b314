"""A folder as the place for runs that a person has to look at."""

from __future__ import annotations

import json
import os
from pathlib import Path

from budgetguard_core.handoff.record import HandedOver


class Folder:
    """Writes each run into a JSON file of its own, which only this user may read.

    The name of the file is that of the handoff, so no run's id is ever a path. A file is there in
    whole or not at all.

    Args:
        path: The folder; it is made where it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def __call__(self, handed: HandedOver) -> Path:
        """Write a run; return its file."""
        self._path.mkdir(parents=True, exist_ok=True)
        file = self._path / f"{handed.id}.json"
        part = file.with_suffix(".part")
        text = json.dumps(handed.to_json(), ensure_ascii=False, indent=2)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            # Half of a character is no reason to keep nothing.
            stream.write(text.encode(errors="replace"))
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
        return file
