"""`guarded`: functions whose every call is admitted first."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

from budgetguard_core import (
    AdapterError,
    Admit,
    Budget,
    BudgetExceeded,
    Guard,
    ModelCall,
    Refuse,
    Stop,
    TokenUsage,
    ToolCall,
    Trip,
    Violation,
    estimate_tokens,
)
from budgetguard_loop._ambient import (
    LAYER,
    Layer,
    cut_short,
    entered,
    settings_for,
    settings_of,
)
from budgetguard_loop._history import result_text
from budgetguard_loop._usage import estimated, extract_usage, merge_usage, part

_F = TypeVar("_F", bound=Callable[..., Any])
_NOTHING = object()
_MARK = "__budgetguard__"


class ToolRefused(BudgetExceeded):
    """This call of a tool may not start, and the run goes on: a quota is used up.

    Its text is the result for the model, and says nothing of the quota; `trip` does.
    """

    def __init__(self, trip: Trip, message: str) -> None:
        super().__init__(trip)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.trip, self.message)


def guarded(
    budget: Budget | Guard | None = None,
    *,
    kind: Literal["tool", "model"] = "tool",
    name: str | None = None,
    model: str | None = None,
    provider: str | None = None,
    usage: Callable[[Any], TokenUsage | None] = extract_usage,
) -> Callable[[_F], _F]:
    """Have every call of a function admitted, as a tool call or as a model call, and settled.

    Works on functions, coroutine functions, generators and async generators; a generator is one
    call from its first item to its last. On an event loop the deadline and an abort cancel the
    call. A function that `run_bounded` or a `bounded` block calls under the same guard is counted
    once. The function is also given `max_output_tokens`, `seconds` and `nudge` (what the model
    should be told first, or None) where it has keywords of these names.

    Args:
        budget: A `Guard`; or None for that of the run that the call is part of; or a `Budget` of
            this function's own, within each run that it is part of.
        kind: `tool`, or `model`: a call of a model.
        name: The tool's name, for quotas; the function's own if left out.
        model: The model's name, for its price. Needed with `max_cost_usd`.
        provider: The provider's id where several have a model of this name.
        usage: Reads the usage from what a model call returned, or from the chunks it yielded. What
            it does not find is estimated from the text.

    Raises:
        BudgetExceeded: From the call, when a limit holds. In a `bounded` block, let it pass.
        ToolRefused: From the call, when a quota is used up; give the model its text as the result.
        AdapterError: From the call, without a budget outside of any run.
    """

    def decorate(function: _F) -> _F:
        gate = _Gate(function, budget, kind, name, model, provider, usage)
        if inspect.isasyncgenfunction(function):
            wrapper: Any = gate.async_generator
        elif inspect.iscoroutinefunction(function):
            wrapper = gate.coroutine
        elif inspect.isgeneratorfunction(function):
            wrapper = gate.generator
        else:
            wrapper = gate.plain

        wrapped = wrapper()
        functools.update_wrapper(wrapped, function)
        setattr(wrapped, _MARK, True)
        gate.wrapper = wrapped
        return cast("_F", wrapped)

    return decorate


class _Call:
    """One call of a guarded function, admitted."""

    __slots__ = ("layer", "settings", "text", "ticket", "usage")

    def __init__(self, ticket: Admit, layer: Layer | None, settings: dict[str, Any]) -> None:
        self.ticket = ticket
        self.layer = layer
        """None when an outer layer has admitted, and will settle, this very call."""
        self.settings = settings
        self.usage: TokenUsage | None = None
        self.text = ""


class _Gate:
    """Admits and settles the calls of one function."""

    def __init__(
        self,
        function: Callable[..., Any],
        budget: Budget | Guard | None,
        kind: Literal["tool", "model"],
        name: str | None,
        model: str | None,
        provider: str | None,
        usage: Callable[[Any], TokenUsage | None],
    ) -> None:
        self.wrapper: object = None
        self._function = function
        self._budget = budget
        self._kind = kind
        self._name = str(name or getattr(function, "__name__", type(function).__name__))
        self._model = model
        self._provider = provider
        self._usage = usage
        self._settings = settings_of(function)
        self._signature = inspect.signature(function)
        self._own = Guard(budget) if isinstance(budget, Budget) else None
        self._children: WeakKeyDictionary[Guard, Guard] = WeakKeyDictionary()

    # The four shells

    def plain(self) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._admitted(args, kwargs) as admitted:
                with _inside(admitted):
                    result = self._function(*args, **kwargs, **admitted.settings)
                self._took(admitted, result)
                return result

        return call

    def coroutine(self) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            result = _NOTHING
            with self._admitted(args, kwargs) as admitted:
                with _inside(admitted), cut_short(admitted.ticket.guard) as watch:
                    result = await self._function(*args, **kwargs, **admitted.settings)
                if result is _NOTHING:
                    raise _CutShort(cast("Any", watch).trip)
                self._took(admitted, result)
            return result

        return call

    def generator(self) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with self._admitted(args, kwargs) as admitted:
                items = self._function(*args, **kwargs, **admitted.settings)
                try:
                    while True:
                        with _inside(admitted):
                            item = next(items, _NOTHING)
                        if item is _NOTHING:
                            break
                        self._took(admitted, item, part_of_it=True)
                        yield item
                finally:
                    items.close()

        return call

    def async_generator(self) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            with self._admitted(args, kwargs) as admitted:
                items = self._function(*args, **kwargs, **admitted.settings)
                try:
                    while True:
                        item = cut = cast("Any", object())
                        with _inside(admitted), cut_short(admitted.ticket.guard) as watch:
                            item = await anext(items, _NOTHING)
                        if item is cut:
                            raise _CutShort(cast("Any", watch).trip)
                        if item is _NOTHING:
                            break
                        self._took(admitted, item, part_of_it=True)
                        yield item
                finally:
                    await items.aclose()

        return call

    # What they share

    @contextmanager
    def _admitted(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Generator[_Call]:
        call = self._admit(args, kwargs)
        try:
            yield call
        except _CutShort as cut:
            self._settle(call, args, kwargs, error="cut short", interrupted=True)
            raise BudgetExceeded(cut.trip) from None
        except BaseException as error:
            self._settle(
                call, args, kwargs, error=error, interrupted=not isinstance(error, Exception)
            )
            raise
        else:
            self._settle(call, args, kwargs)

    def _admit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
        guard = self._guard()
        layer = LAYER.get()
        wanted = self._settings - kwargs.keys()
        again = False
        if layer is not None and layer.ticket is not None and self._is_same(layer, guard):
            if not layer.seen:
                layer.seen = True
                settings = settings_for(layer.ticket, wanted)
                if "nudge" in settings:
                    settings["nudge"] = None
                return _Call(layer.ticket, None, settings)
            again = self._kind == "model"
        if self._kind == "model":
            decision: Any = guard.admit_model_call(
                ModelCall(model=self._model, provider=self._provider, retry=again)
            )
        else:
            decision = guard.admit_tool_call(
                ToolCall(name=self._name, arguments=self._arguments(args, kwargs))
            )
        if isinstance(decision, Stop):
            raise BudgetExceeded(decision.trip)
        if isinstance(decision, Refuse):
            violation = Violation(reason=decision.reason, detail=decision.detail)
            trip = Trip(reason=decision.reason, violations=(violation,), run_id=guard.run_id)
            raise ToolRefused(trip, decision.message)
        save = None if layer is None else layer.save
        inner = Layer(guard, ticket=decision, function=self.wrapper, save=save)
        # A tool's body may call the tool again; only another layer around it is the same call.
        inner.seen = self._kind == "tool" and not hasattr(self._function, _MARK)
        return _Call(decision, inner, settings_for(decision, wanted))

    def _is_same(self, layer: Layer, guard: Guard) -> bool:
        ticket = cast("Admit", layer.ticket)
        if not layer.covers(guard):
            return False
        if self._kind == "model":
            return isinstance(ticket.call, ModelCall)
        return isinstance(ticket.call, ToolCall) and (
            layer.function is self.wrapper or ticket.call.name == self._name
        )

    def _settle(
        self,
        call: _Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        error: BaseException | str | None = None,
        interrupted: bool = False,
    ) -> None:
        if call.layer is None:
            return
        guard: Guard = call.ticket.guard
        if self._kind == "tool":
            # What ended a tool from outside leaves its outcome unknown: the call stays open.
            if not interrupted:
                guard.settle_tool_call(call.ticket, call.text, error=error)
            return
        usage = call.usage
        if usage is None and (error is None or call.text):
            prompt = estimate_tokens(result_text([args, dict(kwargs)]))
            usage = estimated(prompt, call.text)
        guard.settle_model_call(call.ticket, usage, error=error)

    def _took(self, call: _Call, result: Any, *, part_of_it: bool = False) -> None:
        if call.layer is None:
            return
        if self._kind == "tool":
            call.text += result_text(result)
        elif part_of_it:
            call.usage = merge_usage(call.usage, self._usage(result))
            call.text += _chunk_text(result)
        else:
            call.usage = self._usage(result)
            call.text = "" if call.usage else result_text(result)

    def _guard(self) -> Guard:
        layer = LAYER.get()
        above = None if layer is None else layer.guard
        if isinstance(self._budget, Guard):
            # A sub-agent's call, and that of a run beside another, is charged to it as well.
            return layer.guard if layer and layer.covers(self._budget) else self._budget
        if self._budget is None:
            if above is None:
                raise AdapterError(
                    f"{self._name} is guarded by the run that calls it, got a call outside of any. "
                    "Give guarded() a Guard or a Budget, or call it in a bounded block."
                )
            return above
        if above is None:
            return cast("Guard", self._own)
        if above not in self._children:
            self._children[above] = above.child(self._budget)
        return self._children[above]

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError:
            return {"args": args, **kwargs}
        return {name: value for name, value in bound.arguments.items() if name != "self"}


class _CutShort(Exception):
    def __init__(self, trip: Trip) -> None:
        self.trip = trip


@contextmanager
def _inside(call: _Call) -> Generator[None]:
    if call.layer is None:
        yield
    else:
        with entered(call.layer):
            yield


def _chunk_text(chunk: Any) -> str:
    if isinstance(chunk, str):
        return chunk
    choices = part(chunk, "choices")
    if choices is None:
        return str(part(part(chunk, "delta"), "text") or "")
    delta = part(choices[0], "delta") if choices else None
    return str(part(delta, "content") or "") + str(part(delta, "tool_calls") or "")
