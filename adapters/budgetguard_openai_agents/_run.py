"""One run of the SDK: its hooks ask the budget, and keep what its history is closed with."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence, Set
from operator import is_
from typing import Any

import agents

from budgetguard_core import BudgetExceeded, Mode, StopReason, Trip, kit
from budgetguard_openai_agents import _seams
from budgetguard_openai_agents._frame import BudgetAsked, RunStopped
from budgetguard_openai_agents._history import (
    ITEMS,
    LOCAL,
    RequestedCall,
    Turn,
    requested_calls,
    turn_items,
)
from budgetguard_openai_agents._tools import original

# Seconds that a run gets whose first step is going to be refused.
_PATIENCE = 1.0
_TRIPWIRES = (agents.InputGuardrailTripwireTriggered, agents.OutputGuardrailTripwireTriggered)


class Recorder(agents.RunHooks[Any]):
    """The hooks of one run: they ask its budget and remember what its history is closed with."""

    def __init__(
        self,
        run: kit.Run,
        hooks: agents.RunHooks[Any] | None,
        agent: agents.Agent[Any],
        run_config: agents.RunConfig,
        *,
        server_side: bool,
        location: Any,
    ) -> None:
        self.run = run
        self.hooks = hooks or agents.RunHooks[Any]()
        self.agent = agent
        self.run_config = run_config
        self.is_server_side = server_side
        self.location = location
        self.session = kit.Session(run, ITEMS, location)
        self.session.prompt = kit.Prompt(server_side=server_side)
        self.context: Any = None
        modes = [one.mode for guard in run.guards for one in guard.ancestry]
        self.is_off = all(mode is Mode.OFF for mode in modes)
        # The responses of this run, the calls of the reply at hand, and the last that was read.
        self.turns: list[Turn] = []
        self.batch: list[RequestedCall] = []
        self.read: tuple[Sequence[Any], list[RequestedCall]] = ((), [])
        # What an earlier attempt brought, and the calls that it left to this one.
        self.earlier: list[agents.RunItem] = []
        self.resumed: list[RequestedCall] = []
        # The models that the run has used, and the copies of its function tools.
        self.models: dict[tuple[Any, ...], Any] = {}
        self.copies: dict[int, Any] = {}
        # The facts of a call that is about to be asked for, the last model and request, and the
        # exception by which the last call was refused.
        self.due: tuple[Any, ...] | None = None
        self.sent: Any = None
        self.refused: BaseException | None = None
        self._saved: list[Any] = []
        # Why the run ends where it is no limit of the budget's, the user's handler of `max_turns`
        # until it was asked, and whether it gave the answer when the SDK's turns were used up.
        self.stopping: Trip | None = None
        self.handler: Any = None
        self.is_handled = False
        # What a person is asked for whom the run waits, an answer that nobody has judged who had
        # to, and what the end has added to the items of a stream.
        self.question: kit.LimitQuestion | None = None
        self.withheld: agents.ModelResponse | None = None
        self.closing: list[agents.RunItem] = []

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

    async def on_llm_end(self, context: Any, agent: Any, response: agents.ModelResponse) -> None:
        """Ask for the tool calls in an answer, all together, or stop the run."""
        self.context = context
        (output, requested), self.read = self.read, ((), [])
        if len(output) != len(response.output) or not all(map(is_, output, response.output)):
            requested = requested_calls(agent, response.output)
        turn = Turn(agent, response, requested)
        self.turns.append(turn)
        await self.hooks.on_llm_end(context, agent, response)
        self.batch = turn.requested
        if not turn.requested:
            return
        await kit.run_awaited(self._open(turn.requested))
        trip = self.run.trip
        if trip is not None and not any(one.is_local and one.is_waiting for one in turn.requested):
            self.stopping = trip
            raise RunStopped(trip)
        if self.run.is_saved:
            there = [item.to_input_item() for item in turn_items(turn)]
            self._saved = [*self._saved, *there]
            await asyncio.to_thread(self.run.save, self._saved)

    async def on_tool_start(self, context: Any, agent: Any, tool: agents.Tool) -> None:
        """Start a tool's body, unless something else is its result."""
        self.context = self.context or context
        requested = self.find(context, tool, starts=True)
        if requested is None:
            # Its response was not of this run.
            call = kit.ToolCall(
                name=tool.name,
                arguments=getattr(context, "tool_arguments", None),
                id=getattr(context, "tool_call_id", None),
            )
            requested = RequestedCall(getattr(context, "tool_call", None), call)
            await kit.run_awaited(self._open([requested]))
            self.batch = [*self.batch, requested]
            self.resumed.append(requested)
        if requested.open_call.state != "withdrawn":
            await self.run.wait_async(requested.open_call)
            if self.run.start(requested.open_call) is None:
                await self.hooks.on_tool_start(context, agent, original(tool))

    async def on_tool_end(self, context: Any, agent: Any, tool: agents.Tool, result: Any) -> None:
        """Settle a tool call."""
        requested = self.find(context, tool)
        if requested is not None:
            if requested.open_call.refusal is not None:
                return
            self.run.finished(requested.open_call, result, error=requested.error)
        await self.hooks.on_tool_end(context, agent, original(tool), result)

    async def on_handoff(self, context: Any, from_agent: Any, to_agent: Any) -> None:
        """Settle the call that was a handoff."""
        for requested in self.batch:
            if requested.call.kind == "handoff" and requested.is_waiting:
                self.run.finished(requested.open_call, json.dumps({"assistant": to_agent.name}))
                break
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
            pairs = zip(self._saved, items, strict=False)
            same = [before if before == item else item for before, item in pairs]
            self._saved = [*same, *items[len(same) :]]
        return self._saved

    @property
    def cut(self) -> bool:
        """True if the model's last answer was cut at the budget's own bound."""
        turn = self.session.turn
        return turn is not None and turn.trip is not None

    # The SDK's own limit

    def handlers(self, own: Any) -> dict[str, Any]:
        """Return the user's handlers of errors, of which that of `max_turns` is asked through us.

        With one of ours, a run and a stream end alike where the user has none.
        """
        given: dict[str, Any] = own or {}
        self.handler = given.get("max_turns")

        async def used_up(about: Any) -> Any:
            handler, self.handler = self.handler, None
            answer = None if handler is None else handler(about)
            if inspect.isawaitable(answer):
                answer = await answer
            if answer is None:
                raise about.error
            if self.run.is_enforced:
                self.is_handled = True
                self.stopping = self.run.framework_limit(str(about.error))
            return answer

        return {**given, "max_turns": used_up}

    # Tool calls

    def _open(self, batch: list[RequestedCall]) -> kit.Flow[None]:
        # What the provider has run already takes its places before anything else starts.
        listed = sorted(batch, key=lambda one: one.call.kind != "hosted")
        answers = yield from self.run.ask(lambda: self.run.batch(one.call for one in listed))
        for requested, open_call in zip(listed, answers, strict=True):
            requested.open_call = open_call

    def has_refused(self, call_id: str) -> bool:
        """Return whether a limit has refused a call of the reply at hand."""
        return any(one.call.id == call_id and one.open_call.refusal for one in self.batch)

    def find(self, context: Any, tool: Any, *, starts: bool = False) -> RequestedCall | None:
        """Find the call of a tool that starts, or is at work."""
        raw = getattr(context, "tool_call", None)
        if raw is not None:
            for one in self.batch:
                if one.raw is raw:
                    return one
        call_id = getattr(context, "tool_call_id", None)
        if call_id is not None:
            # Where a run goes on the SDK has made another object of the call.
            return next((one for one in self.batch if one.call.id == call_id), None)
        # Shells, computers and patches come without a call, those of a kind one after the other.
        types = (type_ for type_, kinds in _seams.NATIVE.items() if isinstance(tool, kinds))
        local = [one for one in self.batch if one.is_local]
        alike = ([one for one in local if one.type == type_] for type_ in types)
        same = next((calls for calls in alike if calls), list[RequestedCall]())
        if not starts:
            return next((one for one in reversed(same) if one.is_begun), None)
        begun = next((one for one in same if not one.is_begun), None)
        if begun is not None:
            begun.is_begun = True
        return begun

    def go_on(self, state: Any, agent: agents.Agent[Any]) -> None:
        """Take over the open calls of an earlier attempt, and ask for those approved, together."""
        self.earlier = _seams.items_of(state)
        tickets = {one.call.id: one for one in self.run.guard.open_tool_calls()}
        fresh: list[RequestedCall] = []

        def takes_over(requested: RequestedCall) -> bool:
            ticket = tickets.pop(requested.call.id, None)
            if ticket is not None:
                requested.open_call = kit.OpenToolCall(requested.call, [ticket])
            return ticket is not None

        for item in state.get_interruptions():
            approved = _seams.approval_of(state, item)
            if item.agent is not agent or approved is None:
                continue
            for requested in requested_calls(agent, [item.raw_item]):
                is_open = takes_over(requested)
                if approved:
                    self.resumed.append(requested)
                    fresh += [] if is_open else [requested]
                    continue
                self.run.withdrawn(requested.open_call, waits=True)
                self.session.calls.answered_without_body(requested.call, "rejected")
        started = [one.raw_item for one in self.earlier if kit.part(one.raw_item, "type") in LOCAL]
        for requested in requested_calls(agent, started):
            # A run inside this one waited too: its tool is still at work.
            if takes_over(requested):
                self.run.start(requested.open_call)
                self.resumed.append(requested)
        kit.run_blocking(self._open(fresh))
        self.batch = self.resumed

    def leave(self, waiting: Set[Any] = frozenset()) -> None:
        """Take back the calls whose body did not start; what was started may have taken effect.

        A call that waits for a person gives its place back: what a person refuses is no tool call.
        Where the run was stopped meanwhile it could not have it again, and keeps it.
        """
        keeps = self.run.stopped_by is not None and self.run.guard.parent is None
        for requested in self.batch:
            waits = requested.call.id in waiting
            if requested.call.kind != "hosted" and not (waits and keeps):
                self.run.withdrawn(requested.open_call, waits=waits)
        self.batch = []

    def close_batch(self, error: BaseException | None = None) -> None:
        """Account for the calls of a batch that the SDK has finished with."""
        for requested in self.batch:
            if requested.open_call.state == "started":
                # Nobody was told how it ended.
                cause = requested.error or error or "no result"
                self.run.finished(requested.open_call, kit.OUTCOME_UNKNOWN, error=cause)
        # The SDK knew the id of any other and ran nothing, or was stopped before.
        self.leave()

    # The end

    def stop_of(self, error: BaseException) -> Trip | None:
        """Return whether an exception left the run because of a limit, and of which."""
        if self.session.turn is not None:
            self.session.turn.failed(error)
        if isinstance(error, BudgetAsked):
            self.question = error.question
            return error.trip
        if isinstance(error, agents.MaxTurnsExceeded) and self.run.is_enforced:
            return self.run.framework_limit(str(error))
        stopped = self.stopping or self.run.stopped_by
        if stopped is None:
            return None
        by_a_judge = self.stopping is None and self.run.trip is None
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
        turn = self.turns[-1] if self.turns and self.withheld is None else None
        if turn is None or any(one.call.kind != "hosted" for one in turn.requested):
            return
        judges = [*turn.agent.output_guardrails, *(self.run_config.output_guardrails or ())]
        if len(self.turns) == 1 and not self.earlier:
            judges += [*turn.agent.input_guardrails, *(self.run_config.input_guardrails or ())]
        if judges:
            self.withheld = self.turns.pop().response

    def is_completed_by_a_call(self, trip: Trip) -> bool:
        """Return whether an answer is a call's result, though others of its batch were refused.

        The SDK asks for it with `tool_use_behavior`.
        """
        is_own = trip is self.run.trip and trip.run_id == self.run.guard.run_id
        local = any(one.is_local for turn in self.turns[-1:] for one in turn.requested)
        return is_own and local and trip.reason is StopReason.MAX_TOOL_CALLS

    def is_withheld(self, item: agents.RunItem) -> bool:
        """Return whether an item is a part of an answer that is kept back."""
        return self.withheld is not None and any(
            item.raw_item is one for one in self.withheld.output
        )

    async def supervised(self, work: asyncio.Task[Any]) -> Trip | None:
        """Wait for the run's work; cut it at the deadline and when the run is aborted."""
        work.add_done_callback(_seen)
        ask: Any = self.run.ask
        if await kit.run_awaited(ask(self.run.check)) is not None:
            # Its first step is refused anyway, and the SDK keeps the user's words before it.
            await asyncio.wait({work}, timeout=_PATIENCE)
        return await kit.supervised(self.run, work)

    def let_go(self) -> None:
        """Keep nothing of a run that is over, so that it is freed without a garbage collection."""
        self.models, self.sent, self.refused, self.location.result = {}, None, None, None
        self.session = kit.Session(self.run, ITEMS)
        self.turns, self.earlier, self.resumed, self._saved = [], [], [], []


def _seen(work: asyncio.Task[Any]) -> None:
    # Work that was cut may end with an exception that nobody waits for any more.
    if not work.cancelled():
        work.exception()
