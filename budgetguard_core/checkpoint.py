"""Snapshots of a guard and its conversation, and the stores that keep them."""

import os
import sqlite3
import threading
from collections.abc import Generator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from pydantic_core import PydanticSerializationError

from budgetguard_core.decision import Admit, ModelCall, ToolCall, ToolKind
from budgetguard_core.errors import CheckpointError
from budgetguard_core.pricing import PriceBook, to_usd
from budgetguard_core.stop import Trip, Violation
from budgetguard_core.usage import Usage

if TYPE_CHECKING:
    from budgetguard_core.guard import Guard

FORMAT_VERSION = 1
_BUSY_MILLISECONDS = 30_000


def dump(record: BaseModel) -> str:
    """Return a record as one JSON object.

    A model may write half of a surrogate pair, which UTF-8 cannot hold, into a name or a message:
    it becomes a question mark, so that it costs neither a checkpoint nor a line of a log.

    Raises:
        ValueError: The record holds what JSON cannot.
    """
    try:
        return record.model_dump_json()
    except PydanticSerializationError:
        return type(record).model_validate(_encodable(record.model_dump())).model_dump_json()


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        return {_encodable(key): _encodable(item) for key, item in fields.items()}
    if isinstance(value, list | tuple):
        items = cast("list[Any] | tuple[Any, ...]", value)
        return [_encodable(item) for item in items]
    return value


class OpenCall(BaseModel):
    """A call that was in flight when the snapshot was taken: it may have taken effect."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    kind: Literal["model", "tool"]
    call_id: NonNegativeInt
    reserved_tokens: NonNegativeInt = 0
    reserved_cost: NonNegativeInt = 0
    model: str | None = None
    provider: str | None = None
    input_tokens: int = 0
    cost_usd: str | None = None
    id: str | None = None
    name: str = ""
    tool_kind: ToolKind = "function"
    fingerprint: str = ""

    @classmethod
    def of(cls, ticket: Admit) -> Self:
        """Describe a ticket without the arguments of its call."""
        call = ticket.call
        if isinstance(call, ModelCall):
            return cls(
                kind="model",
                call_id=ticket.call_id,
                reserved_tokens=ticket.reserved_tokens,
                reserved_cost=ticket.reserved_cost,
                model=call.model,
                provider=call.provider,
                input_tokens=call.input_tokens,
                cost_usd=None if call.cost_usd is None else str(call.cost_usd),
            )
        return cls(
            kind="tool",
            call_id=ticket.call_id,
            id=call.id,
            name=call.name,
            tool_kind=call.kind,
            fingerprint=call.fingerprint or "",
        )

    def ticket(self, guard: "Guard", prices: PriceBook) -> Admit:
        """Make the ticket again, so that the call can still be settled."""
        call: ModelCall | ToolCall
        if self.kind == "model":
            call = ModelCall(
                model=self.model,
                provider=self.provider,
                input_tokens=self.input_tokens,
                cost_usd=None if self.cost_usd is None else Decimal(self.cost_usd),
            )
        else:
            call = ToolCall(
                name=self.name, id=self.id, kind=self.tool_kind, fingerprint=self.fingerprint
            )
        return Admit(
            guard,
            call,
            self.call_id,
            None,
            None if self.model is None else prices.rates_for(self.model, self.provider),
            self.reserved_tokens,
            self.reserved_cost,
        )


class Snapshot(BaseModel):
    """Everything that a guard knows, and the conversation that it was given, as plain data."""

    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", ser_json_inf_nan="strings"
    )

    format_version: int = FORMAT_VERSION
    run_id: str
    parent_run_id: str | None
    mode: str
    budget: dict[str, Any]
    stop_conditions: int
    counters: dict[str, NonNegativeInt]
    quotas: dict[str, NonNegativeInt]
    tool_counts: dict[str, NonNegativeInt]
    records: tuple[tuple[str | None, str, str], ...]
    elapsed_ns: NonNegativeInt | None
    trip: Trip | None
    observed: Trip | None
    aborted: str | None
    held: tuple[Violation, ...]
    warned: tuple[str, ...]
    window_warned: bool
    detector: dict[str, Any] | None
    open_calls: tuple[OpenCall, ...]
    earlier: Usage
    seq: NonNegativeInt
    call_id: NonNegativeInt
    price_book: str
    messages: tuple[Any, ...] = ()

    def usage(self) -> Usage:
        """Return what the run had used, reservations aside."""
        totals = {name: n for name, n in self.counters.items() if name in Usage.model_fields}
        return Usage(
            **totals,  # type: ignore[arg-type]
            total_tokens=self.counters["tokens"],
            cost_usd=to_usd(self.counters["cost"]),
            seconds=(self.elapsed_ns or 0) / 1_000_000_000,
        ).model_copy(update={"reserved_tokens": 0})

    def to_json(self) -> str:
        """Return the snapshot as one JSON object.

        Raises:
            CheckpointError: The conversation holds what JSON cannot.
        """
        try:
            return dump(self)
        except ValueError as error:
            raise CheckpointError(
                f"messages must be what JSON can hold, got {error}. "
                "Turn them into dictionaries first."
            ) from None

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a snapshot.

        Raises:
            CheckpointError: It is damaged, or of a newer format.
        """
        try:
            version = _Version.model_validate_json(text).format_version
            if version > FORMAT_VERSION:
                raise CheckpointError(
                    f"snapshot format must be <= {FORMAT_VERSION}, got {version}. "
                    "Upgrade BudgetGuard, or start the run anew."
                )
            return cls.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in problem["loc"]) or "the whole"
            raise CheckpointError(
                f"snapshot is damaged ({field}: {problem['msg']}). "
                "Restore an earlier one, or start the run anew."
            ) from None


class _Version(BaseModel):
    model_config = ConfigDict(defer_build=True)

    format_version: int


class CheckpointStore(Protocol):
    """Where snapshots are kept, the last one of each run."""

    def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot in place of the run's earlier one. Safe on the disk when it returns."""
        ...

    def load(self, run_id: str) -> Snapshot | None:
        """Return the run's last snapshot, or None."""
        ...

    def delete(self, run_id: str) -> None:
        """Forget a run."""
        ...


class MemoryStore:
    """Snapshots in this process only, as text, so that nothing in them is shared."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot in place of the run's earlier one."""
        self._texts[snapshot.run_id] = snapshot.to_json()

    def load(self, run_id: str) -> Snapshot | None:
        """Return the run's last snapshot, or None."""
        text = self._texts.get(run_id)
        return None if text is None else Snapshot.from_json(text)

    def delete(self, run_id: str) -> None:
        """Forget a run."""
        self._texts.pop(run_id, None)


class SqliteStore:
    """Snapshots in a SQLite file, safe under several threads and processes (WAL).

    Args:
        path: The file; `.budgetguard/checkpoints.sqlite3` in the home directory if left out. It
            holds conversations, so it and its folder are made readable by their owner only.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = Path(path) if path is not None else _default_path()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.touch(mode=0o600)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._inherited: sqlite3.Connection | None = None
        self._process = os.getpid()
        with self._connected() as connection:
            # The mode is kept in the file; changing it needs the file to itself for a moment.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS checkpoints (run_id TEXT PRIMARY KEY, snapshot TEXT)"
            )

    def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot in place of the run's earlier one; on the disk when it returns."""
        text = snapshot.to_json()
        with self._connected() as connection:
            connection.execute(
                "INSERT INTO checkpoints VALUES (?, ?) "
                "ON CONFLICT (run_id) DO UPDATE SET snapshot = excluded.snapshot",
                (snapshot.run_id, text),
            )

    def load(self, run_id: str) -> Snapshot | None:
        """Return the run's last snapshot, or None.

        Raises:
            CheckpointError: The file or the snapshot is damaged.
        """
        with self._connected() as connection:
            row = connection.execute(
                "SELECT snapshot FROM checkpoints WHERE run_id = ?", (run_id,)
            ).fetchone()
        return None if row is None else Snapshot.from_json(row[0])

    def delete(self, run_id: str) -> None:
        """Forget a run."""
        with self._connected() as connection:
            connection.execute("DELETE FROM checkpoints WHERE run_id = ?", (run_id,))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _connected(self) -> Generator[sqlite3.Connection]:
        with self._lock:
            try:
                # A connection must not cross a fork: each process opens its own, and must not
                # close the other's either.
                if self._process != os.getpid():
                    self._inherited = self._connection
                    self._connection = None
                    self._process = os.getpid()
                if self._connection is None:
                    self._connection = sqlite3.connect(
                        self._path,
                        timeout=_BUSY_MILLISECONDS / 1000,
                        isolation_level=None,
                        check_same_thread=False,
                    )
                    self._connection.execute("PRAGMA synchronous = FULL")
                yield self._connection
            except sqlite3.DatabaseError as error:
                self._disconnect()
                raise CheckpointError(
                    f"checkpoint file {str(self._path)!r} cannot be used: {error}. "
                    "Make it writable, or move it away to begin a new one."
                ) from error


def _default_path() -> Path:
    return Path.home() / ".budgetguard" / "checkpoints.sqlite3"
