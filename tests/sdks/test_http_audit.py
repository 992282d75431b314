"""Connections to providers that go past the seam are seen, those through it are not.

A channel of gRPC connects with its first call, so that those here never do.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: an audit hook stays for good. Nothing leaves it: the second hook ends
# each look-up before a name server is asked.
SCRIPT = """
import asyncio, json, sys, warnings
warnings.simplefilter("ignore")
import aiohttp, boto3, httpx, httpx2, openai, requests
import urllib.request, websockets, websockets.sync.client
from botocore.config import Config
from budgetguard_core import Budget
from budgetguard_http import bounded_clients, install, uncovered_hosts

def no_network(event, args):
    if event == "socket.getaddrinfo":
        raise OSError("no network")

install(watch_connections=True)
sys.addaudithook(no_network)
ASK = {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}]}

async def by_aiohttp(url):
    async with aiohttp.ClientSession() as session:
        await session.post("https" + url, json=ASK)

async def by_httpx(url):
    async with httpx2.AsyncClient() as client:
        await client.post("https" + url, json=ASK)

async def by_websockets(url):
    async with websockets.connect("wss" + url):
        pass

def by_realtime(url):
    base = "wss" + url.removesuffix("/chat/completions")
    client = openai.OpenAI(api_key="k", websocket_base_url=base)
    with client.realtime.connect(model="gpt-realtime"):
        pass

def by_boto3(url):
    session = boto3.Session("k", "s", region_name="us-east-1")
    config = Config(retries={"total_max_attempts": 1})
    client = session.client("bedrock-runtime", config=config)
    client.converse(modelId="m", messages=[{"role": "user", "content": [{"text": "go"}]}])

WAYS = {
    "requests": lambda url: requests.post("https" + url, json=ASK),
    "urllib": lambda url: urllib.request.urlopen("https" + url, data=b"{}"),
    "aiohttp": lambda url: asyncio.run(by_aiohttp(url)),
    "websockets": lambda url: asyncio.run(by_websockets(url)),
    "websockets.sync": lambda url: websockets.sync.client.connect("wss" + url),
    "realtime of openai": by_realtime,
    "httpx": lambda url: httpx.post("https" + url, json=ASK),
    "httpx2": lambda url: httpx2.post("https" + url, json=ASK),
    "httpx2, async": lambda url: asyncio.run(by_httpx(url)),
    "boto3": by_boto3,
}
# The last but one is what aiobotocore asks for, over aiohttp.
HOSTS = (
    "api.openai.com",
    "API.Anthropic.com.",
    "bedrock-runtime.eu-west-1.amazonaws.com",
    "example.com",
)
seen, left_by = {}, {}
for name, act in WAYS.items():
    for host in HOSTS:
        before = sum(uncovered_hosts().values())
        with bounded_clients(Budget(loop_detection=None)) as block:
            try:
                act(f"://{host}/v1/chat/completions")
            except Exception as error:
                left_by[name] = type(error).__name__
        found = sum(uncovered_hosts().values()) - before
        seen[f"{name} {host}"] = [bool(found), list(map(str, block.outcome.errors))]
print(json.dumps({"seen": seen, "hosts": list(uncovered_hosts()), "left_by": left_by}))
"""


@pytest.fixture(scope="module")
def told():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


PAST = ["requests", "urllib", "aiohttp", "websockets", "websockets.sync", "realtime of openai"]


@pytest.mark.parametrize(
    ("way", "error"),
    [("httpx", "ConnectError"), ("httpx2", "ConnectError"), ("boto3", "EndpointConnectionError")],
)
def test_a_call_through_the_seam_fails_for_the_network_alone(told, way, error):
    assert told["left_by"][way] == error


@pytest.mark.slow
@pytest.mark.parametrize("way", PAST)
def test_what_goes_past_the_seam_is_counted_and_named_in_the_outcome(told, way):
    for host, known in (
        ("api.openai.com", "api.openai.com"),
        ("API.Anthropic.com.", "anthropic"),
        ("bedrock-runtime.eu-west-1.amazonaws.com", "bedrock-runtime.eu-west-1"),
    ):
        is_seen, errors = told["seen"][f"{way} {host}"]
        assert is_seen
        assert any("went past the bounded clients" in one and known in one for one in errors)


@pytest.mark.parametrize("way", ["httpx", "httpx2", "httpx2, async", "boto3"])
def test_what_goes_through_the_seam_is_not(told, way):
    assert told["seen"][f"{way} api.openai.com"] == [False, []]


def test_other_hosts_are_nobodys_business(told):
    assert sorted(told["hosts"]) == [
        "api.anthropic.com",
        "api.openai.com",
        "bedrock-runtime.eu-west-1.amazonaws.com",
    ]


GRPC_SCRIPT = """
import asyncio, json, sys
import grpc
from google.ai import generativelanguage
from budgetguard_core import Budget
from budgetguard_http import bounded_clients, install, uncovered_hosts, uninstall

def no_network(event, args):
    if event == "socket.getaddrinfo":
        raise OSError("no network")

own = grpc.secure_channel, grpc.insecure_channel, grpc.aio.secure_channel, grpc.aio.insecure_channel
TLS = grpc.ssl_channel_credentials()

async def on_a_loop(open_channel, *args):
    async with open_channel(*args):
        pass

def googles():
    client = generativelanguage.GenerativeServiceClient(
        client_options={"api_key": "k"}, transport="grpc"
    )
    client.transport.close()

WAYS = {
    "secure": lambda: grpc.secure_channel("api.x.ai:443", TLS).close(),
    "by names": lambda: grpc.secure_channel(credentials=TLS, target="api.x.ai").close(),
    "insecure": lambda: grpc.insecure_channel("dns:///API.x.ai.:443").close(),
    "a name server": lambda: grpc.insecure_channel("dns://8.8.8.8/api.x.ai").close(),
    "a scheme alone": lambda: grpc.insecure_channel("dns:api.x.ai:443").close(),
    "aio": lambda: asyncio.run(on_a_loop(grpc.aio.secure_channel, "api.x.ai:443", TLS)),
    "aio, insecure": lambda: asyncio.run(on_a_loop(grpc.aio.insecure_channel, "api.x.ai:443")),
    "google's": googles,
    "elsewhere": lambda: grpc.insecure_channel("example.com:443").close(),
    "an address": lambda: grpc.insecure_channel("ipv6:[::1]:1").close(),
    "a socket": lambda: grpc.insecure_channel("unix:/tmp/api.x.ai").close(),
}

def errors(act):
    with bounded_clients(Budget(loop_detection=None)) as block:
        act()
    return list(map(str, block.outcome.errors))

unwatched = errors(WAYS["secure"]), uncovered_hosts()
install(watch_connections=True)
sys.addaudithook(no_network)
seen = {name: errors(act) for name, act in WAYS.items()}
kept = grpc.secure_channel
uninstall()
now = grpc.secure_channel, grpc.insecure_channel, grpc.aio.secure_channel, grpc.aio.insecure_channel
before = uncovered_hosts()
kept("api.x.ai:443", TLS).close()
print(json.dumps({
    "unwatched": unwatched,
    "seen": seen,
    "hosts": before,
    "later": uncovered_hosts(),
    "restored": now == own,
}))
"""


@pytest.fixture(scope="module")
def told_of_grpc():
    command = [sys.executable, "-c", GRPC_SCRIPT]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "way",
    [
        "secure",
        "by names",
        "insecure",
        "a name server",
        "a scheme alone",
        "aio",
        "aio, insecure",
        "google's",
    ],
)
def test_a_channel_of_grpc_to_a_provider_is_counted_and_named(told_of_grpc, way):
    host = "generativelanguage.googleapis.com" if way == "google's" else "api.x.ai"
    assert told_of_grpc["seen"][way] == [f"a connection to {host} went past the bounded clients"]


def test_other_channels_are_nobodys_business(told_of_grpc):
    ways = ("elsewhere", "an address", "a socket")
    assert [told_of_grpc["seen"][way] for way in ways] == [[], [], []]
    assert told_of_grpc["hosts"] == {"api.x.ai": 7, "generativelanguage.googleapis.com": 1}


def test_grpc_is_left_alone_unless_connections_are_watched(told_of_grpc):
    assert told_of_grpc["unwatched"] == [[], {}]
    assert told_of_grpc["restored"]
    assert told_of_grpc["later"] == told_of_grpc["hosts"]


def test_grpc_is_not_imported_for_it():
    script = (
        "import sys; from budgetguard_http import install; install(watch_connections=True); "
        "assert 'grpc' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("module", ["None", "types.ModuleType('grpc')"])
def test_what_is_no_grpc_is_no_reason_to_fail(module):
    script = (
        f"import sys, types; sys.modules['grpc'] = {module}; "
        "from budgetguard_http import install, uninstall; "
        "install(watch_connections=True); uninstall()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
