"""The kit of adapters: all that one needs beside the names of `budgetguard_core`.

An adapter takes an `Envelope` as its budget, opens a `Run` on it, and tells the run what its
framework does. Which budgets apply, what is counted, what a failed call costs, how long it may take
and how the run ends is decided here, once for all adapters.
"""

from budgetguard_core.canonical import fingerprint
from budgetguard_core.clock import SystemClock
from budgetguard_core.decision import (
    NOT_AVAILABLE,
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    Admit,
    ModelCall,
    Nudge,
    Refuse,
    Stop,
    ToolCall,
    ToolKind,
)
from budgetguard_core.ending import end_run, synthetic_metadata, synthetic_text
from budgetguard_core.errors import CheckpointError
from budgetguard_core.events import Event
from budgetguard_core.frame import FRAME, NOWHERE
from budgetguard_core.kit.ambient import (
    Frame,
    current,
    current_call,
    current_guard,
    entered,
    in_force,
)
from budgetguard_core.kit.calls import OpenModelCall, OpenToolCall
from budgetguard_core.kit.cancel import Scope, Tasks, Watch, cut_short, sleep, supervised
from budgetguard_core.kit.checkpoints import load_to_resume
from budgetguard_core.kit.envelope import Envelope, envelope_of, joined
from budgetguard_core.kit.failed_calls import failed_usage, turned_away
from budgetguard_core.kit.finalizing import ANSWER_NOW, Answer, LastAnswer, last_answer
from budgetguard_core.kit.flow import (
    Chunk,
    Flow,
    Step,
    Streamed,
    in_thread,
    run_awaited,
    run_blocking,
    run_iterated,
    run_streamed,
)
from budgetguard_core.kit.formats import (
    CHAT,
    RESPONSES,
    Converse,
    Message,
    Responses,
    SyntheticMessage,
    content_text,
    from_plain,
    grouped,
    message_text,
    read_call,
    to_plain,
)
from budgetguard_core.kit.history import (
    Call,
    Dialect,
    Turn,
    close_batch,
    final_text,
    in_words,
    open_calls,
)
from budgetguard_core.kit.history import close as close_history
from budgetguard_core.kit.history import end as end_history
from budgetguard_core.kit.model_turn import ModelTurn, Request
from budgetguard_core.kit.model_turn import ask as ask_model
from budgetguard_core.kit.options import EnvelopeOptions, ProfileOptions
from budgetguard_core.kit.outcomes import outcome, outcome_of, remember
from budgetguard_core.kit.progress import PROGRESS_TOOL, report_progress
from budgetguard_core.kit.projection import Prompt, estimate, project
from budgetguard_core.kit.pruning import Prune, keep_turns
from budgetguard_core.kit.records import part, parts_of
from budgetguard_core.kit.require import required
from budgetguard_core.kit.resume import Resume, named, open_run, resumed
from budgetguard_core.kit.run import Run
from budgetguard_core.kit.session import LastQuestion, Session
from budgetguard_core.kit.stops import is_stop
from budgetguard_core.kit.tool_calls import ToolCalls
from budgetguard_core.kit.usage import (
    answered_usage,
    merge_usage,
    reported_cost,
    token_usage,
)
from budgetguard_core.questions import PAUSES, take_answers
from budgetguard_core.stop import LimitQuestion, StopCondition, Violation
from budgetguard_core.stores import CheckpointStore
from budgetguard_core.usage import TokenUsage, estimate_tokens

__all__ = [
    "ANSWER_NOW",
    "CHAT",
    "FRAME",
    "NOT_AVAILABLE",
    "NOT_EXECUTED",
    "NOWHERE",
    "OUTCOME_UNKNOWN",
    "PAUSES",
    "PROGRESS_TOOL",
    "RESPONSES",
    "Admit",
    "Answer",
    "Call",
    "CheckpointError",
    "CheckpointStore",
    "Chunk",
    "Converse",
    "Dialect",
    "Envelope",
    "EnvelopeOptions",
    "Event",
    "Flow",
    "Frame",
    "LastAnswer",
    "LastQuestion",
    "LimitQuestion",
    "Message",
    "ModelCall",
    "ModelTurn",
    "Nudge",
    "OpenModelCall",
    "OpenToolCall",
    "ProfileOptions",
    "Prompt",
    "Prune",
    "Refuse",
    "Request",
    "Responses",
    "Resume",
    "Run",
    "Scope",
    "Session",
    "Step",
    "Stop",
    "StopCondition",
    "Streamed",
    "SyntheticMessage",
    "SystemClock",
    "Tasks",
    "TokenUsage",
    "ToolCall",
    "ToolCalls",
    "ToolKind",
    "Turn",
    "Violation",
    "Watch",
    "answered_usage",
    "ask_model",
    "close_batch",
    "close_history",
    "content_text",
    "current",
    "current_call",
    "current_guard",
    "cut_short",
    "end_history",
    "end_run",
    "entered",
    "envelope_of",
    "estimate",
    "estimate_tokens",
    "failed_usage",
    "final_text",
    "fingerprint",
    "from_plain",
    "grouped",
    "in_force",
    "in_thread",
    "in_words",
    "is_stop",
    "joined",
    "keep_turns",
    "last_answer",
    "load_to_resume",
    "merge_usage",
    "message_text",
    "named",
    "open_calls",
    "open_run",
    "outcome",
    "outcome_of",
    "part",
    "parts_of",
    "project",
    "read_call",
    "remember",
    "report_progress",
    "reported_cost",
    "required",
    "resumed",
    "run_awaited",
    "run_blocking",
    "run_iterated",
    "run_streamed",
    "sleep",
    "supervised",
    "synthetic_metadata",
    "synthetic_text",
    "take_answers",
    "to_plain",
    "token_usage",
    "turned_away",
]
