"""How well predicted probabilities of acceptance are calibrated and how well they rank. Pure functions.

z: logits, a: what was predicted, the analytic acceptance Σ min(p, q) in [0, 1]; both [n]. An a between 0 and 1 is a
draw that was not made: it counts as `a` of an accepted token and 1 - a of a rejected one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BINS = 10
HOTTEST = 20.0  # temperatures are looked for between 1 / HOTTEST and HOTTEST


def fit_temperature(z: Tensor, a: Tensor) -> float:
    """The T that minimises the cross-entropy of sigmoid(z / T) against a (Guo et al., arXiv:1706.04599).

    In s = 1 / T the loss is convex with slope Σ z (sigmoid(s z) - a), so bisection finds its zero. 1.0 when n = 0.
    """
    if len(z) == 0:
        return 1.0
    z, a = z.double(), a.double()
    low, high = 1 / HOTTEST, HOTTEST
    for _ in range(60):
        middle = (low + high) / 2
        rising = float((z * ((middle * z).sigmoid() - a)).sum()) > 0
        low, high = (low, middle) if rising else (middle, high)
    return 2 / (low + high)


def expected_calibration_error(c: Tensor, a: Tensor) -> float:
    """Σ over ten equal bins of (share of the bin) |mean c - mean a|, c [n] the predicted probabilities."""
    c, a = c.double(), a.double()
    bins = (c * BINS).long().clamp(0, BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.float64, device=c.device).index_add_(0, bins, c - a)
    return float(gap.abs().sum() / max(1, len(c)))


def auc(c: Tensor, a: Tensor) -> float:
    """The chance that an accepted token was given a higher score c [n] than a rejected one, ties counting half.

    0.5 (no ranking) when all were accepted or none.
    """
    levels, place = torch.unique(c.double(), return_inverse=True)
    kept = torch.zeros(len(levels), dtype=torch.float64, device=c.device).index_add_(0, place, a.double())
    lost = torch.zeros_like(kept).index_add_(0, place, 1 - a.double())
    pairs = float(kept.sum() * lost.sum())
    return float((kept * (lost.cumsum(0) - lost / 2)).sum()) / pairs if pairs > 0 else 0.5


def binned(values: Tensor, weights: Tensor, bins: Tensor, count: int, usual: float) -> tuple[list[float], list[float]]:
    """(means, weights) of `count` bins, bins [n] being each value's; in every bin one value more, the usual one."""
    sums = torch.full((count,), usual, dtype=torch.float64).index_add_(0, bins, (values * weights).double())
    totals = torch.ones(count, dtype=torch.float64).index_add_(0, bins, weights.double())
    return (sums / totals).tolist(), totals.tolist()


def monotone(means: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The rising numbers that are nearest to `means` in weighted squares: neighbours that fall are pooled (Ayer et al.
    1955)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, numbers in it
    for mean, weight in zip(means, weights, strict=True):
        pools.append((mean, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, v, m), (b, w, n) = pools[-2:]
            pools[-2:] = [((a * v + b * w) / (v + w), v + w, m + n)]
    return [mean for mean, _, n in pools for _ in range(n)]
