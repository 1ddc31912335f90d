"""Runs: exact resume after a kill or a signal, when validations happen, which checkpoint wins."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import TRAINED, make_config
from killing import Killed, after_step, killed_after
from torch import Tensor

from conf.errors import UserError
from conf.schema import Eagle3Config, LmConfig, OptimConfig, RunConfig
from data.loader import Loader
from inference.drafters import build
from inference.target import Target
from train.checkpoint import Checkpoints
from train.epochs import Trainer, validation_steps


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in trainer.drafter.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


MEASURED = ("positions_per_s", "tokens_per_s", "memory")  # of the machine, not of the run


def without_times(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines(run_dir)]


@pytest.mark.parametrize("step", range(8))
def test_a_killed_run_resumes_bitwise(
    tmp_path: Path, make_trainer: Any, fake_validator: Any, step: int
) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.train(fake_validator)
    with killed_after(step):
        make_trainer(tmp_path / "killed").train(fake_validator)
    resumed = make_trainer(tmp_path / "killed")
    torch.manual_seed(99)  # another process would stand elsewhere
    resumed.train(fake_validator)
    assert same(weights(whole), weights(resumed))
    assert whole.state.loader == resumed.state.loader and whole.state.positions == resumed.state.positions
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "killed")


@pytest.mark.parametrize("step", [2, 6])
def test_with_recomputed_features_too(
    tmp_path: Path, make_trainer: Any, fake_validator: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    read = Loader._read
    monkeypatch.setattr(Loader, "_read", lambda self, entries: replace(read(self, entries), hidden=None))
    test_a_killed_run_resumes_bitwise(tmp_path, make_trainer, fake_validator, step)


@pytest.mark.parametrize("step", [2, 6])
def test_eagle3_on_its_own_tokens_too(
    tmp_path: Path, make_trainer: Any, config: Any, fake_validator: Any, step: int
) -> None:
    drafter = Eagle3Config(taps=[0, 1, 2], num_spec_tokens=2, unroll=2, draft_vocab_size=41, own_tokens=0.5)
    make = partial(make_trainer, cfg=config(drafter=drafter))
    test_a_killed_run_resumes_bitwise(tmp_path, make, fake_validator, step)


@pytest.mark.parametrize("name", TRAINED)
def test_every_kind_resumes_bitwise(
    name: str, tmp_path: Path, make_trainer: Any, config: Any, fake_validator: Any
) -> None:
    kind, options = TRAINED[name]
    drafter = make_config(kind, **options | {"dtype": "float32", "draft_vocab_size": 41})
    make = partial(make_trainer, cfg=config(drafter=drafter))
    test_a_killed_run_resumes_bitwise(tmp_path, make, fake_validator, 5)


def test_taps_beside_the_store_spare_the_target(
    tmp_path: Path, make_trainer: Any, config: Any, fake_validator: Any, monkeypatch: pytest.MonkeyPatch,
    tiny_target: Target,
) -> None:  # fmt: skip
    cfg = config(drafter=Eagle3Config(taps=[0, 1, 2], num_spec_tokens=2, unroll=2, draft_vocab_size=41))
    trainer = make_trainer(tmp_path / "kept", cfg)
    with monkeypatch.context() as patch:
        patch.setattr(tiny_target.base, "forward", lambda *_, **__: pytest.fail("the target ran"))
        trainer.train(fake_validator)
    recomputing = make_trainer(tmp_path / "recomputed", cfg)
    recomputing.loader.taps = None
    recomputing.train(fake_validator)
    kept, recomputed = ([line["loss"] for line in lines(t.run_dir) if "loss" in line] for t in (trainer, recomputing))
    assert kept == pytest.approx(recomputed, rel=0.02)  # bfloat16, and the noise of the forward


@pytest.mark.parametrize("signal_it", [interrupt, terminate])
@pytest.mark.parametrize("step", [1, 3, 5, 7])
def test_a_signal_saves_and_says_how_to_resume(
    tmp_path: Path, make_trainer: Any, fake_validator: Any, signal_it: Callable[[], None], step: int
) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.train(fake_validator)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="same command again to resume") as stop, after_step(step, signal_it):
        make_trainer(tmp_path / "run").train(fake_validator)
    assert f"after step {step + 1} of 8" in str(stop.value) and signal.getsignal(signal.SIGINT) is before
    resumed = make_trainer(tmp_path / "run")
    assert resumed.checkpoints.steps()[-1] == step + 1
    validator = fake_validator()
    resumed.train(lambda: validator)
    assert same(weights(whole), weights(resumed))
    assert validator.asked == [s for s in (4, 8) if s > step]


def test_the_noise_of_the_forward_matters_to_these_tests(
    tmp_path: Path, make_trainer: Any, fake_validator: Any
) -> None:
    a, b = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b")
    b.cfg.seed = 1  # only the random generators differ, not the loader
    a.train(fake_validator)
    b.train(fake_validator)
    assert not same(weights(a), weights(b))


def test_validations_and_the_best_checkpoint(tmp_path: Path, make_trainer: Any, fake_validator: Any) -> None:
    trainer = make_trainer(tmp_path)
    validator = fake_validator({0: 3.0, 4: 2.0, 8: 1.5})
    state = trainer.train(lambda: validator)
    assert validator.asked == [0, 4, 8] and state.step == 8
    best = trainer.checkpoints.best(state.validations)
    assert best is not None and best["step"] == 4  # the untrained drafter is no candidate
    assert trainer.checkpoints.steps() == [4, 8]
    logged = lines(tmp_path)
    assert [line["step"] for line in logged if "validation" in line] == [0, 4, 8]
    steps = [line for line in logged if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert len(steps[0]["alpha_per_pos"]) == 2 and 0 < steps[0]["alpha_per_pos"][0] < 1
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_the_best_survives_even_when_it_is_old(
    tmp_path: Path, make_trainer: Any, config: Any, fake_validator: Any
) -> None:
    cfg = config()
    cfg.checkpoint.validations, cfg.checkpoint.keep = 8, 1
    trainer = make_trainer(tmp_path, cfg)
    trainer.train(lambda: fake_validator({2: 5.0}))
    assert trainer.checkpoints.steps() == [2, 8]


@pytest.mark.parametrize("killed_at", [4, 8])
def test_a_kill_between_a_checkpoint_and_what_follows_from_it(
    tmp_path: Path, make_trainer: Any, config: Any, fake_validator: Any, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    cfg, taus = config(), {2: 2.0, killed_at: 3.0}
    cfg.checkpoint.validations, cfg.checkpoint.keep = 4, 1
    prune = Checkpoints.prune

    def die(self: Checkpoints, state: Any) -> None:
        if state.step == killed_at:
            raise Killed
        prune(self, state)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Checkpoints, "prune", die)
        make_trainer(tmp_path, cfg).train(lambda: fake_validator(taus))
    resumed = make_trainer(tmp_path, cfg)
    state = resumed.train(lambda: fake_validator(taus))
    best = resumed.checkpoints.best(state.validations)
    assert best is not None and (best["step"], best["tau"]) == (killed_at, 3.0)
    assert resumed.checkpoints.steps() == sorted({killed_at, 8})
    resumed.checkpoints.load_weights(killed_at, resumed.drafter)


def test_a_finished_run_does_nothing_more(tmp_path: Path, make_trainer: Any, fake_validator: Any) -> None:
    first = make_trainer(tmp_path)
    first.train(fake_validator)
    again = make_trainer(tmp_path)
    validator = fake_validator()
    again.train(lambda: validator)
    assert validator.asked == [] and same(weights(first), weights(again))


def test_another_configuration_is_refused(tmp_path: Path, make_trainer: Any, fake_validator: Any) -> None:
    make_trainer(tmp_path, identity={"optim.lr": 0.01}).train(fake_validator)
    with pytest.raises(UserError, match=r"optim\.lr \(checkpoint 0\.01, now 0\.02\)"):
        make_trainer(tmp_path, identity={"optim.lr": 0.02}).train(fake_validator)


def test_a_nan_ends_the_run_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, make_trainer: Any, fake_validator: Any
) -> None:
    trainer = make_trainer(tmp_path)

    def poison() -> None:
        next(trainer.drafter.parameters()).data.fill_(float("nan"))

    line = r"step 7: NaN or infinity.*first in parameter .*; the last good .*step-4: the same command.*store=.*store"
    with pytest.raises(UserError, match=line), after_step(5, poison):
        trainer.train(fake_validator)
    assert trainer.checkpoints.steps() == [0, 4]
    whole, resumed = make_trainer(tmp_path / "whole"), make_trainer(tmp_path)
    whole.train(fake_validator)
    assert resumed.train(fake_validator).step == 8 and same(weights(whole), weights(resumed))


class Clock:
    """Stands for the module `time`: every look at it takes `seconds`, so a step takes as long."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def monotonic(self) -> float:
        self.now += self.seconds
        return self.now


def on_the_clock(config: Any, max_time: str) -> RunConfig:
    cfg: RunConfig = config()
    cfg.optim.max_time, cfg.optim.max_steps, cfg.optim.epochs = max_time, None, 0.1
    return cfg


def test_a_run_on_the_clock_ends_with_its_time(
    tmp_path: Path, make_trainer: Any, config: Any, fake_validator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.loop.time", Clock(0.5))
    trainer, validator = make_trainer(tmp_path, on_the_clock(config, "4s")), fake_validator()
    state = trainer.train(lambda: validator)
    assert state.step == 8 and state.step_seconds == 4.0 and validator.asked == [0, 4, 8]
    assert state.tokens > state.positions / 2  # each response token is drafted by two heads at most
    rates = [line["lr"] for line in lines(tmp_path) if "lr" in line]
    assert rates[0] < 1e-6 and max(rates) == rates[1] and rates[-1] == pytest.approx(5e-4, rel=0.1)
    again = make_trainer(tmp_path, on_the_clock(config, "4s"))
    assert again.train(lambda: validator).step == 8 and validator.asked == [0, 4, 8]


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_killed_run_on_the_clock_has_the_time_it_had_left(
    tmp_path: Path, make_trainer: Any, config: Any, fake_validator: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr("train.loop.time", Clock(0.5))
    with killed_after(step):
        make_trainer(tmp_path, on_the_clock(config, "4s")).train(fake_validator)
    validator = fake_validator()
    state = make_trainer(tmp_path, on_the_clock(config, "4s")).train(lambda: validator)
    assert state.step == 8 and state.step_seconds == 4.0  # what the kill undid did not count
    assert [v["step"] for v in state.validations] == [0, 4, 8]


def test_steps_longer_than_a_validations_distance(
    tmp_path: Path, make_trainer: Any, config: Any, fake_validator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.loop.time", Clock(3.0))
    cfg = on_the_clock(config, "7s")
    cfg.checkpoint.validations = 8
    validator = fake_validator()
    state = make_trainer(tmp_path, cfg).train(lambda: validator)
    assert state.step == 3 and validator.asked == [0, 1, 2, 3]


def test_validation_steps() -> None:
    assert validation_steps(100, 4) == {0, 25, 50, 75, 100}
    assert validation_steps(2, 4) == {0, 1, 2}
    assert validation_steps(1, 4) == {0, 1}


def test_full_vocabulary_lm_trains_too(tmp_path: Path, tiny_target: Any, store: Any, accelerator: Any, config: Any,
                                       fake_validator: Any) -> None:  # fmt: skip
    cfg = config(drafter=LmConfig(layers=[0]), optim=OptimConfig(lr=3e-3, batch_tokens=64, max_steps=16, epochs=50))
    drafter = build(cfg.drafter, tiny_target)
    trainer = Trainer(cfg, tmp_path, tiny_target, drafter, Loader(store, batch_tokens=64, seed=0), accelerator, {})
    trainer.train(fake_validator)
    losses = [line["loss"] for line in lines(tmp_path) if "loss" in line]
    assert len(losses) == 16 and sum(losses[-4:]) < sum(losses[:4])
