"""The last answer of a stopped run, which its model is asked for where the budget has a reserve."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from agents import Agent, AgentOutputSchemaBase, ItemHelpers, ModelTracing
from agents.run import CallModelData, ModelInputData

from budgetguard_core import Trip, kit
from budgetguard_openai_agents._history import Turn, turn_items
from budgetguard_openai_agents._model import model_of, set_bound, usage_of
from budgetguard_openai_agents._run import Recorder


def is_typed(agent: Agent[Any]) -> bool:
    """Return whether an agent's output is no text."""
    kind: Any = agent.output_type
    if isinstance(kind, AgentOutputSchemaBase):
        return not kind.is_plain_text()
    return kind is not None and kind is not str


async def ask(
    recorder: Recorder, trip: Trip, context: Any, history: Callable[[], Any]
) -> tuple[str | None, Any]:
    """Ask the model for the end of a stopped run, once and without tools.

    Args:
        recorder: The hooks of the run.
        trip: Why it was stopped.
        context: The user's context.
        history: Returns the closed history, to be awaited.

    Returns:
        The text, and the output where that is of a type; None without an answer.
    """
    agent, config = recorder.agent, recorder.run_config
    # Nobody would judge the answer; an answer that was cut short is the last message by itself.
    judged = agent.output_guardrails or config.output_guardrails
    withheld = judged or recorder.cut or recorder.is_server_side or recorder.sent is None
    last = None if withheld else kit.last_answer(recorder.run, trip)
    if last is None:
        return None, None
    model, request = cast("Any", recorder.sent)
    try:
        sent = ModelInputData(await history(), request["system_instructions"])
        own: Any = config.call_model_input_filter
        if own is not None:
            filtered = own(CallModelData(sent, agent, context))
            sent = await filtered if inspect.isawaitable(filtered) else filtered
        groups = kit.grouped(cast("Any", sent.input))
        asked: Any = [_plain(one) for (one,) in kit.in_words(groups, kit.RESPONSES)]
    except Exception as error:
        # Code of the user's: it filters what is sent.
        recorder.run.guard.tree.report("last answer", error)
        return None, None
    name, provider = model_of(agent, config)
    tokens = kit.Prompt().project(asked, system=sent.instructions, output_schema=agent.output_type)
    outputs: list[Any] = [None]

    async def say(opened: kit.OpenModelCall) -> kit.Answer:
        settings = replace(request["model_settings"], tool_choice=None, parallel_tool_calls=None)
        set_bound(settings, opened.max_output_tokens)
        response = await model.get_response(
            system_instructions=sent.instructions,
            input=asked,
            model_settings=settings,
            tools=[],
            output_schema=request["output_schema"],
            handoffs=[],
            tracing=ModelTracing.DISABLED,
            previous_response_id=None,
            conversation_id=None,
            prompt=None,
        )
        text = ItemHelpers.text_message_outputs(turn_items(Turn(agent, response)))
        if is_typed(agent):
            try:
                outputs.append(request["output_schema"].validate_json(text))
            except Exception as error:
                recorder.run.guard.tree.report("last answer", error)
                text = ""
        return kit.Answer(text=text, usage=usage_of(response))

    call = kit.ModelCall(model=name, provider=provider, input_tokens=tokens)
    return await last.ask_async(call, say), outputs[-1]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    # Of the SDK's converters, that of chats takes the words of an assistant as a text only.
    content, role = message["content"], message["role"]
    return {"role": role, "content": kit.content_text(content) if role == "assistant" else content}
