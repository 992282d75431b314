"""What a failed call is charged: nothing where it was turned away, else the prompt and the text."""

from __future__ import annotations

import asyncio
import enum
import socket

import anthropic
import httpx
import openai
import pytest
from botocore.exceptions import ClientError, EventStreamError, ReadTimeoutError

from budgetguard_core.kit import TokenUsage, estimate_tokens
from budgetguard_core.kit.failed_calls import failed_usage, turned_away
from budgetguard_core.usage import check_token_usage

REQUEST = httpx.Request("POST", "http://localhost/v1/chat/completions")


def answer(status):
    return httpx.Response(status, request=REQUEST)


def of_openai(status):
    made_by = {400: openai.BadRequestError, 429: openai.RateLimitError}
    return made_by.get(status, openai.APIStatusError)("no", response=answer(status), body=None)


def of_anthropic(status):
    return anthropic.APIStatusError("no", response=answer(status), body=None)


def of_google(status):
    from google.genai.errors import APIError

    return APIError(status, {"error": {"code": status, "status": "NO", "message": "no"}})


def of_mistral(status):
    from mistralai.client.errors import SDKError

    return SDKError("no", answer(status))


def of_cohere(status):
    from cohere.core.api_error import ApiError

    return ApiError(status_code=status, body="no")


def of_ollama(status):
    from ollama import ResponseError

    return ResponseError("no", status)


def of_botocore(status):
    response = {"Error": {"Code": "No"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "Converse")


def of_httpx(status):
    return httpx.HTTPStatusError("no", request=REQUEST, response=answer(status))


SDKS = [
    of_openai,
    of_anthropic,
    of_google,
    of_mistral,
    of_cohere,
    of_ollama,
    of_botocore,
    of_httpx,
]


@pytest.mark.parametrize("made_by", SDKS)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429])
def test_a_call_that_is_turned_away_used_nothing(made_by, status):
    error = made_by(status)

    assert turned_away(error)
    assert failed_usage(error, projected_input=5_000) == TokenUsage()


@pytest.mark.parametrize("made_by", SDKS)
@pytest.mark.parametrize("status", [408, 424, 499, 500, 503, 529])
def test_a_call_that_was_begun_is_charged_its_prompt(made_by, status):
    error = made_by(status)

    assert not turned_away(error)
    assert failed_usage(error, projected_input=5_000) == TokenUsage(5_000, estimated=True)


@pytest.mark.parametrize(
    "error",
    [
        openai.APITimeoutError(REQUEST),
        openai.APIConnectionError(request=REQUEST),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("gone"),
        ReadTimeoutError(endpoint_url="http://localhost"),
        ConnectionResetError(),
        TimeoutError(),
        asyncio.CancelledError(),
        GeneratorExit(),
        KeyboardInterrupt(),
        RuntimeError("Error code: 429 - rate limit"),
        "429 Too Many Requests",
        None,
    ],
    ids=repr,
)
def test_a_call_that_was_broken_off_is_charged_its_prompt(error):
    assert not turned_away(error)
    assert failed_usage(error, projected_input=70) == TokenUsage(70, estimated=True)


def test_what_was_streamed_is_charged_too():
    written = "The first half of a long answer"

    usage = failed_usage(ConnectionResetError(), projected_input=70, written=written)

    assert usage == TokenUsage(70, estimate_tokens(written), estimated=True)


def test_what_the_stream_had_reported_is_better_than_the_projection():
    reported = TokenUsage(100, 1, cache_read_tokens=90)

    usage = failed_usage(
        TimeoutError(), projected_input=500, written="text " * 9, reported=reported
    )

    assert usage == TokenUsage(100, estimate_tokens("text " * 9), 90, estimated=True)
    check_token_usage(usage)
    half = failed_usage(TimeoutError(), projected_input=500, reported=TokenUsage(0, 9))
    assert half == TokenUsage(500, 9, estimated=True)


def test_after_the_first_words_no_call_is_turned_away():
    error = of_openai(429)

    assert failed_usage(error, projected_input=70, written="The") != TokenUsage()
    reported = TokenUsage(80, 1)
    assert failed_usage(error, projected_input=70, reported=reported) == TokenUsage(
        80, 1, estimated=True
    )


def test_where_nothing_is_known_the_reservation_stands():
    assert failed_usage(TimeoutError(), projected_input=0) is None


@pytest.mark.parametrize("error", [ConnectionRefusedError(), socket.gaierror()], ids=repr)
def test_a_call_that_reached_nobody_is_turned_away(error):
    wrapped = openai.APIConnectionError(request=REQUEST)
    wrapped.__cause__ = httpx.ConnectError("no")
    wrapped.__cause__.__cause__ = error

    assert turned_away(error)
    assert turned_away(wrapped)


def test_the_status_is_found_on_what_an_error_was_raised_from():
    wrapped = RuntimeError("the model said no")
    wrapped.__cause__ = of_botocore(429)
    again = RuntimeError("again")
    again.__cause__ = wrapped

    assert turned_away(again)


def test_the_outermost_status_decides():
    error = of_openai(500)
    error.__cause__ = of_openai(429)
    assert not turned_away(error)


def test_errors_that_are_raised_from_each_other_end():
    one, other = RuntimeError(), RuntimeError()
    one.__cause__, other.__cause__ = other, one
    assert not turned_away(one)


def test_an_error_within_a_stream_of_bedrock_is_not_turned_away():
    import botocore.session
    from botocore.eventstream import EventStreamMessage
    from botocore.parsers import EventStreamJSONParser

    bedrock = botocore.session.get_session().get_service_model("bedrock-runtime")
    shape = bedrock.operation_model("ConverseStream").get_event_stream_output()
    event = EventStreamMessage(
        prelude=None,
        headers={":message-type": "exception", ":exception-type": "throttlingException"},
        payload=b'{"message": "too many"}',
        crc=0,
    )
    response = EventStreamJSONParser().parse(event.to_response_dict(), shape)
    error = EventStreamError(response, "ConverseStream")

    assert not turned_away(error)


def test_an_error_within_a_stream_of_litellm_is_not_turned_away(monkeypatch):
    # Without it the package asks the network for prices when it is imported.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from litellm.exceptions import MidStreamFallbackError, RateLimitError

    about = {"model": "gpt-5", "llm_provider": "openai"}
    limit = RateLimitError("no", **about)

    def passed_on(*, first):
        return MidStreamFallbackError(
            "no", **about, original_exception=limit, is_pre_first_chunk=first
        )

    assert turned_away(limit)
    assert turned_away(passed_on(first=True))
    assert not turned_away(passed_on(first=False))


class Code(enum.Enum):
    RESOURCE_EXHAUSTED = (8, "resource exhausted")
    UNAVAILABLE = (14, "unavailable")


class OfGrpc(Exception):
    """An error has the shape of grpc's: `code()` returns a member of an enumeration."""

    def __init__(self, code):
        self.code = code


def test_codes_of_grpc_are_read():
    assert turned_away(OfGrpc(lambda: Code.RESOURCE_EXHAUSTED))
    assert not turned_away(OfGrpc(lambda: Code.UNAVAILABLE))
    assert not turned_away(OfGrpc(lambda: None))
    assert not turned_away(OfGrpc(lambda required: None))


@pytest.mark.parametrize("code", [True, 0, 4290, "429", None, 42.9])
def test_what_is_no_status_is_none(code):
    assert not turned_away(OfGrpc(code))
