"""The loop acted out in the calling thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from budgetguard_core import Outcome, Stop
from budgetguard_core.kit import Watch, entered
from budgetguard_loop._last import LastStep
from budgetguard_loop._plan import Plan, advance, ended
from budgetguard_loop._reply import read_reply
from budgetguard_loop._run import (
    CallModel,
    Command,
    Cut,
    Loop,
    NextTool,
    Save,
    StartTools,
    ToolJob,
    Wait,
)


def drive(plan: Plan) -> Outcome:
    """Run the loop to its end."""
    loop = plan.begin()
    shell = _Shell(loop, plan)
    steps = loop.steps()
    moved = advance(steps)
    while not isinstance(moved, Outcome):
        try:
            answer = shell.act(moved)
        except BaseException as error:
            moved = advance(steps, error=error)
        else:
            moved = advance(steps, answer)
    return ended(moved, loop)


class _Shell:
    def __init__(self, loop: Loop, plan: Plan) -> None:
        self._loop = loop
        self._run = loop.run
        self._plan = plan
        self._jobs: deque[ToolJob] = deque()

    def act(self, command: Command) -> Any:
        # Those of every step first.
        if isinstance(command, CallModel):
            call = self._run.wait(command.call)
            if isinstance(call, Stop):
                return Cut(call.trip)
            settings = self._plan.settings.for_call(self._run, call)
            with entered(call.frame):
                return read_reply(self._plan.step(command.messages, **settings))
        if isinstance(command, StartTools):
            self._jobs.extend(command.jobs)
            return self._run_tool(self._jobs.popleft())
        if isinstance(command, NextTool):
            return self._run_tool(self._jobs.popleft())
        if isinstance(command, Save):
            self._loop.save()
            return None
        if isinstance(command, Wait):
            return self._wait(command.seconds)
        if isinstance(command, LastStep):
            return command.ask(self._plan.step, self._plan.settings)
        return command.end()

    def _wait(self, seconds: float) -> Cut | None:
        woken = threading.Event()
        watch = Watch(self._run, woken.set)
        woken.wait(seconds)
        watch.close()
        return None if watch.trip is None else Cut(watch.trip)

    def _run_tool(self, job: ToolJob) -> ToolJob:
        if self._run.start(self._run.wait(job.call)) is None:
            with entered(job.call.frame):
                try:
                    job.result = job.function(**job.arguments)
                except Exception as error:
                    job.error = error
        return job
