"""Usage out of the records of the provider packages, and estimates where there is none."""

from __future__ import annotations

from decimal import Decimal

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult

from budgetguard_core import Budget, Guard
from budgetguard_core.kit import TokenUsage, project, reported_cost, token_usage
from budgetguard_core.testing import ProviderError, Reply, Script, says
from budgetguard_langgraph import BudgetCallback
from budgetguard_langgraph._models import answer_of, model_of, request_of
from conformance.budgetguard_langgraph_driver import ScriptedChat


def usage_of(response):
    record = answer_of(response) or response
    return token_usage(record), reported_cost(record)


def name_in(response):
    return model_of(response, answer_of(response))


def answered(metadata, **facts):
    message = AIMessage("x")
    # Provider packages fill it with what their API gives, checked by nobody.
    object.__setattr__(message, "usage_metadata", metadata)
    return LLMResult(generations=[[ChatGeneration(message=message)]], **facts)


def tokens(given, out, inputs=None, outputs=None):
    return {
        "input_tokens": given,
        "output_tokens": out,
        "total_tokens": given + out,
        "input_token_details": inputs or {},
        "output_token_details": outputs or {},
    }


CASES = {
    "plain": (tokens(100, 20), TokenUsage(100, 20)),
    "cached, with what is no part of it": (
        tokens(100, 20, {"cache_read": 60, "cache_creation": 9, "audio": 3}, {"audio": 2}),
        TokenUsage(100, 20, cache_read_tokens=60, cache_write_tokens=9),
    ),
    "a cache above the prompt": (
        tokens(100, 20, {"cache_read": 60, "cache_creation": 50}),
        TokenUsage(110, 20, cache_read_tokens=60, cache_write_tokens=50),
    ),
    "reasoning is a part of the output": (
        tokens(100, 50, outputs={"reasoning": 40}),
        TokenUsage(100, 50, reasoning_tokens=40),
    ),
    "Anthropic, one lifetime": (
        tokens(970, 20, {"cache_read": 800, "cache_creation": 70}),
        TokenUsage(970, 20, cache_read_tokens=800, cache_write_tokens=70),
    ),
    "Anthropic, both lifetimes": (
        tokens(
            970,
            20,
            {
                "cache_read": 800,
                "cache_creation": 0,
                "ephemeral_5m_input_tokens": 40,
                "ephemeral_1h_input_tokens": 30,
            },
        ),
        TokenUsage(970, 20, cache_read_tokens=800, cache_write_tokens=70, cache_write_1h_tokens=30),
    ),
    "Anthropic, both lifetimes and their sum": (
        tokens(
            970,
            20,
            {
                "cache_read": 800,
                "cache_creation": 70,
                "ephemeral_5m_input_tokens": 40,
                "ephemeral_1h_input_tokens": 30,
            },
        ),
        TokenUsage(970, 20, cache_read_tokens=800, cache_write_tokens=70, cache_write_1h_tokens=30),
    ),
    "OpenAI, flex tier": (
        tokens(100, 50, {"flex_cache_read": 60, "flex": 40}, {"flex_reasoning": 10, "flex": 40}),
        TokenUsage(100, 50, cache_read_tokens=60, reasoning_tokens=10),
    ),
    "OpenAI, priority tier": (
        tokens(100, 50, {"priority_cache_read": 60, "priority": 40}),
        TokenUsage(100, 50, cache_read_tokens=60),
    ),
    "a part above its whole": (
        tokens(0, 20, {"cache_read": 800}),
        TokenUsage(800, 20, cache_read_tokens=800),
    ),
    "all zero": (tokens(0, 0), None),
    "nothing": (None, None),
    "a total larger than its parts": (
        {"input_tokens": 100, "output_tokens": 0, "total_tokens": 150},
        TokenUsage(100, 50),
    ),
    "nonsense": (
        {"input_tokens": "7", "output_tokens": -3, "input_token_details": None},
        TokenUsage(7, 0, estimated=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_records_of_providers(name):
    reported, expected = CASES[name]
    assert usage_of(answered(reported)) == (expected, None)


def test_a_cost_beside_plain_figures_is_read():
    response = answered(tokens(100, 20))
    answer_of(response).response_metadata["token_usage"] = {"cost": 0.25, "prompt_tokens": 100}
    assert usage_of(response) == (TokenUsage(100, 20), Decimal("0.25"))


def test_an_answer_of_the_local_cache_is_free():
    metadata = {**tokens(100, 20), "total_cost": 0}
    assert usage_of(answered(metadata)) == (TokenUsage(), Decimal(0))


def test_a_text_model_reports_beside_its_answer():
    reported = {"token_usage": {"prompt_tokens": 7, "completion_tokens": 3}, "model_name": "m"}
    result = LLMResult(generations=[[Generation(text="x")]], llm_output=reported)
    assert usage_of(result) == (TokenUsage(7, 3), None)
    assert name_in(result) == "m"


def test_the_model_s_name_comes_from_wherever_it_is_told():
    assert name_in(answered(None)) is None
    assert name_in(answered(None, llm_output={"model_name": "a"})) == "a"
    told = {"ls_model_name": "b", "ls_provider": "openai"}
    assert request_of(told, None) == ("b", "openai", None)
    assert request_of({**told, "ls_provider": "mychat"}, None) == ("b", None, None)
    assert request_of(None, {"model": "c", "max_completion_tokens": 9}) == ("c", None, 9)
    assert request_of({"ls_max_tokens": 5}, {"max_tokens": 9}) == (None, None, 5)


def test_estimates_count_text_blocks_images_tool_calls_and_tools():
    text = "word " * 60
    plain = project([HumanMessage(text)])
    assert plain > 60
    blocks = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert plain + 500 < project([HumanMessage(blocks)]) < plain + 3000
    data = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 300_000}}
    assert project([HumanMessage([data])]) < 3000
    asked = AIMessage("", tool_calls=[{"name": "f", "args": {"a": text}, "id": "1"}])
    assert project([asked]) > 60
    assert project([], tools=[{"name": "f", "description": text}]) > 60


def called(model, guard, text="Go."):
    return model.invoke(text, {"callbacks": [BudgetCallback(guard)]})


def test_a_hit_of_langchain_s_cache_is_an_iteration_and_costs_nothing():
    model = ScriptedChat(script=Script([says("x")]), cache=InMemoryCache())
    guard = Guard(Budget(max_iterations=5))
    called(model, guard)
    called(model, guard)
    assert model.script.calls == 1
    assert guard.usage.model_calls == guard.usage.iterations == 2
    assert guard.usage.total_tokens == 120


def test_a_text_model_is_estimated_and_stopped():
    model = FakeListLLM(responses=["a long answer"])
    guard = Guard(Budget(max_model_calls=1))
    called(model, guard)
    assert guard.usage.estimated_calls == 1
    assert guard.usage.total_tokens > 0
    with pytest.raises(Exception, match="max_model_calls"):
        called(model, guard)


@pytest.mark.parametrize(("status", "free"), [(429, True), (408, False), (500, False)])
def test_a_call_that_the_provider_turned_away_used_nothing(status, free):
    error = ProviderError("no")
    error.status_code = status
    guard = Guard(Budget(max_total_tokens=10_000))
    with pytest.raises(ProviderError):
        called(ScriptedChat(script=Script([Reply(error=error)])), guard, "word " * 60)
    assert guard.usage.failed_calls == 1
    assert (guard.usage.total_tokens == 0) == free
    assert guard.usage.reserved_tokens == 0


@pytest.mark.parametrize("output", [0, None])
def test_an_output_of_nothing_beside_a_text_is_estimated(output):
    class Silent(ScriptedChat):
        def _generate(self, messages, stop=None, run_manager=None, **_):
            message = AIMessage("word " * 60)
            usage = {"input_tokens": 100, "output_tokens": output, "total_tokens": 100}
            object.__setattr__(message, "usage_metadata", usage)
            return ChatResult(generations=[ChatGeneration(message=message)])

    guard = Guard(Budget())
    called(Silent(script=Script([])), guard)
    assert guard.usage.input_tokens == 100
    assert guard.usage.output_tokens > 50
    assert guard.usage.estimated_calls == 1
