"""A stopped run goes on elsewhere, and nothing that happens there changes its result."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hmac
import json
import multiprocessing
import queue
import socket
import stat
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from budgetguard_core import Budget, ConfigurationError
from budgetguard_core.handoff import Fallback, Folder, HandedOver, Handoff, Webhook
from budgetguard_core.kit import Envelope, ModelCall, Stop, TokenUsage

KEY = b"a secret of both sides, random"
SECRET = f"whsec_{base64.b64encode(KEY).decode()}"
MESSAGES = [
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "More."},
    {"role": "assistant", "content": "Two."},
]


def is_signed(headers, body):
    """As https://www.standardwebhooks.com says, with nothing of ours."""
    signed = f"{headers['Webhook-Id']}.{headers['Webhook-Timestamp']}.".encode() + body
    right = base64.b64encode(hmac.digest(KEY, signed, "sha256")).decode()
    return headers["Webhook-Signature"] == f"v1,{right}"


def stopped(handoff=None, messages=MESSAGES):
    run = Envelope(budget=Budget(max_iterations=1), on_outcome=handoff).open(run_id="../../run")
    while not isinstance(call := run.model_call(ModelCall()), Stop):
        run.answered(call, TokenUsage(100, 20))
    return run.end(messages, "This run was stopped.", next_step="call the model")


def delivered(*targets, **options):
    handoff = Handoff(*targets, **options)
    stopped(handoff)
    assert handoff.wait(30)
    return handoff


class Receiver:
    """A real server on loopback that answers as it is told, and keeps what it got."""

    def __init__(self, *codes):
        self.got = []
        codes = list(codes)
        got = self.got

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                got.append((self.path, dict(self.headers), body))
                code = codes.pop(0) if codes else 200
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/runs"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def test_a_folder_has_a_file_that_no_run_can_name(tmp_path):
    handoff = delivered(Folder(tmp_path / "runs"))
    assert not handoff.errors
    (file,) = (tmp_path / "runs").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = json.loads(file.read_text())
    assert found["run_id"] == "../../run"
    assert (found["status"], found["stop_reason"]) == ("terminated", "max_iterations")
    assert found["messages"] == MESSAGES
    assert found["next_step"] == "call the model"
    assert (found["version"], found["id"]) == (1, file.stem)


def test_a_queue_and_a_function_get_it_and_one_that_fails_keeps_nothing_from_the_others():
    def broken(_):
        raise LookupError("no such place")

    waiting, seen = queue.Queue(), []
    handoff = Handoff(broken, waiting, seen.append)
    outcome = stopped(handoff)
    assert handoff.wait(30)
    assert (outcome.status, outcome.errors) == ("terminated", ())
    assert waiting.get_nowait()["stop_reason"] == "max_iterations"
    assert seen[0].outcome == outcome
    assert list(handoff.errors) == ["broken: LookupError: no such place"]


def test_what_failed_is_logged_without_its_text(caplog):
    def broken(_):
        raise LookupError(SECRET)

    delivered(broken)
    assert "handoff of run '../../run' to broken failed: LookupError" in caplog.text
    assert SECRET not in caplog.text


def test_only_runs_of_the_statuses_are_handed_over():
    seen = []
    handoff = Handoff(seen.append)
    run = Envelope(budget=Budget(), on_outcome=handoff).open()
    run.end((), "Done.")
    assert handoff.wait(30)
    assert not seen
    handoff = Handoff(seen.append, statuses=("failed",))
    Envelope(budget=Budget(), on_outcome=handoff).open().fail(ValueError("no"))
    assert handoff.wait(30)
    assert seen[0].outcome.status == "failed"


def test_it_does_not_wait_for_the_delivery():
    begun, released = threading.Event(), threading.Event()

    def slow(_):
        begun.set()
        released.wait(60)

    handoff = Handoff(slow)
    stopped(handoff)
    assert begun.wait(30)
    assert not handoff.wait(0.01)
    released.set()
    assert handoff.wait(30)


def test_a_webhook_is_signed_and_tried_again_with_the_same_name():
    waits = []
    with Receiver(503, 429, 200) as receiver:
        assert not delivered(Webhook(receiver.url, SECRET, pause=waits.append)).errors
    assert waits == [0.5, 1.0]
    assert len({headers["Webhook-Id"] for _, headers, _ in receiver.got}) == 1
    _, headers, body = receiver.got[-1]
    assert is_signed(headers, body)
    assert not is_signed(headers, body + b" ")
    assert json.loads(body)["messages"] == MESSAGES


@pytest.mark.parametrize(("code", "calls"), [(400, 1), (302, 1), (500, 3)])
def test_what_is_refused_is_reported_and_no_redirection_is_followed(code, calls):
    with Receiver(*[code] * 5) as receiver:
        handoff = delivered(Webhook(receiver.url, SECRET, retries=2, pause=lambda _: None))
    assert len(receiver.got) == calls
    assert {path for path, _, _ in receiver.got} == {"/runs"}
    (error,) = handoff.errors
    assert f"HTTP Error {code}" in error


def test_a_fallback_goes_on_with_the_last_turns_under_its_own_budget():
    given, results = [], []

    def execute(messages, guard):
        given.append(messages)
        # It has forgotten to give the guard to its run, which is bounded all the same.
        run = Envelope(budget=Budget(max_iterations=9)).open()
        made = 0
        while not isinstance(call := run.model_call(ModelCall()), Stop):
            run.answered(call, TokenUsage(10, 1))
            made += 1
        return made, guard.usage.model_calls

    fallback = Fallback(
        execute,
        Budget(max_iterations=2),
        last=1,
        on_result=lambda handed, result: results.append((handed.outcome.run_id, result)),
    )
    handoff = delivered(fallback)
    assert not handoff.errors
    assert given == [[MESSAGES[0], MESSAGES[3]]]
    assert results == [("../../run", (2, 2))]
    assert Fallback(lambda *_: "Done.", Budget(max_iterations=1))(HandedOver(stopped())) == "Done."


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Handoff, "must have a target"),
        (lambda: Handoff(3), "a function or have put_nowait, got int"),
        (lambda: Handoff(asyncio.Queue()), "got an asyncio.Queue"),
        (lambda: Handoff(print, statuses=("done",)), "statuses must be among"),
        (lambda: Handoff(print, statuses="failed"), "statuses must be among"),
        (lambda: Webhook("http://example.com/", SECRET), "url must be https"),
        (lambda: Webhook("file:///etc/passwd", SECRET), "url must be https"),
        (lambda: Webhook("runs", SECRET), "got none"),
        (lambda: Webhook("https://example.com/", "short"), "24 or more bytes"),
        (lambda: Webhook("https://example.com/", SECRET, seconds=0), "seconds must be"),
        (lambda: Webhook("https://example.com/", SECRET, retries=-1), "retries must be"),
        (lambda: Fallback(print, Budget()), "Budget with a cap"),
    ],
    ids=range(12),
)
def test_what_makes_no_sense_is_refused(make, text):
    with pytest.raises(ConfigurationError, match=text):
        make()


def test_a_function_may_be_async_and_so_may_a_fallback():
    seen, results = [], []

    async def later(handed):
        await asyncio.sleep(0)
        seen.append(handed.id)
        raise LookupError("no such place")

    async def execute(messages, guard):
        await asyncio.sleep(0)
        run = Envelope(budget=Budget(max_iterations=9)).open()
        return isinstance(run.model_call(ModelCall()), Stop), guard.usage.model_calls

    keep = lambda _, result: results.append(result)  # noqa: E731 - one line is enough
    handoff = delivered(later, Fallback(execute, Budget(max_iterations=1), on_result=keep))
    assert len(seen) == 1
    assert list(handoff.errors) == ["later: LookupError: no such place"]
    assert results == [(False, 1)]


def test_a_fallback_gets_no_run_of_its_own():
    started, seen = [], []

    def execute(messages, guard):
        started.append(guard.run_id)
        if len(started) < 9:
            # With the same options, as an adapter that is installed has.
            stopped(handoff)

    handoff = Handoff(Fallback(execute, Budget(max_iterations=9)), seen.append)
    stopped(handoff)
    # Then for what the first ones have started.
    assert handoff.wait(30)
    assert handoff.wait(30)
    assert len(started) == 1
    assert len(seen) == 2


def test_a_forked_process_hands_over_too(tmp_path):
    handoff = delivered(Folder(tmp_path))
    child = multiprocessing.get_context("fork").Process(target=stopped, args=(handoff,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_that_ends_with_the_interpreter_is_handed_over(tmp_path):
    script = (
        "import atexit, sys\n"
        "from budgetguard_core import Budget\n"
        "from budgetguard_core.handoff import Folder, Handoff\n"
        "from budgetguard_core.kit import Envelope\n"
        "handoff = Handoff(Folder(sys.argv[1]), statuses=('completed',))\n"
        "def end():\n"
        "    Envelope(budget=Budget(max_iterations=1), on_outcome=handoff).open().end()\n"
        "atexit.register(end)\n"
        "end()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len([one for one in tmp_path.iterdir() if one.suffix == ".json"]) == 2


@dataclasses.dataclass
class Odd:
    artifact: object


def test_one_message_that_is_no_data_does_not_keep_back_the_others():
    itself: list[object] = []
    itself.append(itself)

    class Silent:
        def __str__(self):
            raise ValueError("no")

    odd = [
        Odd(object()),
        {("a", 1): {2}},
        itself,
        {"a": float("nan")},
        b"\xff",
        Silent(),
        "é\ud800",
    ]
    handed = HandedOver(stopped(messages=odd))
    plain = handed.to_json()["messages"]
    assert plain[0]["artifact"].startswith("<object")
    assert plain[1:4] == [{"a,1": [2]}, "[[...]]", {"a": None}]
    assert plain[5:] == ["Silent", "é\ud800"]
    json.dumps(plain, allow_nan=False)
    with Receiver() as receiver:
        Webhook(receiver.url, SECRET)(handed)
    ((_, headers, body),) = receiver.got
    assert is_signed(headers, body)
    assert json.loads(body)["messages"] == plain


def test_what_speaks_no_http_is_tried_again():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.recv(2**20)
                    connection.sendall(b"HELLO\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        waits = []
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        handoff = delivered(Webhook(url, SECRET, retries=1, pause=waits.append))
        thread.join(30)
    assert waits == [0.5]
    assert "BadStatusLine" in handoff.errors[0]


def test_no_proxy_gets_what_goes_to_this_machine(monkeypatch):
    with Receiver() as proxy, Receiver() as receiver:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert not delivered(Webhook(receiver.url, SECRET)).errors
    assert (len(receiver.got), proxy.got) == (1, [])


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hunter22@example.com/",
        "https://example.com/é",
        "https://example.com/ ?key=hunter22",
        "https://example.com/\n",
        "https://example.com:hunter22/",
        "https://example.com:99999/",
    ],
)
def test_a_url_that_would_be_in_an_error_is_refused_without_being_shown(url):
    with pytest.raises(ConfigurationError, match="url must") as refused:
        Webhook(url, SECRET)
    assert "hunter22" not in str(refused.value)
