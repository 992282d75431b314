"""The frameworks' own suites: where they come from, and what they need beside the framework."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suite:
    """A framework's own tests, as its source distribution holds them.

    Attributes:
        project: The name of the distribution.
        extra: The extra of BudgetGuard under which its tests run.
        ways: The ways in to try, each by its name in `ways.WAYS`.
        needs: What the suite needs beside the framework.
        tests: Its folders and files.
        sample: The files of the sample that CI takes.
        leave_out: Files that need a service, a key or a build that is not here.
        options: Options of pytest.
    """

    project: str
    extra: str
    ways: tuple[str, ...]
    needs: tuple[str, ...] = ()
    tests: tuple[str, ...] = ("tests",)
    sample: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


_GRAPH = ("langgraph.callback", "langgraph.bounded", "langgraph.activate")
_PYTEST = ("pytest-asyncio", "pytest-mock", "pytest-timeout", "syrupy")
_HTTP = ("http.install", "http.activate")

SUITES: dict[str, Suite] = {
    "langgraph": Suite(
        "langgraph",
        "langgraph",
        _GRAPH,
        needs=(
            *("pytest-mock", "pytest-timeout", "syrupy", "anyio", "httpx", "redis", "pycryptodome"),
            *("langgraph-checkpoint-sqlite", "langgraph-checkpoint-postgres", "psycopg[binary]"),
        ),
        sample=("tests/test_interruption.py", "tests/test_large_cases.py"),
    ),
    "langgraph-prebuilt": Suite(
        "langgraph-prebuilt",
        "langgraph",
        _GRAPH,
        needs=(*_PYTEST, "langgraph-checkpoint-sqlite", "langgraph-checkpoint-postgres", "redis"),
        sample=("tests/test_react_agent.py",),
    ),
    "langchain": Suite(
        "langchain",
        "langchain",
        (*_GRAPH, "langgraph.middleware"),
        needs=(
            *(*_PYTEST, "pytest-socket", "toml", "blockbuster", "langchain-tests"),
            *("langchain-openai", "pytest-benchmark"),
        ),
        tests=("tests/unit_tests/agents",),
        sample=("tests/unit_tests/agents/test_react_agent.py",),
    ),
    "openai-agents": Suite(
        "openai-agents",
        "openai-agents",
        ("openai_agents.hooks", "openai_agents.bounded_run", "openai_agents.activate"),
        needs=(
            *(*_PYTEST, "inline-snapshot", "aiosqlite", "cryptography", "fakeredis", "fastapi"),
            *("httpx", "websockets", "aiohttp", "SQLAlchemy[asyncio]", "redis", "pymongo"),
            *("litellm", "docker", "graphviz", "numpy"),
        ),
        sample=("tests/test_agent_runner.py", "tests/test_agent_runner_streamed.py"),
        leave_out=(
            *("tests/realtime", "tests/sandbox", "tests/voice", "tests/docs"),
            # They read files that are in the repository alone.
            *(
                f"tests/test_{name}.py"
                for name in (
                    "check_optional_truthiness",
                    "release_automation",
                    "released_api_contract",
                    "run_config",
                    "run_state_compatibility_corpus",
                    "update_rclone_pin",
                )
            ),
        ),
    ),
    "strands-agents": Suite(
        "strands-agents",
        "strands",
        ("strands.provider", "strands.activate"),
        needs=(*_PYTEST, "moto", "tenacity", "openai", "anthropic"),
        sample=(
            "tests/strands/agent/test_agent_cancellation.py",
            "tests/strands/agent/test_agent_limits.py",
        ),
        leave_out=("tests/strands/models", "tests/strands/bidi", "tests/strands/vended_tools"),
    ),
    "openai": Suite("openai", "http", _HTTP, needs=(*_PYTEST, "respx", "dirty-equals")),
    "anthropic": Suite(
        "anthropic",
        "http",
        _HTTP,
        needs=(
            *_PYTEST,
            "respx",
            "dirty-equals",
            "inline-snapshot",
            "anyio",
            "aiohttp",
            "http-snapshot",
            "hypothesis",
            "opentelemetry-sdk",
            "time-machine",
        ),
        # They ask a mock server that is built elsewhere.
        leave_out=("tests/api_resources",),
        # As its own options have it: its mocks are httpx's.
        options=("-p", "tests._alias_httpx"),
    ),
    "google-genai": Suite(
        "google-genai", "http", _HTTP, needs=_PYTEST, tests=("google/genai/tests",)
    ),
    "httpx": Suite(
        "httpx",
        "http",
        _HTTP,
        needs=(
            "trio",
            "trustme",
            "uvicorn",
            "chardet",
            "zstandard",
            "brotli",
            "h2",
            "socksio",
            "rich",
            "click",
        ),
        sample=("tests/client/test_client.py", "tests/models/test_responses.py"),
    ),
}
