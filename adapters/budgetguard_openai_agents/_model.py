"""The model calls of a run: a model that asks the budget before each attempt, and charges it."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import agents
from agents.models import get_default_model

from budgetguard_core import kit
from budgetguard_core.kit import Turn as Reply
from budgetguard_openai_agents._frame import RunStopped, recorder_here
from budgetguard_openai_agents._history import Turn, requested_calls
from budgetguard_openai_agents._tools import original

_LEAST_OUTPUT = 16  # tokens: the least completion bound that the Responses API takes
_ROUTERS = frozenset({"any-llm", "litellm"})
_WRITTEN = ("text", "refusal")
_GIVEN = (
    "system_instructions",
    "input",
    "model_settings",
    "tools",
    "output_schema",
    "handoffs",
    "tracing",
)


class BoundedModel:
    """The model of an agent in a run: every attempt is asked for, bounded and charged."""

    def __init__(self, own: Any, recorder: Any, named: tuple[str | None, str | None]) -> None:
        self.own = own
        self._recorder = recorder
        self._named = named
        # One of OpenAI's own classes: a request can name another model.
        self._may_fall_back = isinstance(
            own, agents.OpenAIChatCompletionsModel | agents.OpenAIResponsesModel
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def get_retry_advice(
        self, request: agents.ModelRetryAdviceRequest
    ) -> agents.ModelRetryAdvice | None:
        """Return the model's own advice; but nobody tries again what the budget has refused."""
        if request.error is self._recorder.refused:
            final = agents.ModelRetryNormalizedError(is_abort=True)
            return agents.ModelRetryAdvice(suggested=False, normalized=final)
        advice: agents.ModelRetryAdvice | None = self.own.get_retry_advice(request)
        return advice

    async def get_response(self, **request: Any) -> agents.ModelResponse:
        """Make a call."""
        turn = await self._requested(request)
        with turn:
            response: agents.ModelResponse = await self.own.get_response(**request)
        self._answered(turn, response.output, usage_of(response))
        return response

    async def stream_response(self, *given: Any, **options: Any) -> AsyncGenerator[Any]:
        """Make a call whose answer is streamed."""
        request = {**dict(zip(_GIVEN, given, strict=True)), **options}
        turn = await self._requested(request)
        given = (*given[:2], request["model_settings"], *given[3:])
        output: list[Any] = []
        events: Any = None
        try:
            with turn.entered():
                events = aiter(self.own.stream_response(*given, **options))
            while True:
                with turn.entered():
                    event = await anext(events, None)
                if event is None:
                    break
                self._see(turn, event, output)
                yield event
        except BaseException as error:
            turn.failed(error)
            raise
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()

    async def _requested(self, request: dict[str, Any]) -> kit.ModelTurn:
        """Ask for an attempt and write its bounds into the request, or stop the run."""
        try:
            return await self._admitted(request)
        except Exception as error:
            self._recorder.refused = error
            raise

    async def _admitted(self, request: dict[str, Any]) -> kit.ModelTurn:
        recorder = self._recorder
        due, recorder.due = recorder.due, None
        recorder.sent = self.own, request
        if due is not None:
            recorder.close_batch()
        settings, sent = copy.copy(request["model_settings"]), request["input"]
        places = extra_bounds(settings)
        own = max([own for _, _, own in places]) if places else settings.max_tokens
        name, provider = self._named
        requested = kit.Request(
            messages=sent,
            tools=schemas_of(request["tools"], request["handoffs"]),
            system=request["system_instructions"],
            schema=recorder.agent.output_type,
            model=name,
            provider=provider,
            retry=due is None,
            # Some servers take -1 for a completion without a bound.
            bound=own if own is None or own >= 1 else None,
            min_bound=_LEAST_OUTPUT,
            may_fall_back=self._may_fall_back,
            prunes=not recorder.is_server_side,
        )
        flow = recorder.session.model(requested, recorder.known(sent))
        turn: kit.ModelTurn | kit.Stop = await kit.run_awaited(flow)
        if isinstance(turn, kit.Stop):
            raise RunStopped(turn.trip)
        if turn.is_pruned:
            sent[:] = turn.messages
        if turn.nudge is not None:
            # In place: the model gets it, the history and the session do not.
            sent.append({"role": "user", "content": turn.nudge})
        if due is not None:
            try:
                await recorder.hooks.on_llm_start(*due)
            except BaseException:
                turn.take_back()
                raise
        if settings.include_usage is None:
            # Streams are asked for their usage; some providers report it nowhere else.
            settings.include_usage = True
        set_bound(settings, turn.call.max_output_tokens or own, places)
        if turn.fallback_model is not None:
            # Beside the one of the model's class: both APIs take the later one.
            body: Any = settings.extra_body or {}
            settings.extra_body = {**body, "model": turn.fallback_model}
        request["model_settings"] = settings
        return turn

    def _answered(
        self, turn: kit.ModelTurn, output: list[Any], usage: kit.TokenUsage | None
    ) -> None:
        agent = self._recorder.agent
        requested = requested_calls(agent, output)
        self._recorder.read = output, requested
        calls = tuple([kit.Call("", one.call.name, one.call.arguments) for one in requested])
        is_estimated = usage is None or usage.estimated
        turn.answered(
            # What is needed where figures are missing, and of what may be said again.
            Reply("assistant", () if calls and not is_estimated else (written(output),), calls),
            usage,
            speaker=agent.name,
            is_cut=not calls and self._is_cut(turn.call.max_output_tokens, output, usage),
        )

    def _is_cut(self, bound: int | None, output: list[Any], usage: kit.TokenUsage | None) -> bool:
        """Return whether an answer was cut at its completion bound.

        The SDK keeps the reason of the Responses API only, as the status of the items; of chat
        completions the bound itself has to tell.
        """
        if bound is None:
            return False
        if any(kit.part(item, "status") == "incomplete" for item in output):
            return True
        used = kit.estimate(output) if usage is None else usage.output_tokens
        is_a_chat = isinstance(self.own, agents.OpenAIChatCompletionsModel)
        return used >= bound and (is_a_chat or "litellm" in type(self.own).__module__)

    def _see(self, turn: kit.ModelTurn, event: Any, output: list[Any]) -> None:
        """Take in an event of a stream: what has been written so far is paid for."""
        field = kit.parts_of(event)
        delta, kind, response = field("delta"), field("type"), field("response")
        if isinstance(delta, str):
            turn.piece(delta)
        elif kind == "response.output_item.done":
            output.append(field("item"))
        elif kind == "response.completed":
            self._answered(turn, response.output or output, usage_of(response))
        elif kind == "response.incomplete":
            # The SDK takes such an end for an error, and drops the answer.
            reason = kit.part(response.incomplete_details, "reason")
            turn.answered(
                Reply("assistant", (written(response.output),)),
                usage_of(response),
                is_cut=bool(response.output) and reason == "max_output_tokens",
            )
            if turn.trip is not None:
                answer = agents.ModelResponse(response.output, agents.Usage(), response.id)
                self._recorder.turns.append(Turn(self._recorder.agent, answer))


def bounded_model(made: Any, agent: agents.Agent[Any], config: agents.RunConfig) -> Any:
    """Return a model that asks the run around for each of its calls; itself outside of any."""
    recorder = recorder_here()
    if recorder is None or recorder.run.ended or recorder.is_off:
        return made
    # The same one for each turn: the SDK cleans up each model that a run has used.
    named = model_of(agent, config)
    key = id(made), *named
    if key not in recorder.models:
        recorder.models[key] = BoundedModel(made, recorder, named)
    return recorder.models[key]


def model_of(
    agent: agents.Agent[Any], run_config: agents.RunConfig
) -> tuple[str | None, str | None]:
    """Find the model that an agent's next call goes to, and the provider where it is named."""
    model = run_config.model or agent.model
    if model is None and agent.prompt is None:
        model = get_default_model()
    # A prompt names a model that is known to its provider alone.
    name = model if isinstance(model, str) else getattr(model, "model", None)
    if not isinstance(name, str):
        return None, None
    # "litellm/anthropic/claude": behind a router stands the provider.
    *provider, name = (part for part in name.split("/") if part not in _ROUTERS)
    return name, provider[0] if provider else None


def schemas_of(
    tools: Iterable[agents.Tool], handoffs: Iterable[agents.Handoff[Any, Any]]
) -> list[object]:
    """List what the model is told of tools and handoffs: equal from turn to turn."""
    # A server of tools makes each of them anew for every turn.
    field: list[object] = [
        (tool.name, tool.description, tool.params_json_schema)
        if isinstance(tool, agents.FunctionTool)
        else original(tool)
        for tool in tools
    ]
    return field + [(to.tool_name, to.tool_description, to.input_json_schema) for to in handoffs]


def usage_of(response: Any) -> kit.TokenUsage | None:
    """Return what one call used, streamed or not; None when the provider reported nothing."""
    usage: Any = response.usage
    if usage is None or not (usage.input_tokens or usage.output_tokens):
        return None
    read, reasoned = usage.input_tokens_details, usage.output_tokens_details
    is_plain = isinstance(response.usage, agents.Usage) and read and reasoned
    if not is_plain or read.model_extra or reasoned.model_extra:
        return kit.token_usage(usage)
    details: dict[str, Any] = {**vars(read), **vars(reasoned)}
    if any(details.values()):
        return kit.token_usage(usage)
    # Nothing went through a cache, nobody reasoned: the plainest record is read the fastest.
    return kit.token_usage(
        {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.total_tokens,
        }
    )


def written(items: Iterable[Any]) -> str:
    """Return all that a model wrote but for its calls: texts and reasoning."""
    texts: list[str] = []
    waiting = list(items)[::-1]
    while waiting:
        item = waiting.pop()
        texts += [text for name in _WRITTEN if isinstance(text := kit.part(item, name), str)]
        for name in ("content", "summary"):
            inner = kit.part(item, name)
            if isinstance(inner, list):
                waiting += inner[::-1]
    return "\n".join(texts)


# What providers call the bound of a completion.
_BOUNDS = ("max_output_tokens", "max_completion_tokens", "max_tokens")


def set_bound(
    settings: agents.ModelSettings, bound: int | None, places: Iterable[tuple[str, str, int]]
) -> None:
    """Set the completion tokens that settings ask for, under the names that the user gave them.

    One is given beside the settings because the model takes no other.
    """
    if bound is not None:
        for position, name, _ in places:
            setattr(settings, position, {**getattr(settings, position), name: bound})
    settings.max_tokens = None if bound is not None and places else bound


def extra_bounds(settings: agents.ModelSettings) -> list[tuple[str, str, int]]:
    """List the completion bounds that settings hold beside their own: where, its name, tokens."""
    body: Any = settings.extra_body
    linked: dict[str, dict[str, Any]] = {
        "extra_args": settings.extra_args or {},
        "extra_body": body if isinstance(body, dict) else {},
    }
    return [
        (position, name, own)
        for position, given in linked.items()
        for name in _BOUNDS
        if name in given and isinstance(own := given[name], int)
    ]
