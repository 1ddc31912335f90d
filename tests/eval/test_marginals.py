"""Token frequencies and lengths added up over contexts: level and power against known laws."""

from collections import Counter

import numpy as np
import pytest
from scipy.stats import binom

from eval.marginals import END, TAIL, Marginals, wald

VOCAB, ENDS = 40, (39,)


def drawn(seed: int, shift: float = 0.0, end: float = 0.0, contexts: int = 60, each: int = 30) -> Marginals:
    """Draws after many contexts with laws of their own; a share `shift` of them is token 3 instead, and `end` of them
    the end."""
    rng, sums = np.random.default_rng(seed), Marginals(VOCAB, [3, 5, 7, 11, 39], ENDS)
    for context in range(contexts):
        probs = rng.dirichlet(np.full(VOCAB, 0.3))
        tokens = rng.choice(VOCAB, each, p=probs)
        tokens = np.where(rng.random(each) < shift, 3, tokens)
        tokens = np.where(rng.random(each) < end, 39, tokens)
        sums.add(context % 3, Counter(tokens.tolist()), probs)
    return sums


def test_ids_that_end_and_frequent_ones_have_buckets() -> None:
    sums = Marginals(VOCAB, [3, 5, 3, 39], ENDS)
    assert (sums.bucket[39], sums.bucket[3], sums.bucket[5], sums.bucket[0]) == (END, 2, 3, TAIL) and sums.size == 4


def test_p_values_keep_their_level() -> None:
    runs = [drawn(seed) for seed in range(200)]
    high = binom.ppf(0.9995, 200, 0.05)
    assert 1 <= sum(run.token_frequencies()["p_value"] < 0.05 for run in runs) <= high
    assert 1 <= sum(run.lengths()["p_value"] < 0.05 for run in runs) <= high
    assert runs[0].lengths()["dof"] == 3 and runs[0].lengths()["ended"] > 0


def test_a_small_bias_shared_by_all_contexts_is_seen() -> None:
    biased = [drawn(seed, shift=0.04) for seed in range(5)]
    assert all(run.token_frequencies()["p_value"] < 1e-4 for run in biased)
    long = [drawn(seed, end=0.04) for seed in range(5)]
    assert all(run.lengths()["p_value"] < 1e-4 for run in long)


def test_what_hardly_varies_is_not_tested() -> None:
    """An outcome of chance 1e-4 that came once in 200 draws would count as sixteen standard deviations."""
    sums, probs = Marginals(VOCAB, [3], ENDS), np.zeros(VOCAB)
    probs[[0, 3]] = 1 - 1e-4, 1e-4
    sums.add(0, {0: 199, 3: 1}, probs)
    assert sums.token_frequencies() == {"p_value": 1.0, "dof": 0}
    assert sums.lengths() == {"p_value": 1.0, "dof": 0, "ended": 0}
    assert Marginals(VOCAB, [], ENDS).token_frequencies()["p_value"] == 1.0


def test_wald_is_chi_squared_with_the_rank() -> None:
    found = wald(np.array([10.0, -10.0, 0.0]), np.array([[100.0, -100, 0], [-100, 100, 0], [0, 0, 0]]))
    assert found["dof"] == 1 and found["p_value"] == pytest.approx(0.3173, abs=1e-4)  # one standard deviation
