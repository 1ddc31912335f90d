"""Every objective and every weighting of positions with every kind of drafter that is trained, through the real step,
against the definitions of the design computed with whole distributions in float64."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from drafting import TRAINED, make_config, make_drafter
from torch import Tensor

from conf.errors import ConfigError
from conf.schema import ObjectiveConfig, ObjectiveKind, OptimConfig, PositionWeights, RunConfig
from inference.batch import Batch, make_batch
from inference.drafters import Drafter
from inference.parity import with_hidden
from inference.target import Target
from tiny import tiny_model
from train.objectives import Teacher
from train.optim import build_optimizer
from train.step import Distillation, TrainView
from train.teacher import TargetTeacher

IDS = torch.arange(0, 128, 3)  # they leave out much of the target's mass
K = 3
ROWS = [([5, 9, 11], [3, 7, 21, 36, 9, 12, 5]), ([40, 3, 40, 3, 8], [9, 6]), ([7], [99, 30, 31, 2, 54])]
TARGET = Target(tiny_model("llama", dtype=torch.float64), None, "tiny", {})


@pytest.fixture
def batch() -> Batch:
    """Three ragged rows."""
    return with_hidden(TARGET, make_batch([p for p, _ in ROWS], [r for _, r in ROWS], None, ["a", "b", "c"]))


def distillation(name: str, accelerator: Accelerator, objective: ObjectiveConfig) -> Distillation:
    kind, options = TRAINED[name]
    anchors: dict[str, Any] = {"num_anchors": 0} if kind == "block" else {}
    drafter = make_drafter(kind, TARGET, noise=0.5, ids=IDS, **options | anchors | {"draft_vocab_size": len(IDS)})
    optim = OptimConfig(warmup=0.0)
    return Distillation(
        target=TARGET, drafter=drafter.train(), view=accelerator.prepare(TrainView(drafter)),
        teacher=TargetTeacher(TARGET, IDS), optimizer=build_optimizer(drafter, optim), accelerator=accelerator,
        objective=objective, optim=optim, total=10, chain=K,
    )  # fmt: skip


def chains(drafter: Drafter, batch: Batch, whole: bool) -> Tensor:
    """The drafter's logits [B,A,K,D]; of a drafter of one endless step those of K anchors in a row, if `whole`."""
    with torch.no_grad():
        logits = drafter.train_logits(with_hidden(TARGET, batch, drafter.train_taps))
    if not (whole and drafter.endless):
        return logits
    later = [logits[:, k:, 0] for k in range(K)]
    return torch.stack([torch.cat([x, torch.zeros_like(logits[:, :k, 0])], 1) for k, x in enumerate(later)], 2)


def one(kind: ObjectiveKind, p: Tensor, q: Tensor, token: int, alphas: list[float], kept: list[float]) -> float | None:
    """An objective at one position; p and q over all of V, alphas of this chain to this position, kept before it."""
    inside, q_inside = p[IDS] / p[IDS].sum(), q[IDS]
    forward = float((inside * (inside / q_inside).log()).sum())
    alpha = alphas[-1]
    match kind:
        case ObjectiveKind.forward_kl:
            return forward
        case ObjectiveKind.reverse_kl:
            return float((q_inside * (q_inside / inside).log()).sum())
        case ObjectiveKind.jsd:
            m = (inside + q_inside) / 2
            return float((inside * (inside / m).log() + q_inside * (q_inside / m).log()).sum() / 2)
        case ObjectiveKind.ce:
            best = int(p.argmax())
            return -float(q[best].log()) if best in IDS else None
        case ObjectiveKind.tv:
            return 0.5 * float((p - q).abs().sum())
        case ObjectiveKind.nla:
            return -float(torch.tensor(alpha).double().log())
        case ObjectiveKind.lk:
            share = float(torch.tensor(-3.0 * alpha).double().exp())
            return share * forward + (1 - share) * (1 - alpha)
        case ObjectiveKind.e2e:
            return 1 - float(torch.tensor(alphas, dtype=torch.float64).prod())
        case ObjectiveKind.e2e_exact:
            return 1 - float(torch.tensor([*kept, alpha], dtype=torch.float64).prod())


def weights(kind: PositionWeights, drawn: list[float]) -> list[float]:
    """w_j of a chain; drawn: q of the tokens that stand at its positions."""
    half = torch.tensor([0.5 * q + 0.5 for q in drawn], dtype=torch.float64)
    match kind:
        case PositionWeights.uniform:
            return [1.0] * len(drawn)
        case PositionWeights.decay:
            return [0.8**k for k in range(len(drawn))]
        case PositionWeights.exp:
            return torch.exp(-torch.arange(len(drawn)) / 4.0).tolist()
        case PositionWeights.dpace:
            return half.cumprod(0).flip(0).cumsum(0).flip(0).tolist()


def expected(logits: Tensor, batch: Batch, cfg: ObjectiveConfig) -> float:
    """Mean over rows of the mean over a row's supervised positions of w l."""
    assert batch.hidden is not None and cfg.position_weights is not None
    target, rows = TARGET.head(batch.hidden).softmax(-1), []
    for b, length in enumerate(batch.response_lengths.tolist()):
        values: list[float] = []
        for a in range(length - 1):
            at = range(min(logits.shape[2], length - 1 - a))
            tokens = [int(batch.response[b, a + 1 + k]) for k in at]
            p = [target[b, a + 1 + k] for k in at]
            q = [torch.zeros(128, dtype=torch.float64).index_copy_(0, IDS, logits[b, a, k].softmax(-1)) for k in at]
            alphas = [float(torch.minimum(x, y).sum()) for x, y in zip(p, q, strict=True)]
            kept = [min(1.0, float(y[t] / x[t])) for x, y, t in zip(p, q, tokens, strict=True)]
            w = weights(cfg.position_weights, [float(y[t]) for y, t in zip(q, tokens, strict=True)])
            losses = [one(cfg.kind, p[k], q[k], tokens[k], alphas[: k + 1], kept[:k]) for k in at]
            values += [x * y for x, y in zip(losses, w, strict=True) if x is not None]
        rows += [sum(values) / len(values)] if values else []
    return sum(rows) / len(rows)


def check(name: str, accelerator: Accelerator, batch: Batch, cfg: ObjectiveConfig, confidence: float = 0.0) -> None:
    """A step has the loss of the definition, and moves everything that is trained."""
    cfg.confidence_weight = confidence
    d = distillation(name, accelerator, cfg)
    d.drafter.eval()
    logits = chains(d.drafter, batch, cfg.over_chains or cfg.position_weights == PositionWeights.dpace)
    d.drafter.train()
    loss = expected(logits, batch, cfg)
    found = d.step(0, [batch])
    assert found["loss"] == pytest.approx(loss, rel=1e-5), (found["loss"], loss)
    trained = {n: p for n, p in d.drafter.named_parameters() if p.requires_grad and "confidence" not in n}
    still = [n for n, p in trained.items() if p.grad is None or not p.grad.any() or not p.grad.isfinite().all()]
    assert trained and not still


@pytest.mark.parametrize("kind", list(ObjectiveKind))
@pytest.mark.parametrize("name", TRAINED)
def test_every_objective_with_every_kind(
    name: str, kind: ObjectiveKind, accelerator: Accelerator, batch: Batch
) -> None:
    weights = PositionWeights.uniform if kind in (ObjectiveKind.e2e, ObjectiveKind.e2e_exact) else PositionWeights.decay
    check(name, accelerator, batch, ObjectiveConfig(kind=kind, eta=3.0, position_weights=weights))


@pytest.mark.parametrize("kind", [PositionWeights.uniform, PositionWeights.exp, PositionWeights.dpace])
@pytest.mark.parametrize("name", TRAINED)
def test_every_weighting_with_every_kind(
    name: str, kind: PositionWeights, accelerator: Accelerator, batch: Batch
) -> None:
    check(name, accelerator, batch, ObjectiveConfig(kind=ObjectiveKind.nla, position_weights=kind))


@pytest.mark.parametrize("kind", list(ObjectiveKind))
def test_a_renormalised_acceptance_would_be_noticed(
    kind: ObjectiveKind, accelerator: Accelerator, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = TargetTeacher.at

    def renormalised(self: TargetTeacher, *args: Any) -> Teacher:
        teacher = true(self, *args)
        return Teacher(teacher.log_p.log_softmax(-1), teacher.argmax, teacher.tokens)

    monkeypatch.setattr(TargetTeacher, "at", renormalised)
    cfg = ObjectiveConfig(kind=kind, eta=3.0, position_weights=PositionWeights.uniform)
    if kind in (ObjectiveKind.forward_kl, ObjectiveKind.reverse_kl, ObjectiveKind.jsd, ObjectiveKind.ce):
        check("hydra", accelerator, batch, cfg)  # which take p renormalised, or one token of it
    else:
        with pytest.raises(AssertionError):
            check("hydra", accelerator, batch, cfg)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_chains_over_anchors_do_not_depend_on_the_chunks(
    cut: int, accelerator: Accelerator, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = ObjectiveConfig(kind=ObjectiveKind.e2e, position_weights=PositionWeights.uniform)
    whole = distillation("lm", accelerator, cfg)
    whole.step(0, [batch])
    monkeypatch.setattr("train.step.CHUNK_BYTES", 8 * K * len(IDS) * cut)
    parts = distillation("lm", accelerator, cfg)
    parts.step(0, [batch])
    for (name, p), q in zip(whole.drafter.named_parameters(), parts.drafter.parameters(), strict=True):
        if not p.requires_grad:
            continue
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_chains_are_weighed_once() -> None:
    for kind in ("e2e", "e2e_exact"):
        assert RunConfig(
            drafter=make_config("hydra"), objective=ObjectiveConfig(kind=ObjectiveKind(kind))
        ).objective.position_weights == PositionWeights.uniform
        with pytest.raises(ConfigError) as refused:
            ObjectiveConfig(kind=ObjectiveKind(kind), position_weights=PositionWeights.dpace)
        assert str(refused.value) == (
            f"objective.position_weights = 'dpace' is not allowed; allowed: uniform, decay or exp: {kind} itself "
            "weighs a position by those before it"
        )
