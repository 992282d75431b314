"""A last answer of a stopped agent, from its own model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from strands import Agent

from budgetguard_core import ModelCall, Trip
from budgetguard_core.kit import ANSWER_NOW, Answer, OpenModelCall, Prompt, last_answer, token_usage
from budgetguard_strands._bounds import bounded
from budgetguard_strands._run import AgentRun
from budgetguard_strands._usage import model_name


async def answer_of(agent: Agent, at: AgentRun, trip: Trip) -> str | None:
    """Ask the agent's model for a last answer, where the stopped run may have one."""
    last = last_answer(at.run, trip)
    if last is None:
        return None
    model: Any = agent.model
    sent = asked(agent.messages)
    call = ModelCall(
        model=model_name(model),
        input_tokens=Prompt().project(sent, system=agent.system_prompt),
    )

    async def say(opened: OpenModelCall) -> Answer:
        bound = opened.max_output_tokens
        asked_model = model if bound is None else bounded(model, bound)
        text: list[str] = []
        usage: Any = None
        async for event in asked_model.stream(sent, None, agent.system_prompt):
            delta = event.get("contentBlockDelta", {}).get("delta", {})
            text.append(delta.get("text") or "")
            usage = event.get("metadata", {}).get("usage") or usage
        return Answer(text="".join(text), usage=token_usage(usage))

    return await last.ask_async(call, say)


def asked(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Write a history without tools, and ask for an answer at its end.

    Bedrock and Anthropic take no calls and results in a request that defines no tools, so they are
    told in words.
    """
    names: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    for message in messages:
        content = [one for block in message["content"] if (one := _in_words(block, names))]
        if not content:
            continue
        if found and found[-1]["role"] == message["role"]:
            found[-1]["content"] += content
        else:
            found.append({"role": message["role"], "content": content})
    question = {"text": ANSWER_NOW}
    if found and found[-1]["role"] == "user":
        found[-1]["content"].append(question)
    else:
        found.append({"role": "user", "content": [question]})
    return found


def _in_words(block: Mapping[str, Any], names: dict[str, str]) -> Any:
    use: Mapping[str, Any] | None = block.get("toolUse")
    if use is not None:
        names[use["toolUseId"]] = use["name"]
        arguments = json.dumps(use.get("input"), ensure_ascii=False, default=str)
        return {"text": f"I called {use['name']} with {arguments}."}
    result: Mapping[str, Any] | None = block.get("toolResult")
    if result is not None:
        name = names.get(result["toolUseId"], "the tool")
        parts = [
            one.get("text") or json.dumps(one.get("json"), ensure_ascii=False, default=str)
            for one in result.get("content", ())
            if "text" in one or "json" in one
        ]
        return {"text": f"{name} returned: {' '.join(parts)}"}
    # What a model thought is signed for the request that it was thought in.
    return None if "reasoningContent" in block else dict(block)
