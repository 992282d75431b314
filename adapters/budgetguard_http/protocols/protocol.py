"""The base of the protocols: facts of requests and answers, and synthetic answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

from pydantic_core import from_json

from budgetguard_core.kit import TokenUsage, ToolCall, merge_usage, token_usage

Body: TypeAlias = dict[str, Any]
Event: TypeAlias = tuple[str, Any]
"""One event of a stream: its name (empty where the format has none) and its data."""

Form: TypeAlias = Literal["text", "json", "tool"]
"""What a request asks for: any text, JSON of some kind, or a call of a tool in any case."""
MARK: Final = "budgetguard"
"""Under this name a synthetic answer carries its marker, where the format takes other fields."""
SYNTHETIC_ID: Final = "synthetic"
_MOST: Final = 128
"""Choices that a provider gives at most."""


class Answer:
    """The facts of one answer, whole or streamed so far.

    Attributes:
        usage: What the provider reported.
        model: The model that answered, as the provider says.
        id: The answer's id, where a next request can refer to it.
        text: All that the model wrote, reasoning and arguments of tool calls included.
        said: Of it, what the reply says to the user.
        calls: The tool calls that it asks for.
        hosted: The tool calls that the provider has run itself.
        is_cut: It ended at its completion bound.
    """

    # What many have in common is the class's: one is made for each call.
    usage: TokenUsage | None = None
    model: str | None = None
    id: str | None = None
    is_cut: bool = False

    def __init__(self) -> None:
        self.text: list[str] = []
        self.said: list[str] = []
        self.calls: list[ToolCall] = []
        self.hosted: list[ToolCall] = []

    def says(self, text: object) -> None:
        """Take in a piece of the reply's own text."""
        if isinstance(text, str) and text:
            self.said.append(text)
            self.text.append(text)

    def writes(self, text: object) -> None:
        """Take in what is written and not said: reasoning, arguments."""
        if isinstance(text, str) and text:
            self.text.append(text)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a tool call, as a request sends it back to the model."""

    id: str | None
    content: Any
    is_error: bool = False
    name: str | None = None


class Turn(NamedTuple):
    """One turn of a conversation, as a request holds it.

    Attributes:
        role: `assistant`, `user` or `tool`; anything else is nobody's.
        text: What it says.
        calls: The ids of the tool calls of an assistant, or their names where they have none.
        results: The results that it brings.
    """

    role: object
    text: str = ""
    calls: tuple[str | None, ...] = ()
    results: tuple[Result, ...] = ()

    @property
    def marks(self) -> tuple[str | None, ...]:
        """The marks that tell a reply from others: its calls, or its text."""
        return self.calls or (self.text.strip(),)

    @property
    def words(self) -> str | None:
        """The words of the user; None for anybody else's, and for a bundle of results."""
        is_users = self.role == "user" and (self.text or not self.results)
        return self.text if is_users else None


class Prompted(NamedTuple):
    """The prompt of a request, for its projection."""

    messages: Any
    system: Any = None
    tools: Any = ()
    output_schema: Any = None


class Reader:
    """Reads one answer, whole or on its way; as it stands, the usage alone."""

    def __init__(
        self, answer: Answer, protocol: ApiProtocol, request: Body, *, hides_usage: bool
    ) -> None:
        self.answer = answer
        self.protocol = protocol
        self.request = request
        self.hides_usage = hides_usage
        self.parts: dict[Any, Body] = {}
        """What has come of each tool call."""
        self.is_settled = False
        """The last figures have come: a client may stop reading here, and never close."""
        self.has_calls = False
        """A tool call was begun: an answer that is cut then has no good end."""

    def whole(self, body: Body) -> None:
        """Take a whole answer."""
        self.take("", body)
        self.end()

    def take(self, name: str, data: Body) -> bool | None:
        """Take an event; True where its client does not get it."""
        self.answer.usage = merge_usage(self.answer.usage, usage_in(data))
        self.answer.model = text_or_none(data.get("model")) or self.answer.model
        return None

    def end(self) -> None:
        """Take the end of the stream, which may come without saying so; safe to call again."""
        self.is_settled = True

    def closing(self, text: str) -> list[Event] | None:
        """Return the events that end a cut stream in good order, with a text if it said nothing."""
        return None


class Paths(NamedTuple):
    """The places of a request's parts, each a dotted path, or several of which the first counts."""

    messages: str = ""
    system: str = ""
    tools: str = ""
    schema: str = ""
    bound: str = ""
    thinking: str = ""
    """The tokens that thinking may take of the bound, which has to be larger."""
    forced_tool: str = ""
    """The tool that the model has to call: the request's structured output."""


class ApiProtocol:
    """One protocol; as it stands, that of whatever costs something and is not understood."""

    name: ClassVar[str] = "opaque"
    provider: ClassVar[str | None] = None
    paths: ClassVar[Paths] = Paths()
    reader_type: ClassVar[type[Reader]] = Reader
    model_in_path: ClassVar[re.Pattern[str] | None] = None
    stream_paths: ClassVar[tuple[str, ...]] = ()
    """The ends of the addresses whose answers are streamed."""
    min_output_tokens: ClassVar[int] = 1
    is_turn: ClassVar[bool] = True
    """A call is a turn of a loop; that of an embedding is none."""
    can_refuse: ClassVar[bool] = False
    """A model may refuse to answer in JSON: so does the synthetic answer."""

    # The request

    @property
    def is_conversation(self) -> bool:
        """True if a request is a part of a conversation, though it may hold no turn of it."""
        return bool(self.paths.messages)

    def model(self, path: str, body: Body) -> str | None:
        """Return the model's name, which the address may hold."""
        named = self.model_in_path.search(path) if self.model_in_path else None
        return text_or_none(body.get("model")) or (unquote(named[1]) if named else None)

    def is_streamed(self, path: str, body: Body) -> bool:
        """Return whether the answer comes as a stream."""
        return bool(body.get("stream")) or path.endswith(self.stream_paths)

    def bound(self, body: Body) -> int | None:
        """Return the completion tokens that the request asks for at most."""
        return count_or_none(at(body, self.paths.bound))

    def set_bound(self, body: Body, tokens: int) -> None:
        """Write that bound, where its place is known."""
        *above, name = self.paths.bound.split(".")
        for one in above:
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
        """Return how many answers are asked for, each as long as the bound lets it be."""
        return 1

    def prompt(self, body: Body) -> Prompted:
        """Return what the prompt is made of."""
        paths = self.paths
        return Prompted(
            at(body, paths.messages) if paths.messages else [body],
            system=at(body, paths.system),
            tools=items(at(body, paths.tools)),
            output_schema=at(body, paths.schema),
        )

    def turns(self, body: Body) -> list[Any]:
        """Return the messages of the conversation, system messages included."""
        return items(at(body, self.paths.messages))

    def turn(self, message: Body) -> Turn:
        """Read a message."""
        return Turn(message.get("role"), written(message.get("content")))

    def results(self, body: Body) -> list[Result]:
        """Return the results of tools that the request brings since the model's last reply."""
        found: list[Result] = []
        for message in reversed(self.turns(body)):
            turn = self.turn(record(message))
            if turn.role == "assistant":
                break
            found[:0] = turn.results
        return found

    def follows(self, body: Body) -> str | None:
        """Return the id of the answer after which the provider keeps the conversation."""
        return None

    def answer_turn(self, text: str) -> Body:
        """Return an answer as a turn of the conversation."""
        return {"role": "assistant", "content": text}

    def add_nudge(self, body: Body, text: str) -> None:
        """Put a corrective message into the last tool result; else it is a message of its own."""
        turns = self.turns(body)
        last = record(turns[-1] if turns else None)
        if last.get("role") == "tool" and isinstance(last.get("content"), str):
            last["content"] += f"\n\n{text}"
        else:
            turns.append({"role": "user", "content": text})

    def must_call(self, body: Body) -> bool:
        """Return whether the request asks for a call of a tool in any case."""
        return self.forced_tool(body) is not None

    def form(self, body: Body) -> Form:
        """Return what form of answer the request asks for."""
        if self.must_call(body):
            return "tool"
        return "json" if at(body, self.paths.schema) else "text"

    def forced_tool(self, body: Body) -> str | None:
        """Return the tool that the model has to call: the request's structured output."""
        return text_or_none(at(body, self.paths.forced_tool))

    def ask_for_usage(self, body: Body) -> bool:
        """Ask for the usage of a stream; False where it comes by itself or was asked for."""
        return False

    # The answer

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body | None:
        """Return a whole answer without tool calls; None where the format has none."""
        return None

    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return the same as a stream, in one chunk as a rule."""
        whole = self.synthetic(body, model, text, mark)
        return [] if whole is None else [("", whole)]


# `isinstance`, for values that nothing is known of: the type checkers follow it no further.
_is_a: Callable[[Any, Any], bool] = isinstance


def text_or_none(value: object) -> str | None:
    """Return a text that is not empty; None for anything else."""
    return value if isinstance(value, str) and value else None


def repeated(one: Body, count: int) -> list[Body]:
    """Return a choice as often as it was asked for."""
    return [{**one, "index": n} for n in range(min(count, _MOST))]


def count_or_none(value: object) -> int | None:
    """Return a positive whole number; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    return None


def parsed(content: bytes) -> Body | None:
    """Return the object of a JSON; None for what is none."""
    try:
        made: Any = from_json(content)
    except ValueError:  # in UTF-16, with a mark of its order, or with half a pair of surrogates
        try:
            made = json.loads(content)
        except (ValueError, RecursionError):
            return None
    return made if _is_a(made, dict) else None


def usage_in(body: Body) -> TokenUsage | None:
    """Return what an answer, or an event of one, reports; in `usage` as a rule."""
    held = body.get("usage")
    return (token_usage(held) if held else None) or token_usage(body)


def items(value: Any) -> list[Any]:
    """Return a list; an empty one for anything else."""
    return value if _is_a(value, list) else []


def record(value: Any) -> Body:
    """Return an object of JSON; an empty one for anything else."""
    return value if _is_a(value, dict) else {}


def records(value: Any) -> list[Body]:
    """Return the objects of a list; an empty one in the place of anything else."""
    return [record(one) for one in items(value)]


def at(value: Any, paths: str) -> Any:
    """Return what stands at a dotted path in objects; of several paths, at the first that holds."""
    found: Any = None
    for path in paths.split():
        found = value
        for name in path.split("."):
            found = record(found).get(name)
        if found:
            return found
    return found


def written(content: object) -> str:
    """Return the text of a message's content: a text, or blocks with texts in them."""
    if isinstance(content, str):
        return content
    texts = (block.get("text") for block in records(content))
    return "".join(text for text in texts if isinstance(text, str))
