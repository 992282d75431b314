"""What bills a model is judged, in each client's own calls, and at the price of its tier."""

from __future__ import annotations

import json
from decimal import Decimal

import httpx
import httpx2
import litellm
import ollama
import openai
import pytest
from google import genai

from budgetguard_core import Budget
from budgetguard_http import AsyncBudgetTransport, BudgetTransport, bounded_clients
from budgetguard_http._policy import bills

DOLLARS = Budget(max_cost_usd=1, loop_detection=None)
TURNS = [{"role": "user", "content": "go"}]
USAGE = {"prompt_tokens": 1_000, "completion_tokens": 1_000, "total_tokens": 2_000}


def bounded(answer, budget=DOLLARS, mod=httpx2):
    """A client whose provider always answers the same, its transport, and what was posted."""
    posted = []

    def answered(request):
        posted.append(request)
        if isinstance(answer, bytes):
            kind = STREAM if "/api/" in request.url.path else "text/event-stream"
            return mod.Response(200, headers={"content-type": kind}, content=answer)
        return mod.Response(200, json=answer)

    transport = BudgetTransport(budget, mod.MockTransport(answered))
    return mod.Client(transport=transport), transport, posted


STREAM = "application/x-ndjson"
FREE = {
    "vector store": lambda client: client.vector_stores.create(name="docs"),
    "container": lambda client: client.containers.create(name="box"),
    "thread": lambda client: client.post("/threads", body={}, cast_to=object),
    "conversation": lambda client: client.conversations.create(),
    "client secret": lambda client: client.realtime.client_secrets.create(),
    "file": lambda client: client.files.create(file=b"{}", purpose="batch"),
    "moderation": lambda client: client.moderations.create(input="hello"),
    "eval": lambda client: client.post("/evals", body={"name": "e"}, cast_to=object),
}


@pytest.mark.parametrize("ask", FREE.values(), ids=FREE)
def test_what_bills_no_model_passes_under_a_cap_in_dollars(ask):
    http, transport, posted = bounded({"id": "x", "results": []})
    with openai.OpenAI(api_key="k", http_client=http) as client:
        ask(client)
        http.post("https://api.openai.com/v1/chat/completions", json={"model": "gpt-4o"})
    assert len(posted) == 1 + (transport.outcome.usage.model_calls > 0)
    assert posted[0].method == "POST"
    assert "completions" not in str(posted[0].url)


@pytest.mark.parametrize(
    ("path", "billed"),
    [
        ("/v1/images/generations", True),
        ("/v1/batches", True),
        ("/v1/batches/batch_1/cancel", False),
        ("/v1/messages/batches", True),
        ("/v1/messages/count_tokens", False),
        ("/v1/threads/t_1/runs", True),
        ("/v1/threads/t_1/messages", False),
        ("/v1/audio/speech", True),
        ("/v1/realtime/transcription_sessions", False),
        ("/v1beta/models/gemini-2.5-flash:countTokens", False),
        ("/v1beta/cachedContents", False),
        ("/v1beta/models/veo-3:predictLongRunning", True),
        ("/model/amazon.nova-pro-v1:0/invoke", True),
        ("/model/amazon.nova-pro-v1:0/count-tokens", False),
    ],
)
def test_the_addresses_that_bill_a_model(path, billed):
    assert bills("api.openai.com", path) is billed


def test_a_transcription_has_the_price_of_its_model():
    usage = {"type": "tokens", "input_tokens": 100, "output_tokens": 10, "total_tokens": 110}
    http, transport, _ = bounded({"text": "hello", "usage": usage})
    with openai.OpenAI(api_key="k", http_client=http) as client:
        ask = {"model": "gpt-4o-transcribe", "file": ("a.wav", b"RIFF" * 9_000)}
        client.audio.transcriptions.create(**ask)
    used = transport.outcome.usage
    assert (used.model_calls, used.total_tokens, used.unpriced_calls) == (1, 110, 0)


@pytest.mark.parametrize("contents", ["hello", ["hello", "world"]], ids=["one", "two"])
def test_embeddings_of_gemini_are_counted(contents):
    embedding = {"values": [0.1]}
    answer = {"embedding": embedding, "embeddings": [embedding, embedding]}
    http, transport, _ = bounded(answer, mod=httpx)
    client = genai.Client(api_key="k", http_options={"httpx_client": http})
    client.models.embed_content(model="gemini-embedding-001", contents=contents)
    http.close()
    used = transport.outcome.usage
    assert (used.model_calls, used.iterations, used.estimated_calls) == (1, 0, 1)
    assert used.total_tokens > 0
    assert used.cost_usd > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_legacy_completions_through_a_gateway_are_counted(stream):
    choice = {"index": 0, "text": "hi", "finish_reason": "stop"}
    whole = {"id": "c", "object": "text_completion", "choices": [choice], "usage": USAGE}
    lines = f"data: {json.dumps(whole)}\n\ndata: [DONE]\n\n".encode()
    http, transport, posted = bounded(lines if stream else whole, Budget(max_iterations=1))
    with openai.OpenAI(api_key="k", base_url="http://gateway/v1", http_client=http) as client:
        ask = {"model": "gpt-3.5-turbo-instruct", "prompt": "go", "stream": stream}
        texts = []
        for _ in range(2):
            made = client.completions.create(**ask)
            texts.append("".join(one.choices[0].text for one in ([*made] if stream else [made])))
    assert texts[0] == "hi"
    assert texts[1].startswith("This run was stopped")
    used = transport.outcome.usage
    assert (len(posted), used.total_tokens, used.estimated_calls) == (1, 2_000, 0)


OLLAMA = {"model": "qwen3", "done": True, "done_reason": "stop"}
OLLAMA |= {"prompt_eval_count": 100, "eval_count": 10, "created_at": "2026-01-01T00:00:00Z"}
CALL = {"function": {"name": "read_file", "arguments": {"path": "a"}}}


def of_ollama(kind, *, calls=()):
    said = {"response": "hi"}
    if kind == "chat":
        said = {"message": {"role": "assistant", "content": "hi", "tool_calls": list(calls)}}
    return {**OLLAMA, **said}


@pytest.fixture
def ollama_server(httpserver):
    """Ollama on loopback: whole, or a stream of lines."""
    from werkzeug import Response

    def answer(request):
        kind = "chat" if request.path == "/api/chat" else "generate"
        if request.path == "/api/show":
            return Response("{}", content_type="application/json")
        whole = of_ollama(kind)
        begun = {**whole, "done": False}
        del begun["prompt_eval_count"], begun["eval_count"]
        ended = {**whole, "response": "", "message": {"role": "assistant", "content": ""}}
        is_streamed = json.loads(request.data).get("stream") is not False
        lines = [begun, ended] if is_streamed else [whole]
        text = "".join(json.dumps(one) + "\n" for one in lines)
        kind = STREAM if is_streamed else "application/json"
        return Response(text, content_type=kind)

    for path in ("/api/chat", "/api/generate", "/api/show"):
        httpserver.expect_request(path).respond_with_handler(answer)
    return httpserver.url_for("").rstrip("/")


def native(url, stream):
    made = ollama.Client(url).chat(model="qwen3", messages=TURNS, stream=stream)
    return "".join(one.message.content for one in (made if stream else [made]))


def generate(url, stream):
    made = ollama.Client(url).generate(model="qwen3", prompt="go", stream=stream)
    return "".join(one.response for one in (made if stream else [made]))


def lite(name):
    def ask(url, stream):
        made = litellm.completion(model=name, messages=TURNS, api_base=url, stream=stream)
        if stream:
            return "".join(one.choices[0].delta.content or "" for one in made)
        return made.choices[0].message.content

    return ask


OF_OLLAMA = {
    "chat": native,
    "generate": generate,
    "litellm, ollama/": lite("ollama/qwen3"),
    "litellm, ollama_chat/": lite("ollama_chat/qwen3"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", OF_OLLAMA.values(), ids=OF_OLLAMA)
def test_ollama_is_counted_and_stopped_in_its_own_format(ollama_server, ask, stream):
    with bounded_clients(Budget(max_iterations=1)) as block:
        texts = [ask(ollama_server, stream) for _ in range(2)]
    assert texts[0] == "hi"
    assert texts[1].startswith("This run was stopped")
    used = block.outcome.usage
    assert (used.model_calls, used.total_tokens, used.estimated_calls) == (1, 110, 0)


def test_tool_calls_of_ollama_are_counted_and_their_results_found():
    http, transport, _ = bounded(of_ollama("chat", calls=[CALL]), Budget(), mod=httpx)
    turns = list(TURNS)
    with http:
        for _ in range(3):
            ask = {"model": "qwen3", "messages": turns, "stream": False}
            reply = http.post("http://localhost:11434/api/chat", json=ask).json()["message"]
            turns += [reply, {"role": "tool", "tool_name": "read_file", "content": "nothing"}]
    calls = transport.outcome.tool_calls
    assert [one.status for one in calls][:2] == ["completed", "completed"]
    assert transport.outcome.usage.tool_calls == 3


@pytest.mark.parametrize(
    ("asked", "told", "cost"),
    [
        ({}, {}, "0.0125"),
        ({"service_tier": "auto"}, {"service_tier": "default"}, "0.0125"),
        ({"service_tier": "flex"}, {"service_tier": "flex"}, "0.00625"),
        ({"service_tier": "flex"}, {"service_tier": "default"}, "0.0125"),
        ({"service_tier": "priority"}, {}, "0.025"),
        ({"service_tier": "auto"}, {"service_tier": "priority"}, "0.025"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tier_of_service_has_its_factor(asked, told, cost, stream):
    message = {"role": "assistant", "content": "hi"}
    choice = {"index": 0, "message": message, "delta": message, "finish_reason": "stop"}
    whole = {"id": "c", "choices": [choice], "model": "gpt-4o", "usage": USAGE, **told}
    lines = f"data: {json.dumps(whole)}\n\ndata: [DONE]\n\n".encode()
    http, transport, _ = bounded(lines if stream else whole)
    with openai.OpenAI(api_key="k", http_client=http) as client:
        made = client.chat.completions.create(
            model="gpt-4o", messages=TURNS, stream=stream, **asked
        )
        assert [*made] if stream else made
    assert transport.outcome.usage.cost_usd == Decimal(cost)


def test_priority_is_stopped_at_its_own_price():
    message = {"role": "assistant", "content": "hi"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    whole = {"id": "c", "choices": [choice], "usage": USAGE, "service_tier": "priority"}
    http, transport, posted = bounded(whole, Budget(max_cost_usd=0.05, loop_detection=None))
    with openai.OpenAI(api_key="k", http_client=http) as client:
        for _ in range(9):
            ask = {"model": "gpt-4o", "messages": TURNS, "max_tokens": 1_000}
            client.chat.completions.create(**ask, service_tier="priority")
    assert transport.outcome.usage.cost_usd <= Decimal("0.05")
    assert len(posted) <= 2


@pytest.mark.parametrize(
    "asked", [{"service_tier": "scale"}, {"speed": "fast"}, {"inference_geo": "eu"}]
)
def test_a_tier_whose_factor_is_not_known_has_no_price(asked):
    http, transport, posted = bounded({})
    with http:
        ask = {"model": "claude-sonnet-5", "max_tokens": 9, "messages": TURNS, **asked}
        http.post("https://api.anthropic.com/v1/messages", json=ask)
    assert (transport.outcome.stop_reason, posted) == ("unpriced_model", [])


PIECES = [b"one", b"two", b"three"]


class Speech(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """Speech that notes what was asked of it."""

    def __init__(self):
        self.sent = []

    def __iter__(self):
        for piece in PIECES:
            self.sent.append(piece)
            yield piece

    async def __aiter__(self):
        for piece in self:
            yield piece


ASK = {"model": "gpt-4o-mini-tts", "voice": "alloy", "input": "hello"}


def spoken(speech):
    return lambda _: httpx2.Response(200, headers={"content-type": "audio/mpeg"}, stream=speech)


def test_speech_passes_as_it_comes():
    speech = Speech()
    transport = BudgetTransport(DOLLARS, httpx2.MockTransport(spoken(speech)))
    http = httpx2.Client(transport=transport)
    with openai.OpenAI(api_key="k", http_client=http) as client:
        with client.audio.speech.with_streaming_response.create(**ASK) as reply:
            for number, piece in enumerate(reply.iter_bytes(), 1):
                assert (piece, len(speech.sent)) == (PIECES[number - 1], number)
        whole = client.audio.speech.create(**ASK)
    assert whole.content == b"onetwothree"
    usage = transport.outcome.usage
    assert (usage.model_calls, usage.reserved_tokens, number) == (2, 0, 3)


async def test_speech_passes_as_it_comes_on_a_loop():
    speech = Speech()
    transport = AsyncBudgetTransport(DOLLARS, httpx2.MockTransport(spoken(speech)))
    http = httpx2.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(api_key="k", http_client=http) as client:
        async with client.audio.speech.with_streaming_response.create(**ASK) as reply:
            async for piece in reply.iter_bytes():
                assert piece == speech.sent[-1]
    assert (transport.outcome.usage.model_calls, speech.sent) == (1, PIECES)
