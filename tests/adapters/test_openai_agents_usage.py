"""Tokens, dollars and attempts: what the SDK reports, and what it does not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from agents import (
    Agent,
    ModelRetrySettings,
    ModelSettings,
    RunConfig,
    handoff,
)
from pydantic import BaseModel, Field

from budgetguard_core import Budget, Guard, Price, PriceBook, StopReason
from budgetguard_core.testing import MODEL, Call, ProviderError, Reply
from budgetguard_openai_agents import BudgetHooks, outcome
from budgetguard_openai_agents._model import model_of, written
from openai_agents_raw import RawModel, text_item
from openai_agents_runs import MODES, agent_of, calls, go, says, script_of, tool

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)
PRICES = PriceBook({MODEL: Price(input=1000, output=2000)})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt-4.1", ("gpt-4.1", None)),
        ("openai/gpt-4.1", ("gpt-4.1", "openai")),
        ("litellm/anthropic/claude-sonnet-4-5", ("claude-sonnet-4-5", "anthropic")),
    ],
)
def test_the_model_is_found_by_its_name(model, expected):
    assert model_of(Agent(name="a", model=model), RunConfig()) == expected
    assert model_of(Agent(name="a"), RunConfig(model=model)) == expected


def test_the_model_is_found_on_an_instance_and_by_default():
    assert model_of(agent_of(says("Hi.")), RunConfig()) == (MODEL, None)
    assert model_of(Agent(name="a"), RunConfig())[0]


def test_all_that_a_model_says_is_read():
    items = [
        {"type": "reasoning", "summary": [{"text": "think"}]},
        {"type": "message", "content": [{"text": "say"}]},
        {"type": "function_call", "name": "a", "arguments": "{}"},
    ]
    assert written(items) == "think\nsay"


@modes
async def test_a_failed_call_is_charged_its_projection(mode):
    agent = agent_of(
        Reply(error=ProviderError("overloaded")), model_settings=ModelSettings(max_tokens=500)
    )
    guard = Guard(Budget(max_total_tokens=100_000))
    with pytest.raises(ProviderError):
        await go(mode, agent, "Tell me. " * 100, hooks=BudgetHooks(guard))
    assert guard.usage.failed_calls == 1
    assert 200 <= guard.usage.total_tokens < 500
    assert guard.usage.reserved_tokens == 0


def retrying(**options: Any) -> ModelSettings:
    return ModelSettings(
        retry=ModelRetrySettings(
            max_retries=3, policy=lambda _: True, backoff={"initial_delay": 0.0, "jitter": False}
        ),
        **options,
    )


@modes
async def test_attempts_of_the_sdk_are_admitted_one_by_one(mode):
    failure = Reply(error=ProviderError("overloaded"))
    agent = agent_of(failure, failure, says("Hi."), model_settings=retrying())
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=1)))
    usage = outcome(result).usage
    assert (usage.iterations, usage.model_calls, usage.failed_calls) == (1, 3, 2)
    assert result.final_output == "Hi."


@modes
async def test_the_attempt_that_does_not_fit_is_not_made_and_ends_the_run(mode):
    agent = agent_of(Reply(error=ProviderError("overloaded")), model_settings=retrying())
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_model_calls=2)))
    assert script_of(agent).calls == 2
    assert outcome(result).stop_reason is StopReason.MAX_MODEL_CALLS


@modes
async def test_retries_given_for_the_run_are_admitted_too(mode):
    agent = agent_of(Reply(error=ProviderError("overloaded")))
    result = await go(
        mode,
        agent,
        run_config=RunConfig(model_settings=retrying()),
        hooks=BudgetHooks(Budget(max_model_calls=2)),
    )
    assert script_of(agent).calls == 2
    assert outcome(result).stop_reason is StopReason.MAX_MODEL_CALLS


@pytest.mark.parametrize(
    ("own", "of_run", "of_budget", "sent"),
    [
        (None, None, 200, 200),
        (500, None, 200, 200),
        (100, None, 200, 100),
        (500, 50, 200, 50),
        (500, None, None, 500),
        (None, None, None, None),
        (-1, None, 200, 200),
        (-1, None, None, -1),
    ],
)
async def test_the_request_carries_the_bound_of_the_completion(own, of_run, of_budget, sent):
    seen: list[Any] = []
    agent = agent_of(says("Hi."), model_settings=ModelSettings(max_tokens=own))
    get = agent.model.get_response

    async def look(system_instructions: Any, given: Any, settings: Any, *args: Any, **kw: Any):
        seen.append(settings.max_tokens)
        return await get(system_instructions, given, settings, *args, **kw)

    async def look_by_name(**kwargs: Any) -> Any:
        return await look(
            kwargs.pop("system_instructions"),
            kwargs.pop("input"),
            kwargs.pop("model_settings"),
            kwargs.pop("tools"),
            **kwargs,
        )

    agent.model.get_response = look_by_name
    config = RunConfig(model_settings=ModelSettings(max_tokens=of_run))
    budget = Budget(max_iterations=3, max_output_tokens_per_call=of_budget)
    await go("run", agent, run_config=config, hooks=BudgetHooks(budget))
    assert seen == [sent]


@modes
async def test_a_projection_that_does_not_fit_stops_before_the_call(mode):
    agent = agent_of(says("Hi."))
    given = "word " * 6000
    result = await go(mode, agent, given, hooks=BudgetHooks(Budget(max_total_tokens=4000)))
    assert script_of(agent).calls == 0
    assert outcome(result).stop_reason is StopReason.MAX_TOTAL_TOKENS


@modes
async def test_a_sub_agent_is_bounded_by_its_own_and_by_the_parents_completion_bound(mode):
    seen: list[int | None] = []
    below = agent_of(says("Gold."), name="worker")

    for name in ("get_response", "stream_response"):
        original = getattr(below.model, name)

        def look(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            settings = kwargs["model_settings"] if "model_settings" in kwargs else args[2]
            seen.append(settings.max_tokens)
            return original(*args, **kwargs)

        setattr(below.model, name, look)
    ask = below.as_tool(
        tool_name="ask",
        tool_description="Ask.",
        hooks=BudgetHooks(Budget(max_output_tokens_per_call=50)),
    )
    agent = agent_of(calls("ask"), says("Thanks."), tools=[ask])
    await go(mode, agent, hooks=BudgetHooks(Budget(max_output_tokens_per_call=80)))
    assert seen == [50]


@modes
async def test_tools_handoffs_and_output_schemas_are_projected(mode):
    """A cap holds from the first call on, whatever makes the prompt large."""
    about = "word " * 3000
    large = tool("search", [], description_override=about)
    other = agent_of(says("Hi."), name="other", handoff_description=about)

    class Large(BaseModel):
        value: str = Field(description=about)

    for options in ({"tools": [large]}, {"handoffs": [handoff(other)]}, {"output_type": Large}):
        agent = agent_of(says('{"value": "x"}'), **options)
        guard = Guard(Budget(max_total_tokens=2000))
        result = await go(mode, agent, hooks=BudgetHooks(guard))
        assert outcome(result).stop_reason is StopReason.MAX_TOTAL_TOKENS
        assert script_of(agent).calls == 0


@pytest.mark.parametrize("figures", [(-5, 20), (100, -20), (-1, -1), (10.0, 5.0)])
@modes
async def test_figures_that_a_provider_gets_wrong_never_raise(mode, figures):
    # A figure with a fraction is refused by the SDK itself, with or without a budget.
    agent = Agent(name="main", model=RawModel([text_item("Hi.")], usage=figures))
    guard = Guard(Budget(max_total_tokens=10_000))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert result.final_output == "Hi."
    assert guard.usage.total_tokens > 0
    assert guard.open_calls() == ()


@modes
async def test_an_answer_that_our_own_bound_cut_is_a_stop_with_its_text(mode):
    item = text_item("This is only half of")
    item.status = "incomplete"
    model = RawModel([item], usage=(10, 40))
    agent = Agent(name="main", model=model)
    budget = Budget(max_output_tokens_per_call=40)
    result = await go(mode, agent, hooks=BudgetHooks(budget))
    assert outcome(result).status == "terminated"
    assert outcome(result).stop_reason is StopReason.MAX_OUTPUT_TOKENS_PER_CALL
    assert "only half of" in str(result.to_input_list())


@modes
async def test_the_request_is_bounded_by_what_is_left(mode):
    seen: list[int | None] = []
    agent = agent_of(says("Hi."), model_settings=ModelSettings(max_tokens=5000))
    for name in ("get_response", "stream_response"):
        original = getattr(agent.model, name)

        def look(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            settings = kwargs["model_settings"] if "model_settings" in kwargs else args[2]
            seen.append(settings.max_tokens)
            return original(*args, **kwargs)

        setattr(agent.model, name, look)
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_total_tokens=600)))
    assert result.final_output == "Hi."
    assert seen[0] is not None
    assert seen[0] < 600


@modes
async def test_an_agent_to_hand_over_to_counts_as_what_is_sent_of_it(mode):
    other = agent_of(says("Never."), name="other", instructions="word " * 20_000)
    agent = agent_of(says("Done."), handoffs=[other])
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_total_tokens=2000)))
    assert result.final_output == "Done."


@pytest.mark.slow
@modes
async def test_what_a_prompt_consists_of_is_looked_at_once(mode, monkeypatch):
    from budgetguard_core.kit import projection
    from openai_agents_raw import OneToolServer

    looked: Counter[str] = Counter()
    for name in ("estimate", "estimate_schema"):
        own = getattr(projection, name)

        def counted(content: Any, own: Any = own, name: str = name) -> int:
            looked[name] += 1
            return own(content)

        monkeypatch.setattr(projection, name, counted)
    turns = 30
    other = agent_of(says("Never."), name="other")
    agent = agent_of(
        *(calls(Call("a", str(n))) for n in range(turns - 1)),
        says("Done."),
        tools=[tool("a", [])],
        handoffs=[other],
        mcp_servers=[OneToolServer([])],
    )
    guard = Guard(Budget(max_iterations=99, max_total_tokens=10**9))
    await go(mode, agent, hooks=BudgetHooks(guard))
    assert guard.usage.iterations == turns
    # The user's words; a call and its result in each further turn. The system prompt, once.
    assert looked["estimate"] == 1 + 2 * (turns - 1) + 1
    # Two tools, a handoff, no output schema: once.
    assert looked["estimate_schema"] == 4
