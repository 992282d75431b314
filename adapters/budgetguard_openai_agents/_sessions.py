"""The user's session: what it holds of a run, and what it lacks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence, Set
from typing import Any, NamedTuple, TypeAlias, cast

from agents import TResponseInputItem

from budgetguard_core.kit import part

_PATIENCE = 5.0
"""Seconds that a session gets at the end of a run: one that hangs must not hold the result, and one
that is slow must not lose it."""
_ALL = 2**31 - 1
"""Items: more than a session holds, and no more than a column for numbers takes."""
_Key: TypeAlias = tuple[Any, ...]


class Compared(NamedTuple):
    """A session beside the history of a run."""

    before: list[TResponseInputItem]
    """The items of the session before the run."""
    missing: list[TResponseInputItem]
    """The items of the run that it does not hold."""
    excluded: frozenset[int]
    """The places in the run's history of what a filter took away: it lacks that on purpose."""


async def read(session: Any) -> list[TResponseInputItem]:
    """Return everything that a session holds."""
    # A limit of the session's own is for what a model is sent.
    limit = part(part(session, "session_settings"), "limit")
    return list(await patiently(session.get_items(None if limit is None else _ALL)))


async def before(session: Any, history: list[Any]) -> list[TResponseInputItem]:
    """Return what a session held before a run; nothing without one."""
    return [] if session is None else compare(await read(session), history).before


async def patiently(work: Awaitable[Any]) -> Any:
    """Wait for a session, but not for one that does not let itself be cancelled either."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=_PATIENCE)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_look_at)
    if not task.done():
        raise TimeoutError(f"the session took longer than {_PATIENCE} seconds")
    return task.result()


def _look_at(task: asyncio.Future[Any]) -> None:
    # Nobody waits for it any more.
    if not task.cancelled():
        task.exception()


def ends_with(stored: Sequence[TResponseInputItem], item: TResponseInputItem) -> bool:
    """Return whether a session ends with an item."""
    return bool(stored) and _key(stored[-1]) == _key(item)


def compare(
    stored: Sequence[TResponseInputItem], history: Sequence[TResponseInputItem]
) -> Compared:
    """Find out how much of a run its session holds, and what it held before.

    A session ends with what was stored of the run; parts of it may be missing. The history may
    begin before the run does.
    """
    both = {part(item, "id") for item in stored} & {part(item, "id") for item in history}
    keys = [_key(item, both) for item in history]
    remaining = Counter(keys)
    position = len(stored)
    # The SDK may have saved the results of a batch in an order of its own.
    while position and remaining[key := _key(stored[position - 1], both)]:
        remaining[key] -= 1
        position -= 1
        if key == keys[0] and not remaining[key]:
            break  # what is before it was said in earlier turns, in the same words or not
    there = Counter(keys) - remaining
    held: list[bool] = []
    for key in keys:
        held.append(there[key] > 0)
        there[key] -= 1
    last = max((n for n, is_there in enumerate(held) if is_there), default=-1)
    ids = [part(item, "call_id") for item in history]
    requested = {one for n, one in enumerate(ids) if one is not None and (held[n] or n > last)}
    # What is missing in between, and is no half of a call, was left out on purpose.
    lacks = {n for n, is_there in enumerate(held) if not is_there}
    excluded = frozenset(n for n in lacks if n < last and ids[n] not in requested)
    missing = [history[n] for n in sorted(lacks - excluded)]
    return Compared(list(stored[:position]), missing, excluded)


def _key(item: object, ids: Set[Any] = frozenset()) -> _Key:
    kind, call_id = part(item, "type") or "message", part(item, "call_id")
    if call_id is not None:
        return kind, call_id
    if kind != "message":
        # A session may give it an id of its own, as a conversation at OpenAI does.
        own = part(item, "id")
        return kind, own if own in ids else None, _text(part(item, "summary"))
    return kind, part(item, "role"), _text(part(item, "content"))


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = cast("list[object]", content)
        return "".join(str(part(one, "text") or repr(one)) for one in parts)
    return repr(content)
