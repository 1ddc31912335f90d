"""Jobs around a stand-in for the stages: what is done stays done, what fails says why and stops nobody."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import eval.jobs as jobs
from conf.cli import INTERRUPTED
from conf.compose import load
from conf.errors import ConfigError
from eval.bench_drafters import drafter_jobs
from eval.job_plan import Job, Plan
from eval.jobs import JobProgress, run_jobs

TINY = ["experiment=tiny", "tracking.wandb=off"]


class Stages:
    """Stands for run_stage: leaves what a stage leaves, ends with the code that its drafter is given."""

    def __init__(self) -> None:
        self.started: list[tuple[str, str]] = []
        self.codes: dict[str, int] = {}
        self.said = "thinking\nerror: the taps are missing; choose others\n"

    def __call__(self, package: str, overrides: Sequence[str], log: Path | None = None) -> int:
        told = dict(override.split("=", 1) for override in overrides)
        folder = Path(told["run_dir"].strip("'"))
        self.started.append((package, folder.name))
        assert log is not None
        log.write_text(self.said)
        made = {"train": ["drafter/drafter.json", "timing/train.json"], "eval": ["report.json"]}[package]
        for name in made:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps({"seed": told["seed"]}))
        return self.codes.get(f"{package} {folder.name}", 0)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    stand_in = Stages()
    monkeypatch.setattr(jobs, "run_stage", stand_in)
    return stand_in


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., tuple[list[Job], Path]]:
    """Jobs in tmp_path/run over a store with a manifest."""

    def make(*more: str) -> tuple[list[Job], Path]:
        overrides = [*TINY, f"run_dir={tmp_path / 'run'}", *more]
        cfg = load("bench_drafters", overrides)
        plan = Plan.of(cfg, overrides, "drafters", "compare")
        plan.store.mkdir(parents=True, exist_ok=True)
        (plan.store / "manifest.json").touch()
        return drafter_jobs(cfg, plan), plan.store

    return make


def outcomes(made: tuple[list[Job], Path], progress: Any = None) -> list[str | None]:
    some, store = made
    return [outcome.error for outcome in run_jobs(some, store, progress or JobProgress(some))]


def test_jobs_are_every_kind_objective_and_seed(planned: Any) -> None:
    some, store = planned(
        "compare.kinds=[ngram,hydra,lm]", "compare.objectives=[lk,forward_kl]", "compare.objective_kinds=[hydra,ngram]",
        "compare.seeds=[0,7]", "compare.train_time=20s", "seed=3", "bench.prompts=2",
    )  # fmt: skip
    assert [job.folder.name for job in some] == [
        "ngram-s0", "hydra-lk-s0", "hydra-lk-s7", "lm-lk-s0", "lm-lk-s7", "hydra-forward_kl-s0", "hydra-forward_kl-s7"
    ]  # fmt: skip
    lookup, hydra, other = some[0], some[1], some[6]
    assert lookup.labels["objective"] is None and lookup.likely_seconds < hydra.likely_seconds
    assert (hydra.cfg.target.id, hydra.cfg.drafter.num_heads, hydra.cfg.optim.max_time) == ("tiny", 4, "20s")
    assert (other.cfg.objective.kind, other.cfg.seed, other.cfg.bench.prompts) == ("forward_kl", 7, 2)
    evaluation = load("evaluate", other.evaluate)
    assert evaluation.seed == 3 and evaluation.bench == other.cfg.bench and evaluation.run_dir == other.cfg.run_dir
    assert {job.cfg.data.store for job in some} == {str(store)} and len({job.cfg.bench.texts for job in some}) == 1
    assert hydra.cfg.bench.temperatures == [0.0] and hydra.cfg.bench.replayed_prompts > 0


def test_what_a_comparison_needs_of_its_evaluation_is_refused_before_anything_runs(planned: Any) -> None:
    for wrong in ("bench.temperatures=[1]", "bench.replayed_temperatures=[1]", "bench.replayed_prompts=0"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            planned(wrong)
    with pytest.raises(ConfigError, match="experiment"):
        planned("compare.kinds=[hidra]")


def test_what_is_done_and_valid_is_not_done_again(planned: Any, stages: Stages, capsys: Any) -> None:
    kinds = "compare.kinds=[ngram,hydra]"
    assert outcomes(planned(kinds)) == [None, None]
    assert stages.started == [(p, j) for j in ("ngram-s0", "hydra-lk-s0") for p in ("train", "eval")]
    stages.started.clear()
    assert outcomes(planned(kinds)) == [None, None] and stages.started == []
    assert capsys.readouterr().out.count("done already") == 2
    some, store = planned(kinds)
    (some[1].folder / "report.json").write_text("{}")
    assert outcomes((some, store)) == [None, None] and {name for _, name in stages.started} == {"hydra-lk-s0"}
    stages.started.clear()
    assert outcomes(planned(kinds, "optim.lr=0.5")) == [None, None] and len(stages.started) == 4
    stages.started.clear()
    (store / "manifest.json").write_text("more rows")
    assert outcomes(planned(kinds, "optim.lr=0.5")) == [None, None] and len(stages.started) == 4


def test_one_that_fails_says_why_and_the_others_go_on(planned: Any, stages: Stages, capsys: Any) -> None:
    stages.codes = {"train ngram-s0": 2, "eval hydra-lk-s0": -9}
    kinds = "compare.kinds=[ngram,hydra,lm]"
    assert outcomes(planned(kinds)) == [
        "train: the taps are missing; choose others", "eval was ended by signal 9 (9: often out of memory)", None
    ]  # fmt: skip
    assert ("eval", "ngram-s0") not in stages.started and ("eval", "lm-lk-s0") in stages.started
    assert "[1/3] ngram, 0: FAILED: train: the taps" in capsys.readouterr().out
    stages.codes, stages.started = {}, []
    assert outcomes(planned(kinds)) == [None, None, None]  # only what failed is tried again
    assert {name for _, name in stages.started} == {"ngram-s0", "hydra-lk-s0"}


def test_an_interrupted_stage_ends_the_comparison(planned: Any, stages: Stages) -> None:
    stages.codes = {"train hydra-lk-s0": INTERRUPTED}
    with pytest.raises(KeyboardInterrupt, match="hydra, lk, 0; the same command goes on"):
        outcomes(planned("compare.kinds=[ngram,hydra,lm]"))
    assert ("train", "lm-lk-s0") not in stages.started


def test_the_time_left_follows_the_time_taken(planned: Any, stages: Stages, capsys: Any) -> None:
    some, store = planned("compare.kinds=[ngram,medusa,hydra]", "compare.train_time=150s")
    assert [job.likely_seconds for job in some] == [150.0, 300.0, 300.0]
    times = iter([0.0, 75.0, 75.0, 225.0, 225.0, 375.0])  # twice as fast as expected
    outcomes((some, store), JobProgress(some, clock=lambda: next(times)))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "[1/3] ngram, 0: about 2:30 min; all in about 12:30 min"
    assert said[1] == "[1/3] ngram, 0: done in 1:15 min"
    assert said[2] == "[2/3] medusa, lk, 0: about 2:30 min; all in about 5:00 min"
