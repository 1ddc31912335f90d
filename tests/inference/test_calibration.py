"""inference/calibration.py against slow definitions."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from inference.calibration import auc, expected_calibration_error, fit_temperature


def case(seed: int, n: int = 300) -> tuple[Tensor, Tensor]:
    """Logits and analytic acceptances that have something to do with them."""
    g = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, generator=g)
    return z, (z / 3 + 0.5 * torch.randn(n, generator=g)).sigmoid()


@pytest.mark.parametrize("true", [0.3, 1.0, 2.5])
def test_the_temperature_of_logits_that_were_sharpened_is_found(true: float) -> None:
    z = 3 * torch.randn(4000, generator=torch.Generator().manual_seed(0))
    assert fit_temperature(z, (z / true).sigmoid()) == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_temperature_minimises_the_cross_entropy(seed: int) -> None:
    z, a = case(seed)
    found = fit_temperature(z, a)

    def loss(t: float) -> float:
        return float(binary_cross_entropy_with_logits(z.double() / t, a.double()))

    assert loss(found) <= min(loss(found * s) for s in (0.9, 0.99, 1.01, 1.1))
    assert 1.5 < found < 6


def test_temperatures_stay_in_their_range_and_nothing_leaves_them_at_one() -> None:
    one = torch.ones(5)
    assert fit_temperature(one, one) == pytest.approx(1 / 20) and fit_temperature(one, 0 * one) == pytest.approx(20)
    assert fit_temperature(one[:0], one[:0]) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_the_calibration_error_is_the_mean_gap_over_bins(seed: int) -> None:
    z, a = case(seed)
    c, expected = z.sigmoid(), 0.0
    for b in range(10):
        inside = (c >= b / 10) & (c < (b + 1) / 10)
        if inside.any():
            expected += float(inside.float().mean()) * abs(float(c[inside].mean() - a[inside].mean()))
    assert expected_calibration_error(c, a) == pytest.approx(expected, abs=1e-6)
    assert expected_calibration_error(c, c) == 0 and expected_calibration_error(c[:0], c[:0]) == 0
    assert expected_calibration_error(torch.ones(4), torch.zeros(4)) == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_auc_is_the_chance_to_rank_a_pair_rightly(seed: int) -> None:
    z, a = case(seed, 60)
    z = (z * 2).round()  # with ties
    above = (z[:, None] > z[None]).double() + 0.5 * (z[:, None] == z[None])
    pairs = a[:, None].double() * (1 - a[None].double())
    assert auc(z, a) == pytest.approx(float((above * pairs).sum() / pairs.sum()))
    hard = (a > 0.5).float()
    assert auc(a, hard) == 1.0 and auc(-a, hard) == 0.0
    assert auc(z, torch.ones(60)) == 0.5 == auc(0 * z, hard)
