"""One call of a model on its way: admitted before it goes out, settled with its answer."""

from __future__ import annotations

import json
from decimal import Decimal
from hashlib import blake2b
from typing import Final

from budgetguard_core import Trip
from budgetguard_core.kit import (
    ModelCall,
    OpenModelCall,
    Prompt,
    Run,
    Stop,
    TokenUsage,
    current,
    failed_usage,
    reported_cost,
)
from budgetguard_http._billing import TIERS, tier_of
from budgetguard_http._conversations import Conversation
from budgetguard_http._policy import Policy
from budgetguard_http._posted import Posted
from budgetguard_http._refusal import Refusal, RunStopped
from budgetguard_http._runs import Traffic, is_own, traffic_of
from budgetguard_http.protocols import EMBEDDINGS, OPAQUE
from budgetguard_http.protocols.embeddings import embedding_cost
from budgetguard_http.protocols.protocol import Answer, Body, Reader, parsed, record

_MOST_FAILED: Final = 256
_FREE: Final = Decimal(0)
_FEMTO: Final = 10**15
_UNKNOWN_ANSWER: Final = 1024
"""Tokens that an answer of unknown length is taken for where its price is not the book's."""
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)


class AnsweredWith(Exception):
    """A provider answered a call with an error, of this status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status_code = status


class Call:
    """A call that was admitted.

    Args:
        run: The run that it is charged to.
        opened: Its admission.
        posted: The request.
        policy: What is exempt, and whether usage is asked for.
        traffic: What is remembered of the run's calls.
        conversation: The conversation that it goes on; None where a layer above knows that.
        length: How many turns the request has.

    Attributes:
        answer: What is known of the answer so far.
        asked_for_usage: The request asks for the stream's usage on the caller's behalf.
    """

    def __init__(
        self,
        run: Run,
        opened: OpenModelCall,
        posted: Posted,
        policy: Policy,
        traffic: Traffic,
        conversation: Conversation | None,
        length: int,
    ) -> None:
        self.run = run
        self._traffic = traffic
        self.opened = opened
        self.posted = posted
        self.answer = Answer()
        self.asked_for_usage = False
        self._policy = policy
        self._conversation = conversation
        # As its caller has them: a nudge may be a turn of its own.
        self._length = length
        self._cost: Decimal | None = None
        self._told = 0
        self._is_over = False
        self._tier = posted.tier
        self._reader: Reader | None = None

    # The request

    def content(self) -> bytes | None:
        """Return what is to be posted instead of what came; None where nothing is changed."""
        posted, opened = self.posted, self.opened
        protocol, body = posted.protocol, posted.body
        if posted.is_signed or not body:
            return None
        bound, conversation = opened.max_output_tokens, self._conversation
        is_to_bind = bound is not None and bound != opened.call.max_output_tokens
        may_ask = posted.is_streamed and self._policy.ask_for_usage
        is_told = opened.nudge or (conversation and conversation.nudges)
        if not (is_to_bind or may_ask or is_told or opened.fallback_model):
            return None
        known, told = dict(body), self._to_tell()
        if bound is not None and is_to_bind:
            protocol.set_bound(body, max(bound // protocol.choices(body), 1))
        for text in told:
            protocol.add_nudge(body, text)
        if opened.fallback_model is not None:
            body["model"] = opened.fallback_model
        if may_ask and protocol.ask_for_usage(body):
            self.asked_for_usage = True
        try:
            return self._changed(known, is_whole=bool(told))
        finally:
            if self.asked_for_usage:
                # A synthetic answer has what the caller asked for.
                body["stream_options"] = known.get("stream_options")

    def _changed(self, known: Body, *, is_whole: bool) -> bytes | None:
        posted, body = self.posted, self.posted.body
        if is_whole or not known.items() <= body.items():
            return _json(body)
        added = {name: value for name, value in body.items() if name not in known}
        raw = posted.raw.strip()
        if not added:
            return None
        if raw[:1] != b"{" or raw[-1:] != b"}":  # UTF-16
            return _json(body)
        # Most of it is the conversation, which need not be written again.
        return raw[:-1] + b"," + _json(added)[1:]

    def _to_tell(self) -> list[str]:
        nudge, conversation = self.opened.nudge, self._conversation
        if conversation is None:
            return [] if nudge is None else [nudge]
        if nudge is not None:
            conversation.nudges.append(nudge)
        nudges = conversation.nudges
        # Until there is an answer: an attempt that failed has told nobody.
        self._told = len(nudges)
        return list(dict.fromkeys(nudges))

    # The answer

    def whole(self, content: bytes) -> None:
        """Take a whole answer."""
        body = parsed(content)
        if body is None:
            self.over()
            return
        if b"cost" in content:  # all names of it
            self._cost = reported_cost(body)
        self.parsed(body)

    def parsed(self, body: Body) -> None:
        """Take a whole answer that was parsed before; as `whole`."""
        self.reader().whole(body)
        self._served(body)
        self.over()

    def reader(self) -> Reader:
        """Return what reads the answer."""
        protocol = self.posted.protocol
        self._reader = protocol.reader_type(
            self.answer, protocol, self.posted.body, hides_usage=self.asked_for_usage
        )
        return self._reader

    def priced(self, data: Body) -> None:
        """Take what an event of a stream says of the cost."""
        if "usage" in data:
            self._cost = reported_cost(data) or self._cost
        self._served(record(data.get("response")) or data)

    def _served(self, body: Body) -> None:
        """Take the tier of service that an answer had: not always the one that was asked for."""
        if body.get("service_tier"):
            self._tier = tier_of(body)

    # The end

    @property
    def is_settled(self) -> bool:
        """True if it was charged."""
        return not self.opened.is_open

    def settle(self) -> None:
        """Charge the call with its answer; a second time changes nothing."""
        answer, opened = self.answer, self.opened
        if not opened.is_open:
            return
        usage = answer.usage
        if usage is None or usage.estimated:
            self._project()
        cost = self._cost
        if opened.call.cost_usd is _FREE:
            cost = _FREE
        elif self.posted.protocol is EMBEDDINGS and usage is not None:
            cost = embedding_cost(self.posted.model, usage.total_tokens)
        elif cost is None and usage is not None:
            factor = TIERS.get(self._tier or "")
            if factor is not None:
                cost = _in_tier(self.run, self.posted, usage, factor)
        at = self._at
        at.answered(
            opened,
            usage,
            text="".join(answer.text),
            model=answer.model,
            cost_usd=cost,
        )
        self._answered(usage)
        if answer.is_cut and not answer.calls:
            at.cut_short(opened)

    def _answered(self, usage: TokenUsage | None) -> None:
        conversation, answer = self._conversation, self.answer
        if conversation is None:
            return
        conversation.prompt.measured(usage)
        conversation.usage = usage
        if answer.hosted:
            run = self._traffic.conversations.seat(conversation)
            for call in run.batch(answer.hosted):
                run.start(call)
                run.finished(call, "reported")

    def over(self) -> None:
        """Take the end of the whole exchange, once: the conversation goes on."""
        self.settle()
        self._replied()

    def _replied(self) -> None:
        conversation, posted, answer = self._conversation, self.posted, self.answer
        if conversation is None or self._is_over:
            return
        self._is_over = True
        del conversation.nudges[: self._told]
        forced = posted.protocol.forced_tool(posted.body)
        for call in answer.calls:
            if call.name == forced:
                call.kind = "output"
        self._traffic.conversations.answered(conversation, self._length, answer)

    def left(self) -> None:
        """Charge a call whose reader left before its end: what was written, and the prompt."""
        if self.is_settled:
            return
        self._project()
        used = failed_usage(
            "left",
            projected_input=self.opened.call.input_tokens,
            written="".join(self.answer.text),
            reported=self.answer.usage,
        )
        self._at.answered(self.opened, used, model=self.answer.model)
        if self._reader is not None:
            self._reader.end()
            if self.answer.calls:
                # Who has them may run them.
                self._replied()

    def failed(self, error: BaseException | str) -> None:
        """Charge a call that failed."""
        if self.is_settled:
            return
        if isinstance(error, RunStopped):
            self.take_back()  # by a seam below: nothing was sent
            return
        self._project()
        self.opened.measured = self.answer.usage
        self._at.failed(self.opened, error, written="".join(self.answer.text))
        traffic = self._traffic
        with traffic.lock:
            digest = _digest(self.posted.raw)
            traffic.failed[digest] = traffic.failed.pop(digest, 0) + 1
            while len(traffic.failed) > _MOST_FAILED:
                del traffic.failed[next(iter(traffic.failed))]

    def take_back(self) -> None:
        """Take the call back: no model was called."""
        self._at.take_back(self.opened)

    def refusal(self, trip: Trip | None) -> Refusal:
        """Return what the client gets after the call was taken back, or cut.

        Args:
            trip: Why; None where the run knows.
        """
        ended = trip or self.run.check() or self.run.guard.trip
        if ended is None:
            raise RuntimeError("a call was cut, and no limit holds")
        if self._conversation is not None:
            self._conversation.missed(self.posted.body)
        return Refusal(self.run, self.posted, ended, is_side_call=False)

    @property
    def _at(self) -> Run:
        conversation = self._conversation
        admitted = None if conversation is None else conversation.admitted_by
        return admitted or self.run

    def _project(self) -> None:
        call = self.opened.call
        if not call.input_tokens:
            call.input_tokens = _projected(self.posted, None)


def begin(run: Run, posted: Posted, policy: Policy) -> Call | Refusal:
    """Ask for a call: admitted, or refused with what its client gets instead."""
    frame = current()
    above = None if frame is None else frame.call
    is_below = isinstance(above, OpenModelCall) and above.is_open
    traffic = traffic_of(run)
    conversation: Conversation | None = None
    asked = run
    protocol, body = posted.protocol, posted.body
    turns = () if is_below else protocol.turns(body)
    if not is_below and protocol.is_conversation:
        conversation = traffic.conversations.of(protocol, body, turns)
        asked = conversation.run or run
        conversation.admitted_by = asked
    retry = posted.is_next_attempt or not protocol.is_turn
    if traffic.failed:
        # Only then is there anything to try again.
        retry = _was_failed(traffic, posted.raw) or posted.says_that_it_is_a_retry() or retry
    bound, choices = protocol.bound(body), protocol.choices(body)
    call = ModelCall(
        model=_priced_as(posted),
        provider=protocol.provider,
        retry=retry,
        max_output_tokens=None if bound is None else bound * choices,
        output_is_fixed=posted.is_signed,
        min_output_tokens=protocol.least_bound(body) * choices,
    )
    if _is_capped(asked):
        call.input_tokens = _projected(posted, conversation)
    if policy.exempt and policy.is_exempt(posted.model):
        call.cost_usd = _FREE
    elif protocol is EMBEDDINGS:
        call.cost_usd = embedding_cost(posted.model, call.input_tokens)
    elif posted.tier in TIERS:
        most = TokenUsage(call.input_tokens, call.max_output_tokens or _UNKNOWN_ANSWER)
        call.cost_usd = _in_tier(run, posted, most, TIERS[posted.tier])
    opened = asked.model_call(call, may_fall_back=_names_its_model(posted))
    if isinstance(opened, Stop):
        trip = opened.trip
        refusal = Refusal(run, posted, trip, is_side_call=not (is_below or is_own(run)))
        if conversation is not None:
            traffic.conversations.stopped(conversation, trip, body, refusal.text)
        return refusal
    posted.model = opened.fallback_model or posted.model
    return Call(run, opened, posted, policy, traffic, conversation, len(turns))


def _names_its_model(posted: Posted) -> bool:
    """Return whether the body alone says which model a request goes to."""
    is_in_path = "/deployments/" in posted.path or posted.model != posted.body.get("model")
    return posted.protocol.is_turn and not (
        posted.is_signed or is_in_path or posted.protocol is OPAQUE
    )


def _priced_as(posted: Posted) -> str | None:
    """Return the model; with its tier where nothing tells what that costs, so it has no price."""
    if posted.tier is None or posted.tier in TIERS:
        return posted.model
    return f"{posted.model} ({posted.tier})"


def _in_tier(run: Run, posted: Posted, usage: TokenUsage, factor: Decimal) -> Decimal | None:
    rates = run.guard.tree.price_book.rates_for(posted.model or "", posted.protocol.provider)
    return None if rates is None else factor * rates.cost(usage) / _FEMTO


def _is_capped(run: Run) -> bool:
    for guard in run.guards:
        for one in guard.lineage:
            budget = one.budget
            if budget.needs_usage():
                return True
    return False


def _projected(posted: Posted, conversation: Conversation | None) -> int:
    messages, system, tools, schema = posted.protocol.prompt(posted.body)
    if conversation is None:
        prompt = Prompt()
    elif posted.protocol.follows(posted.body) is not None and not conversation.is_server_side:
        conversation.is_server_side = True
        prompt = conversation.prompt = Prompt(server_side=True)
        prompt.measured(conversation.usage)
    else:
        prompt = conversation.prompt
    return max(prompt.project(messages, system=system, tools=tools, output_schema=schema), 1)


def _was_failed(traffic: Traffic, raw: bytes) -> bool:
    """Return whether this very request has failed before; each failure stands for one retry."""
    digest = _digest(raw)
    with traffic.lock:
        count = traffic.failed.pop(digest, 0)
        if count > 1:
            traffic.failed[digest] = count - 1
    return count > 0


def _json(body: Body) -> bytes:
    # JSON's way to write half a pair of surrogates is Python's to replace it.
    return _ENCODER.encode(body).encode(errors="backslashreplace")


def _digest(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=16).digest()
