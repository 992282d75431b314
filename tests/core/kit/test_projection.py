"""Sizes of prompts: what counts, what does not, and each message only once."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from budgetguard_core.kit import TokenUsage, estimate_tokens, projection
from budgetguard_core.kit.media import AUDIO_TOKENS, FILE_TOKENS, IMAGE_TOKENS, VIDEO_TOKENS
from budgetguard_core.kit.projection import Prompt, estimate, estimate_schema, project

RAW = bytes(range(256)) * 1_200
B64 = base64.b64encode(RAW).decode()
PNG = f"data:image/png;base64,{B64}"
PDF = f"data:application/pdf;base64,{B64}"

MEDIA = {
    "chat completions": (
        {"type": "image_url", "image_url": {"url": PNG, "detail": "high"}},
        IMAGE_TOKENS,
    ),
    "chat completions by address": (
        {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
        IMAGE_TOKENS,
    ),
    "chat completions, sound": (
        {"type": "input_audio", "input_audio": {"data": B64, "format": "wav"}},
        AUDIO_TOKENS,
    ),
    "chat completions, the sound of an answer": (
        {"role": "assistant", "audio": {"id": "audio_1", "data": B64, "transcript": "Hi"}},
        AUDIO_TOKENS,
    ),
    "chat completions, file": (
        {"type": "file", "file": {"filename": "a.pdf", "file_data": PDF}},
        FILE_TOKENS,
    ),
    "compatible servers, video": (
        {"type": "video_url", "video_url": {"url": "https://a/b"}},
        VIDEO_TOKENS,
    ),
    "Responses": ({"type": "input_image", "image_url": PNG, "detail": "auto"}, IMAGE_TOKENS),
    "Responses, file": ({"type": "input_file", "filename": "a.pdf", "file_data": PDF}, FILE_TOKENS),
    "Responses, file by id": ({"type": "input_file", "file_id": "file_1"}, FILE_TOKENS),
    "Responses, screenshot": (
        {
            "type": "computer_call_output",
            "call_id": "call_1",
            "output": {"type": "computer_screenshot", "image_url": PNG},
        },
        IMAGE_TOKENS,
    ),
    "Responses, an image that the model made": (
        {"type": "image_generation_call", "id": "ig_1", "result": B64},
        IMAGE_TOKENS,
    ),
    "Anthropic": (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": B64}},
        IMAGE_TOKENS,
    ),
    "Anthropic, document": (
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": B64},
        },
        FILE_TOKENS,
    ),
    "Anthropic, a result of a tool": (
        {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": [{"type": "image", "source": {"type": "base64", "data": B64}}],
        },
        IMAGE_TOKENS,
    ),
    "Bedrock": ({"image": {"format": "png", "source": {"bytes": RAW}}}, IMAGE_TOKENS),
    "Bedrock, document": (
        {"document": {"format": "pdf", "name": "a", "source": {"bytes": RAW}}},
        FILE_TOKENS,
    ),
    "Bedrock, video": (
        {"video": {"format": "mp4", "source": {"s3Location": {"uri": "s3://a/b"}}}},
        VIDEO_TOKENS,
    ),
    "Bedrock, a result of a tool": (
        {
            "toolResult": {
                "toolUseId": "tooluse_1",
                "content": [{"image": {"format": "png", "source": {"bytes": RAW}}}],
                "status": "success",
            }
        },
        IMAGE_TOKENS,
    ),
    "Gemini": ({"inlineData": {"mimeType": "image/png", "data": B64}}, IMAGE_TOKENS),
    "Gemini, sound": ({"inline_data": {"mime_type": "audio/wav", "data": RAW}}, AUDIO_TOKENS),
    "Gemini, file": ({"fileData": {"fileUri": "gs://a/b", "mimeType": "video/mp4"}}, VIDEO_TOKENS),
    "Gemini, of no kind": ({"inlineData": {"data": B64}}, FILE_TOKENS),
    "LangChain": ({"type": "image", "base64": B64, "mime_type": "image/png"}, IMAGE_TOKENS),
    "LangChain, before 1.0": (
        {"type": "image", "source_type": "base64", "data": B64, "mime_type": "image/png"},
        IMAGE_TOKENS,
    ),
    "LangChain for Gemini": (
        {"type": "media", "mime_type": "video/mp4", "data": B64},
        VIDEO_TOKENS,
    ),
    "LangChain, file": (
        {"type": "file", "base64": B64, "mime_type": "application/pdf"},
        FILE_TOKENS,
    ),
    "MCP": ({"type": "image", "data": B64, "mimeType": "image/png"}, IMAGE_TOKENS),
    "MCP, resource": (
        {"type": "resource", "resource": {"blob": B64, "mimeType": "application/pdf"}},
        FILE_TOKENS,
    ),
    "Pydantic AI": ({"kind": "image-url", "url": "https://example.org/cat.png"}, IMAGE_TOKENS),
    "Mistral": ({"type": "document_url", "document_url": PDF}, FILE_TOKENS),
    "Ollama": ({"role": "user", "images": [B64, RAW]}, 2 * IMAGE_TOKENS),
    "a data URL": (PNG, IMAGE_TOKENS),
    "a data URL of a file": (PDF, FILE_TOKENS),
    "bytes": (RAW, FILE_TOKENS),
    "a view of bytes": (memoryview(RAW), FILE_TOKENS),
}


@pytest.mark.parametrize(("block", "allowance"), MEDIA.values(), ids=MEDIA)
def test_media_count_as_one_of_their_kind(block, allowance):
    assert estimate(block) == allowance
    assert estimate([{"role": "user", "content": [block]}]) == allowance


@pytest.mark.slow
def test_media_of_the_sdks_count_as_one_of_their_kind():
    pytest.importorskip("google.genai", reason="comes with the dependency group `sdks`")
    from anthropic.types import ImageBlockParam
    from google.genai.types import Content, File, Part
    from langchain_core.messages import HumanMessage
    from mcp.types import ImageContent
    from ollama import Image, Message
    from strands.types.content import ContentBlock

    part = Part.from_bytes(data=RAW, mime_type="image/png")
    assert estimate(Content(role="user", parts=[part])) == IMAGE_TOKENS
    assert estimate(File(name="files/1", mime_type="video/mp4", uri="https://a/b")) == VIDEO_TOKENS
    assert estimate(HumanMessage([MEDIA["LangChain"][0]])) == IMAGE_TOKENS
    content = ImageContent(type="image", data=B64, mimeType="image/png")
    assert estimate([content]) == IMAGE_TOKENS
    assert estimate(Message(role="user", images=[Image(value=RAW)])) == IMAGE_TOKENS
    assert estimate(ContentBlock(**MEDIA["Bedrock"][0])) == IMAGE_TOKENS
    assert estimate(ImageBlockParam(**MEDIA["Anthropic"][0])) == IMAGE_TOKENS


def test_an_image_object_counts_as_one():
    # Gemini's SDK takes images of Pillow.
    image = type("Image", (), {"__module__": "PIL.Image"})()
    assert estimate(["What is this?", image]) == IMAGE_TOKENS + estimate_tokens("What is this?")


TEXT = "The harbour had been quiet since the morning ferry left. " * 40


@pytest.mark.parametrize(
    "block",
    [
        [TEXT],
        {"type": "text", "text": TEXT},
        {"text": TEXT},
        {"role": "user", "content": TEXT},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": TEXT}},
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "text", "text": TEXT}]},
        },
        {"document": {"format": "txt", "source": {"text": TEXT}}},
        {"document": {"format": "txt", "source": {"content": [{"text": TEXT}]}}},
        {"type": "document", "document": {"data": TEXT}},
        {"type": "text-plain", "text": TEXT, "mime_type": "text/plain"},
        {
            "type": "resource",
            "resource": {"uri": "file:///a", "mimeType": "text/plain", "text": TEXT},
        },
        {"type": "thinking", "thinking": TEXT, "signature": B64},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": TEXT}], "id": "rs_1"},
        {"reasoningContent": {"reasoningText": {"text": TEXT, "signature": B64}}},
        {"text": TEXT, "thought": True, "thought_signature": RAW},
        {"type": "function_call_output", "call_id": "call_1", "output": TEXT},
        {"role": "tool", "tool_call_id": "call_1", "content": TEXT},
        {"toolResult": {"toolUseId": "tooluse_1", "content": [{"text": TEXT}]}},
    ],
)
def test_text_counts_wherever_it_stands(block):
    assert 0 <= estimate(block) - estimate_tokens(TEXT) <= 12


@pytest.mark.parametrize(
    "text", ["data: 1, 2, 3", "data:,", "data:text/plain,Hi", "data: a;base64,"]
)
def test_text_that_begins_like_a_data_url_is_text(text):
    assert estimate(text) == estimate_tokens(text)


def test_text_with_a_data_url_in_it_is_text():
    assert estimate(f"See {PNG}") > 100_000


ARGUMENTS = {"order_id": "#W5918442", "metadata": {"id": 7, "status": "new"}, "items": ["a", "b"]}
WRITTEN = estimate_tokens(json.dumps(ARGUMENTS)) + estimate_tokens("exchange")


@pytest.mark.parametrize(
    "message",
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "exchange", "arguments": json.dumps(ARGUMENTS)},
                }
            ],
        },
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "exchange",
            "arguments": json.dumps(ARGUMENTS),
        },
        {"type": "tool_use", "id": "toolu_1", "name": "exchange", "input": ARGUMENTS},
        {"toolUse": {"toolUseId": "tooluse_1", "name": "exchange", "input": ARGUMENTS}},
        {"functionCall": {"id": "1", "name": "exchange", "args": ARGUMENTS}},
        {"functionResponse": {"id": "1", "name": "exchange", "response": ARGUMENTS}},
        {"function": {"name": "exchange", "arguments": ARGUMENTS}},
        {
            "content": [
                {"type": "tool_use", "id": "toolu_1", "name": "exchange", "input": ARGUMENTS}
            ],
            "tool_calls": [{"name": "exchange", "args": ARGUMENTS, "id": "toolu_1"}],
        },
        {
            "content": "",
            "tool_calls": [{"name": "exchange", "args": ARGUMENTS, "id": "1", "type": "tool_call"}],
            "additional_kwargs": {"function_call": {"arguments": json.dumps(ARGUMENTS)}},
            "tool_call_chunks": [{"name": "exchange", "args": json.dumps(ARGUMENTS)}],
        },
    ],
)
def test_calls_count_with_all_of_their_arguments_and_once(message):
    assert estimate(message) == WRITTEN


def test_results_in_json_count_whole():
    block = {"toolResult": {"toolUseId": "1", "content": [{"json": ARGUMENTS}]}}
    assert estimate(block) == estimate_tokens(json.dumps(ARGUMENTS))


def test_encrypted_reasoning_counts_by_what_it_holds():
    size = len(B64) // 5 + 1
    assert estimate({"type": "reasoning", "summary": [], "encrypted_content": B64}) == size
    assert estimate({"type": "redacted_thinking", "data": B64}) == size
    assert estimate({"reasoningContent": {"redactedContent": B64.encode()}}) == size
    assert estimate({"encrypted_content": None}) == 0


@pytest.mark.slow
def test_messages_of_the_frameworks_are_read():
    pytest.importorskip("google.genai", reason="comes with the dependency group `sdks`")
    from google.genai.types import Content, Part
    from langchain_core.messages import AIMessage, ToolMessage
    from openai.types.chat import ChatCompletionMessage
    from openai.types.responses import ResponseFunctionToolCall

    asked = [{"name": "exchange", "args": ARGUMENTS, "id": "call_1"}]
    usage = {"input_tokens": 9, "output_tokens": 9, "total_tokens": 18}
    answer = AIMessage(TEXT, tool_calls=asked, usage_metadata=usage, response_metadata={"a": TEXT})
    assert estimate(answer) == estimate_tokens(TEXT) + WRITTEN
    result = ToolMessage(TEXT, tool_call_id="call_1", artifact=TEXT)
    assert estimate(result) == estimate_tokens(TEXT)
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "exchange", "arguments": json.dumps(ARGUMENTS)},
    }
    message = ChatCompletionMessage(role="assistant", content=TEXT, tool_calls=[call])
    assert estimate(message) == estimate_tokens(TEXT) + WRITTEN
    item = ResponseFunctionToolCall(
        type="function_call", call_id="1", name="exchange", arguments=json.dumps(ARGUMENTS)
    )
    assert estimate(item) == WRITTEN
    part = Part.from_function_call(name="exchange", args=ARGUMENTS)
    assert estimate(Content(role="model", parts=[part])) == WRITTEN


@dataclass
class Note:
    text: str


class Kind(StrEnum):
    NOTE = "note"


@pytest.mark.parametrize(
    ("content", "tokens"),
    [
        (None, 0),
        ("", 0),
        ([], 0),
        ({}, 0),
        (True, 0),
        (3, 0),
        (2.5, 0),
        (object, 0),
        (object(), 0),
        ({"type": None, "text": "Hi"}, 1),
        ({"type": 3, "mime_type": 4, "text": "Hi"}, 1),
        ({3: "Hi"}, 1),
        (Note("Hi"), 1),
        (SimpleNamespace(text="Hi"), 1),
        ((Kind.NOTE,), 2),
        ({"images": "none", "audio": "none", "image": {"alt": "Hi"}}, 5),
    ],
)
def test_other_content_is_no_error(content, tokens):
    assert estimate(content) == tokens


def test_content_that_contains_itself_ends(monkeypatch):
    monkeypatch.setattr(projection, "_MOST_PARTS", 50)
    message: dict[str, Any] = {"text": "Hi"}
    message["content"] = [message, message]

    assert 1 <= estimate(message) <= 50


# Schemas


class Answer(BaseModel):
    city: str
    degrees: float


PARAMETERS = Answer.model_json_schema()
SCHEMA = estimate_tokens(json.dumps(PARAMETERS))


def weather(city: str, *, days: int = 1) -> str:
    """Tell the weather of a city in the next days."""
    return city * days


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
        {"name": "weather", "input_schema": PARAMETERS},
        {"toolSpec": {"name": "weather", "inputSchema": {"json": PARAMETERS}}},
        pytest.param(json.dumps(PARAMETERS), id="text"),
        Answer,
        {"name": "weather", "parameters": Answer},
        Answer(city="Oslo", degrees=3.5).model_json_schema(),
    ],
)
def test_schemas_count(tool):
    assert SCHEMA <= estimate_schema(tool) <= SCHEMA + 25


@pytest.mark.slow
def test_tools_of_the_frameworks_count_with_their_schemas():
    pytest.importorskip("google.genai", reason="comes with the dependency group `sdks`")
    import strands
    from agents import Agent as OpenAIAgent
    from agents import AgentOutputSchema, WebSearchTool, function_tool, handoff
    from google.genai.types import FunctionDeclaration
    from google.genai.types import Tool as GoogleTool
    from langchain_core.tools import tool as langchain_tool
    from mcp.types import Tool as McpTool

    declared = FunctionDeclaration(name="weather", parameters_json_schema=PARAMETERS)
    tools = [
        langchain_tool(weather),
        function_tool(weather),
        strands.tool(weather),
        McpTool(name="weather", description=weather.__doc__, inputSchema=PARAMETERS),
        GoogleTool(function_declarations=[declared]),
        AgentOutputSchema(Answer),
        weather,
    ]
    for tool in tools:
        assert 20 <= estimate_schema(tool) <= 150, tool
        text = projection._schema_text(tool)
        assert "city" in text, tool
    text = projection._schema_text(handoff(OpenAIAgent(name="billing")))
    assert "transfer_to_billing" in text
    assert estimate_schema(AgentOutputSchema(str)) <= 20
    assert estimate_schema(WebSearchTool()) <= 100


def test_what_has_no_schema_counts_by_its_name():
    class Nothing:
        def __str__(self) -> str:
            raise RuntimeError

    loop: dict[str, Any] = {}
    loop["loop"] = loop

    assert estimate_schema(None) == 0
    assert '"text"' in projection._schema_text(Note)
    assert projection._schema_text(Nothing) == '"Nothing"'
    assert projection._schema_text(Nothing()) == "Nothing"
    assert projection._schema_text(loop) == "dict"
    assert projection._schema_text({"image": RAW, (1, 2): 3}) == '{"image": null}'


# Prompts


def message(number):
    return {"role": "user", "content": f"Message {number}: " + "word " * 10}


EACH = estimate(message(1)) + 5


def test_a_prompt_is_all_that_is_sent():
    messages = [message(number) for number in range(3)]

    assert project(messages) == 3 * EACH
    assert project(tuple(messages)) == 3 * EACH
    assert project(messages[0]) == EACH
    assert project("Hi") == 6
    assert project(None) == project([]) == 0
    whole = project(messages, system=TEXT, tools=[PARAMETERS, PARAMETERS], output_schema=Answer)
    assert whole == 3 * EACH + estimate_tokens(TEXT) + 3 * SCHEMA
    assert project([], tools=PARAMETERS) == SCHEMA


def test_other_sequences_are_lists_of_messages():
    from collections import deque

    assert project(deque([message(1), message(2)])) == 2 * EACH


@pytest.fixture
def looked_at(monkeypatch):
    """What the estimator was asked for."""
    asked = []

    def counting(content):
        asked.append(content)
        return estimate(content)

    monkeypatch.setattr(projection, "estimate", counting)
    return asked


def test_each_message_is_looked_at_once(looked_at):
    prompt, messages = Prompt(), [message(0)]
    for number in range(1, 50):
        assert prompt.project(messages, system="Be kind.", tools=[PARAMETERS]) > 0
        messages.append(message(number))
    assert prompt.project(messages) == 50 * EACH
    assert [one for one in looked_at if isinstance(one, dict)] == messages


def test_copies_of_the_messages_are_known_too(looked_at):
    prompt = Prompt()
    prompt.project([message(0), message(1)])
    looked_at.clear()

    assert prompt.project([message(0), message(1), message(2)]) == 3 * EACH
    assert looked_at == [message(2)]


def test_tools_are_looked_at_again_when_they_change(monkeypatch):
    asked = []

    def counting(schema):
        asked.append(schema)
        return estimate_schema(schema)

    monkeypatch.setattr(projection, "estimate_schema", counting)
    prompt, tools = Prompt(), [PARAMETERS]
    for _ in range(3):
        prompt.project([message(0)], tools=list(tools))
    assert len(asked) == 2  # the tool, and no output schema
    tools.append(PARAMETERS)
    assert prompt.project([message(0)], tools=tools) == EACH + 2 * SCHEMA


def test_a_prompt_that_says_the_same_again_costs_the_same():
    prompt, messages = Prompt(), [message(0), message(1)]
    assert prompt.project(messages) == prompt.project(messages) == 2 * EACH


@pytest.mark.parametrize(
    "later",
    [[message(7)], [message(7), message(2), message(3)], [message(1), message(8), message(9)]],
    ids=["shorter", "another beginning", "another end"],
)
def test_a_history_that_was_cut_is_looked_at_anew(later):
    prompt = Prompt()
    prompt.project([message(1), message(2)])
    prompt.measured(TokenUsage(5_000, 10))

    assert prompt.project(later) == len(later) * EACH
    assert prompt.project([]) == 0


def test_what_the_provider_measured_is_the_base_of_the_next_prompt():
    prompt, messages = Prompt(), [message(0)]
    prompt.project(messages, system=TEXT, tools=[PARAMETERS])
    prompt.measured(TokenUsage(900, 40, cache_read_tokens=500))
    messages += [message(1), message(2)]

    assert prompt.project(messages, system=TEXT, tools=[PARAMETERS]) == 900 + 2 * EACH
    # Another agent goes on with other tools.
    tools = [PARAMETERS, PARAMETERS]
    assert prompt.project(messages, system=TEXT, tools=tools) == 900 + 2 * EACH + SCHEMA
    assert prompt.project(messages) == 900 + 2 * EACH - estimate_tokens(TEXT) - SCHEMA


def test_a_reply_has_the_size_that_its_provider_measured():
    prompt, messages = Prompt(), [message(0)]
    alone = prompt.project(messages)
    reply = message(1)
    prompt.replied(reply, TokenUsage(900, 40, reasoning_tokens=10))
    # Of a prompt that goes on at the same time nothing is known.
    assert prompt.project([message(2)]) == EACH
    messages += [reply, message(3)]

    assert prompt.project(messages) == alone + (30 + 5) + EACH
    assert prompt.project([message(0), message(1)]) == 2 * EACH  # the same words, by another


def test_what_was_not_measured_changes_nothing():
    prompt, messages = Prompt(), [message(0)]
    prompt.project(messages)
    for usage in (None, TokenUsage(), TokenUsage(0, 5), TokenUsage(9_000, 5, estimated=True)):
        prompt.measured(usage)
    assert prompt.project(messages) == EACH


def test_a_projection_is_never_below_nothing():
    prompt = Prompt()
    prompt.project([message(0)], tools=[PARAMETERS])
    prompt.measured(TokenUsage(1, 1))

    assert prompt.project([message(0)]) == 0


def test_where_the_provider_keeps_the_history_each_prompt_is_what_is_new():
    prompt = Prompt(server_side=True)
    assert prompt.project([message(0)], tools=[PARAMETERS]) == EACH + SCHEMA
    prompt.measured(TokenUsage(100, 30))

    assert prompt.project([message(1)], tools=[PARAMETERS]) == 130 + EACH
    assert prompt.project([message(2)], tools=[PARAMETERS]) == 130 + EACH


class Unlike:
    def __eq__(self, other):
        raise RuntimeError

    __hash__ = None


def test_messages_that_can_not_be_compared_are_looked_at_anew():
    prompt, one = Prompt(), Unlike()
    assert prompt.project([one, message(1)]) == 5 + EACH
    assert prompt.project([one, message(1), message(2)]) == 5 + 2 * EACH
    assert prompt.project([Unlike(), message(1), message(2)]) == 5 + 2 * EACH


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"q": "cats"},
        {"q": 'a "b"\n\\', "é": "\ud800\u2028\x00"},
        {"n": 1},
        {1: "x"},
        {"q": None},
    ],
)
def test_arguments_count_as_their_json_does(arguments):
    call = {"type": "tool_call", "args": arguments}
    text = json.dumps(arguments, ensure_ascii=False)
    assert estimate(call) == estimate_tokens(text)


def test_parts_of_the_same_names_are_told_apart_by_what_is_in_them():
    text = {"type": "text", "text": "one two three", "data": PNG[:20]}
    image = {"type": "image", "text": "one two three", "data": PNG[:20]}
    assert estimate(text) == estimate(text) != IMAGE_TOKENS
    assert estimate(image) == IMAGE_TOKENS
    sound = {"type": "media", "mime_type": "audio/wav", "data": "x"}
    assert estimate(sound) == AUDIO_TOKENS
    assert estimate({**sound, "mime_type": "image/png"}) == IMAGE_TOKENS
