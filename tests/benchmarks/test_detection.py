"""What the detector makes of recorded runs: those it leaves alone, and where it stops the others.

The runs are not part of this repository: BUDGETGUARD_TRAJECTORIES names the folder of their
`.jsonl.gz` files, one run a line (`trajectories.py` of the tests reads the same form).
"""

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest

import layout
from budgetguard_core import LoopDetection
from budgetguard_core.canonical import fingerprint
from budgetguard_core.loops import LoopDetector

TRAJECTORIES = Path(
    os.environ.get("BUDGETGUARD_TRAJECTORIES", layout.ROOT.parent / "shared" / "trajectories")
)

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(
        not TRAJECTORIES.is_dir(), reason="BUDGETGUARD_TRAJECTORIES names no folder"
    ),
]


class Judged:
    """A recorded run, as far as the detector lets it go."""

    def __init__(self, run):
        self.kind = (
            "runaways"
            if run["termination"] == "max_steps"
            else "successful"
            if run["success"]
            else "failing"
        )
        self.nudges = 0
        self.stopped_after = None
        self.detector = LoopDetector(LoopDetection())
        self.open = {}
        self.made = Counter()
        for step in run["steps"]:
            getattr(self, step["role"])(step)
            if self.stopped_after is not None:
                return

    def assistant(self, step):
        self.nudges += self.detector.nudge() is not None
        if self.detector.tripped:
            self.stopped_after = self.made[self.latest]
            return
        self.detector.begin_reply()
        for call in step["tool_calls"]:
            self.open.setdefault(call["id"], []).append(call)
        if not step["tool_calls"] and step["content_len"]:
            self.detector.observe_reply(None, "", fingerprint=step["content_hash"])

    def tool(self, step):
        call = self.open[step["id"]].pop(0)
        arguments = fingerprint(call["args"], ignore=self.detector.ignored)
        self.latest = (call["name"], arguments, step["result_hash"])
        self.made[self.latest] += 1
        # Texts were recorded as hashes, so an error of a kind is one of the same text.
        error = step["result_hash"] if step["error"] else None
        self.detector.observe(*self.latest, error=error)

    def user(self, step):
        del step
        self.detector.user_turn()


def test_working_runs_are_left_alone_and_runaways_stopped():
    runs = [
        Judged(json.loads(line))
        for path in sorted(TRAJECTORIES.glob("*.jsonl.gz"))
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]
    assert runs
    found = {}
    print("\n             runs  nudged  stopped  at the execution of the call")
    for kind in ("successful", "failing", "runaways"):
        judged = [run for run in runs if run.kind == kind]
        stops = sorted(run.stopped_after for run in judged if run.stopped_after is not None)
        found[kind] = (len(judged), sum(run.nudges > 0 for run in judged), stops)
        at = ", ".join(map(str, stops)) or "-"
        print(f"{kind:<11} {len(judged):>5} {found[kind][1]:>7} {len(stops):>8}  {at}")
    healthy, nudged, cut = found["successful"]
    assert (nudged, cut) == (0, []), f"of {healthy} successful runs"
    runaways, _, stops = found["runaways"]
    assert len(stops) == runaways
    assert set(stops) <= {4, 5}
