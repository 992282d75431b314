"""The last answer of a stopped run, asked through the framework with its own output schema."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic_ai import Agent
from pydantic_ai.usage import UsageLimits
from pydantic_core import to_json

from budgetguard_core.kit import Answer, LastQuestion, token_usage
from budgetguard_pydantic_ai._history import instructions_of
from budgetguard_pydantic_ai._model import provider_of


class Unbounded(Agent[Any, Any]):
    """An agent outside of all budgets: its one call has been admitted already."""

    iter = Agent.iter


def takes_text(output_type: Any) -> bool:
    """Return whether a text is an output of this type: it is `str`, or one of several is."""
    several: Any = get_args(output_type) if get_origin(output_type) in (Union, UnionType) else ()
    if isinstance(output_type, list | tuple):
        several = output_type  # pyright: ignore[reportUnknownVariableType]
    return output_type is str or any(map(takes_text, several))


class LastAnswer:
    """The last answer of one run.

    Attributes:
        output: The output of a stopped run whose output type takes no text; None without an answer.
        is_text: The output type takes text.
    """

    def __init__(self, output_type: Any) -> None:
        self.is_text = takes_text(output_type)
        self._type = str if self.is_text else output_type
        self.output: Any = None

    def question(self, ctx: Any, messages: Sequence[Any]) -> LastQuestion:
        """Return how to ask for it."""
        system = instructions_of(messages)

        async def ask(sent: list[Any], opened: Any) -> Answer:
            agent: Any = Unbounded(ctx.model, output_type=self._type, retries=0)
            bound: dict[str, Any] = {
                **(ctx.model_settings or {}),
                "max_tokens": opened.max_output_tokens,
            }
            result = await agent.run(
                message_history=sent,
                instructions=system,
                deps=ctx.deps,
                model_settings=bound,
                usage_limits=UsageLimits(request_limit=1),
            )
            self.output = result.output
            text = self.output if self.is_text else to_json(self.output, fallback=repr).decode()
            return Answer(text=text, usage=token_usage(result.usage))

        name, provider = ctx.model.model_name, provider_of(ctx.model)
        return LastQuestion(ask_async=ask, model=name, provider=provider, system=system)
