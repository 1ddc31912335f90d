"""report.html, compare.html and sweep.html in a real browser, where one is installed: no error, no request, no sideways
scrolling on a phone, a slider that works."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from reports import make_report, make_sweep

from eval.compare_page import render as render_comparison
from eval.html import render
from eval.side_by_side import side_by_side
from eval.sweep_view import sweep_page
from eval.trace_view import Trace

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed ({', '.join(NAMES)})")

FLAGS = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # it has nobody to talk to, whatever it wants to say about itself
    "--enable-logging=stderr", "--virtual-time-budget=3000", "--window-size=1200,900", "--dump-dom",
)  # fmt: skip
PHONE = 375  # CSS pixels
# Says how wide the page is and what its sliders do; stands at the end of the page that is tried.
PROBE = """
const width=document.documentElement.scrollWidth;
const seen=s=>[...s.querySelectorAll('.round')].filter(r=>getComputedStyle(r).display!=='none').length;
const sections=[...document.querySelectorAll('section.generation')];
const moved=sections.map(s=>{const i=s.querySelector('input'),all=seen(s);i.value=1;i.oninput();
return [all,seen(s),s.querySelector('output').textContent,s.querySelectorAll('.now').length]});
console.log('probe '+JSON.stringify({inner:innerWidth,width,moved,
images:[...document.images].map(i=>i.complete&&i.naturalWidth>0)}));
"""
PIECES = [("accepted", " word"), ("rejected", " wurd"), ("bonus", " <b>&amp;")]


def seen(page: str, folder: Path) -> tuple[dict[str, Any], list[str], list[str]]:
    """(what the probe said, everything else on the console, addresses asked for) of a page on a phone."""
    (folder / "page.html").write_text(page.replace("</script></body>", f"{PROBE}</script></body>"), encoding="utf-8")
    phone = f"<iframe src='page.html' width='{PHONE}' height='800' style='border:0'></iframe>"
    (folder / "phone.html").write_text(f"<!doctype html>{phone}")
    root = ["--no-sandbox"] if os.geteuid() == 0 else []  # only that refuses to start for root
    logs = [f"--user-data-dir={folder / 'profile'}", f"--log-net-log={folder / 'net.json'}"]
    command = [str(BROWSER), *FLAGS, *root, *logs, (folder / "phone.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = re.findall(r"CONSOLE[:(]\d+\)?\] \"(.*)\", source: ", done.stderr)
    probes = [json.loads(line.removeprefix("probe ")) for line in said if line.startswith("probe ")]
    asked = requests(json.loads((folder / "net.json").read_text()))
    return (probes[0] if probes else {}), [line for line in said if not line.startswith("probe ")], asked


def requests(net: dict[str, Any]) -> list[str]:
    """Addresses that pages asked for, out of a network log; what the browser asks by itself has no origin."""
    start = net["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    jobs = [event["params"] for event in net["events"] if event["type"] == start and "params" in event]
    return sorted({job["url"] for job in jobs if job.get("initiator", "not an origin") != "not an origin"})


def full_report() -> dict[str, Any]:
    """A report with every part, long names included."""
    report = make_report()
    report["target"]["id"] = "organisation/" + "a-very-long-name-of-a-target" * 4
    report["commands"] = ["python -m conf distill 'run_dir=/" + "x" * 200 + "'"]
    report["curves"] = {
        "steps": [{"step": n, "loss": 1 / n, "alpha_per_pos": [0.1, 0.2]} for n in (1, 2, 3)],
        "validations": [{"step": 3, "tau": 1.5, "forecast_tau": 1.2, "alpha_per_pos": [0.2, 0.1]}],
    }
    return report


def test_the_report_works_in_a_browser_and_on_a_phone(tmp_path: Path) -> None:
    several = [[("note", "Why?\n")], *[PIECES] * 5]
    traces = [Trace("a title", several), Trace("x" * 90, [[("prefill", "y" * 200)], PIECES])]
    found, errors, asked = seen(render(full_report(), traces), tmp_path)
    assert errors == [] and asked == []
    assert found["inner"] == PHONE and found["width"] <= PHONE
    assert len(found["images"]) == 6 and all(found["images"])
    said = "round 1 of 5: 1 of 2 draft tokens accepted; 2 tokens so far"
    assert found["moved"][0] == [6, 2, said, 1]  # all were shown, then the prompt and the first round, marked
    assert found["moved"][1][:2] == [2, 2]


def test_a_comparison_works_in_a_browser_and_on_a_phone(tmp_path: Path) -> None:
    reports = {f"{letter}-{'long-name-' * 5}": {**make_report(), "created": "today"} for letter in "abc"}
    reports[next(iter(reports))]["settings"]["seed"] = 7
    comparison = side_by_side(reports)
    comparison |= {"missing": ["nowhere: no such run"], "reports": dict.fromkeys(reports, "/x/y.json")}
    found, errors, asked = seen(render_comparison(comparison), tmp_path)
    assert errors == [] and asked == []
    assert found["inner"] == PHONE and found["width"] <= PHONE and all(found["images"])


def test_a_sweep_works_in_a_browser_and_on_a_phone(tmp_path: Path) -> None:
    page = sweep_page(make_sweep((f"runs/{'long-name-' * 9}/drafter", "ngram")))
    found, errors, asked = seen(page, tmp_path)
    assert errors == [] and asked == []
    assert found["inner"] == PHONE and found["width"] <= PHONE and found["images"] == []


def test_a_page_that_asks_fails_and_scrolls_sideways_is_found_out(tmp_path: Path) -> None:
    """The checks themselves: what a browser says of a page that does all it should not."""
    bad = "<img src='http://127.0.0.1:9/x.png'><div style='width:900px'>wide</div><script>undefinedName;</script>"
    found, errors, asked = seen(f"<!doctype html><body>{bad}<script></script></body>", tmp_path)
    assert found["width"] >= 900 and found["images"] == [False]
    assert any("undefinedName is not defined" in line for line in errors)
    assert asked == ["http://127.0.0.1:9/x.png"]
