"""The answer to a client's call that may not start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, TypeAlias

from budgetguard_core import Trip
from budgetguard_core.kit import Run, synthetic_metadata, synthetic_text
from budgetguard_http._frames import frames_at
from budgetguard_http._posted import Posted

Made: TypeAlias = tuple[int, Mapping[str, str], bytes]
"""Status, headers and body of an answer that was made here."""
STATUS: Final = 402
"""Payment Required, the one status of its meaning that no client tries again."""
REFUSED: Final = "budgetguard_refused"
"""The extension of an answer that no server has made."""
REASON_HEADER: Final = "x-budgetguard-stop-reason"
RUN_HEADER: Final = "x-budgetguard-run-id"
_UNKNOWN: Final = "This request was not sent: what it costs is not known here."
_UNSENT: Final = (
    "The provider still waits for the results of this request: send unsent_input() before anything "
    "else."
)
_ERROR: Final = "This run was stopped before this call started."


class RunStopped(BaseException):
    """Leaves a client's call where a stop is to be raised.

    `bounded_clients` turns it into `BudgetExceeded`. It is no `Exception`, because SDKs try again
    after one, and wrap it in an error of their own.

    Attributes:
        trip: Why the run was stopped.
    """

    def __init__(self, trip: Trip) -> None:
        super().__init__(f"{trip.reason}: {trip.detail}")
        self.trip = trip


class Refusal:
    """A call that may not start.

    Args:
        run: The run that refuses it.
        posted: The request.
        trip: Why the run ends.
        is_side_call: It was made inside of a run that is another adapter's: there the synthetic
            answer would be taken for an answer.
    """

    def __init__(self, run: Run, posted: Posted, trip: Trip, *, is_side_call: bool) -> None:
        self._run = run
        self._posted = posted
        self._trip = trip
        self._is_side_call = is_side_call
        self.text = synthetic_text(run.guard)
        if posted.protocol.follows(posted.body) is not None and posted.protocol.results(
            posted.body
        ):
            # It answers every turn without them with an error.
            self.text = f"{self.text} {_UNSENT}"

    def content(self) -> Made:
        """Return status, headers and body of the answer.

        Raises:
            RunStopped: The run's envelope says so.
        """
        run, posted, trip = self._run, self._posted, self._trip
        if run.envelope.on_trip == "raise" and not self._is_side_call:
            raise RunStopped(trip)
        headers = {
            REASON_HEADER: str(trip.reason),
            RUN_HEADER: run.guard.run_id,
            # A client of OpenAI's family looks here first, whatever the status is.
            "x-should-retry": "false",
        }
        protocol, body = posted.protocol, posted.body
        mark = dict(synthetic_metadata(run.guard, trip))
        model = posted.model or ""
        form = protocol.form(body)
        is_text = form == "text" or (form == "json" and protocol.can_refuse)
        if is_text and not self._is_side_call:
            if posted.is_streamed:
                events = protocol.synthetic_stream(body, model, self.text, mark)
                if events:
                    frames, kind = frames_at(posted.path)
                    stream = b"".join(map(frames.write, events))
                    return 200, {**headers, "content-type": kind}, stream
            whole = protocol.synthetic(body, model, self.text, mark)
            if whole is not None:
                return 200, {**headers, "content-type": "application/json"}, _json(whole)
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
    return STATUS, {**headers, "content-type": "application/json"}, body


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
