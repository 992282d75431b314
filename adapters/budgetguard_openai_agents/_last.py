"""A last answer of a stopped run, from the model of the agent that was at work."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from agents import (
    Agent,
    MaxTurnsExceeded,
    Model,
    ModelResponse,
    ModelTracing,
    OpenAIResponsesModel,
    RunConfig,
    RunItem,
)
from agents.run import CallModelData, ModelInputData

from budgetguard_core import ModelCall, Trip
from budgetguard_core.kit import ANSWER_NOW, Answer, OpenModelCall, Prompt, last_answer, part
from budgetguard_openai_agents import _seams, _session
from budgetguard_openai_agents._history import history_of
from budgetguard_openai_agents._run import Recorder
from budgetguard_openai_agents._settings import plain_settings, set_bound
from budgetguard_openai_agents._usage import model_of, usage_of


class LastWords(NamedTuple):
    """How a stopped run ends."""

    text: str | None = None
    """The text of its last message; None for the synthetic one."""
    is_typed: bool = False
    """The program asked for an output of a type."""
    final: Any = None
    """That output; None where nobody gave one."""


async def last_words(
    recorder: Recorder,
    trip: Trip,
    data: Any,
    items: Sequence[RunItem],
    responses: Sequence[ModelResponse],
    session: Any,
) -> LastWords:
    """Ask for the end of a stopped run: the model, where the run has a reserve for it.

    For an output of a type, the user's own handler of `max_turns` is asked where there is none.

    Args:
        recorder: The hooks of the run.
        trip: Why it was stopped.
        data: What the SDK knows of it.
        items: Its items, closed.
        responses: The model's responses.
        session: The user's session, if any.
    """
    agent = recorder.agent
    schema = _seams.schema_of(agent)
    is_typed = schema is not None and not schema.is_plain_text()
    found: list[Any] = []

    def parsed(text: str) -> str:
        if schema is None or not is_typed:
            return text
        try:
            found.append(schema.validate_json(text))
        except Exception as error:
            recorder.run.guard.tree.report("last answer", error)
            return ""
        return text

    answer = await _answer(recorder, trip, history_of(data.input, items), data, session, parsed)
    if answer is not None or not is_typed:
        return LastWords(answer, is_typed, *found)
    handler = recorder.take_handler()
    if handler is None:
        return LastWords(is_typed=True)
    facts = {"input": data.input, "new_items": list(items), "raw_responses": list(responses)}
    context = recorder.context or data.context_wrapper
    error = MaxTurnsExceeded(trip.detail)
    try:
        text, final = await _seams.handled(handler, error, context, agent, facts)
    except Exception as raised:
        recorder.run.guard.tree.report("error_handlers", raised)
        return LastWords(is_typed=True)
    return LastWords(text, is_typed=True, final=final)


async def _answer(
    recorder: Recorder,
    trip: Trip,
    history: list[Any],
    data: Any,
    session: Any,
    parsed: Callable[[str], str],
) -> str | None:
    agent, config = recorder.agent, recorder.run_config
    # Nobody would judge the answer; an answer that was cut short is the last message by itself.
    judged = agent.output_guardrails or config.output_guardrails
    withheld = judged or recorder.cut or recorder.is_server_side
    last = None if withheld else last_answer(recorder.run, trip)
    if last is None:
        return None
    try:
        sent = await _request(recorder, agent, history, data, session)
    except Exception as error:
        # Code of the user's: what makes the instructions, or filters what is sent.
        recorder.run.guard.tree.report("last answer", error)
        return None
    name, provider = model_of(agent, config)
    model = _model(agent, config)
    if not isinstance(model, OpenAIResponsesModel):
        sent = ModelInputData(_in_words(sent.input), sent.instructions)
    sent = ModelInputData(_asked(sent.input), sent.instructions)
    schema = _seams.schema_of(agent)
    tokens = Prompt().project(sent.input, system=sent.instructions, output_schema=agent.output_type)
    call = ModelCall(model=name, provider=provider, input_tokens=tokens)

    async def say(opened: OpenModelCall) -> Answer:
        own = plain_settings(agent, config)
        settings = replace(own, tool_choice=None, parallel_tool_calls=None)
        set_bound(settings, opened.max_output_tokens)
        response = await model.get_response(
            sent.instructions,
            sent.input,
            settings,
            [],
            schema,
            [],
            ModelTracing.DISABLED,
            previous_response_id=None,
            conversation_id=None,
            prompt=None,
        )
        return Answer(text=parsed(_text(response.output)), usage=usage_of(response))

    return await last.ask_async(call, say)


async def _request(
    recorder: Recorder, agent: Agent[Any], history: list[Any], data: Any, session: Any
) -> ModelInputData:
    items = history
    if session is not None:
        stored = await _session.read(session)
        items = [*_session.compare(stored, items).before, *items]
    context = recorder.context or data.context_wrapper
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
