"""Steps that are written once and taken in two ways: blocking one after the other, or awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeAlias, TypeVar

_T = TypeVar("_T")

Flow: TypeAlias = Generator[
    tuple[Callable[..., Any], Callable[..., Awaitable[Any]], tuple[Any, ...]], Any, _T
]
"""Steps, each by what takes it: blocking, awaited, and with what."""


def run(flow: Flow[_T]) -> _T:
    """Take the steps of a flow one by one."""
    answer: Any = None
    while True:
        try:
            call, _, given = flow.send(answer)
        except StopIteration as end:
            result: _T = end.value
            return result
        answer = call(*given)


async def arun(flow: Flow[_T]) -> _T:
    """Await the steps of a flow one by one."""
    answer: Any = None
    while True:
        try:
            _, call, given = flow.send(answer)
        except StopIteration as end:
            result: _T = end.value
            return result
        answer = await call(*given)
