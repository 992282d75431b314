"""The protocol of one protocol: facts of requests and answers, and synthetic ones."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

from pydantic_core import from_json

from budgetguard_core.kit import TokenUsage, ToolCall, token_usage

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
        usage: What the provider reported, in the provider's own record or as a `TokenUsage`.
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


class Prompted(NamedTuple):
    """The prompt of a request, for its projection."""

    messages: Any
    system: Any = None
    tools: Any = ()
    output_schema: Any = None


class Reader(ABC):
    """Reads one stream on its way.

    Args:
        answer: Takes what is read.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.is_settled = False
        """The last figures have come: a client may stop reading here, and never close."""
        self.has_calls = False
        """A tool call was begun: an answer that is cut then has no good end."""

    def needs(self, event: bytes) -> bool:
        """Return whether an event has to be parsed; what is only text need not be.

        Args:
            event: One, or several of a line each.
        """
        del event
        return True

    def skim(self, event: bytes) -> None:
        """Take in the text of what need not be parsed."""
        del event

    def end(self) -> None:
        """Take the end of the stream, which may come without saying so; safe to call again."""
        self.is_settled = True

    @abstractmethod
    def take(self, name: str, data: Body) -> bool | None:
        """Take an event; True where its client does not get it."""

    @abstractmethod
    def closing(self, text: str) -> list[Event]:
        """Return the events that end the stream in good order where it was cut off.

        Args:
            text: What is said where nothing was said yet.
        """


class ApiProtocol(ABC):
    """One protocol."""

    name: ClassVar[str]
    provider: ClassVar[str | None] = None
    min_output_tokens: ClassVar[int] = 1
    is_turn: ClassVar[bool] = True
    """A call is a turn of a loop; that of an embedding is none."""
    is_conversation: ClassVar[bool] = True
    """A request is a part of a conversation, though it may hold no turn of it."""
    can_refuse: ClassVar[bool] = False
    """A model may refuse to answer in JSON: so does the synthetic answer."""

    # The request

    def model(self, path: str, body: Body) -> str | None:
        """Return the model's name."""
        del path
        return text_or_none(body.get("model"))

    def is_streamed(self, path: str, body: Body) -> bool:
        """Return whether the answer comes as a stream."""
        del path
        return bool(body.get("stream"))

    @abstractmethod
    def bound(self, body: Body) -> int | None:
        """Return the completion tokens that the request asks for at most."""

    @abstractmethod
    def set_bound(self, body: Body, tokens: int) -> None:
        """Write that bound."""

    def least_bound(self, body: Body) -> int:
        """Return the least bound that the provider takes for this request."""
        del body
        return self.min_output_tokens

    def choices(self, body: Body) -> int:
        """Return how many answers are asked for, each as long as the bound lets it be."""
        del body
        return 1

    @abstractmethod
    def prompt(self, body: Body) -> Prompted:
        """Return what the prompt is made of."""

    def turns(self, body: Body) -> list[Any]:
        """Return the messages of the conversation, system messages included."""
        return items(self.prompt(body).messages)

    def follows(self, body: Body) -> str | None:
        """Return the id of the answer after which the provider keeps the conversation."""
        del body
        return None

    @abstractmethod
    def results(self, body: Body) -> list[Result]:
        """Return the results of tools that the request brings since the model's last reply."""

    @abstractmethod
    def reply_mark(self, turn: Any) -> tuple[str | None, ...] | None:
        """Return what tells a reply in the history from others: the ids of its calls, or its text.

        None where the turn is not the model's.
        """

    def answer_turn(self, text: str) -> Body:
        """Return an answer as a turn of the conversation."""
        return {"role": "assistant", "content": text}

    @abstractmethod
    def user_text(self, turn: Any) -> str | None:
        """Return the words of a turn of the user's; None for another's."""

    def takes_words(self, body: Body) -> bool:
        """Return whether the model may be told something with this request."""
        del body
        return True

    @abstractmethod
    def add_nudge(self, body: Body, text: str) -> None:
        """Put a corrective message at the end of the prompt."""

    def form(self, body: Body) -> Form:
        """Return what form of answer the request asks for."""
        del body
        return "text"

    def forced_tool(self, body: Body) -> str | None:
        """Return the tool that the model has to call: the request's structured output."""
        del body
        return None

    def ask_for_usage(self, body: Body) -> bool:
        """Ask for the usage of a stream; False where it comes by itself or was asked for."""
        del body
        return False

    def since_reply(self, body: Body) -> list[Body]:
        """Return the turns after the model's last one."""
        turns = self.turns(body)
        start = len(turns)
        while start and self.reply_mark(turns[start - 1]) is None:
            start -= 1
        return [record(turn) for turn in turns[start:]]

    # The answer

    @abstractmethod
    def read(self, body: Body, answer: Answer) -> None:
        """Read a whole answer."""

    @abstractmethod
    def reader(self, answer: Answer, *, body: Body, hides_usage: bool) -> Reader | None:
        """Return what reads a stream; None where the format has none.

        Args:
            answer: Takes what is read.
            body: The request.
            hides_usage: Usage was asked for on the caller's behalf, who does not expect it.
        """

    @abstractmethod
    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body | None:
        """Return a whole answer without tool calls; None where the format has none."""

    @abstractmethod
    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return the same as a stream."""


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


def listed(content: bytes) -> list[Body]:
    """Return the objects of a JSON array; none for what is none."""
    try:
        made: Any = from_json(content)
    except ValueError:
        return []
    return [one for one in items(made) if _is_a(one, dict)]


def usage_in(body: Body) -> TokenUsage | None:
    """Return what an answer, or an event of one, reports; in `usage` as a rule."""
    held = body.get("usage")
    return (token_usage(held) if held else None) or token_usage(body)


def text_of(piece: bytes) -> str | None:
    """Return what stands between the quotes of a text in JSON; None for what is no text."""
    try:
        return json.loads(b'"%b"' % piece) if b"\\" in piece else piece.decode()
    except ValueError:
        return None


def items(value: Any) -> list[Any]:
    """Return a list; an empty one for anything else."""
    return value if _is_a(value, list) else []


def record(value: Any) -> Body:
    """Return an object of JSON; an empty one for anything else."""
    return value if _is_a(value, dict) else {}


def written(content: object) -> str:
    """Return the text of a message's content: a text, or blocks with texts in them."""
    if isinstance(content, str):
        return content
    texts = (record(block).get("text") for block in items(content))
    return "".join(text for text in texts if isinstance(text, str))
