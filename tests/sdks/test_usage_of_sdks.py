"""Usage out of the real types of the SDKs, made from what their servers send."""

from __future__ import annotations

import pytest

from budgetguard_core.kit import TokenUsage
from budgetguard_core.kit.usage import merge_usage, reported_cost, token_usage
from budgetguard_core.usage import check_token_usage

CHAT_USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "total_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 10},
    "completion_tokens_details": {"reasoning_tokens": 15},
}
CHAT = TokenUsage(100, 20, 60, 10, reasoning_tokens=15)


def read(record):
    usage = token_usage(record)
    if usage is not None:
        check_token_usage(usage)
    return usage


def test_openai_chat_completions():
    from openai.types import CreateEmbeddingResponse
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    whole = {"id": "c", "created": 1, "model": "gpt-5", "usage": CHAT_USAGE, "choices": []}

    assert read(ChatCompletion(object="chat.completion", **whole)) == CHAT
    assert read(ChatCompletion.construct(object="chat.completion", **whole)) == CHAT
    assert read(ChatCompletionChunk(object="chat.completion.chunk", **whole)) == CHAT
    without = ChatCompletionChunk(object="chat.completion.chunk", **{**whole, "usage": None})
    assert read(without) is None
    billed = ChatCompletion.construct(**{**whole, "usage": {**CHAT_USAGE, "cost": 0.25}})
    assert str(reported_cost(billed)) == "0.25"
    embedding = {"data": [], "model": "e", "object": "list"}
    sizes = {"prompt_tokens": 8, "total_tokens": 8}
    assert read(CreateEmbeddingResponse(**embedding, usage=sizes)) == TokenUsage(8, 0)


def test_openai_responses():
    from openai.types.responses import Response, ResponseCompletedEvent

    response = Response.construct(
        id="r",
        usage={
            "input_tokens": 100,
            "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 10},
            "output_tokens": 20,
            "output_tokens_details": {"reasoning_tokens": 15},
            "total_tokens": 120,
        },
    )
    event = ResponseCompletedEvent.construct(response=response, type="response.completed")

    assert read(response) == CHAT
    assert read(event) == CHAT


def test_anthropic():
    from anthropic.types import Message, RawMessageDeltaEvent, RawMessageStartEvent
    from anthropic.types.beta import BetaMessage

    usage = {
        "input_tokens": 30,
        "cache_read_input_tokens": 60,
        "cache_creation_input_tokens": 10,
        "cache_creation": {"ephemeral_1h_input_tokens": 4, "ephemeral_5m_input_tokens": 6},
        "output_tokens": 20,
        "output_tokens_details": {"thinking_tokens": 15},
    }
    message = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    whole = TokenUsage(100, 20, 60, 10, 4, 15)

    assert read(Message.model_validate({**message, "usage": usage})) == whole
    steps = [
        {**usage, "type": "compaction", "input_tokens": 9_000, "output_tokens": 300},
        {**usage, "type": "message"},
    ]
    compacted = BetaMessage.construct(**message, usage={**usage, "iterations": steps})
    assert read(compacted) == TokenUsage(9_170, 320, 120, 20, 8, 30)

    first = Message.model_validate({**message, "usage": {**usage, "output_tokens": 1}})
    start = RawMessageStartEvent(type="message_start", message=first)
    end = RawMessageDeltaEvent.model_validate(
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 20},
        }
    )
    assert read(end) == TokenUsage(0, 20, estimated=True)
    assert merge_usage(read(start), read(end)) == whole


def test_google_genai():
    from google.genai.types import GenerateContentResponse, LiveServerMessage

    usage = {
        "promptTokenCount": 90,
        "cachedContentTokenCount": 60,
        "toolUsePromptTokenCount": 10,
        "thoughtsTokenCount": 15,
        "totalTokenCount": 120,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 90}],
    }
    spoken = {"usageMetadata": {**usage, "candidatesTokenCount": 5}}
    live = {"usageMetadata": {**usage, "responseTokenCount": 5}}
    whole = TokenUsage(100, 20, 60, reasoning_tokens=15)

    assert read(GenerateContentResponse.model_validate(spoken)) == whole
    assert read(LiveServerMessage.model_validate(live)) == whole
    assert read(spoken) == whole
    assert read(GenerateContentResponse()) is None


def test_mistralai():
    from mistralai.client.models import ChatCompletionResponse, CompletionEvent

    whole = {"id": "c", "object": "o", "model": "m", "created": 1, "choices": []}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}

    response = ChatCompletionResponse.model_validate({**whole, "usage": usage})
    assert read(response) == TokenUsage(100, 20)
    event = CompletionEvent.model_validate({"data": {**whole, "usage": usage}})
    assert read(event) == TokenUsage(100, 20)
    cached = {**usage, "prompt_tokens_details": {"cached_tokens": 64}}
    response = ChatCompletionResponse.model_validate({**whole, "usage": cached})
    assert read(response) == TokenUsage(100, 20, cache_read_tokens=64)


def test_cohere():
    from cohere import NonStreamedChatResponse
    from cohere.v2.types import V2ChatResponse
    from cohere.v2.types.v2chat_stream_response import MessageEndV2ChatStreamResponse

    usage = {
        "billed_units": {"input_tokens": 5.0, "output_tokens": 7.0},
        "tokens": {"input_tokens": 100.0, "output_tokens": 20.0},
        "cached_tokens": 64.0,
    }
    whole = TokenUsage(100, 20, cache_read_tokens=64)

    response = V2ChatResponse.construct(id="c", usage=usage)
    assert read(response) == whole
    end = MessageEndV2ChatStreamResponse.construct(id="c", delta={"usage": usage})
    assert read(end) == whole
    assert read(NonStreamedChatResponse.construct(text="Hi", meta=usage)) == whole


def test_ollama():
    from ollama import ChatResponse, EmbedResponse, GenerateResponse

    counts = {"prompt_eval_count": 100, "eval_count": 20, "done": True}
    message = {"role": "assistant", "content": "Hi"}

    assert read(ChatResponse(message=message, **counts)) == TokenUsage(100, 20)
    assert read(ChatResponse(message=message, done=False)) is None
    assert read(GenerateResponse(response="Hi", **counts)) == TokenUsage(100, 20)
    embedded = read(EmbedResponse(embeddings=[], prompt_eval_count=100))
    assert embedded == TokenUsage(100, 0, estimated=True)


def test_litellm(monkeypatch):
    # Without it the package asks the network for prices when it is imported.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from litellm.types.utils import ModelResponse, ModelResponseStream, Usage

    usage = Usage(
        prompt_tokens=100,
        completion_tokens=20,
        total_tokens=120,
        reasoning_tokens=15,
        cache_read_input_tokens=60,
        cache_creation_input_tokens=10,
    )
    response = ModelResponse(usage=usage)

    assert read(response) == CHAT
    assert read(response.model_dump()) == CHAT
    assert read(ModelResponseStream(usage=usage)) == CHAT
    response._hidden_params["response_cost"] = 2.25e-05
    assert str(reported_cost(response)) == "0.0000225"


def test_langchain():
    from langchain_core.messages import AIMessage, AIMessageChunk
    from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult

    metadata = {
        "input_tokens": 100,
        "output_tokens": 20,
        "total_tokens": 120,
        "input_token_details": {"cache_read": 60, "cache_creation": 10},
        "output_token_details": {"reasoning": 15},
    }
    message = AIMessage("Hi", usage_metadata=metadata)
    answers = [ChatGeneration(message=message)]

    assert read(message) == CHAT
    assert read(AIMessageChunk("Hi", usage_metadata=metadata)) == CHAT
    assert read(ChatResult(generations=answers)) == CHAT
    assert read(LLMResult(generations=[answers])) == CHAT
    assert read(AIMessage("Hi")) is None
    assert read(AIMessage("Hi", response_metadata={"token_usage": CHAT_USAGE})) == CHAT
    of_text = LLMResult(
        generations=[[Generation(text="Hi")]], llm_output={"token_usage": CHAT_USAGE}
    )
    assert read(of_text) == CHAT
    again = AIMessage("Hi", usage_metadata={**metadata, "total_cost": 0})
    assert read(again) == TokenUsage()
    assert reported_cost(LLMResult(generations=[[ChatGeneration(message=again)]])) == 0


def test_openai_agents():
    from agents import ModelResponse, Usage
    from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

    usage = Usage(
        requests=1,
        input_tokens=100,
        input_tokens_details=InputTokensDetails(cached_tokens=60, cache_write_tokens=10),
        output_tokens=20,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=15),
        total_tokens=120,
    )

    assert read(usage) == CHAT
    assert read(ModelResponse(output=[], usage=usage, response_id=None)) == CHAT
    assert read(Usage(requests=1)) is None
    usage.input_tokens_details.cached_tokens = 400
    assert read(usage) == TokenUsage(410, 20, 400, 10, reasoning_tokens=15)


@pytest.mark.parametrize("inside", [True, False])
def test_strands(inside):
    from strands.types.event_loop import Usage

    usage = Usage(inputTokens=100, outputTokens=20, totalTokens=120 if inside else 190)
    usage["cacheReadInputTokens"], usage["cacheWriteInputTokens"] = 60, 10
    prompt = 100 if inside else 170

    assert read(usage) == TokenUsage(prompt, 20, 60, 10)
    assert read({"event": {"metadata": {"usage": usage}}}) == TokenUsage(prompt, 20, 60, 10)
    assert read({"role": "assistant", "metadata": {"usage": usage}}) == TokenUsage(
        prompt, 20, 60, 10
    )
    assert read(Usage(inputTokens=0, outputTokens=0, totalTokens=0)) is None


def test_bedrock_converse():
    """As botocore parses the answer of the service: plain data, by the shapes that it ships."""
    import botocore.session
    from botocore.parsers import create_parser

    bedrock = botocore.session.get_session().get_service_model("bedrock-runtime")
    body = (
        b'{"output": {"message": {"role": "assistant", "content": [{"text": "Hi"}]}},'
        b'"stopReason": "end_turn", "metrics": {"latencyMs": 9}, "usage": {'
        b'"inputTokens": 30, "outputTokens": 20, "totalTokens": 120, "cacheReadInputTokens": 60,'
        b'"cacheWriteInputTokens": 10, "cacheDetails": [{"ttl": "1h", "inputTokens": 4}]}}'
    )
    response = create_parser("rest-json").parse(
        {"status_code": 200, "headers": {}, "body": body},
        bedrock.operation_model("Converse").output_shape,
    )

    assert read(response) == TokenUsage(100, 20, 60, 10, 4)
