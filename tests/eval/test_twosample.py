"""Two samples of texts: as often different by chance as the level says, and different where they are."""

import numpy as np
import pytest
from scipy.stats import binom, chi2_contingency

from eval.twosample import Samples, homogeneity, two_sample

END = 9


def texts(rng: np.random.Generator, count: int, bias: float = 0.0, end: float = 0.1) -> list[list[int]]:
    """Texts of up to 12 tokens: each is the one before it with a chance of 0.4, or else drawn; `bias` of them are 0."""
    out = []
    for _ in range(count):
        text = [int(rng.integers(9))]
        while len(text) < 12 and text[-1] != END:
            token = text[-1] if rng.random() < 0.4 else int(rng.choice(9, p=np.arange(9, 0, -1) / 45))
            token = 0 if rng.random() < bias else token
            text.append(END if rng.random() < end else token)
        out.append(text)
    return out


def pairs(seed: int, count: int, **ours: float) -> Samples:
    rng = np.random.default_rng(seed)
    return [(texts(rng, count, **ours), texts(rng, count)) for _ in range(2)]


def test_equal_laws_are_called_different_as_seldom_as_the_level_says() -> None:
    found = [two_sample(pairs(seed, 50)) for seed in range(100)]
    high = binom.ppf(0.9995, 100, 0.05)
    for view in ("token_frequencies", "lengths"):
        assert 1 <= sum(one[view]["p_value"] < 0.05 for one in found) <= high, view
    places = [place["p_value"] for one in found for place in one["per_position"]]
    assert 0.02 < np.mean(np.array(places) < 0.05) < 0.08
    assert sum(one["p_value"] < 0.05 for one in found) <= high  # Bonferroni: no more often


@pytest.mark.parametrize("fault, view", [({"bias": 0.12}, "token_frequencies"), ({"end": 0.2}, "lengths")])
def test_a_bias_is_seen(fault: dict[str, float], view: str) -> None:
    found = two_sample(pairs(1, 600, **fault))
    assert found[view]["p_value"] < 1e-4 > found["p_value"]
    assert found["texts"] == 2400 and found["longest"] == 12


def test_the_stated_bias_is_seen_about_as_often_as_stated() -> None:
    """Texts of one token: the smallest bias at one position, laid on it, is mostly seen."""
    rng, probs, seen = np.random.default_rng(3), np.full(8, 1 / 8), 0
    for _ in range(40):
        plain = [[int(t)] for t in rng.choice(8, 2000, p=probs)]
        bias = two_sample([(plain, plain)])["smallest_bias"]
        moved = probs + np.where(np.arange(8) < 4, 2, -2) * bias / 8
        found = two_sample([([[int(t)] for t in rng.choice(8, 2000, p=moved)], plain)])
        seen += found["per_position"][0]["p_value"] < found["level"] / 3
    assert 0.02 < bias < 0.15 and seen >= 33  # 38 expected


def test_homogeneity_is_the_g_test_of_a_table() -> None:
    table = np.array([[60.0, 50, 90], [50.0, 70, 80]])
    g, dof = homogeneity(table)
    plain = chi2_contingency(table, lambda_="log-likelihood").statistic
    assert dof == 2 and plain * 0.98 < g < plain  # but for Williams' correction
    assert homogeneity(np.array([[40.0, 1], [41.0, 0]])) == (0.0, 0)  # a rare cell joins the other
