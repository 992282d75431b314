"""The $47,000 incident: an analyzer and a verifier that ask each other for one more analysis.

Nothing fails and no cap is near, so nothing but the detection of repetition ends it. No loop
detection is configured here: it is on without a word.
"""

from __future__ import annotations

import asyncio

import pytest

from budgetguard_core import Budget, StopReason
from budgetguard_core.testing import Reply, Script, says

REPORT = "Growth was 4 %. Please verify the analysis."
DOUBT = "The analysis needs one more pass. Please expand it."
TURNS = 10
CAPS = Budget(max_iterations=10_000, max_cost_usd=50_000, on_unpriced="count_zero")
WAYS = ("sync", "async")


def check(outcome, *scripts, calls_a_turn=1):
    """The run was told, then stopped, within ten turns, as one that goes in a circle."""
    assert outcome.status == "terminated"
    assert outcome.stop_reason in (StopReason.OSCILLATION, StopReason.NO_PROGRESS)
    assert sum(script.calls for script in scripts) == outcome.usage.model_calls
    assert outcome.usage.model_calls <= TURNS * calls_a_turn
    told = [sent for script in scripts for sent in script.sent if "circle" in sent]
    assert told, "no correction was given before the stop"


def ended(work, way):
    return work() if way == "sync" else asyncio.run(work())


@pytest.mark.parametrize("way", WAYS)
def test_two_nodes_of_a_graph(way):
    pytest.importorskip("langgraph")
    from langgraph.graph import START, MessagesState, StateGraph

    from budgetguard_langgraph import bounded, outcome
    from conformance.budgetguard_langgraph_driver import ScriptedChat

    scripts = Script([says(REPORT)]), Script([says(DOUBT)])
    graph = StateGraph(MessagesState)
    for name, script in zip(("analyzer", "verifier"), scripts, strict=True):
        model = ScriptedChat(script=script)

        def node(state, model=model):
            return {"messages": [model.invoke(state["messages"])]}

        async def anode(state, model=model):
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph.add_node(name, node if way == "sync" else anode)
    graph.add_edge(START, "analyzer")
    graph.add_edge("analyzer", "verifier")
    graph.add_edge("verifier", "analyzer")
    team = bounded(graph.compile(), CAPS)
    given = {"messages": [("user", "Analyze the market.")]}
    result = team.invoke(given) if way == "sync" else asyncio.run(team.ainvoke(given))
    check(outcome(result), *scripts)


@pytest.mark.parametrize("way", ["run", "run_streamed"])
async def test_two_agents_that_hand_over_to_each_other(way):
    agents = pytest.importorskip("agents")
    from budgetguard_openai_agents import BudgetHooks, outcome
    from conformance.budgetguard_openai_agents_driver import ScriptedModel

    scripts = (
        Script([Reply(text=REPORT, handoff="verifier")]),
        Script([Reply(text=DOUBT, handoff="analyzer")]),
    )
    analyzer = agents.Agent(name="analyzer", model=ScriptedModel(scripts[0]))
    verifier = agents.Agent(name="verifier", model=ScriptedModel(scripts[1]), handoffs=[analyzer])
    analyzer.handoffs = [verifier]
    hooks = BudgetHooks(CAPS)
    if way == "run":
        result = await agents.Runner.run(analyzer, "Analyze the market.", hooks=hooks)
    else:
        result = agents.Runner.run_streamed(analyzer, "Analyze the market.", hooks=hooks)
        async for _ in result.stream_events():
            pass
    check(outcome(result), *scripts)


@pytest.mark.parametrize("way", WAYS)
def test_a_swarm(way):
    pytest.importorskip("strands")
    from strands.multiagent import Swarm

    from budgetguard_strands import BudgetHookProvider
    from strands_agents import made, run

    def turns(to, text):
        # A handover is a tool call in Strands: its agent speaks once more when it has been made.
        return Script(
            lambda number: Reply(text=text, handoff=to) if number % 2 == 0 else says(text)
        )

    scripts = turns("verifier", REPORT), turns("analyzer", DOUBT)
    team = [
        made(script, name=name, description=name)
        for script, name in zip(scripts, ("analyzer", "verifier"), strict=True)
    ]
    provider = BudgetHookProvider(CAPS)
    swarm = provider.attach(Swarm(team, max_handoffs=500, max_iterations=500))
    run(swarm, "Analyze the market.", way)
    check(provider.outcome(swarm), *scripts, calls_a_turn=2)


@pytest.mark.parametrize("way", WAYS)
def test_two_plain_loops(way):
    from budgetguard_core import Guard
    from budgetguard_loop import bounded, run_bounded, run_bounded_async

    scripts = Script([says(REPORT)]), Script([says(DOUBT)])
    guard = Guard(CAPS)

    def step(script):
        def ask(messages):
            return script.next(str(messages)).text

        async def aask(messages):
            return ask(messages)

        return ask if way == "sync" else aask

    def talk():
        said = "Analyze the market."
        with bounded(guard) as team:
            while True:
                for script in scripts:
                    said = run_bounded(step(script), Budget(), messages=said).final
        return team.outcome

    async def talk_async():
        said = "Analyze the market."
        async with bounded(guard) as team:
            while True:
                for script in scripts:
                    part = await run_bounded_async(step(script), Budget(), messages=said)
                    said = part.final
        return team.outcome

    check(ended(talk if way == "sync" else talk_async, way), *scripts)


@pytest.mark.parametrize("way", WAYS)
def test_two_plain_loops_in_an_activate_block(way):
    from budgetguard_core import Guard
    from budgetguard_loop import run_bounded, run_bounded_async

    scripts = Script([says(REPORT)]), Script([says(DOUBT)])
    guard = Guard(CAPS)

    def step(script):
        def ask(messages):
            return script.next(str(messages)).text

        async def aask(messages):
            return ask(messages)

        return ask if way == "sync" else aask

    async def talk():
        said = "Analyze the market."
        for turn in range(2 * TURNS):
            ask = step(scripts[turn % 2])
            if way == "sync":
                part = run_bounded(ask, Budget(), messages=said)
            else:
                part = await run_bounded_async(ask, Budget(), messages=said)
            if part.status != "completed":
                return part
            said = part.final
        raise AssertionError("nobody stopped them")

    with guard.activate():
        part = asyncio.run(talk())
    assert part.status == "terminated"
    assert part.stop_reason in (StopReason.OSCILLATION, StopReason.NO_PROGRESS)
    assert [sent for script in scripts for sent in script.sent if "circle" in sent]


def test_two_voices_in_one_plain_loop():
    from budgetguard_loop import bounded

    scripts = Script([says(REPORT)]), Script([says(DOUBT)])
    said = "Analyze the market."
    with bounded(CAPS) as run:
        while True:
            for script in scripts:
                with run.model_call() as call:
                    said = script.next(f"{said} {call.nudge}").text
                    message = {"role": "assistant", "content": said}
                    usage = {"prompt_tokens": 100, "completion_tokens": 20}
                    call.settle({"choices": [{"message": message}], "usage": usage})
    check(run.outcome, *scripts)


def test_a_part_that_is_asked_the_same_again_and_again_is_no_conversation():
    """A vote of ten, or the same question for each of many items, is asked by the code around."""
    from budgetguard_core import Guard
    from budgetguard_loop import bounded, run_bounded

    script = Script([says("Yes.")])

    def step(messages):
        return script.next(str(messages)).text

    with bounded(CAPS) as run:
        for number in range(20):
            run_bounded(step, Budget(), messages=f"Is item {number % 2} fine?")
    assert run.outcome.status == "completed"
    assert script.calls == 20
    with Guard(CAPS).activate():
        for number in range(20):
            part = run_bounded(step, Budget(), messages=f"Is item {number % 2} fine?")
            assert part.status == "completed"
