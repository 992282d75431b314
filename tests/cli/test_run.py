"""`budgetguard run` end to end: unmodified scripts, their processes, and a server that counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from budgetguard_cli.app import app
from provider_server import TOKENS, ProviderServer

CAP = 3
ONE = ("--max-iterations", "1")

ASK = """
import os, sys
import httpx

URL = os.environ["URL"]

def chat(messages, **more):
    body = {"model": "gpt-4o", "messages": messages, **more}
    answer = httpx.post(URL + "/v1/chat/completions", json=body, timeout=60)
    return answer.json()["choices"][0]["message"]

def ask(where):
    return chat([{"role": "user", "content": where}])["content"]
"""

PROCESSES = (
    ASK
    + """
import asyncio, multiprocessing, subprocess, threading

def swallowing(where):
    try:
        ask(where)
    except Exception:
        pass

async def on_a_loop():
    import openai
    client = openai.AsyncOpenAI(api_key="key", base_url=URL + "/v1")
    messages = [{"role": "user", "content": "loop"}]
    await client.chat.completions.create(model="gpt-4o", messages=messages)

if __name__ == "__main__":
    swallowing("main")
    thread = threading.Thread(target=swallowing, args=("thread",))
    thread.start()
    thread.join()
    asyncio.run(on_a_loop())
    import anthropic
    anthropic.Anthropic(api_key="key", base_url=URL).messages.create(
        model="claude-sonnet-4-5", max_tokens=99, messages=[{"role": "user", "content": "claude"}])
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(swallowing, ["fork", "fork"])
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            pool.map(swallowing, [method])
    subprocess.run([sys.executable, "ask.py", "subprocess"])
    for _ in range(9):
        swallowing("after")
    print("END", sys.argv[1:])
"""
)

TOOL = '''
def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: Where.
    """
    import uuid
    return uuid.uuid4().hex
'''

LANGGRAPH = (
    TOOL
    + """
import os
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

model = ChatOpenAI(model="gpt-4o", api_key="key", base_url=os.environ["URL"] + "/v1")
bound = model.bind_tools([read_file])
builder = StateGraph(MessagesState)
builder.add_node("agent", lambda state: {"messages": [bound.invoke(state["messages"])]})
builder.add_node("tools", ToolNode([read_file]))
builder.add_edge(START, "agent")
builder.add_conditional_edges("agent", tools_condition)
builder.add_edge("tools", "agent")
try:
    result = builder.compile().invoke({"messages": [("user", "go")]})
    print("HISTORY", [message.type for message in result["messages"]])
except Exception:
    pass
"""
)

AGENTS_SDK = (
    TOOL
    + """
import os
import openai
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
client = openai.AsyncOpenAI(api_key="key", base_url=os.environ["URL"] + "/v1")
agent = Agent(name="a", model=OpenAIChatCompletionsModel("gpt-4o", client),
              tools=[function_tool(read_file)])
try:
    print("FINAL", Runner.run_sync(agent, "go").final_output)
except Exception:
    pass
"""
)

STRANDS = (
    TOOL
    + """
import os
from strands import Agent, tool
from strands.models.openai import OpenAIModel

model = OpenAIModel(client_args={"api_key": "key", "base_url": os.environ["URL"] + "/v1"},
                    model_id="gpt-4o")
agent = Agent(model=model, tools=[tool(read_file)], callback_handler=None)
try:
    print("REASON", agent("go").stop_reason)
except Exception:
    pass
"""
)


PYDANTIC_AI = (
    TOOL
    + """
import os
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ["URL"] + "/v1", api_key="key")
agent = Agent(OpenAIChatModel("gpt-4o", provider=provider), tools=[read_file])
try:
    print("OUTPUT", agent.run_sync("go").output)
except Exception:
    pass
"""
)


class Started:
    """A run that has been started.

    Attributes:
        process: The command.
        server: What its script speaks to.
    """

    def __init__(self, process, server):
        self.process = process
        self.server = server

    def end(self, stdin=None):
        self.out, self.err = self.process.communicate(stdin, timeout=300)
        return self.process.returncode

    @property
    def asked(self):
        """How often each text was the first of a request."""
        return Counter(post["body"]["messages"][0]["content"] for post in self.server.posts)


@pytest.fixture
def start(tmp_path):
    """Starts scripts below the command, in a folder of their own."""

    @contextmanager
    def start(script, *options, arguments=("script.py",), **environment):
        (tmp_path / "script.py").write_text(script)
        (tmp_path / "ask.py").write_text(ASK + "ask(sys.argv[1])\n")
        with ProviderServer() as server:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "budgetguard_cli", "run"),
                    *map(str, options),
                    *arguments,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env={**os.environ, "URL": server.url, **environment},
            )
            try:
                yield Started(process, server)
            finally:
                process.kill()
                process.communicate()

    return start


@pytest.mark.slow
def test_all_processes_of_a_script_spend_one_budget_exactly(start):
    """Threads, a loop, every kind of process, with every exception swallowed."""
    with start(PROCESSES, "--max-model-calls", 10, arguments=["script.py", "--help"]) as run:
        assert run.end() == 3, run.err
        assert run.server.hits == 10
        kinds = ("main", "thread", "loop", "claude", "spawn", "forkserver", "subprocess")
        assert run.asked == {**dict.fromkeys(kinds, 1), "fork": 2, "after": 1}
    assert run.out == "END ['--help']\n"
    assert "stopped: max_model_calls" in run.err
    assert "claude-sonnet-4-5" in run.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        # Without its adapter the last message would be an answer with the seam's text.
        (LANGGRAPH, "HISTORY ['human', 'ai', 'tool', 'ai', 'tool', 'ai', 'tool']\n"),
        (AGENTS_SDK, "FINAL This run was stopped before it finished. So far 3 tool calls were"),
        (STRANDS, "REASON max_iterations\n"),
        (PYDANTIC_AI, "OUTPUT This run was stopped before it finished. So far 3 tool calls were"),
    ],
    ids=["langgraph", "openai-agents", "strands", "pydantic-ai"],
)
def test_a_framework_ends_gracefully_at_the_cap(start, script, said):
    with start(script, "--max-iterations", CAP, "--json") as run:
        assert run.end() == 3, run.err
        assert run.server.hits == CAP
    assert run.out.startswith(said)
    report = json.loads(run.err.splitlines()[-1])
    assert report["exit_code"] == 0
    assert [stop["reason"] for stop in report["stops"]] == ["max_iterations"]
    used = report["used"]
    assert (used["iterations"], used["tool_calls"]) == (CAP, CAP)
    assert (used["total_tokens"], used["estimated_calls"]) == (CAP * TOKENS, 0)
    assert report["models"]["gpt-4o"]["calls"] == CAP
    assert "is not used" not in run.err


COLD = (
    ASK
    + """
import threading
start = threading.Barrier(50)

def swallowing():
    start.wait()
    try:
        ask("cold")
    except Exception:
        pass

threads = [threading.Thread(target=swallowing) for _ in range(50)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
)


@pytest.mark.slow
def test_cold_threads_that_start_at_once_send_exactly_what_the_cap_allows(start):
    with start(COLD, "--max-model-calls", CAP) as run:
        assert run.end() == 3, run.err
        assert run.asked == {"cold": CAP}


STUBBORN = (
    ASK
    + """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        ask("again")
    except BaseException:
        pass
"""
)


@pytest.mark.slow
def test_a_script_that_ignores_every_hint_is_killed(start):
    with start(STUBBORN, "--max-iterations", CAP, "--grace", 0.2, "--json") as run:
        assert run.end() == 3, run.err
        assert run.server.hits == CAP
    assert json.loads(run.err.splitlines()[-1])["exit_code"] == 128 + signal.SIGKILL


CIRCLES = (
    ASK
    + """
tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
messages = [{"role": "user", "content": "go"}]
try:
    while True:
        message = chat(messages, tools=tools)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "nothing"})
except Exception:
    pass
"""
)


@pytest.mark.slow
def test_a_loop_is_found_within_its_process_and_is_a_stop(start):
    with start(CIRCLES, "--profile", "research", "--json") as run:
        assert run.end() == 3, run.err
        assert run.server.hits < 10
    report = json.loads(run.err.splitlines()[-1])
    assert [stop["reason"] for stop in report["stops"]] == ["no_progress"]
    assert report["profile"]["name"] == "research"


LONELY = (
    ASK
    + """
ask("before")
print("ready", flush=True)
sys.stdin.readline()
print("GOT", ask("after"))
import subprocess
print("CHILD", subprocess.run([sys.executable, "ask.py", "child"]).returncode)
"""
)


@pytest.mark.slow
def test_without_its_supervisor_nothing_leaves_a_script_any_more(start):
    with start(LONELY, "--max-iterations", 99) as run:
        assert run.process.stdout.readline() == "ready\n"
        run.process.kill()
        # The script holds the pipes, and goes on.
        run.end("go on\n")
        assert run.asked == {"before": 1}
    assert "GOT This run was stopped before it finished." in run.out
    assert "CHILD 97" in run.out
    assert "this process cannot be bounded" in run.err


BUDGETS_OF_ITS_OWN = (
    """
from budgetguard_core import Budget, Guard
from budgetguard_http import BudgetTransport, bounded_clients
"""
    + ASK
    + """
with Guard(Budget(max_iterations=2)).activate():
    [ask("block") for _ in range(4)]
with bounded_clients(Budget(max_iterations=2)) as block:
    [ask("clients") for _ in range(4)]
with httpx.Client(transport=BudgetTransport(Budget(max_iterations=2))) as client:
    for _ in range(4):
        body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "transport"}]}
        client.post(URL + "/v1/chat/completions", json=body, timeout=60)
[ask("outside") for _ in range(9)]
"""
)


@pytest.mark.slow
def test_budgets_of_the_scripts_own_hold_within_that_of_the_run(start):
    with start(BUDGETS_OF_ITS_OWN, "--max-model-calls", 20, "--json") as run:
        code = run.end()
        own = {"block": 2, "clients": 2, "transport": 2}
        assert {name: run.asked[name] for name in own} == own
    report = json.loads(run.err.splitlines()[-1])
    # What a transport refuses was admitted above it: it counts there as a call.
    assert run.server.hits <= report["used"]["model_calls"] <= 20
    assert (code, report["stops"]) == (0, [])


SIGNALS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_signals_are_passed_on_and_the_code_is_the_scripts(start):
    with start(SIGNALS, "--max-iterations", 1) as run:
        assert run.process.stdout.readline() == "ready\n"
        run.process.terminate()
        assert run.end() == 7


INTERRUPTED = (
    ASK
    + """
class Once:
    def find_spec(self, name, *_):
        if name == "budgetguard_cli.run.attach":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Once())
try:
    ask("first")
except KeyboardInterrupt:
    print("interrupted")
print(ask("second"))
"""
)


def test_an_interrupt_while_the_guard_comes_is_the_scripts_own(start):
    with start(INTERRUPTED, "--max-model-calls", 1) as run:
        code = run.end()
        assert run.asked == {"second": 1}
    assert "interrupted" in run.out
    assert "cannot be bounded" not in run.err
    assert code == 0


@pytest.mark.slow
def test_a_script_that_sleeps_past_its_deadline_is_interrupted(start):
    script = "try:\n import time; time.sleep(99)\nexcept KeyboardInterrupt: print('interrupted')"
    # The time runs while the interpreter starts, too.
    with start(script, "--max-seconds", 15, "--grace", 15) as run:
        assert run.end() == 3
    assert run.out == "interrupted\n"
    assert "stopped: max_seconds" in run.err


def test_the_users_own_sitecustomize_runs_and_a_killed_script_says_so(start, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins; builtins.MINE = __file__\n")
    script = "import os, sys; print(MINE, sys.modules['sitecustomize'].__file__ == MINE)\n"
    with start(
        script + "sys.stdout.flush(); os.kill(os.getpid(), 9)",
        *("--max-iterations", 1),
        PYTHONPATH=str(own),
    ) as run:
        assert run.end() == 128 + signal.SIGKILL
    assert run.out == f"{own / 'sitecustomize.py'} True\n"


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_exit_code_tells_of_a_stop_where_nobody_reads_the_report(start, options):
    with start(ASK + "ask('once')\nask('again')", "--max-model-calls", 1, *options) as run:
        run.process.stderr.close()
        assert run.process.wait(300) == 3


@pytest.mark.slow
def test_a_module_in_which_no_call_is_seen(start):
    module = ["-m", "calendar", "2026", "2"]
    with start("", "--max-seconds", 60, arguments=module) as run:
        assert run.end() == 4
    assert "February 2026" in run.out
    assert "no call of a model was seen" in run.err


@pytest.mark.parametrize(
    ("arguments", "said", "environment"),
    [
        (["nowhere.py"], "the script must be a file, got nowhere.py", {}),
        (["-m", "no_such_module_here"], "-m must name a module", {}),
        (["--profile", "resaerch", __file__], "did you mean 'research'?", {}),
        ([__file__], "a run must have a budget", {}),
        (["--max-iterations", "0", __file__], "max_iterations must be a whole number >= 1", {}),
        (["--max-cost-usd", "much", __file__], "must be an amount of US dollars, got 'much'", {}),
        ([*ONE, "--tenant", "acme", __file__], "--ledger and --tenant", {}),
        (
            [*ONE, "--tenant", "acme", __file__],
            "a ledger's URL must begin with",
            {"BUDGETGUARD_LEDGER": "mysql://here"},
        ),
        ([*ONE, __file__], "Use python instead", {"BUDGETGUARD_RUN": "sqlite:////nowhere"}),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(arguments, said, environment):
    result = CliRunner().invoke(app, ["run", *arguments], env=environment)
    assert result.exit_code == 2
    assert said in result.stderr
