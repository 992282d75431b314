"""One call of a model on its way: admitted before it goes out, settled with its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
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
from budgetguard_http._conversations import Conversation
from budgetguard_http._payload import Payload, read_payload
from budgetguard_http._policy import TIERS, Policy, tier_of
from budgetguard_http._refusal import CallRefused, Made, refusal_text, refused, unknown_refused
from budgetguard_http._runs import is_own, traffic_of
from budgetguard_http.protocols import OPAQUE
from budgetguard_http.protocols.fields import Body, parsed, record
from budgetguard_http.protocols.protocol import Reader

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


@dataclass(eq=False)
class Call:
    """A call that was admitted.

    Attributes:
        run: The run that it is made in.
        at: The run that has admitted it: that of its conversation, or the same.
        conversation: The conversation that it goes on; None where a layer above knows that.
        length: How many turns the request has, as its caller has them.
    """

    run: Run
    at: Run
    open_call: OpenModelCall
    payload: Payload
    conversation: Conversation | None
    length: int
    _cost: Decimal | None = None
    _is_over: bool = False

    def __post_init__(self) -> None:
        self._tier = self.payload.tier
        protocol = self.payload.protocol
        self.answer: Reader = protocol.reader_type(protocol, self.payload.body)

    def content(self) -> bytes | None:
        """Return what is to be posted instead of what came; None where nothing is changed."""
        payload, open_call = self.payload, self.open_call
        protocol, body = payload.protocol, payload.body
        if payload.is_signed or not body:
            return None
        bound, conversation = open_call.max_output_tokens, self.conversation
        is_to_bind = bound is not None and bound != open_call.call.max_output_tokens
        options = record(body.get("stream_options"))
        is_to_ask = (
            (payload.is_streamed and protocol.usage_is_optional)
            and payload.policy.ask_for_usage
            and not options.get("include_usage")
        )
        texts = [] if conversation is None else conversation.nudges
        if open_call.nudge is not None:
            # Until there is an answer: an attempt that failed has told nobody.
            texts.append(open_call.nudge)
        if not (is_to_bind or is_to_ask or texts or open_call.fallback_model):
            return None
        known = dict(body)
        if bound is not None and is_to_bind:
            protocol.set_bound(body, max(bound // protocol.choices(body), 1))
        for text in dict.fromkeys(texts):
            protocol.add_nudge(body, text)
        if open_call.fallback_model is not None:
            body["model"] = open_call.fallback_model
        if not is_to_ask:
            return _json(body) if texts or body != known else None
        self.answer.hides_usage = True
        # Not into the body: a synthetic answer has what the caller asked for.
        return _json({**body, "stream_options": {**options, "include_usage": True}})

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
        self.answer.whole(body)
        self._served(body)
        self.over()

    def priced(self, data: Body) -> None:
        """Take what an event of a stream says of the cost."""
        if "usage" in data:
            self._cost = reported_cost(data) or self._cost
        self._served(record(data.get("response")) or data)

    def _served(self, body: Body) -> None:
        """Take the tier of service that an answer had: not always the one that was asked for."""
        if body.get("service_tier"):
            self._tier = tier_of(body)

    @property
    def is_settled(self) -> bool:
        """True if it was charged."""
        return not self.open_call.is_open

    def settle(self) -> None:
        """Charge the call with its answer; a second time changes nothing."""
        answer, open_call = self.answer, self.open_call
        if not open_call.is_open:
            return
        usage = answer.usage
        if usage is None or usage.estimated:
            self._project()
        at, cost = self.at, self._cost
        own = _price(self.run, self.payload, usage, self._tier)
        if cost is None or own is _FREE:
            cost = own
        at.answered(open_call, usage, text="".join(answer.text), model=answer.model, cost_usd=cost)
        conversation = self.conversation
        if conversation is not None:
            conversation.prompt.measured(usage)
            conversation.usage = usage
            if answer.hosted:
                run = traffic_of(self.run).seat(conversation)
                for call in run.batch(answer.hosted):
                    run.start(call)
                    run.finished(call, "reported")
        if answer.is_cut and not answer.calls:
            at.cut_short(open_call)

    def over(self) -> None:
        """Take the end of the whole exchange, once: the conversation goes on."""
        self.answer.end()
        self.settle()
        self._replied()

    def _replied(self) -> None:
        conversation, payload, answer = self.conversation, self.payload, self.answer
        if conversation is None or self._is_over:
            return
        self._is_over = True
        conversation.nudges.clear()
        if answer.calls:
            forced = payload.protocol.forced_tool(payload.body)
            for call in answer.calls:
                if call.name == forced:
                    call.kind = "output"
        traffic_of(self.run).answered(conversation, self.length, answer)

    def cancelled(self) -> None:
        """Charge a call whose reader left before its end: what was written, and the prompt."""
        if self.is_settled:
            return
        self._project()
        used = failed_usage(
            "left",
            projected_input=self.open_call.call.input_tokens,
            written="".join(self.answer.text),
            reported=self.answer.usage,
        )
        self.at.answered(self.open_call, used, model=self.answer.model)
        self.answer.end()
        if self.answer.calls:
            # Who has them may run them.
            self._replied()

    def failed(self, error: BaseException | str) -> None:
        """Charge a call that failed."""
        if self.is_settled:
            return
        if isinstance(error, CallRefused):
            self.take_back()  # by a seam below: nothing was sent
            return
        self._project()
        self.open_call.measured = self.answer.usage
        self.at.failed(self.open_call, error, written="".join(self.answer.text))
        traffic_of(self.run).failed(self.payload.raw)

    def take_back(self) -> None:
        """Take the call back: no model was called."""
        self.at.take_back(self.open_call)

    def refusal(self, trip: Trip | None) -> Made:
        """Return what the client gets after the call was taken back, or cut."""
        ended = trip or self.run.check() or self.run.guard.trip
        if ended is None:
            raise RuntimeError("a call was cut, and no limit holds")
        if self.conversation is not None:
            self.conversation.missed(self.payload.body)
        return refused(self.run, self.payload, ended)

    def _project(self) -> None:
        call = self.open_call.call
        if not call.input_tokens:
            call.input_tokens = _projected(self.payload, None)


def admitted(
    run: Run, policy: Policy, host: str, path: str, headers: Mapping[str, str], raw: bytes
) -> Call | Made | None:
    """Ask for what is posted: a call, the answer that its client gets instead, or None: no call."""
    payload = read_payload(host, path, headers, raw, policy)
    if payload is None:
        return None
    if payload.protocol is OPAQUE and policy.on_unknown == "refuse":
        return unknown_refused()
    frame = current()
    parent = None if frame is None else frame.call
    is_below = isinstance(parent, OpenModelCall) and parent.is_open
    traffic = traffic_of(run)
    conversation: Conversation | None = None
    payer = run
    protocol, body = payload.protocol, payload.body
    turns = () if is_below else protocol.turns(body)
    if not is_below and protocol.paths.messages:
        conversation = traffic.of(protocol, body, turns)
        payer = conversation.run or run
    retry = traffic.has_failed(payload.raw) or payload.is_retry or not protocol.is_turn
    bound, choices = protocol.bound(body), protocol.choices(body)
    has_factor = payload.tier is None or payload.tier in TIERS
    call = ModelCall(
        # Nothing tells what another tier costs: so it has no price.
        model=payload.model if has_factor else f"{payload.model} ({payload.tier})",
        provider=payload.provider,
        retry=retry,
        max_output_tokens=None if bound is None else bound * choices,
        output_is_fixed=payload.is_signed,
        min_output_tokens=protocol.least_bound(body) * choices,
    )
    if any(one.budget.needs_usage() for guard in payer.guards for one in guard.ancestry):
        call.input_tokens = _projected(payload, conversation)
    most = TokenUsage(call.input_tokens, call.max_output_tokens or _UNKNOWN_ANSWER)
    call.cost_usd = _price(run, payload, most, payload.tier)
    open_call = payer.model_call(call, may_fall_back=_names_its_model(payload))
    if isinstance(open_call, Stop):
        if conversation is not None:
            traffic.stopped(conversation, open_call.trip, body, refusal_text(run, payload))
        is_side_call = not (is_below or is_own(run))
        return refused(run, payload, open_call.trip, is_side_call=is_side_call)
    payload.model = open_call.fallback_model or payload.model
    return Call(run, payer, open_call, payload, conversation, len(turns))


def _names_its_model(payload: Payload) -> bool:
    """Return whether the body alone says which model a request goes to."""
    is_in_path = "/deployments/" in payload.path or payload.model != payload.body.get("model")
    return payload.protocol.is_turn and not (
        payload.is_signed or is_in_path or payload.protocol is OPAQUE
    )


def _price(run: Run, sent: Payload, usage: TokenUsage | None, tier: str | None) -> Decimal | None:
    """Return what a call costs by its exemption or its tier; None for the price book's."""
    if sent.policy.is_exempt(sent.model):
        return _FREE
    if usage is None:
        return None
    factor = TIERS.get(tier or "")
    if factor is None:
        return None
    rates = run.guard.tree.price_book.rates_for(sent.model or "", sent.provider)
    return None if rates is None else factor * rates.cost(usage) / _FEMTO


def _projected(payload: Payload, conversation: Conversation | None) -> int:
    if conversation is None:
        prompt = Prompt()
    elif payload.protocol.follows(payload.body) is not None and not conversation.is_server_side:
        conversation.is_server_side = True
        prompt = conversation.prompt = Prompt(server_side=True)
        prompt.measured(conversation.usage)
    else:
        prompt = conversation.prompt
    return max(prompt.project(**payload.protocol.prompt(payload.body)), 1)


def _json(body: Body) -> bytes:
    # JSON's way to write half a pair of surrogates is Python's to replace it.
    return _ENCODER.encode(body).encode(errors="backslashreplace")
