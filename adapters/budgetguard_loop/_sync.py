"""The loop acted out in the calling thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from budgetguard_core import Outcome, Stop
from budgetguard_core.kit import Watch
from budgetguard_loop._last import AskStep
from budgetguard_loop._plan import Plan, Todo, advance, ended
from budgetguard_loop._reply import read_reply
from budgetguard_loop._run import (
    AskAtLast,
    CallModel,
    Command,
    Cut,
    Finish,
    Loop,
    NextTool,
    Save,
    StartTools,
    ToolEnd,
    ToolJob,
    Wait,
)


def drive(plan: Plan) -> Outcome:
    """Run the loop to its end."""
    loop = plan.begin()
    shell = _Shell(loop, plan)
    steps = loop.steps()
    moved = advance(steps)
    while isinstance(moved, Todo):
        try:
            answer = shell.act(moved.command)
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
        match command:
            case CallModel():
                call = self._run.wait(command.call)
                if isinstance(call, Stop):
                    return Cut(call.trip)
                settings = self._plan.settings.for_call(self._run, call)
                with self._run.entered(call):
                    return read_reply(self._plan.step(command.messages, **settings))
            case Wait():
                return self._wait(command.seconds)
            case StartTools():
                self._jobs.extend(command.jobs)
            case NextTool():
                return self._run_tool(self._jobs.popleft())
            case Save():
                self._loop.save()
            case AskAtLast():
                step = AskStep(self._run, self._plan.step, self._plan.settings)
                return step.ask(command.last, command.call, command.messages)
            case Finish():
                return command.end()
        return None

    def _wait(self, seconds: float) -> Cut | None:
        woken = threading.Event()
        watch = Watch(self._run, woken.set)
        woken.wait(seconds)
        watch.close()
        return None if watch.trip is None else Cut(watch.trip)

    def _run_tool(self, job: ToolJob) -> ToolEnd:
        if self._run.start(self._run.wait(job.call)) is not None:
            return ToolEnd(job)
        with self._run.entered(job.call):
            try:
                return ToolEnd(job, job.function(**job.arguments))
            except Exception as error:
                return ToolEnd(job, error=error)
