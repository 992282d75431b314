"""Reading of a trajectory log, one event a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache

from pydantic import TypeAdapter, ValidationError

from budgetguard_core.errors import CheckpointError
from budgetguard_core.events import FORMAT_VERSION, Event, RunRestored, RunStarted


@cache
def _adapter() -> TypeAdapter[Event]:
    # When the first log is read: two dozen schemas take their time.
    return TypeAdapter(Event)


def read_events(lines: Iterable[str | bytes]) -> Iterator[Event]:
    """Read a trajectory log line by line.

    Half a line, as a killed process leaves it, is left out: at the end of the log, and before
    the event with which a run starts or goes on.

    Raises:
        CheckpointError: A line is damaged, or of a newer format: line number and reason.
    """
    damaged: CheckpointError | None = None
    ended = True
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if damaged is not None and not ended:
            raise damaged
        ended = line[-1:] in ("\n", b"\n")
        try:
            event = _adapter().validate_json(line)
        except ValidationError as error:
            if damaged is not None:
                raise damaged from None
            damaged = CheckpointError(f"line {number}: {_reason(line, error)}")
            if not _is_half(line):
                raise damaged from None
            continue
        if damaged is not None and not _begins(event):
            raise damaged
        damaged = None
        yield event
    if damaged is not None and ended:
        raise damaged


def _is_half(line: str | bytes) -> bool:
    if line[:1] not in ("{", b"{"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _begins(event: Event) -> bool:
    root = isinstance(event, RunStarted) and event.parent_run_id is None
    return root or isinstance(event, RunRestored)


def _reason(line: str | bytes, error: ValidationError) -> str:
    try:
        version = json.loads(line).get("format_version", FORMAT_VERSION)
    except (ValueError, AttributeError, RecursionError):
        return "not a JSON object. Restore the file from its source, or cut the line."
    if version != FORMAT_VERSION:
        return f"format {version} is newer than {FORMAT_VERSION}. Upgrade BudgetGuard."
    problem = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in problem["loc"]) or "the whole"
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"not an event ({field}: not known to this version). Upgrade BudgetGuard."
    return f"not an event ({field}: {problem['msg']})."
