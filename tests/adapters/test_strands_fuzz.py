"""Random agents, graphs and swarms: no cap is ever passed, and every request is valid.

Each seed is one small world. By hand, any number: `BUDGETGUARD_SEEDS=5000 pytest ... -k fuzz`.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from typing import Any

import pytest
from strands import Agent, tool
from strands.hooks import BeforeToolCallEvent
from strands.multiagent import GraphBuilder, Swarm
from strands.multiagent.base import MultiAgentBase, MultiAgentResult, Status
from strands.session import FileSessionManager
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor

from budgetguard_core import Budget, BudgetExceeded, Guard
from budgetguard_core.testing import Call, Reply, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from strands_agents import StrictModel, check_request

SEEDS = int(os.environ.get("BUDGETGUARD_SEEDS", "120"))
PARTS = 8
GO_ON = {"role": "user", "content": [{"text": "And now?"}]}


class Custom(MultiAgentBase):
    """A node of the user's own, equal to others of its kind."""

    def __init__(self, inner: Agent) -> None:
        self.inner = inner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]

    async def invoke_async(self, task, invocation_state=None, **kwargs):
        await self.inner.invoke_async("Work.")
        return MultiAgentResult(status=Status.COMPLETED)

    def serialize_state(self):
        return {}

    def deserialize_state(self, payload):
        del payload


class Approving:
    """Asks before some calls; the answer is the world's."""

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(BeforeToolCallEvent, self.before)

    def before(self, event):
        if (
            event.tool_use["name"] == "asked"
            and event.interrupt(f"approve-{event.tool_use['toolUseId']}") != "yes"
        ):
            event.cancel_tool = "The person said no."


class World:
    """What one seed makes."""

    def __init__(self, seed: int, folder: str) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.scripts: list[Script] = []
        self.agents: list[Agent] = []
        self.bodies = 0
        self.background = self.has_custom = False
        self.number = 0

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def body(self) -> str:
        self.bodies += 1
        return f"result {self.bodies}"

    def tools(self) -> list[Any]:
        @tool
        def plain(value: str = "") -> str:
            """Plain."""
            return self.body()

        @tool
        async def slow(value: str = "") -> str:
            """Yields to the loop."""
            text = self.body()
            await asyncio.sleep(0)
            return text

        @tool
        def fails(value: str = "") -> str:
            """Fails."""
            self.body()
            raise ValueError("broken")

        @tool
        def asked(value: str = "") -> str:
            """A person is asked."""
            return self.body()

        return [plain, slow, fails, asked]

    def script(self, *, asks: bool, handoffs: tuple[str, ...] = ()) -> Script:
        own = random.Random(self.random.random())
        length = own.randint(1, 7)
        names = ["plain", "slow", "fails", "unknown"] + ["asked"] * asks

        def reply(number: int) -> Reply:
            if number >= length and own.random() < 0.6:
                return says(f"Done {number}.")
            if handoffs and own.random() < 0.4:
                return Reply(handoff=own.choice(handoffs))
            ids = own.choice(["unique", "name", "same"])
            batch = []
            for place in range(own.randint(1, 4)):
                name = own.choice(names)
                unique = f"{name}-{number}-{place}-{own.random()}"
                id_ = {"unique": unique, "name": name, "same": "same"}[ids]
                # A person's answer belongs to an id: only unique ones can be asked about.
                batch.append(Call(name, str(own.random()), id=unique if asks else id_))
            return calls(*batch)

        script = Script(reply)
        self.scripts.append(script)
        return script

    def agent(
        self, *, session: bool = False, handoffs: tuple[str, ...] = (), **options: Any
    ) -> Agent:
        asks = options.pop("asks", False)
        self.number += 1
        executor = self.random.choice([ConcurrentToolExecutor, SequentialToolExecutor])
        script = options.pop("script", None) or self.script(asks=asks, handoffs=handoffs)
        if session:
            options["session_manager"] = FileSessionManager("s", storage_dir=self.folder)
        if self.background:
            options["background_tasks"] = {"always": ["slow"], "never": ["plain", "asked"]}
        agent = Agent(
            agent_id=f"a{self.number}" if not session else "main",
            name=options.pop("name", f"a{self.number}"),
            model=StrictModel(script),
            tools=[*self.tools(), *options.pop("more_tools", [])],
            tool_executor=executor(),
            callback_handler=None,
            hooks=[*options.pop("hooks", []), *([Approving()] if asks else [])],
            **options,
        )
        self.agents.append(agent)
        return agent

    def graph(self, depth: int = 0):
        builder = GraphBuilder().set_max_node_executions(self.random.randint(2, 12))
        names = "abcd"[: self.random.randint(1, 4)]
        for name in names:
            kind = self.random.random()
            if depth == 0 and kind < 0.2:
                builder.add_node(self.graph(1), name)
            elif kind < 0.35:
                self.has_custom = True
                builder.add_node(Custom(self.agent()), name)
            elif depth == 0 and kind < 0.45:
                builder.add_node(self.swarm(), name)
            else:
                builder.add_node(self.agent(), name)
        for one in names:
            for other in names:
                if other != names[0] and one != other and self.chance(0.4):
                    builder.add_edge(one, other)
        if self.chance(0.3) and len(names) > 1:
            builder.add_edge(names[-1], names[0], condition=lambda state: True)
            builder.reset_on_revisit(self.chance(0.5))
        builder.set_entry_point(names[0])
        if len(names) > 1 and self.chance(0.5):
            builder.set_entry_point(names[1])
        return builder.build()

    def swarm(self):
        names = [f"s{self.number}_{n}" for n in range(self.random.randint(2, 3))]
        members = [
            self.agent(name=name, handoffs=tuple(one for one in names if one != name))
            for name in names
        ]
        return Swarm(members, max_handoffs=9, max_iterations=9)

    def budget(self) -> Budget:
        caps = {
            name: self.random.randint(1, 9)
            for name in ("max_iterations", "max_model_calls", "max_tool_calls")
            if self.chance(0.6)
        }
        return Budget(**(caps or {"max_iterations": 4}), loop_detection=None)

    @property
    def model_calls(self) -> int:
        return sum(script.calls for script in self.scripts)


def run_of(world: World, target: Any, prompt: Any, **options: Any) -> Any:
    way = world.random.choice(["sync", "async", "stream"])
    if way == "sync":
        return target(prompt, **options)

    async def go():
        if way == "async":
            return await target.invoke_async(prompt, **options)
        return [event async for event in target.stream_async(prompt, **options)][-1]["result"]

    return asyncio.run(go())


def within(world: World, budget: Budget, usage: Any, before: tuple[int, int], seed: int) -> None:
    model_calls, bodies = world.model_calls - before[0], world.bodies - before[1]
    assert model_calls <= min(budget.max_model_calls or 999, budget.max_iterations or 999), seed
    assert bodies <= (budget.max_tool_calls or 999), seed
    # What was still in the queue to run in the background, a batch at most, never became a body.
    started = range(bodies, bodies + (4 if world.background else 0) + 1)
    assert usage.model_calls == model_calls, seed
    assert usage.tool_calls in started, seed


def check_agent(world: World, seed: int) -> None:
    session, asks = world.chance(0.5), world.chance(0.3)
    world.background = not asks and world.chance(0.15)
    budget = world.budget()
    shared = world.chance(0.3)
    given = Guard(budget) if shared else budget
    provider = BudgetHookProvider(given)
    below: list[Any] = []
    if world.chance(0.3):
        inner = world.agent()

        @tool
        async def delegate(value: str = "") -> str:
            """Delegates."""
            world.bodies += 1
            return str(await inner.invoke_async("Work."))

        below = [delegate]
    agent = world.agent(session=session, asks=asks, hooks=[provider], more_tools=below)
    script = agent.model.script
    for turn in range(world.random.randint(1, 3)):
        before = (0, 0) if shared else (world.model_calls, world.bodies)
        prompt: Any = f"Turn {turn}." if turn == 0 or world.chance(0.6) else None
        if turn and prompt is None and not agent.messages[-1].get("metadata", {}).get("synthetic"):
            prompt = "Go on."  # without a stop, Strands itself sends what ends with an answer
        result = run_of(world, agent, prompt)
        for _ in range(12):
            if result.stop_reason != "interrupt":
                break
            if session and world.chance(0.3):
                provider = BudgetHookProvider(
                    given
                )  # as in a new process: of nothing but the session
                agent = world.agent(
                    session=True, asks=asks, hooks=[provider], more_tools=below, script=script
                )
            word = world.random.choice(["yes", "yes", "no"])
            result = run_of(
                world,
                agent,
                [
                    {"interruptResponse": {"interruptId": one.id, "response": word}}
                    for one in result.interrupts
                ],
            )
        if result.stop_reason == "interrupt":
            return
        within(world, budget, provider.outcome(agent).usage, before, seed)
        check_request([*agent.messages, GO_ON])
        # Strands 1.62 itself stores a message twice that a background task's result is added to.
        if session and not world.background:
            kept = FileSessionManager("s", storage_dir=world.folder).list_messages("s", "main")
            assert [one.to_message()["content"] for one in kept] == [
                one["content"] for one in agent.messages
            ], seed
            if world.chance(0.4):
                provider = BudgetHookProvider(given)
                agent = world.agent(
                    session=True, asks=asks, hooks=[provider], more_tools=below, script=script
                )


def check_orchestrator(world: World, seed: int) -> None:
    target = world.graph() if world.chance(0.7) else world.swarm()
    budget = world.budget()
    provider = BudgetHookProvider(budget)
    provider.attach(target)
    for turn in range(world.random.randint(1, 2)):
        before = (world.model_calls, world.bodies)
        try:
            run_of(world, target, f"Turn {turn}.")
        except BudgetExceeded:
            # Through a node of the user's own, which runs its agent by itself.
            assert world.has_custom, seed
        within(world, budget, provider.outcome(target).usage, before, seed)
        for agent in world.agents:
            if agent.messages:
                check_request([*agent.messages, GO_ON])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_fuzz(part):
    for seed in range(part, SEEDS, PARTS):
        with tempfile.TemporaryDirectory() as folder:
            world = World(seed, folder)
            check = check_agent if world.chance(0.6) else check_orchestrator
            try:
                check(world, seed)
            except AssertionError:
                raise
            except Exception as error:
                raise AssertionError(f"seed {seed}") from error
