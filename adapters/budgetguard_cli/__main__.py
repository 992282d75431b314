"""The command's entry: says what is missing before anything that needs it is imported."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command `budgetguard`."""
    missing = [name for name in ("rich", "typer") if find_spec(name) is None]
    if missing:
        print(  # noqa: T201 - what prints nicely is what is missing
            f"budgetguard: the command line needs {' and '.join(missing)}, not installed here. "
            'Install the extra from the checkout: pip install ".[cli]"',
            file=sys.stderr,
        )
        sys.exit(2)
    from budgetguard_cli.app import app

    app(prog_name="budgetguard")


if __name__ == "__main__":
    main()
