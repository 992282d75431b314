"""Fingerprints of texts without what varies from call to call: errors, replies, polled results."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from budgetguard_core.canonical import digest

_ERROR_READ = 4000
_ERROR_KEPT = 400
_SHORT_REPLY = 40
_SHORT_RESULT = 600
_LONGEST_MASKED = 20_000

SHORT = "short:"
"""The prefix of a short reply's fingerprint."""
WAITS = "~"
"""The prefix of the masked fingerprint of a result that says "not yet"."""

_DIGITS = re.compile(r"[0-9]+(?:[.,:-][0-9]+)*")
_VARIABLE = re.compile(
    r"""
    "[^"]*" | `[^`]*` | (?<!\w)'[^']*'(?!\w)                 # quoted parts
    | (?<![\w.~:/\\-])[\w.~:-]*[/\\][^\s"'`,;)\]}]*          # paths and addresses
    | \b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b
    | \b0x[0-9a-fA-F]+ | \b[0-9a-fA-F]{8,}\b
    | (?: \b(?=[a-fA-F]*[0-9])[0-9a-fA-F]+\b | [0-9]+ ) (?:[.,:][0-9]+)*
    """,
    re.VERBOSE,
)
_VOLATILE = r"""
    [0-9]{4}-[0-9]{2}-[0-9]{2}[T\ ][0-9]{2}:[0-9]{2}         # times
        (?::[0-9]{2}(?:[.,][0-9]+)?)?(?:\ ?Z|\ ?[+-][0-9]{2}:?[0-9]{2})?
    | \b[0-9]{1,2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]+)?\b
    | \b1[0-9]{9}(?:[0-9]{3}){0,3}(?:\.[0-9]+)?\b            # seconds since 1970, and parts of them
    | \b[0-9]+(?:[.,][0-9]+)?\ ?(?:[nuµm]?s|secs?|(?:milli)?seconds?|mins?|minutes?|hours?)\b
    | \b(?:duration|elapsed|took|latency|timestamp)(?:_[a-z]{1,12})?["']?\s?[:=]?\s?[0-9.]+
    | \b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b
    | \b[a-z]{0,4}sh:\ (?:line\ )?[0-9]+:                    # lines of the shell
"""
_NOT_YET = re.compile(
    r"""
    (?<!\bnot\ )(?<!\bno\ longer\ )(?<!\bno\ )(?<!\b0\ )
    \b(?:running|pending|queued|processing|in[ _-]progress|waiting\ for)\b
    (?!["']?\s?[:=]\s?(?:false|0\b|null|none|\[\]))
    | \bnot\ (?:yet\b|ready|finished|complete|done)
    """,
    re.VERBOSE | re.IGNORECASE,
)


def fingerprint_error(text: str) -> str:
    """Digest of what kind an error is: its text without what varies from call to call.

    Numbers, quoted parts, paths and hexadecimal are masked, and the first 400 characters of what
    is left count.
    """
    masked = _VARIABLE.sub("?", text[:_ERROR_READ].strip())
    return digest(masked[:_ERROR_KEPT])


def fingerprint_reply(text: str) -> str:
    """Digest of a reply; from 40 characters on without its numbers and without regard to case."""
    text = text.strip()
    if len(text) < _SHORT_REPLY:
        return SHORT + digest(text)
    return digest(_DIGITS.sub("?", text).casefold())


def fingerprint_alike(text: str, ignore: Iterable[str]) -> str | None:
    """Digest of a result without its times, durations, ids and line numbers of the shell."""
    if len(text) > _LONGEST_MASKED:
        return None
    return digest(_volatile(tuple(ignore)).sub("?", text))


def says_not_yet(text: str) -> bool:
    """True if a result says no more than that something runs, is queued or is not ready."""
    return len(text) <= _SHORT_RESULT and _NOT_YET.search(text) is not None


@lru_cache(maxsize=64)
def _volatile(ignore: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, ignore))
    ids = rf"""| \b(?:{names})["']?\s?[:=]\s?["']?[^\s"',}}]+""" if names else ""
    return re.compile(_VOLATILE + ids, re.VERBOSE)
