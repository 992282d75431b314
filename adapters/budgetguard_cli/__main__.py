"""The command's entry: says what is missing before anything that needs it is imported."""

from __future__ import annotations

import io
import os
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Run the command `budgetguard`."""
    # Closed by the caller (`>&-`), they are None, and everything that writes would have to ask.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    missing = [name for name in ("rich", "typer") if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"budgetguard: the command line needs {' and '.join(missing)}, not installed here. "
            'Install the extra from the checkout: pip install ".[cli]"\n'
        )
        sys.exit(2)
    from budgetguard_cli.app import app

    try:
        try:
            app(prog_name="budgetguard")
        finally:
            sys.stdout.flush()
    except OSError as error:
        # What is read has its own handling, so it is the output: a full disk, a lost terminal.
        sys.stderr.write(f"budgetguard: the output cannot be written: {error.strerror or error}.\n")
        # What is still buffered would fail again, with a traceback, when the interpreter ends.
        sys.stdout = io.StringIO()
        sys.exit(1)


if __name__ == "__main__":
    main()
