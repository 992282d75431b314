"""A run that waits for a person is paused: its counters go on, its clock stands still."""

from __future__ import annotations

import json

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

import langgraph_graphs as graphs
from budgetguard_core import Budget, BudgetExceeded, Guard
from budgetguard_core.events import Event
from budgetguard_core.testing import Call, ManualClock, Script, calls, says
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded, outcome, resume
from langgraph_graphs import StrictChat, check_request, search, sticky, thread, user

ASKED: list[str] = []


@pytest.fixture(autouse=True)
def bodies():
    graphs.BODIES.clear()
    ASKED.clear()


@tool
def ask(value: str = "") -> str:
    """Ask a person."""
    answer = interrupt({"question": value})
    ASKED.append(value)
    return f"the person said {answer}"


class Log:
    """A sink that keeps the events."""

    def __init__(self):
        self.events: list[Event] = []

    def __call__(self, event):
        self.events.append(event)

    def kinds(self):
        return [type(event).__name__ for event in self.events]


class Way:
    """A way in that is made anew for every attempt, as a server makes it for every request."""

    def __init__(self, script, saver, *, anew, middleware=(), tools=(ask, search), **more):
        self.script, self.saver, self.anew = script, saver, anew
        self.middleware, self.tools, self.more = middleware, tools, more
        self.made = None
        self.log = Log()
        self.outcomes = []

    def options(self):
        return {"sinks": [self.log], "on_outcome": self.outcomes.append, **self.more}

    def graph(self, *inner, **compile_options):
        return create_agent(
            StrictChat(script=self.script),
            list(self.tools),
            middleware=[*inner, *self.middleware],
            checkpointer=self.saver,
        )

    def attempts(self, budget):
        if self.anew or self.made is None:
            self.made = self.make(budget)
        return self.made

    def call(self, budget, given, config):
        graph, more = self.attempts(budget)
        return graph.invoke(given, {**config, **more})


class BoundedWay(Way):
    def make(self, budget):
        return bounded(self.graph(), budget, **self.options()), {}


class MiddlewareWay(Way):
    def make(self, budget):
        return self.graph(BudgetMiddleware(budget, **self.options())), {}


class CallbackWay(Way):
    def make(self, budget):
        return self.graph(), {"callbacks": [BudgetCallback(budget, **self.options())]}


WAYS = {"bounded": BoundedWay, "middleware": MiddlewareWay, "callback": CallbackWay}
EACH_WAY = pytest.mark.parametrize("way", WAYS)
ANEW = pytest.mark.parametrize("anew", [False, True], ids=["same object", "new object"])


def asking(n):
    return calls(Call("ask", f"again {n}?"))


def stop_reason(result):
    found = result.get("stop_reason")
    if found is None:
        values = [one.value for one in result.get("__interrupt__", ())]
        found = next((v["stop_reason"] for v in values if "stop_reason" in v), None)
    return found


@EACH_WAY
@ANEW
def test_an_answer_goes_on_with_the_same_counters(way, anew):
    made = WAYS[way](Script(asking), InMemorySaver(), anew=anew)
    config, given = thread(), user()
    for attempt in range(6):
        result = made.call(Budget(max_iterations=3), given, config)
        if stop_reason(result):
            break
        given = Command(resume=f"yes {attempt}")
    assert made.script.calls == 3
    assert stop_reason(result) == "max_iterations"
    assert [one.status for one in made.outcomes] == ["paused", "paused", "paused", "terminated"]
    assert made.outcomes[-1].usage.tool_calls == 3
    assert made.outcomes[-1].usage.model_calls == 3
    assert made.log.kinds().count("RunEnded") == 1
    assert len({one.run_id for one in made.outcomes}) == 1


@EACH_WAY
@ANEW
def test_the_time_that_a_person_takes_is_not_run_time(way, anew):
    clock = ManualClock()
    script = Script(lambda n: asking(n) if n < 2 else says("Done."))
    made = WAYS[way](script, InMemorySaver(), anew=anew, clock=clock)
    config = thread()
    budget = Budget(max_seconds=10)
    made.call(budget, user(), config)
    for _ in range(2):
        clock.advance(3600)
        result = made.call(budget, Command(resume="yes"), config)
    assert result["messages"][-1].content == "Done."
    assert made.outcomes[-1].status == "completed"
    assert made.outcomes[-1].usage.seconds < 10


@EACH_WAY
@ANEW
def test_a_refusal_of_a_person_is_no_tool_call_and_an_approval_is_one(way, anew):
    script = Script([calls("search"), calls("search"), says("Done.")])
    hitl = HumanInTheLoopMiddleware(interrupt_on={"search": True})
    made = WAYS[way](script, InMemorySaver(), anew=anew, middleware=[hitl])
    config, budget = thread(), Budget(max_tool_calls=1)
    made.call(budget, user(), config)
    no = {"decisions": [{"type": "reject", "message": "no"}]}
    made.call(budget, Command(resume=no), config)
    yes = {"decisions": [{"type": "approve"}]}
    result = made.call(budget, Command(resume=yes), config)
    assert graphs.BODIES == [""]
    assert result["messages"][-1].content == "Done."
    assert made.outcomes[-1].usage.tool_calls == 1
    check_request(result["messages"])


@pytest.mark.parametrize("way", ["bounded", "callback"])
@ANEW
def test_interrupt_before_pauses(way, anew):
    script = Script(lambda n: calls(Call("search", str(n))))
    saver = InMemorySaver()

    class Before(WAYS[way]):
        def graph(self, *inner, **_):
            return graphs.loop(
                "reduced", self.script, checkpointer=saver, interrupt_before=["tools"]
            )[0]

    made = Before(script, saver, anew=anew)
    config, given = thread(), user()
    for _ in range(8):
        result = made.call(Budget(max_iterations=3), given, config)
        if stop_reason(result):
            break
        given = None
    assert script.calls == 3
    assert len(graphs.BODIES) == 3
    assert {one.status for one in made.outcomes[:-1]} == {"paused"}
    assert made.outcomes[-1].status == "terminated"
    assert made.log.kinds().count("RunEnded") == 1


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["bounded", "callback"])
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_person_who_changes_the_thread_answers_the_same_run(way, mode, times):
    script = Script(lambda n: calls(Call("search", str(n))))
    plain = create_agent(
        StrictChat(script=script),
        [search],
        checkpointer=InMemorySaver(),
        interrupt_before=["tools"],
    )
    budget, outcomes = Budget(max_model_calls=3), []
    config, given, graph, more = thread(), user(), plain, {}
    if way == "bounded":
        graph = bounded(plain, budget, on_outcome=outcomes.append)
    for attempt in range(6):
        if way == "callback":
            more = {"callbacks": [BudgetCallback(budget, on_outcome=outcomes.append)]}
        if mode == "sync":
            graph.invoke(given, {**config, **more})
        else:
            await graph.ainvoke(given, {**config, **more})
        if outcomes[-1].status != "paused":
            break
        given, asked = None, graph.get_state(config).values["messages"][-1]
        edited = [{**asked.tool_calls[0], "args": {"value": f"edited {attempt}"}}]
        for _ in range(times):
            changed = asked.model_copy(update={"tool_calls": edited})
            graph.update_state(config, {"messages": [changed]})
    assert script.calls == 3
    assert graphs.BODIES == ["edited 0", "edited 1", "edited 2"]
    assert [one.usage.model_calls for one in outcomes] == [1, 2, 3, 3]
    assert outcomes[-1].stop_reason == "max_model_calls"


@EACH_WAY
def test_a_new_input_to_a_thread_that_waits_begins_a_new_run(way):
    script = Script(lambda n: asking(n) if n == 0 else says("Done."))
    made = WAYS[way](script, InMemorySaver(), anew=False)
    config = thread()
    made.call(Budget(max_iterations=3), user(), config)
    other = thread()
    made.call(Budget(max_iterations=3), user("And now?"), other)
    assert made.outcomes[-1].usage.model_calls == 1
    assert made.outcomes[0].run_id != made.outcomes[-1].run_id


@EACH_WAY
def test_runs_that_wait_at_the_same_time_keep_apart(way):
    made = WAYS[way](Script(asking), InMemorySaver(), anew=True)
    configs = [thread() for _ in range(5)]
    for config in configs:
        made.call(Budget(max_iterations=3), user(), config)
    for config in configs:
        made.call(Budget(max_iterations=3), Command(resume="yes"), config)
    assert {one.usage.model_calls for one in made.outcomes[-5:]} == {2}


@EACH_WAY
@ANEW
def test_a_trip_and_a_question_in_one_batch_lose_neither(way, anew, caplog):
    """The call over the cap is refused; the question is still asked, and its answer arrives."""
    script = Script([calls(Call("ask", "transfer?"), Call("search", "a"), Call("search", "b"))])
    made = WAYS[way](script, InMemorySaver(), anew=anew)
    config, budget = thread(), Budget(max_tool_calls=2)
    asked = made.call(budget, user(), config)
    questions = [one.value for one in asked["__interrupt__"]]
    assert {"question": "transfer?"} in questions
    (waiting,) = [one for one in asked["__interrupt__"] if "question" in one.value]
    result = made.call(budget, Command(resume={waiting.id: "yes"}), config)
    assert ASKED == ["transfer?"]
    assert graphs.BODIES == ["a"]
    assert made.outcomes[-1].stop_reason == "max_tool_calls"
    # Told once: the attempt that asked is paused, whatever did not fit in it.
    assert [one.status for one in made.outcomes] == ["paused", "terminated"]
    assert made.log.kinds().count("RunEnded") == 1
    assert [one.message for one in caplog.records if one.name.startswith("budgetguard")] == [
        one.message for one in caplog.records if one.message.startswith("run stopped")
    ][:1]
    answers = [m.content for m in made.outcomes[-1].messages if isinstance(m, ToolMessage)]
    assert answers[0] == "the person said yes"
    assert answers[1].startswith("result")
    assert "Not executed" in answers[2]
    del result


@EACH_WAY
@ANEW
def test_a_question_beside_a_stop_inside_of_a_tool_is_answered(way, anew):
    script = Script([calls(Call("ask", "transfer?"), Call("delegate", "a"))])

    @tool
    def delegate(value: str = "") -> str:
        """Have another model do it."""
        return StrictChat(script=script).invoke(value).content

    made = WAYS[way](script, InMemorySaver(), anew=anew, tools=(ask, delegate))
    config, budget = thread(), Budget(max_model_calls=1)
    asked = made.call(budget, user(), config)
    (waiting,) = [one for one in asked["__interrupt__"] if "question" in one.value]
    made.call(budget, Command(resume={waiting.id: "yes"}), config)
    assert script.calls == 1
    assert ASKED == ["transfer?"]
    assert [one.status for one in made.outcomes] == ["paused", "terminated"]
    assert made.outcomes[-1].usage.model_calls == 1
    check_request(made.outcomes[-1].messages)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_the_only_question_that_is_seen_beside_a_stop_needs_no_id(mode):
    """LangGraph wants an id where several interrupts wait; those of a budget nobody has seen."""
    script = Script([calls(Call("ask", "transfer?"), Call("delegate", "a"), Call("delegate", "b"))])

    @tool
    def delegate(value: str = "") -> str:
        """Have another model do it."""
        return StrictChat(script=script).invoke(value).content

    made = BoundedWay(script, InMemorySaver(), anew=True, tools=(ask, delegate))
    config, budget = thread(), Budget(max_model_calls=1)
    asked = made.call(budget, user(), config)
    assert [one.value for one in asked["__interrupt__"]] == [{"question": "transfer?"}]
    answer = Command(resume={"decision": "yes"})
    if mode == "sync":
        result = made.call(budget, answer, config)
    else:
        result = await made.attempts(budget)[0].ainvoke(answer, config)
    assert ASKED == ["transfer?"]
    assert [one.status for one in made.outcomes] == ["paused", "terminated"]
    assert result["messages"][2].content == "the person said {'decision': 'yes'}"
    check_request(result["messages"])


@EACH_WAY
def test_a_pause_is_the_outcome_of_its_result(way):
    made = WAYS[way](Script(asking), InMemorySaver(), anew=False)
    result = made.call(Budget(max_iterations=3), user(), thread())
    assert outcome(result).status == "paused"
    assert "RunEnded" not in made.log.kinds()


@EACH_WAY
def test_a_guard_that_waits_is_shared_as_it_is(way):
    guard = Guard(Budget(max_iterations=3))
    made = WAYS[way](Script(asking), InMemorySaver(), anew=True)
    made.options = dict
    config, given = thread(), user()
    for attempt in range(6):
        result = made.call(guard, given, config)
        if stop_reason(result):
            break
        given = Command(resume=f"yes {attempt}")
    assert made.script.calls == 3
    assert guard.usage.tool_calls == 3


def test_what_a_pause_keeps_is_plain_data_without_caps():
    """It lies in the checkpoint beside the conversation: no caps in it, and no arguments."""
    saver = InMemorySaver()
    script = Script([calls(Call("ask", "secret-argument?"))])
    graph = create_agent(StrictChat(script=script), [ask], checkpointer=saver)
    config = thread()
    bounded(graph, Budget(max_iterations=77)).invoke(user(), config)
    found = json.dumps(dict(saver.get_tuple(config).metadata), default=str)
    assert "77" not in found
    assert "secret-argument" not in found


def test_raise_raises_for_a_stop_and_not_for_a_pause():
    made = BoundedWay(Script(asking), InMemorySaver(), anew=False, on_trip="raise")
    config = thread()
    assert "__interrupt__" in made.call(Budget(max_iterations=1), user(), config)
    with pytest.raises(BudgetExceeded) as stopped:
        made.call(Budget(max_iterations=1), Command(resume="yes"), config)
    assert stopped.value.outcome.usage.tool_calls == 1


@pytest.mark.anyio
@ANEW
async def test_a_streamed_pause_goes_on(anew):
    made = BoundedWay(Script(asking), InMemorySaver(), anew=anew)
    config, given = thread(), user()
    for _ in range(6):
        graph, _more = made.attempts(Budget(max_iterations=2))
        last = [c async for c in graph.astream(given, config, stream_mode="values")][-1]
        if stop_reason(last):
            break
        given = Command(resume="yes")
    assert made.script.calls == 2
    assert last["stop_reason"] == "max_iterations"


def test_a_thread_that_waits_in_a_subgraph_goes_on():
    inner = create_agent(StrictChat(script=Script(asking)), [ask])
    outer = graphs.StateGraph(graphs.Reduced)
    outer.add_node("inner", inner)
    outer.add_edge(graphs.START, "inner")
    plain = outer.compile(checkpointer=InMemorySaver())
    config, given = thread(), user()
    for _ in range(6):
        result = bounded(plain, Budget(max_iterations=2)).invoke(given, config)
        if stop_reason(result):
            break
        given = Command(resume="yes")
    assert stop_reason(result) == "max_iterations"
    assert outcome(result).usage.model_calls == 2
    assert len(ASKED) == 2


def test_sticky_is_no_pause():
    made = BoundedWay(sticky(), InMemorySaver(), anew=False)
    made.call(Budget(max_iterations=2), user(), thread())
    assert [one.status for one in made.outcomes] == ["terminated"]


def waits_at_a_node(name, **budget):
    """A graph without messages under that name, at a breakpoint; its result and its outcomes."""
    told, saver = [], InMemorySaver()
    options = {"on_outcome": told.append}
    if name == "plan":
        plain, given = graphs.plan_and_execute(sticky(), checkpointer=saver), {"goal": "x"}
        plain.interrupt_before_nodes = ["worker"]
    else:
        options["messages_key"] = "history"
        plain, make = graphs.loop(
            "elsewhere", sticky(), checkpointer=saver, interrupt_before=["tools"]
        )
        given = make("Go.")
    return bounded(plain, Budget(max_model_calls=5), **options), given, told


@pytest.mark.anyio
@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["plan", "messages elsewhere"])
async def test_a_run_at_a_breakpoint_is_not_said_to_be_completed(name, awaited):
    graph, given, told = waits_at_a_node(name)
    config = thread()
    result = await graph.ainvoke(given, config) if awaited else graph.invoke(given, config)
    assert [one.status for one in told] == ["paused"]
    assert "stop_reason" not in result


def asking_flow(script, saver, *, waits_first=False):
    """A workflow that asks beside one call of a model, and makes two more with the answer."""
    chat = StrictChat(script=script)

    @task
    def think(text):
        return chat.invoke(text).content

    @task
    def ask_person(text):
        return interrupt({"question": text})

    @entrypoint(checkpointer=saver)
    def flow(text):
        first, asked = think(text), ask_person("sure?")
        answer = first.result() if waits_first else asked.result()
        said = [first.result(), think(answer).result(), think("end").result()]
        return {"said": said, "answer": asked.result()}

    return flow


@pytest.mark.parametrize("way", ["bounded", "callback"])
@pytest.mark.parametrize("cap", [1, 2])
def test_a_workflow_that_is_stopped_after_an_answer_goes_on(way, cap):
    """All of it is at one checkpoint: the question and the counters of the pause stay there."""
    script, saver, outcomes = Script([says("x")]), InMemorySaver(), []
    config, result = thread(), None
    for given in ("Go.", Command(resume="yes")):
        flow, more = asking_flow(script, saver), {}
        if way == "bounded":
            flow = bounded(flow, Budget(max_model_calls=cap), on_outcome=outcomes.append)
        else:
            again = BudgetCallback(Budget(max_model_calls=cap), on_outcome=outcomes.append)
            more = {"callbacks": [again]}
        result = flow.invoke(given, {**config, **more})
    assert [one.status for one in outcomes] == ["paused", "terminated"]
    assert script.calls == outcomes[-1].usage.model_calls == cap
    if way == "bounded":
        assert result == {"stop_reason": "max_model_calls"}
    done = resume(asking_flow(script, saver), config, Budget(max_model_calls=3 - cap))
    assert done == {"said": ["x", "x", "x"], "answer": "yes"}
    assert script.calls == 3


def test_a_workflow_stopped_beside_its_question_is_answered_without_an_id():
    """What stopped the other task is not in the state of the thread."""
    script, saver, outcomes = Script([says("x")]), InMemorySaver(), []
    config, spent = thread(), Guard(Budget(max_model_calls=1))
    StrictChat(script=script).invoke("Before.", {"callbacks": [BudgetCallback(spent)]})
    for given in ("Go.", Command(resume="yes")):
        flow = bounded(asking_flow(script, saver), spent, on_outcome=outcomes.append)
        flow.invoke(given, config)
    assert [one.status for one in outcomes] == ["paused", "terminated"]
    done = resume(asking_flow(script, saver), config, Budget())
    assert done == {"said": ["x", "x", "x"], "answer": "yes"}
    assert script.calls == 4


def test_a_branch_that_was_answered_waits_no_more():
    """Its question stays at the checkpoint until all branches are through."""
    script, saver, outcomes = Script([says("x")]), InMemorySaver(), []
    chat = StrictChat(script=script)
    graph = StateGraph(MessagesState)
    graph.add_node("ask", lambda _: {"messages": [("user", interrupt("sure?"))]})
    graph.add_node("think", lambda _: {"messages": [chat.invoke("a"), chat.invoke("b")]})
    graph.add_edge(START, "ask")
    graph.add_edge(START, "think")
    graph = graph.compile(checkpointer=saver)
    config = thread()

    def attempt(given):
        callback = BudgetCallback(Budget(max_model_calls=1), on_outcome=outcomes.append)
        return graph.invoke(given, {**config, "callbacks": [callback]})

    asked = attempt(user())
    (question,) = [one.id for one in asked["__interrupt__"] if one.value == "sure?"]
    attempt(Command(resume={question: "yes"}))
    attempt(None)
    assert [one.status for one in outcomes] == ["paused", "terminated", "terminated"]
    assert script.calls == 2
    done = resume(graph, config, Budget())
    assert [one.content for one in done["messages"]] == ["Go.", "yes", "x", "x"]
    assert script.calls == 4


def test_the_state_tells_of_the_last_of_several_legs_at_one_checkpoint():
    """Savers give the writes of a checkpoint in the order of its tasks, and theirs is by chance."""
    script, saver = Script([says("x")]), InMemorySaver()
    for _ in range(8):
        config, told = thread(), []
        for given in ("Go.", Command(resume="yes")):
            flow = bounded(asking_flow(script, saver), Budget(max_model_calls=2))
            flow.invoke(given, config)
            told.append(outcome(flow.get_state(config)).status)
        assert told == ["paused", "terminated"]


@pytest.mark.parametrize("way", ["bounded", "callback"])
def test_a_workflow_that_is_stopped_before_its_question_is_seen_is_stopped(way):
    """A task has asked, and the workflow has not come to its answer."""
    script, saver, outcomes = Script([says("x")]), InMemorySaver(), []
    config, budget = thread(), Guard(Budget(max_model_calls=1))
    StrictChat(script=script).invoke("Before.", {"callbacks": [BudgetCallback(budget)]})
    flow, more = asking_flow(script, saver, waits_first=True), {}
    if way == "bounded":
        flow = bounded(flow, budget, on_outcome=outcomes.append)
    else:
        more = {"callbacks": [BudgetCallback(budget, on_outcome=outcomes.append)]}
    flow.invoke("Go.", {**config, **more})
    assert [one.status for one in outcomes] == ["terminated"]
    again = asking_flow(script, saver, waits_first=True)
    result = resume(again, config, Budget())
    assert [one.value for one in result["__interrupt__"]] == [{"question": "sure?"}]
    done = bounded(again, Budget()).invoke(Command(resume="yes"), config)
    assert done == {"said": ["x", "x", "x"], "answer": "yes"}
    assert script.calls == 4
