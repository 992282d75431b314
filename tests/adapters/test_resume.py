"""`resume=` in every adapter: an outcome, a snapshot, or an id."""

from __future__ import annotations

import asyncio

import pytest

from budgetguard_core import Budget, ConfigurationError, MemoryStore
from budgetguard_core.errors import CheckpointError
from budgetguard_core.testing.scripted import Answers

SEARCH = {"search": {"query": "a"}}
FOUND = []


def search(query: str) -> str:
    """Search."""
    FOUND.append(query)
    return f"{query} {len(FOUND)}"


class OfStrands:
    def __init__(self, answers, **options):
        strands = pytest.importorskip("strands")
        from budgetguard_strands import BudgetHookProvider, scripted

        self.provider = BudgetHookProvider(**options)
        self.agent = strands.Agent(
            model=scripted.scripted_model(Answers(answers)),
            tools=[strands.tool(search)],
            hooks=[self.provider],
            callback_handler=None,
        )

    def run(self, text):
        self.agent(text)
        return self.provider.outcome(self.agent)

    def words(self):
        return [one["role"] for one in self.agent.messages]


class OfPydanticAI:
    def __init__(self, answers, **options):
        pydantic_ai = pytest.importorskip("pydantic_ai")
        from budgetguard_pydantic_ai import BudgetCapability, outcome, scripted

        self.outcome = outcome
        self.agent = pydantic_ai.Agent(
            scripted.scripted_model(Answers(answers)),
            tools=[search],
            capabilities=[BudgetCapability(**options)],
        )

    async def run_async(self, text):
        self.result = await self.agent.run(text)
        return self.outcome(self.result)

    def run(self, text):
        return asyncio.run(self.run_async(text))

    def words(self):
        kinds = {"request": "user", "response": "assistant"}
        return [kinds[one.kind] for one in self.result.all_messages()]


class OfLangGraph:
    def __init__(self, answers, **options):
        agents = pytest.importorskip("langchain.agents")
        from budgetguard_langgraph import bounded, outcome, scripted

        self.outcome = outcome
        model = scripted.scripted_model(Answers(answers))
        self.agent = bounded(agents.create_agent(model, tools=[search]), **options)

    def run(self, text):
        self.result = self.agent.invoke({"messages": [("user", text)]})
        return self.outcome(self.result)

    def words(self):
        return ["assistant" if one.type == "ai" else "user" for one in self.result["messages"]]


FRAMEWORKS = pytest.mark.parametrize("framework", [OfStrands, OfPydanticAI, OfLangGraph])


@FRAMEWORKS
@pytest.mark.parametrize("named_by", ["outcome", "snapshot", "id"])
def test_a_new_agent_goes_on_where_the_run_was_stopped(framework, named_by):
    store = MemoryStore()
    first = framework([SEARCH], budget=Budget(max_iterations=2), store=store)
    stopped = first.run("Go.")
    assert (stopped.status, stopped.usage.iterations) == ("terminated", 2)
    resume = {
        "outcome": stopped,
        "snapshot": store.load(stopped.run_id),
        "id": stopped.run_id,
    }[named_by]
    before = len(FOUND)
    again = framework(
        [SEARCH, "Done."], budget=Budget(max_iterations=5), store=store, resume=resume
    )
    ended = again.run("Go on.")
    assert (ended.status, ended.usage.iterations) == ("completed", 2)
    assert ended.earlier_usage.iterations == 2
    assert len(FOUND) == before + 1
    assert again.words() == [*first.words(), "user", "assistant", "user", "assistant"]
    if framework is OfStrands:
        assert again.run("And now?").earlier_usage.iterations == 0


@FRAMEWORKS
def test_what_cannot_be_resumed_is_said(framework):
    with pytest.raises(ConfigurationError, match="names a run in a store, got store=None"):
        framework(["Done."], budget=Budget(), resume="r").run("Go.")
    with pytest.raises(CheckpointError, match="has no run 'r'"):
        framework(["Done."], budget=Budget(), resume="r", store=MemoryStore()).run("Go.")


@pytest.mark.parametrize("named_by", ["outcome", "snapshot", "id"])
def test_a_block_of_clients_reports_what_was_used_before(named_by):
    pytest.importorskip("httpx")
    from budgetguard_core.kit import ModelCall, TokenUsage
    from budgetguard_http import bounded_clients

    store = MemoryStore()
    with bounded_clients(Budget(max_model_calls=1), store=store) as block:
        for _ in range(2):
            call = block.run.model_call(ModelCall())
            if block.run.trip is None:
                block.run.answered(call, TokenUsage(3, 4))
    stopped = block.outcome
    assert stopped.status == "terminated"
    known = {"outcome": stopped, "snapshot": store.load(stopped.run_id), "id": stopped.run_id}
    with bounded_clients(Budget(max_model_calls=1), store=store, resume=known[named_by]) as again:
        again.run.answered(again.run.model_call(ModelCall()), TokenUsage(3, 4))
    assert (again.outcome.status, again.outcome.usage.model_calls) == ("completed", 1)
    assert again.outcome.earlier_usage.model_calls == 1


def test_a_thread_that_has_messages_is_given_none_of_the_earlier_run():
    agents = pytest.importorskip("langchain.agents")
    from langgraph.checkpoint.memory import InMemorySaver

    from budgetguard_langgraph import bounded, outcome, scripted

    def agent(*answers, saver=None, **options):
        model = scripted.scripted_model(Answers(answers))
        graph = agents.create_agent(model, tools=[search], checkpointer=saver)
        return bounded(graph, Budget(max_iterations=2), **options)

    def texts(result):
        return [one.text for one in result["messages"] if one.type == "human"]

    stopped = outcome(agent(SEARCH).invoke({"messages": "First."}))
    config = {"configurable": {"thread_id": "1"}}
    again = agent("One.", "Two.", saver=InMemorySaver(), resume=stopped)
    assert texts(again.invoke({"messages": "Second."}, config)) == ["First.", "Second."]
    last = asyncio.run(again.ainvoke({"messages": "Third."}, config))
    assert texts(last) == ["First.", "Second.", "Third."]
    assert outcome(last).earlier_usage.iterations == 2
