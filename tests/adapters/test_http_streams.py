"""Streams as no SDK's server sends them: cut anywhere, other line ends, comments, huge lines."""

from __future__ import annotations

import json

import httpx2
import pytest

from budgetguard_core import Budget
from budgetguard_http import BudgetTransport
from budgetguard_http._frames import EventStream, ServerSentEvents
from budgetguard_http.protocols.openai_chat import ChatReader, OpenAIChat

TEXT = "Grüße, 世界 🌍"
USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
ASK = {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}], "stream": True}
URL = "http://provider/v1/chat/completions"


def events(text=TEXT, calls=1):
    """A chat completion with a text and tool calls, its characters not escaped."""
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "gpt-4o"}
    deltas = [{"role": "assistant", "content": ""}, {"content": text[:3]}, {"content": text[3:]}]
    for index in range(calls):
        function = {"name": "read_file", "arguments": json.dumps({"path": f"ä{index}"})}
        call = {"index": index, "id": f"call_{index}", "type": "function", "function": function}
        deltas.append({"tool_calls": [call]})
    finish = "tool_calls" if calls else "stop"
    chunks = [
        {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        for delta in deltas
    ]
    chunks.append({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    chunks.append({**base, "choices": [], "usage": USAGE})
    return [json.dumps(chunk, ensure_ascii=False) for chunk in chunks] + ["[DONE]"]


def written(lines, end="\n", comment=False, name=False):
    parts = []
    for line in lines:
        before = f": keep-alive{end}{end}: another{end}" if comment else ""
        before += f"id: 7{end}event: chunk{end}retry: 10{end}" if name else ""
        parts.append(f"{before}data: {line}{end}{end}")
    return "".join(parts).encode()


class Pieces(httpx2.SyncByteStream):
    def __init__(self, pieces):
        self.pieces = pieces

    def __iter__(self):
        yield from self.pieces


def exchange(pieces, *, budget=None, ask=ASK, url=URL):
    """Send a request through the seam; return what its client reads, and the outcome."""
    headers = {"content-type": "text/event-stream; charset=utf-8"}

    def answer(request):
        return httpx2.Response(200, headers=headers, stream=Pieces(pieces))

    transport = BudgetTransport(
        budget or Budget(loop_detection=None), httpx2.MockTransport(answer), ask_for_usage=False
    )
    with httpx2.Client(transport=transport) as client:
        content = client.post(url, json=ask).content
    return content, transport.outcome


def said_in(content):
    found, calls = "", 0
    for event in ServerSentEvents().feed(content):
        _, data = ServerSentEvents().parse(event) or ("", "[DONE]")
        for choice in data["choices"] if data != "[DONE]" else ():
            found += choice["delta"].get("content") or ""
            calls += len(choice["delta"].get("tool_calls") or ())
    return found, calls


ENDS = pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])


@ENDS
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("extra", ["plain", "comments", "names"])
def test_a_stream_may_be_cut_anywhere(end, size, extra):
    lines = written(events(), end, comment=extra == "comments", name=extra == "names")
    pieces = [lines[at : at + size] for at in range(0, len(lines), size)]
    content, outcome = exchange(pieces)
    assert said_in(content) == (TEXT, 1)
    usage = outcome.usage
    assert (usage.total_tokens, usage.estimated_calls, usage.tool_calls) == (110, 0, 1)


@pytest.mark.parametrize("frames", [ServerSentEvents(), EventStream(wrapped=False)])
def test_an_event_with_half_an_emoji_is_written_as_json_has_it(frames):
    event = "", {"delta": "cut \ud83d"}
    (read,) = frames.feed(frames.write(event))
    assert frames.parse(read) == event


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_events_that_come_together_are_read_as_those_that_come_alone(pieces):
    """A piece that is spread over lines among them, where a comment makes up for its line."""
    base = {"id": "1", "object": "chat.completion.chunk", "model": "m"}
    deltas = [{"content": f"part {place} "} for place in range(20)]
    deltas[3] = {"reasoning_content": "thought"}
    lines = [json.dumps({**base, "choices": [{"delta": one}]}) for one in deltas]
    lines[7] = lines[7].replace('"content": ', '"content":\ndata: ')
    stream = written(lines).split(b"\n\n")[:-1]
    sent = [b"\n\n".join([*stream[at::20], b": x", b""]) for at in range(20)]
    together = [b"".join(sent[at : at + pieces]) for at in range(0, 20, pieces)]
    content, outcome = exchange(together)
    assert content == b"".join(sent)
    said = "".join(one.get("content", "") for one in deltas)
    assert outcome.final == said.strip()


def test_what_a_stream_thinks_is_estimated_where_no_usage_comes():
    """Also where no chunk has more than text, and its keys have no value yet."""
    thought, said = "word " * 400, 'a "quoted" answer\n'
    base = {"id": "1", "object": "chat.completion.chunk", "model": "m", "usage": None}
    deltas = [{"role": "assistant", "reasoning_content": thought}, {"content": said}]
    chunks = [{**base, "choices": [{"delta": one, "finish_reason": None}]} for one in deltas]
    lines = written([json.dumps(chunk) for chunk in chunks])
    content, outcome = exchange([lines])
    assert content == lines
    assert outcome.final == said.strip()
    assert outcome.usage.output_tokens > 400
    assert outcome.usage.estimated_calls == 1


def test_a_text_that_looks_like_the_end_of_an_answer_is_only_text():
    text = '"finish_reason": "stop", "tool_calls": [], "usage": {} [DONE] data: {"content": "x"}'
    content, outcome = exchange([written(events(text=text, calls=0))])
    assert said_in(content) == (text, 0)
    assert outcome.final == text
    assert (outcome.usage.total_tokens, outcome.usage.estimated_calls) == (110, 0)


def outcome_of(*choices, ask=ASK):
    """The outcome of a stream with these choices, each in a chunk of its own."""
    base = {"id": "1", "object": "chat.completion.chunk", "model": "gpt-4o"}
    lines = written([*(json.dumps({**base, "choices": [one]}) for one in choices), "[DONE]"])
    content, outcome = exchange([lines], ask=ask)
    assert content == lines
    return outcome


def choice_of(*calls, index=0, finish=None):
    delta = {"tool_calls": list(calls)} if calls else {}
    return {"index": index, "delta": delta, "finish_reason": finish}


def call_of(n=0, index=0, kind="function", field="arguments", text="{}", name="read_file"):
    return {"index": index, "id": f"call_{n}", "type": kind, kind: {"name": name, field: text}}


END = choice_of(finish="tool_calls")


@pytest.mark.parametrize("last", [{}, {"function": {}}, {"function": {"arguments": None}}])
def test_the_pieces_of_a_call_are_joined_whatever_the_last_one_holds(last):
    reader = ChatReader(OpenAIChat(), {})
    more = {"index": 0, "function": {"arguments": ': "a"}'}}
    for piece in (call_of(1, text='{"path"'), more, {"index": 0, **last}):
        reader.take("", {"choices": [choice_of(piece)]})
    reader.take("", {"choices": [END]})
    reader.end()
    (call,) = reader.calls
    assert (call.id, call.name, call.arguments) == ("call_1", "read_file", '{"path": "a"}')


BEGUN = [choice_of(call_of(place), index=place) for place in (0, 1)]
ENDED = [choice_of(index=place, finish="tool_calls") for place in (0, 1)]


@pytest.mark.parametrize(
    "choices",
    [
        [BEGUN[0], ENDED[0], BEGUN[1], ENDED[1]],
        [BEGUN[0], ENDED[0], ENDED[0], BEGUN[1], ENDED[1]],
        [choice_of(call_of(0), call_of(1, index=1), index=[], finish="tool_calls")],
    ],
    ids=["one after the other", "an end told twice", "fewer than were asked for"],
)
def test_the_calls_of_several_choices_are_all_counted(choices):
    assert outcome_of(*choices, ask={**ASK, "n": 2}).usage.tool_calls == 2


@pytest.mark.parametrize("finished", [{0, 1, 2, 3}, {0}, {1, 3}], ids=["each", "first", "some"])
@pytest.mark.parametrize("own", [True, False], ids=["own index", "index 0"])
def test_calls_that_come_after_the_end_of_an_answer_are_counted_too(finished, own):
    """As some servers send them that translate other formats."""
    choices = [
        choice_of(call_of(n, index=n if own else 0), finish="tool_calls" if n in finished else None)
        for n in range(4)
    ]
    assert outcome_of(*choices).usage.tool_calls == 4


@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream", ""])
def test_a_stream_is_read_whatever_its_server_calls_it(kind):
    data = written(events(calls=3))

    def answer(request):
        headers = {"content-type": kind} if kind else {}
        return httpx2.Response(200, headers=headers, stream=Pieces([data[:99], data[99:]]))

    transport = BudgetTransport(Budget(), httpx2.MockTransport(answer), ask_for_usage=False)
    with httpx2.Client(transport=transport) as client:
        assert client.post(URL, json=ASK).content == data
    assert (transport.outcome.usage.tool_calls, transport.outcome.usage.total_tokens) == (3, 110)


@pytest.mark.parametrize("line", [b'{"delta": "word"}\n', b"A word.\n"], ids=["JSON", "text"])
def test_a_stream_that_is_none_of_events_passes_as_it_comes(line):
    sent = []

    def pieces():
        for _ in range(3):
            sent.append(line)
            yield line

    def answer(request):
        headers = {"content-type": "application/x-ndjson"}
        return httpx2.Response(200, headers=headers, stream=Pieces(pieces()))

    transport = BudgetTransport(Budget(), httpx2.MockTransport(answer))
    with httpx2.Client(transport=transport) as client, client.stream("POST", URL, json=ASK) as got:
        for number, piece in enumerate(got.iter_raw(), 1):
            assert (piece, len(sent)) == (line, number)
    assert transport.outcome.usage.estimated_calls == 1


@pytest.mark.parametrize("ends", [{3}, {0, 1, 2, 3}], ids=["at the end", "in each chunk"])
def test_calls_of_gemini_are_read(ends):
    chunks = []
    for n in range(4):
        part = {"functionCall": {"name": "read_file", "id": f"call_{n}", "args": {}}}
        candidate = {"index": 0, "content": {"role": "model", "parts": [part]}}
        chunks.append({"candidates": [candidate | ({"finishReason": "STOP"} if n in ends else {})]})
    chunks[-1]["usageMetadata"] = {"promptTokenCount": 100, "candidatesTokenCount": 10}
    ask = {"contents": [{"role": "user", "parts": [{"text": "go"}]}]}
    url = "http://provider/v1beta/models/gemini-3-pro:streamGenerateContent"
    lines = written(map(json.dumps, chunks))
    content, outcome = exchange([lines], ask=ask, url=url)
    assert content == lines
    assert (outcome.usage.tool_calls, outcome.usage.total_tokens) == (4, 110)


def test_pieces_of_one_call_are_one_call_though_each_has_an_id_of_its_own():
    """As some servers make them up for each chunk."""
    pieces = [("read_file", ""), ("", '{"path":'), ("", "1}")]
    choices = [
        choice_of(call_of(f"{n}_{place}", index=n, name=name, text=text))
        for n in range(2)
        for place, (name, text) in enumerate(pieces)
    ]
    assert [call.name for call in outcome_of(*choices, END).tool_calls] == ["read_file"] * 2


def test_a_custom_tool_of_a_stream_is_counted():
    head = call_of(1, kind="custom", field="input", text="", name="shell")
    more = {"index": 0, "custom": {"input": "ls"}}
    assert outcome_of(choice_of(head), choice_of(more), END).tool_calls[0].name == "shell"


@pytest.mark.parametrize(
    ("told", "last"),
    [
        (("added", "done"), "whole"),
        (("added",), "whole"),
        (("done",), "whole"),
        ((), "whole"),
        (("added", "done"), "head"),
        (("done",), "head"),
    ],
    ids=["all", "begun", "done", "the last", "all but the last", "nothing but done"],
)
def test_calls_of_a_response_are_counted_whichever_of_its_events_a_server_sends(told, last):
    calls = [
        {"type": "function_call", "id": f"fc_{n}", "call_id": f"c{n}", "name": "read_file"}
        for n in range(3)
    ]
    calls = [{**call, "arguments": "{}", "status": "completed"} for call in calls]
    sent = [
        {"type": f"response.output_item.{one}", "output_index": n, "item": call}
        for n, call in enumerate(calls)
        for one in told
    ]
    response = {"id": "resp_1", "model": "gpt-4o", "output": calls if last == "whole" else []}
    sent.append({"type": "response.completed", "response": response})
    ask = {"model": "gpt-4o", "input": "go", "stream": True}
    lines = written(map(json.dumps, sent))
    content, outcome = exchange([lines], ask=ask, url="http://provider/v1/responses")
    assert content == lines
    assert outcome.usage.tool_calls == 3


def test_what_was_written_of_a_call_is_charged_where_its_stream_breaks():
    base = {"id": "1", "object": "chat.completion.chunk", "model": "gpt-4o"}
    head = {"id": "call_1", "function": {"name": "write_file", "arguments": "word " * 400}}
    chunk = {**base, "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **head}]}}]}

    class Breaks(Pieces):
        def __iter__(self):
            yield from super().__iter__()
            raise httpx2.ReadError("broken")

    def answer(request):
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=headers, stream=Breaks([written([json.dumps(chunk)])]))

    budget = Budget(loop_detection=None)
    transport = BudgetTransport(budget, httpx2.MockTransport(answer))
    with httpx2.Client(transport=transport) as client:
        with pytest.raises(httpx2.ReadError):
            client.post(URL, json=ASK)
    assert transport.outcome.usage.output_tokens > 400


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("spaced", [True, False])
def test_a_text_of_anthropics_is_read_as_it_would_be_parsed(end, spaced):
    pieces = ["Gr", 'üße \\ "', 'x","type":"tool_use"}} \n\n event: message_stop', "世界"]
    usage = {"input_tokens": 100, "output_tokens": 1}
    message = {"id": "m", "role": "assistant", "content": [], "model": "claude", "usage": usage}
    found = [{"type": "message_start", "message": message}]
    found.append({"type": "content_block_start", "index": 0, "content_block": {"type": "text"}})
    for text in pieces:
        delta = {"type": "text_delta", "text": text}
        found.append({"type": "content_block_delta", "index": 0, "delta": delta})
    found.append({"type": "content_block_stop", "index": 0})
    told = {"output_tokens": 10}
    found.append({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": told})
    found.append({"type": "message_stop"})
    separators = (", ", ": ") if spaced else (",", ":")
    lines = "".join(
        f"event: {one['type']}{end}data: {json.dumps(one, separators=separators)}{end}{end}"
        for one in found
    ).encode()

    def answer(request):
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=headers, stream=Pieces([lines[:90], lines[90:]]))

    transport = BudgetTransport(Budget(loop_detection=None), httpx2.MockTransport(answer))
    with httpx2.Client(transport=transport) as client:
        assert client.post("http://provider/v1/messages", json=ASK).content == lines
    assert transport.outcome.final == "".join(pieces)
    usage = transport.outcome.usage
    assert (usage.total_tokens, usage.estimated_calls) == (110, 0)


@ENDS
@pytest.mark.parametrize("size", [1, 7])
def test_a_stream_without_tool_calls_passes_byte_by_byte(end, size):
    lines = written(events(calls=0), end, comment=True, name=True)
    pieces = [lines[at : at + size] for at in range(0, len(lines), size)]
    content, outcome = exchange(pieces)
    assert (content, outcome.usage.total_tokens) == (lines, 110)


def test_the_last_event_needs_no_empty_line():
    lines = written(events(calls=0)[:-1]).rstrip()
    content, outcome = exchange([lines])
    assert content == lines
    assert (outcome.usage.total_tokens, outcome.usage.estimated_calls) == (110, 0)


def test_data_may_be_spread_over_lines():
    first, *others = events()
    spread = "data: " + first[:10] + "\ndata:" + first[10:] + "\n\n"
    content, outcome = exchange([spread.encode() + written(others)])
    assert said_in(content)[0] == TEXT
    assert outcome.usage.total_tokens == 110


def test_what_is_no_json_passes_as_it_came():
    strange = b"data: {not json\n\ndata: [1, 2]\n\ndata:\n\nnonsense\n\n\xff\xfe\n\n"
    lines = strange + written(events(calls=0))
    content, outcome = exchange([lines])
    assert content == lines
    assert outcome.usage.total_tokens == 110


def test_a_huge_line_is_looked_at_once():
    """Cut into many pieces: work that grows with their square would not end in this test."""
    text = "x" * 6_000_000
    lines = written(events(text, calls=0))
    pieces = [lines[at : at + 1_000] for at in range(0, len(lines), 1_000)]
    content, outcome = exchange(pieces)
    assert content == lines
    assert outcome.usage.total_tokens == 110


@pytest.mark.parametrize("encoding", ["gzip", "x-unknown"])
def test_a_stream_that_is_compressed_all_the_same_passes_as_it_came_and_is_estimated(encoding):
    lines = b"\x01not what anybody can read\xff" * 10

    def answer(request):
        headers = {"content-type": "text/event-stream", "content-encoding": encoding}
        return httpx2.Response(200, headers=headers, stream=Pieces([lines]))

    transport = BudgetTransport(Budget(loop_detection=None), httpx2.MockTransport(answer))
    with httpx2.Client(transport=transport) as client:
        with client.stream("POST", URL, json=ASK) as response:
            assert b"".join(response.iter_raw()) == lines
            assert response.headers["content-encoding"] == encoding
    usage = transport.outcome.usage
    assert (usage.model_calls, usage.estimated_calls) == (1, 1)
    assert transport.run.guard.open_calls() == ()


def test_the_calls_of_a_stream_that_is_left_at_its_finish_reason_are_counted():
    """Its client has them, and may run them."""

    def answer(request):
        headers = {"content-type": "text/event-stream"}
        pieces = [written([line]) for line in events(calls=3)]
        return httpx2.Response(200, headers=headers, stream=Pieces(pieces))

    transport = BudgetTransport(Budget(max_tool_calls=2), httpx2.MockTransport(answer))
    with httpx2.Client(transport=transport) as client:
        with client.stream("POST", URL, json=ASK) as response:
            for piece in response.iter_bytes():
                if b'"finish_reason": "tool_calls"' in piece:
                    break
        refused = client.post(URL, json={**ASK, "stream": False})
    assert refused.headers["x-budgetguard-stop-reason"] == "max_tool_calls"
    assert transport.outcome.usage.tool_calls == 3


def test_a_stream_that_is_cut_in_a_tool_call_has_no_good_end():
    def pieces():
        yield written(events()[:4])
        transport.run.guard.abort("enough")
        yield b": x\n\n"
        yield written(events()[4:])

    def answer(request):
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=headers, stream=Pieces(pieces()))

    transport = BudgetTransport(Budget(), httpx2.MockTransport(answer))
    with httpx2.Client(transport=transport) as client, pytest.raises(httpx2.ReadTimeout):
        client.post(URL, json=ASK)
    assert (transport.outcome.stop_reason, transport.outcome.usage.failed_calls) == ("aborted", 1)


@pytest.mark.parametrize("how", ["left", "failed"])
def test_a_stream_that_is_not_read_to_its_end_leaves_nothing_open(how):
    def pieces():
        yield written(events()[:2])
        if how == "failed":
            raise httpx2.ReadError("reset")
        yield written(events()[2:])

    def answer(request):
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=headers, stream=Pieces(pieces()))

    transport = BudgetTransport(Budget(max_total_tokens=9_000), httpx2.MockTransport(answer))
    with httpx2.Client(transport=transport) as client:
        with client.stream("POST", URL, json=ASK) as response:
            try:
                for _ in response.iter_bytes():
                    if how == "left":
                        break
            except httpx2.ReadError:
                assert how == "failed"
    usage = transport.outcome.usage
    assert (usage.model_calls, usage.estimated_calls, usage.reserved_tokens) == (1, 1, 0)
    assert transport.run.guard.open_calls() == ()


@pytest.mark.parametrize("where", ["last", "each"])
def test_usage_that_a_server_sends_unasked_is_left_to_the_client(where):
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    pieces = [({"content": "o"}, None), ({"content": "k"}, None), ({}, "stop")]
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        for delta, finish in pieces
    ]
    for chunk in chunks if where == "each" else chunks[-1:]:
        chunk["usage"] = usage
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def answered(_):
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, content=text.encode(), headers=headers)

    transport = BudgetTransport(Budget(), httpx2.MockTransport(answered))
    with httpx2.Client(transport=transport) as client:
        ask = {"model": "gpt-4o", "messages": [], "stream": True}
        assert client.post("http://provider/v1/chat/completions", json=ask).text == text
    assert transport.outcome.usage.total_tokens == 11
