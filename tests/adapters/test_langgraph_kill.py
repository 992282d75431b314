"""A process killed with -9 during a run: another one goes on, with all that was spent.

What was really done is read from a file that the program writes beside the checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, json, os, sqlite3, sys, threading
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langchain.agents import create_agent
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from budgetguard_core import Budget, SqliteStore
from budgetguard_langgraph import bounded, outcome

folder, form, hang_at, given = sys.argv[1:]


def done(what):
    with open(os.path.join(folder, "done"), "a") as file:
        file.write(what + "\\n")
        file.flush()
        os.fsync(file.fileno())


def maybe_hang(what):
    done("start " + what)
    if what == hang_at:
        print("hanging", flush=True)
        threading.Event().wait()


class Model(BaseChatModel):
    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **_):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **_):
        turn = sum(m.type == "ai" for m in messages)
        maybe_hang(f"model{turn}")
        usage = {"input_tokens": 100, "output_tokens": 20, "total_tokens": 120}
        names = [["fetch"], ["write", "send"], []][turn]
        calls = [{"name": n, "args": {}, "id": f"c{turn}{n}"} for n in names]
        done(f"end model{turn}")
        text = "" if calls else "Done."
        message = AIMessage(text, tool_calls=calls, usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=message)])


@tool
def fetch() -> str:
    "Fetch."
    maybe_hang("fetch")
    done("end fetch")
    return "fetched"


@tool
def write() -> str:
    "Write."
    maybe_hang("write")
    done("end write")
    return "written"


@tool
def send() -> str:
    "Send."
    maybe_hang("send")
    done("end send")
    return "sent"


given = json.loads(given)
config = {"configurable": {"thread_id": "t"}}
budget = Budget(max_iterations=10)
store = SqliteStore(os.path.join(folder, "guards"))
file = os.path.join(folder, "graph")


def report(result):
    usage = outcome(result).usage
    print(json.dumps({
        "final": result["messages"][-1].content,
        "answers": [m.content for m in result["messages"] if m.type == "tool"],
        "model_calls": usage.model_calls,
        "tool_calls": usage.tool_calls,
        "total_tokens": usage.total_tokens,
    }))


def make(saver):
    return bounded(create_agent(Model(), [fetch, write, send], checkpointer=saver), budget,
                   store=store)


async def main():
    async with AsyncSqliteSaver.from_conn_string(file) as saver:
        report(await make(saver).ainvoke(given, config))


if form == "async":
    asyncio.run(main())
else:
    with SqliteSaver.from_conn_string(file) as saver:
        report(make(saver).invoke(given, config))
"""

FIRST = json.dumps({"messages": [["user", "Go."]]})


def start(folder, form, hang_at, given):
    return subprocess.Popen(
        [sys.executable, "-I", "-c", PROGRAM, str(folder), form, hang_at, given],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sync", "async"])
@pytest.mark.parametrize("hang_at", ["fetch", "model1", "send", "model2"])
def test_a_killed_run_goes_on_in_another_process(tmp_path, form, hang_at):
    with start(tmp_path, form, hang_at, FIRST) as program:
        assert program.stdout.readline() == "hanging\n"
        os.kill(program.pid, signal.SIGKILL)
    before = (tmp_path / "done").read_text().split("\n")
    with start(tmp_path, form, "nowhere", "null") as program:
        report = json.loads(program.stdout.read())
    assert program.returncode == 0
    every = (tmp_path / "done").read_text().strip().split("\n")
    assert report["final"] == "Done."
    assert report["answers"] == ["fetched", "written", "sent"]
    # What had completed, its step included, did not run again; what was in flight did.
    completed = {line for line in before if line.startswith("end ")}
    again = [line for line in every[len(before) - 1 :] if line in completed]
    # `write` stood in one step with the hanging `send`; its result may not have been on the disk.
    assert set(again) <= ({"end write"} if hang_at == "send" else set())
    started = [line.removeprefix("start ") for line in every if line.startswith("start ")]
    models = sum(name.startswith("model") for name in started)
    assert report["model_calls"] == models
    assert report["tool_calls"] >= len(started) - models
    assert report["total_tokens"] >= 3 * 120
