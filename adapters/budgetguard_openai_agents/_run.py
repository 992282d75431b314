"""One run of the SDK: its hooks ask the budget, and keep what its history is closed with."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from agents import (
    Agent,
    InputGuardrailTripwireTriggered,
    MaxTurnsExceeded,
    ModelResponse,
    OutputGuardrailTripwireTriggered,
    RunConfig,
    RunHooks,
    RunItem,
    Tool,
)

from budgetguard_core import BudgetExceeded, Mode, StopReason, Trip
from budgetguard_core.kit import Prompt, Run, Session, supervised
from budgetguard_openai_agents._calls import ToolCalls
from budgetguard_openai_agents._history import ITEMS, Turn, asked_calls, transfer_text, turn_items
from budgetguard_openai_agents._tools import original

# Seconds that a run gets whose first step is going to be refused.
_PATIENCE = 1.0
_TRIPWIRES = (InputGuardrailTripwireTriggered, OutputGuardrailTripwireTriggered)


class Recorder(RunHooks[Any]):
    """The hooks of one run: they ask its budget and remember what its history is closed with.

    Args:
        run: The run, as the budget knows it.
        hooks: The user's hooks.
        agent: The agent that the run starts with.
        run_config: The user's own.
        server_side: The provider keeps the conversation.

    Attributes:
        calls: The run's tool calls.
        context: The SDK's context of the run, once it is known.
        turns: Every response of this run, with what became of its tool calls.
        models: The models that the run has used, as it knows them.
        sent: The last model that was asked for, and its request.
        due: The facts of a call that is about to be asked for.
        refused: The exception by which the last call was refused.
        run_config: The user's own.
        is_server_side: The provider keeps the conversation.
        closing: What a stopped run's end has added to the items of its stream.
        is_handled: The user's handler gave the answer when the SDK's turns were used up.
    """

    def __init__(
        self,
        run: Run,
        hooks: RunHooks[Any] | None,
        agent: Agent[Any],
        run_config: RunConfig,
        *,
        server_side: bool,
    ) -> None:
        self.run = run
        self.hooks = hooks or RunHooks[Any]()
        self.agent = agent
        self.calls = ToolCalls(run, self.hooks)
        self.context: Any = None
        self.session = Session(run, ITEMS)
        self.session.main.prompt = Prompt(server_side=server_side)
        self.turns: list[Turn] = []
        self.run_config = run_config
        self.is_server_side = server_side
        self.models: dict[int, Any] = {}
        self.sent: Any = None
        self.due: tuple[Any, ...] | None = None
        self.refused: BaseException | None = None
        self._sent: list[Any] = []
        self.closing: list[RunItem] = []
        self.is_handled = False
        self._handler: Callable[[Any], Any] | None = None

    # A turn, in the order of its steps

    async def on_agent_start(self, context: Any, agent: Any) -> None:
        """Note which agent is at work."""
        self.agent = agent
        await self.hooks.on_agent_start(context, agent)

    async def on_llm_start(
        self, context: Any, agent: Any, system_prompt: str | None, input_items: list[Any]
    ) -> None:
        """Note a call that is about to be asked for; then the user's hooks hear of it."""
        self.context, self.agent = context, agent
        self.due = context, agent, system_prompt, input_items
        if self.is_off:
            await self.hooks.on_llm_start(*self.due)

    async def on_llm_end(self, context: Any, agent: Any, response: ModelResponse) -> None:
        """Ask for the tool calls in an answer."""
        self.context = context
        turn = Turn(agent, response, asked_calls(agent, response.output))
        self.turns.append(turn)
        await self.hooks.on_llm_end(context, agent, response)
        if turn.asked:
            await self.calls.ask(turn.asked)
            if self.run.is_saved:
                there = [item.to_input_item() for item in turn_items(turn)]
                self._sent = [*self._sent, *there]
                await asyncio.to_thread(self.run.save, self._sent)

    async def on_tool_start(self, context: Any, agent: Any, tool: Tool) -> None:
        """Note that a tool's body starts."""
        self.context = self.context or context
        if await self.calls.start(context, tool):
            await self.hooks.on_tool_start(context, agent, original(tool))

    async def on_tool_end(self, context: Any, agent: Any, tool: Tool, result: Any) -> None:
        """Settle a tool call."""
        asked = self.calls.running(context, tool)
        if asked is not None and asked.opened is not None:
            if asked.opened.refusal is not None:
                return
            self.run.finished(asked.opened, result, error=asked.error)
        await self.hooks.on_tool_end(context, agent, original(tool), result)

    async def on_handoff(self, context: Any, from_agent: Any, to_agent: Any) -> None:
        """Settle the call that was a handoff."""
        self.calls.handed_over(to_agent, transfer_text(to_agent))
        await self.hooks.on_handoff(context=context, from_agent=from_agent, to_agent=to_agent)

    async def on_agent_end(self, context: Any, agent: Any, output: Any) -> None:
        """Pass it on."""
        await self.hooks.on_agent_end(context, agent, output)

    # Model calls

    def known(self, items: list[Any]) -> list[Any]:
        """Return a history in the objects of the last one: a store is given what is new.

        The SDK writes its items anew for each turn.
        """
        if self.run.is_saved:
            pairs = zip(self._sent, items, strict=False)
            same = [before if before == item else item for before, item in pairs]
            self._sent = [*same, *items[len(same) :]]
        return self._sent

    @property
    def cut(self) -> bool:
        """True if the model's last answer was cut at the budget's own bound."""
        turn = self.session.turn
        return turn is not None and turn.trip is not None

    def _fail(self, error: BaseException | str) -> None:
        if self.session.turn is not None:
            self.session.turn.failed(error)

    # The SDK's own limit

    def handlers(self, own: Any) -> dict[str, Any]:
        """Return the user's handlers of errors, of which that of `max_turns` is asked through us.

        With one of ours, a run and a stream end alike where the user has none.
        """
        given: dict[str, Any] = own or {}
        self._handler = given.get("max_turns")
        return {**given, "max_turns": self._used_up}

    async def _used_up(self, about: Any) -> Any:
        handler, answer = self.take_handler(), None
        if handler is not None:
            answer = handler(about)
            if inspect.isawaitable(answer):
                answer = await answer
        if answer is None:
            raise about.error
        if self.run.is_enforced:
            self.is_handled = True
            self.calls.stopping = self.run.framework_limit(str(about.error))
        return answer

    def take_handler(self) -> Callable[[Any], Any] | None:
        """Return the user's handler of `max_turns`, which is asked once."""
        handler, self._handler = self._handler, None
        return handler

    # Tool calls

    def left_by(self, error: BaseException) -> Trip | None:
        """Return whether an exception left the run because of a limit, and of which."""
        self._fail(error)
        if isinstance(error, MaxTurnsExceeded) and self.run.is_enforced:
            return self.run.framework_limit(str(error))
        stopped = self.calls.stopping or self.run.stopped_by
        if stopped is None:
            return None
        by_a_judge = self.calls.stopping is None and self.run.trip is None
        chain: BaseException | None = error
        while chain is not None:
            if isinstance(chain, BudgetExceeded):
                return stopped
            chain = chain.__cause__ or chain.__context__
        if isinstance(error, _TRIPWIRES) and not by_a_judge:
            return None
        return stopped if isinstance(error, Exception) and (by_a_judge or self.cut) else None

    def withhold(self) -> None:
        """Keep an answer back that the user's guardrails have not passed.

        The stop came between the answer and the end of the run: they could not run, or were cut.
        """
        turn = self.turns[-1] if self.turns else None
        if turn is None or any(one.call.kind != "hosted" for one in turn.asked):
            return
        judges = [*turn.agent.output_guardrails, *(self.run_config.output_guardrails or ())]
        if len(self.turns) == 1 and not self.calls.earlier:
            judges += [*turn.agent.input_guardrails, *(self.run_config.input_guardrails or ())]
        turn.is_withheld = bool(judges)

    def is_completed_by_a_call(self, trip: Trip) -> bool:
        """Return whether an answer is a call's result, though others of its batch were refused.

        The SDK asks for it with `tool_use_behavior`.
        """
        is_own = trip is self.run.trip and trip.run_id == self.run.guard.run_id
        local = any(one.is_local for turn in self.turns[-1:] for one in turn.asked)
        return is_own and local and trip.reason is StopReason.MAX_TOOL_CALLS

    def is_judged(self) -> bool:
        """Return whether nothing of the last answer has to be kept back."""
        self.withhold()
        return not self.withheld()

    def withheld(self) -> list[Any]:
        """List what is kept back, as a history has it, the last item first."""
        outputs = [turn.response.to_input_items() for turn in self.turns[-1:] if turn.is_withheld]
        return [item for items in outputs for item in reversed(items)]

    def is_withheld(self, item: RunItem) -> bool:
        """Return whether an item is a part of an answer that is kept back."""
        return any(turn.is_withheld and turn.has(item) for turn in self.turns[-1:])

    async def supervised(self, work: asyncio.Task[Any]) -> Trip | None:
        """Wait for the run's work; cut it at the deadline and when the run is aborted."""
        work.add_done_callback(_seen)
        if await self.calls.answer(self.run.check) is not None:
            # Its first step is refused anyway, and the SDK keeps the user's words before it.
            await asyncio.wait({work}, timeout=_PATIENCE)
        return await supervised(self.run, work)

    def cut_off(self, error: BaseException | None = None) -> None:
        """Account for a run that was cut: what was started may have taken effect."""
        self._fail(error or "cancelled")
        self.calls.cut_off()

    def close(self, error: BaseException | None = None) -> None:
        """Account for what a run has left open that ended by itself or by an exception."""
        if error is not None:
            self._fail(error)
        self.calls.close(error)

    @property
    def is_off(self) -> bool:
        """True if no guard of the run enforces or looks on."""
        return all(one.mode is Mode.OFF for guard in self.run.guards for one in guard.lineage)


def _seen(work: asyncio.Task[Any]) -> None:
    # Work that was cut may end with an exception that nobody waits for any more.
    if not work.cancelled():
        work.exception()
