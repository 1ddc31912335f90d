"""One step: gradients and metrics against a direct computation, and the refusal of what is not finite."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from largest import Largest
from torch import Tensor

import train.step as step_module
from conf.errors import UserError
from conf.schema import HydraConfig, Normalise, ObjectiveConfig, ObjectiveKind, OptimConfig, PositionWeights
from inference.batch import Batch
from inference.drafters import Drafter, build
from inference.target import Target
from train.objectives import Comparison, Teacher, objective
from train.optim import build_optimizer
from train.step import Distillation, Sums, TrainView, chunks
from train.teacher import TargetTeacher

IDS = torch.arange(0, 128, 3)
STEPS = 3


@pytest.fixture
def distil(tiny_target: Target, accelerator: Accelerator) -> Callable[..., Distillation]:
    """Distillations that start from the same, not quite fresh drafter."""

    def make(**settings: object) -> Distillation:
        torch.manual_seed(0)
        drafter = build(
            HydraConfig(num_heads=STEPS, inner_size=16, lookup=True, draft_vocab_size=len(IDS)), tiny_target, IDS
        )
        for parameter in drafter.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        optim = OptimConfig(clip=1e9)
        return Distillation(
            target=tiny_target,
            drafter=drafter,
            view=accelerator.prepare(TrainView(drafter)),
            teacher=TargetTeacher(tiny_target, IDS),
            optimizer=build_optimizer(drafter, optim),
            accelerator=accelerator,
            objective=ObjectiveConfig(**settings),  # type: ignore[arg-type]
            optim=optim,
            total=10,
        )

    return make


def rows_of(batch: Batch, rows: slice) -> Batch:
    width = int(batch.response_lengths[rows].max())
    assert batch.hidden is not None
    return Batch(
        batch.tokens[rows], batch.lengths[rows], batch.starts[rows], batch.response[rows, :width],
        batch.response_lengths[rows], batch.hidden[rows, :width], keys=batch.keys[rows],
    )  # fmt: skip


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}


def direct(d: Distillation, batch: Batch) -> tuple[Tensor, dict[str, list[float]]]:
    """The loss by loops over rows, anchors and draft positions; and the means by position."""
    assert batch.hidden is not None
    log_p = d.target.head(batch.hidden).log_softmax(-1)  # [B, R, V]
    logits = d.drafter.train_logits(batch)
    places = {int(v): i for i, v in enumerate(IDS)}
    per_row: list[list[Tensor]] = []
    sums = torch.zeros(4, STEPS, dtype=torch.float64)
    for b, length in enumerate(batch.response_lengths.tolist()):
        row = []
        for a in range(length - 1):
            for k in range(min(STEPS, length - 1 - a)):
                r = a + 1 + k
                top, token = int(log_p[b, r].argmax()), int(batch.response[b, r])
                at = [torch.tensor([places.get(i, -1)]) for i in (top, token)]
                c = Comparison(logits[b, a, k][None], Teacher(log_p[b, r, IDS][None], at[0], at[1]))
                if d.objective.kind == ObjectiveKind.ce and top not in places:
                    continue
                loss = objective(c, d.objective)[0]
                row.append(loss * 0.8**k)
                agree = float(IDS[int(logits[b, a, k].argmax())] == top)
                sums[:, k] += torch.tensor([1.0, float(loss.detach()), float(c.log_alpha.detach().exp()), agree])
        per_row.append(row)
    means = {n: (s / sums[0]).tolist() for n, s in zip(("loss", "alpha", "agreement"), sums[1:], strict=True)}
    if d.objective.normalise == Normalise.token:
        flat = [x for row in per_row for x in row]
        return torch.stack(flat).mean(), means
    return torch.stack([torch.stack(row).mean() for row in per_row if row]).mean(), means


@pytest.mark.parametrize("normalise", list(Normalise))
@pytest.mark.parametrize("kind", [ObjectiveKind.lk, ObjectiveKind.ce])
@pytest.mark.parametrize("pieces", [[slice(0, 5)], [slice(0, 2), slice(2, 5)]])
@pytest.mark.parametrize("size", [10, 2])  # positions of a chunk: two anchors of all rows, one anchor of two rows
def test_gradients_and_metrics_equal_a_direct_computation(
    distil: Callable[..., Distillation], batch: Batch, monkeypatch: pytest.MonkeyPatch,
    normalise: Normalise, kind: ObjectiveKind, pieces: Sequence[slice], size: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(step_module, "CHUNK_BYTES", 4 * STEPS * len(IDS) * size)
    settings = {"kind": kind, "normalise": normalise, "position_weights": PositionWeights.decay}
    reference = distil(**settings)
    loss, means = direct(reference, batch)
    loss.backward()
    d = distil(**settings)
    metrics = d.step(0, [rows_of(batch, rows) for rows in pieces])
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    for name, values in means.items():
        assert metrics[f"{name}_per_pos"] == pytest.approx(values, abs=1e-4)
    expected = gradients(reference.drafter)
    for name, gradient in gradients(d.drafter).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)


def test_a_step_lowers_the_loss(distil: Callable[..., Distillation], batch: Batch) -> None:
    d = distil()
    d.optim = replace(d.optim, lr=1e-2, warmup=0.0)
    losses = [d.step(i, [batch])["loss"] for i in range(8)]
    assert losses[-1] < losses[0] - 0.05


def test_recomputed_features_train_the_same(distil: Callable[..., Distillation], batch: Batch) -> None:
    cached, recomputed = distil(), distil()
    a = cached.step(0, [batch])
    b = recomputed.step(0, [replace(batch, hidden=None)])
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
    for name, gradient in gradients(recomputed.drafter).items():
        torch.testing.assert_close(gradient, gradients(cached.drafter)[name])


def test_padding_changes_nothing(distil: Callable[..., Distillation], batch: Batch) -> None:
    assert batch.hidden is not None
    wide = replace(
        batch,
        response=torch.cat([batch.response, torch.full((5, 4), 7)], 1),
        hidden=torch.cat([batch.hidden, torch.full((5, 4, 32), 100.0)], 1),
    )
    a, b = distil(), distil()
    assert a.step(0, [batch])["loss"] == pytest.approx(b.step(0, [wide])["loss"], rel=1e-6)
    for name, gradient in gradients(a.drafter).items():
        torch.testing.assert_close(gradient, gradients(b.drafter)[name])


@pytest.mark.parametrize("bad", ["hidden", "parameter", "gradient"])
def test_what_is_not_finite_is_named_and_nothing_is_trained(
    distil: Callable[..., Distillation], batch: Batch, bad: str
) -> None:
    d = distil()
    name, parameter = next(iter(d.drafter.named_parameters()))
    match bad:
        case "hidden":
            assert batch.hidden is not None
            batch.hidden[0, 0, 0] = float("nan")
            expected = "target hidden states"
        case "parameter":
            parameter.data[0] = float("inf")
            expected = f"parameter {name}"
        case _:
            parameter.register_hook(lambda g: g * float("nan"))
            expected = f"gradient of {name}"
    before = {n: p.detach().clone() for n, p in d.drafter.named_parameters()}
    with pytest.raises(UserError, match=f"first in {expected}$"):
        d.step(0, [batch])
    assert all(torch.equal(before[n], p) for n, p in d.drafter.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fit", [1, 2, 5, 14, 10**6])
def test_chunks_cover_everything_once_and_stay_below_the_bound(
    monkeypatch: pytest.MonkeyPatch, fit: int, dtype: torch.dtype
) -> None:
    logits, seen = torch.zeros(3, 7, 3, 4, dtype=dtype), torch.zeros(3, 7)
    bound = (8 if dtype == torch.float64 else 4) * 3 * 4 * fit
    monkeypatch.setattr(step_module, "CHUNK_BYTES", bound)
    for part in chunks(logits):
        seen[part] += 1
        assert Comparison(logits[part], Teacher(logits[part], logits[part], logits[part])).log_q.nbytes <= bound
    assert seen.eq(1).all()
    assert list(chunks(logits[:, :0])) == []
    monkeypatch.setattr(step_module, "CHUNK_BYTES", 1)
    assert len(list(chunks(logits))) == 21  # one anchor of one row is the least


def test_a_step_compares_in_bounded_memory(
    distil: Callable[..., Distillation], batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = distil()
    bound = 4 * STEPS * len(IDS) * 2  # two positions
    monkeypatch.setattr(step_module, "CHUNK_BYTES", bound)
    logits = d.drafter.train_logits(batch).detach().requires_grad_()
    d.view = lambda _: logits  # type: ignore[assignment]
    norms = d.teacher.norms(batch)
    monkeypatch.setattr(d.teacher, "norms", lambda *_, **__: norms)
    with Largest() as largest:
        d._accumulate(batch, Sums.zeros(STEPS, torch.device("cpu")))
    assert logits.grad is not None and logits.nbytes > 20 * bound
    assert set(largest.above(bound)) == {logits.nbytes} and len(largest.above(bound)) <= 2  # the gradient and a copy
