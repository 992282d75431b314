"""The names of what is written, as the OpenTelemetry GenAI conventions have them, and our own.

The GenAI names are those of semantic conventions 1.44.0, the last release that defines them beside
all others; since then they are developed in a repository of their own, under the same names. They
are written out here, because the package that has them calls all of them unstable.
"""

from __future__ import annotations

from typing import Final

SEMANTIC_CONVENTIONS: Final = "1.44.0"
"""The version of the OpenTelemetry semantic conventions that the GenAI names are from."""
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{SEMANTIC_CONVENTIONS}"

# Attributes of the GenAI conventions.
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS: Final = "gen_ai.usage.cache_creation.input_tokens"
REASONING_TOKENS: Final = "gen_ai.usage.reasoning.output_tokens"
TOKEN_TYPE: Final = "gen_ai.token.type"  # noqa: S105 - tokens of a model
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_TYPE: Final = "gen_ai.tool.type"
ERROR_TYPE: Final = "error.type"

CHAT: Final = "chat"
INVOKE_AGENT: Final = "invoke_agent"
EXECUTE_TOOL: Final = "execute_tool"

# Our own.
RUN_ID: Final = "budgetguard.run.id"
POLICY: Final = "budgetguard.policy"
"""The mode of a guard: `enforce` or `observe`."""
REASON: Final = "budgetguard.reason"
TASK: Final = "budgetguard.task"
TENANT: Final = "budgetguard.tenant"
PROFILE: Final = "budgetguard.profile"
PROFILE_VERSION: Final = "budgetguard.profile.version"
OVERLAY: Final = "budgetguard.profile.overlay"
STATUS: Final = "budgetguard.status"
FINALIZED: Final = "budgetguard.finalized"
"""The model gave a stopped run a last answer, from its reserve."""
HOUSEKEEPING: Final = "budgetguard.housekeeping"
"""The kind of a span below a run's that is no agent's: `last_answer` or `other`."""
DETAIL: Final = "budgetguard.detail"
LIMIT: Final = "budgetguard.limit"
USED: Final = "budgetguard.used"
DIMENSION: Final = "budgetguard.dimension"
KIND: Final = "budgetguard.call.kind"
DECISION: Final = "budgetguard.decision"
BREAKER: Final = "budgetguard.circuit_breaker.name"
COST: Final = "budgetguard.cost_usd"
ESTIMATED: Final = "budgetguard.usage.estimated"

TRIP_EVENT: Final = "budgetguard.trip"
WARNING_EVENT: Final = "budgetguard.warning"

TOKEN_BUCKETS: Final = [float(4**power) for power in range(14)]
"""The boundaries that the conventions give for tokens."""
DURATION_BUCKETS: Final = [0.01 * 2**power for power in range(14)]
"""The boundaries that the conventions give for the duration of an operation, in seconds."""
RUN_BUCKETS: Final = [1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0]
"""Runs take from seconds to a day."""

_PROVIDERS: Final = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "aws": "aws.bedrock",
    "google": "gcp.gen_ai",
    "mistral": "mistral_ai",
    "x-ai": "x_ai",
}


def provider_name(provider: str) -> str:
    """Return a provider as the conventions call it."""
    return _PROVIDERS.get(provider, provider)
