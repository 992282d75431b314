"""Connections to providers that go past the seam are seen, those through it are not."""

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
