"""`guarded`: functions whose every call is admitted first."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, Unpack, cast
from weakref import WeakKeyDictionary

from budgetguard_core import AdapterError, Budget, BudgetExceeded, Guard, Trip, kit
from budgetguard_loop._calls import refusal_of
from budgetguard_loop._history import result_text
from budgetguard_loop._reply import ReplyFacts, facts_of, facts_of_chunk, is_in_turn
from budgetguard_loop._settings import Settings, is_async

_F = TypeVar("_F", bound=Callable[..., Any])
_NOTHING: Any = object()
_CUT: Any = object()
_Requested: TypeAlias = kit.OpenModelCall | kit.OpenToolCall | kit.Stop


def guarded(
    budget: Budget | Guard | kit.Envelope | None = None,
    *,
    kind: Literal["tool", "model"] = "tool",
    name: str | None = None,
    model: str | None = None,
    provider: str | None = None,
    usage: Callable[[Any], Any] = kit.token_usage,
    tools: Iterable[Any] = (),
    **options: Unpack[kit.EnvelopeOptions],
) -> Callable[[_F], _F]:
    """Admit and settle every call of a function, as a tool call or as a model call.

    Works on functions, coroutine functions, generators and async generators; a generator, which
    is only read, is one call from its first item to its last. On an event loop the deadline and an
    abort cancel the call. A function that `run_bounded` or a `bounded` block calls under the same
    guard is counted once. The function is also given `max_output_tokens`, `seconds` and `nudge`
    (what the model should be told first, or None) where it has keywords of these names that the
    caller leaves out; a default of its own is never raised.

    Args:
        budget: A `Guard`; or None for that of the run that the call is part of; or a `Budget` of
            this function's own, within each run that it is part of; or an `Envelope` of either.
        kind: `tool`, or `model`: a call of a model.
        name: The tool's name, for quotas; the function's own if left out.
        model: The model's name, for its price. Needed with `max_cost_usd`.
        provider: The provider's id where several have a model of this name.
        usage: Reads the usage from what a model call returned, or from the chunks it yielded. What
            it does not find is estimated from the text.
        tools: The tool schemas that each model call sends beside its arguments, for the estimate
            of the prompt.
        **options: The options of `Envelope`, beside a budget.

    Raises:
        BudgetExceeded: From the call, when a limit holds. In a `bounded` block, let it pass.
        ToolRefused: From the call, when a quota or a breaker refuses it; give the model its text
            as the result.
        AdapterError: From the call, without a budget outside of any run.
    """
    envelope = None if budget is None and not options else kit.envelope_of(budget, **options)

    def decorate(function: _F) -> _F:
        known = str(name or getattr(function, "__name__", type(function).__name__))
        gate = _Gate(function, envelope, kind, known, model, provider, usage, tuple(tools))
        if inspect.isasyncgenfunction(function):
            wrapper: Any = gate.async_generator
        elif is_async(function):
            wrapper = gate.coroutine
        elif inspect.isgeneratorfunction(function):
            wrapper = gate.generator
        else:
            wrapper = gate.plain
        wrapped = wrapper()
        functools.update_wrapper(wrapped, function)
        gate.wrapper = wrapped
        return cast("_F", wrapped)

    return decorate


@dataclass(slots=True)
class _Call:
    """One call of a guarded function, admitted."""

    run: kit.Run
    open: kit.OpenModelCall | kit.OpenToolCall
    settings: dict[str, Any]
    prompt: Sequence[Any]
    usage: Any = None
    pieces: list[str] = field(default_factory=list[str])
    asks: bool = False
    is_cut: bool = False

    @property
    def text(self) -> str:
        """All that was written so far."""
        return "".join(self.pieces)

    def take(self, reply: ReplyFacts) -> None:
        """Take in what a response, or a chunk of one, says."""
        self.pieces.append(reply.text)
        self.asks |= reply.asks
        self.is_cut = (self.is_cut or reply.is_cut) and not self.asks


def _messages_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments, message by message: what the provider has measured counts as such."""
    messages: list[Any] = []
    for given in (*args, *kwargs.values()):
        messages += cast("list[Any]", given) if isinstance(given, list) else [given]
    return messages


@dataclass(eq=False)
class _Gate:
    """Admits and settles the calls of one function."""

    _function: Callable[..., Any]
    _envelope: kit.Envelope | None
    _kind: Literal["tool", "model"]
    _name: str
    _model: str | None
    _provider: str | None
    _usage: Callable[[Any], Any]
    _tools: tuple[Any, ...]
    wrapper: object = None
    _outside: kit.Run | None = None

    def __post_init__(self) -> None:
        self._settings = Settings(self._function)
        self._prompts: WeakKeyDictionary[kit.Run, kit.Prompt] = WeakKeyDictionary()

    # The four shells

    def plain(self) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            run, ask = self._question(args, kwargs)
            with self._admitted(run, run.wait(ask()), args, kwargs) as admitted:
                with admitted.run.entered(admitted.open):
                    result = self._function(*args, **kwargs, **admitted.settings)
                self._took(admitted, result)
                return result

        return call

    def coroutine(self) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            result = _CUT
            run, ask = self._question(args, kwargs)
            waited = await run.wait_async(await kit.run_awaited(run.ask(ask)))
            with self._admitted(run, waited, args, kwargs) as admitted:
                with admitted.run.entered(admitted.open), kit.cut_short(admitted.run) as watch:
                    result = await self._function(*args, **kwargs, **admitted.settings)
                if result is _CUT:
                    raise _CutShort(cast("Trip", watch.trip))
                self._took(admitted, result)
            return result

        return call

    def generator(self) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Generator[Any]:
            run, ask = self._question(args, kwargs)
            with self._admitted(run, run.wait(ask()), args, kwargs) as admitted:
                items = self._function(*args, **kwargs, **admitted.settings)
                with closing(items):
                    while True:
                        with admitted.run.entered(admitted.open):
                            item = next(items, _NOTHING)
                        if item is _NOTHING:
                            break
                        self._took(admitted, item, part_of_it=True)
                        yield item

        return call

    def async_generator(self) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
            run, ask = self._question(args, kwargs)
            waited = await run.wait_async(await kit.run_awaited(run.ask(ask)))
            with self._admitted(run, waited, args, kwargs) as admitted:
                items = self._function(*args, **kwargs, **admitted.settings)
                async with aclosing(items):
                    while True:
                        item = _CUT
                        with (
                            admitted.run.entered(admitted.open),
                            kit.cut_short(admitted.run) as watch,
                        ):
                            item = await anext(items, _NOTHING)
                        if item is _CUT:
                            raise _CutShort(cast("Trip", watch.trip))
                        if item is _NOTHING:
                            break
                        self._took(admitted, item, part_of_it=True)
                        yield item

        return call

    # What they share

    @contextmanager
    def _admitted(
        self, run: kit.Run, requested: _Requested, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Generator[_Call]:
        call = self._admit(run, requested, args, kwargs)
        try:
            yield call
        except _CutShort as cut:
            self._settle(call, error="cut short", interrupted=True)
            raise BudgetExceeded(cut.trip) from None
        except BaseException as error:
            self._settle(call, error=error, interrupted=not isinstance(error, Exception))
            raise
        else:
            self._settle(call)

    def _question(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[kit.Run, Callable[[], kit.OpenModelCall | kit.Stop]]:
        """Return the run, and what asks it for a call: of a tool too, though the type names one."""
        run = self._run()
        if self._kind == "model":
            prompt = self._prompts.setdefault(run, kit.Prompt())
            call = kit.ModelCall(
                model=self._model,
                provider=self._provider,
                input_tokens=prompt.project(_messages_in(args, kwargs), tools=self._tools),
            )
            may = self._settings.takes_model and "model" not in kwargs
            return run, lambda: run.model_call(call, may_fall_back=may)
        open_call: Any = functools.partial(run.tool_call, function=self.wrapper)
        arguments = self._settings.arguments(args, kwargs)
        arguments.pop("self", None)
        requested = kit.ToolCall(name=self._name, arguments=arguments)
        return run, functools.partial(open_call, requested)

    def _admit(
        self, run: kit.Run, open_call: _Requested, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Call:
        if isinstance(open_call, kit.Stop):
            raise BudgetExceeded(open_call.trip)
        if isinstance(open_call, kit.OpenToolCall):
            refused = refusal_of(run, open_call)
            if refused is not None:
                raise refused
            # The body may call the tool again: that is another call, and not this one seen twice.
            open_call.seen = not hasattr(self._function, "__wrapped__")
        same = isinstance(open_call, kit.OpenModelCall) and not open_call.tickets
        settings = self._settings.for_call(run, open_call, args, kwargs, nudges=not same)
        return _Call(run, open_call, settings, _messages_in(args, kwargs))

    def _run(self) -> kit.Run:
        """Return the run that a call from here counts in."""
        enclosing, envelope = kit.joined(), self._envelope
        if envelope is None:
            if enclosing is None:
                raise AdapterError(
                    f"{self._name} is guarded by the run that calls it, got a call outside of any. "
                    "Give guarded() a Guard or a Budget, or call it in a bounded block."
                )
            return enclosing
        if enclosing is None:
            if self._outside is None:
                self._outside = envelope.open(loose=True)
            return self._outside
        if isinstance(envelope.budget, Guard) and envelope.budget in enclosing.guard.ancestry:
            # A sub-agent's call, and that of a run beside another, is charged to it as well.
            return enclosing
        return enclosing.part(self, envelope)

    def _settle(
        self, call: _Call, *, error: BaseException | str | None = None, interrupted: bool = False
    ) -> None:
        if isinstance(call.open, kit.OpenToolCall):
            # What ended a tool from outside leaves its outcome unknown: the call stays open.
            if not interrupted:
                call.run.finished(call.open, call.text, error=error)
        elif error is None:
            # An answer is a text that asks for no tool.
            is_answer = any(call.pieces) and not call.asks
            final = is_answer and is_in_turn(call.run, call.text, call.prompt)
            call.run.answered(call.open, call.usage, text=call.text, final=final)
            self._prompts[call.run].measured(call.usage)
            if call.is_cut:
                call.run.cut_short(call.open)
        else:
            call.run.failed(call.open, error, written=call.text)

    def _took(self, call: _Call, result: Any, *, part_of_it: bool = False) -> None:
        if self._kind == "tool":
            call.pieces.append(result_text(result))
        elif part_of_it:
            call.usage = kit.merge_usage(call.usage, self._usage(result))
            call.take(facts_of_chunk(result))
        else:
            call.usage = self._usage(result)
            call.take(facts_of(result))


class _CutShort(Exception):
    def __init__(self, trip: Trip) -> None:
        self.trip = trip
