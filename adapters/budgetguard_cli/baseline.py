"""`budgetguard baseline`: how often recorded runs call their tools, for the tool mix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from budgetguard_cli.lines import Problem, read_lines
from budgetguard_cli.replay import Unreadable, complain, opened, printable
from budgetguard_cli.verdict import verdicts
from budgetguard_core import Budget, PriceBook
from budgetguard_core.breakers import ToolMixBaseline

_UNBOUNDED = Budget(loop_detection=None)


@dataclass
class Recorder:
    """Reads the runs of files.

    Args:
        every: Take in runs that did not succeed as well.
        errors: Where what cannot be read is said.

    Attributes:
        problems: Lines that could not be read.
        left_out: Runs that did not succeed, or of which that is not known.
    """

    every: bool
    errors: Console
    problems: int = 0
    left_out: int = 0

    def baseline(self, files: Sequence[str]) -> ToolMixBaseline:
        """Record the baseline of all files together.

        Raises:
            ConfigurationError: The runs call too many tools.
            Unreadable: A file cannot be read, or no run called a tool.
        """
        runs = [run for file in files for run in self._runs(file)]
        if not any(runs):
            raise Unreadable(
                f"a baseline needs runs that ended well and called tools, got none among "
                f"{len(runs) + self.left_out:,} runs. Use --all to take in those that did not end "
                "well, too."
            )
        return ToolMixBaseline.of(runs)

    def _runs(self, file: str) -> Iterator[dict[str, int]]:
        prices = PriceBook()
        with opened(file) as raw:
            for found in verdicts(read_lines(raw), _UNBOUNDED, prices):
                if isinstance(found, Problem):
                    self.problems += 1
                    where = f"{printable(file)}:{found.line}"
                    complain(self.errors, f"{where}: {printable(found.reason)}")
                elif self.every or found.succeeded:
                    yield found.tools
                else:
                    self.left_out += 1
