"""On-policy training: the drafter writes, the target scores, it learns, and a resumed run writes the same."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from drafting import shake
from killing import killed_after
from scipy.stats import chisquare

from conf.errors import ConfigError
from conf.schema import (
    HydraConfig,
    LmConfig,
    MedusaConfig,
    NgramConfig,
    ObjectiveConfig,
    ObjectiveKind,
    OptimConfig,
    RunConfig,
)
from inference.batch import Batch, make_batch
from inference.drafters import Drafter, build
from inference.drafters.lm import LmDrafter
from inference.target import Target
from train.loop import ON_POLICY
from train.on_policy import OnPolicy, is_due
from train.optim import build_optimizer
from train.step import Distillation, TrainView
from train.teacher import TargetTeacher

IDS = torch.arange(0, 128, 3)


def drafter_of(target: Target, **changes: Any) -> Drafter:
    torch.manual_seed(0)
    cfg = LmConfig(**{"layers": [0], "draft_vocab_size": len(IDS)} | changes)
    drafter = build(cfg, target, IDS if cfg.draft_vocab_size else None)
    shake(drafter, 0.1)
    return drafter


def policy(target: Target, drafter: Drafter, tokens: int = 6, share: float = 1.0) -> OnPolicy:
    return OnPolicy(ObjectiveConfig(on_policy=share, on_policy_tokens=tokens), target, drafter, seed=5)


def rows_of(batch: Batch) -> list[list[int]]:
    return [row[:n] for row, n in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("share, due", [(0.25, [3, 7, 11]), (0.4, [2, 4, 7, 9]), (1.0, list(range(12))), (0.0, [])])
def test_the_share_is_spread_evenly(share: float, due: list[int]) -> None:
    assert [n for n in range(12) if is_due(n, share)] == due
    assert sum(is_due(n, 0.3) for n in range(1000)) == 300


def test_rows_go_on_from_a_place_in_their_response(tiny_target: Target, batch: Batch) -> None:
    drafter = drafter_of(tiny_target, lookup=True)
    write, places = policy(tiny_target, drafter), set()
    for _ in range(20):
        ours = write(batch, 0)
        assert ours.hidden is None and ours.keys == [] and len(ours.tokens) == len(batch.tokens)
        kept = (ours.starts - batch.starts).tolist()  # response tokens before the first of ours
        for b, (text, row) in enumerate(zip(rows_of(batch), rows_of(ours), strict=True)):
            end = int(ours.starts[b]) + 1
            assert row[:end] == text[:end] and 0 <= kept[b] <= int(batch.response_lengths[b]) - 2
            assert ours.response[b, : len(row) - end + 1].tolist() == row[end - 1 :]
            written = row[end:]
            assert set(written) <= set(IDS.tolist()) and not set(written[:-1]) & tiny_target.eos_ids
            assert len(written) == 6 or written[-1] in tiny_target.eos_ids
            places.add((b, kept[b]))
    lengths = batch.response_lengths.tolist()
    assert len(places) > 0.8 * sum(n - 1 for n in lengths)
    assert policy(tiny_target, drafter, share=0.5)(batch, 0) is batch


def test_what_is_written_is_what_the_training_forward_says(tiny_target: Target, batch: Batch) -> None:
    """With logits so sharp that sampling is taking the best."""
    drafter = drafter_of(tiny_target, draft_vocab_size=0)
    assert isinstance(drafter, LmDrafter)
    head = drafter.lm.head
    drafter.lm.head = lambda hidden: 1e4 * head(hidden)  # type: ignore[method-assign]
    ours = policy(tiny_target, drafter, tokens=9)(batch, 0)
    best = drafter.train_logits(ours)[:, :, 0].argmax(-1)
    assert torch.equal(torch.where(ours.supervised(1)[..., 0], best, -1), _written(ours))


def _written(batch: Batch) -> torch.Tensor:
    return torch.where(batch.supervised(1)[..., 0], batch.response[:, 1:], -1)


def test_it_is_sampled_from_what_the_drafter_computes(tiny_target: Target) -> None:
    drafter = drafter_of(tiny_target)
    assert isinstance(drafter, LmDrafter)
    text, draws = [5, 9, 11], 3000
    one = make_batch([text[:-1]], [[text[-1], 0]])
    q = drafter.train_logits(one)[0, 0, 0].softmax(-1).detach()
    written = drafter.write([text] * draws, 1, torch.Generator().manual_seed(1))
    found = Counter(tokens[0] for tokens in written)
    observed = torch.tensor([found[i] for i in IDS.tolist()]).double()
    expected = draws * q.double() / q.double().sum()
    common = expected >= 5
    cells = [torch.cat([t[common], t[~common].sum()[None]]) for t in (observed, expected)]
    assert chisquare(*(cell.numpy() for cell in cells)).pvalue > 1e-4
    assert chisquare(cells[0].numpy(), cells[1].flip(0).numpy()).pvalue < 1e-6  # another law is seen


def test_no_text_outgrows_the_positions(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([[5, 9, 11], [4] * 9], [[7, 8, 9], [3, 5]])
    write = policy(tiny_target, drafter_of(tiny_target), tokens=50)
    monkeypatch.setattr(write, "context", 14)
    monkeypatch.setattr(write, "_ended", lambda tokens: tokens)
    assert int(write(batch, 0).lengths.max()) == 14


def distillation(target: Target, drafter: Drafter, accelerator: Accelerator, **settings: Any) -> Distillation:
    optim = OptimConfig(lr=3e-3, warmup=0.0)
    return Distillation(
        target, drafter, accelerator.prepare(TrainView(drafter)), TargetTeacher(target, drafter.draft_ids),
        build_optimizer(drafter, optim), accelerator, ObjectiveConfig(eta=3.0, **settings), optim, 40,
    )  # fmt: skip


def test_the_target_scores_what_was_written(tiny_target: Target, batch: Batch, accelerator: Accelerator) -> None:
    """The step's α is that of both stock models on the written text."""
    drafter = drafter_of(tiny_target)
    assert isinstance(drafter, LmDrafter)
    ours = policy(tiny_target, drafter)(batch, 0)
    alphas = []
    with torch.no_grad():
        for row, start in zip(rows_of(ours), ours.starts.tolist(), strict=True):
            p = tiny_target.model(input_ids=torch.tensor([row])).logits[0, start:-1].softmax(-1)[:, IDS]
            q = drafter.lm.model(input_ids=torch.tensor([row])).logits[0, start:-1].softmax(-1)
            alphas += torch.minimum(p, q).sum(-1).tolist()
    metrics = distillation(tiny_target, drafter, accelerator).step(0, [ours])
    assert metrics["positions"] == len(alphas)
    assert metrics["alpha_per_pos"][0] == pytest.approx(sum(alphas) / len(alphas), rel=1e-4)


@pytest.mark.parametrize("rank", [0, 2])
def test_it_learns_and_only_what_should(
    tiny_target: Target, batch: Batch, accelerator: Accelerator, rank: int
) -> None:
    drafter = drafter_of(tiny_target, lora_rank=rank)
    write, d = policy(tiny_target, drafter), distillation(tiny_target, drafter, accelerator)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    frozen = {name: p.clone() for name, p in tiny_target.model.state_dict().items()}
    losses = [d.step(i, [write(batch, i)])["loss"] for i in range(25)]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    changed = {name for name, p in drafter.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {n for n in before if ("lora_" in n if rank else "embed_tokens" not in n)}
    assert all(torch.equal(p, frozen[name]) for name, p in tiny_target.model.state_dict().items())


@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.parametrize("forgets", [False, True])
def test_a_killed_run_resumes_bitwise(
    step: int, forgets: bool, tmp_path: Path, make_trainer: Callable[..., Any], fake_validator: Any, config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Unless what was drawn is not remembered."""
    cfg = config(
        drafter=LmConfig(layers=[0], draft_vocab_size=41), objective=ObjectiveConfig(on_policy=0.5, on_policy_tokens=5)
    )
    whole = make_trainer(tmp_path / "whole", cfg)
    whole.train(fake_validator)
    with killed_after(step):
        make_trainer(tmp_path / "killed", cfg).train(fake_validator)
    resumed = make_trainer(tmp_path / "killed", cfg)
    if forgets:
        fresh = {ON_POLICY: resumed.on_policy.generator.get_state()}
        load = resumed.checkpoints.load
        monkeypatch.setattr(resumed.checkpoints, "load", lambda *args: load(*args) | fresh)
    torch.manual_seed(99)
    resumed.train(fake_validator)
    ours, theirs = (dict(t.drafter.named_parameters()) for t in (whole, resumed))
    same = all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert ours.keys() == theirs.keys() and same == (not forgets or step == 0)  # then nothing was saved but the start
    assert (whole.state.positions == resumed.state.positions) or forgets
    states = whole.checkpoints.load(8, whole.drafter, whole.distillation.optimizer, 0)
    assert torch.equal(states[ON_POLICY], whole.on_policy.generator.get_state())


def test_only_what_can_write_is_asked_to(config: Any) -> None:
    cfg = config(drafter=LmConfig(), objective=ObjectiveConfig(on_policy=1.0))
    assert replace(cfg, drafter=LmConfig(model="m", lookup=True)).objective.on_policy == 1.0
    for drafter in (HydraConfig(), MedusaConfig(), NgramConfig()):
        line = rf"objective.on_policy = 0.5 is not allowed; allowed: 0: only a separate .* drafter={drafter.kind} can"
        with pytest.raises(ConfigError, match=line):
            RunConfig(drafter=drafter, objective=ObjectiveConfig(on_policy=0.5))
    with pytest.raises(ConfigError, match=r"objective.ce_hard = True is not allowed; allowed: false beside obj"):
        ObjectiveConfig(on_policy=0.5, ce_hard=True)
    with pytest.raises(ConfigError, match=r"objective.kind = 'e2e_exact' is not allowed; allowed: e2e or"):
        ObjectiveConfig(on_policy=0.5, kind=ObjectiveKind.e2e_exact)
    with pytest.raises(ConfigError, match=r"objective.on_policy = 1.5 is not allowed; allowed: 0 \(never\) to 1"):
        ObjectiveConfig(on_policy=1.5)
