"""The loop acted out in the calling thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from budgetguard_core import Outcome, Stop
from budgetguard_core.kit import FRAME, Frame, Watch
from budgetguard_loop._last import LastStep
from budgetguard_loop._plan import Plan, ended
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
    try:
        command = next(steps)
        while True:
            try:
                answer = shell.act(command)
            except BaseException as error:
                command = steps.throw(error)
            else:
                command = steps.send(answer)
    except StopIteration as end:
        outcome: Outcome = end.value
    return ended(outcome, loop)


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
            answer = _inside(call.frame, self._plan.step, command.messages, **settings)
            return read_reply(answer)
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
            try:
                job.result = _inside(job.call.frame, job.function, **job.arguments)
            except Exception as error:
                job.error = error
        return job


def _inside(frame: Frame, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # An `entered` block of one call: each step pays for two.
    token = FRAME.set(frame)
    try:
        return function(*args, **kwargs)
    finally:
        FRAME.reset(token)
