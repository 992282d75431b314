"""The answer to a client's call that may not start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple

from budgetguard_core import Trip
from budgetguard_core.kit import Run, synthetic_metadata, synthetic_text
from budgetguard_http._frames import frames_at
from budgetguard_http._payload import Payload

REFUSED: Final = "budgetguard_refused"
"""The extension of an answer that no server has made."""
_UNKNOWN: Final = "This request was not sent: what it costs is not known here."
_PENDING: Final = (
    "The provider still waits for the results of this request: send unsent_input() before anything "
    "else."
)
_ERROR: Final = "This run was stopped before this call started."


class Made(NamedTuple):
    """An answer that was made here."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class CallRefused(BaseException):
    """Leaves a client's call where a stop is to be raised.

    `bounded_clients` turns it into `BudgetExceeded`. It is no `Exception`, because SDKs try again
    after one, and wrap it in an error of their own.

    Attributes:
        trip: Why the run was stopped.
    """

    def __init__(self, trip: Trip) -> None:
        super().__init__(f"{trip.reason}: {trip.detail}")
        self.trip = trip


def refusal_text(run: Run, payload: Payload) -> str:
    """Return the words of the answer to a request that may not start."""
    text, protocol, body = synthetic_text(run.guard), payload.protocol, payload.body
    # It answers every turn without them with an error.
    waits = protocol.follows(body) is not None and protocol.results(body)
    return f"{text} {_PENDING}" if waits else text


def refused(run: Run, payload: Payload, trip: Trip, *, is_side_call: bool = False) -> Made:
    """Return the answer to a call that may not start.

    Args:
        run: The run that refuses it.
        payload: The request.
        trip: Why the run ends.
        is_side_call: It was made inside of a run that is another adapter's: there the synthetic
            answer would be taken for an answer.

    Raises:
        RunStopped: The run's envelope says so.
    """
    if run.envelope.on_trip == "raise" and not is_side_call:
        raise CallRefused(trip)
    # A client of OpenAI's family looks at the last first, whatever the status is.
    headers = {
        "x-budgetguard-stop-reason": str(trip.reason),
        "x-budgetguard-run-id": run.guard.run_id,
        "x-should-retry": "false",
    }
    protocol, body, model = payload.protocol, payload.body, payload.model or ""
    form, text = protocol.form(body), refusal_text(run, payload)
    if (form == "text" or (form == "json" and protocol.can_refuse)) and not is_side_call:
        mark = dict(synthetic_metadata(run.guard, trip))
        events = protocol.synthetic_stream(body, model, text, mark) if payload.is_streamed else None
        if events:
            frames, kind = frames_at(payload.path)
            stream = b"".join(map(frames.write, events))
            return Made(200, {**headers, "content-type": kind}, stream)
        whole = protocol.synthetic(body, model, text, mark)
        if whole is not None:
            return Made(200, {**headers, "content-type": "application/json"}, _json(whole))
    return _error(_ERROR, "run_stopped", headers)


def unknown_refused() -> Made:
    """Return the answer to a request that is not understood; the run goes on."""
    return _error(_UNKNOWN, "not_understood", {"x-should-retry": "false"})


def respond(mod: Any, request: Any, made: Made) -> Any:
    """Return an answer that was made here as a response of httpx or httpx2."""
    status, headers, content = made
    answer = mod.Response(
        status,
        headers={**headers, "content-length": str(len(content))},
        stream=mod.ByteStream(content),
        request=request,
        extensions={REFUSED: True},
    )
    answer.elapsed = timedelta()
    return answer


def _error(text: str, code: str, headers: Mapping[str, str]) -> Made:
    error = {"message": text, "type": code, "code": code}
    body = _json({"type": "error", "message": text, "error": error})
    # Payment Required: the one status of its meaning that no client tries again.
    return Made(402, {**headers, "content-type": "application/json"}, body)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
