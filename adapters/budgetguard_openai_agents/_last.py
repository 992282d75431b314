"""A last answer of a stopped run, from the model of the agent that was at work."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from agents import Agent, Model, ModelTracing, OpenAIResponsesModel, RunConfig
from agents.run import CallModelData, ModelInputData

from budgetguard_core import ModelCall, Trip
from budgetguard_core.kit import ANSWER_NOW, Answer, OpenModelCall, Prompt, last_answer, part
from budgetguard_openai_agents import _session
from budgetguard_openai_agents._ending import history_of
from budgetguard_openai_agents._run import Recorder
from budgetguard_openai_agents._settings import plain_settings
from budgetguard_openai_agents._usage import model_of, usage_of


async def answer_of(
    recorder: Recorder, trip: Trip, given: Any, data: Any, session: Any
) -> str | None:
    """Ask for a last answer, where the stopped run may have one.

    Args:
        recorder: The hooks of the run.
        trip: Why it was stopped.
        given: The input of the run.
        data: What the SDK knows of it, None when its work was cancelled.
        session: The user's session, if any.
    """
    agent, config = recorder.agent, recorder.run_config
    # Nobody would judge the answer; an answer that was cut short is the last message by itself.
    judged = agent.output_guardrails or config.output_guardrails
    withheld = judged or recorder.cut or recorder.is_server_side
    last = None if withheld else last_answer(recorder.run, trip)
    if last is None:
        return None
    try:
        sent = await _request(recorder, agent, given, data, session)
    except Exception as error:
        # Code of the user's: what makes the instructions, or filters what is sent.
        recorder.run.guard.tree.report("last answer", error)
        return None
    name, provider = model_of(agent, config)
    model = _model(agent, config)
    if not isinstance(model, OpenAIResponsesModel):
        sent = ModelInputData(_in_words(sent.input), sent.instructions)
    sent = ModelInputData(_asked(sent.input), sent.instructions)
    tokens = Prompt().project(sent.input, system=sent.instructions)
    call = ModelCall(model=name, provider=provider, input_tokens=tokens)

    async def say(opened: OpenModelCall) -> Answer:
        response = await model.get_response(
            sent.instructions,
            sent.input,
            replace(
                plain_settings(agent, config),
                max_tokens=opened.max_output_tokens,
                tool_choice=None,
                parallel_tool_calls=None,
            ),
            [],
            None,
            [],
            ModelTracing.DISABLED,
            previous_response_id=None,
            conversation_id=None,
            prompt=None,
        )
        return Answer(text=_text(response.output), usage=usage_of(response))

    return await last.ask_async(call, say)


async def _request(
    recorder: Recorder, agent: Agent[Any], given: Any, data: Any, session: Any
) -> ModelInputData:
    recorder.withhold()
    items = history_of(recorder, given, data)
    if session is not None:
        stored = await _session.read(session)
        items = [*_session.compare(stored, items).before, *items]
    context = recorder.context or part(data, "context_wrapper")
    instructions = await agent.get_system_prompt(context)
    sent = ModelInputData(input=items, instructions=instructions)
    own = recorder.run_config.call_model_input_filter
    if own is not None:
        filtered: Any = own(CallModelData(sent, agent, getattr(context, "context", None)))
        sent = await filtered if inspect.isawaitable(filtered) else filtered
    return sent


def _in_words(items: Sequence[Any]) -> list[Any]:
    """Write a history without tools.

    Anthropic and Bedrock, through LiteLLM and its like, take no calls and results in a request that
    defines no tools, so they are told in words. OpenAI takes them as they are.
    """
    names: dict[Any, Any] = {}
    found: list[Any] = []
    for item in items:
        kind, role = str(part(item, "type") or "message"), part(item, "role")
        content: Any = part(item, "content")
        if role == "assistant":
            _say(found, "assistant", _words(content))
        elif role is not None:
            _say(found, role, content)
        elif kind.endswith("_call_output"):
            name = names.get(part(item, "call_id"), "The tool")
            _say(found, "user", f"{name} returned: {_words(part(item, 'output'))}")
        elif part(item, "name") and kind.endswith("_call"):
            name = names[part(item, "call_id")] = part(item, "name")
            given: Any = part(item, "arguments") or part(item, "input")
            _say(found, "assistant", f"I called {name} with {given}.")
        # What a model thought, and what its provider did, is told in no other request.
    return found


def _say(found: list[Any], role: Any, content: Any) -> None:
    """Add what somebody says; nobody speaks twice in a row."""
    before = part(found[-1], "content") if found and part(found[-1], "role") == role else None
    if not content:
        return
    if before is None:
        found.append({"role": role, "content": content})
    elif isinstance(before, str) and isinstance(content, str):
        found[-1] = {"role": role, "content": f"{before}\n\n{content}"}
    else:
        found[-1] = {"role": role, "content": [*_parts(before), *_parts(content)]}


def _parts(content: Any) -> list[Any]:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else list(content)


def _words(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        return str(content)
    pieces = cast("Sequence[Any]", content)
    return "".join(part(one, "text") or part(one, "refusal") or "" for one in pieces)


def _asked(items: list[Any]) -> list[Any]:
    """Ask at the end of a history; nobody speaks twice in a row."""
    last = items[-1] if items else None
    if part(last, "role") != "user":
        return [*items, {"role": "user", "content": ANSWER_NOW}]
    asked = [{"role": "user", "content": part(last, "content")}]
    _say(asked, "user", ANSWER_NOW)
    return [*items[:-1], *asked]


def _model(agent: Agent[Any], config: RunConfig) -> Model:
    model = config.model or agent.model
    return model if isinstance(model, Model) else config.model_provider.get_model(model)


def _text(output: list[Any]) -> str:
    return "".join(
        part(piece, "text") or ""
        for item in output
        if part(item, "type") == "message"
        for piece in part(item, "content") or ()
    )
