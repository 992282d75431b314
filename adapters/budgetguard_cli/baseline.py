"""`budgetguard baseline`: how often recorded runs call their tools, for the tool mix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from budgetguard_cli.recordings import Reading, Unreadable
from budgetguard_cli.verdict import verdicts, whole_runs
from budgetguard_core import Budget, PriceBook
from budgetguard_core.breakers import ToolMixBaseline

_UNBOUNDED = Budget(loop_detection=None)


class Recorder:
    """Reads the runs of files.

    Args:
        reading: Reads their lines.
        every: Take in runs that did not succeed as well.

    Attributes:
        left_out: Runs that did not succeed, or of which that is not known.
    """

    def __init__(self, reading: Reading, *, every: bool) -> None:
        self._reading = reading
        self._every = every
        self.left_out = 0

    def baseline(self, files: Sequence[str]) -> ToolMixBaseline:
        """Record the baseline of all files together.

        Raises:
            ConfigurationError: The runs call too many tools.
            Unreadable: A file cannot be read, or no run called a tool.
        """
        runs = list(self._runs(files))
        if not any(runs):
            raise Unreadable(
                f"a baseline needs runs that ended well and called tools, got none among "
                f"{len(runs) + self.left_out:,} runs. Use --all to take in those that did not end "
                "well, too."
            )
        return ToolMixBaseline.of(runs)

    def _runs(self, files: Sequence[str]) -> Iterator[dict[str, int]]:
        prices = PriceBook()
        legs = self._reading.files(files, lambda lines: verdicts(lines, _UNBOUNDED, prices))
        for run in whole_runs(legs):
            if self._every or run.succeeded:
                yield run.tools
            else:
                self.left_out += 1
