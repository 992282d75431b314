"""What the seam costs a call, beside the same call without it: processor time of this process.

The provider is another process. The ways take turns, and each counts with its best turn; two of
them are the same, and show what the figures are worth.
"""

import gc
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import openai
import pytest

from budgetguard_core import Budget
from budgetguard_http import bounded_clients, install, uninstall

pytestmark = pytest.mark.benchmark

TURNS, CALLS = 15, 40
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
# Of the prototype: microseconds that a guarded call may cost, and its share of a bare one.
MOST = {"whole": (73, 1.14), "streamed": (None, 1.2)}


@pytest.fixture(scope="module")
def url():
    command = [sys.executable, "-c", SERVER, str(Path(__file__).parent.parent)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()


def turn(client, stream):
    gc.collect()
    before = time.process_time_ns()
    for number in range(CALLS):
        messages = [{"role": "user", "content": str(number)}]
        reply = client.chat.completions.create(model="gpt-4o", messages=messages, stream=stream)
        if stream:
            list(reply)
    return (time.process_time_ns() - before) / CALLS / 1_000


class installed:
    def __enter__(self):
        install()

    def __exit__(self, *error):
        uninstall()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call(url, stream):
    ways = {
        "bare": nullcontext,
        "guarded": lambda: bounded_clients(ROOMY),
        # With a deadline each blocking call starts a thread, which shuts its socket down in time.
        "deadline": lambda: bounded_clients(DEADLINE),
        "no guard": installed,
        "bare again": nullcontext,
    }
    took = {name: [] for name in ways}
    with openai.OpenAI(api_key="k", base_url=url + "/v1") as client:
        turn(client, stream)
        for _ in range(TURNS):
            for name, way in ways.items():
                with way():
                    took[name].append(turn(client, stream))
    best = {name: min(one) for name, one in took.items()}
    bare = min(best["bare"], best["bare again"])
    noise = abs(best["bare"] - best["bare again"])
    kind = "streamed" if stream else "whole"
    for name, one in best.items():
        print(f"{kind}: {name} {one:.0f} us, +{one - bare:.0f} us, x{one / bare:.2f}")
    most, share = MOST[kind]
    assert best["guarded"] / bare <= share + noise / bare
    assert most is None or best["guarded"] - bare <= most + noise
    assert best["no guard"] - bare <= max(5, 2 * noise)
