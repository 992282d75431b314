"""`budgetguard report`: its figures, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from decimal import Decimal

import pytest
from werkzeug import Response

from budgetguard_core import Guard, JsonLinesSink
from budgetguard_core.kit import ModelCall, TokenUsage, ToolCall, end_run
from budgetguard_core.ledger import Ledger
from run_logs import COST_OF_A_CALL, finalized, in_attempts, write

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: the page was not looked at")


@pytest.fixture
def log(tmp_path):
    with Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}", daily_model_calls=1000) as ledger:
        write(tmp_path / "one.jsonl", tenant="acme", ledger=ledger)
    return tmp_path / "one.jsonl"


@pytest.fixture
def figures(budgetguard, log):
    done = budgetguard("report", log, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_stops_near_misses_spend_and_burn_down(figures):
    assert dict(figures["statuses"]) == {
        "terminated": 1,
        "completed": 1,
        "failed": 1,
        "not ended": 1,
    }
    assert figures["reasons"] == [["max_iterations", 1]]
    assert figures["near"] == [["near", "max_iterations", "90%", "quick_qa"]]
    assert [row[0] for row in figures["runs"]] == ["killed", "failed", "near", "stopped"]
    assert figures["trees"][-1].startswith("run stopped: terminated, max_iterations")
    assert {(row[3], row[4]) for row in figures["runs"]} == {
        ("gpt-4o", "research"),
        ("gpt-4o", "quick_qa"),
    }
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d to ", figures["about"])
    # Spend by each of these is the same sum.
    total = float((5 + 9 + 1 + 2) * Decimal(COST_OF_A_CALL))
    for part in ("days", "tenants", "profiles", "models", "tools"):
        assert sum(amount for _, amount in figures[part]) == pytest.approx(total), part
    assert figures["tenants"][0][0] == "acme"
    # The burn-down ends where the cap does.
    burns = {one["dimension"]: one for one in figures["burn"]}
    assert set(burns) == {"max_iterations", "max_cost_usd"}
    (stopped,) = [run for run in burns["max_iterations"]["runs"] if run["stopped"]]
    assert (stopped["y"][0], stopped["y"][-1]) == (100, 0)
    assert stopped["x"] == sorted(stopped["x"])


@pytest.mark.slow
def test_a_last_answer_is_in_the_row_and_in_the_sums(budgetguard, tmp_path):
    with JsonLinesSink(tmp_path / "log.jsonl") as sink:
        finalized(sink)
    figures = json.loads(budgetguard("report", tmp_path / "log.jsonl", "--json").stdout)
    (row,) = figures["runs"]
    assert row[2] == "terminated, max_iterations, last answer"
    # The same amount wherever it is written, to the last digit that counts.
    assert row[6] == figures["tiles"][2][0] == "$0.00975"
    # Nobody's tenant is no chart.
    assert figures["tenants"] == []
    for part in ("days", "models", "tools"):
        assert sum(amount for _, amount in figures[part]) == pytest.approx(0.00975), part


@pytest.mark.slow
def test_a_folder_of_logs_is_one_report(budgetguard, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    for name in ("a", "b"):
        write(folder / f"{name}.jsonl")
    figures = json.loads(budgetguard("report", folder, "--json").stdout)
    assert figures["tiles"][0] == ["8", "runs"]


def test_a_run_of_several_legs_is_one_run_and_paid_for_once(budgetguard, tmp_path):
    in_attempts(tmp_path)
    figures = json.loads(budgetguard("report", tmp_path, "--json").stdout)
    tiles = {name: value for value, name in figures["tiles"]}
    assert (tiles["runs"], tiles["tokens"]) == ("1", "3,000")
    assert figures["profiles"] == [["research", pytest.approx(3 * float(COST_OF_A_CALL))]]
    assert figures["statuses"] == [["completed", 1]]


@pytest.mark.slow
def test_errors_are_clear(budgetguard, log, tmp_path):
    cases = [
        ((tmp_path / "none.jsonl",), "No such file"),
        ((log, "-o", tmp_path / "no" / "such" / "folder.html"), "No such file"),
        ((tmp_path / "empty",), "holds no log"),
    ]
    (tmp_path / "empty").mkdir()
    for arguments, said in cases:
        done = budgetguard("report", *arguments)
        assert done.returncode == 2
        assert said in done.stderr.decode()
    log.write_bytes(log.read_bytes() + b"{broken}\n")
    done = budgetguard("report", log, "-o", tmp_path / "r.html")
    assert done.returncode == 1
    assert "1 line not read" in done.stderr.decode()
    assert (tmp_path / "r.html").exists()


def test_the_page_loads_nothing(budgetguard, log, tmp_path):
    page = tmp_path / "report.html"
    assert budgetguard("report", log, "-o", page).returncode == 0
    own = re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert not re.search(r"(?:src|href)\s*=|@import|url\(", own)
    assert "default-src 'none'" in own


@pytest.mark.slow
def test_a_name_in_a_log_cannot_end_the_script(budgetguard, tmp_path):
    with JsonLinesSink(tmp_path / "log.jsonl") as sink:
        Guard(run_id="</script><script>alert(1)</script>", sinks=[sink])
    page = tmp_path / "report.html"
    budgetguard("report", tmp_path / "log.jsonl", "-o", page)
    assert "</script><script>alert(1)" not in page.read_text()
    assert "\\u003c/script>" in page.read_text()


WRAP = """<!doctype html><body style="margin:0"><iframe src="/report" style="border:0;
width:{width}px;height:{height}px"></iframe><script>
const frame = document.querySelector("iframe");
const look = () => {{
  const page = frame.contentDocument;
  if (!page || !page.body || page.body.dataset.ready !== "yes") return setTimeout(look, 50);
  page.querySelectorAll("details").forEach((one) => {{ one.open = true; }});
  document.body.dataset.width = page.documentElement.scrollWidth;
  document.body.dataset.links = page.querySelectorAll("td a").length;
  document.body.dataset.trees = page.querySelectorAll("details pre").length;
  document.body.dataset.charts = page.querySelectorAll(".js-plotly-plot").length;
  document.body.dataset.rows = page.querySelectorAll("tr").length;
  const words = (all) => [...page.querySelectorAll(all)].map((one) => one.textContent).join(" ");
  document.body.dataset.amounts = words(".bartext");
  document.body.dataset.ticks = words(".xtick text");
  document.body.dataset.colour = page.defaultView.getComputedStyle(page.body).backgroundColor;
}};
look();
</script>"""


@browser
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize(("scheme", "setting"), [("dark", 0), ("light", 1)])
def test_the_page_in_a_browser(budgetguard, log, tmp_path, httpserver, width, scheme, setting):
    page = tmp_path / "report.html"
    assert budgetguard("report", log, "-o", page).returncode == 0
    html = page.read_text()
    height = 3000 if width == 400 else 1600  # all of it
    httpserver.expect_request("/report").respond_with_handler(
        lambda request: Response(html, content_type="text/html")
    )
    # A window is never as narrow as a phone, a frame in it is.
    httpserver.expect_request("/").respond_with_data(
        WRAP.format(width=width, height=height), content_type="text/html"
    )
    httpserver.expect_request("/favicon.ico").respond_with_data(b"")
    picture = tmp_path / f"report_{scheme}_{width}.png"

    def chromium(*options):
        return subprocess.run(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--blink-settings=preferredColorScheme={setting}",
                f"--window-size={max(width, 800)},{height}",
                "--virtual-time-budget=10000",
                *options,
                httpserver.url_for("/"),
            ],
            capture_output=True,
            timeout=120,
            check=True,
        ).stdout.decode()

    dom = chromium("--dump-dom")
    seen = dict(re.findall(r'data-(\w+)="([^"]*)"', dom.partition("<iframe")[0]))
    # Nothing is wider than the screen, every chart is drawn, and every run has its row.
    assert int(seen["width"]) == width
    assert int(seen["charts"]) == 9
    assert int(seen["links"]) == int(seen["trees"]) == 4
    assert int(seen["rows"]) == 2 + 1 + 4
    # The charts write amounts as the tables do, and runs are whole.
    assert "$0.05525" in seen["amounts"].split()
    assert "0.5" not in seen["ticks"].split()
    red = int(re.findall(r"\d+", seen["colour"])[0])
    assert red < 60 if scheme == "dark" else red > 200
    chromium(f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {request.path for request, _ in httpserver.log} <= {"/", "/report", "/favicon.ico"}


@pytest.mark.slow
def test_a_handoff_is_no_tool(budgetguard, tmp_path):
    with JsonLinesSink(tmp_path / "log.jsonl") as sink:
        guard = Guard(sinks=[sink])
        ticket = guard.admit_model_call(ModelCall(model="gpt-4o"))
        guard.settle_model_call(ticket, TokenUsage(10, 10))
        calls = [ToolCall(name="to_b", id="1", kind="handoff"), ToolCall(name="search", id="2")]
        for one in guard.admit_tool_calls(calls):
            guard.settle_tool_call(one, "x")
        end_run(guard, trip=None)
    figures = json.loads(budgetguard("report", tmp_path / "log.jsonl", "--json").stdout)
    assert figures["handoffs"] == [["to_b", 1]]
    assert {name for name, _ in figures["tools"]} == {"(handoffs)", "search"}
