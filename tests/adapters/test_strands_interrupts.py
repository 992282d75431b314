"""A person in the loop: a run that waits is paused, and what is refused is no call."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from strands import tool
from strands.hooks import BeforeModelCallEvent, BeforeToolCallEvent
from strands.interrupt import Interrupt, InterruptException
from strands.multiagent import GraphBuilder, Swarm
from strands.session import FileSessionManager
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor
from strands.types.exceptions import EventLoopException

from budgetguard_core import Budget, Guard, MemoryStore, RunFencedError, SqliteStore
from budgetguard_core.testing import Call, ManualClock, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from strands_agents import Counter, check_request, in_new_process, run, strict

WAYS = ("sync", "async", "stream")
EXECUTORS = (ConcurrentToolExecutor, SequentialToolExecutor)
GO_ON = {"role": "user", "content": [{"text": "And now?"}]}


class Asks:
    """The user's hook that asks before each call of some tools."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(BeforeToolCallEvent, self.before)

    def before(self, event):
        if (
            event.tool_use["name"] in self.names
            and event.interrupt(f"approve-{event.tool_use['toolUseId']}") != "yes"
        ):
            event.cancel_tool = "The person said no."


def answers(result, word):
    return [
        {"interruptResponse": {"interruptId": one.id, "response": word}}
        for one in result.interrupts
    ]


@pytest.fixture
def counter():
    return Counter()


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["budget", "guard"])
@pytest.mark.parametrize("place", ["same object", "new object"])
def test_twenty_approvals_are_one_run(way, kind, place, counter, tmp_path):
    script = Script([calls("search")])
    budget = Budget(max_iterations=3)
    given = Guard(budget) if kind == "guard" else budget

    def agent():
        session = FileSessionManager("s", storage_dir=str(tmp_path))
        hooks = [BudgetHookProvider(given), Asks("search")]
        return strict(script, counter.tool, hooks=hooks, agent_id="main", session_manager=session)

    at = agent()
    result, _ = run(at, "Go.", way)
    for _ in range(20):
        if result.stop_reason != "interrupt":
            break
        at = at if place == "same object" else agent()
        result, _ = run(at, answers(result, "yes"), way)
    assert result.stop_reason == "max_iterations"
    assert script.calls == len(counter.started) == 3
    check_request([*at.messages, GO_ON])


@pytest.mark.parametrize("kind", ["guard", "budget"])
@pytest.mark.parametrize("place", ["same object", "new object"])
@pytest.mark.parametrize("way", WAYS)
def test_what_fails_after_the_answer_and_is_answered_again_has_its_counters(
    way, place, kind, counter, tmp_path
):
    script = Script([calls("search", "plain")])
    budget = Budget(max_tool_calls=3)
    given = Guard(budget) if kind == "guard" else budget
    failures = [ConnectionError("the first time"), ConnectionError("the second time")]
    plain = Counter()
    bodies = [counter.tool, tool(name="plain", description="Plain.")(plain.run)]

    class Fails:
        def register_hooks(self, registry, **kwargs):
            registry.add_callback(BeforeToolCallEvent, self.before)

        def before(self, event):
            if event.tool_use["name"] == "plain" and failures and counter.started:
                raise failures.pop()

    def agent():
        session = FileSessionManager("s", storage_dir=str(tmp_path))
        return strict(
            script,
            *bodies,
            hooks=[BudgetHookProvider(given), Asks("search"), Fails()],
            agent_id="main",
            session_manager=session,
            tool_executor=SequentialToolExecutor(),
        )

    at = agent()
    result, _ = run(at, "Go.", way)
    answer = answers(result, "yes")
    for _ in range(2):
        at = at if place == "same object" else agent()
        with pytest.raises(EventLoopException):
            run(at, answer, way)
    at = at if place == "same object" else agent()
    run(at, answer, way)
    # Two bodies had started before the failures, and both are made again with each answer.
    assert len(counter.started) + len(plain.started) == 3


@pytest.mark.parametrize("back_to", ["the beginning", "an earlier question"])
@pytest.mark.parametrize("way", WAYS)
def test_an_agent_that_is_taken_back_has_the_counters_of_then(way, back_to, counter):
    provider = BudgetHookProvider(Budget(max_iterations=4, loop_detection=None))
    agent = strict(Script([calls("search")]), counter.tool, hooks=[provider, Asks("search")])
    before = agent.take_snapshot(preset="session")
    asked, _ = run(agent, "Go.", way)
    prompt = "Go anew."
    if back_to == "an earlier question":
        before, prompt = agent.take_snapshot(preset="session"), answers(asked, "yes")
    run(agent, answers(asked, "yes"), way)
    agent.load_snapshot(before)
    run(agent, prompt, way)
    expected = 1 if back_to == "the beginning" else 2
    assert provider.outcome(agent).usage.iterations == expected
    assert provider.outcome(agent).status == "paused"


@pytest.mark.parametrize("order", [0, 2000])
@pytest.mark.parametrize("way", WAYS)
def test_a_question_before_a_model_call_is_no_model_call(way, order, counter):
    script = Script([calls("search")])
    provider = BudgetHookProvider(Budget(max_iterations=3))
    agent = strict(script, counter.tool, hooks=[provider])

    def ask(event):
        asked = f"call {len(event.agent.messages)}"
        known = event.agent._interrupt_state.interrupts.get(asked)
        if known is None or known.response is None:
            raise InterruptException(Interrupt(id=asked, name=asked))

    agent.hooks.add_callback(BeforeModelCallEvent, ask, order=order)
    result, _ = run(agent, "Go.", way)
    for number in range(3):
        assert (result.stop_reason, script.calls) == ("interrupt", number)
        usage = provider.outcome(agent).usage
        assert (usage.iterations, usage.model_calls, usage.estimated_calls) == (number, number, 0)
        result, _ = run(agent, answers(result, "yes"), way)
    # Of the fourth nobody has to be asked, where the question comes after the budget.
    assert result.stop_reason == "max_iterations"
    assert script.calls == 3


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_a_person_refuses_is_no_tool_call(executor, counter):
    provider = BudgetHookProvider(Budget(max_tool_calls=1))
    script = Script([calls("search"), calls("search"), calls("search"), says("Done.")])
    hooks = [provider, Asks("search")]
    agent = strict(script, counter.tool, hooks=hooks, tool_executor=executor())
    result = agent("Go.")
    for word in ("no", "no", "yes"):
        result = agent(answers(result, word))
    assert result.stop_reason == "end_turn"
    assert len(counter.started) == 1
    assert provider.outcome(agent).usage.tool_calls == 1


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("word", ["yes", "no"])
@pytest.mark.parametrize("order", [("search", "ask"), ("ask", "search")])
def test_a_trip_and_an_interrupt_in_one_batch_lose_neither(executor, word, order, counter, caplog):
    asked, outcomes = [], []

    @tool
    def ask(value: str = "") -> str:
        """Asks."""
        asked.append(value)
        return "asked"

    batch = [Call(name, str(n)) for n in range(3) for name in order]
    provider = BudgetHookProvider(Budget(max_tool_calls=2), on_outcome=outcomes.append)
    script = Script([calls(*batch)])
    hooks = [provider, Asks("ask")]
    agent = strict(script, counter.tool, ask, hooks=hooks, tool_executor=executor())
    result = agent("Go.")
    for _ in range(4):
        if result.stop_reason != "interrupt":
            break
        assert provider.outcome(agent).status == "paused"
        result = agent(answers(result, word))
    assert result.stop_reason == "max_tool_calls"
    # A call that waits holds its place until the answer: the others of the batch were refused.
    bodies = 1 if word == "no" and executor is ConcurrentToolExecutor else 2
    assert len(counter.started) + len(asked) == bodies
    assert [one.status for one in outcomes if one.status != "paused"] == ["terminated"]
    assert len([one for one in caplog.records if one.name.startswith("budgetguard")]) == 1
    assert provider.outcome(agent).usage.tool_calls == bodies
    check_request([*agent.messages, GO_ON])


def test_the_time_that_a_person_takes_is_not_run_time(counter):
    clock = ManualClock()
    provider = BudgetHookProvider(Budget(max_seconds=60), clock=clock)
    script = Script([calls("search"), says("Done.")])
    agent = strict(script, counter.tool, hooks=[provider, Asks("search")])
    result = agent("Go.")
    clock.advance(3600)
    assert agent(answers(result, "yes")).stop_reason == "end_turn"
    assert provider.outcome(agent).usage.seconds < 60


def test_an_abort_while_a_person_is_asked_ends_the_run(counter):
    guard = Guard(Budget(max_iterations=9))
    script = Script([calls("search")])
    agent = strict(script, counter.tool, hooks=[BudgetHookProvider(guard), Asks("search")])
    result = agent("Go.")
    guard.abort("enough")
    result = agent(answers(result, "yes"))
    assert result.stop_reason == "aborted"
    assert script.calls == 1
    check_request([*agent.messages, GO_ON])
    assert agent("Again.").stop_reason == "aborted"


@pytest.mark.parametrize("way", WAYS)
def test_a_tool_that_asks_by_itself(way, counter):
    @tool(context=True)
    def pay(tool_context) -> str:
        """Pays."""
        return f"paid: {tool_context.interrupt('sure')}"

    provider = BudgetHookProvider(Budget(max_iterations=2, max_tool_calls=1))
    script = Script([calls("pay"), says("Done.")])
    agent = strict(script, pay, hooks=[provider])
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "interrupt"
    result, _ = run(agent, answers(result, "yes"), way)
    assert result.stop_reason == "end_turn"
    assert provider.outcome(agent).usage.tool_calls == 1
    assert provider.outcome(agent).usage.iterations == 2


async def test_a_cancelled_wait_is_a_failed_run_and_can_be_asked_again(counter):
    @tool
    async def hang() -> str:
        """Hangs."""
        started.set()
        await asyncio.Event().wait()
        return ""

    started = asyncio.Event()
    provider = BudgetHookProvider(Budget(max_iterations=9))
    agent = strict(Script([calls("hang"), says("Done.")]), hang, hooks=[provider])
    task = asyncio.create_task(agent.invoke_async("Go."))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert provider.outcome(agent).status == "failed"


def orchestrator(kind, script, tool, folder):
    """A graph or swarm of one agent that asks a person, with a session if there is a folder."""
    agent = strict(script, tool, hooks=[Asks("search")], name="a")
    session = None if folder is None else FileSessionManager("s", storage_dir=str(folder))
    if kind == "swarm":
        return Swarm([agent], session_manager=session)
    builder = GraphBuilder().set_max_node_executions(50)
    builder.add_node(agent, "a")
    if session is not None:
        builder.set_session_manager(session)
    return builder.build()


@pytest.mark.parametrize("kind", ["graph", "swarm"])
@pytest.mark.parametrize("given", ["budget", "guard"])
@pytest.mark.parametrize("place", ["same object", "new object"])
def test_every_approval_in_a_graph_or_swarm_is_in_the_same_run(
    kind, given, place, counter, tmp_path
):
    script = Script([calls("search")])
    budget = Budget(max_iterations=3)
    outcomes = []
    options = {"on_outcome": outcomes.append}
    folder = tmp_path if place == "new object" else None

    def made():
        provider = BudgetHookProvider(budget if given == "budget" else Guard(budget), **options)
        return provider.attach(orchestrator(kind, script, counter.tool, folder))

    target = made()
    result = target("Go.")
    for _ in range(20):
        if not result.interrupts:
            break
        assert outcomes[-1].status == "paused"
        if place == "new object":
            target = made()
        result = target(answers(result, "yes"))
    assert [one.status for one in outcomes] == ["paused"] * 3 + ["terminated"]
    assert outcomes[-1].stop_reason == "max_iterations"
    assert outcomes[-1].usage.iterations == 3
    assert script.calls == len(counter.started) == 3
    # The next turn is a run of its own.
    result = made()("And now?") if place == "new object" else None
    assert result is None or outcomes[-1].usage.iterations <= 1


ANSWERED_ELSEWHERE = """
import sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from adapters.test_strands_interrupts import orchestrator
from budgetguard_core import Budget
from budgetguard_core.testing import Script, calls
from budgetguard_strands import BudgetHookProvider
from strands_agents import Counter
folder, kind, asked = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
provider = BudgetHookProvider(Budget(max_iterations=2))
script, counter = Script([calls("search")]), Counter()
target = provider.attach(orchestrator(kind, script, counter.tool, folder))
target([{{"interruptResponse": {{"interruptId": asked, "response": "yes"}}}}])
outcome = provider.outcome(target)
print(outcome.status, outcome.usage.iterations, script.calls, len(counter.started))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["graph", "swarm"])
def test_a_waiting_graph_or_swarm_is_answered_in_a_new_process(kind, counter, tmp_path):
    script = Script([calls("search")])
    provider = BudgetHookProvider(Budget(max_iterations=2))
    result = provider.attach(orchestrator(kind, script, counter.tool, tmp_path))("Go.")
    (asked,) = result.interrupts
    program = ANSWERED_ELSEWHERE.format(tests=str(Path(__file__).parent.parent))
    assert in_new_process(program, str(tmp_path), kind, asked.id) == ["paused", "2", "1", "1"]


@pytest.mark.parametrize(
    ("kind", "saved"),
    [("agent", "sqlite"), ("agent", "memory"), ("graph", "memory"), ("swarm", "sqlite")],
)
def test_of_two_processes_that_answer_one_run_one_goes_on(kind, saved, counter, tmp_path):
    store = MemoryStore() if saved == "memory" else SqliteStore(tmp_path / "runs.sqlite3")
    first, late = threading.Event(), threading.Event()

    def reply(number):
        if number == 1:  # the one that answers first is overtaken during its first call
            first.set()
            assert late.wait(600)
            return calls("plain")
        return calls("search") if number == 0 else says("Done.")

    script = Script(reply)
    plain = Counter()
    again = tool(name="plain", description="Plain.")(plain.run)

    def made(outcomes):
        provider = BudgetHookProvider(
            Budget(max_iterations=9), store=store, on_outcome=outcomes.append
        )
        if kind != "agent":
            target = orchestrator(kind, script, counter.tool, tmp_path / "session")
            target.nodes["a"].executor.tool_registry.process_tools([again])
            return provider.attach(target)
        session = FileSessionManager("s", storage_dir=str(tmp_path / "session"))
        hooks = [provider, Asks("search")]
        tools = (counter.tool, again)
        return strict(script, *tools, hooks=hooks, agent_id="main", session_manager=session)

    result = made([])("Go.")
    found, outcomes = {}, {"first": [], "second": []}
    # Both have read the session before either of them goes on.
    targets = {name: made(seen) for name, seen in outcomes.items()}

    def go_on(name):
        try:
            targets[name](answers(result, "yes"))
        except RunFencedError as error:
            found[name] = error

    one = threading.Thread(target=go_on, args=("first",))
    one.start()
    assert first.wait(600)
    two = threading.Thread(target=go_on, args=("second",))
    two.start()
    two.join(600)
    late.set()
    one.join(600)
    assert "resumed elsewhere" in str(found["first"])
    assert [one.status for one in outcomes["first"]] == ["failed"]
    assert [one.status for one in outcomes["second"]] == ["completed"]
    # The call of the one that is overtaken is known to the one that goes on.
    assert outcomes["second"][0].usage.model_calls == script.calls == 3
