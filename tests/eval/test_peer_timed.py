"""The same time of training for ours and for economize's: what its job is told, its figures by hand, the command around
a stand-in, and the library itself where its environment was made."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from stages import in_process
from stores import fill

from conf.compose import load
from data.loader import Loader
from data.prompt import Prompt
from eval import jobs, peer_economize
from eval.bench_peers import run
from eval.benchmarks import Benchmark
from eval.environments import PEERS, Environment
from eval.peer_economize import batches, config_of, figures
from eval.peer_timed import show_timed, told

SMALL = [
    "experiment=tiny", "tracking.wandb=off", "peers.kinds=[]", "peers.speculators=false", "peers.train_time=0.5s",
    "data.response_tokens=600", "checkpoint.choose_prompts=3", "bench.prompts=3", "bench.max_new_tokens=12",
    "bench.replayed_prompts=3", "bench.lossless_draws=100", "bench.bootstrap=50",
]  # fmt: skip


def bench(folder: Path, kinds: str) -> dict[str, Any]:
    overrides = [*SMALL, f"run_dir={folder}", f"peers.economize=[{kinds}]"]
    run(load("bench_peers", overrides), overrides)
    found: dict[str, Any] = json.loads((folder / "bench_peers.json").read_text())
    return found


def test_its_batches_are_ours_with_the_response_in_the_loss(tmp_path: Path) -> None:
    store = fill(tmp_path / "store", [5, 9, 3, 12, 4, 7])
    cfg = load("train", ["optim.batch_tokens=24"])
    rows, steps = batches(cfg, store)
    loader = Loader(store, batch_tokens=24, seed=0)
    assert len(steps) == loader.steps_per_epoch
    for step in steps:
        batch = next(loader)
        assert [rows[i]["ids"] for i in step] == [
            ids[:n] for ids, n in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)
        ]
        assert [rows[i]["start"] for i in step] == batch.starts.tolist()


@pytest.mark.parametrize("layers, target, last", [(24, 16, 17), (30, 20, 21), (2, 1, 2), (8, 5, 6)])
def test_a_jump_is_the_one_it_reports_as_best_in_proportion(layers: int, target: int, last: int) -> None:
    config = config_of("jump", layers, [1, 2])
    assert (config["target_layer"], config["source_layer"], config["exit_layer"]) == (target, last, last)
    assert config_of("eagle3", layers, [1, 2]) == {"draft_vocab": 2} and config_of("eagle3", layers, None) == {}


def test_its_figures_are_computed_as_ours() -> None:
    prompts = [Prompt(str(i), category, "s", ("x",)) for i, category in enumerate("aab")]
    runs = [
        {"tokens": n, "plain_tokens": n, "rounds": r, "seconds": s, "plain_seconds": p, "identical": True}
        for n, r, s, p in ((20, 10, 1.0, 2.0), (10, 10, 1.0, 1.0), (30, 10, 1.5, 3.0))
    ]
    found = figures({"cycle_length": 4, "runs": runs}, Benchmark("s", prompts, False), 50, 0)
    assert found["tau_t0"] == pytest.approx((30 / 20 + 3.0) / 2) and found["num_spec_tokens"] == 3
    assert found["speedup"] == pytest.approx(((0.1 + 0.1) / (0.05 + 0.1) + 2.0) / 2)
    assert found["tokens_per_s"] == pytest.approx(60 / 3.5) and found["plain_tokens_per_s"] == pytest.approx(10.0)
    assert found["identical"] == 3


def stand_in(
    python: Path, script: Path, job: dict[str, Any], place: Path, name: str, settings: Mapping[str, str]
) -> dict[str, Any]:
    """Stands for the library: every round has two tokens; its medusa can't be trained."""
    if job["kind"] == "medusa":
        return {"why": "RuntimeError: no heads"}
    run = {"tokens": 10, "plain_tokens": 10, "rounds": 5, "seconds": 1.0, "plain_seconds": 2.0, "identical": True}
    return {"version": "9.9", "cycle_length": 3, "runs": [run for _ in job["prompts"]]}


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "run_stage", in_process)
    monkeypatch.setattr(Environment, "python", lambda own: own.folder / "bin/python")
    monkeypatch.setattr(peer_economize, "run_job", stand_in)


def test_ours_and_theirs_stand_side_by_side(tmp_path: Path, without_processes: None, capsys: Any) -> None:
    found = bench(tmp_path, "lookup,medusa")
    said = capsys.readouterr().out
    ours, theirs, medusa, none = found["timed"]
    assert (ours["peer"], ours["kind"]) == ("draftsmith", "ngram")
    assert (theirs["peer"], theirs["kind"]) == ("economize 9.9", "lookup")
    assert theirs["tau_t0"] == 2.0 and theirs["speedup"] == 2.0 and theirs["tokens_per_s"] == 10
    assert theirs["tau_t0_ratio"] == pytest.approx(ours["tau_t0"] / 2)
    assert theirs["tokens_per_s_ratio"] == pytest.approx(ours["tokens_per_s"] / 10)
    assert medusa["kind"] == "medusa" and medusa["steps"] > 0 and medusa["parameters"] > 0 and medusa["tau_t0"] >= 1
    assert none["failed"].startswith("RuntimeError: no heads; see ") and found["rows"] == []
    assert "ours over economize 9.9's lookup: " in said and "economize's medusa failed: RuntimeError" in said
    assert said.splitlines()[-1] == str(tmp_path / "bench_peers.json")


def test_one_of_ours_that_fails_leaves_its_peer_out(
    tmp_path: Path, without_processes: None, capsys: Any
) -> None:
    found = bench(tmp_path, "eagle3")  # the tiny target has too few layers for its taps
    ours, theirs = found["timed"]
    assert "taps" in ours["failed"] and theirs["failed"] == "it learns what our eagle3 does, which failed"
    assert told(ours) in capsys.readouterr().out


def test_a_table_without_rows_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show_timed([{"peer": "a", "kind": "b", "failed": "c"}], Console(width=100))
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.skipif(not PEERS.ready, reason="make bench-peers makes .venv-peers")
def test_the_library_itself_trains_and_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "run_stage", in_process)
    found = bench(tmp_path, "medusa,lookup")
    for row in found["timed"][1::2]:
        assert "failed" not in row, row
        assert row["peer"].startswith("economize 0.3") and row["identical"] == 3 and row["tokens_per_s"] > 0
        assert row["tau_t0"] >= 1.0 and bool(row["steps"]) == (row["kind"] == "medusa")
