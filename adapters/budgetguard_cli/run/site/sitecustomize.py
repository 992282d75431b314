"""Run by every Python below `budgetguard run`, before its program: PYTHONPATH leads here.

Nothing is imported that the program does not import: the guard comes with the first request of an
HTTP client, or with the first framework. Where it cannot come, the process ends (97).
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - start-up time
_LOCK = threading.RLock()
_STATE = {"attached": False, "attaching": False}
_CANNOT_ATTACH = 97


def _attach() -> None:
    with _LOCK:
        if _STATE["attached"] or _STATE["attaching"]:
            return
        _STATE["attaching"] = True
        try:
            from budgetguard_cli.run.attach import attach

            attach()
        except KeyboardInterrupt:
            # A signal's: the program answers it. Nothing was sent; the next request asks again.
            raise
        except BaseException as error:
            sys.stderr.write(
                "budgetguard: this process cannot be bounded, so it ends: "
                f"{type(error).__name__}: {error}. Install BudgetGuard in {sys.executable}, or "
                "start the script without `budgetguard run`.\n"
            )
            sys.stderr.flush()
            os._exit(_CANNOT_ATTACH)
        finally:
            _STATE["attaching"] = False
        _STATE["attached"] = True


def _adapt(adapter: str) -> None:
    _attach()
    from budgetguard_cli.run.attach import adapt

    adapt(adapter)


def _client(module: Any) -> None:
    """Attach the guard at the first request of any client."""
    for owner in (module.Client, module.AsyncClient):
        _first_request(owner, owner.send)


def _first_request(owner: Any, own: Any) -> None:
    @functools.wraps(own)
    def send(client: Any, *args: Any, **options: Any) -> Any:
        if _STATE["attached"]:
            return own(client, *args, **options)
        _attach()
        # With the guard around this.
        return owner.send(client, *args, **options)

    owner.send = send


class _Callbacks:
    """Looks to LangChain like a context variable without a value; asked when a run begins."""

    @functools.cache  # noqa: B019 - there is one
    def get(self) -> None:
        # Its hooks come behind this one, and are asked next.
        _adapt("budgetguard_langgraph")


def _langchain(module: Any) -> None:
    module.register_configure_hook(_Callbacks(), inheritable=True)


def _framework(adapter: str, *names: str) -> Callable[[Any], None]:
    def imported(module: Any) -> None:
        if all(hasattr(module, name) for name in names):  # and not another module of this name
            _adapt(adapter)

    return imported


def _genai(module: Any) -> None:
    # google-genai 3.4: its asynchronous half prefers aiohttp, which no seam is below.
    module.has_aiohttp = False


def _now(_: Any) -> None:
    # Before a run of the script's own begins: what is around a run is settled then.
    _attach()


_AFTER: dict[str, Callable[[Any], None]] = {
    "budgetguard_core": _now,
    "httpx": _client,
    "httpx2": _client,
    "langchain_core.tracers.context": _langchain,
    "agents": _framework("budgetguard_openai_agents", "Runner", "RunHooks"),
    "pydantic_ai": _framework("budgetguard_pydantic_ai", "Agent"),
    "strands": _framework("budgetguard_strands", "Agent"),
    "google.genai._api_client": _genai,
}


class _Finder:
    """Sees the modules above when they are imported."""

    def find_spec(self, name: str, *where: Any) -> ModuleSpec | None:
        if name not in _AFTER:
            return None
        others = (one.find_spec(name, *where) for one in sys.meta_path if one is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _AFTER[name](module)

            loader.exec_module = exec_module
        return spec


def _users_own() -> None:
    """Run the sitecustomize that there would be without this one."""
    sys.path[:] = [one for one in sys.path if os.path.abspath(one) != _HERE]  # noqa: PTH100
    this = sys.modules.pop(__name__)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)


if "BUDGETGUARD_RUN" in os.environ:
    sys.meta_path.insert(0, _Finder())
if __name__ == "sitecustomize":
    _users_own()
