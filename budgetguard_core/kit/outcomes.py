"""From what a framework returned or raised to the outcome of its run."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

from budgetguard_core.errors import AdapterError
from budgetguard_core.outcome import Outcome

_ATTRIBUTE = "_budgetguard_outcome"
# For results that take no attributes. The outcomes in here hold no messages: those would keep the
# result alive that the entry is to die with.
_KNOWN: dict[int, tuple[weakref.ref[Any], Outcome]] = {}


def remember(result: Any, outcome: Outcome) -> None:
    """Keep an outcome for as long as a result, or an exception, lives, and no longer.

    Args:
        result: An object that takes weak references, or an exception or tuple that takes
            attributes. Where the result is plain data (a dictionary, a list), its last message
            does.
        outcome: How its run ended.
    """
    if isinstance(result, BaseException | tuple):  # a tuple takes no weak reference
        setattr(cast("object", result), _ATTRIBUTE, outcome)
        return
    known, mark = _KNOWN, id(result)

    # Held by the closure: at the interpreter's end the module's own names are gone before.
    def forget(_: object) -> None:
        known.pop(mark, None)

    kept = outcome.model_copy(update={"messages": (), "final": None})
    _KNOWN[mark] = (weakref.ref(result, forget), kept)


def outcome_of(result: Any, *, messages: Sequence[Any] = (), final: Any = None) -> Outcome | None:
    """Return the outcome of the run that gave this result, or None where none is known.

    Args:
        result: What `remember` was given.
        messages: The messages of the result, which the outcome gets back.
        final: The final answer of the result, likewise.
    """
    own = getattr(result, _ATTRIBUTE, None)
    if isinstance(own, Outcome):
        return own
    found = _KNOWN.get(id(result))
    if found is None or found[0]() is not result:
        return None
    return found[1].model_copy(update={"messages": tuple(messages), "final": final})


def outcome(result: Any) -> Outcome:
    """Return the outcome of a run by what it gave: a result, an exception, a block, a transport.

    Args:
        result: What a run with a budget returned or raised, or the object that bounded it, such as
            a block, a stream, a callback or a transport.

    Raises:
        AdapterError: None is known: it had no budget, or the run is not over.
    """
    found = result if isinstance(result, Outcome) else outcome_of(result)
    if found is None:
        found = getattr(result, "outcome", None)
    if not isinstance(found, Outcome):
        raise AdapterError(
            "outcome takes what a run with a budget returned or raised, or what bounded it, got "
            f"{type(result).__name__} without an outcome. Ask when the run is over."
        )
    return found
