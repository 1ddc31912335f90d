"""`make bench-drafters` on the tiny target, its stages run in this process; rows and winners from hand-made figures."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from stages import in_process

import eval.jobs as jobs
from conf.compose import load
from conf.errors import ConfigError, UserError
from data.files import lock_folder
from eval.bench_drafters import lines, run, show
from eval.compare import Row, SeedResult, fastest, objective_gains, row_figures
from eval.replayed import Replayed

SMALL = [
    "experiment=tiny", "tracking.wandb=off", "compare.kinds=[ngram,hydra,eagle3]",
    "compare.train_time=0.5s", "data.response_tokens=600", "checkpoint.choose_prompts=3", "checkpoint.validations=1",
    "bench.prompts=7", "bench.max_new_tokens=12", "bench.replayed_prompts=7", "bench.lossless_draws=100",
    "bench.bootstrap=50",
]  # fmt: skip


def compare(folder: Path, *more: str) -> dict[str, Any]:
    overrides = [*SMALL, f"run_dir={folder}", *more]
    run(load("bench_drafters", overrides), overrides)
    figures: dict[str, Any] = json.loads((folder / "bench_drafters.json").read_text())
    return figures


def test_every_kind_is_a_row_and_one_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "run_stage", in_process)
    figures = compare(tmp_path)
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == str(tmp_path / "bench_drafters.json")
    rows = {(row["kind"], row["objective"]): row for row in figures["rows"]}
    assert list(rows) == [("ngram", None), ("hydra", "lk"), ("eagle3", "lk")]
    assert "eagle3 (lk), seed 0 failed: train: " in said and "taps" in rows["eagle3", "lk"]["failed"]["0"]
    hydra, lookup = rows["hydra", "lk"], rows["ngram", None]
    assert hydra["params"] > 1000 and hydra["train_tokens_per_s"] > 0 and hydra["seeds"] == [0]
    assert (lookup["params"], lookup["train_tokens_per_s"], lookup["conditional_acceptance_t0"]) == (0, None, [])
    assert len(hydra["conditional_acceptance_t1"]) == len(hydra["tau_t0_by_length"]) == 4
    assert hydra["tau_t0_by_length"][hydra["num_spec_tokens"] - 1] == hydra["tau_t0"]
    for row in (hydra, lookup):
        for key in ("tau_t0", "tau_t1", "speedup"):
            assert row[f"{key}_ci95"][0] <= row[key] <= row[f"{key}_ci95"][1]
        assert {"draft_cost", "speedup_predicted", "tokens_per_s"} <= row.keys()
        assert row["tau_t0"] == pytest.approx(row["tau_t0_live"])  # seven prompts both times, on the same target
    first, second = sorted((hydra, lookup), key=lambda row: row["speedup"], reverse=True)
    assert figures["default"] == figures["winner"]["kind"] == first["kind"]
    assert figures["winner"]["times_second"] == pytest.approx(first["speedup"] / second["speedup"])
    texts = tmp_path / "texts.jsonl"
    written, started = texts.read_bytes(), []

    def count(package: str, overrides: Sequence[str], log: Path | None = None) -> int:
        started.append(package)
        return in_process(package, overrides, log)

    monkeypatch.setattr(jobs, "run_stage", count)
    again = compare(tmp_path, "compare.kinds=[ngram,hydra]")
    assert started == ["data"] and texts.read_bytes() == written
    assert again["rows"] == [r for r in figures["rows"] if r["kind"] != "eagle3"]


def test_a_second_comparison_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with lock_folder(tmp_path, "comparison"), pytest.raises(UserError, match=r"another process \(comparison\)"):
        compare(tmp_path)


def test_a_comparison_without_any_figure_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "run_stage", in_process)
    with pytest.raises(UserError, match="no drafter could be measured"):
        compare(tmp_path, "compare.kinds=[eagle3]")
    with pytest.raises(ConfigError, match="drafter is not an option here"):
        compare(tmp_path, "drafter=hydra")


# From hand-made figures


def measured(seed: int, tau: float, alpha: float, speedup: float) -> SeedResult:
    """Six prompts of two categories; prompts differ, in the same way for everyone."""
    positions = {"": [(10.0, 10 * alpha)]}
    rounds = [{"length-1": (10.0, 10.0), "length-2": (10.0, 10.0 / (tau + 0.1 * i))} for i in range(6)]
    texts = [
        Replayed("builtin", t, "ab"[i % 2], f"{i}", rounds[i], positions) for t in (0.0, 1.0) for i in range(6)
    ]  # fmt: skip
    speeds = {"builtin": {c: [(1.0 + 0.2 * i, (1.0 + 0.2 * i) / speedup) for i in range(3)] for c in "ab"}}
    live = {"mean_acceptance_length": tau, "tokens_per_s": 30 * speedup, "baseline_tokens_per_s": 30.0}
    report = {
        "drafter": {"kind": "hydra", "num_spec_tokens": 2}, "acceptance": {"builtin": {"t0": live}},
        "speed": {"builtin": {"t0": live}},
        "forecast": {
            "cells": [{"set": "builtin", "temperature": 0.0, "predicted": 1.5}], "costs": {"t0": {"draft_cost": 0.1}}
        },
    }  # fmt: skip
    return SeedResult(seed, {"parameters": 5, "steps": 9, "tokens_per_s": 100.0}, report, {}, texts, speeds)


def row(kind: str, objective: str, *seeds: SeedResult) -> Row:
    return Row(kind, objective, seeds, {})


def test_a_row_is_the_mean_over_its_seeds() -> None:
    both = row_figures(row("hydra", "lk", measured(0, 1.4, 0.3, 1.2), measured(1, 1.6, 0.5, 1.3)), ["builtin"], 500, 0)
    assert both["tau_t0_by_seed"] == pytest.approx([both["tau_t0"] - 0.1, both["tau_t0"] + 0.1], abs=0.01)
    assert both["conditional_acceptance_t1"] == [pytest.approx(0.4)] and both["speedup"] == pytest.approx(1.25)
    assert both["tau_t1_by_length"] == [1.0, both["tau_t1"]]
    low, high = both["conditional_acceptance_t1_ci95"][0]
    assert (low, high) == pytest.approx((0.3, 0.5))  # prompts agree, seeds don't
    assert (both["draft_cost"], both["speedup_predicted"]) == (pytest.approx(0.1), 1.5)
    assert both["tau_alone_t0"] != both["tau_alone_t0"] and both["tau_alone_t0_by_seed"] == []  # no lookup: nan


def three() -> list[Row]:
    """One with the better τ, one that is faster, one that failed."""
    failed = Row("c", None, [], {0: "x"})
    return [row("a", "lk", measured(0, 2.0, 0.3, 1.2)), row("b", "lk", measured(0, 1.2, 0.3, 1.5)), failed]


def test_the_fastest_and_by_how_much_over_the_second() -> None:
    rows = three()
    winner = fastest(rows, "builtin", 200, 0)
    assert winner is not None and (winner["kind"], winner["second"]["kind"]) == ("b", "a")
    assert winner["times_second"] == pytest.approx(1.25) and winner["times_second_ci95"] == pytest.approx((1.25, 1.25))
    assert winner["tokens_per_s"] == pytest.approx(45.0)
    assert fastest(rows[:1], "builtin", 200, 0) is None


def test_objectives_are_compared_on_the_seeds_that_both_have() -> None:
    rows = [
        row("a", "forward_kl", measured(0, 1.4, 0.30, 1.2), measured(1, 1.6, 0.40, 1.2)),
        row("a", "lk", measured(0, 1.5, 0.32, 1.2), measured(1, 1.7, 0.42, 1.2), measured(2, 9.0, 0.9, 1.2)),
        row("b", "lk", measured(0, 1.5, 0.32, 1.2)),
    ]
    (gain,) = objective_gains(rows, "builtin", 300, 0)
    assert (gain["kind"], gain["objective"]) == ("a", "lk")
    assert gain["first_acceptance_t1_gain"] == pytest.approx(0.02)
    assert gain["first_acceptance_t1_gain_ci95"] == pytest.approx((0.02, 0.02))
    assert gain["tau_t0_gain"] == pytest.approx(0.1, abs=0.01)


def test_the_table_and_what_is_told_below_it() -> None:
    rows = three()
    figures = {
        "rows": [row_figures(r, ["builtin"], 50, 0) for r in rows], "winner": fastest(rows, "builtin", 50, 0),
        "objectives": [],
    }  # fmt: skip
    console = Console(record=True, width=210, file=io.StringIO())
    show(figures, console)
    said = console.export_text()
    assert "failed" in said and "1.50 [1.50, 1.50]" in said
    assert lines(figures) == [
        "fastest: b (lk), 1.50x plain decoding, about 45.0 tokens/s; 1.250 [1.250, 1.250] times the second, a (lk) "
        "(1.20x)",
        "c, seed 0 failed: x",
    ]  # fmt: skip
