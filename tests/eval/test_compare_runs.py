"""`make compare`: what is comparable and what is not, what is missing, and that the page shows it all."""

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conf.compose import load
from conf.errors import UserError
from conf.paths import write_json
from eval.compare_page import render
from eval.compare_runs import asked, read_runs, run, short, show
from eval.side_by_side import comparable, config_differences, side_by_side, verdict


def figures(length: float, speedup: float) -> dict[str, dict[str, Any]]:
    """acceptance and speed of one set at one temperature, with two categories."""
    acceptance = {
        "mean_acceptance_length": length, "ci95": [length - 0.1, length + 0.1], "draft_acceptance_rate": 0.4,
        "acceptance_rate_per_pos": [0.5, 0.25], "conditional_acceptance_rate_per_pos": [0.5, None],
    }  # fmt: skip
    speed = {
        "speedup": speedup, "speedup_ci95": [speedup - 0.05, speedup + 0.05], "tokens_per_s": 20.0,
        "baseline_tokens_per_s": 15.0,
    }  # fmt: skip
    parts = {c: {k: acceptance[k] for k in list(acceptance)[:3]} for c in ("qa", "code")}
    speeds = {"qa": {k: speed[k] for k in ("speedup", "speedup_ci95")}}
    speeds["code"] = {"speedup": None, "speedup_ci95": [None, None]}
    return {"acceptance": {**acceptance, "by_category": parts}, "speed": {**speed, "by_category": speeds}}


def make_report(length: float, speedup: float, **settings: Any) -> dict[str, Any]:
    """What the comparison reads of a report.json."""
    one = figures(length, speedup)
    return {
        "created": "2026-01-01T00:00:00+00:00", "versions": {"torch": "2"},
        "target": {"id": "org/<t>", "config_digest": "a", "weights_digest": "b", "tokenizer_digest": "c",
                   "template_digest": "d", "template_kwargs": {}, "dtype": "float32"},
        "drafter": {"kind": "hydra", "num_spec_tokens": 2, "parameters": 70,
                    "config": {"kind": "hydra", "num_heads": 2},
                    "training": {"steps": 9, "positions": 90, "store": {"response_tokens": 1234}}},
        "machine": {"processor": "cpu", "cores": 2, "system": "Linux", "threads": 2, "device": "cpu"},
        "settings": {"bench": {"acceptance": "exact"}, "objective": {"kind": "lk"}, "optim": {"lr": 0.001},
                     "data": None, "seed": 0, **settings},
        "lossless": {"greedy": None, "sampled": None},
        "acceptance": {"builtin": {"t0": one["acceptance"]}}, "speed": {"builtin": {"t0": one["speed"]}},
        "prompts": {"builtin": {"t0": "p"}},
        "timing": {"setup_s": None, "total_s": 60.0}, "memory": {"peak_bytes": 2 * 10**9, "cuda_peak_bytes": None},
        "disk": {"store_bytes": 3_000_000, "drafter_bytes": None},
    }  # fmt: skip


Changed = Callable[[dict[str, Any]], object]
CASES: dict[str, tuple[Changed, str]] = {
    "the same": (lambda r: None, "b is comparable with a"),
    "another target": (
        lambda r: r["target"].update(weights_digest="x"), "b is not comparable with a: another target (weights_digest)"
    ),
    "another dtype": (
        lambda r: r["target"].update(dtype="bfloat16"), "b is not comparable with a: another target (dtype)"
    ),
    "other prompts": (
        lambda r: r["prompts"]["builtin"].update(t0="q"), "b is not comparable with a: other prompts (builtin t0)"
    ),
    "prompts not told": (
        lambda r: r.pop("prompts"), "b is not comparable with a: other prompts (builtin t0)"
    ),
    "one set more": (
        lambda r: r["prompts"].update(mine={"t0": "m"}),
        "b is comparable with a on builtin t0 alone (other prompts: mine t0)",
    ),
    "another machine": (
        lambda r: r["machine"].update(cores=64),
        "b is comparable with a in tokens a round, not in speed: another machine (cores)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_may_be_compared_is_said_in_one_line(case: str) -> None:
    change, line = CASES[case]
    first, other = make_report(1.5, 1.2), make_report(1.7, 1.4)
    change(other)
    found = comparable(first, other)
    assert verdict("b", "a", found) == line
    assert found["speed"] == (line.startswith("b is comparable") and "not in speed" not in line)
    assert found["acceptance"] == line.startswith("b is comparable")


def test_reports_that_do_not_say_their_prompts_are_not_compared() -> None:
    first, other = make_report(1.5, 1.2), make_report(1.7, 1.4)
    del first["prompts"], other["prompts"]
    assert verdict("b", "a", comparable(first, other)).endswith("a report of an older version does not say which)")


def test_differing_settings_are_listed_with_every_runs_value() -> None:
    reports = {"a": make_report(1, 1), "b": make_report(1, 1, optim={"lr": 0.1}), "c": make_report(1, 1, seed=3)}
    reports["c"]["drafter"]["config"] = {"kind": "ngram"}
    assert config_differences(reports) == {
        "drafter.kind": {"a": "hydra", "b": "hydra", "c": "ngram"},
        "drafter.num_heads": {"a": 2, "b": 2, "c": None},
        "optim.lr": {"a": 0.001, "b": 0.1, "c": 0.001},
        "seed": {"a": 0, "b": 0, "c": 3},
    }


def test_figures_costs_and_sets_that_only_some_measured() -> None:
    reports = {"a": make_report(1.5, 1.2), "b": make_report(1.7, 1.4)}
    more = figures(2.0, 1.9)
    for section in ("acceptance", "speed"):
        reports["b"][section]["mine"] = {"t1": more[section]}
    found = side_by_side(reports)
    assert [(p["set"], p["temperature"], list(p["runs"])) for p in found["headline"]] == [
        ("builtin", "t0", ["a", "b"]), ("mine", "t1", ["b"])
    ]  # fmt: skip
    ours = found["headline"][0]["runs"]["b"]
    assert (ours["mean_acceptance_length"], ours["speedup"]) == (1.7, 1.4)
    assert ours["ci95"] == pytest.approx([1.6, 1.8])
    assert ours["by_category"]["qa"]["speedup"] == 1.4 and ours["acceptance_rate_per_pos"] == [0.5, 0.25]
    cost = found["costs"]["a"]
    assert (cost["total_s"], cost["response_tokens"], cost["store_bytes"]) == (60.0, 1234, 3_000_000)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Two evaluated runs, one that was only trained, one with a store alone, one that is empty."""
    write_json(tmp_path / "a" / "report.json", make_report(1.5, 1.2))
    write_json(tmp_path / "two words" / "report.json", make_report(1.7, 1.4, optim={"lr": 0.1}))
    (tmp_path / "trained" / "drafter").mkdir(parents=True)
    (tmp_path / "collected" / "store").mkdir(parents=True)
    (tmp_path / "begun").mkdir()
    write_json(tmp_path / "plan" / "report.json", {"created": "today"})
    return tmp_path


def test_the_page_and_the_figures_are_made_of_what_is_there(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["a", "trained", "collected", "begun", "nowhere", "plan"]
    monkeypatch.setenv("DRAFTSMITH_RUNS", " ".join(f"{folders}/{n}" for n in names) + f" '{folders}/two words/'")
    run(load("compare", [f"run_dir={folders / 'out'}"]))
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == str(folders / "out" / "compare.json")
    assert "two words is comparable with a" in out
    lines = dict(line.removeprefix(f"{folders}/").split(": ", 1) for line in err.splitlines())
    assert list(lines) == names[1:]
    assert lines["trained"].startswith("trained, but not evaluated") and "only a store" in lines["collected"]
    assert lines["nowhere"] == "no such run" and "no drafter and no store" in lines["begun"]
    assert "no acceptance, drafter" in lines["plan"]
    comparison = json.loads((folders / "out" / "compare.json").read_text())
    assert list(comparison["runs"]) == ["a", "two words"] and len(comparison["missing"]) == 5
    page = (folders / "out" / "compare.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "http:" not in page and "https:" not in page
    assert "1.70 [1.60, 1.80]" in page and "optim.lr" in page and "3.0 MB" in page and "no such run" in page


def test_a_name_can_be_a_pattern_or_a_report(folders: Path) -> None:
    cfg = load("compare", [])
    cfg.runs = [f"{folders}/[a-b]*", f"{folders}/a"]
    assert asked(cfg) == [f"{folders}/a", f"{folders}/begun"]
    found, missing = read_runs([f"{folders}/a/report.json"])
    assert found == {"a": folders / "a" / "report.json"} and missing == []
    assert short(["x/a", "y/a/report.json"]) == ["x/a", "y/a"] and short(["x/a", "y/b"]) == ["a", "b"]


@pytest.mark.parametrize("asked_for, line", [
    ("", "there is nothing to compare"), ("'runs/a", "RUNS can't be read"), ("nowhere", "no report to compare: nowhere")
])  # fmt: skip
def test_a_mistake_is_one_line(asked_for: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_RUNS", asked_for)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=line):
        run(load("compare", []))
    assert list(tmp_path.iterdir()) == []


def test_the_page_escapes_names_and_calls_lossy_lossy() -> None:
    reports = {"<a>": make_report(1.5, 1.2), "b": make_report(1.7, 1.4)}
    lossy = copy.deepcopy(reports["b"])
    lossy["settings"]["bench"] = {"acceptance": "typical"}
    reports["c"] = lossy
    comparison = side_by_side(reports) | {"missing": [], "reports": dict.fromkeys(reports, "x")}
    page = render(comparison)
    assert "<a>" not in page and "&lt;a&gt;" in page and "LOSSY" in page
    console = Console(file=io.StringIO(), record=True, width=160)
    show(comparison, console)
    assert "1.70 [1.60, 1.80]" in console.export_text()
