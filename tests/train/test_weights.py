"""Position weights, and that normalisation counts a whole optimiser step."""

import math

import pytest
import torch
from torch import Tensor

from conf.schema import Normalise, ObjectiveConfig, PositionWeights
from train.objectives import OUTSIDE, Comparison, Teacher
from train.weights import position_weights, supervise, weighted_sum

B, A, K, D = 3, 4, 3, 5


def comparison(seed: int = 0, rows: int = B) -> Comparison:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, A, K, D, generator=g, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(-1, D, (rows, A, K), generator=g)
    log_p = torch.randn(rows, A, K, D, generator=g, dtype=torch.float64).log_softmax(-1)
    return Comparison(logits, Teacher(log_p, tokens, tokens))


def ragged(*anchors: int) -> Tensor:
    """Masks as a batch has them: row b supervises (a, k) with a + k < anchors[b]."""
    reach = torch.arange(A)[:, None] + torch.arange(K)
    return reach[None] < torch.tensor(anchors)[:, None, None]


def test_fixed_weights() -> None:
    c, mask = comparison(), ragged(4, 2, 1)
    assert position_weights(PositionWeights.uniform, c, mask).tolist() == [1, 1, 1]
    assert position_weights(PositionWeights.decay, c, mask).tolist() == pytest.approx([1, 0.8, 0.64])
    expected = [1, math.exp(-0.25), math.exp(-0.5)]
    assert position_weights(PositionWeights.exp, c, mask).tolist() == pytest.approx(expected)


def test_dpace_equals_the_definition() -> None:
    c, mask = comparison(), ragged(4, 2, 1)
    weights = position_weights(PositionWeights.dpace, c, mask)
    assert not weights.requires_grad
    for b, a in [(0, 0), (0, 2), (1, 0), (1, 1), (2, 0)]:
        length = int(mask[b, a].sum())
        q = c.logits[b, a].detach().softmax(-1)
        tokens = c.teacher.tokens[b, a]
        smooth = [0.5 * (0.0 if t == OUTSIDE else float(q[k, t])) + 0.5 for k, t in enumerate(tokens.tolist())]
        for j in range(length):
            expected = sum(math.prod(smooth[: m + 1]) for m in range(j, length))
            assert float(weights[b, a, j]) == pytest.approx(expected)


def naive(loss: Tensor, mask: Tensor, normalise: Normalise) -> float:
    rows = []
    for b in range(loss.shape[0]):
        values = [float(loss[b, a, k]) * 0.8**k for a in range(A) for k in range(K) if mask[b, a, k]]
        rows.append(values)
    if normalise == Normalise.token:
        flat = [v for row in rows for v in row]
        return sum(flat) / len(flat)
    means = [sum(row) / len(row) for row in rows if row]
    return sum(means) / len(means)


@pytest.mark.parametrize("normalise", list(Normalise))
def test_micro_batches_and_chunks_reduce_like_one_batch(normalise: Normalise) -> None:
    c, mask = comparison(), ragged(4, 0, 2)
    loss = torch.rand(B, A, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cfg = ObjectiveConfig(normalise=normalise, position_weights=PositionWeights.decay)
    total, count = 0.0, 0
    s = supervise(mask, normalise)
    chunks = [(slice(0, 1), slice(0, A)), (slice(1, B), slice(0, 2)), (slice(1, B), slice(2, A))]
    chunked = sum(float(weighted_sum(loss[part], c, s, part, cfg)) for part in chunks)  # of rows and anchors
    assert chunked / int(s.count) == pytest.approx(naive(loss, mask, normalise), rel=1e-6)
    for rows in (slice(0, 2), slice(2, 3)):  # two micro-batches
        s = supervise(mask[rows], normalise)
        for anchors in (slice(0, 3), slice(3, 4)):  # two chunks each
            total += float(weighted_sum(loss[rows, anchors], c, s, (slice(0, B), anchors), cfg))
        count += int(s.count)
    assert total / count == pytest.approx(naive(loss, mask, normalise), rel=1e-6)


def test_masked_positions_neither_count_nor_poison() -> None:
    c, mask = comparison(), ragged(4, 1, 0)
    loss = torch.ones(B, A, K, dtype=torch.float64)
    loss[~mask] = float("nan")
    s = supervise(mask, Normalise.token)
    cfg = ObjectiveConfig(position_weights=PositionWeights.uniform)
    assert float(weighted_sum(loss, c, s, (slice(0, B), slice(0, A)), cfg)) == int(mask.sum()) == int(s.count)
    assert int(supervise(mask, Normalise.sequence).count) == 2
