"""The kit of adapters: all that one needs beside the names of `budgetguard_core`.

An adapter takes an `Envelope` as its budget, opens a `Run` on it, and tells the run what its
framework does. Which budgets apply, what is counted, what a failed call costs, how long it may take
and how the run ends is decided here, once for all adapters.
"""

from budgetguard_core.decision import ToolKind
from budgetguard_core.frame import FRAME, NOWHERE
from budgetguard_core.kit.ambient import (
    Frame,
    current,
    current_call,
    current_guard,
    entered,
    in_force,
)
from budgetguard_core.kit.calls import Batch, OpenModelCall, OpenToolCall
from budgetguard_core.kit.cancel import Scope, Tasks, Watch, cut_short, sleep, supervised
from budgetguard_core.kit.checkpoints import load_to_resume
from budgetguard_core.kit.envelope import (
    Envelope,
    EnvelopeOptions,
    OnTrip,
    ProfileOptions,
    envelope_of,
    joined,
)
from budgetguard_core.kit.failed_calls import failed_usage, turned_away
from budgetguard_core.kit.finalizing import ANSWER_NOW, Answer, LastAnswer, last_answer
from budgetguard_core.kit.flow import (
    Flow,
    Step,
    Streamed,
    in_thread,
    run_awaited,
    run_blocking,
    run_streamed,
)
from budgetguard_core.kit.formats import (
    CHAT,
    CONVERSE,
    RESPONSES,
    Blocks,
    Message,
    SyntheticMessage,
    content_text,
    from_plain,
    grouped,
    message_text,
    read_call,
    to_plain,
)
from budgetguard_core.kit.history import Call, Turn, close_batch, in_words
from budgetguard_core.kit.history import close as close_history
from budgetguard_core.kit.model_turn import ModelTurn, Request
from budgetguard_core.kit.outcomes import outcome, outcome_of, remember
from budgetguard_core.kit.progress import PROGRESS_TOOL, report_progress
from budgetguard_core.kit.projection import Prompt, estimate, project
from budgetguard_core.kit.pruning import Prune, keep_turns
from budgetguard_core.kit.records import part, parts_of
from budgetguard_core.kit.require import required
from budgetguard_core.kit.resume import Resume, opened, resumed
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

__all__ = [
    "ANSWER_NOW",
    "CHAT",
    "CONVERSE",
    "FRAME",
    "NOWHERE",
    "PROGRESS_TOOL",
    "RESPONSES",
    "Answer",
    "Batch",
    "Blocks",
    "Call",
    "Envelope",
    "EnvelopeOptions",
    "Flow",
    "Frame",
    "LastAnswer",
    "LastQuestion",
    "Message",
    "ModelTurn",
    "OnTrip",
    "OpenModelCall",
    "OpenToolCall",
    "ProfileOptions",
    "Prompt",
    "Prune",
    "Request",
    "Resume",
    "Run",
    "Scope",
    "Session",
    "Step",
    "Streamed",
    "SyntheticMessage",
    "Tasks",
    "ToolCalls",
    "ToolKind",
    "Turn",
    "Watch",
    "answered_usage",
    "close_batch",
    "close_history",
    "content_text",
    "current",
    "current_call",
    "current_guard",
    "cut_short",
    "entered",
    "envelope_of",
    "estimate",
    "failed_usage",
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
    "opened",
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
    "run_streamed",
    "sleep",
    "supervised",
    "to_plain",
    "token_usage",
    "turned_away",
]
