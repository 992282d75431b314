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
from budgetguard_http._policy import TIERS, Policy, tier_of
from budgetguard_http._posted import Posted, read_posted
from budgetguard_http._refusal import Made, RunStopped, refusal_text, refused, unknown_refused
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
    opened: OpenModelCall
    posted: Posted
    conversation: Conversation | None
    length: int
    _cost: Decimal | None = None
    _is_over: bool = False

    def __post_init__(self) -> None:
        self._tier = self.posted.tier
        protocol = self.posted.protocol
        self.answer: Reader = protocol.reader_type(protocol, self.posted.body)

    def content(self) -> bytes | None:
        """Return what is to be posted instead of what came; None where nothing is changed."""
        posted, opened = self.posted, self.opened
        protocol, body = posted.protocol, posted.body
        if posted.is_signed or not body:
            return None
        bound, conversation = opened.max_output_tokens, self.conversation
        is_to_bind = bound is not None and bound != opened.call.max_output_tokens
        options = record(body.get("stream_options"))
        is_to_ask = (
            (posted.is_streamed and protocol.usage_is_asked_for)
            and posted.policy.ask_for_usage
            and not options.get("include_usage")
        )
        told = [] if conversation is None else conversation.nudges
        if opened.nudge is not None:
            # Until there is an answer: an attempt that failed has told nobody.
            told.append(opened.nudge)
        if not (is_to_bind or is_to_ask or told or opened.fallback_model):
            return None
        known = dict(body)
        if bound is not None and is_to_bind:
            protocol.set_bound(body, max(bound // protocol.choices(body), 1))
        for text in dict.fromkeys(told):
            protocol.add_nudge(body, text)
        if opened.fallback_model is not None:
            body["model"] = opened.fallback_model
        if not is_to_ask:
            return _json(body) if told or body != known else None
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
        return not self.opened.is_open

    def settle(self) -> None:
        """Charge the call with its answer; a second time changes nothing."""
        answer, opened = self.answer, self.opened
        if not opened.is_open:
            return
        usage = answer.usage
        if usage is None or usage.estimated:
            self._project()
        at, cost = self.at, self._cost
        own = _price(self.run, self.posted, usage, self._tier)
        if cost is None or own is _FREE:
            cost = own
        at.answered(opened, usage, text="".join(answer.text), model=answer.model, cost_usd=cost)
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
            at.cut_short(opened)

    def over(self) -> None:
        """Take the end of the whole exchange, once: the conversation goes on."""
        self.answer.end()
        self.settle()
        self._replied()

    def _replied(self) -> None:
        conversation, posted, answer = self.conversation, self.posted, self.answer
        if conversation is None or self._is_over:
            return
        self._is_over = True
        conversation.nudges.clear()
        if answer.calls:
            forced = posted.protocol.forced_tool(posted.body)
            for call in answer.calls:
                if call.name == forced:
                    call.kind = "output"
        traffic_of(self.run).answered(conversation, self.length, answer)

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
        self.at.answered(self.opened, used, model=self.answer.model)
        self.answer.end()
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
        self.at.failed(self.opened, error, written="".join(self.answer.text))
        traffic_of(self.run).failed(self.posted.raw)

    def take_back(self) -> None:
        """Take the call back: no model was called."""
        self.at.take_back(self.opened)

    def refusal(self, trip: Trip | None) -> Made:
        """Return what the client gets after the call was taken back, or cut."""
        ended = trip or self.run.check() or self.run.guard.trip
        if ended is None:
            raise RuntimeError("a call was cut, and no limit holds")
        if self.conversation is not None:
            self.conversation.missed(self.posted.body)
        return refused(self.run, self.posted, ended)

    def _project(self) -> None:
        call = self.opened.call
        if not call.input_tokens:
            call.input_tokens = _projected(self.posted, None)


def admitted(
    run: Run, policy: Policy, host: str, path: str, headers: Mapping[str, str], raw: bytes
) -> Call | Made | None:
    """Ask for what is posted: a call, the answer that its client gets instead, or None: no call."""
    posted = read_posted(host, path, headers, raw, policy)
    if posted is None:
        return None
    if posted.protocol is OPAQUE and policy.on_unknown == "refuse":
        return unknown_refused()
    frame = current()
    above = None if frame is None else frame.call
    is_below = isinstance(above, OpenModelCall) and above.is_open
    traffic = traffic_of(run)
    conversation: Conversation | None = None
    asked = run
    protocol, body = posted.protocol, posted.body
    turns = () if is_below else protocol.turns(body)
    if not is_below and protocol.paths.messages:
        conversation = traffic.of(protocol, body, turns)
        asked = conversation.run or run
    retry = traffic.has_failed(posted.raw) or posted.is_retry or not protocol.is_turn
    bound, choices = protocol.bound(body), protocol.choices(body)
    has_factor = posted.tier is None or posted.tier in TIERS
    call = ModelCall(
        # Nothing tells what another tier costs: so it has no price.
        model=posted.model if has_factor else f"{posted.model} ({posted.tier})",
        provider=posted.provider,
        retry=retry,
        max_output_tokens=None if bound is None else bound * choices,
        output_is_fixed=posted.is_signed,
        min_output_tokens=protocol.least_bound(body) * choices,
    )
    if any(one.budget.needs_usage() for guard in asked.guards for one in guard.lineage):
        call.input_tokens = _projected(posted, conversation)
    most = TokenUsage(call.input_tokens, call.max_output_tokens or _UNKNOWN_ANSWER)
    call.cost_usd = _price(run, posted, most, posted.tier)
    opened = asked.model_call(call, may_fall_back=_names_its_model(posted))
    if isinstance(opened, Stop):
        if conversation is not None:
            traffic.stopped(conversation, opened.trip, body, refusal_text(run, posted))
        is_side_call = not (is_below or is_own(run))
        return refused(run, posted, opened.trip, is_side_call=is_side_call)
    posted.model = opened.fallback_model or posted.model
    return Call(run, asked, opened, posted, conversation, len(turns))


def _names_its_model(posted: Posted) -> bool:
    """Return whether the body alone says which model a request goes to."""
    is_in_path = "/deployments/" in posted.path or posted.model != posted.body.get("model")
    return posted.protocol.is_turn and not (
        posted.is_signed or is_in_path or posted.protocol is OPAQUE
    )


def _price(run: Run, posted: Posted, usage: TokenUsage | None, tier: str | None) -> Decimal | None:
    """Return what a call costs by its exemption or its tier; None for the price book's."""
    if posted.policy.is_exempt(posted.model):
        return _FREE
    if usage is None:
        return None
    factor = TIERS.get(tier or "")
    if factor is None:
        return None
    rates = run.guard.tree.price_book.rates_for(posted.model or "", posted.provider)
    return None if rates is None else factor * rates.cost(usage) / _FEMTO


def _projected(posted: Posted, conversation: Conversation | None) -> int:
    if conversation is None:
        prompt = Prompt()
    elif posted.protocol.follows(posted.body) is not None and not conversation.is_server_side:
        conversation.is_server_side = True
        prompt = conversation.prompt = Prompt(server_side=True)
        prompt.measured(conversation.usage)
    else:
        prompt = conversation.prompt
    return max(prompt.project(**posted.protocol.prompt(posted.body)), 1)


def _json(body: Body) -> bytes:
    # JSON's way to write half a pair of surrogates is Python's to replace it.
    return _ENCODER.encode(body).encode(errors="backslashreplace")
