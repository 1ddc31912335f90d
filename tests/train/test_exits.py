"""Exits are chosen by measured agreement and cost, once a run; exits and jumps train and resume like other drafters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from drafting import shake
from killing import killed_after

import train.exits as exits
import train.run as run_module
from conf.exits import Adaptation
from conf.schema import DrafterConfig, EarlyExitConfig, JumpConfig, ObjectiveConfig, OptimConfig
from data.store import Store
from inference.artifact import save_drafter
from inference.batch import Batch
from inference.decode import Request, Result
from inference.drafters import build
from inference.target import Target
from tiny import tiny_model
from train.exits import Forecast, LayerCosts, leading_runs, scaled, shortcut, spaced, speedup, states_of
from train.optim import build_optimizer
from train.prepare import make_drafter, with_exit
from train.step import Distillation, TrainView
from train.teacher import TargetTeacher
from train.validate import plain_answers

COSTS = LayerCosts(layer_one=1.0, layer_round=1.5, head_one=4.0, head_round=5.0, readout=0.5)
KINDS: dict[str, DrafterConfig] = {
    "exit": EarlyExitConfig(exit_layer=1, draft_vocab_size=41),
    "exit layers": EarlyExitConfig(exit_layer=1, layers=[-1], adaptation=Adaptation.lora, draft_vocab_size=41),
    "jump": JumpConfig(draft_vocab_size=41, unroll=3),
}


def test_a_rounds_cost_is_put_together() -> None:
    """10 layers, exit after 2, one layer past it, 3 draft tokens: 4 x 2 + 3 (1 + .5) + 8 x 1.5 + 5 against 14."""
    assert speedup(2, 0.0, COSTS, 10, 1, 3) == pytest.approx(14 / 29.5)
    assert speedup(2, 1.5, COSTS, 10, 1, 3) == pytest.approx(2.5 * 14 / 29.5)
    assert speedup(3, 1.5, COSTS, 10, 1, 3) < speedup(2, 1.5, COSTS, 10, 1, 3)


def test_at_most_so_many_exits_are_tried() -> None:
    assert spaced(range(1, 6), 16) == [1, 2, 3, 4, 5]
    assert spaced(range(1, 80), 4) == [1, 27, 53, 79] and spaced(range(1, 80), 1) == [1]


def test_leading_runs_are_the_tokens_accepted() -> None:
    g = torch.Generator().manual_seed(0)
    agree, lengths = torch.rand(5, 9, generator=g) < 0.7, torch.tensor([9, 2, 1, 6, 4])
    for gamma in (1, 3):
        total = 0
        for row, length in zip(agree.tolist(), lengths.tolist(), strict=True):
            for anchor in range(length - 1):
                for k in range(1, gamma + 1):
                    if anchor + k >= length or not row[anchor + k]:
                        break
                    total += 1
        assert leading_runs(agree, lengths, gamma) == total


def test_a_linear_shortcut_is_found() -> None:
    g = torch.Generator().manual_seed(1)
    states, true = torch.randn(400, 12, generator=g), torch.randn(12, 12, generator=g)
    last = scaled(states) @ true
    torch.testing.assert_close(scaled(states) @ shortcut(scaled(states), last), last, rtol=0.02, atol=0.02)


def test_states_are_those_that_predict_the_response(tiny_target: Target, batch: Batch) -> None:
    inner, last = states_of(tiny_target, batch, [1])
    assert batch.hidden is not None
    within = torch.arange(batch.response.shape[1]) < batch.response_lengths[:, None]
    torch.testing.assert_close(last[within], batch.hidden[within])
    read = tiny_target.read(batch.tokens, batch.lengths, (1,)).taps[0]
    for b, start in enumerate(batch.starts.tolist()):
        torch.testing.assert_close(inner[b, 0], read[b, start - 1])


def no_answers() -> list[Result]:
    """For who must not look at them."""
    raise AssertionError


def test_the_best_forecast_is_chosen_once(
    store: Store, tiny_target: Target, tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tried = [Forecast(1, 0.5, 1.1), Forecast(2, 1.0, 1.4), Forecast(3, 1.5, 1.3)]
    monkeypatch.setattr(exits, "forecasts", lambda *_: tried)
    cfg = config(drafter=EarlyExitConfig(draft_vocab_size=41))
    chosen = with_exit(cfg, tmp_path, tiny_target, store, list)
    assert chosen.drafter.exit_layer == 2 and cfg.drafter.exit_layer == "auto"
    assert "exit after layer 2 of 2 (forecasts: 1: 0.50 accepted, 1.10x, 2:" in capsys.readouterr().out
    assert [t["layer"] for t in json.loads((tmp_path / "exit.json").read_text())["tried"]] == [1, 2, 3]
    monkeypatch.setattr(exits, "forecasts", lambda *_: [Forecast(1, 0.1, 0.9)])
    assert with_exit(cfg, tmp_path, tiny_target, store, no_answers).drafter.exit_layer == 2
    other = config(drafter=EarlyExitConfig(draft_vocab_size=40))
    assert with_exit(other, tmp_path, tiny_target, store, list).drafter.exit_layer == 1
    assert capsys.readouterr().out.endswith("1: 0.10 accepted, 0.90x); no exit is forecast to pay here\n")
    for drafter in (EarlyExitConfig(exit_layer=1), EarlyExitConfig(folder="f"), JumpConfig()):
        untouched = config(drafter=drafter)
        assert with_exit(untouched, tmp_path, tiny_target, store, no_answers) is untouched


def test_a_warm_start_keeps_its_exit(tiny_target: Target, store: Store, tmp_path: Path, config: Any) -> None:
    earlier = EarlyExitConfig(exit_layer=1, draft_vocab_size=0)
    save_drafter(tmp_path / "earlier", build(earlier, tiny_target), earlier, tiny_target)
    cfg = config(drafter=EarlyExitConfig(draft_vocab_size=0, warm_start=str(tmp_path / "earlier")))
    chosen = with_exit(cfg, tmp_path / "run", tiny_target, store, no_answers)
    assert chosen.drafter.exit_layer == 1 and not (tmp_path / "run").exists()
    make_drafter(chosen, tiny_target, store)


@pytest.mark.parametrize("adapter", [True, False])
def test_forecasts_are_measured(store: Store, config: Any, adapter: bool) -> None:
    target = Target(tiny_model("llama", num_hidden_layers=4), None, "t", {})
    drafter = EarlyExitConfig(draft_vocab_size=0, adapter=adapter)
    plain = plain_answers(target, [Request([5, 9, 11, 5], "a", 10), Request([40, 3], "b", 10)])
    found = exits.forecasts(config(drafter=drafter), drafter, target, store, None, plain)
    assert [f.layer for f in found] == [1, 2, 3]
    assert all(0 <= f.accepted <= 3 and f.speedup > 0 for f in found)
    assert sum(f.accepted for f in found) > 0
    others = torch.tensor([i for i in range(128) if i not in {t for r in plain for t in r.tokens}])
    trimmed = exits.forecasts(config(drafter=drafter), drafter, target, store, others, plain)
    assert [f.accepted for f in trimmed] == [0, 0, 0]  # what the target says can't be drafted


def test_an_exit_without_anything_to_train_is_written_at_once(
    store: Store, tiny_target: Target, tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = EarlyExitConfig(exit_layer=1, adapter=False, draft_vocab_size=41)
    monkeypatch.setattr(run_module, "open_store", lambda *_: store)
    run_module.write_untrained(config(drafter=drafter), tmp_path, tiny_target)
    about = json.loads((tmp_path / "drafter" / "drafter.json").read_text())
    assert about["drafter"]["exit_layer"] == 1 and (tmp_path / "timing" / "train.json").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_lowers_the_loss(kind: str, tiny_target: Target, batch: Batch, accelerator: Accelerator) -> None:
    torch.manual_seed(0)
    ids = torch.arange(0, 123, 3)
    drafter = build(KINDS[kind], tiny_target, ids)
    shake(drafter, 0.5)  # an exit that goes through all layers has nothing to learn
    optim = OptimConfig(lr=1e-2, warmup=0.0)
    d = Distillation(
        tiny_target, drafter, accelerator.prepare(TrainView(drafter)), TargetTeacher(tiny_target, ids),
        build_optimizer(drafter, optim), accelerator, ObjectiveConfig(eta=3.0), optim, 12,
    )  # fmt: skip
    losses = [d.step(i, [batch])["loss"] for i in range(10)]
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_resumes_bitwise(
    kind: str, tmp_path: Path, make_trainer: Callable[..., Any], fake_validator: Any, config: Any
) -> None:
    cfg = config(drafter=KINDS[kind])
    whole = make_trainer(tmp_path / "whole", cfg)
    whole.train(fake_validator)
    with killed_after(5):
        make_trainer(tmp_path / "killed", cfg).train(fake_validator)
    resumed = make_trainer(tmp_path / "killed", cfg)
    torch.manual_seed(99)
    resumed.train(fake_validator)
    ours, theirs = (dict(t.drafter.named_parameters()) for t in (whole, resumed))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
