"""Runs recorded by others, one a line, told as events of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from budgetguard_core import Budget, PriceBook
from budgetguard_core.events import (
    ModelCallAdmitted,
    ModelCallSettled,
    RunStarted,
    ToolCallRequested,
    ToolCallSettled,
    ToolCallsRequested,
    UserTurned,
)
from budgetguard_core.kit import Event, ModelCall, TokenUsage, fingerprint

_Count: TypeAlias = Annotated[int, Field(ge=0, le=10**12)]
_Dollars: TypeAlias = Annotated[float, Field(ge=0, le=10**9, allow_inf_nan=False)]
# The harness, not the agent, ended the run.
_RUNAWAY = "max_steps"


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Usage(_Part):
    input: _Count
    output: _Count


class _ToolCall(_Part):
    name: str
    args: Any = None
    id: str | None = None


class _Assistant(_Part):
    role: Literal["assistant"]
    tool_calls: tuple[_ToolCall, ...] = ()
    content_len: _Count = 0
    usage: _Usage | None = None
    cost: _Dollars | None = None


class _Tool(_Part):
    role: Literal["tool"]
    name: str = ""
    id: str | None = None
    result_hash: str
    result_len: _Count = 0
    error: bool = False


class _User(_Part):
    role: Literal["user"]
    content_len: _Count = 0


class Trajectory(_Part):
    """One run, as a benchmark recorded it. Fields that are not needed here are ignored."""

    run_id: str
    model: str | None = None
    success: bool | None = None
    termination: str | None = None
    steps: tuple[Annotated[_Assistant | _Tool | _User, Field(discriminator="role")], ...]

    @property
    def runaway(self) -> bool:
        """Whether the recording itself ended at a cap."""
        return self.termination == _RUNAWAY

    def events(self, budget: Budget, prices: PriceBook) -> Iterator[Event]:
        """Tell the run to the engine, which does the counting.

        A call without recorded usage is estimated from the recorded lengths of the texts before
        it; what lies outside them, such as a system prompt, is not known. Times are not recorded,
        so all events happen at the same moment.

        Args:
            budget: The candidate; the names of the arguments it ignores shape the fingerprints.
            prices: Tells for which models the recorded cost has to stand in for a price.

        Raises:
            ValueError: A result belongs to no call before it.
        """
        detection = budget.loop_detection
        ignored = frozenset(() if detection is None else detection.ignore_arguments)
        priced = self.model is not None and prices.rates_for(self.model) is not None
        open_calls: dict[str | None, list[int]] = {}
        told = _Numbers(self.run_id)
        characters = 0
        call_id = 0
        yield RunStarted(
            **told.next(),
            budget=Budget().to_json(),
            mode="enforce",
            parent_run_id=None,
            price_book=prices.version,
            stop_conditions=0,
        )
        for place, step in enumerate(self.steps):
            if isinstance(step, _User):
                characters += step.content_len
                yield UserTurned(**told.next())
            elif isinstance(step, _Assistant):
                call_id += 1
                cost = None if step.cost is None else Decimal(repr(step.cost))
                yield ModelCallAdmitted(
                    **told.next(),
                    call_id=call_id,
                    # Without a cost a dollar cap would refuse a call of unknown price.
                    call=ModelCall(model=self.model, cost_usd=None if priced else cost),
                    admitted_output_tokens=None,
                    nudge=None,
                )
                written = step.content_len + sum(
                    len(call.name) + len(json.dumps(call.args)) for call in step.tool_calls
                )
                yield ModelCallSettled(
                    **told.next(),
                    call_id=call_id,
                    model=None,
                    usage=_usage(step.usage, characters, written),
                    cost_usd=None if cost is None else str(cost),
                    given_cost_usd=None if cost is None else str(cost),
                    error=None,
                )
                characters += written
                calls: list[ToolCallRequested] = []
                for call in step.tool_calls:
                    call_id += 1
                    open_calls.setdefault(call.id, []).append(call_id)
                    calls.append(
                        ToolCallRequested(
                            call_id=call_id,
                            id=call.id,
                            name=call.name,
                            kind="function",
                            fingerprint=fingerprint(call.args, ignore=ignored),
                            decision="admit",
                        )
                    )
                if calls:
                    yield ToolCallsRequested(**told.next(), calls=tuple(calls))
            else:
                characters += step.result_len
                waiting = open_calls.get(step.id)
                if not waiting:
                    msg = f"steps.{place}: a result must belong to a call before it, got none."
                    raise ValueError(msg)
                yield ToolCallSettled(
                    **told.next(),
                    call_id=waiting.pop(0),
                    fingerprint=step.result_hash,
                    error="error" if step.error else None,
                )


class _Numbers:
    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._seq = 0

    def next(self) -> dict[str, Any]:
        self._seq += 1
        return {"seq": self._seq, "run_id": self._run_id, "at_ns": 0, "wall_ns": 0}


def _usage(recorded: _Usage | None, read: int, written: int) -> TokenUsage:
    if recorded is not None:
        return TokenUsage(input_tokens=recorded.input, output_tokens=recorded.output)
    # As `estimate_tokens` does it, from lengths because the texts were not recorded.
    return TokenUsage(input_tokens=read // 3 + 1, output_tokens=written // 3 + 1, estimated=True)
