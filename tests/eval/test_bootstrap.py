"""Ratios, headlines and bootstrap intervals against normal theory."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from eval.bootstrap import bootstrap_difference, bootstrap_interval, bootstrap_quotient, headline, ratio


def test_headline_is_the_plain_mean_over_groups_of_summed_ratios() -> None:
    groups = {"a": [(3.0, 1.0), (1.0, 1.0)], "b": [(6.0, 2.0)], "empty": [(5.0, 0.0)]}
    assert ratio(groups["a"]) == 2.0
    assert headline(groups) == pytest.approx((2.0 + 3.0) / 2)
    assert math.isnan(headline({}))


def test_what_prompts_have_in_common_cancels_in_a_paired_difference() -> None:
    """Prompts differ by 1.0, the contenders by 0.1 on each prompt: the interval of the difference knows the latter."""
    rng = np.random.default_rng(5)
    base, more = rng.normal(2.0, 1.0, 60), 0.1 + rng.normal(0.0, 0.05, 60)
    ours = {"a": [(b + m, 1.0) for b, m in zip(base[:40], more[:40], strict=True)], "b": [(base[40] + more[40], 1.0)]}
    theirs = {"a": [(b, 1.0) for b in base[:40]], "b": [(base[40], 1.0)]}
    difference, (low, high) = bootstrap_difference(ours, theirs, 2000)
    assert difference == pytest.approx(headline(ours) - headline(theirs))
    assert low < difference < high and high - low < 0.05
    one, other = bootstrap_interval(ours, 2000), bootstrap_interval(theirs, 2000)
    assert one[0] < other[1]  # side by side they overlap


def test_a_paired_difference_leaves_out_what_either_lacks() -> None:
    ours, theirs = {"a": [(1.0, 1.0), (9.0, 1.0), (3.0, 1.0)]}, {"a": [(2.0, 1.0), (1.0, 0.0), (2.0, 1.0)]}
    assert bootstrap_difference(ours, theirs, 100)[0] == pytest.approx(0.0)
    difference, bounds = bootstrap_difference({"a": [(1.0, 0.0)]}, {"a": [(1.0, 1.0)]}, 100)
    assert math.isnan(difference) and all(map(math.isnan, bounds))


def test_bootstrap_interval_of_a_mean_matches_the_normal_theory() -> None:
    values = np.random.default_rng(0).normal(2.0, 1.0, 400)
    low, high = bootstrap_interval({"g": [(v, 1.0) for v in values]}, 4000)
    half = norm.ppf(0.975) * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.02)
    assert high == pytest.approx(values.mean() + half, abs=0.02)


def test_bootstrap_is_deterministic_and_needs_data() -> None:
    groups = {"a": [(1.0, 1.0), (2.0, 1.0)], "b": [(4.0, 2.0), (9.0, 3.0)]}
    assert bootstrap_interval(groups, 200, 3) == bootstrap_interval(groups, 200, 3)
    assert all(math.isnan(bound) for bound in bootstrap_interval({"a": [(1.0, 0.0)]}, 100))


def test_one_prompt_has_no_interval_and_groups_of_one_share_theirs() -> None:
    assert all(math.isnan(bound) for bound in bootstrap_interval({"a": [(1.0, 1.0)]}, 100))
    low, high = bootstrap_interval({str(i): [(float(i), 1.0)] for i in range(9)}, 2000)
    assert 1.5 < low < 3.0 and 5.0 < high < 6.5


def test_what_prompts_have_in_common_cancels_in_a_quotient() -> None:
    """Speed-ups differ by half from prompt to prompt, predictions are 10% above each: the interval is of the noise."""
    rng = np.random.default_rng(6)
    true = [(float(x), 1.0) for x in rng.uniform(1.0, 2.0, 40)]
    told = [(1.1 * x * float(rng.normal(1.0, 0.01)), 1.0) for x, _ in true]
    low, high = bootstrap_quotient(told, true, 2000)
    assert low < ratio(told) / ratio(true) < high and high - low < 0.01
    apart = bootstrap_interval({"": true}, 2000)
    assert apart[1] - apart[0] > 0.15
    lacking = [*told, (3.0, 1.0), (0.0, 0.0)], [*true, (0.0, 1.0), (1.0, 1.0)]
    assert bootstrap_quotient(*lacking, 2000) == (low, high)
    assert all(map(math.isnan, bootstrap_quotient(told[:1], true[:1], 100)))
