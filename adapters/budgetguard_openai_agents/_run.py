"""One run of the SDK: its hooks ask the budget, and keep what its history is closed with."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    Usage,
)
from agents.run import ModelInputData

from budgetguard_core import BudgetExceeded, Mode, StopReason, Trip
from budgetguard_core.kit import (
    LimitQuestion,
    ModelCall,
    OpenModelCall,
    Prompt,
    Run,
    Stop,
    part,
    supervised,
    token_usage,
)
from budgetguard_openai_agents._calls import RunStopped, ToolCalls
from budgetguard_openai_agents._history import Turn, asked_calls, transfer_text, turn_items
from budgetguard_openai_agents._model import (
    can_be_set,
    ended_at_its_bound,
    model_of,
    schemas_of,
    set_bound,
    set_model,
    usage_of,
    written,
)
from budgetguard_openai_agents._tools import original
from budgetguard_openai_agents.questions import BudgetAsked

# The least completion bound that the Responses API takes.
_LEAST_OUTPUT = 16
# Seconds that a run gets whose first step is going to be refused.
_PATIENCE = 1.0
_NO_DATA: dict[str, Any] = {}
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
        cut: The model's last answer was cut at the budget's own bound.
        streamed: What a stream has brought of the answer that is being written.
        run_config: The user's own.
        is_server_side: The provider keeps the conversation.
        closing: What a stopped run's end has added to the items of its stream.
        is_handled: The user's handler gave the answer when the SDK's turns were used up.
        question: What a person is asked, for whom the run waits.
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
        self.turns: list[Turn] = []
        self.cut = False
        self.streamed: list[str] = []
        self._incomplete: Any = None
        self.run_config = run_config
        self.is_server_side = server_side
        self._prompt = Prompt(server_side=server_side)
        self._call: OpenModelCall | None = None
        self._no_retry: BaseException | None = None
        self._retries = 0
        self._sent: Sequence[Any] = ()
        self.closing: list[RunItem] = []
        self.is_handled = False
        self._handler: Callable[[Any], Any] | None = None
        self.question: LimitQuestion | None = None

    # A turn, in the order of its steps

    async def admit(
        self, agent: Agent[Any], sent: ModelInputData, own: int | None
    ) -> ModelInputData:
        """Ask for a model call that is about to be made, and wait for its turn; or stop the run.

        Returns:
            What is to be sent, or what is kept of it where the window is nearly full.
        """
        # A server that keeps the conversation is sent what is new alone.
        if self.run.envelope.prune is not None and not self.is_server_side:
            kept = self.run.pruned(sent.input, *model_of(agent, self.run_config))
            if kept is not None:
                self._prompt = Prompt()
                sent = ModelInputData(input=kept, instructions=sent.instructions)
        self.agent = agent
        self.calls.close()
        model, provider = model_of(agent, self.run_config)
        call = ModelCall(
            model=model,
            provider=provider,
            input_tokens=self._prompt.project(
                sent.input,
                system=sent.instructions,
                tools=schemas_of(agent, self.calls.tools),
                output_schema=agent.output_type,
            ),
            # Some servers take -1 for a completion without a bound.
            max_output_tokens=own if own is None or own >= 1 else None,
            min_output_tokens=_LEAST_OUTPUT,
        )
        may_fall_back = can_be_set(agent, self.run_config)
        if self.calls.may_wait:
            asked = await self.calls.answer(
                lambda: self.run.model_call(call, may_fall_back=may_fall_back)
            )
        else:
            asked = self.run.model_call(call, may_fall_back=may_fall_back)
        opened = await self.run.wait_async(asked)
        if isinstance(opened, Stop):
            raise RunStopped(opened.trip)
        self._retries, self._no_retry = 0, None
        self._open(opened)
        if self.calls.settings is not None:
            # Streamed calls have theirs already.
            set_bound(self.calls.settings, opened.max_output_tokens)
            set_model(self.calls.settings, opened.fallback_model)
        return sent

    async def on_agent_start(self, context: Any, agent: Any) -> None:
        """Note which agent is at work."""
        self.agent = agent
        await self.hooks.on_agent_start(context, agent)

    async def on_llm_start(
        self, context: Any, agent: Any, system_prompt: str | None, input_items: list[Any]
    ) -> None:
        """Give the model its message first, and save where the run is."""
        self.context, call = context, self._call
        try:
            if self.run.is_saved:
                self._sent = _in_known_objects(self._sent, input_items)
                await asyncio.to_thread(self.run.save, self._sent)
            if call is not None and call.nudge is not None:
                # In place: the model gets it, the history and the session do not.
                input_items.append({"role": "user", "content": call.nudge})
            await self.hooks.on_llm_start(context, agent, system_prompt, input_items)
        except BaseException:
            if call is not None:
                self._call = None
                self.run.take_back(call)
            raise

    async def on_llm_end(self, context: Any, agent: Any, response: ModelResponse) -> None:
        """Settle the model call, and ask for the tool calls in its answer."""
        self.context = context
        turn = Turn(agent, response, asked_calls(agent, response.output))
        self._answered(turn)
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

    def output_bound(self, own: int | None) -> int | None:
        """Return the completion tokens that the next call may ask for."""
        bound = None if self._call is None else self._call.max_output_tokens
        return own if bound is None else bound

    @property
    def fallback_model(self) -> str | None:
        """The model that the next call has to go to; None for its own."""
        return None if self._call is None else self._call.fallback_model

    async def admit_retry(self, error: BaseException | None) -> bool:
        """Charge a failed attempt and ask whether the call may be tried again."""
        call = self._call
        if call is None:
            return True
        self._fail(error or "failed")
        bound = call.max_output_tokens
        retry = replace(call.call, retry=True, max_output_tokens=bound, output_is_fixed=True)
        asked: OpenModelCall | Stop = await self.calls.answer(lambda: self.run.model_call(retry))
        opened = await self.run.wait_async(asked)
        if isinstance(opened, OpenModelCall):
            # The request is the same.
            opened.fallback_model = call.fallback_model
        if isinstance(opened, Stop):
            # The SDK raises the failure; it is the budget that made it the last one.
            self._no_retry = error
            return False
        self._retries += 1
        self._open(opened)
        return True

    def _open(self, call: OpenModelCall) -> None:
        self._call = call
        self.calls.turn_frame.call = call

    def _answered(self, turn: Turn) -> None:
        call, self._call = self._call, None
        self.calls.settings = None
        response, final = turn.response, not turn.asked
        self.streamed.clear()
        if call is None:
            return
        usage = usage_of(response)
        text = written(response.output) if usage is None or usage.estimated or final else ""
        self.run.answered(call, usage, text=text, speaker=turn.agent.name, final=final)
        self._prompt.measured(usage)
        if final and ended_at_its_bound(
            response, call.max_output_tokens, turn.agent, self.run_config
        ):
            self.cut = self.run.cut_short(call) is not None
        # Attempts that the SDK made by itself; their tokens are not reported.
        for _ in range(response.usage.requests - 1 - self._retries):
            attempt = self.run.model_call(ModelCall(model=call.call.model, retry=True))
            if isinstance(attempt, Stop):
                break
            self.run.failed(attempt, "failed")

    def _fail(self, error: BaseException | str) -> None:
        call, self._call = self._call, None
        if call is not None:
            ended = self._incomplete
            call.measured = token_usage(ended) or call.measured
            self.run.failed(call, error, written="".join(self.streamed))
            if ended is not None and ended.output and self.run.cut_short(call) is not None:
                # The SDK takes such an end for an error, and drops the answer.
                self.cut = True
                answer = ModelResponse(output=ended.output, usage=Usage(), response_id=ended.id)
                self.turns.append(Turn(self.agent, answer))
        self.streamed.clear()

    def see(self, event: Any) -> None:
        """Take in an event of a stream: what has been written so far is paid for."""
        # Not getattr: a model looks for a name that it lacks for about a microsecond.
        data = getattr(getattr(event, "data", None), "__dict__", _NO_DATA)
        delta = data.get("delta")
        if isinstance(delta, str):
            self.streamed.append(delta)
        elif data.get("type") == "response.incomplete":
            response = data.get("response")
            self._incomplete = response if _is_bounded(response) else None

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
        if isinstance(error, BudgetAsked):
            self.question = error.question
            return error.trip
        if isinstance(error, MaxTurnsExceeded) and self.run.is_enforced:
            return self.run.framework_limit(str(error))
        stopped = self.calls.stopping or self.run.stopped_by
        if stopped is None:
            return None
        by_a_judge = self.calls.stopping is None and self.run.trip is None
        chain: BaseException | None = error
        while chain is not None:
            if isinstance(chain, BudgetExceeded) or chain is self._no_retry:
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


def _in_known_objects(known: Sequence[Any], items: Sequence[Any]) -> list[Any]:
    """Put what is known in place of equal items: a store is given what is new, by identity.

    The SDK writes the items of a history anew for each turn.
    """
    same = [before if before == item else item for before, item in zip(known, items, strict=False)]
    return [*same, *items[len(same) :]]


def _is_bounded(response: Any) -> bool:
    details = part(response, "incomplete_details")
    return bool(part(details, "reason") == "max_output_tokens")
