"""The search for layers: it finds those that make the target, keeps to its budget, and is made once a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conf.errors import ConfigError
from conf.schema import HydraConfig, Init, LmConfig
from data.loader import Loader
from data.store import Store
from inference.artifact import save_drafter
from inference.drafters import build
from inference.target import Target
from tiny import tiny_model
from train.cut import Search, chosen_layers, within
from train.objectives import Comparison
from train.outcome import training_identity
from train.prepare import make_drafter, with_layers
from train.step import Sums, count_positions

IDS = torch.tensor([0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, *range(90, 120)])


@pytest.fixture
def target() -> Target:
    """Five layers, of which numbers 1 and 3 alone change anything; without a tokenizer."""
    model = tiny_model("llama", num_hidden_layers=5)
    for index in (0, 2, 4):
        layer = model.model.layers[index]
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return Target(model, None, "five", {"weights_digest": "w"})


@pytest.fixture
def recomputed(store: Store, tmp_path: Path) -> Store:
    """The rows without hidden states: those were another target's."""
    rows = list(store.rows())
    bare = Store.create(tmp_path / "bare", {"features": "recompute"})
    bare.append(rows, None)
    return bare


def test_the_layers_that_make_the_target_are_found(
    recomputed: Store, target: Target, tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(drafter=LmConfig(init=Init.search, num_layers=2))
    found = with_layers(cfg, tmp_path, target, recomputed)
    assert found.drafter.layers == [1, 3] and cfg.drafter.layers == []
    *steps, line = capsys.readouterr().out.splitlines()
    assert [step.count("[") for step in steps] == [5, 4] and all(step.startswith("α of [") for step in steps)
    assert line.startswith("layers [1, 3] of 5: of 9 sets that were tried the nearest to the target, untrained (α ")
    assert "(α 1.000, agreement 1.000 over " in line and " of at most 200,000 tokens read)" in line
    written = json.loads((tmp_path / "layers.json").read_text())
    assert [len(t["layers"]) for t in written["tried"]] == [1] * 5 + [2] * 4
    assert chosen_layers(tmp_path) == [1, 3] and 0 < written["tokens"] <= 200_000


def test_it_is_made_once_a_run(
    recomputed: Store, target: Target, tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(drafter=LmConfig(init=Init.search, num_layers=1))
    first = with_layers(cfg, tmp_path, target, recomputed)
    again = with_layers(cfg, tmp_path / "other", target, recomputed)
    assert first.drafter == again.drafter
    monkeypatch.setattr(Search, "measure", lambda *_: pytest.fail("searched again"))
    assert with_layers(cfg, tmp_path, target, recomputed).drafter == first.drafter
    assert with_layers(cfg, tmp_path, target, recomputed, main=False).drafter == first.drafter
    fewer = recomputed.without({recomputed.table(0).key(0): len(recomputed.table(0).response(0))})
    two = config(drafter=LmConfig(init=Init.search, num_layers=2))
    for asked, rows in ((two, recomputed), (replace(cfg, seed=1), recomputed), (cfg, fewer)):
        with pytest.raises(pytest.fail.Exception):
            with_layers(asked, tmp_path, target, rows)


def test_other_drafters_and_named_layers_are_left_alone(
    store: Store, tiny_target: Target, tmp_path: Path, config: Any
) -> None:
    for drafter in (HydraConfig(), LmConfig(model="m", init=Init.search), LmConfig(folder="f", init=Init.search)):
        cfg = config(drafter=drafter)
        assert with_layers(cfg, tmp_path, tiny_target, store) is cfg
    for init, layers, expected in ((Init.even, [], [0, 1]), (Init.search, [-1], [1])):
        cfg = config(drafter=LmConfig(init=init, layers=layers))
        assert with_layers(cfg, tmp_path, tiny_target, store).drafter.layers == expected


def test_a_warm_start_keeps_the_layers_of_the_earlier_drafter(
    store: Store, tiny_target: Target, tmp_path: Path, config: Any
) -> None:
    earlier = LmConfig(layers=[1])
    save_drafter(tmp_path / "first", build(earlier, tiny_target), earlier, tiny_target)
    warm = LmConfig(init=Init.search, warm_start=str(tmp_path / "first"))
    assert with_layers(config(drafter=warm), tmp_path, tiny_target, store).drafter.layers == [1]
    other = config(drafter=LmConfig(layers=[0], warm_start=str(tmp_path / "first")))
    with pytest.raises(ConfigError, match=r"drafter.layers = \[0\] is not allowed; allowed: \[1\], those of dr"):
        with_layers(other, tmp_path, tiny_target, store)


@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "trimmed"])
def test_what_is_measured_is_what_the_cut_model_drafts(
    recomputed: Store, config: Any, ids: torch.Tensor | None
) -> None:
    target = Target(tiny_model("gemma3"), None, "windows", {})
    drafter = LmConfig(init=Init.search, draft_vocab_size=0 if ids is None else len(ids))
    search = Search(config(drafter=drafter), drafter, target, recomputed, ids)
    for layers in ([1], [0, 2]):
        cut = build(LmConfig(layers=layers, draft_vocab_size=drafter.draft_vocab_size), target, ids)
        sums = Sums.zeros(1, target.device)
        for batch, norms in search.batches:
            logits = cut.train_logits(batch).detach()
            part = (slice(None), slice(0, logits.shape[1]))
            comparison = Comparison(logits, search.teacher.at(batch, norms, part, 1))
            count_positions(sums, comparison, -comparison.log_alpha, batch.supervised(1))
        expected, found = sums.metrics(), search.measure(layers)
        assert found.alpha == pytest.approx(expected["alpha_per_pos"][0], rel=1e-4) and 0 < found.alpha < 1
        assert found.agreement == pytest.approx(expected["agreement_per_pos"][0])
        assert expected["positions"] == search.positions


def test_a_budget_bounds_what_all_sets_read_together(recomputed: Store) -> None:
    def loader() -> Loader:
        return Loader(recomputed, batch_tokens=16, seed=0)

    every = sum(batch.tokens.numel() for batch in loader().epoch())
    for budget in (400, 2000, 9 * every):
        batches = within(loader(), budget, 9)
        assert 0 < 9 * sum(batch.tokens.numel() for batch in batches) <= budget
    assert sum(batch.tokens.numel() for batch in batches) == every
    with pytest.raises(ConfigError, match=r"drafter.search_tokens = 9 is not allowed; allowed: \d+ or more: 9 sets"):
        within(loader(), 9, 9)


def test_the_run_trains_what_was_found(
    recomputed: Store, target: Target, tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = with_layers(config(drafter=LmConfig(init=Init.search, num_layers=1)), tmp_path, target, recomputed)
    drafter, own = make_drafter(cfg, target, recomputed)
    assert own == cfg.drafter and drafter.model.config.num_hidden_layers == 1
    identity = training_identity(cfg, target, recomputed, 1)
    assert identity["drafter.layers"] == cfg.drafter.layers
