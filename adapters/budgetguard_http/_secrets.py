"""Keys that a transport quotes in its errors are taken out of them."""

from __future__ import annotations

from typing import Any, Final

_NAMES: Final = ("authorization", "key", "token", "cookie", "secret")
_SHORTEST: Final = 6
_LONGEST_CHAIN: Final = 16


def hide(error: BaseException, request: Any) -> None:
    """Take the keys of a request out of the texts of an error, and of those that led to it.

    h11 and h2 quote a header whose value is no valid one, as that of a key with a line's end is.
    Such a text would be in the outcome's `error`, and in the log of whoever writes that down.
    """
    secrets = [
        part
        for name, value in [*request.headers.multi_items(), *request.url.params.multi_items()]
        if any(one in name.lower() for one in _NAMES)
        for part in value.split()
        if len(part) >= _SHORTEST
    ]
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return
        link.args = tuple(_hidden(one, secrets) for one in link.args)
        link = link.__cause__ or link.__context__


def _hidden(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "[hidden]")
    return value
