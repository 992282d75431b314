"""Bedrock through boto3's own clients: exact, whole and streamed, ambient and by events alone."""

from __future__ import annotations

import functools
import gc
import json
import threading

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from budgetguard_core import AdapterError, Budget, BudgetExceeded
from budgetguard_http import BedrockHooks, CallRefused, bounded_clients, install, uninstall
from provider_server import TOKENS, ProviderServer

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CAP = 3
MODEL = "anthropic.claude-sonnet-4-5-20250929-v1:0"
TOOL = {"name": "read_file", "description": "Read.", "inputSchema": {"json": {"type": "object"}}}
CAPPED = Budget(max_iterations=CAP, loop_detection=None)
FREE = Budget(loop_detection=None)
SECRET = "very-secret"


def client_of(server, **options):
    options.setdefault("retries", {"mode": "standard", "total_max_attempts": 1})
    # One for all tests: it takes a while to read the descriptions of the services.
    return session().client("bedrock-runtime", endpoint_url=server.url, config=Config(**options))


@functools.cache
def session():
    return boto3.Session(
        aws_access_key_id="key", aws_secret_access_key=SECRET, region_name="us-east-1"
    )


def asked(text="go", **options):
    return {
        "modelId": MODEL,
        "messages": [{"role": "user", "content": [{"text": text}]}],
        **options,
    }


def read(events):
    """Put the events of a stream together, as their reader would."""
    blocks, stop, usage = {}, None, None
    for event in events:
        ((name, data),) = event.items()
        index = data.get("contentBlockIndex")
        if name == "contentBlockStart":
            use = data["start"]["toolUse"]
            assert index == len(blocks)
            blocks[index] = {"toolUse": {**use, "input": ""}}
        elif name == "contentBlockDelta" and "toolUse" in data["delta"]:
            blocks[index]["toolUse"]["input"] += data["delta"]["toolUse"]["input"]
        elif name == "contentBlockDelta":
            blocks.setdefault(index, {"text": ""})["text"] += data["delta"]["text"]
        elif name == "messageStop":
            stop = data["stopReason"]
        elif name == "metadata":
            usage = data["usage"]
    for block in blocks.values():
        if "toolUse" in block:
            block["toolUse"]["input"] = json.loads(block["toolUse"]["input"])
    return {"content": list(blocks.values()), "stop": stop, "usage": usage}


class Loop:
    """A loop on a client as its user writes it, until the model asks for no tool."""

    def __init__(self, client, *, stream, result="nothing new"):
        self.client, self.stream, self.result = client, stream, result
        self.messages = asked()["messages"]
        self.bodies, self.text = 0, None

    def ask(self):
        ask = {"modelId": MODEL, "messages": self.messages}
        ask["toolConfig"] = {"tools": [{"toolSpec": TOOL}]}
        if self.stream:
            return read(self.client.converse_stream(**ask)["stream"])["content"]
        return self.client.converse(**ask)["output"]["message"]["content"]

    def run(self):
        while True:
            content = self.ask()
            self.messages.append({"role": "assistant", "content": content})
            uses = [block["toolUse"] for block in content if "toolUse" in block]
            self.text = "".join(block.get("text", "") for block in content)
            if not uses:
                return self
            results = []
            for use in uses:
                self.bodies += 1
                done = {"toolUseId": use["toolUseId"], "content": [{"text": self.result}]}
                results.append({"toolResult": done})
            self.messages.append({"role": "user", "content": results})


STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["converse", "converse_stream"])


@STREAMED
def test_a_loop_that_never_ends_ends_at_its_cap(stream):
    with ProviderServer() as server:
        client = client_of(server)  # made before the block, as most are
        with bounded_clients(CAPPED) as block:
            loop = Loop(client, stream=stream).run()
    usage = block.outcome.usage
    assert (server.hits, usage.model_calls, usage.iterations) == (CAP, CAP, CAP)
    assert (usage.total_tokens, usage.cache_read_tokens) == (CAP * TOKENS, CAP * 20)
    assert (usage.estimated_calls, usage.failed_calls) == (0, 0)
    assert loop.bodies == usage.tool_calls == CAP
    assert loop.text.startswith("This run was stopped before it finished.")
    assert str(block.outcome.stop_reason) == "max_iterations"
    assert block.guard.open_calls() == ()


@STREAMED
def test_the_same_by_public_events_alone(stream):
    with ProviderServer() as server, BedrockHooks(CAPPED) as hooks:
        loop = Loop(hooks.register(client_of(server)), stream=stream).run()
    usage = hooks.outcome.usage
    assert (server.hits, usage.iterations, usage.total_tokens) == (CAP, CAP, CAP * TOKENS)
    assert loop.text.startswith("This run was stopped")
    assert str(hooks.outcome.stop_reason) == "max_iterations"


@STREAMED
def test_within_the_caps_nothing_changes(stream):
    with ProviderServer(turns=2) as server:
        alone = Loop(client_of(server), stream=stream).run()
    with ProviderServer(turns=2) as server, bounded_clients(Budget(max_iterations=9)) as block:
        loop = Loop(client_of(server), stream=stream).run()
    assert (loop.bodies, loop.text, loop.messages) == (alone.bodies, alone.text, alone.messages)
    assert (loop.text, block.outcome.status) == ("All done.", "completed")
    assert block.outcome.usage.total_tokens == 3 * TOKENS


@STREAMED
def test_a_batch_over_the_cap_is_stopped_at_the_next_call(stream):
    budget = Budget(max_tool_calls=7, loop_detection=None)
    with ProviderServer(calls=3) as server, bounded_clients(budget) as block:
        loop = Loop(client_of(server), stream=stream).run()
    assert (loop.bodies, block.outcome.usage.tool_calls, server.hits) == (9, 9, 3)
    assert str(block.outcome.stop_reason) == "max_tool_calls"


@STREAMED
def test_a_loop_is_seen_and_the_correction_is_in_the_request_only(stream):
    with ProviderServer() as server, bounded_clients(Budget()) as block:
        loop = Loop(client_of(server), stream=stream).run()
    assert str(block.outcome.stop_reason) == "no_progress"
    told = [post for post in server.posts if len(_last_result(post["body"]["messages"])) > 1]
    assert len(told) == 1
    assert all(len(_last_result([turn])) == 1 for turn in loop.messages[2::2])


def _last_result(messages):
    last = messages[-1]["content"][-1]
    return last["toolResult"]["content"] if "toolResult" in last else [last]


def test_the_bound_is_written_before_the_request_is_signed():
    with ProviderServer(calls=0) as server:
        with bounded_clients(Budget(max_output_tokens_per_call=50)):
            client_of(server).converse(**asked())
            client_of(server).converse(**asked(inferenceConfig={"maxTokens": 20, "topP": 0.5}))
    first, second = server.posts
    assert first["body"]["inferenceConfig"] == {"maxTokens": 50}
    assert second["body"]["inferenceConfig"] == {"maxTokens": 20, "topP": 0.5}
    assert int(first["headers"]["Content-Length"]) == len(first["raw"])
    assert first["headers"]["Authorization"].startswith("AWS4")


def test_half_an_emoji_passes_through_as_its_client_sends_it():
    half = asked("cut \ud83d", inferenceConfig={"maxTokens": 100})
    with ProviderServer(calls=0) as server:
        client_of(server).converse(**half)
        with bounded_clients(Budget(max_output_tokens_per_call=50)):
            client_of(server).converse(**half)
    bare, bounded = (post["body"] for post in server.posts)
    assert bounded["messages"] == bare["messages"]
    assert bounded["inferenceConfig"] == {"maxTokens": 50}


def test_retries_of_the_client_are_calls_and_no_iterations():
    retries = {"mode": "standard", "total_max_attempts": 4}
    with ProviderServer([429, 500, "ok"], calls=0) as server, bounded_clients(FREE) as block:
        client_of(server, retries=retries).converse(**asked())
    usage = block.outcome.usage
    assert (server.hits, usage.model_calls, usage.iterations, usage.failed_calls) == (3, 3, 1, 2)


def test_a_storm_of_429_ends_at_max_model_calls():
    retries = {"mode": "standard", "total_max_attempts": 9}
    budget = Budget(max_model_calls=2)
    with ProviderServer([429] * 20) as server, bounded_clients(budget) as block:
        reply = client_of(server, retries=retries).converse(**asked())
    assert server.hits == 2
    assert reply["output"]["message"]["content"][0]["text"].startswith("This run was stopped")
    assert block.outcome.usage.total_tokens == 0


def test_raise_leaves_the_block_past_every_except():
    with ProviderServer(calls=0) as server:
        with pytest.raises(BudgetExceeded), bounded_clients(CAPPED, on_trip="raise"):
            client = client_of(server)
            while True:
                try:
                    client.converse(**asked())
                except Exception:
                    continue
        with BedrockHooks(Budget(max_iterations=1), on_trip="raise") as hooks:
            client = hooks.register(client_of(server))
            client.converse(**asked())
            with pytest.raises(CallRefused):
                client.converse(**asked())
    assert server.hits == CAP + 1


def test_a_forced_tool_is_refused_by_an_error_that_nobody_tries_again():
    choice = {"tools": [{"toolSpec": TOOL}], "toolChoice": {"tool": {"name": "read_file"}}}
    retries = {"mode": "standard", "total_max_attempts": 5}
    with ProviderServer() as server, bounded_clients(Budget(max_iterations=1)):
        client = client_of(server, retries=retries)
        client.converse(**asked(toolConfig=choice))
        with pytest.raises(ClientError) as raised:
            client.converse(**asked(toolConfig=choice))
    response = raised.value.response
    assert (response["ResponseMetadata"]["HTTPStatusCode"], server.hits) == (402, 1)
    assert response["ResponseMetadata"]["RetryAttempts"] == 0
    assert response["Error"]["Code"] == "CallRefused"
    assert "budget" not in str(raised.value).lower()


def test_a_synthetic_answer_is_marked_in_its_headers():
    with ProviderServer(calls=0) as server, bounded_clients(Budget(max_iterations=1)) as block:
        client = client_of(server)
        client.converse(**asked())
        reply = client.converse(**asked())
    headers = reply["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-budgetguard-stop-reason"] == "max_iterations"
    assert headers["x-budgetguard-run-id"] == block.outcome.run_id
    assert reply["usage"]["totalTokens"] == 0


@pytest.mark.parametrize("way", ["close", "collect"])
def test_a_stream_that_is_left_early_leaves_no_reservation(way):
    budget = Budget(max_total_tokens=10_000)
    with ProviderServer(calls=0) as server, bounded_clients(budget) as block:
        stream = client_of(server).converse_stream(**asked())["stream"]
        next(iter(stream))
        if way == "close":
            stream.close()
        del stream
        gc.collect()
        assert block.guard.open_calls() == ()
        assert block.guard.usage.reserved_tokens == 0
    usage = block.outcome.usage
    assert (usage.estimated_calls, usage.failed_calls) == (1, 0)


def test_a_stream_that_is_cut_is_charged_for_what_came():
    with ProviderServer(["cut"], calls=0) as server, bounded_clients(FREE) as block:
        with pytest.raises(Exception, match=r".") as raised:
            list(client_of(server).converse_stream(**asked())["stream"])
    assert not isinstance(raised.value, AttributeError)
    usage = block.outcome.usage
    assert (usage.failed_calls, usage.estimated_calls, usage.model_calls) == (1, 1, 1)
    assert block.guard.open_calls() == ()


@pytest.mark.parametrize("end", ["deadline", "abort"])
def test_a_stream_that_hangs_is_ended_in_good_order(end):
    budget = Budget(max_seconds=0.5) if end == "deadline" else FREE
    with ProviderServer(["hang_mid"], calls=0) as server, bounded_clients(budget) as block:
        events = client_of(server).converse_stream(**asked())["stream"]
        if end == "abort":
            server.once_hung(block.guard.abort)
        got = read(events)
    assert got["stop"] == "end_turn"
    assert str(block.outcome.stop_reason) == ("max_seconds" if end == "deadline" else "aborted")
    assert block.guard.open_calls() == ()


@pytest.mark.parametrize("step", ["drop", 500])
def test_a_call_that_fails_leaves_no_reservation(step):
    with ProviderServer([step]) as server, bounded_clients(Budget(max_total_tokens=9_000)) as block:
        with pytest.raises(Exception, match=r"."):
            client_of(server).converse(**asked())
        assert block.guard.open_calls() == ()
    assert block.outcome.usage.failed_calls == 1


@pytest.mark.parametrize("stream", [False, True], ids=["invoke", "response_stream"])
def test_anthropic_models_by_invoke_are_bounded(stream):
    body = {"anthropic_version": "bedrock-2023-05-31", "max_tokens": 100}
    body["messages"] = [{"role": "user", "content": "go"}]
    with ProviderServer(calls=0) as server, bounded_clients(Budget(max_iterations=2)) as block:
        client, texts = client_of(server), []
        for _ in range(3):
            ask = {"modelId": MODEL, "body": json.dumps(body)}
            if stream:
                reply = client.invoke_model_with_response_stream(**ask)["body"]
                events = [json.loads(one["chunk"]["bytes"]) for one in reply]
                deltas = [one for one in events if one["type"] == "content_block_delta"]
                texts.append("".join(one["delta"]["text"] for one in deltas))
            else:
                reply = json.loads(client.invoke_model(**ask)["body"].read())
                texts.append(reply["content"][0]["text"])
    assert texts[:2] == ["All done."] * 2
    assert texts[2].startswith("This run was stopped")
    usage = block.outcome.usage
    assert (server.hits, usage.total_tokens, usage.estimated_calls) == (2, 2 * TOKENS, 0)


def test_models_of_other_makers_by_invoke_are_counted_and_estimated():
    with ProviderServer() as server, bounded_clients(Budget(max_model_calls=1)) as block:
        client = client_of(server)
        ask = {"modelId": "meta.llama3-8b-instruct-v1:0", "body": b'{"prompt": "go"}'}
        client.invoke_model(**ask)
        with pytest.raises(ClientError):
            client.invoke_model(**ask)
    assert (server.hits, block.outcome.usage.model_calls) == (1, 1)


def test_a_refused_unknown_operation_is_an_error_and_the_run_goes_on():
    with ProviderServer(calls=0) as server, bounded_clients(FREE, on_unknown="refuse") as block:
        client = client_of(server)
        with pytest.raises(ClientError):
            client.invoke_model(modelId="meta.llama3", body=b'{"prompt": "go"}')
        client.converse(**asked())
    assert (server.hits, block.outcome.status) == (1, "completed")


def test_after_the_block_a_client_is_as_it_was():
    from botocore.client import BaseClient

    own = BaseClient._make_api_call
    with ProviderServer(calls=0) as server:
        client = client_of(server)
        with bounded_clients(Budget(max_iterations=1)):
            client.converse(**asked())
            assert BaseClient._make_api_call is not own
        assert BaseClient._make_api_call is own
        for _ in range(3):
            client.converse(**asked())
    assert server.hits == 4


def test_threads_share_the_budget_of_registered_clients():
    with ProviderServer(calls=0) as server, BedrockHooks(Budget(max_iterations=11)) as hooks:
        client = hooks.register(client_of(server))
        threads = [threading.Thread(target=client.converse, kwargs=asked()) for _ in range(24)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert server.hits == hooks.outcome.usage.iterations == 11


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("first", ["hooks", "block"])
@pytest.mark.parametrize("caps", [(2, 9), (9, 2)], ids=["hooks end", "block ends"])
def test_hooks_in_a_block_count_once_in_both_and_what_one_refuses_is_no_call_of_the_other(
    caps, first, stream
):
    with ProviderServer() as server, BedrockHooks(Budget(max_model_calls=caps[0])) as hooks:
        client = client_of(server)
        with bounded_clients(Budget(max_model_calls=caps[1])) as block:
            if first == "block":
                with pytest.raises(Exception, match="modelId"):
                    client.converse()
            hooks.register(client)
            for _ in range(4):
                ask = asked(toolConfig={"tools": [{"toolSpec": TOOL}]})
                if stream:
                    read(client.converse_stream(**ask)["stream"])
                else:
                    client.converse(**ask)
    usage = block.outcome.usage
    assert (server.hits, usage.model_calls, usage.iterations) == (2, 2, 2)
    assert (usage.total_tokens, usage.tool_calls) == (2 * TOKENS, 2)
    assert (usage.estimated_calls, usage.failed_calls, usage.reserved_tokens) == (0, 0, 0)
    assert not block.guard.open_calls()


def test_a_stop_that_hooks_raise_in_a_block_is_no_call_of_the_block():
    hooks = BedrockHooks(Budget(max_model_calls=1), on_trip="raise")
    with ProviderServer(calls=0) as server, hooks:
        client = hooks.register(client_of(server))
        with bounded_clients(Budget(max_model_calls=9)) as block:
            client.converse(**asked())
            for _ in range(2):
                with pytest.raises(CallRefused):
                    client.converse(**asked())
    gc.collect()
    usage = block.guard.usage
    assert (server.hits, usage.model_calls, usage.failed_calls) == (1, 1, 0)
    assert not block.guard.open_calls()


def test_a_client_of_another_service_is_refused():
    client = session().client("sts")
    with pytest.raises(AdapterError, match="bedrock-runtime"):
        BedrockHooks(FREE).register(client)


def test_the_clients_key_is_in_no_error_and_no_outcome(caplog):
    caplog.set_level("DEBUG", logger="budgetguard_core")
    events = []
    with ProviderServer([500, "drop"], calls=0) as server:
        with bounded_clients(FREE, sinks=[events.append]) as block:
            for _ in range(2):
                with pytest.raises(Exception, match=r"."):
                    client_of(server).converse(**asked())
    assert SECRET not in f"{events} {block.outcome!r} {caplog.text}"
    assert "AWS4" not in f"{events} {block.outcome!r} {caplog.text}"


@STREAMED
async def test_below_strands_every_call_is_counted_once(stream):
    from strands import Agent, tool
    from strands.models import BedrockModel

    from budgetguard_core.kit import Envelope
    from budgetguard_strands import BudgetHookProvider

    @tool
    def read_file(path: str = "") -> str:
        """Read a file."""
        return "nothing new"

    outcomes = []
    envelope = Envelope(budget=CAPPED, on_outcome=outcomes.append)
    install()
    try:
        with ProviderServer() as server:
            model = BedrockModel(
                boto_session=session(), endpoint_url=server.url, model_id=MODEL, streaming=stream
            )
            agent = Agent(
                model=model,
                tools=[read_file],
                hooks=[BudgetHookProvider(envelope)],
                callback_handler=None,
            )
            await agent.invoke_async("go")
    finally:
        uninstall()
    usage = outcomes[0].usage
    assert (server.hits, usage.model_calls, usage.iterations) == (CAP, CAP, CAP)
    assert (usage.total_tokens, usage.estimated_calls) == (CAP * TOKENS, 0)
