"""What the processes of a script and its supervisor say to each other: JSON, one object a line."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from budgetguard_core import ModelCall, StopReason, TokenUsage, ToolCall, Trip

SOCKET: Final = "BUDGETGUARD_SOCKET"
"""The environment variable that names the supervisor's socket."""
LONGEST: Final = 2**20
"""The bytes of the longest line; what sends more is no process of ours."""
_NAME: Final = 200

_Name: TypeAlias = Annotated[str, Field(max_length=_NAME)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# From a process


class Hello(_Message):
    """A process asks what bounds it."""

    op: Literal["hello"] = "hello"


class AskModel(_Message):
    """May a model call start?"""

    op: Literal["ask_model"] = "ask_model"
    model: _Name | None
    provider: _Name | None
    retry: bool
    input_tokens: Annotated[int, Field(ge=0)]
    max_output_tokens: Annotated[int, Field(ge=1)] | None
    output_is_fixed: bool
    min_output_tokens: Annotated[int, Field(ge=1)]
    cost_usd: Decimal | None

    @classmethod
    def of(cls, call: ModelCall) -> AskModel:
        """Describe a call; its figures are checked."""
        return cls(
            model=_cut(call.model),
            provider=_cut(call.provider),
            retry=call.retry,
            input_tokens=call.input_tokens,
            max_output_tokens=call.max_output_tokens,
            output_is_fixed=call.output_is_fixed,
            min_output_tokens=call.min_output_tokens,
            cost_usd=call.cost_usd,
        )

    def call(self) -> ModelCall:
        """Return the call."""
        return ModelCall(**self.model_dump(exclude={"op"}))


class SettleModel(_Message):
    """A model call has ended."""

    op: Literal["settle_model"] = "settle_model"
    id: int
    usage: TokenUsage | None
    failed: bool
    model: _Name | None
    cost_usd: Decimal | None


class WantedTool(_Message):
    """One tool call of a batch; its arguments stay in the process."""

    name: _Name
    id: _Name | None
    kind: Literal["function", "handoff", "output", "hosted", "reported"]
    fingerprint: _Name | None

    @classmethod
    def of(cls, call: ToolCall) -> WantedTool:
        """Describe a call."""
        name, id_ = _cut(call.name) or "", _cut(call.id)
        return cls(name=name, id=id_, kind=call.kind, fingerprint=call.fingerprint)

    def call(self) -> ToolCall:
        """Return the call."""
        return ToolCall(name=self.name, id=self.id, kind=self.kind, fingerprint=self.fingerprint)


class AskTools(_Message):
    """Which tool calls of a batch may start?"""

    op: Literal["ask_tools"] = "ask_tools"
    calls: tuple[WantedTool, ...]


class SettleTool(_Message):
    """A tool call has ended."""

    op: Literal["settle_tool"] = "settle_tool"
    id: int
    failed: bool


class Withdraw(_Message):
    """A call that was admitted was not made."""

    op: Literal["withdraw"] = "withdraw"
    id: int
    waits: bool = False


class Check(_Message):
    """Has the run to end?"""

    op: Literal["check"] = "check"


class StoppedHere(_Message):
    """A process has refused a call by a limit that it looks after itself, such as a loop."""

    op: Literal["stopped_here"] = "stopped_here"
    trip: Trip


class Noted(_Message):
    """Something that the report should say."""

    op: Literal["noted"] = "noted"
    text: _Name


Request: TypeAlias = (
    Hello | AskModel | SettleModel | AskTools | SettleTool | Withdraw | Check | StoppedHere | Noted
)

# From the supervisor


class Welcome(_Message):
    """What bounds a process."""

    op: Literal["welcome"] = "welcome"
    run_id: str
    budget: dict[str, Any]
    seconds_left: float | None


class Admitted(_Message):
    """The call may start, and has this number."""

    op: Literal["admitted"] = "admitted"
    id: int
    max_output_tokens: int | None = None


class Refused(_Message):
    """This tool call may not start; the run goes on."""

    op: Literal["refused"] = "refused"
    reason: StopReason
    detail: str
    message: str


class Stopped(_Message):
    """The run ends."""

    op: Literal["stopped"] = "stopped"
    trip: Trip


class Answers(_Message):
    """The answers to a batch of tool calls, in its order."""

    op: Literal["answers"] = "answers"
    answers: tuple[Annotated[Admitted | Refused | Stopped, Field(discriminator="op")], ...]


class Done(_Message):
    """It was taken in."""

    op: Literal["done"] = "done"


Reply: TypeAlias = Welcome | Admitted | Refused | Stopped | Answers | Done

REQUEST: Final[TypeAdapter[Request]] = TypeAdapter(Annotated[Request, Field(discriminator="op")])
REPLY: Final[TypeAdapter[Reply]] = TypeAdapter(Annotated[Reply, Field(discriminator="op")])


def _cut(text: str | None) -> str | None:
    return None if text is None else text[:_NAME]
