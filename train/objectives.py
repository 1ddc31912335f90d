"""The distillation objectives: pure, per draft position, unreduced. Masks, weights and means: weights.py.

p is the target's distribution over the whole vocabulary, q the drafter's over its trimmed vocabulary of D ids.
alpha and all that is made of it take p as it is, so target mass outside the D ids is a sure rejection; the KL family
takes p renormalised over the D ids; ce leaves out positions whose label lies outside them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from conf.schema import ObjectiveConfig, ObjectiveKind

OUTSIDE = -1  # an index into the trimmed vocabulary: the id is not in it


@dataclass(frozen=True)
class Teacher:
    """What the target says at each draft position.

    log_p: [..., K, D] log-probabilities of the D ids, NOT renormalised: the mass outside is 1 - sum exp(log_p).
    argmax: [..., K] place among the D ids of the target's most probable token of all V, or OUTSIDE.
    tokens: [..., K] place among the D ids of the token that stands there, or OUTSIDE.
    """

    log_p: Tensor
    argmax: Tensor
    tokens: Tensor


class Comparison:
    """Drafter and target side by side; what several objectives and metrics share is computed once.

    logits: [..., K, D] of the drafter; computed with in float32, float64 stays float64.
    """

    def __init__(self, logits: Tensor, teacher: Teacher) -> None:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        self.teacher = teacher
        self.logits = logits.to(dtype)
        self.log_p = teacher.log_p.to(dtype)

    @cached_property
    def log_q(self) -> Tensor:
        """[..., K, D]"""
        return torch.log_softmax(self.logits, dim=-1)

    @cached_property
    def log_p_inside(self) -> Tensor:
        """[..., K, D]: log p renormalised over the trimmed vocabulary."""
        return self.log_p - torch.logsumexp(self.log_p, dim=-1, keepdim=True)

    @cached_property
    def log_alpha(self) -> Tensor:
        """[..., K]: log sum_v min(p_v, q_v), in log space so that it survives alpha = 1e-30."""
        return torch.logsumexp(torch.minimum(self.log_p, self.log_q), dim=-1)

    @cached_property
    def agreement(self) -> Tensor:
        """[..., K] bool: the drafter's argmax is the target's over the whole vocabulary."""
        return self.logits.argmax(dim=-1) == self.teacher.argmax

    def log_q_of(self, index: Tensor) -> Tensor:
        """log q of the ids at places `index` [..., K]; -inf where OUTSIDE."""
        return gather_inside(self.log_q, index)


def gather_inside(log_probs: Tensor, index: Tensor) -> Tensor:
    """log_probs [..., D] at `index` [...]; -inf (and no gradient) where the index is OUTSIDE."""
    picked = log_probs.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(index == OUTSIDE, float("-inf"))


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) = sum_v a (log a - log b): [..., D] twice -> [...]."""
    return (log_a.exp() * (log_a - log_b)).sum(dim=-1)


def forward_kl(c: Comparison, cfg: ObjectiveConfig) -> Tensor:
    """sum p log p/q, p renormalised: [..., K]."""
    return kl(c.log_p_inside, c.log_q)


def reverse_kl(c: Comparison, cfg: ObjectiveConfig) -> Tensor:
    """sum q log q/p, p renormalised: [..., K]."""
    return kl(c.log_q, c.log_p_inside)


def jsd(c: Comparison, cfg: ObjectiveConfig) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q (GKD, arXiv 2306.13649, eq. 1)."""
    beta = torch.tensor(cfg.jsd_beta, dtype=c.log_q.dtype, device=c.log_q.device)
    log_m = torch.logaddexp(c.log_p_inside + beta.log(), c.log_q + (1 - beta).log())
    return beta * kl(c.log_p_inside, log_m) + (1 - beta) * kl(c.log_q, log_m)


def ce(c: Comparison, cfg: ObjectiveConfig) -> Tensor:
    """-log q(label); 0 where the label lies outside the trimmed vocabulary (`defined` leaves it out)."""
    index = labels(c.teacher.argmax, c.teacher.tokens, cfg)
    return (-c.log_q_of(index)).masked_fill(index == OUTSIDE, 0.0)


def tv(c: Comparison, cfg: ObjectiveConfig) -> Tensor:
    """Total variation over all V ids: 1/2 sum |p - q| = 1 - alpha."""
    return -torch.expm1(c.log_alpha)


def nla(c: Comparison, cfg: ObjectiveConfig) -> Tensor:
    """-log alpha: the direction of tv, with a gradient that does not vanish at low overlap."""
    return -c.log_alpha


def lk(c: Comparison, cfg: ObjectiveConfig) -> Tensor:
    """lambda KL + (1 - lambda)(1 - alpha), lambda = exp(-eta stop_gradient(alpha)): KL first, acceptance later."""
    eta = 3.0 if cfg.eta is None else cfg.eta
    lam = torch.exp(-eta * c.log_alpha.detach().exp())
    return lam * forward_kl(c, cfg) + (1 - lam) * tv(c, cfg)


def e2e(c: Comparison, cfg: ObjectiveConfig) -> Tensor:
    """l_k = 1 - prod_{i<=k} alpha_i. Its MEAN over a chain's K positions is 1 - (1/K) sum_j prod_{i<=j} alpha_i,
    the surrogate of the expected accepted length; means over positions are what weights.py takes."""
    return -torch.expm1(c.log_alpha.cumsum(dim=-1))


def e2e_exact(c: Comparison, cfg: ObjectiveConfig) -> Tensor:
    """l_k = 1 - prod_{i<k} min(1, q(x_i)/p(x_i)) alpha_k. Its MEAN over a chain, over x ~ p, is 1 minus the exact
    expected accepted share; so it wants responses sampled at the objective's temperature."""
    index = c.teacher.tokens
    kept = (c.log_q_of(index) - gather_inside(c.log_p, index).masked_fill(index == OUTSIDE, 0.0)).clamp(max=0)
    reach = torch.cat([torch.zeros_like(kept[..., :1]), kept[..., :-1].cumsum(dim=-1)], dim=-1)
    return -torch.expm1(reach + c.log_alpha)


OBJECTIVES: dict[ObjectiveKind, Callable[[Comparison, ObjectiveConfig], Tensor]] = {
    ObjectiveKind.forward_kl: forward_kl,
    ObjectiveKind.reverse_kl: reverse_kl,
    ObjectiveKind.jsd: jsd,
    ObjectiveKind.ce: ce,
    ObjectiveKind.tv: tv,
    ObjectiveKind.nla: nla,
    ObjectiveKind.lk: lk,
    ObjectiveKind.e2e: e2e,
    ObjectiveKind.e2e_exact: e2e_exact,
}


def objective(c: Comparison, cfg: ObjectiveConfig) -> Tensor:
    """The configured objective: [..., K], unreduced."""
    return OBJECTIVES[cfg.kind](c, cfg)


def confidence_loss(logits: Tensor, c: Comparison) -> Tensor:
    """Cross-entropy of sigmoid(logits [..., K]) against the analytic acceptance alpha = 1 - 1/2 sum |p - q|, which
    gets no gradient from it: [..., K]."""
    target = c.log_alpha.detach().exp().clamp(max=1.0)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits.to(target.dtype), target, reduction="none")


def labels(argmax: Tensor, tokens: Tensor, cfg: ObjectiveConfig) -> Tensor:
    """ce's label [..., K]: the token that stands there (ce_hard) or the target's argmax."""
    return tokens if cfg.ce_hard else argmax


def defined(argmax: Tensor, tokens: Tensor, cfg: ObjectiveConfig) -> Tensor:
    """[..., K] bool: where the objective says anything (ce: only where its label can be drafted)."""
    if cfg.kind == ObjectiveKind.ce:
        return labels(argmax, tokens, cfg) != OUTSIDE
    return torch.ones_like(argmax, dtype=torch.bool)
