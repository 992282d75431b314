"""The spans of a run that was cut: Strands ends those of what answers or fails, and no others."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.context import Context


def end_left(
    outer: trace.Span, known: Iterable[Context | None], error: BaseException | None = None
) -> None:
    """End the spans that a cut run has left open within its own, the innermost first.

    Args:
        outer: The span around the run, which Strands ends.
        known: The contexts that the run's calls began in; tools have tasks of their own.
        error: What came up through the run; None where it is left between two of its events, and
            the span of what was going on is the current one.
    """
    found = [trace.get_current_span()] if error is None else _left_behind(error)
    found += [trace.get_current_span(one) for one in known if one is not None]
    for span in found:
        if span is not outer and span.is_recording():
            span.end()


def _left_behind(error: BaseException) -> list[trace.Span]:
    """Find the spans of the calls of Strands that an exception has come through."""
    found: list[trace.Span] = []
    step = error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if str(frame.f_globals.get("__name__")).startswith("strands."):
            found += [one for one in frame.f_locals.values() if isinstance(one, trace.Span)]
        step = step.tb_next
    return found[::-1]
