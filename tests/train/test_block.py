"""Training a block drafter: sampled anchors, what the Markov head is for, a confidence head that can be believed.

The target is a stock model whose layers are silent, so that it is exactly a table of what follows what.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from killing import killed_after
from torch import Tensor

import train.step as step_module
from conf.schema import BlockConfig, ObjectiveConfig, ObjectiveKind, OptimConfig, PositionWeights, RunConfig
from inference.acceptance import Counts
from inference.batch import Batch, make_batch
from inference.calibration import auc, expected_calibration_error, fit_temperature
from inference.decode import Decoder, Request
from inference.drafters import build
from inference.drafters.block import BlockDrafter
from inference.parity import check_parity, with_hidden
from inference.sampling import Sampling
from inference.target import Target
from tiny import tiny_model
from train.calibrate import calibrated, confidences
from train.objectives import Comparison, confidence_loss, objective
from train.optim import build_optimizer
from train.step import Distillation, TrainView
from train.teacher import TargetTeacher, shifted

V = 16
ALL = (slice(0, None), slice(0, 12))  # rows and anchors


def table(successors: Callable[[int], int]) -> Tensor:
    """[V, V]: row u is uniform over successors(u) random tokens."""
    g = torch.Generator().manual_seed(4)
    out = torch.zeros(V, V)
    for u in range(V):
        out[u, torch.randperm(V, generator=g)[: successors(u)]] = 1 / successors(u)
    return out


def table_target(p: Tensor) -> Target:
    """A stock Llama that says p[u] after u, whatever came before."""
    model = tiny_model("llama_untied", vocab_size=V, eos_token_id=None)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(V, 32))  # after the norm: one-hot times sqrt(32)
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :V] = (p + 1e-6).log().T / 32**0.5
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return Target(model, None, "table", {})


def texts(p: Tensor, rows: int, seed: int) -> Batch:
    """Prompts of one token and responses of 13, drawn from the table."""
    g = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(V, (rows,), generator=g)]
    for _ in range(13):
        tokens.append(torch.multinomial(p[tokens[-1]], 1, generator=g)[:, 0])
    all_rows = torch.stack(tokens, 1).tolist()
    return make_batch([r[:1] for r in all_rows], [r[1:] for r in all_rows], keys=[f"{seed}-{i}" for i in range(rows)])


def config(**changes: Any) -> BlockConfig:
    small: dict[str, Any] = {"draft_vocab_size": 0, "markov_rank": 16, "inner_size": 32, "num_anchors": 6, "taps": [1]}
    return BlockConfig(**small | changes)


def distillation(target: Target, accelerator: Accelerator, cfg: BlockConfig, **objective: Any) -> Distillation:
    torch.manual_seed(0)
    drafter = build(cfg, target)
    optim = OptimConfig(lr=1e-2, warmup=0.0)
    return Distillation(
        target=target, drafter=drafter, view=accelerator.prepare(TrainView(drafter)),
        teacher=TargetTeacher(target, None), optimizer=build_optimizer(drafter, optim), accelerator=accelerator,
        objective=ObjectiveConfig(**{"kind": ObjectiveKind.forward_kl} | objective), optim=optim, total=120,
    )  # fmt: skip


def trained(target: Target, accelerator: Accelerator, p: Tensor, cfg: BlockConfig, steps: int = 120) -> BlockDrafter:
    d = distillation(target, accelerator, cfg)
    d.total = steps
    d.drafter.train()
    for number in range(steps):
        d.step(number, [texts(p, 24, 100 + number)])
    assert isinstance(d.drafter, BlockDrafter)
    return d.drafter.eval()


def alphas(drafter: BlockDrafter, target: Target, batch: Batch) -> list[float]:
    """Teacher-forced conditional acceptance at each draft position."""
    batch = with_hidden(target, batch, drafter.taps)
    teacher = TargetTeacher(target, None)
    with torch.no_grad():
        logits = drafter.train_logits(batch)
    c = Comparison(logits, teacher.at(batch, teacher.norms(batch), ALL, 4))
    mask = batch.supervised(logits.shape[2])
    return [float(c.log_alpha.exp()[:, :, k][mask[:, :, k]].mean()) for k in range(logits.shape[2])]


# What the heads are for


def test_the_markov_head_knows_what_the_parallel_pass_cannot(accelerator: Accelerator) -> None:
    p = table(lambda u: 2)
    target = table_target(p)
    with_head, without = (trained(target, accelerator, p, config(markov_rank=rank)) for rank in (16, 0))
    held_out = texts(p, 40, 1)
    a, b = alphas(with_head, target, held_out), alphas(without, target, held_out)
    assert min(a[0], b[0]) > 0.9  # the first token needs only the anchor
    assert all(x > 0.85 and x > y + 0.2 for x, y in zip(a[1:], b[1:], strict=True)), (a, b)
    taus = []
    for drafter in (with_head, without):
        counts, sampling = Counts(), Sampling(1.0)
        loop = Decoder(target, drafter, sampling=sampling, batch=8, num_spec_tokens=4)
        for result in loop.run([Request([u % V], max_new_tokens=25) for u in range(24)]):
            counts.add(result.rounds)
        taus.append(counts.mean_acceptance_length)
        assert check_parity(target, drafter, [[3, 5], [9]]).ok
    assert taus[0] > taus[1] + 0.8, taus


def test_the_confidence_head_ranks_and_is_calibrated_on_texts_it_was_not_calibrated_on(
    accelerator: Accelerator,
) -> None:
    p = table(lambda u: 1 if u < 8 else 6)  # some tokens leave no choice, others much
    target = table_target(p)
    drafter = trained(target, accelerator, p, config(markov_rank=0))
    assert drafter.confidence_head is not None
    with torch.no_grad():  # make it sure of itself
        drafter.confidence_head.proj.weight *= 3
        drafter.confidence_head.proj.bias *= 3
    batches = [texts(p, 30, seed) for seed in (1, 2)]
    cfg, figures = calibrated(config(markov_rank=0), drafter, target, batches)
    assert figures is not None and figures["positions"] == [360, 330, 300, 270]
    assert figures["ece"] <= 0.05 < figures["ece_uncalibrated"] and figures["auc"] >= 0.65
    assert all(2 < t < 4.5 for t in figures["temperatures"])
    assert isinstance(cfg, BlockConfig) and cfg.temperatures == figures["temperatures"]


def test_calibration_reports_on_the_rows_it_did_not_fit(accelerator: Accelerator) -> None:
    p = table(lambda u: 2)
    target = table_target(p)
    torch.manual_seed(0)
    drafter = build(config(), target)
    assert isinstance(drafter, BlockDrafter) and drafter.confidence_head is not None
    torch.nn.init.normal_(drafter.confidence_head.proj.weight)
    batch = texts(p, 6, 1)
    rows = confidences(drafter, target, batch)
    assert len(rows) == 6 and [len(z) for z, _ in rows[0]] == [12, 11, 10, 9]
    _, figures = calibrated(config(), drafter, target, [batch])
    odd = [torch.cat([row[0][i] for row in rows[1::2]]) for i in (0, 1)]
    t = figures["temperatures"][0] if figures else 0.0
    assert figures is not None and figures["positions"] == [36, 33, 30, 27]
    assert figures["auc_per_pos"][0] == auc(odd[0], odd[1])
    assert figures["ece_per_pos"][0] == expected_calibration_error((odd[0] / t).sigmoid(), odd[1])
    even = [torch.cat([row[0][i] for row in rows[::2]]) for i in (0, 1)]
    assert t == fit_temperature(even[0], even[1])


def test_there_is_nothing_to_calibrate_without_a_head_or_a_second_prompt() -> None:
    p = table(lambda u: 2)
    target = table_target(p)
    for cfg, rows in ((config(confidence_head=False), 4), (config(), 1)):
        assert calibrated(cfg, build(cfg, target), target, [texts(p, rows, 1)]) == (cfg, None)


# Anchors


def test_the_teacher_of_chosen_anchors_is_that_of_all(accelerator: Accelerator) -> None:
    p = table(lambda u: 3)
    target = table_target(p)
    batch = with_hidden(target, texts(p, 3, 1))
    ids = torch.tensor([0, 3, 4, 9, 15])
    teacher = TargetTeacher(target, ids)
    norms, chosen = teacher.norms(batch), torch.tensor([[0, 4, 11], [2, 5, 12], [7, 12, 12]])
    every = teacher.at(batch, norms, ALL, 4)
    some = teacher.at(replace(batch, anchors=chosen), norms, (slice(0, 3), slice(1, 3)), 4)
    mask = replace(batch, anchors=chosen).supervised(4)[:, 1:]
    assert some.log_p.shape == (3, 2, 4, 5) and int(mask.sum()) == 4 + 1 + 4
    for b, i, k in mask.nonzero().tolist():
        a = int(chosen[b, i + 1])
        torch.testing.assert_close(some.log_p[b, i, k], every.log_p[b, a, k])
        assert some.argmax[b, i, k] == every.argmax[b, a, k] and some.tokens[b, i, k] == every.tokens[b, a, k]
    values = torch.tensor([[5, 6, 7]])
    assert shifted(values, 2, torch.tensor([[1, 2]])).tolist() == [[[7, -1], [-1, -1]]]
    assert shifted(values, 2).tolist() == [[[6, 7], [7, -1]]]


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_a_step_on_sampled_anchors_is_the_sum_over_their_positions(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, weight: float
) -> None:
    p = table(lambda u: 3)
    target = table_target(p)
    settings = {"confidence_weight": weight, "position_weights": PositionWeights.exp}
    d, reference = (distillation(target, accelerator, config(), **settings) for _ in range(2))
    for drafter in (d.drafter, reference.drafter):
        g = torch.Generator().manual_seed(1)
        for parameter in drafter.parameters():
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=g))
    monkeypatch.setattr(step_module, "CHUNK_BYTES", 4 * 5 * 4 * V * 2)  # two anchors a chunk
    batch = with_hidden(target, texts(p, 5, 1), d.drafter.taps)
    chosen = d.drafter.choose_anchors(batch)
    assert chosen.anchors is not None and chosen.anchors.shape == (5, 6)
    d.optim.clip = 1e9
    monkeypatch.setattr(BlockDrafter, "choose_anchors", lambda self, batch: replace(batch, anchors=chosen.anchors))
    metrics = d.step(0, [replace(batch, hidden=None, taps=())])

    every, teacher = reference.drafter.train_output(batch), reference.teacher
    c = Comparison(every.logits, teacher.at(batch, teacher.norms(batch), ALL, 4))
    assert every.confidence is not None
    whole = objective(c, d.objective) + weight * confidence_loss(every.confidence, c)
    rows = []
    for b in range(5):
        values = [
            float(torch.exp(torch.tensor(-k / 4))) * whole[b, a, k]
            for a in chosen.anchors[b].tolist() for k in range(4) if a + 1 + k < 13
        ]  # fmt: skip
        rows.append(torch.stack(values).mean())
    expected = torch.stack(rows).mean()
    expected.backward()
    assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
    for (name, mine), theirs in zip(d.drafter.named_parameters(), reference.drafter.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None, name
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def test_the_confidence_loss_pulls_towards_the_acceptance_and_leaves_the_drafts_alone(accelerator: Accelerator) -> None:
    p = table(lambda u: 3)
    target = table_target(p)
    d = distillation(target, accelerator, config(), confidence_weight=1.0)
    batch = with_hidden(target, texts(p, 5, 1), d.drafter.taps)
    out, teacher = d.drafter.train_output(batch), d.teacher
    c = Comparison(out.logits, teacher.at(batch, teacher.norms(batch), ALL, 4))
    alpha, mask = c.log_alpha.exp(), batch.supervised(4)
    distance = 0.5 * (c.log_p.exp() - c.log_q.exp()).abs().sum(-1)
    torch.testing.assert_close(alpha[mask], 1 - distance[mask], rtol=0, atol=1e-5)
    said = torch.zeros_like(alpha, requires_grad=True)
    (gradient,) = torch.autograd.grad(confidence_loss(said, c).sum(), said)
    torch.testing.assert_close(gradient, 0.5 - alpha.detach().clamp(max=1), rtol=0, atol=1e-5)
    assert torch.autograd.grad(confidence_loss(said, c).sum(), out.logits, allow_unused=True) == (None,)


def test_runs_resume_bitwise(
    tmp_path: Path, make_trainer: Any, fake_validator: Any, config: Any
) -> None:
    """Which anchors come next is part of the random state of a checkpoint."""
    cfg = config(drafter=BlockConfig(draft_vocab_size=41, markov_rank=8, num_anchors=3))
    whole = make_trainer(tmp_path / "whole", cfg)
    whole.train(fake_validator)
    with killed_after(4):
        make_trainer(tmp_path / "killed", cfg).train(fake_validator)
    resumed = make_trainer(tmp_path / "killed", cfg)
    torch.manual_seed(99)
    resumed.train(fake_validator)
    for (name, a), b in zip(whole.drafter.named_parameters(), resumed.drafter.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_block_drafters_weigh_positions_by_exp_unless_told_otherwise() -> None:
    assert RunConfig(drafter=BlockConfig()).objective.position_weights == PositionWeights.exp
    assert RunConfig(drafter=BlockConfig()).objective.eta == 10.0
    uniform = RunConfig(drafter=BlockConfig(), objective=ObjectiveConfig(position_weights=PositionWeights.uniform))
    assert uniform.objective.position_weights == PositionWeights.uniform
