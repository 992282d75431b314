"""A chat model with scripted answers, for tests of users' own graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable

from budgetguard_core.testing.scripted import Answers


class ScriptedChatModel(BaseChatModel):
    """Gives scripted answers, sync, async and streamed, with usage as a provider reports it."""

    answers: Any
    """The `Answers`."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    @property
    def model_name(self) -> str:
        """The model's name, as LangChain's own models have it."""
        return str(self.answers.model)

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, AIMessage]:
        """Return the model: its answers say which tools it calls."""
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        turn = self.answers.next()
        message = AIMessage(
            turn.text,
            tool_calls=[
                {"name": call.name, "args": call.arguments, "id": call.id} for call in turn.calls
            ],
            usage_metadata={
                "input_tokens": turn.usage.input_tokens,
                "output_tokens": turn.usage.output_tokens,
                "total_tokens": turn.usage.total_tokens,
            },
            response_metadata={"model_name": self.model_name},
        )
        return ChatResult(generations=[ChatGeneration(message=message)])


def scripted_model(answers: Answers) -> ScriptedChatModel:
    """Make a chat model that gives these answers."""
    return ScriptedChatModel(answers=answers)
