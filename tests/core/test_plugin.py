"""The pytest plugin as users have it: found by its entry point, in a pytest of their own."""

from __future__ import annotations

import pytest
from pytest_examples import find_examples

import layout
from budgetguard_core import Budget, BudgetExceeded, ConfigurationError, Guard
from budgetguard_core.kit import ModelCall, TokenUsage
from budgetguard_core.testing import assert_bounded
from run_logs import write
from sticky_runs import NEEDS, RUNS

pytest_plugins = ["pytester"]

USED = TokenUsage(input_tokens=90, output_tokens=10)


@pytest.fixture
def tests_of_a_user(pytester):
    def run(text, *options):
        pytester.makepyfile(text)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)

    return run


@pytest.mark.slow
def test_the_fixtures_are_there(tests_of_a_user):
    done = tests_of_a_user(
        """
        from budgetguard_core.kit import ModelCall, Stop
        from budgetguard_core.testing import assert_bounded
        from budgetguard_core import Budget

        def test_time(manual_clock, budget_guard):
            guard = budget_guard(max_seconds=60)
            assert not isinstance(guard.admit_model_call(ModelCall()), Stop)
            manual_clock.advance(60)
            assert isinstance(guard.admit_model_call(ModelCall()), Stop)
            assert_bounded(guard, within=Budget(max_iterations=1))
        """
    )
    done.assert_outcomes(passed=1)


LOOP = """
    import pytest
    from budgetguard_core import Budget
    from budgetguard_loop import run_bounded

    def agent(scripted_model):
        model = scripted_model("loop", {"search": {"query": "x"}})
        outcome = run_bounded(
            model,
            Budget(max_iterations=4, loop_detection=None),
            messages="Go.",
            tools={"search": lambda query: "nothing"},
            model="gpt-4o",
        )
        assert model.answers.calls == outcome.usage.model_calls
        return outcome
"""


@pytest.mark.slow
def test_the_marker_fails_a_test_that_passes_its_envelope(tests_of_a_user):
    done = tests_of_a_user(
        LOOP
        + """
    @pytest.mark.budget(max_iterations=3)
    def test_too_much(scripted_model):
        assert agent(scripted_model).usage.model_calls == 4  # it was observed, and not stopped

    @pytest.mark.budget(max_iterations=4)
    def test_enough(scripted_model):
        agent(scripted_model)

    @pytest.mark.budget(max_iterations=1)
    def test_that_fails_by_itself():
        assert False

    @pytest.mark.anyio
    @pytest.mark.budget(max_iterations=3)
    async def test_async(scripted_model):
        agent(scripted_model)
    """,
        "-p",
        "anyio",
    )
    outcomes = done.parseoutcomes()
    assert outcomes["passed"] == 1
    text = done.stdout.str()
    assert "the run exceeded its envelope: max_iterations=3: 4 used" in text
    assert "FAILED" in text
    assert "test_that_fails_by_itself" in text
    assert "E       assert False" in text
    assert "test_async[asyncio]" in text
    assert outcomes["failed"] == 3


@pytest.mark.slow
def test_the_marker_says_where_it_would_watch_nothing(tests_of_a_user):
    done = tests_of_a_user(
        """
        import unittest
        import pytest

        class TestOld(unittest.TestCase):
            @pytest.mark.budget(max_iterations=1)
            def test_it(self): ...

        @pytest.mark.budget(max_iterations=1)
        def test_whose_agent_nobody_bounds(): ...

        @pytest.mark.budget(max_turns=1)
        def test_with_a_cap_that_is_none(): ...
        """
    )
    text = " ".join(done.stdout.str().split())
    assert "got a method of a unittest.TestCase. Use assert_bounded in it." in text
    assert "pytest.mark.budget saw no call" in text
    assert "max_turns is not a field" in text
    done.assert_outcomes(passed=1, failed=1, errors=1, warnings=1)


def test_an_async_function_is_not_taken_for_one_that_ran():
    async def agent(): ...

    with pytest.raises(ConfigurationError, match=r"asyncio\.run"):
        assert_bounded(agent, within=Budget(max_iterations=1))


def record(path):
    """Write the log of one run, as BUDGETGUARD_LOG does."""
    lines = write(path).read_text().splitlines(True)
    path.write_text("".join(line for line in lines if '"run_id":"near"' in line))


@pytest.mark.slow
def test_the_tests_in_the_readme_pass(pytester):
    pytest.importorskip("langchain")
    readme = layout.ROOT / "budgetguard_core" / "testing" / "README.md"
    (block,) = (one.source for one in find_examples(str(readme)) if one.prefix == "py")
    record(pytester.mkdir("runs") / "slow.jsonl")
    agent = """
        from langchain.agents import create_agent

        def search(query: str) -> str:
            "Search."
            return f"nothing about {query}"

        def build_graph(model):
            return create_agent(model, tools=[search])
        """
    pytester.makepyfile(test_of_the_readme=block, my_agent=agent)
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    done.assert_outcomes(passed=block.count("def test_"))


@pytest.mark.slow
def test_a_recorded_run_is_a_fixture(tests_of_a_user, pytester):
    record(pytester.mkdir("runs") / "near.jsonl")
    done = tests_of_a_user(
        """
        import pytest
        from budgetguard_core import Budget
        from budgetguard_core.testing import assert_bounded

        def test_recorded(recorded_run):
            used = assert_bounded(recorded_run("runs/near.jsonl"), within=Budget(max_iterations=9))
            assert used.tool_calls == 9
            with pytest.raises(AssertionError, match="max_iterations=8: 9 used"):
                assert_bounded(recorded_run("runs/near.jsonl"), within=Budget(max_iterations=8))

        def test_under_another_budget(recorded_run):
            guard = recorded_run("runs/near.jsonl", within=Budget(max_iterations=5))
            assert guard.trip.reason == "max_iterations"
        """
    )
    done.assert_outcomes(passed=2)


FRAMEWORKS = {
    "langgraph": (
        "langgraph",
        """
        from langchain.agents import create_agent
        from langchain_core.tools import tool
        from budgetguard_langgraph import bounded, outcome

        @tool
        def search(query: str) -> str:
            "Search."
            return "nothing about " + query

        def run(model, budget):
            graph = bounded(create_agent(model, [search]), budget)
            return outcome(graph.invoke({"messages": [("user", "Go.")]}))
        """,
    ),
    "openai_agents": (
        "agents",
        """
        from agents import Agent, Runner, function_tool, set_tracing_disabled
        from budgetguard_openai_agents import bounded_run_sync, outcome

        set_tracing_disabled(True)

        @function_tool
        def search(query: str) -> str:
            return "nothing about " + query

        def run(model, budget):
            agent = Agent(name="a", model=model, tools=[search])
            return outcome(bounded_run_sync(agent, "Go.", budget=budget))
        """,
    ),
    "pydantic_ai": (
        "pydantic_ai",
        """
        from pydantic_ai import Agent
        from budgetguard_pydantic_ai import BudgetCapability, outcome

        def search(query: str) -> str:
            return "nothing about " + query

        def run(model, budget):
            agent = Agent(model, tools=[search], capabilities=[BudgetCapability(budget)])
            return outcome(agent.run_sync("Go."))
        """,
    ),
    "strands": (
        "strands",
        """
        from strands import Agent, tool
        from budgetguard_strands import BudgetHookProvider

        @tool
        def search(query: str) -> str:
            "Search."
            return "nothing about " + query

        def run(model, budget):
            provider = BudgetHookProvider(budget)
            agent = Agent(model=model, tools=[search], hooks=[provider], callback_handler=None)
            agent("Go.")
            return provider.outcome(agent)
        """,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_a_scripted_model_for_every_installed_framework(tests_of_a_user, framework):
    module, agent = FRAMEWORKS[framework]
    pytest.importorskip(module)
    done = tests_of_a_user(
        agent
        + f"""
        from budgetguard_core import Budget
        from budgetguard_core.testing import assert_bounded

        def test_it_ends_by_itself(scripted_model):
            model = scripted_model({framework!r}, {{"search": {{"query": "x"}}}}, "Done.")
            outcome = run(model, Budget(max_iterations=5))
            used = assert_bounded(outcome, within=Budget(max_iterations=2), completed=True)
            assert model.answers.calls == used.model_calls == 2
            assert used.tool_calls == 1
            assert used.input_tokens == 200

        def test_a_runaway_is_stopped(scripted_model):
            model = scripted_model({framework!r}, {{"search": {{"query": "x"}}}})
            outcome = run(model, Budget(max_iterations=3, loop_detection=None))
            assert outcome.stop_reason == "max_iterations"
            assert model.answers.calls == 3
        """,
        "-W",
        "ignore",
    )
    done.assert_outcomes(passed=2)


@pytest.mark.slow
def test_an_unknown_framework_is_said(tests_of_a_user):
    done = tests_of_a_user("def test_it(scripted_model):\n    scripted_model('nope', 'Done.')")
    assert "framework 'nope' is not known. Use one of: langgraph, loop" in done.stdout.str()


@pytest.mark.slow
def test_the_plugin_can_be_left_out(tests_of_a_user):
    done = tests_of_a_user("def test_it(manual_clock): ...", "-p", "no:budgetguard")
    done.assert_outcomes(errors=1)


def guard_of(calls, **caps):
    guard = Guard(Budget(loop_detection=None, **caps))
    for _ in range(calls):
        guard.settle_model_call(guard.admit_model_call(ModelCall(model="gpt-4o")), USED)
    return guard


def test_every_cap_that_was_passed_is_named():
    with pytest.raises(AssertionError) as caught:
        assert_bounded(guard_of(3), within=Budget(max_iterations=2, max_total_tokens=250))
    assert str(caught.value) == (
        "the run exceeded its envelope: max_iterations=2: 3 used; max_total_tokens=250: 300 used"
    )
    assert_bounded(guard_of(3), within=Budget(max_iterations=3, max_total_tokens=300))


def test_a_stopped_run_has_not_completed():
    guard = guard_of(3, max_iterations=3)
    guard.admit_model_call()
    assert_bounded(guard, within=Budget(max_iterations=3))
    with pytest.raises(AssertionError, match="must have ended by itself"):
        assert_bounded(guard, within=Budget(max_iterations=3), completed=True)


@pytest.mark.parametrize("adapter", sorted(RUNS))
def test_the_outcome_of_every_adapter_is_judged(adapter):
    pytest.importorskip(NEEDS[adapter])
    outcome = RUNS[adapter](Budget(max_iterations=4, loop_detection=None))
    assert_bounded(outcome, within=Budget(max_iterations=4, tool_quotas={"read_*": 4}))
    with pytest.raises(AssertionError, match=r"tool_quotas\['read_\*'\]=3: 4 used"):
        assert_bounded(outcome, within=Budget(tool_quotas={"read_*": 3}))


@pytest.mark.parametrize("adapter", sorted(RUNS))
def test_a_function_is_observed_and_judged(adapter):
    pytest.importorskip(NEEDS[adapter])

    def run():
        RUNS[adapter](Budget(max_iterations=4, loop_detection=None))

    assert assert_bounded(run, within=Budget(max_iterations=4)).model_calls == 4
    with pytest.raises(AssertionError, match="max_iterations=3: 4 used"):
        assert_bounded(run, within=Budget(max_iterations=3))


def test_an_exception_with_an_outcome_is_judged():
    with pytest.raises(BudgetExceeded) as caught:
        RUNS["budgetguard_loop"](Budget(max_iterations=2), on_trip="raise")
    assert assert_bounded(caught.value, within=Budget(max_iterations=2)).model_calls == 2


def test_what_is_no_run_is_refused():
    with pytest.raises(ConfigurationError, match="takes an outcome"):
        assert_bounded(3, within=Budget())
