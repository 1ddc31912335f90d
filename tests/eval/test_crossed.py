"""Intervals over seeds and prompts against known answers."""

import math

import numpy as np
import pytest

from eval.crossed import draws_of, interval, mean

RNG = np.random.default_rng(3)


def runs(prompts: np.ndarray, seeds: np.ndarray) -> list[dict[str, list[tuple[float, float]]]]:
    """A run for each seed: every prompt's value plus the seed's."""
    return [{"a": [(p + s, 1.0) for p in prompts]} for s in seeds]


def test_the_interval_knows_the_spread_of_prompts_and_of_seeds() -> None:
    prompts, seeds = RNG.normal(2.0, 1.0, 200), RNG.normal(0.0, 1.0, 40)
    low, high = interval(draws_of(runs(prompts, seeds), 4000, 0))
    expected = math.sqrt(prompts.var() / 200 + seeds.var() / 40)
    assert (high - low) / (2 * 1.96) == pytest.approx(expected, rel=0.1)
    assert low < mean(runs(prompts, seeds)) < high
    one = interval(draws_of(runs(prompts, np.zeros(1)), 4000, 0))
    assert (one[1] - one[0]) / (2 * 1.96) == pytest.approx(prompts.std() / math.sqrt(200), rel=0.1)


def test_two_contenders_are_resampled_alike() -> None:
    prompts, seeds = RNG.normal(2.0, 1.0, 50), RNG.normal(0.0, 1.0, 3)
    ours, theirs = draws_of(runs(prompts + 0.1, seeds), 500, 7), draws_of(runs(prompts, seeds), 500, 7)
    assert ours - theirs == pytest.approx(0.1)
    assert interval(ours)[0] < interval(theirs)[1]  # side by side they overlap


def test_without_figures_there_is_no_interval() -> None:
    assert math.isnan(mean([])) and len(draws_of([], 10, 0)) == 0
    assert len(draws_of([{"a": [(1.0, 1.0)]}], 10, 0)) == 0 and all(map(math.isnan, interval(draws_of([], 10, 0))))
