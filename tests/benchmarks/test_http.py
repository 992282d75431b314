"""What the seam costs a call of OpenAI's client, beside the same call without it.

The provider is another process: what is timed is this one's. See `framework_arms` for the null arm,
and for what is judged where the machine is too busy for times.
"""

import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import openai
import pytest

from benchmarks.framework_arms import compared, judge
from budgetguard_core import Budget
from budgetguard_http import bounded_clients, install, uninstall

pytestmark = pytest.mark.benchmark

CALLS = 100
ROOMY = Budget(
    max_iterations=10**9,
    max_total_tokens=10**15,
    max_tool_calls=10**9,
    max_cost_usd=10**6,
)
DEADLINE = ROOMY.model_copy(update={"max_seconds": 10**6})
SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from provider_server import ProviderServer
with ProviderServer(calls=0, text="word " * 200) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""
GOALS = {"whole": 1.2, "streamed": 1.25}
"""The share of a bare call."""
MOST_CALLS = {"whole": 530, "streamed": 960}
"""Function calls beyond those of a bare call, of which there are about 6,100 and 8,000."""


@pytest.fixture(scope="module")
def url():
    command = [sys.executable, "-c", SERVER, str(Path(__file__).parent.parent)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()


@contextmanager
def installed():
    install()
    try:
        yield
    finally:
        uninstall()


WAYS = {
    "bare": nullcontext,
    "null": nullcontext,
    "guarded": lambda: bounded_clients(ROOMY),
    "deadline": lambda: bounded_clients(DEADLINE),
    "no guard": installed,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call(url, stream):
    kind = "streamed" if stream else "whole"
    with openai.OpenAI(api_key="k", base_url=url + "/v1") as client:

        def arm(way):
            def run():
                with way():
                    for number in range(CALLS):
                        messages = [{"role": "user", "content": str(number)}]
                        ask = {"model": "gpt-4o", "messages": messages, "stream": stream}
                        reply = client.chat.completions.create(**ask)
                        if stream:
                            list(reply)

            return run

        arms = {name: arm(way) for name, way in WAYS.items()}
        times, beyond = compared(kind, arms, units=CALLS, rounds=12)
    # How a stream is cut into pieces is the machine's business.
    assert abs(beyond["null"]) < 50
    assert beyond["no guard"] < 80
    assert beyond["guarded"] <= MOST_CALLS[kind]
    assert beyond["deadline"] <= MOST_CALLS[kind] + 30
    for name in ("guarded", "deadline"):
        judge(times, name, GOALS[kind])
    judge(times, "no guard", 1.01)
