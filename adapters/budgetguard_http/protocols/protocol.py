"""The base of the protocols: facts of requests and answers, and synthetic answers."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

from budgetguard_core.kit import (
    CHAT,
    Converse,
    Dialect,
    TokenUsage,
    ToolCall,
    Turn,
    merge_usage,
    token_usage,
)
from budgetguard_http.protocols.fields import (
    Body,
    Event,
    at,
    count_or_none,
    items,
    record,
    text_or_none,
)

Form: TypeAlias = Literal["text", "json", "tool"]
"""The form that a request asks for: any text, JSON of some kind, or a call of a tool."""
MARK: Final = "budgetguard"
"""Under this name a synthetic answer carries its marker, where the format takes other fields."""
_MOST: Final = 128
"""Choices that a provider gives at most."""
_ANY_TOOL: Final = ("required", "any", "ANY")
_ONE_TOOL: Final = ("function", "custom", "tool", "any")
_NO_JSON: Final = ("text", "text/plain")
_NOBODYS: Final = Turn("system")


class Result(NamedTuple):
    """The result of a tool call, as a request sends it back to the model."""

    id: str
    content: Any
    is_error: bool


class Reader:
    """One answer, whole or streamed so far; as it stands, its usage alone.

    Attributes:
        id: The answer's id, where a next request can refer to it.
        text: All that the model wrote, reasoning and arguments of tool calls included.
        shown: Of it, what the reply says to the user.
        calls: The tool calls that it asks for, when it has ended.
        hosted: The tool calls that the provider has run itself.
        is_cut: It ended at its completion bound.
        is_settled: The last figures have come: a client may stop reading here, and never close.
        has_calls: A tool call was begun: an answer that is cut then has no good end.
        hides_usage: Its client did not ask for the usage, and does not get it.
    """

    # What many have in common is the class's: one is made for each call.
    usage: TokenUsage | None = None
    model: str | None = None
    id: str | None = None
    is_cut: bool = False
    is_settled: bool = False
    has_calls: bool = False
    hides_usage: bool = False

    def __init__(self, protocol: ApiProtocol, request: Body) -> None:
        self.protocol = protocol
        self.request = request
        self.text: list[str] = []
        self.shown: list[str] = []
        self.calls: list[ToolCall] = []
        self.hosted: list[ToolCall] = []
        self.items: dict[int, Body] = {}
        self.begun: dict[Any, tuple[ToolCall, list[str]]] = {}

    def whole(self, body: Body) -> None:
        """Take a whole answer."""
        self.take("", body)
        if self.usage is not None and not self.protocol.is_turn:
            # There is no completion that could be missing.
            self.usage = self.usage._replace(estimated=False)

    def take(self, name: str, data: Body) -> bool | None:
        """Take an event; True where its client does not get it."""
        self.usage = merge_usage(self.usage, usage_in(data))
        self.model = text_or_none(data.get("model")) or self.model
        return None

    def end(self) -> None:
        """Take the end of the stream, which may come without saying so; safe to call again."""
        if self.begun:
            for call, pieces in self.begun.values():
                call.arguments = "".join(pieces) or call.arguments
            self.calls = [call for call, _ in self.begun.values()]

    def closing(self, text: str) -> list[Event] | None:
        """Return the events that end a cut stream in good order, with a text if it said nothing."""
        shown = "" if self.shown else text
        return self.protocol.synthetic_stream(self.request, self.model or "", shown, {}) or None

    def says(self, text: object) -> None:
        """Take in a piece of the reply's own text."""
        if text and isinstance(text, str):
            self.shown.append(text)
            self.text.append(text)

    def writes(self, text: object) -> None:
        """Take in what is written and not said: reasoning, arguments."""
        if text:
            self.text.append(str(text))

    def begins(self, key: Any, call: Body, arguments: Any = None, *, hosted: bool = False) -> None:
        """Take in a tool call that begins; its arguments may come in pieces, under its key."""
        made = ToolCall(
            name=str(call.get("name") or ""),
            arguments=arguments,
            id=text_or_none(call.get("id") or call.get("toolUseId")),
            kind="hosted" if hosted else "function",
        )
        if hosted:
            self.hosted.append(made)
        else:
            self.begun[key], self.has_calls = (made, []), True
            self.writes(arguments)

    def continues(self, key: Any, piece: object) -> None:
        """Take in a piece of a call's arguments."""
        if piece and isinstance(piece, str):
            self.text.append(piece)
            if key in self.begun:
                self.begun[key][1].append(piece)


class BlockReader(Reader):
    """Reads an answer whose stream opens and closes blocks, one after the other.

    Attributes:
        index_field: The field of an event that tells its block.
    """

    index_field: ClassVar[str]
    _open: int | None = None
    _next = 0

    def index(self, name: str, data: Body) -> int:
        """Return the block of an event, and note whether it is open."""
        index = count_or_none(data.get(self.index_field)) or 0
        if self.index_field in data:
            self._open = None if name.lower().endswith("stop") else index
            self._next = max(self._next, index + 1)
        return index

    def closing(self, text: str) -> list[Event]:
        """Close the open block and the message."""
        _, *events = self.protocol.synthetic_stream({}, self.model or "", text, {})
        field = self.index_field
        block = [(name, {**data, field: self._next}) for name, data in events if field in data]
        name, stop = block[-1]
        closed = [] if self._open is None else [(name, {**stop, field: self._open})]
        end = [(name, data) for name, data in events if field not in data]
        return [*closed, *([] if self.shown else block), *end]


class Paths(NamedTuple):
    """The places of a request's parts, each a dotted path, or several of which the first counts."""

    messages: str = ""
    prompt: str = ""
    """The prompt, where that is not the messages."""
    system: str = ""
    tools: str = ""
    schema: str = ""
    bound: str = ""
    thinking: str = ""
    """The tokens that thinking may take of the bound, which has to be larger."""
    choices: str = ""
    """The number of answers requested, each as long as the bound lets it be."""
    tool_choice: str = ""
    forced_tool: str = ""
    """The tool that the model has to call: the request's structured output."""
    follows: str = ""
    """The id of the answer after which the provider keeps the conversation."""


class ApiProtocol:
    """One protocol; as it stands, that of whatever costs something and is not understood."""

    provider: ClassVar[str | None] = None
    paths: ClassVar[Paths] = Paths()
    dialect: ClassVar[Dialect] = CHAT
    """The reader and writer of its messages."""
    reader_type: ClassVar[type[Reader]] = Reader
    model_in_path: ClassVar[re.Pattern[str] | None] = None
    stream_paths: ClassVar[tuple[str, ...]] = ()
    """The ends of the addresses whose answers are streamed."""
    min_output_tokens: ClassVar[int] = 1
    is_turn: ClassVar[bool] = True
    """A call is a turn of a loop; that of an embedding is none."""
    usage_is_optional: ClassVar[bool] = False
    """The usage of a stream comes where `stream_options` ask for it."""
    streams: ClassVar[bool] = False
    """An answer is streamed where the request does not say."""
    can_refuse: ClassVar[bool] = False
    """A model may refuse to answer in JSON: so does the synthetic answer."""

    # The request

    def model(self, path: str, body: Body) -> str | None:
        """Return the model's name, which the address may hold."""
        named = self.model_in_path.search(path) if self.model_in_path else None
        return text_or_none(body.get("model")) or (unquote(named[1]) if named else None)

    def is_streamed(self, path: str, body: Body) -> bool:
        """Return whether the answer comes as a stream."""
        return bool(body.get("stream", self.streams)) or path.endswith(self.stream_paths)

    def bound(self, body: Body) -> int | None:
        """Return the completion tokens that the request asks for at most."""
        return count_or_none(at(body, self.paths.bound))

    def set_bound(self, body: Body, tokens: int) -> None:
        """Write that bound, where its place is known."""
        *parents, name = self.paths.bound.split(".")
        for one in parents:
            inner = {**record(body.get(one))}
            body[one] = inner
            body = inner
        if name:
            body[name] = tokens

    def least_bound(self, body: Body) -> int:
        """Return the least bound that the provider takes for this request."""
        thinking = count_or_none(at(body, self.paths.thinking))
        return self.min_output_tokens if thinking is None else thinking + 1

    def choices(self, body: Body) -> int:
        """Return how many answers are asked for."""
        return count_or_none(at(body, self.paths.choices)) or 1

    def prompt(self, body: Body) -> Body:
        """Return what the prompt is made of, as `Prompt.project` takes it."""
        paths = self.paths
        return {
            "messages": at(body, paths.prompt or paths.messages) or [body],
            "system": at(body, paths.system),
            "tools": items(at(body, paths.tools)),
            "output_schema": at(body, paths.schema),
        }

    def turns(self, body: Body) -> list[Any]:
        """Return the messages of the conversation, system messages included."""
        return items(at(body, self.paths.messages))

    def turn(self, message: Any) -> Turn:
        """Read a message; one that its provider will refuse is nobody's."""
        try:
            return self.dialect.read(message)
        except (AttributeError, KeyError, TypeError, ValueError):
            return _NOBODYS

    def results(self, body: Body) -> list[Result]:
        """Return the results of tools that the request brings since the model's last reply."""
        found: list[Result] = []
        for message in reversed(self.turns(body)):
            turn = self.turn(message)
            if turn.role == "assistant" and not turn.is_empty:
                break
            pairs = zip(turn.results, turn.raw_results, strict=True)
            found[:0] = [_result(id_, raw) for (id_, _), raw in pairs]
        return found

    def follows(self, body: Body) -> str | None:
        """Return the id of the answer after which the provider keeps the conversation."""
        return text_or_none(at(body, self.paths.follows))

    def answer_turn(self, text: str) -> Any:
        """Return an answer as a turn of the conversation."""
        written = self.dialect.words("assistant", [text])
        return written[0] if items(written) else written

    def add_nudge(self, body: Body, text: str) -> None:
        """Put a corrective message into the last tool result; else it is a message of its own."""
        turns = body[self.paths.messages] = self.turns(body)
        last = record(turns[-1]) if turns and self.turn(turns[-1]).results else {}
        key = next((name for name in ("content", "output") if text_or_none(last.get(name))), None)
        if key is None:
            turns.append({"role": "user", "content": text})
        else:
            last[key] += f"\n\n{text}"

    def form(self, body: Body) -> Form:
        """Return what form of answer the request asks for."""
        choice, schema = at(body, self.paths.tool_choice), at(body, self.paths.schema)
        if choice:
            mode = choice if isinstance(choice, str) else at(choice, "mode allowed_tools.mode")
            is_one = not {"tool", "any"}.isdisjoint(record(choice))  # Bedrock's
            if is_one or mode in _ANY_TOOL or at(choice, "type") in _ONE_TOOL:
                return "tool"
        is_json = schema and schema not in _NO_JSON and at(schema, "type") not in _NO_JSON
        return "json" if is_json else "text"

    def forced_tool(self, body: Body) -> str | None:
        """Return the tool that the model has to call: the request's structured output."""
        if self.form(body) != "tool":
            return None
        named = at(body, self.paths.forced_tool)
        return text_or_none(named[0] if items(named) and len(named) == 1 else named)

    # The answer

    def synthetic(self, body: Body, model: str, text: str, mark: Body) -> Body | None:
        """Return a whole answer without tool calls; None where the format has none."""
        return None

    def synthetic_stream(self, body: Body, model: str, text: str, mark: Body) -> list[Event]:
        """Return the same as a stream, in one chunk as a rule."""
        whole = self.synthetic(body, model, text, mark)
        return [] if whole is None else [("", whole)]


class OfBlocks(ApiProtocol):
    """A protocol whose messages are lists of blocks, with the results among the user's."""

    dialect = Converse()
    block: ClassVar[Body] = {}
    """The fields of a block of text besides its text."""
    blocks_of: ClassVar[tuple[str, str]] = ("assistant", "content")
    """The role of the model, and the name of a message's blocks."""

    def answer_turn(self, text: str) -> Any:
        """Return an answer as a turn of the conversation."""
        role, name = self.blocks_of
        return {"role": role, name: [{**self.block, "text": text}]}

    def add_nudge(self, body: Body, text: str) -> None:
        """Put a corrective message at the end of the last message, which is the user's.

        In Converse it is at the end of the last result: not every model takes a text beside those.
        """
        turns, name = self.turns(body), self.blocks_of[1]
        last = record(turns[-1] if turns else None)
        blocks = items(last.get(name))
        if blocks:
            onto = items(at(blocks[-1], "toolResult.content")) or blocks
            onto.append({**self.block, "text": text})
        else:
            last[name] = f"{last.get(name) or ''}\n\n{text}"


def usage_in(body: Body) -> TokenUsage | None:
    """Return what an answer, or an event of one, reports; in `usage` as a rule."""
    held = body.get("usage")
    return (token_usage(held) if held else None) or token_usage(body)


def repeated(one: Body, count: int) -> list[Body]:
    """Return a choice as often as it was asked for."""
    return [{**one, "index": n} for n in range(min(count, _MOST))]


def _result(id_: str, raw: Body) -> Result:
    """Read a result in the form of any format."""
    own: Body = at(raw, "toolResult functionResponse function_response") or raw
    content = next((own[name] for name in ("content", "output", "response") if name in own), None)
    is_failed = own.get("is_error") or own.get("status") == "error"
    return Result(id_, content, bool(is_failed) or "error" in record(own.get("response")))
