"""Conversations in the traffic of a run: who says what next, and which tools are at work.

Several go on at the same time, and each looks for loops by itself. They are told apart by how they
begin, and by the reply that a request goes on from.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any, Final

from budgetguard_core import Trip
from budgetguard_core.kit import (
    OUTCOME_UNKNOWN,
    PROGRESS_TOOL,
    Envelope,
    OpenToolCall,
    Prompt,
    Run,
    TokenUsage,
    Turn,
)
from budgetguard_http.protocols.fields import Body
from budgetguard_http.protocols.protocol import ApiProtocol, Reader, Result

_MOST_KEPT: Final = 256
_LONGEST_BEGINNING: Final = 4


@dataclass(eq=False)
class Conversation:
    """One conversation with a model.

    Attributes:
        head: What it began with.
        run: Where its loops are looked for; None before that matters.
        prompt: What its next prompt is projected with.
        length: How many turns the last request that was answered had.
        marks: What the last reply is recognised by; its id too, where the provider keeps it.
        pending: Tool calls that the client has got, and no result is known of.
        nudges: Corrections that the model gets with the next request.
        last_reply: The last answer without tool calls, not looked at for repetition yet.
        is_busy: Its tools are at work.
        turns: The turns of the last request, for the outcome.
        usage: What the last reply used.
        is_server_side: The provider keeps the history, and requests hold only what is new.
        final: The last answer, if it was one without tool calls.
        not_sent: Of a request that was refused, what the provider has not seen.
    """

    protocol: ApiProtocol
    head: bytes
    prompt: Prompt = field(default_factory=Prompt)
    pending: list[OpenToolCall] = field(default_factory=list[OpenToolCall])
    nudges: list[str] = field(default_factory=list[str])
    run: Run | None = None
    length: int = 0
    marks: frozenset[str | None] = frozenset()
    last_reply: str | None = None
    is_busy: bool = False
    turns: Sequence[Any] = ()
    usage: TokenUsage | None = None
    is_server_side: bool = False
    final: str | None = None
    not_sent: Sequence[Any] = ()

    def missed(self, body: Body) -> None:
        """Note a request that got no answer: one that goes on where the provider keeps the rest."""
        if self.protocol.follows(body) is not None or not self.length:
            self.not_sent = self.protocol.turns(body)


class Traffic:
    """The calls of one run: its conversations, and what has failed.

    Args:
        run: The run.
        is_own: Nobody else looks for loops in it.
    """

    def __init__(self, run: Run, is_own: bool) -> None:
        self._run = run
        self._is_own = is_own
        self._lock = threading.Lock()
        self._kept: dict[Conversation, None] = {}
        self._failed = deque[bytes](maxlen=_MOST_KEPT)
        self._seat: Conversation | None = None
        # Why one of them was stopped by itself, and the one that was heard of last.
        self._trip: Trip | None = None
        self._latest: Conversation | None = None

    def of(self, protocol: ApiProtocol, body: Body, turns: Sequence[Any]) -> Conversation:
        """Return the conversation of a request, with the results that it brings settled."""
        results, head = protocol.results(body), _head(protocol, turns)
        with self._lock:
            found = self._found(protocol, body, turns, results, head)
        if found is None:
            found = Conversation(protocol, head)
        elif results:
            self._settle(found, results)
        else:
            self._spoken(found, turns)
        found.turns = turns if protocol.follows(body) is None else [*found.turns, *turns]
        return found

    def answered(self, conversation: Conversation, length: int, answer: Reader) -> None:
        """Take the reply to a request of a conversation, which had so many turns.

        Its client has the tool calls, so all of them count: past a cap no request follows.
        """
        if answer.calls:
            run = self.seat(conversation)
            for call in answer.calls:
                if call.kind == "function" and call.name != PROGRESS_TOOL.name:
                    call.kind = "reported"
            for open_call in run.batch(answer.calls):
                if run.start(open_call) is None and open_call.call.kind == "reported":
                    conversation.pending.append(open_call)
                else:
                    run.finished(open_call, "given")
        shown = "".join(answer.shown).strip()
        is_busy = conversation.is_busy = bool(conversation.pending)
        conversation.length = length
        marks = {answer.id, *(call.id or call.name for call in answer.calls)}
        conversation.marks = frozenset(marks if is_busy else {*marks, shown})
        conversation.final = conversation.last_reply = None if is_busy else shown or None
        self._latest = conversation
        with self._lock:
            self._keep(conversation)

    def seat(self, conversation: Conversation) -> Run:
        """Return where the loops of a conversation are looked for.

        It is the run itself for one of them at a time, and a part of the run for each other.
        """
        with self._lock:
            if conversation.run is not None:
                return conversation.run
            before = self._seat
            if self._is_own and (before is None or not before.is_busy):
                self._seat, conversation.run = conversation, self._run
                conversation.is_busy = True
            else:
                with self._run.entered():
                    conversation.run = Envelope(budget=self._run.guard).open(loose=True)
                return conversation.run
        if before is not None:
            # What the one before asked for is no repetition of this one's.
            self._run.guard.user_turn()
        return self._run

    def failed(self, raw: bytes) -> None:
        """Remember a request that failed: the same again is a retry."""
        self._failed.append(_digest(raw))

    def has_failed(self, raw: bytes) -> bool:
        """Return whether this very request has failed before; each failure is one retry's."""
        if self._failed:
            with suppress(ValueError):
                self._failed.remove(_digest(raw))
                return True
        return False

    def ending(self) -> dict[str, Any]:
        """Return what the run is ended with, with what is open of its conversations settled.

        Its history is that of the conversation that was heard of last.
        """
        with self._lock:
            kept, latest = list(self._kept), self._latest
        for conversation in kept:
            # The client has got tool calls, and never answered.
            self._give_up(conversation)
        messages: list[Any] = [] if latest is None else [*latest.turns]
        final = None if latest is None else latest.final
        if latest is not None and final is not None:
            messages.append(latest.protocol.answer_turn(final))
        trip = self._run.stopped_by or self._trip
        return {"messages": messages, "final": final, "trip": trip}

    def pending_input(self) -> list[Any]:
        """Return what the provider lacks of the conversation that was heard of last."""
        return [] if self._latest is None else [*self._latest.not_sent]

    def stopped(self, conversation: Conversation, trip: Trip, body: Body, text: str) -> None:
        """Note that a conversation was refused its next call, and with which text."""
        conversation.missed(body)
        conversation.final = text
        if conversation.run is not None and conversation.run is not self._run:
            self._trip = self._trip or trip
        conversation.is_busy = False
        self._latest = conversation

    def _keep(self, conversation: Conversation) -> None:
        """Keep a conversation as the latest."""
        self._kept.pop(conversation, None)
        self._kept[conversation] = None
        while len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    def _found(
        self,
        protocol: ApiProtocol,
        body: Body,
        turns: Sequence[Any],
        results: Sequence[Result],
        head: bytes,
    ) -> Conversation | None:
        follows, ids = protocol.follows(body), {one.id for one in results}
        latest = [*reversed(self._kept)]
        by_answer = (one for one in (latest if follows else ()) if follows in one.marks)
        by_head = (one for one in latest if one.head == head)
        by_reply = (one for one in by_head if _has_reply(protocol, turns[one.length :], one.marks))
        # Its client has cut the history, or the provider keeps it.
        by_results = (
            one for one in (latest if ids else ()) if ids <= {*chain(*map(_names, one.pending))}
        )
        found = next(chain(by_answer, by_reply, by_results), None)
        if found is not None:
            self._keep(found)
        return found

    def _settle(self, conversation: Conversation, results: Sequence[Result]) -> None:
        run, pending = conversation.run or self._run, conversation.pending
        for result in results:
            call = next((one for one in pending if result.id in _names(one)), None)
            if call is not None:
                pending.remove(call)
                error = str(result.content) if result.is_error else None
                run.finished(call, result.content, error=error)
        self._give_up(conversation)

    def _give_up(self, conversation: Conversation) -> None:
        """Settle the calls that have no result that anybody will hear of."""
        for call in conversation.pending:
            (conversation.run or self._run).finished(call, OUTCOME_UNKNOWN, error="no result")
        conversation.pending.clear()

    def _spoken(self, conversation: Conversation, turns: Sequence[Any]) -> None:
        """Separate new words of the user's from those that another model repeats."""
        guard = self.seat(conversation).guard
        read = (_words(conversation.protocol.turn(one)) for one in reversed(turns))
        last = next(read, None)
        earlier = (words for words in read if words is not None)
        latest = next(earlier, None) if last is None else last
        if latest is not None and latest == next(earlier, None):
            if conversation.last_reply is not None:
                guard.report_reply(conversation.last_reply)
        elif last is not None:
            guard.user_turn()
        conversation.last_reply = None


def _digest(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=16).digest()


def _names(call: OpenToolCall) -> tuple[str | None, str]:
    return call.call.id, call.call.name


def _words(turn: Turn) -> str | None:
    """Return the words of the user; None for anybody else's, and for a bundle of results."""
    return turn.text if turn.role == "user" and (turn.parts or not turn.results) else None


def _has_reply(protocol: ApiProtocol, turns: Sequence[Any], marks: frozenset[str | None]) -> bool:
    """Return whether a request holds a reply with such marks before the user's next turn."""
    for message in turns:
        turn = protocol.turn(message)
        if turn.role == "user":
            return False
        if turn.role == "assistant":
            own = {call.id or call.name for call in turn.calls}
            if marks & (own or {turn.text.strip()}):
                return True
    return False


def _head(protocol: ApiProtocol, turns: Sequence[Any]) -> bytes:
    beginning: list[Any] = []
    for message in turns[:_LONGEST_BEGINNING]:
        beginning.append(message)
        if _words(protocol.turn(message)) is not None:
            break
    return _digest(repr(beginning).encode(errors="replace"))
