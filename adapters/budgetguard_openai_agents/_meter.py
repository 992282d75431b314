"""The hooks of one run: they ask its guard, and keep what its history is closed with."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any, NoReturn

from agents import (
    Agent,
    AgentsException,
    FunctionTool,
    MaxTurnsExceeded,
    ModelResponse,
    RunConfig,
    RunErrorDetails,
    RunHooks,
    Tool,
    ToolGuardrailFunctionOutput,
    ToolInputGuardrail,
    ToolInputGuardrailData,
)

from budgetguard_core import (
    Admit,
    BudgetExceeded,
    Guard,
    Mode,
    ModelCall,
    Nudge,
    Refuse,
    Stop,
    StopReason,
    ToolCall,
    Trip,
    Violation,
)
from budgetguard_openai_agents._history import Requested, Turn, requested_calls, transfer_text
from budgetguard_openai_agents._usage import (
    PromptSize,
    estimated_usage,
    model_of,
    token_usage,
)
from budgetguard_openai_agents.hooks import BudgetHooks, release

_TOOLS = threading.Lock()
# After the deadline, a sub-agent's own calls end first, then the sub-agent, then the run.
_GRACE = 0.15
_GRACE_BELOW = 0.05
# What does not let itself be cancelled is left behind after these seconds.
_PATIENCE = 1.0


class RunStopped(BudgetExceeded, AgentsException):
    """A run was stopped: `trip` says why, `outcome` is the partial result.

    It leaves a run only with `on_trip="raise"`.
    """


class _RefusedCalls(ToolInputGuardrail[Any]):
    """Answers the calls of one run that were refused, in place of their tools."""


class Meter(RunHooks[Any]):
    """The hooks of one run: they ask its guard and remember what its history is closed with.

    Attributes:
        guard: The guard of this run.
        config: What the user attached, None for a sub-agent that inherits the run above.
        agent: The agent at work.
        context: The SDK's context of the run, once it is known.
        turns: Every response of this run, with what became of its tool calls.
        resumed: The calls of an earlier response that were approved, or started, in this run.
        first_input: What the first call of the run sent, None before it.
        stopping: Why the run ends before its next model call.
    """

    def __init__(
        self,
        guard: Guard,
        config: BudgetHooks | None,
        inner: RunHooks[Any] | None,
        agent: Agent[Any],
        run_config: RunConfig,
        *,
        server_side: bool,
    ) -> None:
        self.guard = guard
        self.config = config
        self.agent = agent
        self.context: Any = None
        self.turns: list[Turn] = []
        self.resumed: list[Requested] = []
        self.first_input: list[Any] | None = None
        self.stopping: Trip | None = None
        self._inner = inner or RunHooks[Any]()
        self._run_config = run_config
        self._prompt = PromptSize(server_side=server_side)
        self._prompt_items = 0
        self._model_call: ModelCall | None = None
        self._ticket: Admit | None = None
        self._retries = 0
        self._no_retry: BaseException | None = None
        self._requested: list[Requested] = []
        self._refused: dict[str, str] = {}
        self._gate = _RefusedCalls(guardrail_function=self._answer, name="budgetguard")
        self._gated: list[FunctionTool] = []

    # The SDK's hooks

    async def on_agent_start(self, context: Any, agent: Any) -> None:
        """Note which agent is at work."""
        self.agent = agent
        await self._inner.on_agent_start(context, agent)

    async def on_agent_end(self, context: Any, agent: Any, output: Any) -> None:
        """Pass it on."""
        await self._inner.on_agent_end(context, agent, output)

    async def on_llm_start(
        self, context: Any, agent: Any, system_prompt: str | None, input_items: list[Any]
    ) -> None:
        """Admit the model call, or stop the run."""
        self.context, self.agent = context, agent
        self._end_batch()
        if self.first_input is None:
            self.first_input = list(input_items)
        model, provider = model_of(agent, self._run_config)
        bound = self._bound_of(agent)
        self._model_call = ModelCall(
            model=model,
            provider=provider,
            input_tokens=self._prompt.project(system_prompt, input_items),
            max_output_tokens=bound,
            output_is_fixed=True,
        )
        self._prompt_items = len(input_items)
        self._retries = 0
        decision = self.guard.admit_model_call(self._model_call)
        if isinstance(decision, Stop):
            self._stop(decision.trip)
        self._ticket = decision
        if isinstance(decision, Nudge):
            # In place: the model gets it, the history and the session do not.
            input_items.append({"role": "user", "content": decision.message})
        await self._inner.on_llm_start(context, agent, system_prompt, input_items)

    async def on_llm_end(self, context: Any, agent: Any, response: ModelResponse) -> None:
        """Settle the model call, and admit the tool calls that it asks for."""
        self.context = context
        self._settle_response(response)
        turn = Turn(agent, response, requested_calls(agent, response.output))
        self.turns.append(turn)
        await self._inner.on_llm_end(context, agent, response)
        if turn.requested:
            self._admit_batch(agent, turn.requested)

    async def on_tool_start(self, context: Any, agent: Any, tool: Tool) -> None:
        """Note that a tool's body starts."""
        self.context = self.context or context
        requested = self._starting(context, tool)
        if requested.refusal is not None:
            self._stop(self.stopping or self._refused_batch([requested]))
        if requested.ticket is None:
            self._admit_late(requested)
        requested.started = True
        await self._inner.on_tool_start(context, agent, tool)

    async def on_tool_end(self, context: Any, agent: Any, tool: Tool, result: Any) -> None:
        """Settle a tool call."""
        requested = self._ending(context)
        if requested is not None and requested.ticket is not None:
            requested.ended, requested.result = True, result
            self.guard.settle_tool_call(requested.ticket, result)
        await self._inner.on_tool_end(context, agent, tool, result)

    async def on_handoff(self, context: Any, from_agent: Any, to_agent: Any) -> None:
        """Settle the call that was a handoff."""
        for requested in self._requested:
            if requested.call.kind == "handoff" and not requested.ended and requested.ticket:
                requested.ended, requested.target = True, to_agent
                requested.result = transfer_text(to_agent)
                self.guard.settle_tool_call(requested.ticket, requested.result)
                break
        await self._inner.on_handoff(context=context, from_agent=from_agent, to_agent=to_agent)

    def go_on(self, approved: list[Any]) -> None:
        """Admit the calls that were approved before they run, all of them together."""
        self.resumed = self._requested = requested_calls(self.agent, approved)
        refused = self._admit(self.resumed)
        # One that cannot be answered in its tool's place is stopped when it would start.
        self._refuse(self.agent, refused)

    # What the model settings of the run ask

    def output_bound(self, own: int | None) -> int | None:
        """Return the completion tokens that a call may ask for: the user's, within the budget's."""
        bounds = [] if own is None else [own]
        guard: Guard | None = self.guard
        while guard is not None:
            cap = guard.budget.max_output_tokens_per_call
            if cap is not None and guard.mode is Mode.ENFORCE:
                bounds.append(cap)
            guard = guard.parent
        return min(bounds, default=None)

    def seconds_left(self) -> float | None:
        """Return the time that a call may take."""
        left = self.guard.time_left()
        return None if left is None else max(left, 0.001)

    def admit_retry(self, error: BaseException | None) -> bool:
        """Charge a failed attempt and ask whether the call may be tried again."""
        call = self._model_call
        if call is None or self._ticket is None:
            return True
        self._settle_failed(error or "failed")
        decision = self.guard.admit_model_call(
            ModelCall(
                model=call.model,
                provider=call.provider,
                retry=True,
                input_tokens=call.input_tokens,
                max_output_tokens=call.max_output_tokens,
                output_is_fixed=True,
            )
        )
        if isinstance(decision, Stop):
            # The SDK raises the failure; it is the budget that made it the last one.
            self.stopping, self._no_retry = decision.trip, error
            return False
        self._retries += 1
        self._ticket = decision
        return True

    def _bound_of(self, agent: Agent[Any]) -> int | None:
        settings = self._run_config.model_settings
        own = None if settings is None else settings.max_tokens
        return self.output_bound(agent.model_settings.max_tokens if own is None else own)

    # Settling and admitting

    def _settle_response(self, response: ModelResponse) -> None:
        ticket = self._ticket
        self._ticket = None
        if ticket is None:
            return
        given: ModelCall = ticket.call
        usage = token_usage(response.usage)
        if usage is None:
            usage = estimated_usage(given.input_tokens, response)
        else:
            self._prompt.measured(self._prompt_items, usage)
        self.guard.settle_model_call(ticket, usage)
        # Attempts that the SDK made by itself; their tokens are not reported.
        for _ in range(response.usage.requests - 1 - self._retries):
            attempt = self.guard.admit_model_call(ModelCall(model=given.model, retry=True))
            if isinstance(attempt, Stop):
                break
            self.guard.settle_model_call(attempt, error="failed")

    def _admit_batch(self, agent: Agent[Any], requested: list[Requested]) -> None:
        self._requested = requested
        refused = self._admit(requested)
        if not refused and self.stopping is None:
            return
        started = [one for one in requested if one.ticket and one.call.kind == "function"]
        if self.stopping is not None and not started:
            self._stop(self.stopping)
        if not self._refuse(agent, refused):
            # The SDK runs this kind of tool whatever a hook says, so nothing of the batch starts.
            self._stop(self.stopping or self._refused_batch(refused))

    def _admit(self, requested: list[Requested]) -> list[Requested]:
        """Ask for the calls of a batch; return those that were refused."""
        decisions = self.guard.admit_tool_calls([one.call for one in requested])
        for one, decision in zip(requested, decisions, strict=True):
            if isinstance(decision, Admit):
                one.ticket = decision
            else:
                one.refusal = decision.message
            if isinstance(decision, Refuse):
                one.reason = decision.reason
            elif isinstance(decision, Stop):
                self.stopping = decision.trip
        # A handoff that is refused leads to an agent that is stopped before it does anything.
        return [one for one in requested if one.refusal and one.call.kind == "function"]

    def _refused_batch(self, refused: list[Requested]) -> Trip:
        reason = next((one.reason for one in refused if one.reason), StopReason.TOOL_QUOTA)
        names = ", ".join(sorted({one.call.name for one in refused}))
        violation = Violation(
            reason=reason,
            detail=f"{names} cannot be refused by itself, so the whole batch was not executed",
        )
        return self._trip(violation)

    def _trip(self, violation: Violation) -> Trip:
        return Trip(reason=violation.reason, violations=(violation,), run_id=self.guard.run_id)

    def _refuse(self, agent: Agent[Any], refused: list[Requested]) -> bool:
        """Have the SDK answer these calls itself; False where one's tool does not let it."""
        tools = {tool.name: tool for tool in agent.tools if isinstance(tool, FunctionTool)}
        if any(one.call.name not in tools or one.call.id is None for one in refused):
            return False
        for one in refused:
            self._refused[str(one.call.id)] = one.refusal or ""
            tool = tools[one.call.name]
            if tool not in self._gated:
                self._gated.append(tool)
                with _TOOLS:
                    tool.tool_input_guardrails = [self._gate, *(tool.tool_input_guardrails or ())]
        return True

    def _answer(self, data: ToolInputGuardrailData) -> ToolGuardrailFunctionOutput:
        # The tool may serve another run of the same agent at the same time.
        message = self._refused.get(data.context.tool_call_id) if ACTIVE.get() is self else None
        if message is None:
            return ToolGuardrailFunctionOutput.allow()
        return ToolGuardrailFunctionOutput.reject_content(message)

    def _starting(self, context: Any, tool: Tool) -> Requested:
        call_id = getattr(context, "tool_call_id", None)
        for requested in self._requested:
            if requested.started or requested.call.kind != "function":
                continue
            # Shells, computers and patches are started without an id, in the model's order.
            if requested.call.id == call_id or call_id is None:
                return requested
        call = ToolCall(
            name=tool.name, arguments=getattr(context, "tool_arguments", None), id=call_id
        )
        requested = Requested(getattr(context, "tool_call", None), call)
        self._requested.append(requested)
        self.resumed.append(requested)
        return requested

    def _ending(self, context: Any) -> Requested | None:
        call_id = getattr(context, "tool_call_id", None)
        for requested in self._requested:
            mine = requested.call.id == call_id or call_id is None
            if mine and requested.started and not requested.ended:
                return requested
        return None

    def _admit_late(self, requested: Requested) -> None:
        """Admit a call whose response was not of this run: it waited for approval."""
        decision = self.guard.admit_tool_call(requested.call)
        if isinstance(decision, Admit):
            requested.ticket = decision
            return
        requested.refusal = decision.message
        if isinstance(decision, Stop):
            self._stop(decision.trip)
        requested.reason = decision.reason
        self._stop(self._refused_batch([requested]))

    def _stop(self, trip: Trip) -> NoReturn:
        self.stopping = trip
        raise RunStopped(trip)

    # The end of a batch and of the run

    def _end_batch(self, error: BaseException | None = None) -> None:
        """Account for the calls of a batch that the SDK has finished with."""
        for requested in self._requested:
            if requested.ticket is None or requested.ended:
                continue
            if requested.call.kind == "hosted":
                continue
            if requested.started:
                self.guard.settle_tool_call(requested.ticket, error=error or "no result")
            else:
                # It waits for approval, or the SDK knew its id and ran nothing.
                self.guard.withdraw_tool_call(requested.ticket)
        self._requested = []
        self._open_gates()

    def _settle_failed(self, error: BaseException | str) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self.guard.settle_model_call(ticket, error=error)

    def _open_gates(self) -> None:
        for tool in self._gated:
            with _TOOLS:
                left = [one for one in tool.tool_input_guardrails or () if one is not self._gate]
                tool.tool_input_guardrails = left or None
        self._gated = []
        self._refused = {}

    async def ended(self, work: asyncio.Task[Any]) -> tuple[Trip | None, RunErrorDetails | None]:
        """Wait for the run's work, and account for what it left open.

        Returns:
            Why the run was stopped, None when it ended by itself; and what the SDK knows of it.

        Raises:
            BaseException: Whatever ended the run that is not ours to end.
        """
        try:
            trip = await self._supervise(work)
            if trip is not None:
                return self._cut(trip, work)
            await work
        except BaseException as error:
            self._settle_failed(error)
            trip = self._trip_of(error)
            self._end_batch(error)
            if trip is None:
                raise
            return trip, error.run_data if isinstance(error, AgentsException) else None
        finally:
            release(self.guard)
        self._end_batch()
        return None, None

    def framework_limit(self, detail: str) -> Trip:
        """Return the trip of a run that the SDK's own cap ended; it is not the guard's."""
        return self._trip(Violation(reason=StopReason.FRAMEWORK_LIMIT, detail=detail))

    async def _supervise(self, work: asyncio.Task[Any]) -> Trip | None:
        """Wait for the run's work; cancel it at the deadline and when the run is aborted."""
        grace = _GRACE if self.guard.parent is None else _GRACE_BELOW
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        forget = self.guard.cancellation.on_cancel(lambda: _wake(loop, woken))
        try:
            if self.guard.check() is not None:
                # Its first step is refused anyway, and the SDK keeps the user's words before it.
                await asyncio.wait({work}, timeout=_PATIENCE)
            while not work.done():
                left = self.guard.time_left()
                await asyncio.wait(
                    # An abort that only an observing guard heard wakes it once and changes nothing.
                    {work} if woken.done() else {work, woken},
                    timeout=None if left is None else left + grace,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                trip = None if work.done() else self.guard.check()
                if trip is not None:
                    work.cancel()
                    await asyncio.wait({work}, timeout=_PATIENCE)
                    return trip
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work}, timeout=_PATIENCE)
            raise
        finally:
            forget()
        return None

    def _cut(
        self, trip: Trip, work: asyncio.Task[Any]
    ) -> tuple[Trip | None, RunErrorDetails | None]:
        """Account for a run whose work was cancelled: what was started may have taken effect."""
        error = None
        if not work.done():
            self.guard.report("a call in flight did not let itself be cancelled")
            # Whatever it ends with one day, nobody is left to hear of it.
            work.add_done_callback(lambda late: late.cancelled() or late.exception())
        elif not work.cancelled():
            error = work.exception()
            if error is None and self.stopping is None:
                # It came to its end while it was being cancelled: a paid answer is kept.
                self._end_batch()
                return None, None
        self._settle_failed(error or "cancelled")
        for requested in self._requested:
            if requested.ticket is not None and not requested.started and not requested.ended:
                self.guard.withdraw_tool_call(requested.ticket)
        self._open_gates()
        return trip, error.run_data if isinstance(error, AgentsException) else None

    def _trip_of(self, error: BaseException) -> Trip | None:
        """Tell why the run was stopped, if that is what its exception says."""
        if isinstance(error, RunStopped):
            return error.trip if error.trip is self.stopping else None
        if isinstance(error, MaxTurnsExceeded):
            return self.framework_limit(str(error))
        if isinstance(error, Exception) and self._no_retry is error:
            return self.stopping
        # ModelTimeoutError, which older versions of the SDK do not have.
        return self.guard.check() if type(error).__name__ == "ModelTimeoutError" else None


ACTIVE: ContextVar[Meter | None] = ContextVar("budgetguard_openai_agents", default=None)
"""The run that the code at work belongs to; runs that it starts spend that run's budget."""


def is_gate(guardrail: object) -> bool:
    """Tell whether a guardrail is one of ours."""
    return isinstance(guardrail, _RefusedCalls)


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Future[None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(woken.cancel)
