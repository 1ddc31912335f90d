"""Every objective against naive float64 loops over the definition, by gradient check, and at its limits."""

import math

import pytest
import torch
from torch import Tensor

from conf.schema import ObjectiveConfig, ObjectiveKind
from train.objectives import OUTSIDE, Comparison, Teacher, defined, objective

V, D, K, ROWS = 11, 6, 3, 5
IDS = torch.tensor([0, 2, 3, 5, 7, 10])
KINDS = list(ObjectiveKind)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    exps = [math.exp(x - top) for x in logits]
    return [e / sum(exps) for e in exps]


def reference(kind: ObjectiveKind, draft: Tensor, target: Tensor, ids: list[int], tokens: list[int],
              cfg: ObjectiveConfig) -> list[float]:  # fmt: skip
    """One chain, from the definitions, in plain Python: draft [K, D], target [K, V], tokens [K] of V -> K losses."""
    losses, accepted, reached = [], 1.0, 1.0
    for k, token in enumerate(tokens):
        p_full, q_trim = softmax(target[k].tolist()), softmax(draft[k].tolist())
        q_full = [0.0] * len(p_full)
        for place, token_id in enumerate(ids):
            q_full[token_id] = q_trim[place]
        alpha = sum(min(p, q) for p, q in zip(p_full, q_full, strict=True))
        inside = sum(p_full[i] for i in ids)
        p = [p_full[i] / inside for i in ids]
        q = q_trim
        m = [cfg.jsd_beta * a + (1 - cfg.jsd_beta) * b for a, b in zip(p, q, strict=True)]
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        top = max(range(len(p_full)), key=lambda i: p_full[i])
        label = token if cfg.ce_hard else top
        match kind:
            case ObjectiveKind.forward_kl:
                loss = kl
            case ObjectiveKind.reverse_kl:
                loss = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
            case ObjectiveKind.jsd:
                loss = cfg.jsd_beta * sum(a * math.log(a / c) for a, c in zip(p, m, strict=True))
                loss += (1 - cfg.jsd_beta) * sum(b * math.log(b / c) for b, c in zip(q, m, strict=True))
            case ObjectiveKind.ce:
                loss = -math.log(q_full[label]) if label in ids else 0.0
            case ObjectiveKind.tv:
                loss = 0.5 * sum(abs(a - b) for a, b in zip(p_full, q_full, strict=True))
            case ObjectiveKind.nla:
                loss = -math.log(alpha)
            case ObjectiveKind.lk:
                lam = math.exp(-cfg.eta * alpha)
                loss = lam * kl + (1 - lam) * (1 - alpha)
            case ObjectiveKind.e2e:
                accepted *= alpha
                loss = 1 - accepted
            case ObjectiveKind.e2e_exact:
                loss = 1 - reached * alpha
                reached *= min(1.0, q_full[token] / p_full[token])
        losses.append(loss)
    return losses


def places(values: Tensor, ids: Tensor) -> Tensor:
    table = torch.full((V,), OUTSIDE)
    table[ids] = torch.arange(len(ids))
    return table[values]


def make_teacher(target: Tensor, tokens: Tensor, ids: Tensor) -> Teacher:
    return Teacher(target.log_softmax(-1)[..., ids], places(target.argmax(-1), ids), places(tokens, ids))


def random_case(seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    draft = scale * torch.randn(ROWS, K, D, generator=g, dtype=torch.float64)
    target = scale * torch.randn(ROWS, K, V, generator=g, dtype=torch.float64)
    return draft, target, torch.randint(V, (ROWS, K), generator=g)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hard", [False, True])
def test_equals_the_definition_in_float64(kind: ObjectiveKind, hard: bool) -> None:
    draft, target, tokens = random_case()
    cfg = ObjectiveConfig(kind=kind, ce_hard=hard, eta=2.0, jsd_beta=0.3)
    ours = objective(Comparison(draft, make_teacher(target, tokens, IDS)), cfg)
    for row in range(ROWS):
        expected = reference(kind, draft[row], target[row], IDS.tolist(), tokens[row].tolist(), cfg)
        assert ours[row].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_full_vocabulary_equals_the_definition(kind: ObjectiveKind) -> None:
    _, target, tokens = random_case(1)
    draft = torch.randn(ROWS, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    cfg, ids = ObjectiveConfig(kind=kind, eta=3.0), torch.arange(V)
    ours = objective(Comparison(draft, make_teacher(target, tokens, ids)), cfg)
    expected = [reference(kind, draft[r], target[r], ids.tolist(), tokens[r].tolist(), cfg) for r in range(ROWS)]
    assert ours.flatten().tolist() == pytest.approx([x for row in expected for x in row], abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_finite_differences(kind: ObjectiveKind) -> None:
    draft, target, tokens = random_case(2, scale=1.0)
    teacher = make_teacher(target, tokens, IDS)
    # lk's lambda is a constant of the gradient: with eta = 0 it is 1, with a large eta 0
    for eta in (0.0, 1e3) if kind == ObjectiveKind.lk else (3.0,):
        cfg = ObjectiveConfig(kind=kind, eta=eta)
        assert torch.autograd.gradcheck(
            lambda x, cfg=cfg: objective(Comparison(x, teacher), cfg), (draft.clone().requires_grad_(),)
        )


def test_lk_stops_the_gradient_of_lambda() -> None:
    draft, target, tokens = random_case(3)
    teacher = make_teacher(target, tokens, IDS)

    def gradient(kind: ObjectiveKind) -> Tensor:
        x = draft.clone().requires_grad_()
        return torch.autograd.grad(objective(Comparison(x, teacher), ObjectiveConfig(kind=kind)).sum(), x)[0]

    lam = torch.exp(-3.0 * Comparison(draft, teacher).log_alpha.exp())[..., None]
    mixed = lam * gradient(ObjectiveKind.forward_kl) + (1 - lam) * gradient(ObjectiveKind.tv)
    torch.testing.assert_close(gradient(ObjectiveKind.lk), mixed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extreme_logits_stay_finite(kind: ObjectiveKind, dtype: torch.dtype) -> None:
    draft = torch.full((2, K, D), -1e4, dtype=dtype)
    target = torch.full((2, K, V), -1e4)
    draft[0, :, 0], target[0, :, 1] = 1e4, 1e4  # target mass outside the trimmed vocabulary
    draft[1, :, 1], target[1, :, 2] = 1e4, 1e4  # and on the very id of the draft
    tokens = torch.tensor([[1, 0, 2], [2, 2, 5]])
    x = draft.requires_grad_()
    loss = objective(Comparison(x, make_teacher(target, tokens, IDS)), ObjectiveConfig(kind=kind))
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(torch.autograd.grad(loss.sum(), x)[0]).all()


def test_alpha_is_one_and_the_losses_zero_when_q_is_p() -> None:
    _, target, _ = random_case(4)
    tokens = target.argmax(-1)
    c = Comparison(target, make_teacher(target, tokens, torch.arange(V)))
    assert c.log_alpha.exp() == pytest.approx(1.0, abs=1e-12)
    assert c.agreement.all()
    for kind in set(KINDS) - {ObjectiveKind.ce}:
        assert objective(c, ObjectiveConfig(kind=kind)).flatten().tolist() == pytest.approx([0.0] * 15, abs=1e-12)


def test_alpha_counts_the_mass_outside_as_rejected() -> None:
    _, target, tokens = random_case(5)
    teacher = make_teacher(target, tokens, IDS)
    c = Comparison(teacher.log_p, teacher)  # q = p renormalised over the trimmed ids: covers all p inside
    torch.testing.assert_close(c.log_alpha.exp(), teacher.log_p.exp().sum(-1))
    assert float(c.log_alpha.exp().max()) < 1.0
    assert objective(c, ObjectiveConfig(kind=ObjectiveKind.forward_kl)).abs().max() < 1e-12


def test_tv_is_one_minus_alpha_and_nla_its_log() -> None:
    draft, target, tokens = random_case(6)
    c = Comparison(draft, make_teacher(target, tokens, IDS))
    torch.testing.assert_close(objective(c, ObjectiveConfig(kind=ObjectiveKind.tv)), 1 - c.log_alpha.exp())
    torch.testing.assert_close(objective(c, ObjectiveConfig(kind=ObjectiveKind.nla)), -c.log_alpha)


def test_jsd_swaps_with_its_arguments_and_tends_to_kl() -> None:
    a, b = random_case(7)[0], random_case(8)[0]
    none = torch.full((ROWS, K), OUTSIDE)

    def jsd(q: Tensor, p: Tensor, beta: float) -> Tensor:
        cfg = ObjectiveConfig(kind=ObjectiveKind.jsd, jsd_beta=beta)
        return objective(Comparison(q, Teacher(p.log_softmax(-1), none, none)), cfg)

    torch.testing.assert_close(jsd(a, b, 0.3), jsd(b, a, 0.7))
    assert float(jsd(a, b, 0.5).max()) <= math.log(2)
    c = Comparison(a, Teacher(b.log_softmax(-1), none, none))
    small = jsd(a, b, 1e-6) / 1e-6
    torch.testing.assert_close(
        small, objective(c, ObjectiveConfig(kind=ObjectiveKind.forward_kl)), rtol=1e-3, atol=1e-3
    )


def test_e2e_means_are_one_minus_the_expected_accepted_share() -> None:
    draft, target, tokens = random_case(9)
    c = Comparison(draft, make_teacher(target, tokens, IDS))
    alphas = c.log_alpha.exp()
    share = alphas.cumprod(-1).sum(-1) / K
    torch.testing.assert_close(objective(c, ObjectiveConfig(kind=ObjectiveKind.e2e)).mean(-1), 1 - share)


def test_e2e_exact_is_unbiased_for_the_expected_accepted_length() -> None:
    """Over x ~ p of a context-free chain the weights average to the acceptance probabilities themselves."""
    draft, target, _ = random_case(10)
    draft, target = draft[:1], target[:1]
    p = target[0].softmax(-1)
    expected, value = (
        Comparison(draft, make_teacher(target, torch.zeros(1, K, dtype=int), IDS)),
        torch.zeros(K).double(),
    )
    for x0 in range(V):
        for x1 in range(V):
            teacher = make_teacher(target, torch.tensor([[x0, x1, 0]]), IDS)
            loss = objective(Comparison(draft, teacher), ObjectiveConfig(kind=ObjectiveKind.e2e_exact))
            value += p[0, x0] * p[1, x1] * loss[0]
    torch.testing.assert_close(value, 1 - expected.log_alpha.exp()[0].cumprod(-1))


def test_ce_skips_labels_outside() -> None:
    argmax, tokens = torch.tensor([[0, OUTSIDE]]), torch.tensor([[OUTSIDE, 3]])
    soft, hard = ObjectiveConfig(kind=ObjectiveKind.ce), ObjectiveConfig(kind=ObjectiveKind.ce, ce_hard=True)
    assert defined(argmax, tokens, soft).tolist() == [[True, False]]
    assert defined(argmax, tokens, hard).tolist() == [[False, True]]
    assert defined(argmax, tokens, ObjectiveConfig()).all()


def test_an_argmax_outside_is_a_miss() -> None:
    draft, target, tokens = random_case(11)
    target[..., 1] = 50.0  # id 1 is not in IDS
    assert not Comparison(draft, make_teacher(target, tokens, IDS)).agreement.any()
