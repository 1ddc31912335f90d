"""Masks, position weights and normalisation, all in one place.

The reduced loss of one optimiser step is  sum_{b,a,k} s_b w_k l_{b,a,k} / N  over supervised positions, where
token:     s_b = 1,                                N = supervised positions,
sequence:  s_b = 1 / supervised positions of b,    N = sequences with a supervised position,
and N counts all micro-batches of the step on all ranks: gradients are summed first and divided by N once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import Normalise, ObjectiveConfig, PositionWeights

from .objectives import Comparison

Part = tuple[slice, slice]  # rows and anchors of a tensor [B, A, ...]


@dataclass(frozen=True)
class Supervision:
    """mask [B,A,K] bool; scale [B] is s_b above; count is this micro-batch's part of N."""

    mask: Tensor
    scale: Tensor
    count: Tensor


def supervise(mask: Tensor, normalise: Normalise) -> Supervision:
    """From the supervised positions [B,A,K] (inside the response and defined for the objective)."""
    positions = mask.sum(dim=(1, 2))  # [B]
    if normalise == Normalise.token:
        return Supervision(mask, torch.ones_like(positions, dtype=torch.float32), positions.sum())
    return Supervision(mask, 1.0 / positions.clamp(min=1).float(), (positions > 0).sum())


def position_weights(kind: PositionWeights, c: Comparison, mask: Tensor) -> Tensor:
    """w_k, broadcastable to mask [..., K]; no gradient flows through it."""
    k = torch.arange(mask.shape[-1], device=mask.device, dtype=c.logits.dtype)
    match kind:
        case PositionWeights.uniform:
            return torch.ones_like(k)
        case PositionWeights.decay:
            return 0.8**k
        case PositionWeights.exp:
            return torch.exp(-k / 4)
        case PositionWeights.dpace:
            return _dpace(c, mask)


def _dpace(c: Comparison, mask: Tensor) -> Tensor:
    """w_j = sum_{m>=j} prod_{i<=m} (q(x_i)/2 + 1/2): how much of the chain's expected length hangs on position j."""
    log_q = c.log_q_of(c.teacher.tokens).detach()  # -inf outside the trimmed vocabulary: q = 0
    reached = (0.5 * log_q.exp() + 0.5).cumprod(dim=-1) * mask
    return reached.flip(-1).cumsum(dim=-1).flip(-1)


def weighted_sum(loss: Tensor, c: Comparison, supervision: Supervision, part: Part, cfg: ObjectiveConfig) -> Tensor:
    """sum s_b w_k l over the supervised positions of `part`; loss [b, a, K] -> scalar, not yet divided by N."""
    mask = supervision.mask[part]
    weights = position_weights(cfg.position_weights, c, mask)
    kept = torch.where(mask, loss * weights, torch.zeros_like(loss))
    return (kept.sum(dim=(1, 2)) * supervision.scale[part[0]].to(loss.dtype)).sum()
