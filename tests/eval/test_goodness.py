"""The G-test: right as often as it says, and it sees what it says it sees."""

import math

import numpy as np
import pytest

from eval.goodness import GTest, Transform


def test_g_test_accepts_true_probabilities_uniformly_often() -> None:
    rng, probs = np.random.default_rng(1), [0.5, 0.3, 0.15, 0.049, 0.001]
    rejected = 0
    for _ in range(400):
        test = GTest()
        for _ in range(3):
            test.add(rng.multinomial(500, probs).tolist(), probs)
        rejected += test.p_value < 0.05
    assert 6 <= rejected <= 40  # 20 expected


def test_g_test_rejects_wrong_probabilities() -> None:
    test = GTest()
    test.add([5400, 4600], [0.5, 0.5])
    assert test.p_value < 1e-10
    williams = 1 + (2 + 2 - 1) / (6 * 10000)  # 1 + (sum 1/p - 1) / (6 n (cells - 1))
    assert test.statistic == pytest.approx(2 * (5400 * math.log(1.08) + 4600 * math.log(0.92)) / williams)


def test_many_small_contexts_do_not_add_up_to_a_bias() -> None:
    rng, test = np.random.default_rng(4), GTest()
    for _ in range(3000):
        probs = rng.dirichlet([0.5] * 6)
        test.add(rng.multinomial(45, probs), probs)
    assert test.statistic == pytest.approx(test.dof, abs=3 * math.sqrt(2 * test.dof))


def test_the_smallest_bias_is_seen_as_often_as_it_says_and_a_smaller_one_is_not() -> None:
    rng, true = np.random.default_rng(5), np.array([0.25] * 4)
    test = GTest()
    for _ in range(20):
        test.add(rng.multinomial(1000, true), true)
    bias = test.smallest_bias(1e-3, 0.95)
    assert 0.02 < bias < 0.06

    def seen(total_variation: float) -> int:
        wrong, hits = true + total_variation / 2 * np.array([1, 1, -1, -1]), 0
        for _ in range(200):
            one = GTest()
            for _ in range(20):
                one.add(rng.multinomial(1000, wrong), true)
            hits += one.p_value < 1e-3
        return hits

    assert 180 <= seen(bias) <= 199  # 190 expected
    assert seen(bias / 2) < 100
    assert test.power(bias, 1e-3) == pytest.approx(0.95) and test.power(bias / 2, 1e-3) < 0.5
    assert math.isnan(GTest().smallest_bias(1e-3, 0.95))
    assert math.isnan(GTest().power(0.1, 1e-3))


def test_rare_contexts_are_compared_together() -> None:
    rng = np.random.default_rng(6)

    def transformed(shift: float) -> GTest:
        rare, test = Transform(0), GTest()
        for _ in range(4000):
            probs = rng.dirichlet([0.3] * 8)
            likeliest = int(probs.argmax())
            drawn = likeliest if rng.random() < shift else int(rng.choice(8, p=probs))
            rare.add(drawn, 1, probs)
        rare.into(test)
        return test

    whole = transformed(0.0)
    assert whole.dof == Transform.BINS - 1 and whole.draws == 4000 and whole.p_value > 0.01
    assert transformed(0.1).p_value < 1e-4
    few, test = Transform(0), GTest()
    few.add(0, 14, np.array([0.5, 0.5]))
    few.into(test)
    assert test.dof == 1 and test.draws == 14
    impossible, test = Transform(0), GTest()
    impossible.add(1, 2, np.array([1.0, 0.0]))
    impossible.into(test)
    assert test.p_value == 0.0


def test_g_test_rejects_the_impossible_and_pools_the_rare() -> None:
    impossible = GTest()
    impossible.add([100, 1], [1.0, 0.0])
    assert impossible.p_value == 0.0
    rare = GTest()
    rare.add([97, 1, 1, 1], [0.97, 0.01, 0.01, 0.01])  # three cells expected once each join the large one
    assert rare.dof == 0 and rare.p_value == 1.0
    pooled = GTest()
    pooled.add([940, 20, 20, 20], [0.94, 0.02, 0.0399, 0.0001])
    assert pooled.dof == 2
