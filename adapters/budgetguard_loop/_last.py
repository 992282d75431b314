"""A last answer of a stopped loop, from the step that makes its model calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from budgetguard_core import ModelCall, Trip
from budgetguard_core.kit import Answer, LastAnswer, OpenModelCall, Prompt, Run, last_answer
from budgetguard_loop._history import Message, asked_at_last, message_text
from budgetguard_loop._reply import ModelReply, StreamedReply, read_reply
from budgetguard_loop._settings import Settings, called, close_stream


@dataclass(frozen=True, slots=True)
class LastStep:
    """Ask the step of a stopped run for a last answer; answer with its text, or None."""

    run: Run
    last: LastAnswer
    call: ModelCall
    messages: list[Message]

    @staticmethod
    def of(
        run: Run,
        trip: Trip | None,
        messages: Sequence[Message],
        model: str | None,
        provider: str | None,
    ) -> LastStep | None:
        """Return what a run may be asked at last; None where it may not.

        Args:
            run: The run.
            trip: Why it was stopped; None where it was not.
            messages: The closed history.
            model: The name of the step's model.
            provider: Who has it.
        """
        last = None if trip is None else last_answer(run, trip)
        if last is None:
            return None
        sent = asked_at_last(messages)
        call = ModelCall(model=model, provider=provider, input_tokens=Prompt().project(sent))
        return LastStep(run, last, call, sent)

    def ask(self, step: Callable[..., Any], settings: Settings) -> str | None:
        """Ask where no event loop runs.

        Args:
            step: Makes one model call, as the step of `run_bounded` does.
            settings: What it takes beside the messages.
        """

        def model(opened: OpenModelCall) -> Answer:
            return _answer(read_reply(step(self.messages, **self._given(opened, settings))))

        return self.last.ask(self.call, model)

    async def ask_async(self, step: Callable[..., Any], settings: Settings) -> str | None:
        """Ask on an event loop, as `ask`; a step that streams is read to its end."""

        async def model(opened: OpenModelCall) -> Answer:
            result = await called(step, (self.messages,), self._given(opened, settings))
            if not hasattr(result, "__aiter__"):
                return _answer(read_reply(result))
            reply = StreamedReply([])
            try:
                async for chunk in result:
                    reply.add(chunk)
            finally:
                await close_stream(result)
            return _answer(reply.reply())

        return await self.last.ask_async(self.call, model)

    def _given(self, opened: OpenModelCall, settings: Settings) -> Mapping[str, Any]:
        given = settings.for_call(self.run, opened)
        return {**given, "without_tools": True} if settings.knows_of_tools else given


def _answer(reply: ModelReply) -> Answer:
    return Answer(
        text=message_text(reply.message),
        usage=reply.usage,
        model=reply.model,
        cost_usd=reply.cost_usd,
    )
