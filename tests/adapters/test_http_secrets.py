"""Keys in headers and addresses reach no log, event, outcome or file, and no error of ours."""

from __future__ import annotations

import logging
import traceback

import httpx
import httpx2
import pytest

from budgetguard_core import Budget, BudgetExceeded
from budgetguard_core.kit import outcome_of
from budgetguard_http import AsyncBudgetTransport, BudgetTransport, CallRefused, bounded_clients
from budgetguard_http._payload import read_payload
from budgetguard_http._policy import Policy
from provider_server import ProviderServer

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SECRET = "sk-very-secret"
HEADERS = {
    "authorization": f"Bearer {SECRET}",
    "x-api-key": SECRET,
    "api-key": SECRET,
    "x-goog-api-key": SECRET,
    "cookie": f"session={SECRET}",
}
CHAT = {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}]}
GEMINI = {"contents": [{"role": "user", "parts": [{"text": "go"}]}]}
REQUESTS = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat, streamed": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "Responses": ("/v1/responses", {"model": "gpt-4o", "input": "go", "stream": True}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 9, "stream": True}),
    "Gemini": ("/v1beta/models/g:generateContent", GEMINI),
    "Gemini, streamed": ("/v1beta/models/g:streamGenerateContent", GEMINI),
    "Converse": ("/model/m/converse", {"messages": GEMINI["contents"]}),
    "embeddings": ("/v1/embeddings", {"model": "e", "input": "go"}),
}
BOTH = pytest.mark.parametrize("mod", [httpx, httpx2], ids=["httpx", "httpx2"])


class Heard:
    """Everything that was said of a run."""

    def __init__(self, caplog):
        # Of httpx's own loggers a user decides: they write addresses without our help.
        caplog.set_level(logging.DEBUG, logger="budgetguard")
        caplog.set_level(logging.DEBUG, logger="budgetguard_core")
        self.caplog, self.events, self.texts = caplog, [], []
        self.saved = []

    def options(self):
        return {"sinks": [self.events.append], "on_outcome": self.outcome}

    def outcome(self, outcome):
        self.texts.append(repr(outcome))

    def check(self, *more):
        logged = [one.getMessage() for one in self.caplog.records if "budgetguard" in one.name]
        assert self.events
        assert SECRET not in " ".join([*map(repr, self.events), *self.texts, *logged, *more])


def post(mod, url, path, body, **options):
    with mod.Client(headers=HEADERS, follow_redirects=True, **options) as client:
        return client.post(f"{url}{path}?key={SECRET}&alt=sse", json=body)


@pytest.mark.sample(13)
@BOTH
@pytest.mark.parametrize("step", ["ok", 401, 429, 500, "drop", "cut"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_whatever_becomes_of_a_call(mod, kind, step, caplog):
    heard, (path, body) = Heard(caplog), REQUESTS[kind]
    with ProviderServer([step, "ok"]) as server:
        with bounded_clients(Budget(max_model_calls=2), **heard.options()):
            for _ in range(3):  # the last one is refused
                try:
                    reply = post(mod, server.url, path, body)
                    heard.texts.append(f"{reply.text} {reply.headers}")
                except mod.HTTPError as error:
                    # The transport's own error, which we add nothing to.
                    heard.texts.append(str(error))
    heard.check()


@BOTH
def test_a_key_that_the_transport_quotes_in_its_error(mod, caplog):
    """A key with a line's end in it, as read from a file, is in the error of httpx itself."""
    heard = Heard(caplog)
    headers = {"authorization": f"Bearer {SECRET}\n"}
    with ProviderServer() as server:
        with pytest.raises(mod.LocalProtocolError) as raised:
            with bounded_clients(Budget(), **heard.options()) as block:
                mod.post(server.url + "/v1/chat/completions", json=CHAT, headers=headers)
    # The transport's own words, with the key taken out of them.
    assert "header value b'[hidden]" in str(raised.value)
    link = raised.value
    while link is not None:
        assert SECRET not in str(link)
        link = link.__cause__ or link.__context__
    assert block.outcome.usage.failed_calls == 1
    heard.check(repr(outcome_of(raised.value)), *map(repr, block.outcome.errors))


@BOTH
def test_a_provider_that_quotes_the_key(mod, caplog):
    heard = Heard(caplog)
    quoted = {"error": {"message": f"Incorrect API key provided: {SECRET}"}}
    inner = mod.MockTransport(lambda _: mod.Response(401, json=quoted))
    transport = BudgetTransport(Budget(), inner, **heard.options())
    post(mod, "http://provider", *REQUESTS["chat"], transport=transport)
    heard.check()


@pytest.mark.sample(4)
@BOTH
@pytest.mark.parametrize("content", [b"\xff not JSON", b"[]", b'{"choices": 7, "usage": "x"}'])
def test_an_answer_that_nobody_understands(mod, content, caplog):
    heard = Heard(caplog)
    for kind in REQUESTS.values():
        inner = mod.MockTransport(lambda _: mod.Response(200, content=content))
        transport = BudgetTransport(Budget(), inner, **heard.options())
        assert post(mod, "http://provider", *kind, transport=transport).content == content
    heard.check()


@pytest.mark.sample(4)
@BOTH
@pytest.mark.parametrize("end", ["deadline", "raise"])
def test_errors_of_our_own(mod, end, caplog):
    heard = Heard(caplog)
    with ProviderServer(["hang"] if end == "deadline" else []) as server:
        budget = Budget(max_seconds=0.3) if end == "deadline" else Budget(max_model_calls=1)
        with pytest.raises(BudgetExceeded) as raised:
            with bounded_clients(budget, on_trip="raise", **heard.options()):
                for _ in range(2):
                    post(mod, server.url, *REQUESTS["Gemini"])
    told = traceback.TracebackException.from_exception(raised.value)
    heard.check(str(raised.value), str(told), repr(raised.value.outcome))
    assert not isinstance(raised.value, CallRefused)


async def test_a_cancelled_call(caplog):
    import asyncio

    heard = Heard(caplog)
    with ProviderServer(["hang"]) as server:
        transport = AsyncBudgetTransport(Budget(), **heard.options())
        async with httpx2.AsyncClient(transport=transport, headers=HEADERS) as client:
            path, body = REQUESTS["Gemini"]
            work = client.post(f"{server.url}{path}?key={SECRET}", json=body)
            task = asyncio.ensure_future(work)
            await asyncio.to_thread(server.asked.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    heard.check()


def test_what_was_read_of_a_request_shows_nothing_of_it():
    secret = {**CHAT, "messages": [{"role": "user", "content": SECRET}]}
    raw = httpx.Request("POST", "http://x", json=secret).content
    posted = read_payload("x", "/v1/chat/completions", HEADERS, raw, Policy())
    assert SECRET not in repr(posted)
